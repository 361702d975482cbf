"""Streaming: the native gradient from two sums, whatever the group, and the refusals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_schedules import Toy, point, relative
from torch import Tensor

from leangrpo.advantages import group_advantages, weigh_each
from leangrpo.data import Transition
from leangrpo.errors import LeanError
from leangrpo.reweight import Reweight
from leangrpo.schedules import Native
from leangrpo.streaming import Streaming

S = 3
BOUND = {torch.float64: 1e-12, torch.float32: 5e-6}
"""Relative L2 to native: the project's bounds for a gradient that is scaled after the backward."""


def draw(
    groups: int, size: int, *, mean: float = 0.0, spread: float = 1.0, seed: int = 0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(groups, size, generator=generator, dtype=torch.float64)
    return mean + spread * noise


def plain(rewards: Tensor) -> Tensor:
    return group_advantages(rewards, clip=None)


def update(
    kind: type,
    rewards: Sequence[Tensor],
    advantages: Tensor,
    dtype: torch.dtype = torch.float64,
    *,
    late: bool = False,
    centred: bool = False,
    model: Toy | None = None,
    batch: int = 1,
    **extra: Any,
) -> tuple[Tensor, Any]:
    """The gradient of an update whose groups, `(P, M)`, are sampled one after the other.

    `late`: rewards come when all the group has been sampled. `centred`: advantages come at the end.
    """
    model = model or Toy(dtype)

    def replay(t: Transition) -> Transition:
        return Transition(t.keys, t.step, model.score(t.latents))

    schedule = kind(model, replay=replay) if kind is Native else kind(model, **extra)
    groups, size = advantages.shape
    schedule.begin(groups * size, S)
    for p in range(groups):
        keys = [(p, m) for m in range(size)]
        known = {key: [float(r[key]) for r in rewards] for key in keys}
        for first in range(0, size, batch):
            some = tuple(keys[first : first + batch])
            for step in range(S):
                x = torch.cat([point(7 * p + m, step, dtype) for _, m in some])
                capture = schedule.capture(batch) if schedule.capture and batch > 1 else None
                with torch.set_grad_enabled(schedule.needs_graph), capture or nullcontext():
                    score = model.score(x)
                schedule.transition(Transition(some, step, score, latents=x))
            if not late:
                schedule.rewards({key: known[key] for key in some})
        if late:
            schedule.rewards(known)
        if centred:
            rows = [group_advantages(r[p : p + 1], std="none", clip=None)[0] for r in rewards]
            schedule.centre({k: [float(row[k[1]]) for row in rows] for k in keys})
        else:
            schedule.advantages({k: float(advantages[k]) for k in keys})
    if centred:
        every = [(p, m) for p in range(groups) for m in range(size)]
        schedule.advantages({k: float(advantages[k]) for k in every})
    statistics = schedule.finish()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return gradient, statistics


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("size", [2, 4, 16, 64])
@pytest.mark.parametrize(("mean", "spread"), [(0.0, 1.0), (1000.0, 0.01), (-1e6, 1e-3)])
def test_is_native(dtype: torch.dtype, size: int, mean: float, spread: float) -> None:
    rewards = draw(2, size, mean=mean, spread=spread)
    advantages = plain(rewards)
    native, before = update(Native, [rewards], advantages, dtype)
    streamed, after = update(Streaming, [rewards], advantages, dtype)
    assert relative(streamed, native) <= BOUND[dtype]
    assert after.loss == pytest.approx(before.loss, abs=1e-12)


def test_memory_does_not_grow_with_the_group() -> None:
    """One group: three gradients. Several: the sum of those that are done beside them."""
    one = sum(p.numel() for p in Toy().parameters()) * 8
    for groups, most in ((1, 3), (3, 4)):
        held = {}
        for size in (4, 16, 64):
            rewards = draw(groups, size)
            _, statistics = update(Streaming, [rewards], plain(rewards))
            held[size] = statistics.ledger_bytes / one
        assert set(held.values()) == {most}
    rewards = draw(1, 16)
    assert update(Reweight, [rewards], plain(rewards))[1].ledger_bytes == 16 * one


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("batch", [2, 3, 6])
def test_several_in_a_forward(batch: int, late: bool) -> None:
    """Their gradients come in factors; one without a reward is left out of the product."""
    rewards = [draw(2, 6, mean=5.0, seed=k) for k in range(2)]
    rewards[0][0, 1] = torch.nan
    rewards[1][0, 1] = torch.nan
    advantages = weigh_each(rewards, [1.0, 2.0], clip=None)
    native, _ = update(Native, rewards, advantages)
    streamed, _ = update(Streaming, rewards, advantages, batch=batch, late=late)
    assert relative(streamed, native) <= 1e-12


def test_a_batch_holds_its_gradients_beside_the_sums() -> None:
    """Weights 3 by 4 numbers and biases: a step's factors are smaller, three steps' are not."""
    one = sum(p.numel() for p in Toy().parameters()) * 8
    rewards = draw(1, 8)
    held = {}
    for batch in (2, 4, 8):
        _, statistics = update(Streaming, [rewards], plain(rewards), batch=batch)
        held[batch] = statistics.ledger_bytes
        assert 2 * one < held[batch] <= (2 + batch) * one
    _, statistics = update(Streaming, [draw(1, 32)], plain(draw(1, 32)), batch=4)
    assert statistics.ledger_bytes == held[4]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_rewards_that_are_normalised_one_by_one(number: int, late: bool) -> None:
    rewards = [draw(2, 9, mean=10.0**k, spread=0.1**k, seed=k) for k in range(number)]
    advantages = weigh_each(rewards, [1.0 + k for k in range(number)], clip=None)
    native, _ = update(Native, rewards, advantages)
    streamed, statistics = update(Streaming, rewards, advantages, late=late)
    assert relative(streamed, native) <= 1e-12
    one = sum(p.numel() for p in Toy().parameters()) * 8
    if not late:
        assert statistics.ledger_bytes == (3 + number) * one


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("ddof", [0, 1])
def test_a_deviation_of_the_whole_update(number: int, ddof: int) -> None:
    rewards = [draw(3, 5, mean=50.0, spread=2.0, seed=k) for k in range(number)]
    rewards[0][1] += 30  # groups with different means
    advantages = weigh_each(rewards, [1.0, 0.5][:number], std="global", ddof=ddof, clip=None)
    native, _ = update(Native, rewards, advantages)
    streamed, statistics = update(Streaming, rewards, advantages, centred=True)
    assert relative(streamed, native) <= 1e-12
    one = sum(p.numel() for p in Toy().parameters()) * 8
    assert statistics.ledger_bytes <= (2 + 2 * number) * one


def test_a_baseline_of_the_whole_update() -> None:
    """One affine function for all groups: their advantages come in one call, at the end."""
    rewards = draw(1, 12, mean=3.0)
    advantages = group_advantages(rewards, baseline="global", clip=None)
    native, _ = update(Native, [rewards], advantages)
    assert relative(update(Streaming, [rewards], advantages)[0], native) <= 1e-12


def test_a_group_of_equal_rewards_has_no_gradient() -> None:
    rewards = torch.full((1, 4), 0.1, dtype=torch.float64)
    with pytest.raises(AttributeError, match="NoneType"):  # .grad is None: not even zeros
        update(Streaming, [rewards], plain(rewards))


def test_a_reward_that_is_not_finite_leaves_its_trajectory_out() -> None:
    rewards = draw(2, 6)
    rewards[0, 0], rewards[1, 3] = torch.nan, torch.inf
    advantages = plain(rewards)
    native, _ = update(Native, [rewards], advantages)
    assert relative(update(Streaming, [rewards], advantages)[0], native) <= 1e-12
    with pytest.raises(LeanError, match="its reward was not finite"):
        update(Streaming, [rewards], torch.ones_like(advantages))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(-100, 100, allow_nan=False, width=32), min_size=2, max_size=8),
    st.sampled_from(["prompt", "none"]),
    st.sampled_from([0, 1]),
)
def test_any_rewards(rewards: list[float], std: str, ddof: int) -> None:
    row = torch.tensor([rewards], dtype=torch.float64)
    advantages = group_advantages(row, std=std, ddof=ddof, clip=None)
    if not advantages.any():
        return
    native, _ = update(Native, [row], advantages)
    # the gradient may be a small difference of large terms: bound the error by their size
    size, model = 0.0, Toy()
    for m, a in enumerate(advantages[0].tolist()):
        alone = torch.zeros_like(row)
        alone[0, m] = a
        if a:
            size += float(update(Native, [row], alone, model=model)[0].norm())
    assert (update(Streaming, [row], advantages)[0] - native).norm() <= 1e-12 * size


@pytest.mark.parametrize(
    "spoil",
    [
        lambda a: a.clamp(-1.0, 1.0),
        lambda a: torch.where(a.abs() < 0.5, 0.0, a),
        lambda a: a.sign() * a.square(),
    ],
)
def test_advantages_that_are_not_affine_are_refused(spoil: Callable[[Tensor], Tensor]) -> None:
    rewards = draw(1, 8)
    with pytest.raises(LeanError, match="no affine function of the rewards"):
        update(Streaming, [rewards], spoil(plain(rewards)))


def test_events_out_of_place() -> None:
    model = Toy()

    def sampled(keys: Sequence[str]) -> Streaming:
        schedule = Streaming(model)
        schedule.begin(len(keys), 1)
        for i, key in enumerate(keys):
            score = model.score(point(i, 0, torch.float64))
            schedule.transition(Transition((key,), 0, score))
        return schedule

    with pytest.raises(LeanError, match="begin"):
        Streaming(model).rewards({"a": [1.0]})
    with pytest.raises(LeanError, match="has a reward but no steps"):
        sampled("a").rewards({"b": [1.0]})
    with pytest.raises(LeanError, match="but no reward"):
        sampled("a").advantages({"a": 1.0})
    schedule = sampled("ab")
    schedule.rewards({"a": [1.0], "b": [2.0]})
    with pytest.raises(LeanError, match="advantages came without its own"):
        schedule.advantages({"a": 1.0})
    schedule = sampled("ab")
    schedule.rewards({"a": [1.0], "b": [2.0]})
    with pytest.raises(LeanError, match="not the rewards less a mean"):
        schedule.centre({"a": [1.0], "b": [3.0]})


def test_the_sums_of_16_bits_are_kept_in_32() -> None:
    """Sixteen gradients summed in bfloat16 would be off by more than native's own error."""
    rewards = draw(1, 64)
    advantages = plain(rewards)
    exact, _ = update(Native, [rewards], advantages, torch.float64)
    errors: Mapping[type, float] = {
        kind: relative(update(kind, [rewards], advantages, torch.bfloat16)[0].double(), exact)
        for kind in (Reweight, Streaming)
    }
    assert errors[Streaming] <= 1.1 * errors[Reweight]
