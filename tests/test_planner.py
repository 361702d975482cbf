"""The planner against updates worked out by hand: seconds and bytes of each schedule."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from leangrpo.costs import Costs, Key, Option, StepCost, Workload
from leangrpo.planner import predict

# Binary fractions, so that sums are exact.
STEP = StepCost(
    forward=1.0,
    forward_grad=2.0,
    backward=3.0,
    replay=2.5,
    call=0.5,
    decode=0.25,
    kept=10,
    forward_peak=3,
    forward_grad_peak=12,
    backward_first_peak=7,
    backward_peak=5,
    decode_peak=4,
)
BATCH = replace(STEP, kept=20, forward_grad_peak=24, waiting=26, waiting_before=13, fold=0.75)
COSTS = Costs(
    steps={Key(1): STEP, Key(2): STEP, Key(2, per_sample=True): BATCH},
    resident=100,
    gradient=20,
    waiting=20,
    summed=20,
    stepped=20,
    transition=1,
    optimizer_peak=6,
    add=0.125,
    optimizer=1.0,
)
LOAD = Workload(steps=4, selected=2, held=2, waves=1)
SCHEDULES = ("native", "retain", "reweight", "streaming")


def test_native() -> None:
    """Two samples of call + 4 forwards, then a replay and a backward for each selected step.

    The peak is the second backward: all 4 remembered steps, a gradient, a graph and 5 more."""
    p = predict(LOAD, COSTS, Option("native"))
    assert p.stages == {
        "rollout": 9.0,
        "decode": 0.5,
        "recompute": 10.0,
        "backward": 12.0,
        "optimizer": 1.0,
    }
    assert (p.seconds, p.peak_bytes, p.at) == (32.5, 100 + 4 + 20 + 10 + 5, "a backward")


def test_retain() -> None:
    """No replay; 4 graphs wait. The second backward has one less, a gradient and 5 more."""
    p = predict(LOAD, COSTS, Option("retain"))
    assert p.seconds == 2 * (0.5 + 2 * 1 + 2 * 2) + 2 * 0.25 + 4 * 3 + 1
    assert (p.peak_bytes, p.at) == (100 + 4 + 3 * 10 + 20 + 5, "a backward")


def test_retain_on_the_host() -> None:
    """A budget of 15 keeps 15 of the 40 bytes here; copies take what computing does not hide:
    of a sample's 20 bytes 5 (5 s of 8 beside 4 s of forwards), then all 20 (20 s), and the way
    back as much beside 6 s of backwards."""
    slow = replace(COSTS, host_bandwidth=1.0)
    p = predict(LOAD, slow, Option("retain", activations=15))
    assert p.stages["copy"] == (5 - 4) + (20 - 4) + (20 - 6) + 0
    assert p.peak_bytes < predict(LOAD, slow, Option("retain")).peak_bytes


def test_reweight() -> None:
    """Graphs go at once; two gradients wait, and the first becomes the sum."""
    p = predict(LOAD, COSTS, Option("reweight"))
    assert p.seconds == 2 * (0.5 + 2 * 1 + 2 * 2) + 2 * 0.25 + 4 * 3 + 2 * 0.125 + 1
    assert (p.peak_bytes, p.at) == (100 + 2 * 20 + 10 + 5, "a backward")


def test_streaming() -> None:
    """The second gradient lies beside two sums: one more addition for it, two at the end."""
    p = predict(LOAD, COSTS, Option("streaming", ahead=0))
    assert p.stages["backward"] == 4 * 3 + (1 + 2 + 2) * 0.125
    assert p.peak_bytes == 100 + 3 * 20
    assert p.at == "a gradient beside the sums it is folded into"
    for held in (4, 8):  # from the third on both sums are there, however many there are
        larger = replace(LOAD, held=held)
        assert predict(larger, COSTS, Option("streaming", ahead=0)).peak_bytes == 100 + 3 * 20 + 15
        assert predict(larger, COSTS, Option("reweight")).peak_bytes == 100 + held * 20 + 15


def test_a_batch_by_samples() -> None:
    """What waits of a batch is what was measured, and it is added at once."""
    p = predict(LOAD, COSTS, Option("reweight", 2))
    assert p.stages["backward"] == 2 * 3 + 0.75
    assert (p.peak_bytes, p.at) == (100 + 13 + 20 + 5, "a backward")
    p = predict(LOAD, COSTS, Option("streaming", 2, ahead=0))
    assert p.stages["backward"] == 2 * 3 + 2 * 0.75 + 2 * 0.125
    assert (p.peak_bytes, p.at) == (
        100 + 26 + 2 * 20,
        "gradients beside the sums they are folded into",
    )


@pytest.mark.parametrize(("drag", "seconds"), [(0.0, 34.5), (0.5, 35.5), (1.0, 36.5)])
def test_rewards_beside_sampling(drag: float, seconds: float) -> None:
    """Two rewards of 2 s: one beside the second sample, which it costs drag x 2 s, one waited for.

    On one core (drag 1) everything adds up, whatever the order."""
    costs = replace(COSTS, reward=1.5, reward_call=0.5, drag=drag)
    assert predict(LOAD, costs, Option("native")).seconds == seconds


def test_workers_score_at_once() -> None:
    """Eight rewards of 8 s, one each 4.75 s: with one worker they queue, with two they do not."""
    costs = replace(COSTS, reward=8.0)
    load = replace(LOAD, held=8)
    alone, several = (
        predict(replace(load, workers=n), costs, Option("native")).stages["reward"] for n in (1, 2)
    )
    assert alone == 8 * 8 - 7 * 4.75
    assert several == 8.0


def test_waiting_narrower() -> None:
    """A ledger in 16 bits: half a gradient waits, and the first cannot become the sum."""
    costs = replace(COSTS, waiting=10)
    p = predict(replace(LOAD, held=8), costs, Option("reweight"))
    assert p.peak_bytes == 100 + 7 * 10 + 20 + 10 + 5


def test_later_steps_are_replayed() -> None:
    """Two epochs: the second is native's, whatever the schedule of the first."""
    once = predict(LOAD, COSTS, Option("retain"))
    twice = predict(replace(LOAD, epochs=2), COSTS, Option("retain"))
    assert twice.seconds == once.seconds + 4 * (2.5 + 3) + 1


def test_ranks_add_once_or_at_every_step() -> None:
    costs = replace(COSTS, reduce=1.0, reduce_peak=7)
    load = replace(LOAD, ranks=2)
    assert predict(load, costs, Option("native")).stages["sync"] == 1
    assert predict(load, costs, Option("native", sync="step")).stages["sync"] == 4
    assert predict(replace(load, waves=3), costs, Option("reweight")).stages["sync"] == 1


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("m", [1, 2])
def test_more_costs_more(schedule: str, m: int) -> None:
    """No cost that rises makes an update faster or smaller, and no work that is more does."""
    option, load = Option(schedule, m), replace(LOAD, held=4, waves=2)
    before = predict(load, COSTS, option)

    def compare(load: Workload, costs: Costs) -> None:
        after = predict(load, costs, option)
        assert after.seconds >= before.seconds
        assert after.peak_bytes >= before.peak_bytes

    key = Key.of(option)
    for field in fields(StepCost):
        value: Any = getattr(COSTS.steps[key], field.name)
        if value is not None:
            more = replace(COSTS.steps[key], **{field.name: value * 2})
            compare(load, replace(COSTS, steps={**COSTS.steps, key: more}))
    for name in ("resident", "transition", "optimizer_peak", "reward", "add", "optimizer"):
        compare(load, replace(COSTS, **{name: getattr(COSTS, name) * 2 + 1}))
    for name in ("steps", "selected", "held", "waves"):
        compare(replace(load, **{name: getattr(load, name) * 2}), COSTS)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_add_up(schedule: str) -> None:
    costs = replace(COSTS, reward=3.0, drag=0.5)
    p = predict(replace(LOAD, held=4, waves=3), costs, Option(schedule))
    assert p.seconds == pytest.approx(sum(p.stages.values()), rel=1e-12)
