"""How much a schedule gains: ratios from one process, the schedules in turn."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .config import Config
from .data import SampleKey
from .errors import problem
from .selection import select
from .setup import make_policy, make_schedule, pick_device
from .stopwatch import Stopwatch

STAGES = ("rollout", "recompute", "backward")


def bench(config: Config, schedules: Sequence[str], rounds: int) -> dict[str, Any]:
    """Time one group of the recipe under each schedule, A B C A B C, and print the ratios.

    Sampling, recomputation and backward are timed; decoding, reward and optimizer are left out,
    as they are the same for all. The first round warms up and is dropped. The predicted limit is
    the cost model's: native T + S(1+b), lean T - S + S(1+b) forwards, b the measured ratio of
    backward to forward.
    """
    known = ("native", "retain", "reweight")
    for name in schedules:
        if name not in known:
            raise problem("--schedules", name, f"must be among {', '.join(known)}")
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    device = pick_device(config.run.device)
    watch = Stopwatch(device)
    policy = make_policy(config, device, watch)
    made = {
        name: make_schedule(config.model_copy(update={"schedule": name}), policy, watch)
        for name in schedules
    }
    steps = select(config.selection, policy.plan().std.tolist(), seed=config.seed, update=0)
    size, batch = config.rollout.generations, config.rollout.micro_batch
    times: dict[str, list[dict[str, float]]] = {name: [] for name in schedules}
    for turn in range(rounds + 1):
        for name, schedule in made.items():
            watch.reset()
            schedule.begin(size, len(steps.selected))
            keys = [SampleKey(turn, 0, m) for m in range(size)]
            for g in range(0, size, batch):
                some = keys[g : g + batch]
                rollout = policy.sample(
                    ["a test"] * len(some),
                    some,
                    selected=steps.selected,
                    noisy=steps.stochastic,
                    grad=schedule.needs_graph,
                    capture=schedule.capture,
                    decode=False,
                    on_transition=schedule.transition,
                )
                del rollout
            schedule.advantages({k: 1.0 if m % 2 else -1.0 for m, k in enumerate(keys)})
            schedule.finish()
            for parameter in policy.parameters:
                parameter.grad = None
            if turn:
                times[name].append(watch.read())
    return _report(config, times, len(steps.selected))


def _report(
    config: Config, times: dict[str, list[dict[str, float]]], selected: int
) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    first = next(iter(times))
    totals = {n: [sum(t.get(s, 0.0) for s in STAGES) for t in some] for n, some in times.items()}
    for name, some in times.items():
        ratios = [a / b for a, b in zip(totals[first], totals[name], strict=True)]
        rows.append(
            {
                "schedule": name,
                "seconds": statistics.median(totals[name]),
                "speedup": statistics.median(ratios),
                "speedup_min": min(ratios),
                "speedup_max": max(ratios),
                **{s: statistics.median([t.get(s, 0.0) for t in some]) for s in STAGES},
            }
        )
    result: dict[str, Any] = {
        "pipeline": config.model.pipeline,
        "train": config.model.train,
        "dtype": config.model.dtype,
        "steps": config.sampling.steps,
        "selected": selected,
        "generations": config.rollout.generations,
        "micro_batch": config.rollout.micro_batch,
        "threads": torch.get_num_threads(),
        "rounds": len(totals[first]),
        "rows": rows,
    }
    native = next((r for r in rows if r["schedule"] == "native"), None)
    if native and native["recompute"]:
        forward = native["recompute"] / selected
        b = native["backward"] / selected / forward
        t = native["rollout"] / forward
        result["backward_over_forward"] = b
        result["predicted_limit"] = (t + selected * (1 + b)) / (t - selected + selected * (1 + b))
    _print(result)
    return result


def _print(result: dict[str, Any]) -> None:
    table = Table(
        title=f"{result['pipeline']}, {result['train']}, {result['dtype']}: "
        f"{result['selected']} of {result['steps']} steps selected, "
        f"{result['generations']} generations, medians of {result['rounds']}",
        title_justify="left",
    )
    for column in ("schedule", "seconds", "speedup", "(min-max)", *STAGES):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for row in result["rows"]:
        table.add_row(
            row["schedule"],
            f"{row['seconds']:.3f}",
            f"{row['speedup']:.2f}x",
            f"{row['speedup_min']:.2f}-{row['speedup_max']:.2f}",
            *(f"{row[s]:.3f}" for s in STAGES),
        )
    console = Console()
    console.print(table)
    if "predicted_limit" in result:
        console.print(
            f"cost model: at most {result['predicted_limit']:.2f}x "
            f"(backward = {result['backward_over_forward']:.2f} forwards)"
        )
