"""What gradients take while they wait, against the size of the group; and that they are right."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from .advantages import group_advantages
from .config import Config
from .console import for_tables
from .data import SampleKey, Transition
from .errors import problem
from .ledger import sum_bytes
from .memory import peak_memory
from .noise import generator
from .parallel import world_size
from .policy import Policy
from .schedules import Schedule, Statistics
from .selection import Selection, select
from .setup import make_policy, make_schedule, pick_device
from .stopwatch import Stopwatch

LEDGER_SCHEDULES = ("reweight", "streaming")


def ledger(
    config: Config, schedules: Sequence[str] | None = None, groups: Sequence[int] = (4, 16, 64)
) -> dict[str, Any]:
    """One group of each size under each schedule, and what its gradients took; prints a table.

    Rows of `schedule`, `group`, `bytes` (all gradients a schedule holds at once, summed over their
    tensors), `gradients` (the same in gradients of all trained parameters, in the dtype they are
    added up in), `peak_bytes` (the most that the update allocated at once above its start, from
    the allocator itself) and `rel_l2` (to native's gradient of the same samples). Rewards are
    drawn, from 1000 +- 0.01. Raises LeanError for a group below 2, or on several ranks.
    """
    size = config.rollout.micro_batch
    for group in groups:
        if group < 2 or group % size:
            rule = f"it must be 2 or more, and a multiple of rollout.micro_batch ({size})"
            raise problem("--groups", group, rule)
    if world_size() > 1:
        raise problem("--ledger", True, "it measures one process", "Start it without torchrun.")
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    device = pick_device(config.run.device)
    policy = make_policy(config, device)
    steps = select(config.selection, policy.plan().std.tolist(), seed=config.seed, update=0)
    one = sum_bytes(policy.parameters)
    rows: list[dict[str, Any]] = []
    for group in groups:
        native, _, _ = _update(config, policy, "native", steps, group)
        for name in schedules or LEDGER_SCHEDULES:
            gradient, statistics, peak = _update(config, policy, name, steps, group)
            rows.append(
                {
                    "schedule": name,
                    "group": group,
                    "gradients": statistics.ledger_bytes / one,
                    "bytes": statistics.ledger_bytes,
                    "peak_bytes": peak,
                    "rel_l2": float((gradient - native).norm() / native.norm()),
                }
            )
    result = {
        "pipeline": config.model.pipeline,
        "train": config.model.train,
        "dtype": config.model.dtype,
        "selected": len(steps.selected),
        "micro_batch": config.rollout.micro_batch,
        "gradient_bytes": one,
        "ledger": rows,
    }
    _print(result)
    return result


def _update(
    config: Config, policy: Policy, name: str, steps: Selection, group: int
) -> tuple[Tensor, Statistics, int]:
    """The gradient of a group, float64, what the schedule says of it, and the allocator's peak."""
    named = config.model_copy(update={"schedule": name})
    schedule = make_schedule(named, policy, Stopwatch(policy.device))
    with peak_memory(policy.device) as trace:
        statistics = update(config, policy, schedule, steps, group)
    return take_gradient(policy), statistics, trace.peak


def update(
    config: Config, policy: Policy, schedule: Schedule, steps: Selection, group: int
) -> Statistics:
    """One group from its noise to the gradient in `.grad`; the same samples at every call."""
    noise = torch.from_numpy(generator(config.seed, group).normal(size=(1, group)))
    rewards = 1000 + 0.01 * noise
    advantages = group_advantages(rewards, clip=None)
    schedule.begin(group, len(steps.selected))
    size = config.rollout.micro_batch
    for first in range(0, group, size):
        keys = [SampleKey(0, 0, m) for m in range(first, first + size)]
        sample_group(policy, schedule, steps, keys, schedule.transition)
        schedule.rewards({k: [float(rewards[0, k.generation])] for k in keys})
    every = range(group)
    own: dict[Hashable, float] = {SampleKey(0, 0, m): float(advantages[0, m]) for m in every}
    schedule.advantages(own)
    return schedule.finish()


def take_gradient(policy: Policy) -> Tensor:
    """All of `.grad` as one vector `(D,)` float64, taken away from the parameters."""
    found = [p.grad.flatten().double() for p in policy.parameters if p.grad is not None]
    for parameter in policy.parameters:
        parameter.grad = None
    return torch.cat(found)


def sample_group(
    policy: Policy,
    schedule: Schedule,
    steps: Selection,
    keys: list[SampleKey],
    take: Callable[[Transition], None],
) -> None:
    """A forward as a schedule wants it, without pictures; its transitions go to `take`."""
    with schedule.sampling():
        policy.sample(
            ["a test"] * len(keys),
            keys,
            selected=steps.selected,
            noisy=steps.stochastic,
            grad=schedule.needs_graph,
            capture=schedule.capture,
            decode=False,
            on_transition=take,
        )


def _print(result: dict[str, Any]) -> None:
    console = for_tables()
    title = (
        f"{result['pipeline']}, {result['train']}, {result['dtype']}, {result['selected']} steps "
        f"trained, {result['micro_batch']} a forward: one gradient is "
        f"{result['gradient_bytes'] / 1e6:.2f} MB"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("schedule")
    for column in ("group", "gradients held", "MB", "update's peak, MB", "off native by"):
        table.add_column(column, justify="right")
    for row in result["ledger"]:
        table.add_row(
            row["schedule"],
            str(row["group"]),
            f"{row['gradients']:.2f}",
            f"{row['bytes'] / 1e6:.2f}",
            f"{row['peak_bytes'] / 1e6:.2f}",
            f"{row['rel_l2']:.1e}",
        )
    console.print(table)
