"""Any diffusers pipeline is a policy: the zoo of `zoo.py`, one by one, in float32 and float64.

For every specimen, without its guidance and with it: the three schedules leave one gradient.
Retain is bitwise native. Reweight is native within 5e-6 (some 1e3 roundings of 6e-8 with random
signs) in float32 and within 1e-12 (as many of 1.1e-16) in float64; a specimen that rounds to
bfloat16 inside agrees to its unit, 4e-3. A replay has bitwise the rollout's log-probability. The
list of parameters without a gradient is exact.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from zoo_parts import Specimen

from leangrpo.components import denoisers
from leangrpo.data import SampleKey, Transition
from leangrpo.errors import LeanError
from leangrpo.loading import make_trainable
from leangrpo.oracle import float64_throughout
from leangrpo.policy import Policy
from leangrpo.reweight import Reweight
from leangrpo.schedules import Native, Retain

KEYS = [SampleKey(0, 0, g) for g in range(2)]
ADVANTAGES = dict(zip(KEYS, (0.7, -1.9), strict=True))
PROMPT = "a red cube"
Gradient = dict[str, torch.Tensor | None]

pytestmark = [
    # diffusers announces its own renamings; they say nothing about this package
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def cases(names: tuple[str, ...] = tuple(zoo.SPECIMENS)) -> Iterator[Any]:
    """Every specimen with and without guidance; all but the fast ones are slow."""
    for name in names:
        marks = [] if name in zoo.FAST else [pytest.mark.slow]
        for guided in (False, True) if zoo.SPECIMENS[name].guided is not None else (False,):
            label = f"{name}-guided" if guided else name
            yield pytest.param(name, guided, id=label.replace(" ", "_"), marks=marks)


def fresh(specimen: Specimen, dtype: torch.dtype, train: str) -> Any:
    torch.manual_seed(0)
    pipe = specimen.build()
    if train == "lora":
        make_trainable(pipe, "lora", rank=2, alpha=4)
    for module in denoisers(pipe).values():
        module.to(dtype)
        for name, parameter in module.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)
    return pipe


def update(
    kind: type,
    specimen: Specimen,
    guided: bool,
    *,
    dtype: torch.dtype = torch.float32,
    batch: int = 1,
    train: str = "full",
) -> tuple[Gradient, list[torch.Tensor], Any, Policy]:
    """The gradient of two samples of two steps, the log-probabilities, statistics, the policy."""
    pipe = fresh(specimen, dtype, train)
    policy = zoo.policy_of(specimen, guided=guided, pipe=pipe)
    stds = policy.plan().std.tolist()
    possible = [i for i, std in enumerate(stds[:-1]) if std > 0]
    steps = sorted({possible[0], possible[-1]})
    schedule = kind(policy, replay=policy.replay) if kind is Native else kind(policy)
    schedule.begin(len(KEYS), len(steps))
    log_probs: list[torch.Tensor] = []

    def take(t: Transition) -> None:
        log_probs.append(t.log_prob.detach().clone())
        schedule.transition(t)

    for g in range(0, len(KEYS), batch):
        rollout = policy.sample(
            [PROMPT] * batch, KEYS[g : g + batch], selected=steps, grad=schedule.needs_graph,
            decode=False, on_transition=take, capture=schedule.capture,
        )  # fmt: skip
        assert torch.isfinite(rollout.latents).all()
    schedule.advantages(ADVANTAGES)
    statistics = schedule.finish()
    gradient = {name: p.grad for name, p in policy.named_parameters()}
    return gradient, log_probs, statistics, policy


def error(some: Gradient, exact: Gradient) -> float:
    """Relative L2 distance over all parameters."""
    difference = total = 0.0
    for name, g in exact.items():
        other = some[name]
        if g is None:
            assert other is None or not other.any(), name
        else:
            assert other is not None, name
            difference += float((other.double() - g.double()).square().sum())
            total += float(g.double().square().sum())
    assert total > 0
    return float((difference / total) ** 0.5)


@pytest.mark.parametrize(("name", "guided"), list(cases()))
def test_three_schedules_one_gradient(name: str, guided: bool) -> None:
    specimen = zoo.SPECIMENS[name]
    native, log_probs, statistics, policy = update(Native, specimen, guided)
    assert statistics.ratio_error == 0  # a replay is the rollout
    assert all(torch.isfinite(p).all() for p in log_probs)
    retain, same, _, _ = update(Retain, specimen, guided)
    reweight, _, _, _ = update(Reweight, specimen, guided)
    assert all(map(torch.equal, log_probs, same))
    assert error(retain, native) == 0
    assert error(reweight, native) <= (specimen.bound or 5e-6)
    without = {n for n, g in native.items() if g is None or not g.any()}
    for pattern in specimen.unreached:
        matched = {n for n in native if re.fullmatch(pattern, n)}
        assert matched, f"no parameter is called {pattern}"
        assert matched <= without, f"reached: {sorted(matched - without)}"
        without -= matched
    assert not without, "no gradient, and no reason given"
    assert bool(specimen.because) == bool(specimen.unreached)
    assert len(policy.parameters) == len(native)


@pytest.mark.parametrize(("name", "guided"), list(cases()))
def test_in_float64(name: str, guided: bool) -> None:
    specimen = zoo.SPECIMENS[name]
    if specimen.single:
        pytest.skip(specimen.single)
    with float64_throughout():
        native, log_probs, statistics, _ = update(Native, specimen, guided, dtype=torch.float64)
        reweight, _, _, _ = update(Reweight, specimen, guided, dtype=torch.float64)
    assert statistics.ratio_error == 0
    assert all(p.dtype == torch.float64 for p in log_probs)
    assert error(reweight, native) <= 1e-12


@pytest.mark.parametrize(("name", "guided"), list(cases()))
def test_batches_are_equal_or_refused(name: str, guided: bool) -> None:
    """Two samples in one forward, with adapters: the gradients of each, or a clear refusal."""
    specimen = zoo.SPECIMENS[name]

    def both() -> tuple[Gradient, Gradient, Any]:
        native, _, statistics, _ = update(Native, specimen, guided, batch=2, train="lora")
        reweight, _, _, _ = update(Reweight, specimen, guided, batch=2, train="lora")
        return native, reweight, statistics

    if says := specimen.alone or (guided and specimen.alone_guided):
        with pytest.raises(LeanError, match=says):
            both()
        return
    native, reweight, statistics = both()
    assert statistics.ratio_error == 0
    assert error(reweight, native) <= (specimen.bound or 5e-6)


@pytest.mark.parametrize("name", zoo.REFUSED)
def test_what_is_no_policy_is_refused(name: str) -> None:
    assert re.search(zoo.REFUSED[name].says, zoo.reason(name))


def documented(name: str) -> list[str]:
    text = Path(__file__).parents[1].joinpath("docs", "pipelines.md").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.startswith(f"| {name} |")]


@pytest.mark.parametrize("name", zoo.FAST)
def test_the_documented_row(name: str) -> None:
    """The table of docs/pipelines.md is what `python tests/zoo.py --table` prints."""
    row = zoo.describe(name)
    note = "".join(re.findall(r" \(.*\)", name))
    (line,) = documented(row.name + note)
    assert line == f"| {row.name}{note} | " + " | ".join(row.details) + " |"


@pytest.mark.slow
def test_the_documented_table() -> None:
    text = Path(__file__).parents[1].joinpath("docs", "pipelines.md").read_text(encoding="utf-8")
    assert zoo.table() in text


def test_the_zoo_is_as_large_as_it_is_said_to_be() -> None:
    kinds = {name.split(" (")[0] for name in zoo.SPECIMENS}
    assert len(kinds) >= 75
