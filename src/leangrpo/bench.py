"""How much a schedule gains: ratios from one job, the schedules in turn."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from .checks import check_capture
from .collectives import Collectives
from .config import Config
from .console import for_tables
from .data import SampleKey, Transition
from .errors import problem
from .layout import Layout, Slot, classic_layout, shared_layout
from .parallel import World, join, make_gradients, world_size
from .policy import Policy
from .schedules import Schedule
from .selection import Selection, select
from .setup import make_policy, make_schedule, pick_device
from .stopwatch import Stopwatch

STAGES = ("rollout", "recompute", "backward", "sync")
SCHEDULES = ("native", "retain", "reweight")
"""Timed by default; streaming can be asked for."""
KINDS = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass
class Variant:
    """A schedule with its synchronisation and layout, as `native:step:classic` names it."""

    schedule: Schedule
    layout: Layout


@dataclass
class Bench:
    """What all variants share: the weights, the ranks, the steps they train."""

    policy: Policy
    world: World
    watch: Stopwatch
    steps: Selection

    def update(self, variant: Variant, turn: int) -> None:
        """One update but for reward and optimizer, with advantages of one and minus one."""
        layout, schedule, rank = variant.layout, variant.schedule, self.world.rank
        schedule.begin(layout.prompts * layout.generations, len(self.steps.selected))
        for wave in layout.of(rank):
            own: dict[Hashable, float] = {}
            for slot in wave.slots:
                keys = [SampleKey(turn, slot.prompt, m) for m in slot.generations]
                self._sample(schedule, slot, keys)
                if not slot.idle:
                    signs: dict[Hashable, float]
                    signs = {k: 1.0 if k.generation % 2 else -1.0 for k in keys}
                    schedule.rewards({k: [sign] for k, sign in signs.items()})
                    own |= signs
            schedule.advantages(own)
        schedule.finish()
        for parameter in self.policy.parameters:
            parameter.grad = None

    def _sample(self, schedule: Schedule, slot: Slot, keys: list[SampleKey]) -> None:
        def take(transition: Transition) -> None:
            transition.weight = 0.0 if slot.idle else 1.0
            schedule.transition(transition)

        with schedule.sampling():
            self.policy.sample(
                ["a test"] * len(keys),
                keys,
                selected=self.steps.selected,
                noisy=self.steps.stochastic,
                grad=schedule.needs_graph,
                capture=schedule.capture,
                decode=False,
                on_transition=take,
            )


def bench(
    config: Config,
    schedules: Sequence[str] | None,
    rounds: int,
    *,
    collectives: bool = False,
) -> dict[str, Any]:
    """Time the recipe under each schedule, A B C A B C, and print the ratios to the first.

    A schedule may carry its synchronisation, `native:step`, and the layout of classic data
    parallelism, `native:step:classic`; without them they are the config's. One process times one
    group; several ranks, started by torchrun, time a whole update of `rollout.prompts` groups.

    Sampling, recomputation, backward and synchronisation are timed; decoding, reward and
    optimizer are left out, as they are the same for all. With `sync=step` and sharding, FSDP2
    synchronises inside backward. The first round warms up and is dropped. The predicted limit is
    the cost model's: native T + S(1+b), lean T - S + S(1+b) forwards, b the measured ratio of
    backward to forward; it knows no communication, so one process prints it.

    With `collectives` an update of each is run once, its collectives are counted, and nothing is
    timed. Raises LeanError for a schedule that does not exist.
    """
    if schedules is None:
        schedules = ["native:step", *SCHEDULES] if world_size() > 1 else SCHEDULES
    configs = {name: _variant(config, name) for name in schedules}
    if collectives and world_size() == 1:
        rule = "one process has no collectives"
        raise problem("--collectives", True, rule, "Start it with torchrun, on two ranks at least.")
    p = config.parallel
    master = config.model.master_dtype not in (None, config.model.dtype)
    several = join(p.shard, p.replicate, timeout_s=p.timeout, master=master)
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    device = pick_device(config.run.device)
    watch = Stopwatch(device)
    policy = make_policy(config, device, watch, several)
    steps = select(config.selection, policy.plan().std.tolist(), seed=config.seed, update=0)
    job = Bench(policy, several, watch, steps)
    made = {name: _make(one, job) for name, one in configs.items()}
    result: dict[str, Any] = {
        "pipeline": config.model.pipeline,
        "train": config.model.train,
        "dtype": config.model.dtype,
        "steps": config.sampling.steps,
        "selected": len(steps.selected),
        "prompts": next(iter(made.values())).layout.prompts,
        "generations": config.rollout.generations,
        "micro_batch": config.rollout.micro_batch,
        "ranks": several.size,
        "shards": several.shards,
        "parameters": sum(p.numel() for p in policy.parameters),
        "threads": torch.get_num_threads(),
        "rounds": 1 if collectives else rounds,
    }
    if collectives:
        result["rows"] = [_count(job, name, one) for name, one in made.items()]
        return _print_counts(result) if several.is_main else result
    times: dict[str, list[dict[str, float]]] = {name: [] for name in made}
    for turn in range(rounds + 1):
        for name, variant in made.items():
            several.any(False)  # all ranks start together
            watch.reset()
            job.update(variant, turn)
            if turn:
                times[name].append(watch.read())
    result |= _rows(times, len(steps.selected), limit=several.size == 1)
    return _print_times(result) if several.is_main else result


def _variant(config: Config, name: str) -> Config:
    """The config of `schedule[:sync][:classic]`. Raises LeanError when there is no such thing."""
    schedule, *more = name.split(":")
    sync, *layout = more or [config.parallel.sync]
    parallel: dict[str, Any] = {"sync": sync}
    if layout:
        parallel["layout"] = layout[0]
    known = (*SCHEDULES, "streaming")
    if schedule not in known:
        raise problem("--schedules", name, f"must be among {', '.join(known)}")
    if sync not in ("step", "group", "update") or layout not in ([], ["classic"], ["shared"]):
        rule = "after the schedule come step, group or update, and then classic or shared"
        raise problem("--schedules", name, rule, "For example native:step:classic.")
    varied = config.model_copy(
        update={
            "schedule": schedule,
            "parallel": config.parallel.model_copy(update=parallel),
        }
    )
    for refusal in check_capture(varied):
        raise refusal
    return varied


def _make(config: Config, job: Bench) -> Variant:
    p, r, world = config.parallel, config.rollout, job.world
    gradients = make_gradients(
        job.policy.guard,
        job.policy.denoisers,
        world,
        sync=p.sync,
        reduce=getattr(torch, p.reduce_dtype),
    )
    make = shared_layout if p.layout == "shared" else classic_layout
    prompts = r.prompts if world.size > 1 else 1
    return Variant(
        make_schedule(config, job.policy, job.watch, gradients),
        make(prompts, r.generations, world.size, r.micro_batch),
    )


def _count(job: Bench, name: str, variant: Variant) -> dict[str, Any]:
    """The collectives of one update on this rank. `passes`: how often what is trained was added
    up over the ranks."""
    with Collectives.of(job.world) as seen:
        job.update(variant, 0)
    size = sum(p.numel() for p in job.policy.parameters)
    added = [seen.counts[k].numel for k in ("reduce_scatter", "all_reduce") if k in seen.counts]
    return {
        "schedule": name,
        "calls": {kind: count.calls for kind, count in seen.counts.items()},
        "num_bytes": {kind: count.num_bytes for kind, count in seen.counts.items()},
        "passes": max(added, default=0) / size,
    }


def _rows(
    times: dict[str, list[dict[str, float]]], selected: int, *, limit: bool
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
    found: dict[str, Any] = {"rows": rows}
    native = next((r for r in rows if r["schedule"] == "native"), None)
    if limit and native and native["recompute"]:
        forward = native["recompute"] / selected
        b = native["backward"] / selected / forward
        t = native["rollout"] / forward
        found["backward_over_forward"] = b
        found["predicted_limit"] = (t + selected * (1 + b)) / (t - selected + selected * (1 + b))
    return found


def _title(result: dict[str, Any]) -> str:
    groups = f"{result['prompts']} x {result['generations']} generations"
    ranks = f", {result['ranks']} ranks" if result["ranks"] > 1 else ""
    return (
        f"{result['pipeline']}, {result['train']}, {result['dtype']}, "
        f"{result['parameters'] / 1e6:.1f}M trained{ranks}: "
        f"{result['selected']} of {result['steps']} steps selected, {groups}"
    )


def _print_times(result: dict[str, Any]) -> dict[str, Any]:
    table = Table(title=f"{_title(result)}, medians of {result['rounds']}", title_justify="left")
    stages = STAGES if result["ranks"] > 1 else STAGES[:-1]
    for column in ("schedule", "seconds", "speedup", "(min-max)", *stages):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for row in result["rows"]:
        table.add_row(
            row["schedule"],
            f"{row['seconds']:.3f}",
            f"{row['speedup']:.2f}x",
            f"{row['speedup_min']:.2f}-{row['speedup_max']:.2f}",
            *(f"{row[s]:.3f}" for s in stages),
        )
    console = for_tables()
    console.print(table)
    if "predicted_limit" in result:
        console.print(
            f"cost model: at most {result['predicted_limit']:.2f}x "
            f"(backward = {result['backward_over_forward']:.2f} forwards)"
        )
    return result


def _print_counts(result: dict[str, Any]) -> dict[str, Any]:
    table = Table(
        title=f"{_title(result)}\ncollectives of an update on one rank, whole tensors' MB",
        title_justify="left",
    )
    table.add_column("schedule", no_wrap=True)
    for kind in KINDS:
        table.add_column(kind.replace("_", "\n"), justify="right")
        table.add_column("MB", justify="right")
    table.add_column("passes", justify="right")
    for row in result["rows"]:
        cells: list[str] = []
        for kind in KINDS:
            calls, num_bytes = row["calls"].get(kind, 0), row["num_bytes"].get(kind, 0)
            cells += [str(calls), f"{num_bytes / 1e6:.2f}"]
        table.add_row(row["schedule"], *cells, f"{row['passes']:.2f}")
    console = for_tables()
    console.print(table)
    console.print("passes: how often all trained parameters were added up over the ranks")
    return result
