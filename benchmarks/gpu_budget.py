"""What a workload of `gpu_check` needs, in seconds and bytes, before it is started.

From the counts in `gpu_check.yaml`, of one step of one sample: forward f and backward b. T steps,
S of them trained, G generations: native takes G (T f + S (f + b)), the lean schedules
G (T f + S b), and activation checkpointing one f more for each b.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GIB = 2**30
GENERATIONS = 2
SHARE = 0.5
"""Of the rate of a large matrix product, what a whole transformer is taken to achieve: element-wise
kernels and launches are the rest. On the safe side, as it only decides how much is tried."""
ROOM = 0.92
"""Of the free memory, what tensors may fill: the context, workspaces and gaps are the rest."""
START = 20.0
"""Seconds until a command has imported everything."""
LOADED = 1e9
"""Bytes a second from a file to the GPU, the alignment on the host included."""
WRITTEN = 0.5e9
"""Bytes a second of random weights from the GPU to a file."""
EXTRA = 2
"""Updates beside the rounds: the one to warm up and the one whose memory is measured."""
ROUNDS = (3, 2, 1)
LEAN = ("native", "reweight", "streaming")
ALL = ("native", "retain", "reweight", "streaming")


@dataclass(frozen=True)
class Attempt:
    """Schedules to time together, in turn, with activation checkpointing or without."""

    schedules: tuple[str, ...]
    checkpointing: bool


def update_tflop(workload: Mapping[str, Any], schedule: str, *, checkpointing: bool) -> float:
    """10^12 operations of one update."""
    c, steps, selected = workload["costs"], workload["steps"], workload["selected"]
    backward = c["backward"] + (c["forward"] if checkpointing else 0.0)
    again = c["forward"] if schedule == "native" else 0.0
    return float(GENERATIONS * (steps * c["forward"] + selected * (again + backward)))


def seconds(
    workload: Mapping[str, Any], attempt: Attempt, rounds: int, *, tflops: float, size: int
) -> float:
    """Of `leangrpo bench` from start to end, for a model of so many bytes."""
    each = [
        update_tflop(workload, s, checkpointing=attempt.checkpointing) for s in attempt.schedules
    ]
    return START + size / LOADED + (rounds + EXTRA) * sum(each) / (SHARE * tflops)


def rounds_for(
    workload: Mapping[str, Any], attempt: Attempt, left: float, *, tflops: float, size: int
) -> int:
    """The most rounds that take a quarter of the time left; one, if they take all; else none."""
    facts = {"tflops": tflops, "size": size}
    for rounds in ROUNDS:
        if seconds(workload, attempt, rounds, **facts) <= left / 4:  # type: ignore[arg-type]
            return rounds
    return int(seconds(workload, attempt, 1, **facts) <= left)  # type: ignore[arg-type]


def need(
    workload: Mapping[str, Any], schedules: Sequence[str], *, size: int, checkpointing: bool
) -> int:
    """Bytes on the GPU: weights, gradients, and the graphs that a schedule holds at once.

    Gradients: native and retain hold one, reweight the sums it waits with too, streaming one more.
    Graphs: one step's, of retain all trained steps' of the group.
    """
    c = workload["costs"]
    gradient = c["trained"] * 1e6 * c["bytes"]
    adapters = gradient if c["bytes"] > 2 else 0.0
    kept = c["kept_checkpointed" if checkpointing else "kept"] * GIB
    # a unit is made anew beside what is kept: with checkpointing a layer's share of a whole graph
    beside = 0.1 * c["kept"] * GIB if checkpointing else 0.0
    most = 0.0
    for schedule in schedules:
        copies = {"native": 1, "retain": 1, "reweight": 2, "streaming": 3}[schedule]
        graphs = GENERATIONS * workload["selected"] if schedule == "retain" else 1
        most = max(most, copies * gradient + graphs * kept)
    return math.ceil(size + adapters + most + beside)


def attempts(
    workload: Mapping[str, Any], schedules: Sequence[str], *, free: float | None, size: int
) -> list[Attempt]:
    """What to try first: all schedules in turn; where retain's graphs have no room, the others, and
    then those that hold graphs with checkpointing; where nothing has room, nothing."""
    waiting, found = [Attempt(tuple(schedules), False)], []
    while waiting:
        a = waiting.pop(0)
        most = need(workload, a.schedules, size=size, checkpointing=a.checkpointing)
        if free is None or most <= ROOM * free:
            found.append(a)
        else:
            waiting += after_memory_ran_out(a)
    return found


def after_memory_ran_out(attempt: Attempt) -> list[Attempt]:
    """What needs less than an attempt that did not fit, and still compares with native."""
    if attempt.checkpointing:
        kept = tuple(s for s in attempt.schedules if s != "retain")
        return [Attempt(kept, True)] if kept != attempt.schedules and len(kept) > 1 else []
    lean = tuple(s for s in attempt.schedules if s != "retain")
    if lean == attempt.schedules:
        return [Attempt(lean, True)]
    held = tuple(s for s in attempt.schedules if s != "streaming")
    return [Attempt(lean, False), Attempt(held, True)]
