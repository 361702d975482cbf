"""Choosing a schedule: what may be run at all, what fits, and which of it is fastest.

What the settings allow is asked of `checks`, so that `auto` never takes what it would refuse by
hand; what an option needs is asked of `planner`.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from .checks import check
from .config import Config
from .costs import Costs, Key, Option, Workload
from .errors import LeanError, problem
from .layout import Layout
from .pipeline import PROMPTS
from .planner import MARGIN, NOISE, LeftOut, Prediction, predict
from .selection import select
from .solver import Flash, num_steps

if TYPE_CHECKING:
    from .gradients import Sync

MIB = 2**20

SIMPLEST_FIRST = ("retain", "reweight", "streaming", "native")
"""Among equals: the fewest moving parts, but for native, which runs everything twice."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision: what was `chosen`, what else `fits` (fastest first, the chosen one among them),
    what does not (`too_large`) and what could not be had at all (`left_out`)."""

    chosen: Prediction
    fits: tuple[Prediction, ...]
    too_large: tuple[Prediction, ...]
    left_out: tuple[LeftOut, ...]
    limit: int | None
    reason: str
    workload: Workload
    costs: Costs

    def alternatives(self) -> list[Prediction]:
        """What to go on with when the chosen option runs out of memory after all: the options that
        fit with less of it, the fastest first."""
        return [p for p in self.fits if p.peak_bytes < self.chosen.peak_bytes]

    def as_dict(self) -> dict[str, Any]:
        """The whole table, for `plan.json`."""
        return {
            "chosen": self.chosen.option.name,
            "settings": self.chosen.option.settings,
            "reason": self.reason,
            "limit_bytes": self.limit,
            "margin": MARGIN,
            "fits": [p.as_dict() for p in self.fits],
            "too_large": [p.as_dict() for p in self.too_large],
            "left_out": [{"name": one.name, "reason": one.reason} for one in self.left_out],
            "alternatives": [p.option.name for p in self.alternatives()],
            "workload": asdict(self.workload),
            "costs": self.costs.as_dict(),
        }

    def text(self) -> str:
        """The decision and the table, for a log."""
        out = io.StringIO()
        Console(file=out, width=120).print(self.table())
        return f"schedule: {self.chosen.option.name}, {self.reason}\n{out.getvalue().rstrip()}"

    def table(self) -> Table:
        """A row for each option, with its best `rollout.ahead`: what it takes, whether it fits."""
        table = Table(title="Schedules, predicted for an update", title_justify="left")
        table.add_column("option", no_wrap=True)
        for column in ("seconds", "peak"):
            table.add_column(column, justify="right")
        table.add_column("")
        shown: set[tuple[Option, bool]] = set()
        for p in (self.chosen, *self.fits, *self.too_large):
            same = replace(p.option, ahead=0), p in self.fits
            if same in shown:
                continue
            shown.add(same)
            said = "too large" if p in self.too_large else ""
            said = "chosen" if p is self.chosen else said
            table.add_row(p.option.name, f"{p.seconds:.4g}", size(p.peak_bytes), said)
        for one in self.left_out:
            table.add_row(one.name, "", "", one.reason)
        return table


def size(num_bytes: float) -> str:
    """Bytes as people write them: 3.2 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}" if num_bytes < 1000 else f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"


def workload(
    config: Config,
    stds: Sequence[float],
    layout: Layout,
    *,
    shards: int = 1,
    examples: int | None = None,
    updates: int = 16,
) -> Workload:
    """What one rank does in an update; the means over the first `updates` of what is drawn.

    `stds` `(T,)` are those of `Policy.plan`, 0 where a step cannot be trained; `layout` that of a
    part of an update, whatever its micro-batch; `examples` are to be trained on (None = very many).
    """
    r, o, a = config.rollout, config.objective, config.advantage
    flash = config.sampling.flash
    steps = selected = prefix = 0.0
    for update in range(updates):
        one = select(config.selection, list(stds), seed=config.seed, update=update)
        first = one.stochastic[0] if r.share_prefix and one.stochastic else 0
        total = len(stds)
        if flash.ratio is not None:
            total = num_steps(
                total, one.stochastic[0], one.stochastic[-1] + 1, Flash(**flash.model_dump())
            )
        steps, selected, prefix = steps + total, selected + len(one.selected), prefix + first
    return Workload(
        steps=steps / updates,
        selected=selected / updates,
        prefix=prefix / updates,
        held=layout.held,
        waves=layout.waves,
        parts=r.parts,
        epochs=r.epochs,
        whole=a.std == "global" or a.baseline in ("global", "history") or a.rewards == "gdpo",
        joint=o.needs_reference or (shards > 1 and config.selection.per != "update"),
        reference=o.needs_reference,
        kl_loss=o.kl > 0,
        baseline=a.baseline == "value",
        encodes=examples is None or examples > PROMPTS,
        ranks=layout.ranks,
        shards=shards,
        workers=config.scoring.workers,
        sums=1 + (len(config.trained) if a.rewards == "each" else 1),
    )


def configured(config: Config, option: Option) -> Config:
    """The settings under an option: `config` with what `auto` decides filled in."""
    return config.model_copy(
        update={
            "schedule": option.schedule,
            "rollout": config.rollout.model_copy(
                update={"micro_batch": option.micro_batch, "ahead": option.ahead}
            ),
            "model": config.model.model_copy(
                update={"activation_checkpointing": option.checkpointing}
            ),
            "parallel": config.parallel.model_copy(
                update={"sync": option.sync}
                | ({} if option.schedule in ("reweight", "streaming") else NO_LEDGER)
            ),
            "memory": config.memory.model_copy(update={"activations": option.activations}),
        }
    )


NO_LEDGER = {"ledger_dtype": None, "ledger_device": "accelerator"}
"""What only a ledger reads, where the schedule chosen has none."""


def candidates(
    config: Config, *, ranks: int = 1, held: int | None = None, offload: bool = True
) -> tuple[list[Option], list[LeftOut]]:
    """The options that the settings allow, and the others each with its reason.

    Every schedule with every micro-batch that divides the group and is not more than the `held`
    generations of a rank, with activation checkpointing and without; on several `ranks` gradients
    are added once an update, after every group or at every backward. `rollout.ahead` is tried at 0,
    1 and the forwards of a group where the settings leave it open. Retain's budget of activations
    is that of the settings; where the host's memory is another than the device's (`offload`),
    `choose` takes a smaller one if that fits and the given one does not.
    """
    most = held or config.rollout.generations
    options: list[Option] = []
    left: dict[str, LeftOut] = {}
    micro = [m for m in range(1, most + 1) if config.rollout.generations % m == 0]
    for schedule in ("native", "retain", "reweight", "streaming"):
        syncs: list[Sync] = ["update", "group", "step"] if ranks > 1 else ["update"]
        for m in micro:
            for checkpointing in (False, True):
                for sync in syncs:
                    for ahead in _aheads(config, -(-most // m)):
                        budget = config.memory.activations if schedule == "retain" else None
                        one = Option(schedule, m, checkpointing, sync, budget, ahead)
                        try:
                            check(configured(config, one), files=False)
                        except LeanError as error:
                            left.setdefault(str(error), LeftOut(one.name, str(error)))
                        else:
                            options.append(one)
    if not offload:
        reason = "here the host's memory is the device's own"
        left["offload"] = LeftOut("retain+offload", reason)
    return options, list(left.values())


def _aheads(config: Config, forwards: int) -> list[int]:
    """Rewards waited for at once, a forward later, or as many later as a group has."""
    ahead = config.rollout.ahead
    return sorted({0, 1, forwards}) if ahead is None else [ahead]


def choose(
    workload: Workload,
    costs: Costs,
    options: Sequence[Option],
    *,
    limit: int | None = None,
    left_out: Sequence[LeftOut] = (),
    offload: bool = False,
    host: int | None = None,
) -> Choice:
    """Predict every option, discard what does not fit and take the fastest.

    `limit`: bytes of the device, of which `MARGIN` stays free; None = no limit. With `offload`
    retain may keep activations in the host's memory, as many as do not fit, up to `host` bytes
    (None = no limit). Options within `NOISE` of the fastest count as equal: among them the one
    with the smallest peak is taken, then the
    simplest. Raises LeanError where nothing fits.
    """
    usable = math.inf if limit is None else limit * (1 - MARGIN)
    left, fits, too_large = list(left_out), [], []
    for option in options:
        key = Key.of(option)
        if key not in costs.steps:
            left.append(LeftOut(option.name, costs.missing.get(key, "it was not measured")))
            continue
        p = predict(workload, costs, option)
        if p.peak_bytes <= usable:
            fits.append(p)
            continue
        too_large.append(p)
        if offload and option.schedule == "retain":
            smaller = _offloaded(workload, costs, option, usable)
            if smaller is not None and host is not None and smaller.host_bytes > host:
                need, has = size(smaller.host_bytes), size(host)
                reason = f"its graphs would take {need} of the host's memory, of {has} for a rank"
                left.append(LeftOut(smaller.option.name, reason))
            elif smaller is not None:
                fits.append(smaller)
    if not fits:
        raise _nothing_fits(too_large, left, limit)
    fits.sort(key=lambda p: p.seconds)
    fastest = fits[0]
    equal = [p for p in fits if p.seconds <= fastest.seconds * (1 + NOISE)]
    chosen = min(equal, key=_rank)
    return Choice(
        chosen,
        tuple(fits),
        tuple(sorted(too_large, key=lambda p: p.seconds)),
        tuple(left),
        limit,
        _reason(chosen, fastest, too_large, limit),
        workload,
        costs,
    )


def _rank(p: Prediction) -> tuple[int, int]:
    return p.peak_bytes, SIMPLEST_FIRST.index(p.option.schedule)


def _offloaded(
    workload: Workload, costs: Costs, option: Option, usable: float
) -> Prediction | None:
    """Retain with the largest budget of activations that fits, in MiB; None where none does."""
    bare = predict(workload, costs, replace(option, activations=0))
    room = int((usable - bare.peak_bytes) // MIB) * MIB
    if room < 0:
        return None
    if option.activations is not None:
        room = min(room, option.activations)
    found = predict(workload, costs, replace(option, activations=room))
    return found if found.peak_bytes <= usable else bare


def _reason(
    chosen: Prediction, fastest: Prediction, too_large: Sequence[Prediction], limit: int | None
) -> str:
    faster = [p for p in too_large if p.seconds < chosen.seconds]
    if chosen is not fastest:
        text = (
            f"as fast as {fastest.option.name} to within {NOISE:.0%}, with "
            f"{size(fastest.peak_bytes - chosen.peak_bytes)} less"
        )
    else:
        text = "the fastest that fits" if too_large else "the fastest"
    if faster and limit is not None:
        text += f"; {len(faster)} faster ones need more than {size(limit * (1 - MARGIN))}"
    return text


def _nothing_fits(
    too_large: Sequence[Prediction], left: Sequence[LeftOut], limit: int | None
) -> LeanError:
    if not too_large:
        said = "; ".join(f"{one.name}: {one.reason}" for one in left[:4])
        return problem("schedule", "auto", f"no option could be measured ({said})")
    least = min(too_large, key=lambda p: p.peak_bytes)
    assert limit is not None
    rule = (
        f"no schedule fits in {size(limit)} with {MARGIN:.0%} left free: the smallest, "
        f"{least.option.name}, needs {size(least.peak_bytes)} (at {least.at})"
    )
    return problem("schedule", "auto", rule, "Train adapters, a smaller model or picture.")
