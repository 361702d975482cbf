"""What retain's graphs need, and what they take within a budget; that the gradients are the same
bits."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from .bench_memory import sample_group
from .config import Config
from .console import for_tables
from .data import SampleKey, Transition
from .errors import problem
from .memory import peak_memory
from .parallel import world_size
from .policy import Policy
from .schedules import Retain
from .selection import Selection, select
from .setup import make_policy, make_schedule, pick_device
from .stopwatch import Stopwatch

PART = 10
"""The budget, where none is given: one part in this many of what the graphs need."""

UNLIMITED = 1 << 62
"""A budget that everything fits into: it only counts."""


def offload(config: Config, budget: int | None = None, rounds: int = 3) -> dict[str, Any]:
    """One group under retain, as it is and within `budget` bytes; prints a table.

    Of each, `waiting`: the most that waited on the device as the schedule itself counts it (0 for
    plain retain, which counts nothing); `held`: the most that was held between two steps of the
    sampler above what there was before, from the allocator; `peak`: the same at any time of the
    update; `seconds`, the median of `rounds` in turn. Beside them `needed`, the bytes that wait
    when all of them may, `offloaded` to the host, `ratio` of the seconds and `bitwise`, whether
    every gradient is the same bits. Raises LeanError on several ranks.
    """
    if world_size() > 1:
        raise problem("--offload", True, "it measures one process", "Start it without torchrun.")
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    policy = make_policy(config, pick_device(config.run.device))
    steps = select(config.selection, policy.plan().std.tolist(), seed=config.seed, update=0)
    job = _Job(config, policy, steps)

    counting = job.retain(UNLIMITED)
    same = [job.update(counting)]
    assert counting.offload is not None
    needed = counting.offload.peak_bytes
    budget = needed // PART if budget is None else budget

    plain, bounded = job.retain(None), job.retain(budget)
    assert bounded.offload is not None
    rows: list[dict[str, Any]] = [
        {"schedule": name, "budget": b} for name, b in (("retain", None), ("budget", budget))
    ]
    seconds: dict[str, list[float]] = {"retain": [], "budget": []}
    for row, schedule in zip(rows, (plain, bounded), strict=True):
        row |= job.measure(schedule)
    waiting, offloaded = bounded.offload.peak_bytes, bounded.offload.offloaded_bytes
    reference = job.update(plain)
    for _ in range(rounds):
        for name, schedule in (("retain", plain), ("budget", bounded)):
            job.settle()
            start = time.perf_counter()
            same.append(job.update(schedule))
            job.settle()
            seconds[name].append(time.perf_counter() - start)
    for row in rows:
        row["seconds"] = statistics.median(seconds[row["schedule"]])
    result = {
        "pipeline": config.model.pipeline,
        "train": config.model.train,
        "dtype": config.model.dtype,
        "group": config.rollout.generations,
        "selected": len(steps.selected),
        "needed": needed,
        "budget": budget,
        "waiting": waiting,
        "offloaded": offloaded,
        "ratio": statistics.median(
            b / a for a, b in zip(seconds["retain"], seconds["budget"], strict=True)
        ),
        "bitwise": all(_same(reference, other) for other in same),
        "rows": rows,
    }
    _print(result)
    return result


class _Job:
    def __init__(self, config: Config, policy: Policy, steps: Selection) -> None:
        self.config, self.policy, self.steps = config, policy, steps

    def retain(self, budget: int | None) -> Retain:
        """The schedule with a budget of `budget` bytes."""
        memory = self.config.memory.model_copy(update={"activations": budget})
        config = self.config.model_copy(update={"schedule": "retain", "memory": memory})
        made = make_schedule(config, self.policy, Stopwatch(self.policy.device))
        assert isinstance(made, Retain)
        return made

    def update(self, schedule: Retain, mark: Any = None) -> list[Tensor | None]:
        """One group's gradients, with advantages of one and minus one."""
        rollout, num = self.config.rollout, len(self.steps.selected)

        def take(transition: Transition) -> None:
            schedule.transition(transition)
            if mark is not None:
                mark("step")

        schedule.begin(rollout.generations, num)
        keys = [SampleKey(0, 0, m) for m in range(rollout.generations)]
        for first in range(0, len(keys), rollout.micro_batch):
            some = keys[first : first + rollout.micro_batch]
            sample_group(self.policy, schedule, self.steps, some, take)
        if mark is not None:
            mark("backward")
        schedule.advantages({key: 1.0 if key.generation % 2 else -1.0 for key in keys})
        schedule.finish()
        gradient = [p.grad for p in self.policy.parameters]
        for parameter in self.policy.parameters:
            parameter.grad = None
        return gradient

    def measure(self, schedule: Retain) -> dict[str, int]:
        """What the allocator says of an update."""
        with peak_memory(self.policy.device) as trace:
            self.update(schedule, trace.mark)
        return {"held": max(p.held for p in trace.phases), "peak": trace.peak}

    def settle(self) -> None:
        """Wait for the device."""
        if self.policy.device.type == "cuda":
            torch.cuda.synchronize(self.policy.device)


def _same(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    """Whether gradients are the same bits."""
    return all(
        a is b if a is None or b is None else torch.equal(a, b)
        for a, b in zip(one, other, strict=True)
    )


def _print(r: dict[str, Any]) -> None:
    console = for_tables()
    table = Table(
        title=f"{r['pipeline']}, {r['train']}, {r['dtype']}: a group of {r['group']}, "
        f"{r['selected']} steps trained",
        title_justify="left",
    )
    table.add_column("retain")
    columns = ("budget, MB", "waiting, MB", "held between steps, MB", "update's peak, MB", "s")
    for column in columns:
        table.add_column(column, justify="right")
    for name, row, waiting in zip(
        ("plain", "within the budget"), r["rows"], (r["needed"], r["waiting"]), strict=True
    ):
        budget = "none" if row["budget"] is None else f"{row['budget'] / 1e6:.3f}"
        sizes = (f"{n / 1e6:.3f}" for n in (waiting, row["held"], row["peak"]))
        table.add_row(name, budget, *sizes, f"{row['seconds']:.3f}")
    console.print(table)
    verdict = "below" if r["waiting"] <= r["budget"] else "ABOVE"
    console.print(
        f"Needed {r['needed']} bytes, budget {r['budget']}; at most {r['waiting']} waited on the "
        f"device, {verdict} the budget; {r['offloaded']} went to the host. Time "
        f"{r['ratio']:.2f} of plain retain's. Gradients bitwise equal: "
        f"{'yes' if r['bitwise'] else 'NO'}.",
        highlight=False,
        soft_wrap=True,
    )
