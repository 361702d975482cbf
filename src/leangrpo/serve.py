"""A reward behind HTTP: the server that `remote` is the client of, for a machine of its own.

A request is untrusted: its length, its pictures' size and its form are checked, its pictures are
read as PNG and nothing else, and nothing in it is executed.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import math
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

from .crew import name_of
from .errors import LeanError, RewardError, UnavailableError, problem
from .remote import TOKEN
from .scoring import Scorer
from .settings import Reward as Settings
from .settings import Scoring
from .wire import WireError, decode
from .workers import GRACE_S

MAX_BODY = 1 << 28
"""Bytes of a request: more than 100 pictures of 1024 x 1024 pixels."""

SILENCE_S = 60.0
"""Seconds after which a client that sends nothing is left."""


class RewardServer(ThreadingHTTPServer):
    """Serves one reward; `port` 0 takes a free one. Not loopback, it needs a token.

    Raises LeanError for a reward that cannot be loaded and an address that cannot be had.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        reward: str | Settings,
        host: str = "127.0.0.1",
        port: int = 8000,
        *,
        token: str | None = None,
        workers: int = 1,
        max_body: int = MAX_BODY,
    ) -> None:
        if not token and not is_loopback(host):
            rule = "other machines reach it, and there is no token for them to show"
            remedy = f"Set {TOKEN} in the environment, here and where the trainer runs."
            raise problem("--host", host, rule, remedy)
        self.name, self.token, self.max_body = name_of(reward), token, max_body
        self._busy: set[threading.Thread] = set()
        self.scorer = Scorer(
            [(reward, 1.0)], on_bad="exclude", scoring=Scoring(workers=workers, retries=0)
        )
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            self.scorer.close(wait=False)
            said = getattr(error, "strerror", None) or str(error)
            raise problem("--port", port, f"{host} cannot be listened on: {said}") from error

    def server_bind(self) -> None:
        """Bind without HTTPServer's look-up of the host's full name, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    @property
    def url(self) -> str:
        """What a trainer on this machine calls the reward."""
        host = str(self.server_name)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}"

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a request; who does is known while it lasts."""
        self._busy.add(threading.current_thread())
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._busy.discard(threading.current_thread())

    def server_close(self) -> None:
        """Give up the address and the workers; answers underway tell their clients."""
        super().server_close()
        self.scorer.close(wait=False)
        until = time.monotonic() + GRACE_S
        for thread in list(self._busy):
            thread.join(max(0.0, until - time.monotonic()))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Refusal(Exception):
    """What is wrong with a request, and the status that says so."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    timeout = SILENCE_S
    server_version, sys_version = "leangrpo", ""

    def do_GET(self) -> None:
        self._answer(lambda: {"reward": self._server.name})

    def do_POST(self) -> None:
        self._answer(self._score)

    @property
    def _server(self) -> RewardServer:
        return cast(RewardServer, self.server)

    def _score(self) -> dict[str, Any]:
        if self.headers.get_content_type() != "application/json":
            # It also keeps out what any web page could make this machine's browser send.
            text = "the Content-Type must be application/json"
            raise _Refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, text)
        length = self._length()
        if length is None:
            raise _Refusal(HTTPStatus.LENGTH_REQUIRED, "a Content-Length is needed")
        if length > self._server.max_body:
            text = f"{length} bytes are more than the {self._server.max_body} taken at once"
            raise _Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)
        body, self._unread = self.rfile.read(length), 0
        scores = self._server.scorer(*decode(body)).total.tolist()
        return {"scores": [None if math.isnan(x) else x for x in scores]}

    def _length(self) -> int | None:
        text = self.headers.get("Content-Length", "")
        return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None

    def _answer(self, make: Callable[[], dict[str, Any]]) -> None:
        self._unread = self._length() or 0
        try:
            self._authorise()
            status, tree = HTTPStatus.OK, make()
        except _Refusal as error:
            status, tree = error.status, {"error": str(error)}
        except WireError as error:
            status, tree = HTTPStatus.BAD_REQUEST, {"error": str(error)}
        except UnavailableError as error:
            status, tree = HTTPStatus.SERVICE_UNAVAILABLE, {"error": str(error)}
        except RewardError as error:
            status, tree = HTTPStatus.UNPROCESSABLE_ENTITY, {"error": str(error)}
        except OSError:  # the client has gone or is silent
            self.close_connection = True
            return
        body = json.dumps(tree).encode()
        with suppress(OSError):
            self._drain()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def _authorise(self) -> None:
        token = self._server.token
        if not token:
            return
        given = self.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode("latin-1", "replace"), f"Bearer {token}".encode()):
            raise _Refusal(HTTPStatus.UNAUTHORIZED, "the token is missing or another one")

    def _drain(self) -> None:
        """Read what is refused: a connection closed before that may lose the answer."""
        left = min(self._unread, MAX_BODY)
        while left > 0 and (some := self.rfile.read(min(left, 1 << 16))):
            left -= len(some)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        if code != HTTPStatus.OK:
            self.log_message('"%s" %s', self.requestline, getattr(code, "value", code))

    def log_message(self, format: str, *args: Any) -> None:
        text = (format % args).encode("ascii", "backslashreplace").decode()
        print(f"{self.client_address[0]}: {text}", file=sys.stderr, flush=True)


def serve(reward: str | Settings, host: str, port: int, *, token: str | None, workers: int) -> None:
    """Serve a reward until Ctrl-C, after saying where; errors as `RewardServer`."""
    try:
        server = RewardServer(reward, host, port, token=token, workers=workers)
    except UnicodeError as error:
        raise LeanError(f"--host {host}: it is no host.") from error
    with server:
        print(f"`{server.name}` is served at {server.url}", flush=True)
        server.serve_forever()
