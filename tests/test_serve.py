"""The server of a reward: the same scores as here, and what it refuses."""

from __future__ import annotations

import base64
import io
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import leangrpo.wire as wire
from leangrpo.errors import LeanError, RewardError, UnavailableError
from leangrpo.remote import RemoteReward
from leangrpo.rewards import jpeg_compressibility
from leangrpo.scoring import Scorer
from leangrpo.serve import RewardServer, is_loopback
from leangrpo.settings import Scoring

# -- rewards, named `test_serve:...` ---------------------------------------------------------------


def odd(images: Any, prompts: list[str], metadata: list[Any]) -> list[float]:
    if prompts[0] == "raise":
        raise KeyError("weights")
    if prompts[0] == "connect":
        raise ConnectionRefusedError("upstream")
    return [float("nan"), 1.0][: len(prompts)]


def of_metadata(images: Any, prompts: list[str], metadata: list[Any]) -> list[float]:
    """How bright the metadata's picture is; it has to be one."""
    return [float(np.asarray(about["images"]["image"]).mean()) for about in metadata]


@contextmanager
def serving(name: str, **options: Any) -> Iterator[RewardServer]:
    with RewardServer(name, port=0, **options) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LEANGRPO_TOKEN", raising=False)


@pytest.fixture(scope="module")
def server() -> Iterator[RewardServer]:
    with serving("test_serve:odd", max_body=100_000) as server:
        yield server


def ask(
    server: RewardServer, body: bytes | str, method: str = "POST", **headers: str
) -> tuple[int, dict[str, Any]]:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    given = {"Content-Type": "application/json"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, "/", body, given)
    response = connection.getresponse()
    tree = json.loads(response.read())
    connection.close()
    return response.status, tree


def png(*size: int, mode: str = "RGB") -> str:
    file = io.BytesIO()
    Image.new(mode, size or (2, 2)).save(file, format="PNG")
    return base64.b64encode(file.getvalue()).decode()


def body(**changed: Any) -> str:
    tree = {"images": [png()], "prompts": ["a"], "metadata": [{}]} | changed
    return json.dumps({k: v for k, v in tree.items() if v is not ...})


# -- what it answers -------------------------------------------------------------------------------


def test_the_same_scores_as_here() -> None:
    images = torch.randint(0, 256, (5, 3, 8, 8)).float() / 255
    video = torch.randint(0, 256, (2, 3, 3, 8, 8)).float() / 255
    with serving("jpeg_compressibility", workers=2) as server:
        assert ask(server, b"", "GET") == (200, {"reward": "jpeg_compressibility"})
        with Scorer([(server.url, 1.0)]) as scorer:
            for some in (images, video):
                prompts = ["a"] * len(some)
                expected = jpeg_compressibility(some, prompts, [{}] * len(some))
                assert scorer(some, prompts).total.tolist() == expected


def test_pictures_of_the_metadata_arrive() -> None:
    picture = Image.new("RGB", (3, 2), (30, 30, 30))
    with serving("test_serve:of_metadata") as server:
        about = [{"images": {"image": picture}}]
        assert RemoteReward(server.url)(torch.zeros(1, 3, 2, 2), ["a"], about) == [30.0]


def test_what_a_reward_does(server: RewardServer) -> None:
    two = body(images=[png()] * 2, prompts=["a", "b"], metadata=[{}] * 2)
    assert ask(server, two) == (200, {"scores": [None, 1.0]})
    status, tree = ask(server, body(prompts=["raise"]))
    assert status == 422
    assert tree["error"].startswith("reward `test_serve:odd` raised KeyError: 'weights' (test_s")
    status, tree = ask(server, body(prompts=["connect"]))
    assert status == 503 and "ConnectionRefusedError: upstream" in tree["error"]
    reward = RemoteReward(server.url)
    with pytest.raises(RewardError, match=r"HTTP 422: reward `test_serve:odd` raised KeyError"):
        reward(torch.zeros(1, 3, 2, 2), ["raise"], [{}])
    with pytest.raises(UnavailableError, match="HTTP 503: "):
        reward(torch.zeros(1, 3, 2, 2), ["connect"], [{}])


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        ("{", "no JSON object of images"),
        ("[]", "no JSON object of images"),
        ("[" * 90000, "no JSON object of images"),
        (body(metadata=...), "no JSON object of images"),
        (body(images="a"), "must be lists"),
        (body(images=[]), "there are 0 images, 1 prompts and 1 metadata"),
        (body(images=[], prompts=[], metadata=[]), "there are 0 images"),
        (body(prompts=["a", "b"]), "there are 1 images, 2 prompts"),
        (body(prompts=[1]), "a prompt is no string"),
        (body(metadata=[1]), "metadata is no object"),
        (body(images=["%%%"]), "no PNG in base64"),
        (body(images=[1]), "no PNG in base64"),
        (body(images=[{}]), "no PNG in base64"),
        (body(images=[base64.b64encode(b"GIF89a...").decode()]), "no PNG in base64"),
        (body(images=[png()[:60]]), "no PNG in base64"),
        (body(images=[png(mode="I;16")]), "a PNG has mode I;16, and 8-bit"),
        (body(images=[[]]), "not all of one shape"),
        (
            body(images=[png(2, 2), png(2, 3)], prompts=["a"] * 2, metadata=[{}] * 2),
            "not all of one shape",
        ),
        (body(metadata=[{"image": {"image/png": "%"}}]), "no PNG in base64"),
    ],
)
def test_bad_requests(sent: str, text: str, server: RewardServer) -> None:
    status, tree = ask(server, sent)
    assert status == 400
    assert text in tree["error"]
    assert ask(server, body()) == (200, {"scores": [None]})  # and it goes on


def test_small_files_of_many_pixels(server: RewardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_PIXELS", 1000)
    many = body(images=[png(20, 20)] * 3, prompts=["a"] * 3, metadata=[{}] * 3)
    assert ask(server, many) == (400, {"error": "there are more than 1000 pixels"})
    two = body(images=[png(20, 20)] * 2, prompts=["a"] * 2, metadata=[{}] * 2)
    assert ask(server, two)[0] == 200


def test_what_is_refused_unread(server: RewardServer) -> None:
    assert ask(server, body(), Content_Type="text/plain")[0] == 415
    assert ask(server, body(), Content_Length="many")[0] == 411
    status, tree = ask(server, b" " * 5_000_000)
    assert (status, tree["error"]) == (413, "5000000 bytes are more than the 100000 taken at once")


def test_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving("test_serve:odd", token="secret") as server:
        for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "secret"}):
            assert ask(server, body(), **headers)[0] == 401
            assert ask(server, b"", "GET", **headers)[0] == 401
        assert ask(server, body(), Authorization="Bearer secret")[0] == 200
        with pytest.raises(LeanError, match="its server refuses the token"):
            Scorer([(server.url, 1.0)])
        monkeypatch.setenv("LEANGRPO_TOKEN", "secret")
        with Scorer([(server.url, 1.0)], scoring=Scoring(retries=0), on_bad="exclude") as scorer:
            assert scorer(torch.zeros(1, 3, 2, 2), ["a"]).excluded == 1


def test_only_this_machine_without_a_token() -> None:
    hosts = ("127.0.0.1", "127.1.2.3", "::1", "localhost", "0.0.0.0", "::", "10.0.0.1", "example")
    assert [is_loopback(host) for host in hosts] == [True] * 4 + [False] * 4
    with pytest.raises(LeanError, match=r"`--host` is '0\.0\.0\.0': other machines reach it"):
        RewardServer("jpeg_compressibility", "0.0.0.0", 0)


def test_a_port_in_use(server: RewardServer) -> None:
    with pytest.raises(LeanError, match=r"`--port` is \d+: 127\.0\.0\.1 cannot be listened on"):
        RewardServer("jpeg_compressibility", port=server.server_port)
    with pytest.raises(LeanError, match="no reward has this name"):
        RewardServer("nothing", port=0)


# -- the command -----------------------------------------------------------------------------------


def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "leangrpo", "serve-reward", "jpeg_compressibility", "--port=0"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        found = re.fullmatch(
            r"`jpeg_compressibility` is served at (http://127\.0\.0\.1:\d+)\n",
            process.stdout.readline(),
        )
        assert found is not None
        images = torch.full((1, 3, 8, 8), 1.0)
        scores = RemoteReward(found[1])(images, ["a"], [{}])
        assert scores == jpeg_compressibility(images, ["a"], [{}])
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stderr is not None and "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.communicate()
