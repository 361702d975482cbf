"""How much a schedule gains: ratios from one job, the schedules in turn."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from .aside import set_up_aside
from .bench_memory import sample_group
from .bench_table import print_counts, print_times
from .checks import check_capture
from .collectives import Collectives
from .config import Config
from .data import SampleKey, Transition
from .errors import problem
from .gradients import Gradients
from .layout import Layout, Slot, classic_layout, shared_layout
from .memory import peak_memory
from .parallel import World, join, world_size
from .policy import Policy
from .schedules import Schedule
from .selection import Selection, select
from .setup import Setup, gradients_of, make_layout, make_policy, make_schedule, pick_device
from .stopwatch import Stopwatch
from .train import one_update

STAGES = ("rollout", "recompute", "backward", "sync", "other")
"""Of an update; `other` is what lies between them, such as the draw of the first noise."""
LEFT_OUT = ("decode", "reward", "optimizer")
"""Stages that are the same for all schedules, timed when they are asked for."""
SCHEDULES = ("native", "retain", "reweight")
"""Timed by default; streaming can be asked for."""
ABLATION = {
    "native": "native:step:classic",
    "+ shared prompts": "native:step",
    "+ coalesced sync": "native",
    "retain": "retain",
    "reweight": "reweight",
    "streaming": "streaming",
}
"""Readable names and variants, each with one thing more than the one before it; then the lean
schedules (table 1 of the paper). Without their own, `parallel` is sync=update, layout=shared."""

Times = Mapping[str, float]


@dataclass
class Variant:
    """A schedule with its synchronisation and layout, as `native:step:classic` names it."""

    config: Config
    schedule: Schedule
    gradients: Gradients
    layout: Layout


class Job(Protocol):
    """What runs updates: the weights, the ranks, the steps they train."""

    @property
    def policy(self) -> Policy: ...
    @property
    def world(self) -> World: ...
    @property
    def watch(self) -> Stopwatch: ...
    @property
    def steps(self) -> Selection: ...

    def layout(self, config: Config) -> Layout: ...

    def update(self, variant: Variant, turn: int) -> tuple[Times, int]:
        """One update; its seconds by stage, and the bytes that waited in this rank's ledger."""
        ...


@dataclass
class Bench:
    """Updates without pictures, rewards and optimizer: sampling and gradient alone."""

    policy: Policy
    world: World
    watch: Stopwatch
    steps: Selection

    def layout(self, config: Config) -> Layout:
        """One group in one process; with several ranks, all groups of an update."""
        make = shared_layout if config.parallel.layout == "shared" else classic_layout
        r, size = config.rollout, self.world.size
        return make(r.prompts if size > 1 else 1, r.generations, size, r.micro_batch)

    def update(self, variant: Variant, turn: int) -> tuple[Times, int]:
        """One update but for reward and optimizer, with advantages of one and minus one."""
        self.watch.reset()
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
        found = schedule.finish()
        times = self.watch.read()
        for parameter in self.policy.parameters:
            parameter.grad = None
        return times, found.ledger_bytes

    def _sample(self, schedule: Schedule, slot: Slot, keys: list[SampleKey]) -> None:
        def take(transition: Transition) -> None:
            transition.weight = 0.0 if slot.idle else 1.0
            schedule.transition(transition)

        sample_group(self.policy, schedule, self.steps, keys, take)


@dataclass
class Training:
    """Updates as `train` makes them, with pictures, rewards and optimizer steps."""

    setup: Setup

    @property
    def policy(self) -> Policy:
        """What is trained."""
        return self.setup.policy

    @property
    def world(self) -> World:
        """The ranks."""
        return self.setup.world

    @property
    def watch(self) -> Stopwatch:
        """The one that training's log is read from."""
        return self.setup.watch

    @property
    def steps(self) -> Selection:
        """The steps of the first update."""
        return self.setup.select(0)

    def layout(self, config: Config) -> Layout:
        """That of a run."""
        found = make_layout(config, self.world)
        self.world.open_teams(found)
        return found

    def update(self, variant: Variant, turn: int) -> tuple[Times, int]:
        """One update of a run under this variant; the seconds are those that its log states."""
        s = self.setup
        again = variant.config.model_copy(update={"schedule": "native"})
        line = one_update(
            replace(
                s,
                config=variant.config,
                schedule=variant.schedule,
                later=make_schedule(again, s.policy, s.watch, variant.gradients),
                gradients=variant.gradients,
                layout=variant.layout,
            ),
            turn,
        )
        times = {k: v for k, v in line["time"].items() if k not in ("total", "images_per_s")}
        return times, line["memory"]["ledger_bytes"]


def measure(
    config: Config, names: Sequence[str] | None, rounds: int, *, reward: bool = False
) -> dict[str, Any]:
    """Time the recipe under each schedule, A B C A B C: seconds, ratios to the first, memory.

    A schedule may carry its synchronisation, `native:step`, and the layout of classic data
    parallelism, `native:step:classic`; without them they are the config's. One process times one
    group; several ranks, started by torchrun, time a whole update of `rollout.prompts` groups.
    Sampling, recomputation, backward and synchronisation are timed, and what lies between them.
    With `reward` the updates are those of `train`, `rollout.prompts` groups and the pictures,
    rewards and optimizer steps included; nothing is written. `includes` names the stages whose
    sum `seconds` is. With `sync=step` and sharding, FSDP2 synchronises inside backward.

    The first round warms up and is dropped; in it, memory is measured, as that takes time.
    `peak_bytes` is the most that an update allocated at once above its start, `ledger_bytes` what
    waited as gradients at most; both of the rank that has most. Seconds are those of rank 0.

    `limit` is the cost model's bound of a lean schedule's speed-up over native of the same
    synchronisation and layout. In forwards, with b that a backward takes, native's T steps and S
    selected ones are T + S(1+b); lean schedules save exactly the second forwards, T - S + S(1+b).
    In native's seconds the first is its total and S is its recomputation, which makes

        limit = total / (total - recompute),

    whatever a rank's forwards gather, and whatever else an update does. Of several optimizer steps
    on a rollout (`rollout.parts`, `rollout.epochs`) only the first is saved its share.
    `share_of_limit` is the measured ratio to that native over the limit. Both are None of native,
    and where that native is not measured beside it.

    Raises LeanError for a schedule that does not exist.
    """
    configs = bench_variants(config, names)
    with _job(config, configs, reward=reward) as job:
        made = {name: _make(one, job) for name, one in configs.items()}
        result = _about(config, job, made) | {
            "rounds": rounds,
            "includes": [*STAGES[:-1], *(LEFT_OUT if reward else ()), STAGES[-1]],
        }
        first = next(iter(made.values()))
        job.update(first, 0)  # what is made once, as the optimizer's state, is no schedule's
        memory = {name: _memory(job, variant) for name, variant in made.items()}
        times: dict[str, list[Times]] = {name: [] for name in made}
        for turn in range(1, rounds + 1):
            for name, variant in made.items():
                job.world.any(False)  # all ranks start together
                times[name].append(job.update(variant, turn)[0])
    r = config.rollout
    saved = 1 / (r.parts * r.epochs) if reward else 1.0
    rows = _rows(times, result["includes"], configs, saved=saved, alone=result["ranks"] == 1)
    for row in rows:
        row |= memory[row["schedule"]]
    return result | {"rows": rows}


def bench(
    config: Config,
    names: Sequence[str] | None,
    rounds: int,
    *,
    reward: bool = False,
    collectives: bool = False,
) -> dict[str, Any]:
    """`measure`, and print it. With `collectives` an update of each is run once, its collectives
    are counted, and nothing is timed."""
    if collectives:
        result = count_collectives(config, names)
        return print_counts(result) if result["rank"] == 0 else result
    result = measure(config, names, rounds, reward=reward)
    return print_times(result) if result["rank"] == 0 else result


def ablation(config: Config, rounds: int, *, reward: bool = False) -> dict[str, Any]:
    """`measure` of `ABLATION`, whose names are in each row's `label`; printed.

    Raises LeanError in one process, which has no other rank to share prompts with.
    """
    if world_size() == 1:
        rule = "it compares how ranks work together, and there is one"
        raise problem("--ablation", True, rule, "Add --nproc 2, or start it with torchrun.")
    parallel = config.parallel.model_copy(update={"sync": "update", "layout": "shared"})
    config = config.model_copy(update={"parallel": parallel})
    result = measure(config, list(ABLATION.values()), rounds, reward=reward)
    for label, row in zip(ABLATION, result["rows"], strict=True):
        row["label"] = label
    return print_times(result) if result["rank"] == 0 else result


def count_collectives(config: Config, names: Sequence[str] | None) -> dict[str, Any]:
    """The collectives of one update under each schedule, on this rank.

    Rows of `schedule`, `calls` and `num_bytes` by kind, and `passes`. Raises LeanError in one
    process, which has none.
    """
    configs = bench_variants(config, names)
    if world_size() == 1:
        rule = "one process has no collectives"
        raise problem("--collectives", True, rule, "Start it with torchrun, on two ranks at least.")
    with _job(config, configs, reward=False) as job:
        made = {name: _make(one, job) for name, one in configs.items()}
        rows = [_count(job, name, one) for name, one in made.items()]
        return _about(config, job, made) | {"rounds": 1, "rows": rows}


def bench_variants(config: Config, names: Sequence[str] | None) -> dict[str, Config]:
    """The settings of each variant, by name. Raises LeanError where one does not exist or cannot
    work; loads nothing."""
    if names is None:
        names = ["native:step", *SCHEDULES] if world_size() > 1 else SCHEDULES
    return {name: _variant(config, name) for name in names}


def _variant(config: Config, name: str) -> Config:
    """The config of `schedule[:sync][:classic]`. Raises LeanError when there is no such thing."""
    schedule, *more = name.split(":")
    sync, *layout = more or [config.parallel.sync]
    parallel: dict[str, Any] = {"sync": sync, "check": False}
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


@contextmanager
def _job(config: Config, configs: Mapping[str, Config], *, reward: bool) -> Iterator[Job]:
    if not reward:
        yield _bench(config)
        return
    with set_up_aside(next(iter(configs.values()))) as s:
        yield Training(s)


def _bench(config: Config) -> Bench:
    p = config.parallel
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    device = pick_device(config.run.device)
    world = join(
        p.shard, p.replicate, timeout_s=p.timeout, master=config.model.has_master, device=device
    )
    watch = Stopwatch(device)
    policy = make_policy(config, device, watch, world)
    steps = select(config.selection, policy.plan().std.tolist(), seed=config.seed, update=0)
    return Bench(policy, world, watch, steps)


def _make(config: Config, job: Job) -> Variant:
    gradients = gradients_of(config, job.policy, job.world)
    schedule = make_schedule(config, job.policy, job.watch, gradients)
    return Variant(config, schedule, gradients, job.layout(config))


def _about(config: Config, job: Job, made: Mapping[str, Variant]) -> dict[str, Any]:
    """What was run, and on what."""
    return {
        "pipeline": config.model.pipeline,
        "train": config.model.train,
        "dtype": config.model.dtype,
        "steps": config.sampling.steps,
        "selected": len(job.steps.selected),
        "prompts": next(iter(made.values())).layout.prompts,
        "generations": config.rollout.generations,
        "micro_batch": config.rollout.micro_batch,
        "ranks": job.world.size,
        "rank": job.world.rank,
        "shards": job.world.shards,
        "parameters": sum(p.numel() for p in job.policy.parameters),
        "threads": torch.get_num_threads(),
    }


def _memory(job: Job, variant: Variant) -> dict[str, int]:
    """What an update takes, on the rank where it takes most."""
    with peak_memory(job.policy.device) as trace:
        _, ledger_bytes = job.update(variant, 0)
    most = torch.tensor([trace.peak, ledger_bytes], dtype=torch.float64)
    peak, ledger = job.world.max(most).tolist()
    return {"peak_bytes": int(peak), "ledger_bytes": int(ledger)}


def _count(job: Job, name: str, variant: Variant) -> dict[str, Any]:
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
    times: Mapping[str, list[Times]],
    includes: Sequence[str],
    configs: Mapping[str, Config],
    *,
    saved: float,
    alone: bool,
) -> list[dict[str, Any]]:
    """Medians over the rounds; `saved`: the share of native's recomputation that is saved."""
    totals = {n: [sum(t.get(s, 0.0) for s in includes) for t in some] for n, some in times.items()}
    first = next(iter(times))
    rows: list[dict[str, Any]] = []
    for name, some in times.items():
        ratios = [a / b for a, b in zip(totals[first], totals[name], strict=True)]
        limit = share = None
        native = _native(name, configs, alone=alone)
        if native is not None:
            whole = totals[native]
            seconds = [saved * t.get("recompute", 0.0) for t in times[native]]
            limit = statistics.median(a / (a - b) for a, b in zip(whole, seconds, strict=True))
            gain = statistics.median(a / b for a, b in zip(whole, totals[name], strict=True))
            share = gain / limit
        rows.append(
            {
                "schedule": name,
                "seconds": statistics.median(totals[name]),
                "speedup": statistics.median(ratios),
                "speedup_min": min(ratios),
                "speedup_max": max(ratios),
                "limit": limit,
                "share_of_limit": share,
                **{s: statistics.median(t.get(s, 0.0) for t in some) for s in includes},
            }
        )
    return rows


def _native(name: str, configs: Mapping[str, Config], *, alone: bool) -> str | None:
    """The native variant a lean one is bounded by: of its synchronisation and layout, which one
    process does not have."""
    if configs[name].schedule == "native":
        return None
    own = configs[name].parallel
    others = [n for n, c in configs.items() if c.schedule == "native"]
    alike = [
        n
        for n in others
        if (configs[n].parallel.sync, configs[n].parallel.layout) == (own.sync, own.layout)
    ]
    return next(iter([*alike, *(others if alone else ())]), None)
