"""Who samples what: no sample lost, none twice, and all ranks in step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leangrpo.errors import LeanError
from leangrpo.layout import Layout, Slot, Wave, classic_layout, shared_layout

Build = Callable[[int, int, int, int], Layout]

BOTH = pytest.mark.parametrize("build", [shared_layout, classic_layout])
COUNTS = (st.integers(1, 9), st.integers(1, 13), st.integers(1, 13), st.integers(1, 5))


def plan(layout: Layout) -> list[tuple[Wave, ...]]:
    return [layout.of(rank) for rank in range(layout.ranks)]


def real(wave: Wave) -> list[tuple[int, int]]:
    """The (prompt, generation) pairs a rank owns in a wave, in running order."""
    return [(slot.prompt, g) for slot in wave.slots if not slot.idle for g in slot.generations]


def table(layout: Layout) -> list[str]:
    """A line a rank: `prompt:generations` of each slot, `-` before an idle one, `|` after a wave.

    Generations are single digits.
    """

    def show(slot: Slot) -> str:
        return f"{'-' * slot.idle}{slot.prompt}:{''.join(map(str, slot.generations))}"

    return [" | ".join(" ".join(map(show, w.slots)) for w in waves) for waves in plan(layout)]


# -- properties ----------------------------------------------------------------------------------


@BOTH
@given(*COUNTS)
def test_every_sample_once(build: Build, b: int, m: int, r: int, micro: int) -> None:
    seen = Counter(
        pair for waves in plan(build(b, m, r, micro)) for wave in waves for pair in real(wave)
    )
    assert seen == Counter(product(range(b), range(m)))


@BOTH
@given(*COUNTS)
def test_all_ranks_run_the_same_number_of_slots(
    build: Build, b: int, m: int, r: int, micro: int
) -> None:
    layout = build(b, m, r, micro)
    shapes = {tuple(len(wave.slots) for wave in waves) for waves in plan(layout)}
    assert shapes == {(ceil(layout.held / micro),) * layout.waves}


@BOTH
@given(*COUNTS)
def test_a_prompt_is_finished_by_its_peers_in_one_wave(
    build: Build, b: int, m: int, r: int, micro: int
) -> None:
    layout = build(b, m, r, micro)
    found: dict[int, set[tuple[int, int]]] = {}
    for rank, waves in enumerate(plan(layout)):
        for w, wave in enumerate(waves):
            owned = {prompt for prompt, _ in real(wave)}
            assert owned == (set() if wave.prompt is None else {wave.prompt})
            if wave.prompt is not None:
                found.setdefault(wave.prompt, set()).add((w, rank))
    for prompt in range(b):
        when, peers = {w for w, _ in found[prompt]}, layout.peers(prompt)
        assert len(when) == 1 and peers in layout.teams
        assert found[prompt] == {(w, rank) for w in when for rank in peers}
    ranks = [rank for team in layout.teams for rank in team]
    assert ranks == list(range(len(ranks))) and len(ranks) <= r


@BOTH
@given(*COUNTS)
def test_gathered_rewards_come_in_the_order_of_generations(
    build: Build, b: int, m: int, r: int, micro: int
) -> None:
    layout = build(b, m, r, micro)
    owned = [{w.prompt: real(w) for w in waves} for waves in plan(layout)]
    for prompt in range(b):
        rows = [owned[rank][prompt] for rank in layout.peers(prompt)]
        assert max(map(len, rows)) == layout.held  # filled up to this, all rows can be gathered
        assert [rows[i][j] for i, j in layout.places()] == [(prompt, g) for g in range(m)]


@BOTH
@given(*COUNTS)
def test_slots_hold_a_micro_batch_and_an_idle_one_repeats_a_real_one(
    build: Build, b: int, m: int, r: int, micro: int
) -> None:
    ranks = plan(build(b, m, r, micro))
    for wave in zip(*ranks, strict=True):
        for slots in zip(*(w.slots for w in wave), strict=True):  # at the same time
            busy = {(s.prompt, s.generations) for s in slots if not s.idle}
            assert busy
            for rank, slot in enumerate(slots):
                assert 1 <= len(slot.generations) <= micro
                assert list(slot.generations) == sorted(set(slot.generations))
                assert not slot.idle or (slot.prompt, slot.generations) in busy
                # A team that has a prompt stands in with that prompt.
                assert wave[rank].prompt in (None, slot.prompt)
    for waves in ranks:
        for w in waves:
            sizes = [len(s.generations) for s in w.slots if not s.idle]
            assert all(size == micro for size in sizes[:-1])  # only a rank's last one is short
            idle = [s.idle for s in w.slots]
            assert idle == sorted(idle)  # work first


@given(*COUNTS)
def test_a_rank_holds_as_few_generations_and_waves_as_can_be(
    b: int, m: int, r: int, micro: int
) -> None:
    layout = shared_layout(b, m, r, micro)
    assert layout.held == ceil(m / r)
    # Teams with that few generations a rank have at least ceil(M / held) ranks.
    most_teams = r // ceil(m / layout.held)
    assert len(layout.teams) == most_teams and layout.waves == ceil(b / most_teams)


@given(st.integers(1, 9), st.integers(1, 13), st.integers(1, 5))
def test_more_ranks_change_no_shape_of_a_micro_batch_of_one(b: int, m: int, r: int) -> None:
    for waves in plan(shared_layout(b, m, r, 1)):
        assert all(len(slot.generations) == 1 for wave in waves for slot in wave.slots)


@BOTH
@given(*COUNTS)
def test_one_rank_runs_the_order_of_a_single_process(
    build: Build, b: int, m: int, r: int, micro: int
) -> None:
    expected = tuple(
        Wave(p, tuple(Slot(p, tuple(range(m))[g : g + micro]) for g in range(0, m, micro)))
        for p in range(b)
    )
    assert build(b, m, 1, micro).of(0) == expected


# -- by hand -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        pytest.param((1, 4, 2, 1), ["0:0 0:2", "0:1 0:3"], id="M > R"),
        pytest.param((1, 4, 2, 2), ["0:02", "0:13"], id="M > R, micro-batches of 2"),
        pytest.param((2, 3, 3, 1), ["0:0 | 1:0", "0:1 | 1:1", "0:2 | 1:2"], id="M = R"),
        pytest.param((2, 2, 4, 1), ["0:0", "0:1", "1:0", "1:1"], id="M < R"),
        pytest.param((1, 6, 4, 1), ["0:0 0:4", "0:1 0:5", "0:2 -0:4", "0:3 -0:4"], id="6 on 4"),
        pytest.param((1, 6, 4, 2), ["0:04", "0:15", "0:2", "0:3"], id="6 on 4, short ones"),
        pytest.param((1, 5, 2, 2), ["0:02 0:4", "0:13 -0:4"], id="5 on 2, micro-batches of 2"),
        pytest.param(
            (3, 2, 4, 1),
            ["0:0 | 2:0", "0:1 | 2:1", "1:0 | -2:0", "1:1 | -2:0"],
            id="3 prompts on 4 ranks, M = 2",
        ),
        pytest.param(
            (2, 2, 5, 1),
            ["0:0", "0:1", "1:0", "1:1", "-0:0"],
            id="a rank in no team",
        ),
        pytest.param((1, 1, 2, 1), ["0:0", "-0:0"], id="one sample"),
    ],
)
def test_shared_by_hand(counts: tuple[int, int, int, int], expected: list[str]) -> None:
    assert table(shared_layout(*counts)) == expected


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        pytest.param((2, 3, 2, 1), ["0:0 0:1 0:2", "1:0 1:1 1:2"], id="even"),
        pytest.param((3, 3, 2, 2), ["0:01 0:2 | 2:01 2:2", "1:01 1:2 | -2:01 -2:2"], id="uneven"),
        pytest.param((1, 2, 3, 2), ["0:01", "-0:01", "-0:01"], id="fewer prompts than ranks"),
    ],
)
def test_classic_by_hand(counts: tuple[int, int, int, int], expected: list[str]) -> None:
    layout = classic_layout(*counts)
    assert table(layout) == expected
    assert layout.teams == tuple((rank,) for rank in range(layout.ranks))


def test_teams_of_another_size() -> None:
    """Neither of the two layouts has several teams that run more than one round; a plan may."""
    assert table(Layout(3, 3, 4, 1, teams=((0, 1), (2, 3)))) == [
        "0:0 0:2 | 2:0 2:2",
        "0:1 -0:2 | 2:1 -2:2",
        "1:0 1:2 | -2:0 -2:2",
        "1:1 -1:2 | -2:0 -2:2",
    ]


def test_peers_by_hand() -> None:
    layout = shared_layout(3, 2, 5, 1)
    assert layout.teams == ((0, 1), (2, 3))
    assert [layout.peers(prompt) for prompt in range(3)] == [(0, 1), (2, 3), (0, 1)]
    assert [wave.prompt for wave in layout.of(2)] == [1, None]
    assert [wave.prompt for wave in layout.of(4)] == [None, None]
    assert shared_layout(1, 6, 4, 1).places() == ((0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1))


# -- errors --------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("counts", "setting"),
    [
        ((0, 1, 1, 1), "rollout.prompts"),
        ((1, 0, 1, 1), "rollout.generations"),
        ((1, 1, 0, 1), "ranks"),
        ((1, 1, 1, -1), "rollout.micro_batch"),
    ],
)
def test_counts_below_one(build: Build, counts: tuple[int, int, int, int], setting: str) -> None:
    with pytest.raises(LeanError, match=f"`{setting}` is (0|-1): it must be at least 1"):
        build(*counts)


@pytest.mark.parametrize("outside", [-1, 2])
def test_outside(outside: int) -> None:
    layout = shared_layout(2, 2, 2, 1)
    with pytest.raises(LeanError, match=f"no rank {outside}: the layout has ranks 0 to 1"):
        layout.of(outside)
    with pytest.raises(LeanError, match=f"no prompt {outside}: the update has 2"):
        layout.peers(outside)
