"""What an update takes, in seconds and bytes, under every schedule; pure arithmetic.

`probe` measures the `Costs` on the device at hand; here a `Workload` (how much is sampled, read off
the settings and the layout) is gone through event by event, as the loop does it: forwards, graphs
kept, backwards, gradients that wait, rewards that arrive late. The largest sum of what is held at
once is the peak. Derived from the paper's section 4 and this package's own loop; the paper leaves
the choice of a schedule to its reader.

All bytes are those of one rank's device, all seconds of one rank. Formulas: docs/planning.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .costs import DEFERRED, LEDGERS, Costs, Key, Option, StepCost, Workload

MARGIN = 0.05
"""Share of the limit that is left free: what an allocator loses to fragments."""

NOISE = 0.02
"""Predicted times closer than this are equal: the option that needs less memory is taken."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What an option takes: `seconds` of an update and its `stages`, `peak_bytes` and what it is
    reached `at`; `reasons` say what was assumed."""

    option: Option
    seconds: float
    peak_bytes: int
    at: str
    stages: Mapping[str, float]
    reasons: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"name": self.option.name, **asdict(self)}


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An option that is not to be had, and why."""

    name: str
    reason: str


def predict(workload: Workload, costs: Costs, option: Option) -> Prediction:
    """Seconds and peak bytes of an update under an option.

    Raises KeyError where `costs` has no `StepCost` for it; see `Costs.missing`.
    """
    return _Update(workload, costs, option).run()


class _Update:
    """One update of one rank, event by event: the clock, what is held, the most that was."""

    def __init__(self, workload: Workload, costs: Costs, option: Option) -> None:
        self.w, self.c, self.o = workload, costs, option
        self.step = costs.steps[Key.of(option)]
        self.clock, self.stages = 0.0, dict.fromkeys(("rollout", "decode", "backward"), 0.0)
        self.held, self.peak, self.at = float(costs.resident), 0.0, "between updates"
        self.has_gradient = False
        self.waiting = 0  # gradients in the ledger whose advantage is not known
        self.due = 0  # those whose advantage is known, but which are not added up yet
        self.sums = 0
        self.graphs = 0.0  # bytes of activations that wait for the advantages, wherever they are
        self.scored: list[tuple[int, int, float]] = []  # wave, samples, when its reward is known
        self.workers = [0.0] * workload.workers
        self.left: dict[int, list[int]] = {}
        self.reasons: list[str] = []

    # the clock and the memory

    def spend(self, stage: str, seconds: float) -> None:
        self.clock += seconds
        self.stages[stage] = self.stages.get(stage, 0.0) + seconds

    def reach(self, extra: float, at: str) -> None:
        if self.held + extra > self.peak:
            self.peak, self.at = self.held + extra, at

    def keep(self, num_bytes: float, at: str = "") -> None:
        self.held += num_bytes
        self.reach(0.0, at)

    # the loop

    def run(self) -> Prediction:
        w, o = self.w, self.o
        self.reach(0.0, "between updates")
        for _ in range(w.parts - 1):  # the other parts are sampled first, without gradients
            for _ in range(w.waves):
                self._wave_without_gradients()
        for wave in range(w.waves):
            sizes = w.slots(o.micro_batch)
            self.left[wave] = list(sizes)
            self._prefix()
            for size in sizes:
                self._collect(o.ahead)
                self._slot(size)
                self._submit(wave, size)
        self._collect(0, last=True)
        self._finish()
        for _ in range(w.parts * w.epochs - 1):
            self._replay_all()
            self._optimizer()
        if o.ahead and self.c.reward:
            self.reasons.append("rewards run beside the sampler and take no time from it")
        return Prediction(
            o, self.clock, round(self.peak), self.at, dict(self.stages), tuple(self.reasons)
        )

    def _prefix(self) -> None:
        w, o = self.w, self.o
        if not w.prefix:
            return
        one = self.c.steps.get(Key(1, o.checkpointing)) or self.step
        self.spend("rollout", one.call + w.prefix * one.forward)

    def _wave_without_gradients(self) -> None:
        w, step = self.w, self.step
        self._prefix()
        for size in w.slots(self.o.micro_batch):
            cost = step.of(size / self.o.micro_batch)
            self.spend("rollout", cost.call + (w.steps - w.prefix) * cost.forward)
            self._reference(cost)
            self.reach(cost.forward_peak, "a forward without gradients")
            self.keep(w.selected * size * self.c.transition)
            self.spend("decode", cost.decode)
            self.reach(cost.decode_peak, "decoding")
            self.spend("reward", size * self.c.reward if not self.o.ahead else 0.0)

    def _reference(self, cost: StepCost) -> None:
        """The selected steps again, without gradients, under the reference weights."""
        if self.w.reference:
            again = _replay(cost) - cost.forward_grad + cost.forward
            self.spend("rollout", self.w.selected * again)

    def _slot(self, size: int) -> None:
        """One forward's trajectories: what is sampled, kept and, with a ledger, differentiated."""
        w, o, c = self.w, self.o, self.c
        cost = self.step.of(size / o.micro_batch)
        lean = o.schedule != "native"
        plain = w.steps - w.prefix - (w.selected if lean else 0.0)
        self.spend("rollout", cost.call + plain * cost.forward)
        self._reference(cost)
        self.reach(cost.forward_peak, "a forward without gradients")
        if lean:
            self.spend("rollout", w.selected * cost.forward_grad)
            kept_at_once = w.selected if o.schedule == "retain" or w.joint else 1.0
            device, before = self._graphs_on_device(kept_at_once * cost.kept)
            self.reach(before + cost.forward_grad_peak, "a forward with gradients")
            if o.schedule == "retain":
                self.graphs += w.selected * cost.kept
                self.keep(device, "graphs that are retained")
                self._copy(w.selected * cost.kept - device, w.selected * cost.forward_grad)
            else:
                self._ledger_backwards(cost, size, kept_at_once)
        self.keep(w.selected * size * c.transition * (not lean or w.epochs > 1))
        self.spend("decode", cost.decode)
        self.reach(cost.decode_peak, "decoding")

    def _graphs_on_device(self, added: float) -> tuple[float, float]:
        """How many of `added` bytes of graphs stay on the device, and how many when the last of
        them is made."""
        before = max(0.0, added - self.step.kept)
        if self.o.schedule != "retain" or self.o.activations is None:
            return added, before
        room = max(0.0, self.o.activations - self.graphs)
        return min(added, room), min(before, room)

    def _copy(self, num_bytes: float, beside: float) -> None:
        """Copies to or from the host run beside computing, and are waited for where longer."""
        if num_bytes > 0:
            seconds = num_bytes / self.c.host_bandwidth
            self.spend("copy", max(0.0, seconds - beside))

    def _ledger_backwards(self, cost: StepCost, size: int, graphs: float) -> None:
        w, c = self.w, self.c
        times = 2 if w.kl_loss else 1
        self.spend("backward", times * w.selected * cost.backward)
        self._settle(graphs * cost.kept)
        start = graphs * cost.kept + (cost.kept if w.kl_loss else 0)
        self.reach(start + cost.backward_first_peak, "a trajectory's first backward")
        self.waiting += size
        self.held += size * c.gradient  # the trajectory underway; `waiting` bytes later
        later = max(0.0, graphs - 1) if w.joint else 1.0
        extra = c.gradient * (w.kl_loss or w.baseline)
        if w.selected > 1:
            start = later * cost.kept + (cost.kept if w.kl_loss else 0)
            self.reach(start + extra + cost.backward_peak, "a backward")
        if w.baseline or w.kl_loss:
            self.spend("backward", w.selected * size * c.add)
            if not self.sums:
                self.sums = 1
                self.keep(c.summed)
        self.reach(0.0, "gradients that wait")
        self.held -= size * (c.gradient - c.waiting)

    def _submit(self, wave: int, size: int) -> None:
        first = min(range(len(self.workers)), key=self.workers.__getitem__)
        done = max(self.clock, self.workers[first]) + size * self.c.reward
        self.workers[first] = done
        self.scored.append((wave, size, done))

    def _collect(self, ahead: int, *, last: bool = False) -> None:
        """Wait until at most `ahead` forwards have no reward; then what is known is used."""
        while len(self.scored) > ahead or (self.scored and self.scored[0][2] <= self.clock):
            wave, size, done = self.scored.pop(0)
            self.spend("reward", max(0.0, done - self.clock))
            self.left[wave].remove(size)
            if self.o.schedule == "streaming":
                self._fold(size)
            if not self.left[wave] and not self.w.whole:
                self._known(1)
        if last and self.w.whole:
            self._known(self.w.waves)

    def _fold(self, size: int) -> None:
        """Streaming: finished trajectories go into two sums, as soon as their rewards are known."""
        c = self.c
        self.spend("backward", 2 * size * c.add)
        if self.sums < 2:
            self.keep((2 - self.sums) * c.summed, "the sums that a group is streamed into")
            self.sums = 2
        self.waiting -= size
        self.held -= size * c.waiting

    def _known(self, waves: int) -> None:
        """The advantages of groups are known."""
        w, o, c = self.w, self.o, self.c
        if o.schedule in DEFERRED:
            for _ in range(waves):
                for size in w.slots(o.micro_batch):
                    self._deferred_backwards(size)
        elif o.schedule == "reweight":
            self.due += waves * w.held
            self.waiting -= waves * w.held
        elif w.waves > 1:  # streaming: the two sums into that of the update
            self.spend("backward", c.add)
            if self.sums < 3:
                self.keep(c.summed, "the sums of groups")
                self.sums = 3
        if o.sync == "group":
            for _ in range(waves):
                self._reduce()

    def _deferred_backwards(self, size: int) -> None:
        w, o = self.w, self.o
        cost = self.step.of(size / o.micro_batch)
        self.spend("backward", w.selected * cost.backward)
        if o.schedule == "native":
            self.spend("recompute", w.selected * _replay(cost))
            self.reach(cost.forward_grad_peak, "a forward with gradients")
            self._accumulate(cost, cost.kept)
            return
        total = w.selected * cost.kept
        self._accumulate(cost, 0.0)
        on_device = self.graphs if o.activations is None else min(self.graphs, o.activations)
        self.graphs -= total
        rest = self.graphs if o.activations is None else min(self.graphs, o.activations)
        self.held -= on_device - rest
        self._copy(total - (on_device - rest), w.selected * cost.backward)

    def _accumulate(self, cost: StepCost, graph: float) -> None:
        """The peak of a backward, into a gradient that is there or is made by it."""
        gradient = self._own_gradient
        if not self.has_gradient:
            less = self.c.gradient - gradient
            self.reach(graph + cost.backward_first_peak - less, "the first backward")
            self.has_gradient = True
            self.held += gradient
        self.reach(graph + cost.backward_peak, "a backward")
        if self.o.sync == "step":
            for _ in range(round(self.w.selected)):
                self._reduce()

    @property
    def _own_gradient(self) -> int:
        """Bytes of what native and retain accumulate: whole, unless every backward is reduced."""
        alone = self.w.shards == 1 or self.o.sync != "step"
        return self.c.gradient if alone else self.c.stepped

    def _settle(self, beside: float) -> None:
        """Reweight adds up what is due, before the next backward or at the end."""
        c = self.c
        if not self.due:
            return
        self.reach(beside, "gradients that wait to be added up")
        self.spend("backward", self.due * c.add)
        if not self.sums:
            # the first becomes the sum itself, unless it is kept in another way
            self.reach(beside + (c.summed if c.summed != c.waiting else 0), "adding up gradients")
            self.sums = 1
            self.held += c.summed
        self.held -= self.due * c.waiting
        self.due = 0

    def _reduce(self) -> None:
        if self.w.ranks > 1:
            self.spend("sync", self.c.reduce)
            self.reach(self.c.reduce_peak, "adding up over the ranks")

    def _finish(self) -> None:
        o, c = self.o, self.c
        if o.schedule == "reweight":
            self._settle(0.0)
        if o.schedule == "streaming":
            self.spend("backward", c.add)
        if o.sync == "update":
            self._reduce()
        if o.schedule in LEDGERS:
            converted = c.summed != c.stepped
            self.reach(c.stepped if converted else 0, "the finished gradient")
            self.held += c.stepped - self.sums * c.summed
        elif self.has_gradient:
            self.held += c.stepped - self._own_gradient
        self.sums, self.has_gradient = 0, False
        self.spend("optimizer", c.optimizer)
        self.reach(c.optimizer_peak, "the optimizer's step")
        self.held -= c.stepped

    def _optimizer(self) -> None:
        self._reduce()
        self.spend("optimizer", self.c.optimizer)

    def _replay_all(self) -> None:
        """A later optimizer step: every selected step of a part again, as native does it."""
        w, c = self.w, self.c
        at_first = self.held
        for _ in range(w.waves):
            for size in w.slots(self.o.micro_batch):
                cost = self.step.of(size / self.o.micro_batch)
                self.spend("recompute", w.selected * _replay(cost))
                self.spend("backward", w.selected * cost.backward)
                self.reach(cost.forward_grad_peak, "a replayed forward")
                self._accumulate(cost, cost.kept)
        self.has_gradient = False
        self.held = at_first
        self.reach(c.stepped + c.optimizer_peak, "the optimizer's step")


def _replay(cost: StepCost) -> float:
    return cost.forward_grad if cost.replay is None else cost.replay
