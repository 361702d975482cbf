"""Which steps are trained: the rules, their properties, and draws that never change."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leangrpo.errors import LeanError
from leangrpo.selection import Selection, candidates, select
from leangrpo.settings import Selection as Settings

NOISE = [0.7] * 10
CPS = [*([0.5] * 9), 0.0]  # flow_cps adds no noise in the last step


@dataclass(frozen=True)
class Rule:
    """The settings of selection, with FlowGRPO's defaults."""

    rule: str = "fraction"
    per: str = "update"
    fraction: float = 1.0
    size: int | None = None
    range: tuple[int, int] | None = None
    move: str = "random"
    every: int = 25
    stride: int = 1
    decay: str = "constant"
    wrap: bool = True
    steps: tuple[int, ...] | None = None
    last: bool = False
    outside: str = "stochastic"
    last_noise: bool = True


def chosen(stds: list[float] = NOISE, *, seed: int = 0, update: int = 0, **rule: Any) -> Selection:
    return select(Rule(**rule), stds, seed=seed, update=update)


# -- candidates ----------------------------------------------------------------------------------


def test_candidates() -> None:
    assert candidates(4, [1.0, 1.0, 1.0, 1.0], last=False) == (0, 1, 2)
    assert candidates(4, [1.0, 1.0, 1.0, 1.0], last=True) == (0, 1, 2, 3)
    assert candidates(4, [1.0, 0.0, 1.0, 0.0], last=True) == (0, 2)
    assert candidates(1, [1.0], last=False) == ()


def test_candidates_need_a_std_per_step() -> None:
    with pytest.raises(LeanError, match="`sampling.steps` is 4: the sampler has 3 steps"):
        candidates(4, [1.0] * 3, last=False)


# -- rules ---------------------------------------------------------------------------------------


def test_fraction_takes_the_first() -> None:
    assert chosen(fraction=1.0).selected == tuple(range(9))
    assert chosen(fraction=0.5).selected == (0, 1, 2, 3)
    assert chosen(fraction=0.5, last=True).selected == (0, 1, 2, 3, 4)
    assert chosen(fraction=0.01).selected == (0,)


def test_fraction_is_of_decimal_numbers() -> None:
    """int(100 x 0.29) is 28 in binary arithmetic."""
    assert len(chosen([1.0] * 100, fraction=0.29, last=True).selected) == 29
    assert len(chosen([1.0] * 100, fraction=0.57, last=True).selected) == 57


@settings(max_examples=100, deadline=None)
@given(
    num=st.integers(2, 60),
    fraction=st.floats(0.01, 1.0),
    seed=st.integers(0, 2**63 - 1),
    update=st.integers(0, 10**6),
    last=st.booleans(),
)
def test_random_draws_as_many_candidates_as_fraction(
    num: int, fraction: float, seed: int, update: int, last: bool
) -> None:
    stds = [0.0 if i % 7 == 3 else 0.4 for i in range(num)]
    place = {"seed": seed, "update": update, "fraction": fraction, "last": last}
    drawn = chosen(stds, rule="random", **place).selected
    assert len(drawn) == len(chosen(stds, rule="fraction", **place).selected) >= 1
    assert list(drawn) == sorted(set(drawn))
    assert set(drawn) <= set(candidates(num, stds, last))
    assert drawn == chosen(stds, rule="random", **place).selected


@settings(max_examples=100, deadline=None)
@given(
    lo=st.integers(0, 8),
    length=st.integers(1, 9),
    size=st.integers(1, 9),
    update=st.integers(0, 10**6),
)
def test_window_is_contiguous_and_inside(lo: int, length: int, size: int, update: int) -> None:
    hi = min(lo + length, 9)
    size = min(size, hi - lo)
    steps = chosen(rule="window", size=size, range=(lo, hi), update=update).selected
    assert steps == tuple(range(steps[0], steps[0] + size))
    assert lo <= steps[0]
    assert steps[-1] < hi


def test_window_reaches_every_start_equally_often() -> None:
    """FlowGRPO-Fast on SD3: 3 steps in [0, 5), starts 0, 1 and 2."""
    starts = Counter(
        chosen(rule="window", size=3, range=(0, 5), update=update).selected[0]
        for update in range(3000)
    )
    assert set(starts) == {0, 1, 2}
    assert all(abs(n - 1000) < 130 for n in starts.values())  # five standard deviations


def test_window_without_a_range_lies_in_the_candidates() -> None:
    assert chosen(rule="window", size=9).selected == tuple(range(9))
    assert chosen(CPS, rule="window", size=9, last=True).selected == tuple(range(9))


def test_random_draws_every_step_equally_often() -> None:
    counts = Counter(
        step
        for update in range(3000)
        for step in chosen(rule="random", fraction=1 / 3, update=update).selected
    )
    assert set(counts) == set(range(9))
    assert all(abs(n - 1000) < 130 for n in counts.values())


def test_list_is_taken_as_it_is() -> None:
    assert chosen(rule="list", steps=(7, 0, 9)).selected == (0, 7, 9)


@pytest.mark.parametrize(
    "rule",
    [{"fraction": 0.5}, {"rule": "random", "fraction": 0.5}, {"rule": "list", "steps": (1, 4)}],
)
def test_outside(rule: dict[str, Any]) -> None:
    everywhere = chosen(CPS, **rule)
    assert everywhere.stochastic == tuple(range(9))
    inside = chosen(CPS, outside="deterministic", **rule)
    assert inside.stochastic == inside.selected == everywhere.selected


def test_the_last_step_draws_noise_though_it_is_not_trained() -> None:
    selection = chosen()
    assert 9 not in selection.selected
    assert 9 in selection.stochastic


# -- draws that must not change, on any machine, in any version ----------------------------------


PINNED_RANDOM = [(1, 3, 4, 7), (1, 4, 6, 7), (1, 3, 4, 7), (1, 2, 6, 8)]
PINNED_WINDOW = [2, 4, 1, 3, 0, 7, 7, 4, 5, 3, 5, 5]


def test_pinned_draws() -> None:
    drawn = [chosen(rule="random", fraction=0.5, seed=7, update=u).selected for u in range(4)]
    assert drawn == PINNED_RANDOM
    starts = [chosen(rule="window", size=2, seed=7, update=u).selected[0] for u in range(12)]
    assert starts == PINNED_WINDOW


def test_seeds_and_updates_are_told_apart() -> None:
    draws = {
        (seed, update): tuple(
            chosen([0.5] * 40, rule="random", fraction=0.5, seed=seed, update=update).selected
        )
        for seed in range(5)
        for update in range(5)
    }
    assert len(set(draws.values())) == 25


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stds", "rule", "message"),
    [
        (NOISE, {"rule": "list"}, "`selection.steps` is []: rule list needs at least one step"),
        (NOISE, {"rule": "list", "steps": (3, 10)}, "is [3, 10]: step 10 is outside 0..9."),
        (NOISE, {"rule": "list", "steps": (-1,)}, "`selection.steps` is [-1]: step -1 is outside"),
        (NOISE, {"rule": "list", "steps": (2, 5, 2)}, "is [2, 5, 2]: step 2 is listed twice."),
        (CPS, {"rule": "list", "steps": (9,)}, "step 9 adds no noise, so it has no log-prob"),
        (NOISE, {"rule": "window"}, "`selection.size` is None: the window [0, 9) has 1 to 9."),
        (NOISE, {"rule": "window", "size": 4, "range": (0, 3)}, "is 4: the window [0, 3) has 1 to"),
        (NOISE, {"rule": "window", "size": 1, "range": (5, 5)}, "is [5, 5]: it is empty;"),
        (NOISE, {"rule": "window", "size": 2, "range": (7, 10)}, "step 9 cannot be trained; the"),
        ([0.7], {}, "no step is left to train: of the sampler's 1 only steps with noise count"),
        ([0.0] * 4, {"last": True}, "only steps with noise count, with the last one."),
        (NOISE, {"rule": "all"}, "`selection.rule` is 'all': must be fraction, random, window"),
    ],
)
def test_refused(stds: list[float], rule: dict[str, Any], message: str) -> None:
    with pytest.raises(LeanError) as caught:
        chosen(stds, **rule)
    assert message in str(caught.value)


def test_the_settings_are_a_rule() -> None:
    assert select(Settings(), NOISE, seed=0, update=0).stochastic == tuple(range(10))
