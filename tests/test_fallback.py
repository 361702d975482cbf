"""Memory that runs out in the middle of a run: the next schedule, the same update, nothing lost."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from leangrpo import setup
from leangrpo.auto import Auto
from leangrpo.choice import Choice
from leangrpo.config import Config, load_config
from leangrpo.data import Transition
from leangrpo.errors import LeanError
from leangrpo.memory import is_out_of_memory
from leangrpo.reweight import Reweight
from leangrpo.runfolder import read_run
from leangrpo.schedules import Native, Retain
from leangrpo.train import train

SMALL = (
    "schedule=auto",
    "prompts.heldout=null",
    "updates=3",
    "rollout={prompts: 2, generations: 2, ahead: 1}",
    "sampling={steps: 3, height: 16, width: 16, call: {max_sequence_length: 16}}",
    "selection.steps=[0, 1]",
    "rewards=[{name: jpeg_compressibility}]",
    "advantage.clip=null",
    "evaluation.rewards=[]",
    "checkpoint.every=1",
    "run.threads=1",
)
Settings = Callable[..., Config]

FULL = "CUDA out of memory. Tried to allocate 20.00 MiB.\nSee documentation."


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Config]:
    """Settings of a small run of a tiny Stable Diffusion 3; overrides come last."""
    root = tmp_path_factory.mktemp("model")
    tiny.save(tiny.tiny_sd3(), root / "sd3")
    (root / "prompts.txt").write_text("a cat\na dog\n", encoding="utf-8")
    own = f"model.pipeline={root / 'sd3'}", f"prompts.train={root / 'prompts.txt'}"

    def make(run: Path, *more: str) -> Config:
        return load_config("embedded", [*SMALL, *own, f"run.dir={run}", *more])

    return make


def by_hand(option: dict[str, Any]) -> list[str]:
    return [f"{name}={json.dumps(value)}" for name, value in option.items()]


class Full:
    """Memory that runs out at the second selected step of the second update, so many `times`."""

    def __init__(self, times: int = 1) -> None:
        self.times, self.calls = times, 0
        self.left: list[weakref.ref[torch.Tensor]] = []

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for kind in (Native, Retain, Reweight):
            patch.setattr(kind, "transition", self.wrapped(kind.transition))

    def wrapped(self, original: Callable[[Any, Transition], None]) -> Any:
        def transition(schedule: Any, t: Transition) -> None:
            made = weakref.ref(t.log_prob)
            original(schedule, t)
            if getattr(t.keys[0], "update", 0) != 1:
                return
            self.calls += 1
            if self.calls % 2 == 0 and self.times:
                assert not any(one() for one in self.left), "what filled the memory is still there"
                self.times -= 1
                self.left.append(made)
                raise torch.OutOfMemoryError(FULL)

        return transition


@pytest.fixture
def largest(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` takes what needs most, so that there is something to fall back on."""
    decide = Auto.decide

    def greedy(self: Auto) -> Choice:
        found = decide(self)
        return replace(found, chosen=max(found.fits, key=lambda p: p.peak_bytes))

    monkeypatch.setattr(setup.Auto, "decide", greedy)


@pytest.mark.usefixtures("largest")
@pytest.mark.parametrize("times", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_next_that_fits_repeats_the_update(
    times: int, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are those of a run that is stopped after the first update and resumed by hand."""
    full = Full(times)
    with monkeypatch.context() as patch:
        full.install(patch)
        train(settings(tmp_path / "run"), quiet=True)
    assert full.times == 0
    found = read_run(tmp_path / "run")
    plan = json.loads((tmp_path / "run" / "plan.json").read_text(encoding="utf-8"))
    peaks = {p["name"]: p["peak_bytes"] for p in plan["fits"]}
    assert peaks[plan["chosen"]] < max(peaks.values())
    assert [line["update"] for line in found.metrics] == [1, 2, 3]
    log = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    assert log.count("Update 2 ran out of memory (CUDA out of memory. Tried") == times
    assert f"it is repeated with {plan['chosen']}" in log

    first = max(plan["fits"], key=lambda p: p["peak_bytes"])["option"]
    words = by_hand(settings_of(first))
    train(settings(tmp_path / "hand", *words, "updates=1"), quiet=True)
    words = by_hand(plan["settings"])
    train(settings(tmp_path / "hand", *words), resume=True, quiet=True)
    hand = read_run(tmp_path / "hand")
    assert found.summary is not None and hand.summary is not None
    assert found.summary["weights_sha256"] == hand.summary["weights_sha256"]
    assert found.summary["schedule"] == plan["settings"]["schedule"]
    assert load_config(tmp_path / "run" / "config.yaml").schedule == found.summary["schedule"]


def settings_of(option: dict[str, Any]) -> dict[str, Any]:
    names = {
        "micro_batch": "rollout.micro_batch",
        "ahead": "rollout.ahead",
        "checkpointing": "model.activation_checkpointing",
        "sync": "parallel.sync",
        "activations": "memory.activations",
    }
    return {names.get(name, name): value for name, value in option.items()}


def test_nothing_smaller_is_left(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first update is saved, and the message says what may help."""
    Full().install(monkeypatch)
    monkeypatch.setattr(Choice, "alternatives", lambda self: [])
    with pytest.raises(LeanError, match="nothing smaller is left"):
        train(settings(tmp_path / "run"), quiet=True)
    assert (tmp_path / "run" / "checkpoints").is_dir()
    assert [line["update"] for line in read_run(tmp_path / "run").metrics] == [1]


def test_chosen_by_hand(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schedule that was named is not exchanged; what to do is said, and the run goes on."""
    words = "schedule=retain", "rollout.micro_batch=2"
    with monkeypatch.context() as patch:
        Full().install(patch)
        with pytest.raises(LeanError, match=r"Update 2 ran out.*schedule=auto.*--resume"):
            train(settings(tmp_path / "run", *words), quiet=True)
    again = settings(tmp_path / "run", "schedule=reweight", "rollout.micro_batch=1")
    summary = train(again, resume=True, quiet=True)
    assert summary["updates"] == 3


def test_which_errors_count() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError(FULL))
    with pytest.raises(RuntimeError) as found:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(found.value)
    assert not is_out_of_memory(RuntimeError("the size of tensor a must match"))
