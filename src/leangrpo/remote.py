"""A reward on a server: pictures go there as JSON with PNG, and only numbers are believed.

    POST {"images": [PNG in base64, ...], "prompts": [...], "metadata": [...]}
    200  {"scores": [number or null, ...]}      null: no score, as NaN is elsewhere
    4xx, 5xx  {"error": text}                   429 and 5xx are tried again

`wire` has the form of what is sent, `serve` answers it, and so may any other server. Imports torch
only when it is called, as settings are checked without it.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection, IncompleteRead
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import SplitResult, urlsplit

from .errors import LeanError, RewardError, UnavailableError, problem

if TYPE_CHECKING:
    from torch import Tensor

TOKEN = "LEANGRPO_TOKEN"
"""The environment variable whose value a client sends and a server asks for."""

CHECK_S = 10.0
"""Seconds a server has to say that it is there."""


def is_url(name: str) -> bool:
    """Whether a reward's name is the URL of a server."""
    return "://" in name


def check_url(setting: str, url: str) -> SplitResult:
    """The parts of a server's URL; raises LeanError in the words of `setting` for any other."""
    remedy = "A server's URL is like http://127.0.0.1:8000."
    try:
        parts = urlsplit(url)
        _ = parts.port  # out of range or no number
    except ValueError as error:
        raise problem(setting, url, f"it is no URL: {error}", remedy) from error
    if parts.scheme not in ("http", "https"):
        raise problem(setting, url, "a reward's server is asked by http or https", remedy)
    if not parts.hostname or not url.isascii() or not url.isprintable() or " " in url:
        raise problem(setting, url, "it names no host, or holds what no URL does", remedy)
    if parts.username is not None or parts.fragment:
        rule = "it holds a password or a fragment, and neither is sent"
        raise problem(setting, url, rule, f"A token goes into the environment, as {TOKEN}.")
    return parts


def token() -> str | None:
    """The token in the environment; raises LeanError for one that no header can hold."""
    found = os.environ.get(TOKEN) or None
    if found and (not found.isascii() or not found.isprintable() or " " in found):
        raise LeanError(f"{TOKEN} holds spaces or other than ASCII characters. Take another token.")
    return found


class RemoteReward:
    """A server as a reward; `timeout` is how many seconds it may be silent before a call gives up.

    Redirects and proxies are not followed: the token goes to no other host.
    """

    def __init__(self, url: str, timeout: float | None = None) -> None:
        self.url, self.timeout = url, timeout
        self._parts = check_url("rewards", url)
        self._token = token()

    def check(self) -> None:
        """Ask the server whether it is there; raises LeanError if none answers, or refuses."""
        try:
            status, _ = self.ask("GET", None, CHECK_S, 1 << 16)
        except RewardError as error:
            remedy = "Start it: leangrpo serve-reward NAME, with the host and the port of this URL."
            raise problem("rewards", self.url, f"no server answers ({error})", remedy) from error
        if status in (401, 403):
            rule = f"its server refuses the token (HTTP {status})"
            remedy = f"Set {TOKEN} in the environment to the server's."
            raise problem("rewards", self.url, rule, remedy)

    def __call__(
        self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]
    ) -> list[float]:
        """The server's scores, NaN for null; pictures are sent in 8 bits.

        Raises UnavailableError where another try may succeed, RewardError for any other failure.
        """
        from .wire import encode

        body = encode(images, prompts, metadata)
        limit = (1 << 16) + 64 * len(prompts)  # a number is at most some 25 characters
        status, answer = self.ask("POST", body, self.timeout, limit)
        if status == 429 or status >= 500:
            raise UnavailableError(f"the server answered HTTP {status}{_said(answer)}")
        if status in (401, 403):
            raise RewardError(f"the server refuses the token in {TOKEN} (HTTP {status}).")
        if status != 200:
            raise RewardError(f"the server answered HTTP {status}{_said(answer)}")
        return _scores(answer)

    def ask(
        self, method: str, body: bytes | None, timeout: float | None, limit: int
    ) -> tuple[int, bytes]:
        """The status and the body of an answer of at most `limit` bytes."""
        parts = self._parts
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=timeout)
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        try:
            with suppress(BrokenPipeError):  # what refuses a long body may have answered already
                connection.request(method, path, body, headers)
            with connection.getresponse() as response:
                answer = response.read(limit + 1)
        except (OSError, IncompleteRead) as error:
            raise UnavailableError(f"{type(error).__name__}: {error}") from error
        except HTTPException as error:
            raise RewardError(f"what answered speaks no HTTP: {error!r}") from error
        finally:
            connection.close()
        if len(answer) > limit:
            raise RewardError(f"the server's answer is longer than {limit} bytes.")
        if response.length:  # what is left of its Content-Length: `read` says nothing of it
            raise UnavailableError("the server's answer broke off")
        return response.status, answer


def _scores(answer: bytes) -> list[float]:
    """The scores in an answer, NaN for null."""
    try:
        found = json.loads(answer, parse_int=float, parse_constant=_no_number)
        scores = found["scores"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        rule = 'the server\'s answer is no JSON of the form {"scores": [...]}'
        raise RewardError(f"{rule}: {_start(answer)}") from error
    if not isinstance(scores, list) or not all(
        x is None or (isinstance(x, float) and math.isfinite(x)) for x in scores
    ):
        rule = "the server's scores are no list of finite numbers and nulls"
        raise RewardError(f"{rule}: {_start(answer)}")
    return [math.nan if x is None else x for x in scores]


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def _said(answer: bytes) -> str:
    """What an answer gives as its error, or how it begins."""
    try:
        text = json.loads(answer)["error"]
    except (ValueError, TypeError, KeyError, RecursionError):
        text = None
    if isinstance(text, str):
        return f": {' '.join(text.split())[:500]}"
    return f": {_start(answer)}" if answer else ""


def _start(answer: bytes) -> str:
    return repr(answer[:80].decode("utf-8", "replace"))
