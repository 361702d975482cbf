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


# -- draws of a group, of a sample ----------------------------------------------------------------


def drawn(per: str, *, rule: str = "random") -> list[list[tuple[int, ...]]]:
    """Steps by (group, sample) of one update, of 20 candidates."""
    settings = Rule(rule=rule, per=per, fraction=0.5, size=3 if rule == "window" else None)
    return [
        [select(settings, [0.5] * 21, seed=0, update=3, group=p, sample=g).selected for g in (0, 1)]
        for p in (0, 1)
    ]


@pytest.mark.parametrize("rule", ["random", "window"])
def test_who_has_a_draw_of_its_own(rule: str) -> None:
    (a, b), (c, d) = drawn("update", rule=rule)
    assert (
        a
        == b
        == c
        == d
        == select(
            Rule(rule=rule, fraction=0.5, size=3 if rule == "window" else None),
            [0.5] * 21,
            seed=0,
            update=3,
        ).selected
    )
    (a, b), (c, d) = drawn("group", rule=rule)
    assert a == b != c == d
    everyone = [steps for group in drawn("sample", rule=rule) for steps in group]
    assert len(set(everyone)) == 4
    assert {len(steps) for steps in everyone} == {3 if rule == "window" else 10}


def test_a_quiet_last_step() -> None:
    """DanceGRPO decodes the last prediction: the last step of the sampler draws no noise."""
    assert chosen(last_noise=False).stochastic == tuple(range(9))
    assert chosen(last_noise=False, last=True).stochastic == tuple(range(10))  # it is trained


# -- MixGRPO's window -----------------------------------------------------------------------------


def starts(num: int, **rule: Any) -> list[int]:
    """Where a progressive window of 4 stands in the 23 candidates of MixGRPO's T = 25."""
    rule = {"rule": "window", "size": 4, "range": (0, 23), "move": "progressive"} | rule
    return [chosen([0.5] * 25, update=u, **rule).selected[0] for u in range(num)]


def test_mixgrpos_window() -> None:
    assert starts(300) == [u // 25 for u in range(300)]  # the published run ends at position 11
    assert starts(300, every=20) == [u // 20 for u in range(300)]  # Flash
    assert starts(300, every=20, stride=0) == [0] * 300  # Flash*


def test_the_window_goes_back_to_the_start() -> None:
    assert starts(45, every=1) == [u % 20 for u in range(45)]
    assert starts(45, every=1, wrap=False) == [min(u, 19) for u in range(45)]
    assert starts(9, every=1, stride=8) == [0, 8, 16] * 3  # 24 would leave the range


def test_the_window_hurries() -> None:
    linear = Counter(starts(200, every=10, decay="linear", wrap=False))
    expected = {c: max(1, int(10 * (1 - c / 20) + c / 20)) for c in range(19)}
    assert {c: linear[c] for c in range(19)} == expected
    assert (expected[0], expected[18]) == (10, 1)
    late = Counter(starts(200, every=5, decay="exponential", wrap=False))
    assert [late[c] for c in range(19)] == [5] * 14 + [5, 5, 4, 4, 4]  # ceil(5 exp(-0.1 (c-13)))


def test_a_long_run_still_finds_its_window() -> None:
    assert starts(1, every=7, stride=3)[0] == 0
    rule = {"rule": "window", "size": 4, "move": "progressive", "every": 7, "stride": 3}
    assert chosen([0.5] * 25, update=10**6, **rule).selected  # seconds would be too long a search
