"""Rewards that are slow, fail, hang or die: what is tried again, what is said, what goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

import pytest
import torch

from leangrpo.config import load_config
from leangrpo.crew import Crew
from leangrpo.errors import LeanError, RewardError, UnavailableError
from leangrpo.scoring import Scorer
from leangrpo.settings import Scoring
from leangrpo.setup import make_scorers

FAST = {"backoff": 0.01}
FOREVER = threading.Event()
"""What a hanging reward waits for; set at the end of each test, so that no thread is left."""


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    yield
    FOREVER.set()
    FOREVER.clear()


def blank(count: int) -> torch.Tensor:
    return torch.full((count, 3, 4, 4), 0.5)


def brightness(images, prompts, metadata):
    return images.mean((1, 2, 3))


def hang() -> None:
    """Until the test is over; if it never were, the threads would show it."""
    FOREVER.wait(30)


class Moody:
    """As `brightness`; the calls of `bad` (from 1) do what `act` says instead."""

    def __init__(self, act: Any, bad: tuple[int, ...] = (1,)) -> None:
        self.calls, self.act, self.bad = 0, act, bad

    def __call__(self, images, prompts, metadata):
        self.calls += 1
        if self.calls in self.bad:
            self.act()
        return brightness(images, prompts, metadata)


def raising(error: BaseException) -> Any:
    def act() -> None:
        raise error

    return act


# -- threads ---------------------------------------------------------------------------------------


def test_a_hanging_call_is_given_up_and_tried_again() -> None:
    reward = Moody(hang, (1, 2))
    with Scorer([(reward, 2.0)], scoring=Scoring(timeout=0.1, **FAST)) as scorer:
        scores = scorer(blank(2), ["a", "b"])
        assert scores.total.tolist() == [1.0, 1.0]
        assert reward.calls == 3
        assert scores.latency["Moody"] >= 0.2 and scores.seconds >= scores.latency["Moody"]
        assert scorer(blank(1), ["a"]).total.tolist() == [1.0]


def test_the_last_failure_says_everything() -> None:
    reward = Moody(hang, (1, 2, 3))
    with (
        Scorer([(reward, 1.0)], scoring=Scoring(timeout=0.05, retries=2, **FAST)) as scorer,
        pytest.raises(RewardError) as caught,
    ):
        scorer(blank(4), ["a cat", "a cat", "a dog", "a hat"])
    seconds = float(str(caught.value).split(" in ")[1].split()[0])
    assert seconds >= 0.1
    assert str(caught.value) == (
        f"reward `Moody` was tried 3 times in {seconds} s for the prompts 'a cat', 'a dog' and 1 "
        "more; the last time: no answer within 0.05 s (scoring.timeout). Mend it, or raise "
        "scoring.timeout or scoring.retries; no update that is saved is lost, and --resume goes on "
        "from there."
    )
    with (
        Scorer([(Moody(hang), 1.0)], scoring=Scoring(timeout=0.05, retries=0)) as scorer,
        pytest.raises(RewardError, match=r"was tried once in 0\.\d s for the prompt 'a'; "),
    ):
        scorer(blank(1), ["a"])


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(111, "refused"),
        TimeoutError("timed out"),
        URLError("no route"),
        OSError(101, "Network is unreachable"),
        HTTPError("http://x", 503, "busy", {}, None),  # type: ignore[arg-type]
        HTTPError("http://x", 429, "slowly", {}, None),  # type: ignore[arg-type]
    ],
)
def test_a_failed_connection_is_tried_again(error: Exception) -> None:
    reward = Moody(raising(error), (1, 2))
    with Scorer([(reward, 1.0)], scoring=Scoring(retries=2, **FAST)) as scorer:
        assert scorer(blank(1), ["a"]).total.tolist() == [0.5]
    assert reward.calls == 3
    reward = Moody(raising(error), (1, 2))
    with (
        Scorer([(reward, 1.0)], scoring=Scoring(retries=1, **FAST)) as scorer,
        pytest.raises(UnavailableError, match=f"2 times .*the last time: {type(error).__name__}"),
    ):
        scorer(blank(1), ["a"])


@pytest.mark.parametrize(
    "error",
    [
        KeyError("weights"),
        FileNotFoundError(2, "no such file"),
        PermissionError(13, "not yours"),
        HTTPError("http://x", 404, "not there", {}, None),  # type: ignore[arg-type]
        KeyboardInterrupt(),
        SystemExit(3),
    ],
)
def test_a_bug_is_not_tried_again(error: BaseException) -> None:
    reward = Moody(raising(error))
    with Scorer([(reward, 1.0)], scoring=Scoring(**FAST)) as scorer:
        with pytest.raises(RewardError, match=f"reward `Moody` raised {type(error).__name__}"):
            scorer(blank(1), ["a"])
        assert reward.calls == 1
        assert scorer(blank(1), ["a"]).total.tolist() == [0.5]


def test_pauses_double_and_end() -> None:
    scoring = Scoring(backoff=0.5)
    assert [scoring.pause(n) for n in (1, 2, 3, 4)] == [0.5, 1.0, 2.0, 4.0]
    assert scoring.pause(5000) == 300.0
    assert Scoring(backoff=0).pause(5000) == 0.0


def test_only_the_reward_that_failed_is_called_again() -> None:
    calls = []

    def first(images, prompts, metadata):
        calls.append("first")
        return [1.0]

    reward = Moody(raising(ConnectionError()))
    with Scorer([(first, 1.0), (reward, 1.0)], scoring=Scoring(**FAST)) as scorer:
        scores = scorer(blank(1), ["a"])
    assert (calls, reward.calls) == (["first"], 2)
    assert scores.total.tolist() == [1.5]
    assert set(scores.latency) == {"first", "Moody"}


def test_one_that_hangs_holds_up_no_other() -> None:
    """Its worker is replaced, and with two workers the other goes on meanwhile."""

    def hanging(images, prompts, metadata):
        if prompts == ["hang"]:
            hang()
        return [1.0]

    scoring = Scoring(workers=2, timeout=0.3, retries=0)
    with Scorer([(hanging, 1.0)], scoring=scoring) as scorer:
        stuck = scorer.submit(blank(1), ["hang"])
        others = [scorer.submit(blank(1), ["a"]) for _ in range(8)]
        assert [future.result().total.tolist() for future in others] == [[1.0]] * 8
        assert not stuck.done()
        with pytest.raises(UnavailableError):
            stuck.result()
        assert scorer(blank(1), ["a"]).total.tolist() == [1.0]


@pytest.mark.parametrize("workers", [1, 3])
def test_scores_do_not_depend_on_workers(workers: int) -> None:
    images = torch.rand(12, 3, 4, 4)
    with Scorer([(brightness, 1.0)], scoring=Scoring(workers=workers)) as scorer:
        futures = [scorer.submit(images[i : i + 1], [str(i)]) for i in range(12)]
        found = torch.cat([future.result().total for future in futures])
    assert torch.equal(found, images.mean((1, 2, 3)).double())


def test_an_error_in_the_block_waits_for_nothing() -> None:
    """Without it, closing would wait for a call that never returns."""
    scorer = Scorer([(Moody(hang), 1.0)], scoring=Scoring(retries=0))
    running = scorer.submit(blank(1), ["a"])
    waiting = scorer.submit(blank(1), ["a"])
    while not running.running():
        time.sleep(0.001)
    with pytest.raises(KeyboardInterrupt), scorer:
        raise KeyboardInterrupt
    assert waiting.cancelled()
    with pytest.raises(RewardError, match="scoring was ended"):
        running.result(timeout=5)


def test_closing_finishes_what_is_being_scored() -> None:
    started, leave = threading.Event(), threading.Event()

    def slow(images, prompts, metadata):
        started.set()
        leave.wait(10)
        return [1.0]

    before = set(threading.enumerate())  # other tests' too
    scorer = Scorer([(slow, 1.0)])
    running, waiting = (scorer.submit(blank(1), ["a"]) for _ in range(2))
    started.wait(10)
    threading.Timer(0.05, leave.set).start()
    scorer.close()
    assert running.result().total.tolist() == [1.0]
    assert waiting.cancelled()
    new = set(threading.enumerate()) - before
    assert not [t for t in new if t.name.startswith("scoring")]


HANGING = """
import sys, time, torch
from leangrpo.scoring import Scorer
def hanging(images, prompts, metadata):
    print("hangs", flush=True)
    time.sleep(600)
scorer = Scorer([(hanging, 1.0)])
future = scorer.submit(torch.zeros(1, 3, 4, 4), ["a"])
if sys.argv[1] == "wait":
    with scorer:
        future.result()
time.sleep(0.1)
"""


@pytest.mark.parametrize(("how", "code"), [("leave", 0), ("wait", -signal.SIGINT)])
def test_a_hanging_reward_keeps_no_interpreter(how: str, code: int) -> None:
    """Not at its end, and not when Ctrl-C ends the wait for it."""
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING, how], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"hangs\n"
        if how == "wait":
            time.sleep(0.1)  # it is in result() now
            process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
        assert process.returncode == code
        assert (b"KeyboardInterrupt" in said) == (how == "wait")
    finally:
        process.kill()
        process.wait()


# -- processes -------------------------------------------------------------------------------------

REWARDS = """
import os, signal, time
from pathlib import Path
from urllib.error import URLError

def pid(images, prompts, metadata):
    return [os.getpid()] * len(prompts)

def told(images, prompts, metadata):
    "What the prompt says, as often as there is no file of its own yet."
    if prompts[0] == "mean":
        return images.mean(dim=tuple(range(1, images.ndim)))
    if prompts[0] == "tell":
        return [float(len(metadata[0]["text"]))]
    if prompts[0] == "count":
        return [1.0, 2.0]
    if prompts[0] == "nan":
        return [float("nan")]
    if prompts[0] == "raise":
        raise KeyError("weights")
    if (once := Path(metadata[0]["once"])).exists():
        return [1.0]
    once.write_text("")
    if prompts[0] == "hang":
        time.sleep(600)
    if prompts[0] == "exit":
        os._exit(7)
    if prompts[0] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise URLError("no route")

class Broken:
    def __init__(self):
        raise OSError("no weights")
    def __call__(self, images, prompts, metadata):
        pass

class Dying(Broken):
    def __init__(self):
        os._exit(3)
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of a module that a process can import too."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "rewards_of_processes.py").write_text(REWARDS, encoding="utf-8")
    sys.path.insert(0, str(folder))
    yield "rewards_of_processes"
    sys.path.remove(str(folder))
    sys.modules.pop("rewards_of_processes", None)


def in_processes(*names: str, **settings: Any) -> Scorer:
    scoring = Scoring(processes=True, **{**FAST, **settings})
    return Scorer([(name, 1.0) for name in names], scoring=scoring)


@pytest.fixture(scope="module")
def scorer(own: str) -> Iterator[Scorer]:
    """One process, with a timeout that only a hanging call meets."""
    with in_processes(f"{own}:told", f"{own}:pid", timeout=1.0, retries=1) as scorer:
        yield scorer


def test_a_process_gives_the_same_numbers(scorer: Scorer, own: str) -> None:
    for images in (torch.rand(3, 3, 5, 4), torch.rand(2, 4, 3, 5, 4)):
        scores = scorer(images.transpose(-1, -2), ["mean"] * len(images))
        expected = images.transpose(-1, -2).contiguous().flatten(1)
        mean = images.transpose(-1, -2).contiguous().mean(dim=tuple(range(1, images.ndim)))
        assert torch.equal(scores.each[f"{own}:told"], mean.double()), expected
        (pid,) = set(scores.each[f"{own}:pid"].tolist())
        assert pid != os.getpid()
    assert scorer(blank(1), ["tell"], [{"text": "four"}]).each[f"{own}:told"].tolist() == [4.0]


@pytest.mark.parametrize("act", ["hang", "exit", "kill"])
def test_a_process_that_hangs_or_dies_is_replaced(
    act: str, scorer: Scorer, own: str, tmp_path: Path
) -> None:
    before = scorer(blank(1), ["mean"]).each[f"{own}:pid"].item()
    scores = scorer(blank(1), [act], [{"once": str(tmp_path / "once")}])
    assert scores.each[f"{own}:told"].tolist() == [1.0]
    assert scores.each[f"{own}:pid"].item() != before
    with pytest.raises(ProcessLookupError):
        os.kill(int(before), 0)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("raise", r"told` raised KeyError: 'weights' \(rewards_of_processes.py, line 20\)"),
        ("count", r"told` returned 2 scores for 1 images"),
        ("nan", r"told` gave NaN or infinite scores: 1 of 1"),
    ],
)
def test_a_bug_in_a_process_is_told(prompt: str, text: str, scorer: Scorer, own: str) -> None:
    before = scorer(blank(1), ["mean"]).each[f"{own}:pid"]
    with pytest.raises(RewardError, match=text):
        scorer(blank(1), [prompt])
    assert scorer(blank(1), ["mean"]).each[f"{own}:pid"] == before


def test_a_failed_connection_in_a_process_is_tried_again(
    scorer: Scorer, own: str, tmp_path: Path
) -> None:
    before = scorer(blank(1), ["mean"]).each[f"{own}:pid"]
    scores = scorer(blank(1), ["connect"], [{"once": str(tmp_path / "once")}])
    assert scores.each[f"{own}:told"].tolist() == [1.0]
    assert scores.each[f"{own}:pid"] == before


def test_metadata_that_no_process_can_have(scorer: Scorer) -> None:
    with pytest.raises(RewardError, match="metadata cannot be given to a process: "):
        scorer(blank(1), ["tell"], [{"text": lambda: 0}])
    assert scorer(blank(1), ["mean"]).excluded == 0


def test_the_death_of_a_process_is_described(own: str, tmp_path: Path) -> None:
    with (
        in_processes(f"{own}:told", retries=0) as scorer,
        pytest.raises(RewardError) as caught,
    ):
        scorer(blank(1), ["exit"], [{"once": str(tmp_path / "once")}])
    assert "told` was tried once" in str(caught.value)
    assert "the last time: process " in str(caught.value)
    assert " ended with exit code 7. " in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Broken", "making it raised OSError: no weights"),
        ("Dying", r"cannot be loaded in a process \(scoring.processes\): process \d+ ended with "),
    ],
)
def test_a_reward_that_no_process_can_load(own: str, name: str, text: str) -> None:
    with pytest.raises(LeanError, match=text):
        in_processes(f"{own}:{name}")


def test_processes_need_names() -> None:
    with pytest.raises(LeanError, match="`brightness` is given as an object, and a process loads"):
        Crew([brightness], Scoring(processes=True))


ORPHAN = """
import sys, torch
from leangrpo.scoring import Scorer
from leangrpo.settings import Scoring
if __name__ == "__main__":
    scorer = Scorer([("orphaned:hanging", 1.0)], scoring=Scoring(processes=True))
    scorer.submit(torch.zeros(1, 3, 4, 4), ["a"]).result()
"""
HANGING_CHILD = """
import os, time
def hanging(images, prompts, metadata):
    print(os.getpid(), flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_no_process_outlives_a_killed_trainer(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(ORPHAN, encoding="utf-8")
    (tmp_path / "orphaned.py").write_text(HANGING_CHILD, encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "trainer.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert int(process.stdout.readline()) != process.pid
    process.kill()
    process.wait()
    # The child prints to the same pipe, so that the end of the file is the end of both.
    assert process.stdout.read() == ""
    process.stdout.close()


# -- as the settings say ---------------------------------------------------------------------------


def test_the_settings_reach_both_scorers_and_rewards_are_loaded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rewards_made_once.py").write_text(
        "class Model:\n"
        "    made = 0\n"
        "    def __init__(self):\n"
        "        Model.made += 1\n"
        "    def __call__(self, images, prompts, metadata):\n"
        "        return [Model.made] * len(prompts)\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = load_config(
        "embedded",
        [
            "rewards=[{name: 'rewards_made_once:Model'}]",
            "evaluation.rewards=[{name: jpeg_compressibility}]",
            "scoring={workers: 2, timeout: 7, retries: 5}",
        ],
    )
    trained, judge = make_scorers(config)
    with trained, judge:
        assert trained._crew.scoring == config.scoring
        assert trained(blank(1), ["a"]).total.tolist() == [1.0]
        scores = judge(blank(1), ["a"])
        assert scores.total.tolist() == [1.0]
        assert set(scores.each) == {"rewards_made_once:Model", "jpeg_compressibility"}
        assert (trained.on_bad, judge.on_bad) == ("stop", "exclude")
    sys.modules.pop("rewards_made_once", None)
