"""A reward on a server: what is sent, what is believed, and a run whose server hangs."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from leangrpo.checks import check
from leangrpo.config import load_config
from leangrpo.errors import LeanError, RewardError, UnavailableError
from leangrpo.remote import RemoteReward, check_url
from leangrpo.report import read_run
from leangrpo.rewards import load_reward
from leangrpo.scoring import Scorer
from leangrpo.settings import Scoring
from leangrpo.train import train
from leangrpo.wire import decode

FAST = Scoring(retries=2, backoff=0.01, timeout=0.3)


def brightness(images: Any) -> list[float]:
    return images.double().mean((1, 2, 3)).tolist()  # type: ignore[no-any-return]


class Fake(ThreadingHTTPServer):
    """Answers POSTs by `moods`, one after another, then always with brightness."""

    daemon_threads = True

    def __init__(self) -> None:
        self.moods: list[Callable[[Any, bytes], None]] = []
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.get_status = 200
        self.released = threading.Event()
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Fake

    def do_GET(self) -> None:
        self.reply(self.server.get_status, b"{}")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((dict(self.headers), body))
        if self.server.moods:
            self.server.moods.pop(0)(self, body)
        else:
            scores = brightness(decode(body)[0])
            self.reply(200, json.dumps({"scores": scores}).encode())

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


def answer(status: int, text: str) -> Callable[[Any, bytes], None]:
    return lambda handler, body: handler.reply(status, text.encode())


def hang(handler: Any, body: bytes) -> None:
    """Until the test is over."""
    handler.server.released.wait(60)


def hang_up(handler: Any, body: bytes) -> None:
    """Close the connection without a word."""


def half(handler: Any, body: bytes) -> None:
    handler.reply(200, b'{"scores"', {"Content-Length": "1000"})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    monkeypatch.delenv("LEANGRPO_TOKEN", raising=False)
    fake = Fake()
    thread = threading.Thread(target=fake.serve_forever, args=(0.02,))
    thread.start()
    yield fake
    fake.released.set()
    fake.shutdown()
    fake.server_close()
    thread.join()


def eighths(*shape: int) -> torch.Tensor:
    """Pictures that 8 bits hold without loss."""
    return torch.randint(0, 256, shape).float() / 255


# -- what is sent and believed ---------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 1, 4, 4), (2, 4, 4, 4), (2, 3, 3, 4, 5)])
def test_pictures_arrive_as_they_are(shape: tuple[int, ...], server: Fake) -> None:
    images, prompts = eighths(*shape), [f"ä {n}" for n in range(shape[0])]
    about = [{"n": n, "text": "47"} for n in range(shape[0])]
    server.moods = [answer(200, json.dumps({"scores": [0.5] * shape[0]}))]
    assert load_reward(server.url)(images, prompts, about) == [0.5] * shape[0]
    ((headers, body),) = server.requests
    assert headers["Content-Type"] == "application/json"
    assert "Authorization" not in headers
    found, words, metadata = decode(body)
    assert torch.equal(found, images)
    assert (words, metadata) == (prompts, about)


def test_scores_are_those_of_the_pictures_in_order(server: Fake) -> None:
    images = eighths(6, 3, 4, 4)
    scoring = Scoring(workers=3)
    with Scorer([(server.url, 2.0)], scoring=scoring) as scorer:
        futures = [scorer.submit(images[i : i + 1], ["a"]) for i in range(6)]
        found = [future.result().total.item() for future in futures]
    assert found == [2 * x for x in brightness(images)]


def test_the_token_is_shown(server: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEANGRPO_TOKEN", "secret")
    load_reward(server.url)(eighths(1, 3, 2, 2), ["a"], [{}])
    assert server.requests[0][0]["Authorization"] == "Bearer secret"
    for bad in ("two words", "ü", "a\nb"):
        monkeypatch.setenv("LEANGRPO_TOKEN", bad)
        with pytest.raises(LeanError, match="LEANGRPO_TOKEN holds spaces or other than ASCII"):
            load_reward(server.url)


def test_null_is_no_score(server: Fake) -> None:
    server.moods = [answer(200, '{"scores": [1, null]}')] * 2
    with Scorer([(server.url, 1.0)], on_bad="exclude", scoring=FAST) as scorer:
        scores = scorer(eighths(2, 3, 2, 2), ["a", "b"])
    assert scores.excluded == 1 and scores.total[0] == 1 and math.isnan(scores.total[1])
    with (
        Scorer([(server.url, 1.0)], scoring=FAST) as scorer,
        pytest.raises(RewardError, match=r"gave NaN or infinite scores: 1 of 2, .* prompt 'b'"),
    ):
        scorer(eighths(2, 3, 2, 2), ["a", "b"])


@pytest.mark.parametrize(
    "mood", [hang, hang_up, half, answer(500, ""), answer(503, "busy"), answer(429, "slowly")]
)
def test_what_may_pass_is_tried_again(mood: Any, server: Fake) -> None:
    images = eighths(2, 3, 2, 2)
    server.moods = [mood, mood]
    with Scorer([(server.url, 1.0)], scoring=FAST) as scorer:
        assert scorer(images, ["a", "b"]).total.tolist() == brightness(images)
    assert len(server.requests) == 3
    assert len({body for _, body in server.requests}) == 1


@pytest.mark.parametrize(
    ("mood", "text"),
    [
        (hang, r"the last time: no answer within 0\.3 s \(scoring\.timeout\)\. Mend it"),
        (hang_up, "the last time: RemoteDisconnected: "),
        (
            answer(503, '{"error": "no\\n memory"}'),
            r"the last time: the server answered HTTP 503: no memory\. Mend",
        ),
    ],
)
def test_the_last_failure_is_told(mood: Any, text: str, server: Fake) -> None:
    server.moods = [mood] * 3
    with (
        Scorer([(server.url, 1.0)], scoring=FAST) as scorer,
        pytest.raises(UnavailableError, match=f"reward `{server.url}` was tried 3 times.*{text}"),
    ):
        scorer(eighths(1, 3, 2, 2), ["a"])


@pytest.mark.parametrize(
    ("mood", "text"),
    [
        (answer(200, "<html>"), r"no JSON of the form .*: '<html>'"),
        (answer(200, "[1]"), "no JSON of the form"),
        (answer(200, "[" * 60000), "no JSON of the form"),
        (answer(200, '{"scores": [NaN]}'), "no JSON of the form"),
        (answer(200, '{"scores": {"a": 1}}'), "no list of finite numbers and nulls"),
        (answer(200, '{"scores": ["1"]}'), "no list of finite numbers and nulls"),
        (answer(200, '{"scores": [true]}'), "no list of finite numbers and nulls"),
        (answer(200, '{"scores": [1e999]}'), "no list of finite numbers and nulls"),
        (answer(200, '{"scores": [' + "9" * 5000 + "]}"), "no list of finite numbers and nulls"),
        (answer(200, '{"scores": [1, 2]}'), "returned 2 scores for 1 images"),
        (answer(200, " " * 70000), "the server's answer is longer than 65600 bytes"),
        (answer(422, '{"error": "a bug"}'), "the server answered HTTP 422: a bug"),
        (answer(404, "nothing"), "the server answered HTTP 404: 'nothing'"),
        (answer(401, ""), r"refuses the token in LEANGRPO_TOKEN \(HTTP 401\)"),
        (
            lambda handler, body: handler.reply(307, b"", {"Location": "http://elsewhere/"}),
            "the server answered HTTP 307",
        ),
        (lambda handler, body: handler.wfile.write(b"\x80\x04N.\r\n\r\n"), "speaks no HTTP"),
    ],
)
def test_garbage_is_refused_at_once(mood: Any, text: str, server: Fake) -> None:
    server.moods = [mood]
    with (
        Scorer([(server.url, 1.0)], scoring=FAST) as scorer,
        pytest.raises(RewardError, match=text) as caught,
    ):
        scorer(eighths(1, 3, 2, 2), ["a"])
    assert f"`{server.url}`" in str(caught.value) and "\n" not in str(caught.value)
    assert len(server.requests) == 1


def test_what_cannot_be_sent(server: Fake) -> None:
    reward = load_reward(server.url)
    with pytest.raises(RewardError, match="pictures have 2 channels"):
        reward(eighths(1, 2, 2, 2), ["a"], [{}])
    for value, why in ((object(), "it holds a object"), (math.nan, "not JSON compliant")):
        with pytest.raises(RewardError, match=f"cannot be sent to a server as JSON: .*{why}"):
            reward(eighths(1, 3, 2, 2), ["a"], [{"x": value}])
    assert server.requests == []


# -- before a model is loaded ----------------------------------------------------------------------


def test_a_dead_server_is_told_at_once(server: Fake) -> None:
    server.get_status = 405  # a server that is there, and only answers POST
    RemoteReward(server.url).check()
    server.get_status = 401
    with pytest.raises(LeanError, match="its server refuses the token"):
        Scorer([(server.url, 1.0)])
    nobody = Fake()
    nobody.server_close()
    with pytest.raises(LeanError) as caught:
        Scorer([(nobody.url, 1.0)])
    assert str(caught.value).startswith(f"`rewards` is '{nobody.url}': no server answers (Conn")
    assert "leangrpo serve-reward NAME" in str(caught.value)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("ftp://host/", "asked by http or https"),
        ("http://", "names no host"),
        ("http:///path", "names no host"),
        ("http://host:99999", "it is no URL"),
        ("http://host:x", "it is no URL"),
        ("http://a b/", "names no host, or holds"),
        ("http://höst/", "names no host, or holds"),
        ("http://me:secret@host/", "a password or a fragment"),
        ("http://host/#part", "a password or a fragment"),
    ],
)
def test_urls_are_checked_with_the_settings(url: str, text: str) -> None:
    config = load_config("embedded", [f"rewards=[{{name: {json.dumps(url)}}}]"])
    with pytest.raises(LeanError, match=f"`rewards.0.name` is .*{text}"):
        check(config, files=False)


def test_a_good_url_is_not_asked_by_the_check() -> None:
    url = "https://[::1]:1/score?model=a"
    assert check_url("rewards", url).port == 1
    check(load_config("embedded", [f"rewards=[{{name: {json.dumps(url)}}}]"]), files=False)


def test_ranks_must_be_able_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    scoring = "scoring={timeout: 200, retries: 2, backoff: 1}"
    check(load_config("embedded", [scoring]), files=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LeanError, match=r"`parallel.timeout` is 600.0: a reward may take 603 s"):
        check(load_config("embedded", [scoring]), files=False)
    check(load_config("embedded", [scoring, "parallel.timeout=603"]), files=False)


# -- a run -----------------------------------------------------------------------------------------


def test_a_server_hangs_in_a_run(
    server: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is lost: the run ends, its last update is saved, and resumed it is the same run."""
    tiny.save(tiny.tiny_sd3(), tmp_path / "sd3")
    (tmp_path / "prompts.txt").write_text("a cat\na dog\na cup\n", encoding="utf-8")

    def config(run: str) -> Any:
        overrides = (
            "rollout={prompts: 2, generations: 2, micro_batch: 1}",
            "sampling={steps: 3, height: 16, width: 16, call: {max_sequence_length: 16}}",
            "selection={rule: fraction, fraction: 1.0, steps: null}",
            "evaluation.rewards=[]",
            "checkpoint.every=9",
            "updates=4",
            f"model.pipeline={tmp_path / 'sd3'}",
            f"prompts={{train: {tmp_path / 'prompts.txt'}, heldout: null}}",
            f"rewards=[{{name: '{server.url}'}}]",
            "optimizer.lr=1e-3",
            "scoring={timeout: 1.0, retries: 1, backoff: 0.01}",
            f"run.dir={tmp_path / run}",
        )
        return load_config("embedded", list(overrides))

    train(config("other"), quiet=True)
    assert len(server.requests) == 16
    counted = 0

    def then_hang(handler: Any, body: bytes) -> None:
        nonlocal counted
        counted += 1
        if counted > 9:  # four an update: the second of the third
            hang(handler, body)
        else:
            scores = brightness(decode(body)[0])
            handler.reply(200, json.dumps({"scores": scores}).encode())

    server.moods = [then_hang] * 100
    with pytest.raises(RewardError, match=f"`{server.url}` was tried 2 times .* --resume"):
        train(config("run"), quiet=True)
    assert "2 updates are saved in" in capsys.readouterr().out
    assert (tmp_path / "run" / "checkpoints" / "000002" / "state.json").is_file()
    server.moods = []
    train(config("run"), resume=True, quiet=True)
    one, other = read_run(tmp_path / "run"), read_run(tmp_path / "other")
    assert one.summary is not None and other.summary is not None
    assert one.summary["weights_sha256"] == other.summary["weights_sha256"]
    for mine, theirs in zip(one.metrics, other.metrics, strict=True):
        own = {"time": 0, "memory": 0, "reward_seconds": 0}
        assert {**mine, **own} == {**theirs, **own}
