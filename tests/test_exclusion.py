"""Trajectories that are not finite: the gradient is that of the groups without them."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from poison import KINDS, poison
from test_schedules import ADVANTAGES, N, S, Toy, point
from torch import Tensor
from train_ranks import python_path

from leangrpo.config import Config, load_config
from leangrpo.data import SampleKey, Transition
from leangrpo.errors import LeanError, NonFiniteError
from leangrpo.exclusion import until_finite
from leangrpo.report import read_run
from leangrpo.reweight import Reweight
from leangrpo.rollout import draw
from leangrpo.schedules import Native, Retain
from leangrpo.setup import Setup, set_up
from leangrpo.streaming import Streaming
from leangrpo.train import one_update, train

SCHEDULES = ("native", "retain", "reweight", "streaming")
BOUND = 5e-6
"""Relative L2 of a float32 gradient that is summed in another order; see `alignment`."""
BAD = [(0, 1)]


def brightness(images: Tensor, prompts: list[str], metadata: list[Any]) -> list[float]:
    return [float(x) for x in images.double().mean(dim=(1, 2, 3))]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Config]:
    root = tmp_path_factory.mktemp("model")
    tiny.save(tiny.tiny_sd3(), root / "sd3")
    (root / "prompts.txt").write_text("a cat\na dog\na cup\n", encoding="utf-8")

    def make(run: Path, *overrides: str) -> Config:
        base = [
            "rollout={prompts: 2, generations: 3, micro_batch: 1}",
            "sampling={steps: 3, height: 16, width: 16, call: {max_sequence_length: 16}}",
            "selection={rule: fraction, fraction: 1.0, steps: null}",
            "checkpoint.every=1",
            "updates=2",
            f"model.pipeline={root / 'sd3'}",
            f"prompts={{train: {root / 'prompts.txt'}, heldout: null}}",
            "rewards=[{name: 'test_exclusion:brightness'}]",
            "optimizer={lr: 1e-3, max_grad_norm: 1e9}",  # the gradient as it is
        ]
        return load_config("embedded", [*base, f"run.dir={run}", *overrides])

    return make


def gradient_of(s: Setup, run: Callable[[Setup, int], Any]) -> tuple[dict[str, Any], Tensor]:
    """The line of an update and the gradient the optimizer got."""
    found: list[Tensor] = []

    def look(*_: Any) -> None:
        found.extend(p.grad.flatten().double() for p in s.policy.parameters if p.grad is not None)

    hook = s.optimizer.register_step_pre_hook(look)
    with s.scorer, s.judge:
        line = run(s, 0)
    hook.remove()
    s.record.close()
    return line, torch.cat(found)


def plain_oracle(config: Config, without: list[tuple[int, int]]) -> tuple[Tensor, float]:
    """One sample and one step at a time: - 1/(N S) sum A grad log p, over those that are left.

    A by hand from the rewards that are left; N of all. And the mean of the rewards.
    """
    s = set_up(config, quiet=True)
    s.record.close()
    r, every = config.rollout, []
    steps = s.select(0).selected
    total = [torch.zeros(p.shape, dtype=torch.float64) for p in s.policy.parameters]
    for p, example in enumerate(draw(s.examples, config.seed, 0, r.prompts)):
        left = [g for g in range(r.generations) if (p, g) not in without]
        rollouts = [
            s.policy.sample([example.prompt], [SampleKey(0, p, g)], selected=steps) for g in left
        ]
        rewards = torch.tensor(
            [brightness(x.images, [], [])[0] for x in rollouts], dtype=torch.float64
        )
        every.append(rewards)
        a = (rewards - rewards.mean()) / (rewards.std(correction=0) + config.advantage.epsilon)
        for rollout, advantage in zip(rollouts, a.tolist(), strict=True):
            for t in rollout.transitions:
                log_prob = s.policy.replay(t).log_prob.sum()
                c = -advantage / (r.prompts * r.generations * len(steps))
                parts = torch.autograd.grad(log_prob, s.policy.parameters, allow_unused=True)
                for sum_, g in zip(total, parts, strict=True):
                    if g is not None:
                        sum_ += c * g.double()
    s.scorer.close()
    return torch.cat([t.flatten() for t in total]), float(torch.cat(every).mean())


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.fixture(scope="module")
def oracle(settings: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return plain_oracle(settings(tmp_path_factory.mktemp("oracle") / "run"), BAD)


FAST = {
    *((schedule, "latents", 3) for schedule in SCHEDULES),
    ("reweight", "gradient", 3),
    ("retain", "gradient", 1),
    ("native", "log_prob", 1),
    ("streaming", "images", 3),
}
CASES = [
    pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow)
    for case in itertools.product(SCHEDULES, KINDS, (1, 3))
]


@pytest.mark.parametrize(("schedule", "kind", "micro_batch"), CASES)
def test_the_gradient_is_that_of_the_others(
    schedule: str,
    kind: str,
    micro_batch: int,
    settings: Callable[..., Config],
    oracle: tuple[Tensor, float],
    tmp_path: Path,
) -> None:
    more = [f"schedule={schedule}", f"rollout.micro_batch={micro_batch}"]
    s = set_up(settings(tmp_path / "run", *more), quiet=True)
    poison(s.policy, BAD, kind)
    line, gradient = gradient_of(s, lambda s, u: until_finite(one_update, s, u))
    assert distance(gradient, oracle[0]) <= BOUND
    assert (line["excluded"], line["optimizer_stepped"]) == (1, True)
    # pictures of batches of another size differ by rounding
    assert line["reward_mean"] == pytest.approx(oracle[1], rel=1e-5)
    log = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    what = "gradients" if kind == "gradient" else "latents, pictures or log-probabilities"
    assert f"note: update 1: the {what} of generation 1 of 'a " in log
    assert "(1 of 6 trajectories left out)" in log


def test_without_protection_the_gradient_is_lost(
    settings: Callable[..., Config], tmp_path: Path
) -> None:
    """What the tests above rely on: these faults do poison an update."""
    for kind in ("latents", "gradient"):
        s = set_up(settings(tmp_path / kind, "schedule=retain"), quiet=True)
        poison(s.policy, BAD, kind)
        with s.scorer, s.judge, pytest.raises(NonFiniteError):
            one_update(s, 0)
        s.record.close()


CREDIT = {
    "std": ["advantage.std=global"],
    "baseline": ["advantage.baseline=global"],
    "parts": ["rollout={prompts: 2, generations: 3, parts: 2}"],
    "kl": ["objective.kl=0.01"],
}
OTHERS = [
    pytest.param(
        schedule,
        name,
        marks=[]
        if (schedule, name) in {("streaming", "std"), ("retain", "kl")}
        else pytest.mark.slow,
    )
    for schedule, name in itertools.product(SCHEDULES, CREDIT)
]


@pytest.mark.parametrize(("schedule", "credit"), OTHERS)
def test_a_whole_forward_and_other_credit(
    schedule: str, credit: str, settings: Callable[..., Config], tmp_path: Path
) -> None:
    """All of a forward gone, one of another: schedules agree with native on what is left."""
    found = {}
    for name in ("native", schedule):
        more = [
            *CREDIT[credit],
            "rollout.micro_batch=3",
            "rollout.generations=6",
            "advantage.clip=null",
        ]
        s = set_up(settings(tmp_path / name, f"schedule={name}", *more), quiet=True)
        poison(s.policy, [(1, 0), (1, 1), (1, 2), (0, 4)], "latents")
        found[name] = gradient_of(s, lambda s, u: until_finite(one_update, s, u))
        if schedule == "native":  # there is nothing else to compare it with
            break
    (line, gradient), (other, native) = found[schedule], found["native"]
    assert line["excluded"] == other["excluded"] == 4
    assert gradient.isfinite().all()
    assert distance(gradient, native) <= BOUND


def test_a_run_goes_on_and_resumes_bitwise(
    settings: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from leangrpo import setup

    make = setup.make_policy

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        policy = make(*args, **kwargs)
        for update in range(4):
            poison(policy, [(update % 2, update % 3)], KINDS[update], update=update)
        return policy

    monkeypatch.setattr(setup, "make_policy", poisoned)
    memory = "advantage={baseline: history, history: 6, min_history: 2, std: prompt}"
    whole, again = (settings(tmp_path / name, memory, "updates=4") for name in ("whole", "again"))
    train(whole, quiet=True)
    train(settings(tmp_path / "again", memory, "updates=2"), quiet=True)
    train(again, resume=True, quiet=True)
    lines = [
        [
            {**line, "time": 0, "memory": 0, "reward_seconds": 0}
            for line in read_run(tmp_path / name).metrics
        ]
        for name in ("whole", "again")
    ]
    assert [line["excluded"] for line in lines[0]] == [1, 1, 1, 1]
    assert lines[0] == lines[1]


def test_nothing_left_is_an_error(settings: Callable[..., Config], tmp_path: Path) -> None:
    s = set_up(settings(tmp_path / "run"), quiet=True)
    poison(s.policy, [(p, g) for p in range(2) for g in range(3)], "latents")
    with s.scorer, s.judge, pytest.raises(LeanError, match=r"Update 1 has no finite trajectory"):
        until_finite(one_update, s, 0)
    s.record.close()


def test_no_single_culprit_is_an_error(
    settings: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum that overflows, of gradients that do not."""
    s = set_up(settings(tmp_path / "run"), quiet=True)
    finish = s.gradients.finish

    def overflow() -> None:
        finish()
        for p in s.policy.parameters:
            if p.grad is not None:
                p.grad.fill_(torch.inf)

    monkeypatch.setattr(s.gradients, "finish", overflow)
    with s.scorer, s.judge, pytest.raises(LeanError, match="gradient of update 1 is not finite"):
        until_finite(one_update, s, 0)
    s.record.close()


# -- the schedules alone, in anybody's loop --------------------------------------------------------


def feed(kind: Any, bad: int, advantage: float, batch: int) -> tuple[Any, Tensor]:
    """An update of the toy, one trajectory of which has NaN in its network."""
    model = Toy()

    def replay(t: Transition) -> Transition:
        return Transition(t.keys, t.step, model.score(t.latents), weight=t.weight)

    schedule = kind(model, replay=replay) if kind is Native else kind(model)
    advantages = {**ADVANTAGES, bad: advantage}
    schedule.begin(N, S)
    for first in range(0, N, batch):
        keys = tuple(range(first, first + batch))
        for step in range(S):
            rows = [point(k, step, torch.float64) * (torch.nan if k == bad else 1) for k in keys]
            x = torch.cat(rows)
            capture = schedule.capture(len(x)) if schedule.capture and batch > 1 else None
            with torch.set_grad_enabled(schedule.needs_graph):
                if capture is None:
                    score = model.score(x)
                else:
                    with capture:
                        score = model.score(x)
            schedule.transition(Transition(keys, step, score, latents=x))
        schedule.rewards({k: [torch.nan if k == bad else advantages[k]] for k in keys})
    schedule.advantages(advantages)
    statistics = schedule.finish()
    return statistics, torch.cat([p.grad.flatten() for p in model.parameters()])


def of_the_others(bad: int) -> Tensor:
    model = Toy()
    loss = sum(
        -a * model.score(point(k, step, torch.float64)).sum() / (N * S)
        for k, a in ADVANTAGES.items()
        for step in range(S)
        if k != bad
    )
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


@pytest.mark.parametrize(
    ("kind", "batch"),
    [
        (Native, 1),
        (Retain, 1),
        (Reweight, 1),
        (Reweight, 2),
        (Reweight, 4),
        (Streaming, 1),
        (Streaming, 2),
    ],
)
def test_an_advantage_of_zero_leaves_out(kind: Any, batch: int) -> None:
    """0 · NaN is NaN: whoever multiplies it by zero has lost the others too."""
    statistics, gradient = feed(kind, 1, 0.0, batch)
    assert distance(gradient, of_the_others(1)) <= 1e-12
    assert statistics.excluded == 1


@pytest.mark.parametrize(
    ("kind", "batch", "advantage"),
    [
        (Native, 2, 0.0),
        (Retain, 2, 0.0),
        (Native, 1, 0.5),
        (Retain, 1, 0.5),
        (Reweight, 1, 0.5),
        (Reweight, 2, 0.5),
    ],
)
def test_a_lost_gradient_is_refused(kind: Any, batch: int, advantage: float) -> None:
    with pytest.raises(NonFiniteError, match="not finite, and the gradient is lost") as caught:
        feed(kind, 1, advantage, batch)
    assert caught.value.keys == {1}


# -- two ranks -------------------------------------------------------------------------------------

RANKS = {
    f"{schedule}-{name}-{kind}": [f"schedule={schedule}", *more, kind]
    for schedule in ("native", "retain", "reweight")
    for name, more in {
        "sharded": ["parallel={shard: 2}"],
        "copies": ["parallel={shard: 1}", "rollout.micro_batch=2"],
        "group": ["parallel={shard: 1, sync: group}"],
    }.items()
    for kind in ("latents", "gradient")
    if name != "group" or (kind, schedule) == ("gradient", "reweight")
}


@pytest.mark.slow
def test_two_ranks_agree(settings: Callable[..., Config], tmp_path: Path) -> None:
    """Whoever has sampled it, all ranks repeat the update and have the oracle's gradient."""
    shape = ["rollout={prompts: 2, generations: 4, micro_batch: 1}", "parallel.check=true"]
    cases = {
        name: {"settings": [*shape, *more], "kind": kind} for name, (*more, kind) in RANKS.items()
    }
    from leangrpo.config import to_yaml

    config = settings(tmp_path / "oracle", *shape)
    (tmp_path / "base.yaml").write_text(to_yaml(config), encoding="utf-8")
    (tmp_path / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
    here = Path(__file__).parent
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += [str(here / "exclusion_ranks.py"), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(here)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-6000:]
    wanted, _ = plain_oracle(config, [(0, 1), (1, 2)])
    for name in cases:
        found = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        assert distance(found["gradient"], wanted) <= BOUND, name
        assert found["excluded"] == 2, name
