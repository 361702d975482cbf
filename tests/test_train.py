"""The loop: schedules agree, runs resume bitwise, a failure leaves something to go on from."""

from __future__ import annotations

import json
import math
import multiprocessing
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file
from torch import Tensor

from leangrpo import train as loop
from leangrpo.checkpoint import newest
from leangrpo.config import Config, load_config
from leangrpo.data import SampleKey
from leangrpo.datasets import read_examples
from leangrpo.errors import LeanError, RewardError
from leangrpo.report import read_run
from leangrpo.rollout import draw
from leangrpo.setup import Setup, set_up
from leangrpo.train import one_update, step, train

SCHEDULES = ("native", "retain", "reweight")
RELATIVE = 5e-6
"""What reweight may differ by from native in float32: it multiplies by A after the backward."""

SMALL = (
    "rollout={prompts: 2, generations: 2, micro_batch: 1}",
    "sampling.steps=3",
    "selection={rule: fraction, fraction: 1.0, steps: null}",
    "evaluation={prompts: 4, grid: 2, rewards: []}",
    "checkpoint.every=1",
    "updates=2",
)

# -- rewards, named `test_train:...` in the settings -----------------------------------------------

MOOD: dict[str, Any] = {"calls": 0, "from": math.inf, "act": None}


def brightness(images: Tensor, prompts: list[str], metadata: list[Any]) -> Tensor:
    return images.mean(dim=(1, 2, 3))


def constant(images: Tensor, prompts: list[str], metadata: list[Any]) -> list[float]:
    return [0.3] * len(prompts)


def moody(images: Tensor, prompts: list[str], metadata: list[Any]) -> Any:
    """As `brightness`, until its calls reach `MOOD["from"]`; then what `MOOD["act"]` says."""
    MOOD["calls"] += 1
    scores = brightness(images, prompts, metadata)
    return MOOD["act"](scores) if MOOD["calls"] >= MOOD["from"] else scores


def raising(scores: Tensor) -> Tensor:
    raise RuntimeError("no disk left")


@pytest.fixture
def mood() -> Iterator[dict[str, Any]]:
    before = dict(MOOD)
    yield MOOD
    MOOD.update(before)


# -- runs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Stable Diffusion 3 on the disk and prompts for it."""
    root = tmp_path_factory.mktemp("model")
    tiny.save(tiny.tiny_sd3(), root / "sd3")
    (root / "prompts.txt").write_text("a cat\na dog\na cup\na car\na hat\n", encoding="utf-8")
    (root / "one.txt").write_text("a cat\n", encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def settings(folder: Path) -> Callable[..., Config]:
    """Settings of a small run of the tiny pipeline; overrides come last."""

    def make(run: Path | None, *overrides: str) -> Config:
        base = [
            *SMALL,
            f"model.pipeline={folder / 'sd3'}",
            "sampling.height=16",
            "sampling.width=16",
            "sampling.call={max_sequence_length: 16}",
            f"prompts.train={folder / 'prompts.txt'}",
            f"prompts.heldout={folder / 'prompts.txt'}",
            "rewards=[{name: 'test_train:brightness'}]",
            "optimizer.lr=1e-3",
        ]
        return load_config("embedded", [*base, f"run.dir={run}", *overrides])

    return make


def lines(run: Path) -> list[dict[str, Any]]:
    """What has to be the same bit by bit."""
    metrics = read_run(run).metrics
    return [
        {k: v for k, v in line.items() if k not in ("time", "memory", "reward_seconds")}
        for line in metrics
    ]


def evaluations(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in e.items() if k != "seconds"} for e in read_run(run).evaluations]


def sha(run: Path) -> str:
    summary = read_run(run).summary
    assert summary is not None
    return str(summary["weights_sha256"])


def optimizer_state(run: Path) -> dict[str, Tensor]:
    found, complaints = newest(run / "checkpoints")
    assert found is not None
    assert complaints == []
    return load_file(next((found.folder / "state").glob("*.safetensors")))


def assert_same_run(one: Path, other: Path) -> None:
    assert lines(one) == lines(other)
    assert evaluations(one) == evaluations(other)
    assert sha(one) == sha(other)
    mine, theirs = optimizer_state(one), optimizer_state(other)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


@pytest.fixture(scope="module")
def whole(settings: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four updates that nothing disturbed."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train(settings(run, "updates=4", "evaluation.every=2"), quiet=True)
    return run


# -- the three schedules ---------------------------------------------------------------------------


def first_update(config: Config, *, move: float = 0.0) -> tuple[dict[str, Any], Tensor, Tensor]:
    """The line, the gradient and the weights of a first update; `move` disturbs the start."""
    s = set_up(config, quiet=True)
    gradients: list[Tensor] = []

    def look(optimizer: Any, args: Any, kwargs: Any) -> None:
        gradients.extend(p.grad.flatten().double().clone() for p in s.policy.parameters)

    with torch.no_grad():
        generator = torch.Generator().manual_seed(5)
        for p in s.policy.parameters:
            p += move * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    # The norm is of the unclipped gradient; the vector is compared as the optimizer gets it.
    hook = s.optimizer.register_step_pre_hook(look)
    with s.scorer, s.judge:
        line = one_update(s, 0)
    hook.remove()
    s.record.close()
    weights = torch.cat([p.detach().flatten().double() for p in s.policy.parameters])
    return line, torch.cat(gradients), weights


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


LORA = ["model.train=lora", "model.lora.rank=4"]
CASES: dict[str, tuple[float, list[str]]] = {
    "plain": (0.0, []),
    "micro_batch": (0.02, [*LORA, "rollout.micro_batch=2"]),
    "kl": (0.02, ["objective.kl=0.04"]),
    "kl_micro_batch": (0.02, [*LORA, "objective.kl=0.04", "rollout.micro_batch=2"]),
    "kl_in_reward": (0.02, ["objective.kl_in_reward=0.1"]),
    "global": (0.0, ["advantage.std=global"]),
    "lora": (0.02, [*LORA, "objective.kl=0.04"]),
}


BOTH = "rewards=[{name: 'test_train:brightness'}, {name: jpeg_compressibility, weight: 0.5}]"
STREAMED: dict[str, list[str]] = {
    "plain": ["rollout.generations=4"],
    "global": ["rollout.generations=3", "advantage={std: global, ddof: 1}"],
    "each": ["rollout.generations=4", "advantage.rewards=each", BOTH],
    "each_global": ["rollout.generations=4", "advantage={rewards: each, std: global}", BOTH],
    "all": ["rollout.generations=3", "advantage.baseline=global"],
    "value": ["advantage={baseline: value, std: none, clip: null}"],
    "kl": [*LORA, "objective={kl: 0.04, kl_in_reward: 0.1}"],
    "parts": ["rollout={prompts: 2, generations: 4, parts: 2}"],
    "micro_batch": [*LORA, "rollout={generations: 4, micro_batch: 2}"],
}


@pytest.mark.parametrize("ahead", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", STREAMED)
def test_streaming(case: str, ahead: int, settings: Callable[..., Config], tmp_path: Path) -> None:
    """Native's gradient up to rounding, whenever the rewards are waited for."""
    found = {}
    for schedule in ("native", "streaming"):
        config = settings(tmp_path / schedule, f"schedule={schedule}", *STREAMED[case])
        rollout = config.rollout.model_copy(update={"ahead": ahead})
        found[schedule] = first_update(config.model_copy(update={"rollout": rollout}), move=0.02)
    (native, gradient, _), (streamed, other, _) = found["native"], found["streaming"]
    assert distance(other, gradient) <= RELATIVE
    assert streamed["advantage_std"] == native["advantage_std"] > 0
    assert streamed["grad_norm"] == pytest.approx(native["grad_norm"], rel=1e-5)
    assert streamed["loss"] == pytest.approx(native["loss"], abs=1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_how_far_ahead_changes_no_bit(
    schedule: str, settings: Callable[..., Config], tmp_path: Path
) -> None:
    shape = "rollout={prompts: 3, generations: 2, ahead: "
    found = [
        first_update(settings(tmp_path / f"{n}", f"schedule={schedule}", f"{shape}{n}}}"))
        for n in (0, 1, 4, 99)
    ]
    for _, gradient, weights in found[1:]:
        assert torch.equal(gradient, found[0][1])
        assert torch.equal(weights, found[0][2])


@pytest.mark.parametrize("case", CASES)
def test_first_update(case: str, settings: Callable[..., Config], tmp_path: Path) -> None:
    """Retain is native bit by bit; reweight is native up to rounding."""
    move, overrides = CASES[case]
    config = {s: settings(tmp_path / s, f"schedule={s}", *overrides) for s in SCHEDULES}
    found = {s: first_update(config[s], move=move) for s in SCHEDULES}
    native, gradient, weights = found["native"]
    assert native["grad_norm"] > 0 and native["reward_std"] > 0 and native["optimizer_stepped"]
    if "objective.kl=0.04" in overrides:
        assert native["kl"] > 0
    for schedule in ("retain", "reweight"):
        line, other, moved = found[schedule]
        for name in ("reward_mean", "reward_std", "rewards", "selected_steps", "advantage_std"):
            assert line[name] == native[name], name
        if schedule == "retain":
            assert [s["lean"] for s in (*line["steps"], *native["steps"])] == [True, False]
            own = {"schedule": 0, "time": 0, "memory": 0, "reward_seconds": 0}
            assert {**line, **own} == {**native, "steps": line["steps"], **own}
            assert torch.equal(other, gradient)
            assert torch.equal(moved, weights)
        else:
            assert line["grad_norm"] == pytest.approx(native["grad_norm"], rel=RELATIVE)
            assert line["loss"] == pytest.approx(native["loss"], rel=RELATIVE, abs=1e-12)
            assert distance(other, gradient) < RELATIVE
            # AdamW's first step is lr * sign(g): where g is rounding, the sign is free, and a
            # weight may end 2 lr away; nowhere more, and only in so many places.
            assert float((moved - weights).abs().max()) <= 2.001 * config[schedule].optimizer.lr
            assert distance(moved, weights) < 1e-3


def test_float64_leaves_little_to_rounding(settings: Callable[..., Config], tmp_path: Path) -> None:
    """Not nothing: diffusers takes the mean square of its RMSNorm in float32 whatever comes in."""
    found = [
        first_update(settings(tmp_path / s, f"schedule={s}", "model.dtype=float64"))
        for s in ("native", "reweight")
    ]
    assert distance(found[1][1], found[0][1]) < 1e-8


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_embedded_pipeline(micro_batch: int, tmp_path: Path) -> None:
    """The recipe's own pipeline and reward."""
    found = {}
    for schedule in SCHEDULES:
        overrides = [*SMALL, f"schedule={schedule}", f"rollout.micro_batch={micro_batch}"]
        overrides += ["prompts.heldout=null", f"run.dir={tmp_path / schedule}"]
        found[schedule] = first_update(load_config("embedded", overrides))
    native, gradient, weights = found["native"]
    assert torch.equal(found["retain"][1], gradient)
    assert torch.equal(found["retain"][2], weights)
    line, other, _ = found["reweight"]
    assert (line["reward_mean"], line["reward_std"]) == (
        native["reward_mean"],
        native["reward_std"],
    )
    assert line["grad_norm"] == pytest.approx(native["grad_norm"], rel=RELATIVE)
    assert distance(other, gradient) < RELATIVE


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_denoiser_calls(schedule: str, settings: Callable[..., Config], tmp_path: Path) -> None:
    """T for each sample; native S more for each, which is all there is to save."""
    s = set_up(settings(tmp_path / "run", f"schedule={schedule}"), quiet=True)
    count = []
    s.policy.denoisers[0].register_forward_pre_hook(lambda *_: count.append(1))
    with s.scorer, s.judge:
        line = one_update(s, 0)
    s.record.close()
    assert line["selected_steps"] == [0, 1]
    assert len(count) == 4 * (3 + (2 if schedule == "native" else 0))


# -- selection, advantages, prompts ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "allowed"),
    [
        ("{rule: fraction, fraction: 0.5}", [[0, 1]]),
        ("{rule: list, steps: [2]}", [[2]]),
        ("{rule: window, fraction: 1.0, size: 2, range: [1, 4]}", [[1, 2], [2, 3]]),
        ("{rule: window, size: 1, outside: deterministic}", [[0], [1], [2], [3]]),
    ],
)
def test_selection(
    rule: str, allowed: list[list[int]], settings: Callable[..., Config], tmp_path: Path
) -> None:
    config = settings(
        tmp_path / "run", "sampling.steps=5", f"selection={rule}", "prompts.heldout=null"
    )
    train(config, quiet=True)
    assert all(line["selected_steps"] in allowed for line in lines(tmp_path / "run"))
    assert all(line["optimizer_stepped"] for line in lines(tmp_path / "run"))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_dead_batch_moves_nothing(
    schedule: str, settings: Callable[..., Config], tmp_path: Path
) -> None:
    """Momentum and weight decay would move the weights even without a gradient."""
    rewards = "rewards=[{name: 'test_train:constant'}]"
    s = set_up(settings(tmp_path / "run", f"schedule={schedule}", rewards), quiet=True)
    before = [p.detach().clone() for p in s.policy.parameters]
    with s.scorer, s.judge:
        line = one_update(s, 0)
    s.record.close()
    assert (line["optimizer_stepped"], line["zero_variance_groups"]) == (False, 2)
    assert (line["reward_std"], line["grad_norm"], line["loss"]) == (0.0, 0.0, 0.0)
    for mine, then in zip(s.policy.parameters, before, strict=True):
        assert torch.equal(mine, then)


def test_a_prompt_drawn_twice_makes_two_groups(
    settings: Callable[..., Config], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = set_up(settings(tmp_path / "run", f"prompts.train={folder / 'one.txt'}"), quiet=True)
    sample, seen = s.policy.sample, []

    def look(prompts: list[str], keys: list[SampleKey], **kwargs: Any) -> Any:
        rollout = sample(prompts, keys, **kwargs)
        seen.append((prompts, keys, rollout.images))
        return rollout

    monkeypatch.setattr(s.policy, "sample", look)
    with s.scorer, s.judge:
        one_update(s, 0)
    s.record.close()
    assert [prompts for prompts, _, _ in seen] == [["a cat"]] * 4
    assert len({key for _, keys, _ in seen for key in keys}) == 4
    for i, (_, _, image) in enumerate(seen):
        assert not any(torch.equal(image, other) for _, _, other in seen[:i])


def test_prompts_come_once_in_each_epoch() -> None:
    prompts = [f"prompt {i}" for i in range(7)]
    drawn = [p for update in range(14) for p in draw(prompts, 3, update, 2)]
    epochs = [drawn[i : i + 7] for i in range(0, 28, 7)]
    assert all(sorted(epoch) == prompts for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert draw(prompts, 3, 9, 2) == drawn[18:20], "a resumed run needs no position"
    assert drawn != [p for update in range(14) for p in draw(prompts, 4, update, 2)]
    assert len(draw(["one"], 0, 5, 3)) == 3


def texts(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> list[float]:
    """A reward of the metadata alone, which writes into what it was given."""
    return [float(about.pop("score")) for about in metadata]


def test_metadata_reaches_the_rewards(settings: Callable[..., Config], tmp_path: Path) -> None:
    """In training and in evaluation, each sample a dictionary of its own."""
    scores = {"a cat": 1.0, "a dog": -2.0, "a cup": 4.0}
    rows = [json.dumps({"prompt": p, "score": s}) for p, s in scores.items()]
    (tmp_path / "p.jsonl").write_text("\n".join(rows), encoding="utf-8")
    config = settings(
        tmp_path / "run", f"prompts.train={tmp_path / 'p.jsonl'}", "prompts.heldout=1",
        "rewards=[{name: 'test_train:texts'}]", "rollout.prompts=2", "updates=2",
        "evaluation.prompts=null",
    )  # fmt: skip
    train(config, quiet=True)
    data = config.prompts
    (held,) = read_examples(data, heldout=True)
    rest = sorted(e.prompt for e in read_examples(data))
    assert len(rest) == 2
    for line in lines(tmp_path / "run"):
        assert line["reward_mean"] == sum(scores[p] for p in rest) / 2
    for line in evaluations(tmp_path / "run"):
        assert [(row["prompt"], row["reward"]) for row in line["per_prompt"]] == [
            (held.prompt, scores[held.prompt])
        ]


def test_the_text_of_the_metadata_is_looked_for(
    settings: Callable[..., Config], tmp_path: Path
) -> None:
    """By the ocr rewards, for prompts that name none themselves."""
    rows = ["prompt,text", "a red fox,7", "a blue fox,42"]
    (tmp_path / "p.csv").write_text("\n".join(rows), encoding="utf-8")
    own = [f"prompts.train={tmp_path / 'p.csv'}", "prompts.heldout=null", "updates=1"]
    own += ["rewards=[{name: ocr}]", f"run.dir={tmp_path / 'run'}", "rollout.prompts=2"]
    train(settings(None, *own), quiet=True)
    (line,) = lines(tmp_path / "run")
    assert 0 <= line["reward_mean"] <= 1
    (tmp_path / "p.csv").write_text("prompt\na red fox\n", encoding="utf-8")
    with pytest.raises(LeanError, match="names no text to look for"):
        train(settings(None, *own[:-2], f"run.dir={tmp_path / 'other'}"), quiet=True)


def test_another_dataset_is_not_resumed(settings: Callable[..., Config], tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text("a cat\na dog\na cup\n", encoding="utf-8")
    own = [f"prompts.train={file}", "prompts.heldout=null"]
    train(settings(tmp_path / "run", *own, "updates=1"), quiet=True)
    file.write_text("a cat\na cup\na dog\n", encoding="utf-8")
    with pytest.raises(LeanError, match="not the ones that the run was begun with"):
        train(settings(tmp_path / "run", *own, "updates=2"), resume=True, quiet=True)
    file.write_text("a cat\na dog\n# the last\na cup", encoding="utf-8")
    train(settings(tmp_path / "run", *own, "updates=2"), resume=True, quiet=True)


def test_a_gradient_that_is_not_finite_is_not_stepped(
    settings: Callable[..., Config], tmp_path: Path
) -> None:
    s = set_up(settings(tmp_path / "run"), quiet=True)
    s.record.close()
    before = s.policy.parameters[0].detach().clone()
    for p in s.policy.parameters:
        p.grad = torch.full_like(p, torch.inf)
    with pytest.raises(LeanError, match=r"gradient of update 3 is not finite. The weights are tho"):
        step(s, 2)
    assert torch.equal(s.policy.parameters[0], before)


# -- going on --------------------------------------------------------------------------------------


@pytest.mark.parametrize("wound", [False, True])
def test_two_and_two_updates_are_four(
    wound: bool, whole: Path, settings: Callable[..., Config], tmp_path: Path
) -> None:
    """Also when a kill left lines beyond the checkpoint and half of one."""
    run = tmp_path / "run"
    train(settings(run, "updates=2", "evaluation.every=2"), quiet=True)
    if wound:
        late = {**read_run(whole).metrics[2], "reward_mean": -1.0}
        with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(late) + "\n" + json.dumps(late)[:70])
        with (run / "evaluations.jsonl").open("a", encoding="utf-8") as file:
            file.write('{"update": 4, "reward": -1.0}\n{"upda')
        (run / "checkpoints" / ".000003.partial").mkdir()
        (run / "samples" / "000004.png").write_bytes(b"half a picture")
    summary = train(settings(run, "updates=4", "evaluation.every=2"), resume=True, quiet=True)
    assert (summary["updates"], summary["stopped"]) == (4, "finished")
    assert_same_run(run, whole)


MEMORIES = {
    "history": ["advantage={baseline: history, history: 6, min_history: 4}"],
    "value": [
        "advantage={baseline: value, std: none, clip: null}",
        "value={batch: 8, buffer: 20, width: 8}",
        "objective={ratio: clamp, kl: 0.01, kl_form: output}",
    ],
}


@pytest.mark.parametrize("baseline", MEMORIES)
def test_what_outlives_an_update_outlives_a_checkpoint(
    baseline: str, settings: Callable[..., Config], tmp_path: Path
) -> None:
    """Two and two updates are four, for what advantages remember too."""
    own = [*MEMORIES[baseline], "prompts.heldout=null"]
    one, two = tmp_path / "one", tmp_path / "two"
    train(settings(one, *own, "updates=4"), quiet=True)
    train(settings(two, *own, "updates=2"), quiet=True)
    train(settings(two, *own, "updates=4"), resume=True, quiet=True)
    assert lines(one) == lines(two)
    assert sha(one) == sha(two)
    assert all(line["optimizer_stepped"] for line in lines(one))
    if baseline == "value":
        losses = [line["value_loss"] for line in lines(one)]
        assert losses[-1] < losses[0]


@pytest.mark.parametrize("baseline", MEMORIES)
def test_schedules_agree_on_a_memory(
    baseline: str, settings: Callable[..., Config], tmp_path: Path
) -> None:
    """From the second update on the baseline has learned, and reweight has its own way with it."""
    found = {}
    for schedule in SCHEDULES:
        own = [*MEMORIES[baseline], "prompts.heldout=null", "updates=3", f"schedule={schedule}"]
        train(settings(tmp_path / schedule, *own), quiet=True)
        found[schedule] = lines(tmp_path / schedule)
    assert sha(tmp_path / "native") == sha(tmp_path / "retain")
    for line, other in zip(found["native"], found["reweight"], strict=True):
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        assert line["reward_mean"] == pytest.approx(other["reward_mean"], rel=1e-4)


def test_nothing_is_lost_when_no_checkpoint_can_be_read(
    settings: Callable[..., Config], tmp_path: Path
) -> None:
    config = settings(tmp_path / "run")
    train(config, quiet=True)
    before = lines(tmp_path / "run")
    for state in (tmp_path / "run" / "checkpoints").glob("*/state.json"):
        state.write_text("{", encoding="utf-8")
    with pytest.raises(LeanError, match="None of the checkpoints in .* can be read"):
        train(config, resume=True, quiet=True)
    assert lines(tmp_path / "run") == before


def test_fewer_updates_than_are_done(settings: Callable[..., Config], tmp_path: Path) -> None:
    train(settings(tmp_path / "run"), quiet=True)
    with pytest.raises(LeanError, match="`updates` is 1: 2 updates are done already"):
        train(settings(tmp_path / "run", "updates=1"), resume=True, quiet=True)


def test_resuming_a_finished_run_changes_nothing(
    settings: Callable[..., Config], tmp_path: Path
) -> None:
    config = settings(tmp_path / "run")
    train(config, quiet=True)
    before = lines(tmp_path / "run"), evaluations(tmp_path / "run"), sha(tmp_path / "run")
    summary = train(config, resume=True, quiet=True)
    assert summary["updates"] == 2
    assert (lines(tmp_path / "run"), evaluations(tmp_path / "run"), sha(tmp_path / "run")) == before


def test_a_damaged_checkpoint_costs_updates_not_the_run(
    whole: Path, settings: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    config = settings(run, "updates=4", "evaluation.every=2")
    train(settings(run, "updates=3", "evaluation.every=2"), quiet=True)
    next((run / "checkpoints/000003/state").glob("*.safetensors")).write_bytes(b"")
    train(config, resume=True, quiet=True)
    assert "000003 is damaged: state/" in capsys.readouterr().out
    # `updates=3` made an evaluation at its end, which belongs to the first run only.
    assert [e["update"] for e in evaluations(run)] == [0, 2, 4]
    assert_same_run(run, whole)


def test_refusals(whole: Path, settings: Callable[..., Config], tmp_path: Path) -> None:
    before = sha(whole)
    with pytest.raises(LeanError, match="it already holds a run. Resume it, or name another"):
        train(settings(whole))
    with pytest.raises(LeanError, match=r"`seed` is 1 and was 0.*: going on would not be the same"):
        train(settings(whole, "updates=5", "seed=1"), resume=True)
    with pytest.raises(LeanError, match="there is no run to resume. Leave out --resume"):
        train(settings(tmp_path / "nowhere"), resume=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").touch()
    with pytest.raises(LeanError, match="there is no run to resume"):
        train(settings(tmp_path / "other"), resume=True)
    assert [p.name for p in tmp_path.rglob("*")] == ["other", "letter.txt"]
    assert sha(whole) == before


# -- rewards that fail -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (raising, r"`test_train:moody` raised RuntimeError: no disk left"),
        (lambda s: s * math.nan, r"gave NaN or infinite scores: 1 of 1, .* on_bad_reward"),
        (lambda s: [1.0, 2.0, 3.0], r"returned 3 scores for 1 images"),
    ],
)
def test_a_reward_fails_and_is_mended(
    act: Callable[[Tensor], Any],
    message: str,
    mood: dict[str, Any],
    settings: Callable[..., Config],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rewards = ("rewards=[{name: 'test_train:moody'}]", "prompts.heldout=null", "checkpoint.every=9")
    mood.update({"calls": 0, "from": 6, "act": act})
    with pytest.raises(RewardError, match=message) as caught:
        train(settings(tmp_path / "run", *rewards), quiet=True)
    assert "\n" not in str(caught.value)
    out = capsys.readouterr().out
    assert f"1 updates are saved in {tmp_path / 'run'}; once the cause is mended" in out
    assert (tmp_path / "run" / "checkpoints" / "000001" / "state.json").is_file()
    assert not (tmp_path / "run" / "summary.json").exists()
    mood["from"] = math.inf
    train(settings(tmp_path / "run", *rewards), resume=True, quiet=True)
    train(settings(tmp_path / "other", *rewards), quiet=True)
    assert_same_run(tmp_path / "run", tmp_path / "other")


def test_a_failing_evaluation_is_made_up_for(
    mood: dict[str, Any], settings: Callable[..., Config], tmp_path: Path
) -> None:
    """Training calls are 8 of two updates; the fifth batch of pictures is an evaluation's."""
    config = settings(tmp_path / "run", "rewards=[{name: 'test_train:moody'}]")
    mood.update({"calls": 0, "from": 10, "act": raising})
    with pytest.raises(RewardError):
        train(config, quiet=True)
    assert [line["update"] for line in lines(tmp_path / "run")] == [1, 2]
    assert [e["update"] for e in evaluations(tmp_path / "run")] == [0]
    mood["from"] = math.inf
    train(config, resume=True, quiet=True)
    train(settings(tmp_path / "other", "rewards=[{name: 'test_train:moody'}]"), quiet=True)
    assert_same_run(tmp_path / "run", tmp_path / "other")


def test_bad_scores_can_be_left_out(
    mood: dict[str, Any], settings: Callable[..., Config], tmp_path: Path
) -> None:
    mood.update({"calls": 0, "from": 6, "act": lambda s: s * math.nan})
    overrides = ("rewards=[{name: 'test_train:moody'}]", "on_bad_reward=exclude", "updates=3")
    train(settings(tmp_path / "run", "prompts.heldout=null", *overrides), quiet=True)
    first, second, third = lines(tmp_path / "run")
    assert (first["excluded"], second["excluded"], third["excluded"]) == (0, 3, 4)
    # One finite score is no comparison: no group has an advantage, nothing moves.
    assert (second["zero_variance_groups"], second["optimizer_stepped"]) == (2, False)
    assert third["reward_mean"] is None
    assert third["rewards"] == {"test_train:moody": None}


# -- being stopped ---------------------------------------------------------------------------------


def test_an_exception_after_the_step_does_not_count_it(
    whole: Path, settings: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are those of update 2, and the run knows of 1: they must not be saved as 1."""
    config = settings(tmp_path / "run", "updates=4", "evaluation.every=2", "checkpoint.every=9")
    make = loop._line

    def stop(s: Setup, update: int, *rest: Any) -> dict[str, Any]:
        if update == 1:
            raise KeyboardInterrupt
        return make(s, update, *rest)

    monkeypatch.setattr(loop, "_line", stop)
    with pytest.raises(KeyboardInterrupt):
        train(config, quiet=True)
    monkeypatch.undo()
    train(config, resume=True, quiet=True)
    assert_same_run(tmp_path / "run", whole)


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


def num_lines(run: Path) -> int:
    file = run / "metrics.jsonl"
    return len(file.read_text(encoding="utf-8").splitlines()) if file.exists() else 0


def test_ctrl_c(settings: Callable[..., Config], tmp_path: Path) -> None:
    """The update is finished and saved, the way on is said, and the exit code is 130."""
    from leangrpo.config import to_yaml

    config = settings(
        tmp_path / "run", "updates=1000", "prompts.heldout=null", "checkpoint.every=1000",
        "rewards=[{name: jpeg_compressibility}]", "run.dir=run",
    )  # fmt: skip
    (tmp_path / "mine.yaml").write_text(to_yaml(config), encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "leangrpo", "train", "mine.yaml"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wait_for(lambda: num_lines(tmp_path / "run") >= 2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "Finishing this update, then saving. Once more to stop at once." in out
    assert "go on with: leangrpo train run --resume" in out
    found, _ = newest(tmp_path / "run" / "checkpoints")
    assert found is not None
    assert found.update == num_lines(tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert (summary["stopped"], summary["updates"]) == ("interrupted", found.update)


@pytest.fixture(scope="module")
def processes() -> Any:
    """Real processes that need no time to import torch: forked from one that has."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "leangrpo.train",
            "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3",
            "torch.utils.tensorboard",
        ]
    )
    return context


def test_sigterm(processes: Any, settings: Callable[..., Config], tmp_path: Path) -> None:
    """What a batch system sends before it kills."""
    config = settings(
        tmp_path / "run", "updates=1000", "prompts.heldout=null", "checkpoint.every=1000",
        "rewards=[{name: jpeg_compressibility}]",
    )  # fmt: skip
    process = processes.Process(target=train, args=(config,), kwargs={"quiet": True})
    process.start()
    try:
        wait_for(lambda: num_lines(tmp_path / "run") >= 1)
        process.terminate()
        process.join(60)
    finally:
        process.kill()
    assert process.exitcode == 0
    summary = read_run(tmp_path / "run").summary
    assert summary is not None
    assert summary["stopped"] == "interrupted"
    found, _ = newest(tmp_path / "run" / "checkpoints")
    assert found is not None
    assert found.update == summary["updates"]


@pytest.mark.parametrize("num", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_any_moment(
    num: int, processes: Any, settings: Callable[..., Config], tmp_path: Path
) -> None:
    """SIGKILL while it loads, samples, writes a line or a checkpoint: the run comes out equal."""
    draw = random.Random(num)
    overrides = (f"updates={max(4, num // 2)}", "evaluation.every=3", "checkpoint.every=1")
    overrides = (*overrides, "rewards=[{name: jpeg_compressibility}]")
    began = time.monotonic()
    run(processes, settings(tmp_path / "whole", *overrides))
    lasted = time.monotonic() - began
    config = settings(tmp_path / "run", *overrides)
    for _ in range(num):
        process = start(processes, config)
        process.join(draw.uniform(0.1, 1.0) * lasted * (0.6 if num < 10 else 0.3))
        process.kill()  # SIGKILL, unless it has just ended
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL)
    run(processes, config)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def start(processes: Any, config: Config) -> Any:
    assert config.run.dir
    resume = (Path(config.run.dir) / "config.yaml").is_file()
    process = processes.Process(
        target=train, args=(config,), kwargs={"quiet": True, "resume": resume}
    )
    process.start()
    return process


def run(processes: Any, config: Config) -> None:
    process = start(processes, config)
    process.join(120)
    assert process.exitcode == 0


# -- several optimizer steps on a rollout ----------------------------------------------------------


def steps_of(config: Config) -> tuple[list[dict[str, Any]], list[Tensor]]:
    """What the metrics say of an update's optimizer steps, and each one's gradient."""
    s = set_up(config, quiet=True)
    gradients: list[Tensor] = []

    def look(optimizer: Any, args: Any, kwargs: Any) -> None:
        gradients.append(torch.cat([p.grad.flatten().clone() for p in s.policy.parameters]))

    hook = s.optimizer.register_step_pre_hook(look)
    with s.scorer, s.judge:
        line = one_update(s, 0)
    hook.remove()
    s.record.close()
    return line["steps"], gradients


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_parts_and_epochs(schedule: str, settings: Callable[..., Config], tmp_path: Path) -> None:
    """Two parts, two passes: four steps, of which only the first can be lean."""
    both = ("rollout.parts=2", "rollout.epochs=2", f"schedule={schedule}", "optimizer.lr=1e-4")
    steps, gradients = steps_of(settings(tmp_path / "run", *both, "objective.clip_range=0.1"))
    assert [(s["epoch"], s["part"]) for s in steps] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [s["lean"] for s in steps] == [schedule != "native", False, False, False]
    assert steps[0]["ratio_error"] == 0
    assert all(s["ratio_error"] > 0 for s in steps[1:])
    alone = settings(tmp_path / "alone", f"schedule={schedule}", "rollout.prompts=1")
    _, (first,) = steps_of(alone)
    assert torch.equal(gradients[0], first), "the first step is an update of the first part"


@pytest.mark.parametrize("schedule", ["retain", "reweight"])
def test_later_steps_do_not_depend_on_the_schedule(
    schedule: str, settings: Callable[..., Config], tmp_path: Path
) -> None:
    both = ("rollout.parts=2", "rollout.epochs=2", "optimizer.lr=1e-4", "advantage.std=global")
    both += ("objective.clip_range=0.1",)
    runs = {
        name: steps_of(settings(tmp_path / name, *both, f"schedule={name}"))
        for name in ("native", schedule)
    }
    (steps, gradients), (native_steps, native) = runs[schedule], runs["native"]
    for one, other in zip(steps, native_steps, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3, abs=1e-6)
    for one, other in zip(gradients, native, strict=True):
        assert distance(one, other) < (1e-3 if schedule == "reweight" else 1e-12)


def test_clipping_binds_in_later_steps(settings: Callable[..., Config], tmp_path: Path) -> None:
    """With a range below the ratio's move, samples that have gained enough give no gradient."""
    passes = ("rollout.epochs=3", "optimizer.lr=1e-3")
    norms = []
    for width in ("10.0", "1e-7"):
        steps, _ = steps_of(settings(tmp_path / width, *passes, f"objective.clip_range={width}"))
        norms.append([s["grad_norm"] for s in steps])
    assert norms[0][0] == norms[1][0]
    assert norms[1][2] < norms[0][2]


def test_warmup_and_ema(settings: Callable[..., Config], tmp_path: Path) -> None:
    """The learning rate rises linearly; the running mean lags behind and survives a resume."""
    options = ("optimizer.warmup=4", "ema.decay=0.9", "evaluation.every=1", "updates=3")
    whole = settings(tmp_path / "whole", *options)
    train(whole, quiet=True)
    rates = [line["lr"] for line in read_run(tmp_path / "whole").metrics]
    assert rates == pytest.approx([1e-3 / 4, 1e-3 / 2, 1e-3 * 3 / 4])
    parts = settings(tmp_path / "parts", *options, "updates=1")
    train(parts, quiet=True)
    train(settings(tmp_path / "parts", *options), resume=True, quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    assert optimizer_state(tmp_path / "whole").keys() == optimizer_state(tmp_path / "parts").keys()
    for name, value in optimizer_state(tmp_path / "whole").items():
        assert torch.equal(value, optimizer_state(tmp_path / "parts")[name]), name


def test_prompts_that_do_not_divide_are_refused(
    settings: Callable[..., Config], tmp_path: Path
) -> None:
    with pytest.raises(LeanError, match=r"`rollout.prompts` is 2: .* rollout.parts, which is 3"):
        train(settings(tmp_path / "run", "rollout.parts=3"), quiet=True)
