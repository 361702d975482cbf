"""What micro-batches gain where each sample needs its own gradient; and that they are right."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from .bench_memory import take_gradient, update
from .checks import check_capture
from .config import Config
from .console import for_tables
from .errors import problem
from .ledger import sum_bytes
from .oracle import float64_throughout
from .parallel import world_size
from .policy import Policy
from .schedules import Statistics
from .selection import select
from .setup import make_policy, make_schedule, pick_device
from .stopwatch import Stopwatch

SIZES = (1, 2, 4, 8)


def batches(
    config: Config,
    sizes: Sequence[int] = SIZES,
    rounds: int = 5,
    schedules: Sequence[str] | None = None,
) -> dict[str, Any]:
    """One group of `rollout.generations` in micro-batches of each of `sizes`, in turn; a table.

    Rows of `schedule` (reweight unless others are asked for), `micro_batch`, `seconds` (sampling
    and backward, the median of the rounds; decoding, rewards and optimizer are left out),
    `images_per_second`, `speedup` (median of the ratios to the first row within a round, with
    `speedup_min` and `speedup_max`), `gradients` (bytes held at most, in gradients of all trained
    parameters) and `rel_l2` (to the gradient of native with one sample a forward). The samples
    are the same in all of them, but for matrix kernels that round by the size of a batch.

    Weights that start at zero, as half of LoRA's do, are drawn: the gradients of the other half
    would be zero, and any two of them equal. Raises LeanError for sizes that do not divide the
    group, on several ranks, and for layers whose gradient cannot be split by sample.
    """
    group = config.rollout.generations
    for size in sizes:
        if size < 1 or group % size:
            rule = f"each must divide rollout.generations, which is {group}"
            raise problem("--micro-batches", size, rule, "For example rollout.generations=8.")
    if world_size() > 1:
        rule = "it times one process"
        raise problem("--micro-batches", [*sizes], rule, "Start it without torchrun.")
    names = schedules or ("reweight",)
    for name in names:
        if name not in ("native", "retain", "reweight", "streaming"):
            raise problem("--schedules", name, "must be native, retain, reweight or streaming")
    native = _variant(config, "native", 1)
    variants = [_variant(config, name, size) for name in names for size in sizes]
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    device = pick_device(config.run.device)
    watch = Stopwatch(device)
    wide = config.model.dtype == "float64"
    with float64_throughout() if wide else nullcontext():
        policy = make_policy(config, device, watch)
        _fill(policy, config.seed)
        expected, _, _ = _run(native, policy, watch)
        turns = [[_run(one, policy, watch) for one in variants] for _ in range(rounds + 1)]
    one = sum_bytes(policy.parameters)
    times = [[seconds for *_, seconds in turn] for turn in turns[1:]]  # the first warms up
    rows = []
    for i, variant in enumerate(variants):
        gradient, found, _ = turns[-1][i]
        ratios = [turn[0] / turn[i] for turn in times]
        seconds = statistics.median(turn[i] for turn in times)
        rows.append(
            {
                "schedule": variant.schedule,
                "micro_batch": variant.rollout.micro_batch,
                "seconds": seconds,
                "images_per_second": group / seconds,
                "speedup": statistics.median(ratios),
                "speedup_min": min(ratios),
                "speedup_max": max(ratios),
                "gradients": found.ledger_bytes / one,
                "rel_l2": float((gradient - expected).norm() / expected.norm()),
            }
        )
    result = {
        "pipeline": config.model.pipeline,
        "train": config.model.train,
        "dtype": config.model.dtype,
        "guidance": config.sampling.guidance,
        "generations": group,
        "rounds": rounds,
        "gradient_bytes": one,
        "rows": rows,
    }
    _print(result)
    return result


def _variant(config: Config, schedule: str, size: int) -> Config:
    rollout = config.rollout.model_copy(update={"micro_batch": size})
    varied = config.model_copy(update={"schedule": schedule, "rollout": rollout})
    for refusal in check_capture(varied):
        raise refusal
    return varied


def _fill(policy: Policy, seed: int) -> None:
    """Numbers for the trained weights that are zero."""
    drawn = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.parameters:
            if not p.any():
                p.copy_(0.02 * torch.randn(p.shape, generator=drawn))


def _run(config: Config, policy: Policy, watch: Stopwatch) -> tuple[Tensor, Statistics, float]:
    """A group's gradient, what the schedule says of it, and the seconds it took."""
    steps = select(config.selection, policy.plan().std.tolist(), seed=config.seed, update=0)
    schedule = make_schedule(config, policy, watch)
    watch.reset()
    found = update(config, policy, schedule, steps, config.rollout.generations)
    spent = watch.read()
    seconds = sum(spent.get(stage, 0.0) for stage in ("rollout", "recompute", "backward"))
    return take_gradient(policy), found, seconds


def _print(result: dict[str, Any]) -> None:
    console = for_tables()
    title = (
        f"{result['pipeline']}, {result['train']}, {result['dtype']}, guidance "
        f"{result['guidance']:g}, {result['generations']} generations, medians of "
        f"{result['rounds']}: one gradient is {result['gradient_bytes'] / 1e6:.2f} MB"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("schedule")
    for column in ("micro-batch", "images/s", "speed-up", "(min-max)", "gradients held"):
        table.add_column(column, justify="right")
    table.add_column("off native, one by one", justify="right")
    for row in result["rows"]:
        table.add_row(
            row["schedule"],
            str(row["micro_batch"]),
            f"{row['images_per_second']:.3g}",
            f"{row['speedup']:.2f}x",
            f"{row['speedup_min']:.2f}-{row['speedup_max']:.2f}",
            f"{row['gradients']:.2f}",
            f"{row['rel_l2']:.1e}",
        )
    console.print(table)
