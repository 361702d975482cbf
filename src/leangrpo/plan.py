"""`leangrpo plan`: what every schedule would take on hardware that is not here.

`sketch` has the networks, `counting` what a call of one costs, `device` what the hardware does a
second; here they become the `Costs` that `choice` decides from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import nn

from .checks import check
from .choice import Choice, candidates, choose, size, workload
from .config import Config
from .console import for_tables
from .costs import Costs, Key, Option, StepCost, Workload
from .counting import Count, Work, count, peak_of, weight_bytes
from .device import Device
from .errors import LeanError
from .gradients import BUCKET_BYTES, Sync
from .layout import Layout, classic_layout, shared_layout
from .parallel import blocks, divide
from .planner import MARGIN, LeftOut, Prediction, predict
from .sketch import Sketch, sketch

NODE = 8
"""GPUs of a node, at most, that share one copy of the weights unless the settings say how many."""

WIDTH = 100
"""Columns of the table where nothing says how wide the output is."""

CONTEXT = 2**30
"""Bytes of a device that no tensor gets: its context, and the libraries' workspaces."""


@dataclass(frozen=True, slots=True)
class Model:
    """A pipeline as it is trained: a step's `count` for one sample, and its sizes in bytes.

    `weights` are those of all denoisers as they compute, `stored` as they are kept; `gradient` is
    a whole one as a backward makes it, `trained` the trained weights as they are kept, of `number`
    elements. `unsharded`: what FSDP2 has gathered at a time, the root and two blocks (the one at
    work and the next). `gathered`: the weights of the denoiser that a step calls.
    """

    sketch: Sketch
    count: Count
    decode: Work
    decode_peak: int
    parameters: int
    number: int
    weights: int
    stored: int
    gathered: int
    unsharded: int
    gradient: int
    trained: int


def measure(config: Config) -> Model:
    """Count a config's pipeline; see `sketch` for what is needed and its errors."""
    found = sketch(config)
    modules = found.denoisers
    name = next(n for n, m in modules.items() if any(p.requires_grad for p in m.parameters()))
    called = modules[name]
    one = count(called, found.args, found.kwargs).times(found.calls)
    decode, decode_peak = peak_of(found.decode) if found.decode else (Work({}), 0)
    learned = [p for m in modules.values() for p in m.parameters() if p.requires_grad]
    each = [weight_bytes(b) for b in blocks(called)]
    return Model(
        sketch=found,
        count=one,
        decode=decode,
        decode_peak=decode_peak,
        parameters=sum(p.numel() for m in modules.values() for p in m.parameters()),
        number=sum(p.numel() for p in learned),
        weights=sum(weight_bytes(m) for m in modules.values()),
        stored=sum(_stored(config, m.parameters()) for m in modules.values()),
        gathered=weight_bytes(called),
        unsharded=weight_bytes(called) - sum(each) + 2 * max(each, default=0),
        gradient=sum(p.numel() * p.element_size() for p in learned),
        trained=_stored(config, learned),
    )


def _stored(config: Config, parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of weights as they are kept: the master's dtype, adapters and norms in theirs."""
    m = config.model
    if not m.has_master:
        return sum(p.numel() * p.element_size() for p in parameters)
    master, compute = getattr(torch, str(m.master_dtype)), getattr(torch, m.dtype)
    return sum(
        p.numel() * (master.itemsize if p.dtype == compute else p.element_size())
        for p in parameters
    )


def costs(
    config: Config,
    model: Model,
    device: Device,
    micro_batches: Iterable[int],
    *,
    shards: int = 1,
    reward: float = 0.0,
) -> Costs:
    """What a rank of a device pays for each step and holds between updates.

    Seconds are the roofline's at the achieved rates. With `shards` FSDP2 gathers the weights for
    every forward and every backward, the next block beside the work of this one: of gathering and
    computing a step takes the longer. A ring of s ranks moves (s-1)/s of the bytes; adding up
    gradients stands alone. Memory: docs/plan.md. `reward`: seconds of one sample's reward.
    """
    m, p, ranks = config.model, config.parallel, device.count
    gather = 0.0
    if shards > 1:
        gather = model.gathered * (shards - 1) / shards / device.linked * model.sketch.calls
    beside = model.unsharded if shards > 1 else 0
    steps: dict[Key, StepCost] = {}
    missing: dict[Key, str] = {}
    for b in sorted(set(micro_batches) | {1}):
        for checkpointing in (False, True):
            key = Key(b, checkpointing)
            if checkpointing and model.count.kept_checkpointed is None:
                missing[key] = "the network does not support activation checkpointing"
                continue
            steps[key] = _step(config, model, device, b, checkpointing, gather, beside)
            per_sample = Key(b, checkpointing, per_sample=True)
            if m.train == "lora":
                steps[per_sample] = steps[key]
            else:
                missing[per_sample] = "not all of its weights' gradients can be split by sample"
    wire = 4 if p.reduce_dtype == "float32" else 2
    wire = max(wire, 8) if m.dtype == "float64" else wire
    reduce = model.number * wire * (shards - 1) / shards
    replicas = ranks // shards
    reduce += 2 * model.number * wire / shards * (replicas - 1) / replicas
    resident = model.stored // shards + 2 * model.trained // shards + CONTEXT
    if config.ema.decay > 0:
        resident += model.trained // shards
    if config.objective.needs_reference and m.train == "full":
        resident += model.stored // shards
    if not m.offload:
        resident += _others(config, model) + model.sketch.vae_bytes
    waits = model.number * {"float32": 4, "bfloat16": 2}[p.ledger_dtype] if p.ledger_dtype else 0
    on_host = p.ledger_device == "host"
    latent = math.prod(model.sketch.latent[1:])
    # the finished gradient is added up as it travels, and stepped in the weights' dtype
    stepped = max(model.trained, model.number * wire if ranks > 1 else 0) // shards
    return Costs(
        steps=steps,
        missing=missing,
        resident=resident,
        gradient=model.gradient,
        waiting=0 if on_host else waits or model.gradient,
        summed=model.number * (8 if m.dtype == "float64" else 4),
        stepped=stepped,
        transition=2 * 4 * latent,
        optimizer_peak=model.trained // shards,
        reduce_peak=4 * BUCKET_BYTES if ranks > 1 else 0,
        reward=reward,
        # read the gradient, read and write the sum; from the host it also goes there and back
        add=(model.gradient + 2 * 4 * model.number) / device.moved
        + (2 * (waits or model.gradient) / device.hosted if on_host else 0.0),
        reduce=reduce / device.linked if ranks > 1 else 0.0,
        optimizer=8 * (model.trained // shards) / device.moved,
        host_bandwidth=device.hosted,
    )


def _step(
    config: Config,
    model: Model,
    device: Device,
    batch: int,
    checkpointing: bool,
    gather: float,
    beside: int,
) -> StepCost:
    """A step of a micro-batch: all in proportion to its samples, but for the gathered weights."""
    one = model.count
    forward = batch * one.forward.seconds(device.flops, device.moved)
    backward = batch * one.backward.seconds(device.flops, device.moved)
    kept, unit = one.kept, 0
    if checkpointing:
        assert one.kept_checkpointed is not None
        backward += batch * one.recompute.seconds(device.flops, device.moved)
        kept, unit = one.kept_checkpointed, one.unit
    working = batch * (one.backward_peak + unit) + beside
    forward_peak = batch * one.forward_peak + beside
    decoded = batch * model.decode_peak
    if config.model.offload:  # they are here while they work, and the denoisers stay
        forward_peak = max(forward_peak, _others(config, model))
        decoded += model.sketch.vae_bytes
    return StepCost(
        forward=max(forward, gather),
        forward_grad=max(forward, gather),
        backward=max(backward, gather),
        kept=batch * kept,
        forward_peak=forward_peak,
        forward_grad_peak=batch * kept + forward_peak,
        # the gradient grows as the graph goes, both at the same pace
        backward_first_peak=working + max(0, model.gradient - batch * kept),
        backward_peak=working,
        decode=batch * model.decode.seconds(device.flops, device.moved),
        decode_peak=decoded,
    )


def _others(config: Config, model: Model) -> int:
    """Bytes of text encoders as they are loaded."""
    m = config.model
    if not m.has_master:
        return model.sketch.other_bytes
    return model.sketch.other_parameters * int(getattr(torch, str(m.master_dtype)).itemsize)


@dataclass(frozen=True, slots=True)
class Plan:
    """Predictions for a device, and the choice among them; None where nothing fits."""

    device: Device
    model: Model
    costs: Costs
    workload: Workload
    options: tuple[Option, ...]
    left_out: tuple[LeftOut, ...]
    limit: int
    choice: Choice | None
    complaint: str = ""

    def predictions(self) -> list[Prediction]:
        """Everything predicted: the choice, what else fits, what does not, the fastest first."""
        if self.choice is not None:
            best = self.choice.chosen
            others = [p for p in self.choice.fits if p is not best]
            return [best, *others, *self.choice.too_large]
        possible = [o for o in self.options if Key.of(o) in self.costs.steps]
        found = [predict(self.workload, self.costs, o) for o in possible]
        return sorted(found, key=lambda p: p.seconds)

    def native(self, p: Prediction) -> float:
        """Seconds of the usual loop at its micro-batch: native, waiting for rewards, gradients
        added at every backward."""
        sync: Sync = "step" if self.workload.ranks > 1 else "update"
        o = Option("native", p.option.micro_batch, p.option.checkpointing, sync, ahead=0)
        return predict(self.workload, self.costs, o).seconds

    @property
    def usable(self) -> float:
        """Bytes of the limit that may be used, `planner.MARGIN` of it being left free."""
        return self.limit * (1 - MARGIN)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        m, c = self.model, self.model.count
        return {
            "device": asdict(self.device),
            "model": {
                "source": m.sketch.source,
                "parameters": m.parameters,
                "trained": m.number,
                "calls": m.sketch.calls,
                "latent": list(m.sketch.latent),
                "forward_flops": c.forward.flops,
                "backward_flops": c.backward.flops,
                "recompute_flops": c.recompute.flops,
                "forward_traffic_bytes": c.forward.traffic,
                "backward_traffic_bytes": c.backward.traffic,
                "kept_bytes": c.kept,
                "kept_checkpointed_bytes": c.kept_checkpointed,
                "gradient_bytes": m.gradient,
                "resident_bytes": self.costs.resident,
            },
            "workload": asdict(self.workload),
            "predictions": [
                p.as_dict()
                | {
                    "fits": self._fits(p),
                    "over_bytes": max(0, math.ceil(p.peak_bytes - self.usable)),
                    "times_native": self.native(p) / p.seconds,
                }
                for p in self.predictions()
            ],
            "choice": None if self.choice is None else self.choice.as_dict(),
            "complaint": self.complaint,
        }

    def _fits(self, p: Prediction) -> bool:
        return self.choice is not None and p in self.choice.fits

    def show(self, *, everything: bool = False) -> None:
        """Print the device, the model, the choice and its reason, and the table."""
        console = for_tables(WIDTH)
        console.print(self._head())
        console.print()
        if self.choice is None:
            console.print(self.complaint, markup=False)
        else:
            chosen = self.choice.chosen
            console.print(f"take {chosen.option.name}: {self.choice.reason}", markup=False)
            for line in self._others_in_words():
                console.print(f"  {line}", markup=False)
            settings = {k: v for k, v in chosen.option.settings.items() if v is not None}
            words = (
                f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in settings.items()
            )
            console.print("  settings: " + " ".join(words), markup=False)
        console.print()
        console.print(self._table(everything))
        for one in self.left_out if everything else ():
            console.print(f"left out: {one.name}: {one.reason}", markup=False)

    def _others_in_words(self) -> list[str]:
        """Why not each of the other schedules: slower, or too large, and by how much."""
        assert self.choice is not None
        lines = []
        best = self.choice.chosen
        for schedule in ("native", "retain", "reweight", "streaming"):
            if schedule == best.option.schedule:
                continue
            mine = [p for p in self.choice.fits if p.option.schedule == schedule]
            large = [p for p in self.choice.too_large if p.option.schedule == schedule]
            if mine:
                p = mine[0]
                lines.append(
                    f"{schedule}: {p.seconds / best.seconds:.2f} times as long ({p.option.name})"
                )
            elif large:
                p = min(large, key=lambda p: p.peak_bytes)
                lines.append(
                    f"{schedule}: too large, by {size(p.peak_bytes - self.usable)} at least "
                    f"({p.option.name}: {p.at})"
                )
            else:
                lines.append(f"{schedule}: the settings do not allow it (--all says why)")
        return lines

    def _head(self) -> Table:
        m, c, w = self.model, self.model.count, self.workload
        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_row("device", self.device.describe())
        names = ", ".join(f"{n} {type(d).__name__}" for n, d in m.sketch.denoisers.items())
        table.add_row("model", f"{names}: {m.parameters / 1e9:.3f}B parameters, from")
        table.add_row(
            "", f"{m.sketch.source}; text encoders {m.sketch.other_parameters / 1e9:.2f}B"
        )
        table.add_row("trained", f"{m.number / 1e6:.1f}M; one gradient is {size(m.gradient)}")
        table.add_row("inputs", f"{m.sketch.tokens}; {m.sketch.calls} call(s) a step")
        table.add_row(
            "a step",
            f"forward {c.forward.flops / 1e12:.3g} TFLOP, backward {c.backward.flops / 1e12:.3g}; "
            f"keeps {size(c.kept)}"
            + (
                ""
                if c.kept_checkpointed is None
                else f", {size(c.kept_checkpointed)} with checkpointing"
            ),
        )
        plain = self.costs.steps[Key(1)]
        table.add_row(
            "",
            f"forward {plain.forward:.3g} s, backward {plain.backward:.3g} s, "
            f"adding gradients up {self.costs.reduce:.3g} s",
        )
        table.add_row(
            "a rank",
            f"{w.waves} group(s) of {w.held} generation(s), {w.selected:g} of {w.steps:g} steps "
            f"trained; weights in {w.shards} shard(s), holds {size(self.costs.resident)} between "
            "updates",
        )
        return table

    def _table(self, everything: bool) -> Table:
        title = f"Predicted for an update, GiB; {size(self.usable)} are usable"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("option", no_wrap=True)
        for column in ("seconds", "x native", "peak", "too large by"):
            table.add_column(column, justify="right")
        table.add_column("peak at")
        found = self.predictions()
        for p in found if everything else best_of_each(found, self._fits, self._is_chosen):
            over = gib(p.peak_bytes - self.usable) if p.peak_bytes > self.usable else ""
            name = p.option.name.replace("checkpointing", "ckpt")
            if not everything:  # the settings say it
                name = name.partition(" ahead=")[0]
            table.add_row(
                f"* {name}" if self._is_chosen(p) else f"  {name}",
                f"{p.seconds:.4g}" if p.seconds < 10_000 else f"{p.seconds:.0f}",
                f"{self.native(p) / p.seconds:.2f}",
                gib(p.peak_bytes),
                over,
                p.at,
            )
        return table

    def _is_chosen(self, p: Prediction) -> bool:
        return self.choice is not None and p is self.choice.chosen


def gib(num_bytes: float) -> str:
    """GiB in three digits, or all before the point."""
    value = num_bytes / 2**30
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def best_of_each(
    predictions: Iterable[Prediction],
    fits: Callable[[Prediction], bool],
    chosen: Callable[[Prediction], bool],
) -> list[Prediction]:
    """A row for each schedule with and without checkpointing (and offload): the chosen one, or the
    fastest that fits, or the smallest."""
    groups: dict[tuple[str, bool, bool, bool], list[Prediction]] = {}
    for p in predictions:
        o = p.option
        at_step = o.schedule == "native" and o.sync == "step"
        key = (o.schedule, o.checkpointing, o.activations is not None, at_step)
        groups.setdefault(key, []).append(p)
    shown = []
    for some in groups.values():
        best = [p for p in some if chosen(p)] or [p for p in some if fits(p)]
        shown.append(best[0] if best else min(some, key=lambda p: p.peak_bytes))
    return sorted(shown, key=lambda p: (not chosen(p), not fits(p), p.seconds))


def layout_for(config: Config, ranks: int) -> Layout:
    """The layout of a part of an update."""
    r = config.rollout
    lay_out = shared_layout if config.parallel.layout == "shared" else classic_layout
    return lay_out(-(-r.prompts // r.parts), r.generations, ranks, r.micro_batch)


def plan(
    config: Config, device: Device, *, reward: float = 0.0, model: Model | None = None
) -> Plan:
    """Predict every option of a config on a device and choose; starts nothing on any device.

    `model`: what `measure` found, to plan with it again. Raises LeanError when the model's
    configuration cannot be had, the ranks cannot be divided, or settings contradict one another.
    """
    p, ranks = config.parallel, device.count
    shard = p.shard
    if shard is None and p.replicate is None:
        shard = max(n for n in range(1, NODE + 1) if ranks % n == 0)
    shards, _ = divide(ranks, shard, p.replicate)
    one = p.model_copy(update={"shard": None, "replicate": None})  # for the one rank that is here
    here = config.model_copy(update={"parallel": one})
    check(here, files=False)
    layout = layout_for(config, ranks)
    found = measure(config) if model is None else model
    options, left = candidates(here, ranks=ranks, held=layout.held)
    priced = costs(
        config, found, device, {o.micro_batch for o in options}, shards=shards, reward=reward
    )
    last_noise = config.kernel.name != "flow_cps"  # its last step is deterministic
    stds = [1.0] * (config.sampling.steps - 1) + [float(last_noise)]
    work = workload(config, stds, layout, shards=shards)
    limit = config.memory.limit or device.memory
    best: Choice | None
    try:
        best = choose(
            work, priced, options, limit=limit, left_out=left, offload=True, host=device.host_memory
        )
        left, complaint = list(best.left_out), ""
    except LeanError as error:
        # without the setting it begins with, which nobody has made here
        best, complaint = None, str(error).partition(": ")[2]
        keys = {o: Key.of(o) for o in options}
        left += [LeftOut(o.name, priced.missing[k]) for o, k in keys.items() if k in priced.missing]
    return Plan(device, found, priced, work, tuple(options), tuple(left), limit, best, complaint)
