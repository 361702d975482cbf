"""Advantages that never poison, and the coefficient against autograd of the surrogate."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from leangrpo.advantages import (
    History,
    best_of,
    clipped_surrogate,
    gdpo,
    group_advantages,
    subtract_kl,
    surrogate_coefficient,
    weigh_each,
)
from leangrpo.errors import LeanError

NAN, INF = math.nan, math.inf


def rewards(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@st.composite
def groups(draw: st.DrawFn, num_prompts: int = 3) -> Tensor:
    size = draw(st.integers(2, 8))
    number = st.floats(-100, 100, width=32) | st.sampled_from([0.0, 1.0, 0.5])
    row = st.lists(number, min_size=size, max_size=size)
    return torch.tensor([draw(row) for _ in range(num_prompts)], dtype=torch.float64)


# -- rewards that occur --------------------------------------------------------------------------


@pytest.mark.parametrize("std", ["prompt", "global", "none"])
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize(
    "row",
    [[0.8123456] * 24, [5.0], [NAN, 5.0], [NAN, NAN], [INF, -INF], [0.1] * 3 + [NAN], [1e30] * 7],
)
def test_groups_without_a_difference_get_exactly_zero(
    row: list[float], std: str, ddof: int
) -> None:
    """In float32, 24 x 0.8123456 has a mean that is off, and an epsilon of 1e-8 blows it up."""
    rows = torch.tensor([row, [float(i) for i in range(len(row))]])
    advantages = group_advantages(rows, std=std, ddof=ddof, epsilon=1e-8)
    assert torch.equal(advantages[0], torch.zeros(len(row), dtype=torch.float64))
    assert torch.isfinite(advantages).all()


def test_not_a_number_is_left_out() -> None:
    advantages = group_advantages(rewards([1.0, NAN, 3.0]), epsilon=0.0)
    assert advantages.tolist() == [[-1.0, 0.0, 1.0]]
    advantages = group_advantages(rewards([1.0, NAN, 3.0]))
    assert advantages.tolist()[0] == pytest.approx([-1 / 1.0001, 0, 1 / 1.0001], rel=1e-15)


def test_infinity_is_left_out() -> None:
    advantages = group_advantages(rewards([INF, 1.0, 2.0], [-INF, NAN, 2.0]), epsilon=0.0)
    assert advantages.tolist() == [[0.0, -1.0, 1.0], [0.0, 0.0, 0.0]]


def test_one_bad_reward_leaves_the_other_groups_alone() -> None:
    good = rewards([1.0, 2.0, 4.0], [0.0, 1.0, 0.0])
    bad = good.clone()
    bad[1, 2] = NAN
    assert torch.equal(group_advantages(bad)[0], group_advantages(good)[0])


def test_float32_rewards_are_computed_in_float64() -> None:
    """A difference of 1e-3 on top of 1e4 is there in float32; its statistics are not."""
    r = torch.tensor([[1e4, 1e4 + 1e-3, 1e4 + 2e-3]], dtype=torch.float32)
    exact = r.double() - r.double().mean()
    expected = exact / exact.square().mean().sqrt()
    advantages = group_advantages(r, epsilon=0.0)
    assert advantages.dtype == torch.float64
    torch.testing.assert_close(advantages, expected, rtol=1e-8, atol=0)


# -- the formula ---------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(r=groups(), ddof=st.sampled_from([0, 1]), epsilon=st.sampled_from([1e-8, 1e-4, 1.0]))
def test_numpy_says_the_same(r: Tensor, ddof: int, epsilon: float) -> None:
    """FlowGRPO's tracker in numpy, its epsilon added to the deviation, not put under the root."""
    a = r.numpy()
    mean = a.mean(axis=1, keepdims=True)
    by_prompt = (a - mean) / (a.std(axis=1, ddof=ddof, keepdims=True) + epsilon)
    overall = (a - mean) / (np.std(a, ddof=ddof) + epsilon)
    # A mean of numbers up to 100 is off by 1e-14 or so, which the smallest epsilon makes 1e-6.
    close = {"rtol": 1e-9, "atol": 1e-13 / epsilon}
    for std, expected in (("prompt", by_prompt), ("global", overall), ("none", a - mean)):
        result = group_advantages(r, std=std, ddof=ddof, epsilon=epsilon, clip=None)
        torch.testing.assert_close(result, torch.from_numpy(expected), **close)


@settings(max_examples=50, deadline=None)
@given(r=groups(), factor=st.sampled_from([15.0, 0.01]), shift=st.sampled_from([0.0, -30.0]))
@pytest.mark.parametrize("std", ["prompt", "global"])
def test_scale_and_shift_of_rewards_change_nothing(
    std: str, r: Tensor, factor: float, shift: float
) -> None:
    r = (r * 8).round() / 8  # no differences so small that the shift swallows them
    before = group_advantages(r, std=std, epsilon=0.0, clip=None)
    after = group_advantages(r * factor + shift, std=std, epsilon=0.0, clip=None)
    torch.testing.assert_close(after, before, rtol=2e-7, atol=2e-7)


@settings(max_examples=50, deadline=None)
@given(r=groups())
@pytest.mark.parametrize("std", ["prompt", "global", "none"])
def test_each_group_sums_to_zero_and_keeps_its_order(std: str, r: Tensor) -> None:
    advantages = group_advantages(r, std=std, clip=None)
    bound = 1e-12 * (1 + advantages.abs().sum(1)) if std == "none" else 1e-7
    assert (advantages.sum(1).abs() <= bound).all()
    for row, of in zip(r, advantages, strict=True):
        assert (of[row.argsort()].diff() >= 0).all()


@pytest.mark.parametrize(("ddof", "deviation"), [(0, math.sqrt(2 / 3)), (1, 1.0)])
def test_ddof(ddof: int, deviation: float) -> None:
    advantages = group_advantages(rewards([1.0, 2.0, 3.0]), ddof=ddof, epsilon=0.0)
    assert advantages.tolist()[0] == pytest.approx([-1 / deviation, 0, 1 / deviation], rel=1e-15)


def test_global_deviation_is_that_of_all_finite_rewards() -> None:
    """The mean stays the prompt's, so a prompt that is easier than another gains nothing."""
    r = rewards([0.0, 2.0], [10.0, 14.0], [NAN, 6.0])
    scale = np.std([0.0, 2.0, 10.0, 14.0, 6.0])
    advantages = group_advantages(r, std="global", epsilon=0.0)
    expected = rewards([-1.0, 1.0], [-2.0, 2.0], [0.0, 0.0]) / scale
    torch.testing.assert_close(advantages, expected, rtol=1e-15, atol=0)


def test_clip() -> None:
    row = [0.0] * 99 + [1.0]
    assert group_advantages(rewards(row), clip=None).max() > 9
    assert group_advantages(rewards(row), clip=5.0).max() == 5
    assert group_advantages(-rewards(row), clip=2.5).min() == -2.5


@pytest.mark.parametrize("size", [2, 12, 26])
def test_a_clip_of_five_never_binds_up_to_26(size: int) -> None:
    """The largest possible advantage of a group is (M-1)/√(M-1), one against all others."""
    row = rewards([0.0] * (size - 1) + [1.0])
    advantages = group_advantages(row, epsilon=0.0, clip=None)
    assert float(advantages.max()) == pytest.approx(math.sqrt(size - 1), rel=1e-12)
    assert float(advantages.max()) <= 5 + 1e-12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"std": "batch"}, "`advantage.std` is 'batch': must be prompt, global or none."),
        ({"ddof": -1}, "`advantage.ddof` is -1: must be 0"),
        ({"ddof": 2}, "`advantage.ddof` is 2"),
        ({"epsilon": -1e-4}, "`advantage.epsilon` is -0.0001"),
        ({"epsilon": NAN}, "`advantage.epsilon` is nan"),
        ({"clip": 0.0}, "`advantage.clip` is 0.0: must be above 0. Use null"),
        ({"clip": NAN}, "`advantage.clip` is nan"),
    ],
)
def test_refusals(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(LeanError, match=message):
        group_advantages(rewards([1.0, 2.0]), **arguments)


@pytest.mark.parametrize("shape", [(3,), (2, 0), (2, 3, 4)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(LeanError, match=r"the shape must be \(prompts, generations\)"):
        group_advantages(torch.zeros(shape))


# -- the coefficient -----------------------------------------------------------------------------


def by_autograd(log_prob: Tensor, old: Tensor, advantage: Tensor, clip_range: float) -> Tensor:
    leaf = log_prob.clone().requires_grad_()
    clipped_surrogate(leaf, old, advantage, clip_range).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("advantage", [-2.0, -0.3, 0.0, 0.7, 5.0])
def test_on_policy_the_coefficient_is_exactly_minus_the_advantage(
    advantage: float, dtype: torch.dtype
) -> None:
    log_prob = torch.tensor([-1.25, 0.5, -160.0], dtype=dtype)
    a = torch.full((3,), advantage, dtype=dtype)
    result = surrogate_coefficient(log_prob, log_prob, a, 1e-4)
    assert torch.equal(result, -a)
    assert torch.equal(by_autograd(log_prob, log_prob, a, 1e-4), -a)
    assert result.dtype == dtype


@pytest.mark.parametrize(
    ("advantage", "change", "binds"),
    [
        (1.0, 0.05, False),
        (1.0, -0.05, False),
        (1.0, 0.2, True),
        (1.0, -0.2, False),
        (-1.0, 0.05, False),
        (-1.0, -0.05, False),
        (-1.0, 0.2, False),
        (-1.0, -0.2, True),
    ],
)
def test_where_the_clip_binds(advantage: float, change: float, binds: bool) -> None:
    old = torch.tensor([-0.6], dtype=torch.float64)
    a = torch.tensor([advantage], dtype=torch.float64)
    result = surrogate_coefficient(old + change, old, a, 0.1)
    expected = 0.0 if binds else -advantage * math.exp(change)
    assert float(result) == pytest.approx(expected, rel=1e-14)


@settings(max_examples=100, deadline=None)
@given(
    changes=st.lists(st.floats(-0.5, 0.5), min_size=1, max_size=6),
    advantage=st.floats(-5, 5),
    clip_range=st.sampled_from([1e-4, 0.01, 0.2]),
)
def test_coefficient_is_the_gradient(
    changes: list[float], advantage: float, clip_range: float
) -> None:
    change = torch.tensor(changes, dtype=torch.float64)
    # Within rounding of the kink the products tie, and autograd takes half of either side.
    near = (change.exp() - 1).abs().sub(clip_range).abs() < 1e-12
    change = torch.where(near, 0.0, change)
    old = torch.full_like(change, -0.7)
    a = torch.full_like(change, advantage)
    expected = by_autograd(old + change, old, a, clip_range)
    result = surrogate_coefficient(old + change, old, a, clip_range)
    torch.testing.assert_close(result, expected, rtol=1e-14, atol=1e-300)


def test_coefficient_has_no_graph() -> None:
    log_prob = torch.zeros(2, requires_grad=True)
    assert not surrogate_coefficient(log_prob, torch.zeros(2), torch.ones(2), 0.1).requires_grad


def test_the_surrogate_is_the_larger_loss() -> None:
    old = torch.zeros(4, dtype=torch.float64)
    new = torch.tensor([0.2, -0.2, 0.2, -0.2], dtype=torch.float64)
    a = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    losses = clipped_surrogate(new, old, a, 0.1)
    expected = [-1.1, -math.exp(-0.2), math.exp(0.2), 0.9]
    assert losses.tolist() == pytest.approx(expected, rel=1e-14)


# -- KL in the reward ----------------------------------------------------------------------------


def test_kl_is_subtracted() -> None:
    r, kl = rewards([1.0, 2.0]), torch.tensor([[0.5, 0.25]], requires_grad=True)
    result = subtract_kl(r, kl, 0.1)
    assert result.tolist() == [pytest.approx([0.95, 1.975])]
    assert not result.requires_grad


def test_without_a_weight_the_kl_is_not_read() -> None:
    r = rewards([1.0, 2.0])
    assert subtract_kl(r, torch.full((1, 2), NAN), 0.0) is r


# -- other baselines -------------------------------------------------------------------------------


def test_the_updates_mean_and_deviation() -> None:
    """TRL's DDPO without a tracker: (r - mean) / (std + 1e-8) over the batch."""
    r = rewards([1.0, 2.0], [3.0, 6.0])
    expected = (r - r.mean()) / (r.std(correction=0) + 1e-8)
    result = group_advantages(r, baseline="global", epsilon=1e-8)
    torch.testing.assert_close(result, expected, rtol=1e-15, atol=0)
    torch.testing.assert_close(
        group_advantages(r, baseline="global", std="global", epsilon=1e-8), result, rtol=0, atol=0
    )
    assert group_advantages(rewards([2.0], [2.0]), baseline="global").tolist() == [[0.0], [0.0]]


def test_a_learned_value_is_subtracted_elsewhere() -> None:
    r = rewards([1.0, NAN], [3.0, -6.0])
    result = group_advantages(r, baseline="value", std="none", clip=None)
    assert result.tolist() == [[1.0, 0.0], [3.0, -6.0]]


def ddpo(past: dict[str, list[float]], prompts: list[str], r: list[float]) -> list[float]:
    """ddpo-pytorch's tracker, written out: size 16, min_count 16, numpy's std + 1e-6."""
    r_ = torch.tensor(r, dtype=torch.float64)
    for prompt, value in zip(prompts, r, strict=True):
        past[prompt] = [*past.get(prompt, []), value][-16:]
    found = []
    for prompt, value in zip(prompts, r, strict=True):
        some = torch.tensor(past[prompt], dtype=torch.float64)
        some = r_ if len(some) < 16 else some
        found.append(float((value - some.mean()) / (some.std(correction=0) + 1e-6)))
    return found


def test_ddpos_running_statistics() -> None:
    """Nine updates of 8 samples of 3 prompts: first the update's statistics, then the prompt's."""
    draws = torch.Generator().manual_seed(0)
    history, past = History(), {}
    own = 0
    for _ in range(9):
        names = [f"p{int(i)}" for i in torch.randint(0, 3, (8,), generator=draws)]
        r = torch.randn(8, 1, dtype=torch.float64, generator=draws)
        r += torch.tensor([[float(name[1])] for name in names])
        expected = ddpo(past, names, r.flatten().tolist())
        result = history.update(names, r, clip=None)
        assert result.flatten().tolist() == pytest.approx(expected, rel=1e-12)
        own += sum(len(past[name]) == 16 for name in names)
    assert own > 20, "the second branch was taken too"


def test_the_history_survives_a_checkpoint_and_bad_scores() -> None:
    one, other = History(2, 2), History(2, 2)
    one.update(["a", "b"], rewards([1.0, 5.0], [2.0, NAN]))
    other.load_state_dict(one.state_dict())
    assert other.rewards == {"a": [1.0, 5.0], "b": [2.0]}
    r = rewards([3.0, 3.0], [4.0, NAN])
    first, second = one.update(["a", "b"], r), other.update(["a", "b"], r)
    assert torch.equal(first, second)
    assert first[0].tolist() == [0.0, 0.0]  # all that is known of "a" is 3
    assert float(first[1, 1]) == 0.0


# -- several rewards -------------------------------------------------------------------------------


def test_each_reward_on_its_own() -> None:
    """MixGRPO: a reward of a thousand times the scale does not count a thousand times."""
    one, two = rewards([1.0, 2.0, 6.0]), rewards([5000.0, 1000.0, 3000.0])
    options = {"ddof": 1, "epsilon": 1e-8}
    result = weigh_each([one, two], [3.0, 1.0], **options)
    expected = 0.75 * group_advantages(one, **options) + 0.25 * group_advantages(two, **options)
    torch.testing.assert_close(result, expected, rtol=1e-15, atol=0)
    torch.testing.assert_close(
        weigh_each([one, two * 1000], [3.0, 1.0], **options), result, rtol=1e-11, atol=0
    )
    assert float(weigh_each([one, two], [1, 1], clip=0.1, **options).abs().max()) == 0.1


def test_a_sample_without_one_reward_has_none() -> None:
    one, two = rewards([1.0, 2.0, 6.0]), rewards([NAN, 1.0, 3.0])
    result = weigh_each([one, two], [1.0, 1.0])
    alone = group_advantages(rewards([NAN, 2.0, 6.0])) + group_advantages(two)
    torch.testing.assert_close(result, alone / 2)
    assert float(result[0, 0]) == 0.0


# -- best of n -------------------------------------------------------------------------------------


def test_best_of_keeps_both_ends() -> None:
    a = torch.tensor([[0.5, -2.0, 1.0, -1.0, 0.1, 2.0], [3.0, 2.0, 1.0, 0.0, -1.0, -2.0]])
    assert best_of(a, 4).tolist() == [[0, -2, 1, -1, 0, 2], [3, 2, 0, 0, -1, -2]]
    assert best_of(a, 3).tolist() == [[0, -2, 1, 0, 0, 2], [3, 2, 0, 0, 0, -2]]  # odd: on top
    assert torch.equal(best_of(a, 6), a)


# -- DPOK's ratio ----------------------------------------------------------------------------------


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("change", [0.2, -0.2, 0.05])
def test_a_clamped_ratio_has_no_gradient_outside(advantage: float, change: float) -> None:
    old = torch.tensor([-0.6], dtype=torch.float64)
    a = torch.tensor([advantage], dtype=torch.float64)
    new = (old + change).requires_grad_()
    loss = clipped_surrogate(new, old, a, 0.1, "clamp").sum()
    (expected,) = torch.autograd.grad(loss, new)
    result = surrogate_coefficient(new, old, a, 0.1, "clamp")
    torch.testing.assert_close(result, expected)
    assert (float(result) == 0.0) == (abs(change) > 0.1)


def test_gdpo_normalises_twice() -> None:
    one = torch.tensor([[0.0, 1.0, 5.0], [2.0, 2.0, 2.0], [3.0, 1.0, 2.0]], dtype=torch.float64)
    two = torch.tensor([[7.0, 1.0, 1.0], [4.0, 4.0, 4.0], [0.0, 9.0, 3.0]], dtype=torch.float64)
    weights = [2.0, 0.5]
    options: dict[str, Any] = {"ddof": 0, "epsilon": 1e-6}
    x = np.zeros((3, 3))
    for reward, weight in zip((one.numpy(), two.numpy()), weights, strict=True):
        deviation = reward - reward.mean(1, keepdims=True)
        x += weight * deviation / (reward.std(1, keepdims=True) + 1e-6)
    expected = (x - x.mean()) / (x.std() + 1e-6)
    mine = gdpo([one, two], weights, clip=None, **options)
    np.testing.assert_allclose(mine, expected, rtol=1e-12, atol=1e-12)
    assert mine[1].tolist() == [0.0, 0.0, 0.0]  # exactly: such a group has no gradient
    np.testing.assert_allclose(
        gdpo([one, two * 1e6], weights, clip=1.0, **options), mine.clamp(-1, 1), rtol=1e-5
    )
    one[0, 0] = math.nan
    left = gdpo([one, two], weights, clip=None, **options)
    assert left[0, 0] == 0.0 and left.isfinite().all()
