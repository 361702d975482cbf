"""Judges: against a server of the OpenAI form that looks at the pictures it is sent."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from leangrpo.errors import LeanError, RewardError, UnavailableError
from leangrpo.rewards import load_reward
from leangrpo.settings import Reward


class Handler(BaseHTTPRequestHandler):
    """Rates a picture by its brightness, and prefers the brighter of two."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        server.asked.append((self.path, body, self.headers.get("Authorization")))  # type: ignore[attr-defined]
        *shown, _ = body["messages"][0]["content"]
        bright = []
        for one in shown:
            data = one["image_url"]["url"].removeprefix("data:image/png;base64,")
            bright.append(np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))).mean() / 255)
        if server.say is not None:  # type: ignore[attr-defined]
            said = server.say  # type: ignore[attr-defined]
        elif len(bright) == 1:
            said = f"Final Score: 0 is too low.\nFinal Score: {5 * bright[0]:.3f}"
        else:
            said = f"I looked. Image {1 if bright[0] > bright[1] else 2} is better"
        answer = json.dumps({"choices": [{"message": {"content": said}}]}).encode()
        if server.raw is not None:  # type: ignore[attr-defined]
            answer = server.raw  # type: ignore[attr-defined]
        self.send_response(server.status)  # type: ignore[attr-defined]
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        made.asked, made.say, made.raw, made.status = [], None, None, 200  # type: ignore[attr-defined]
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def url(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_port}/v1"


def grey(*levels: float) -> torch.Tensor:
    return torch.tensor(levels).view(-1, 1, 1, 1).expand(-1, 3, 8, 8)


def test_a_judge_rates_each_picture(server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEANGRPO_TOKEN", "secret")
    judge = load_reward(Reward(name="judge", url=url(server), model="unified"))
    scores = judge(grey(0.2, 1.0), ["a fox", "a dog"], [{}, {}])
    assert scores == pytest.approx([0.2, 1.0], abs=1e-3)  # the answer has three places
    path, body, token = server.asked[0]
    assert (path, body["model"], body["temperature"]) == ("/v1/chat/completions", "unified", 0)
    assert token == "Bearer secret"
    said = {
        one["messages"][0]["content"][-1]["text"].split("Caption: ")[1]
        for _, one, _ in server.asked
    }
    assert said == {"a fox", "a dog"}
    video = grey(0.2, 0.4, 0.6, 0.8).view(2, 2, 3, 8, 8)
    assert judge(video, ["a", "b"], [{}, {}]) == pytest.approx([0.3, 0.7], abs=1e-3)


def test_own_template_and_pattern(server, tmp_path: Path) -> None:
    (tmp_path / "ask.txt").write_text("Is it {prompt}?", encoding="utf-8")
    server.say = "<Score>3</Score>"
    options = {"template": str(tmp_path / "ask.txt"), "pattern": "<Score>([0-9.]+)</Score>"}
    judge = load_reward(Reward(name="judge", url=url(server), model="m", **options))
    assert judge(grey(0.5), ["a {fox}"], [{}]) == [0.6]
    assert server.asked[0][1]["messages"][0]["content"][-1]["text"] == "Is it a {fox}?"
    server.say = "I cannot say"
    assert np.isnan(judge(grey(0.5), ["a"], [{}])[0])
    server.say = "<Score>...</Score>"
    assert np.isnan(judge(grey(0.5), ["a"], [{}])[0])


def test_preference_is_the_win_rate(server) -> None:
    reward = load_reward(Reward(name="preference", url=url(server), model="m"))
    levels = grey(0.4, 0.9, 0.1, 0.6)
    assert reward(levels, ["a"] * 4, [{}] * 4) == pytest.approx([1 / 3, 1, 0, 2 / 3])
    assert len(server.asked) == 6  # every pair once
    server.say = "Both are fine"
    assert np.isnan(reward(levels, ["a"] * 4, [{}] * 4)).all()
    with pytest.raises(RewardError, match="of one prompt, not of several"):
        reward(levels, ["a", "b", "a", "a"], [{}] * 4)


@pytest.mark.parametrize(
    ("status", "raw", "kind", "text"),
    [
        (503, None, UnavailableError, "answered HTTP 503"),
        (404, None, RewardError, "answered HTTP 404"),
        (200, b"{}", RewardError, "no chat completion"),
        (200, b"[" * 100_000, RewardError, "no chat completion"),
        (200, b"x" * (1 << 21), RewardError, "longer than"),
    ],
)
def test_answers_of_another_form(server, status, raw, kind, text) -> None:
    server.status, server.raw = status, raw
    judge = load_reward(Reward(name="judge", url=url(server), model="m"))
    with pytest.raises(kind, match=text):
        judge(grey(0.5), ["a"], [{}])


def test_a_judge_needs_its_server() -> None:
    with pytest.raises(LeanError, match="`rewards.url` is None: reward `judge` needs it"):
        load_reward("judge")
    judge = load_reward(Reward(name="judge", url="http://127.0.0.1:9/v1", model="m"))
    with pytest.raises(UnavailableError):
        judge(grey(0.5), ["a"], [{}])
