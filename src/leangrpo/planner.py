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

from .costs import DEFERRED, Costs, Key, Option, StepCost, Workload

MARGIN = 0.05
"""Share of the limit that is left free: what an allocator loses to fragments."""

NOISE = 0.02
"""Predicted times closer than this are equal: the option that needs less memory is taken."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What an option takes: `seconds` of an update and its `stages`, `peak_bytes` and what it is
    reached `at`, and `host_bytes`, the most of the host's memory that retained graphs take."""

    option: Option
    seconds: float
    peak_bytes: int
    at: str
    stages: Mapping[str, float]
    host_bytes: int = 0

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
        self.accumulating = False  # a gradient lies where backward adds to it
        self.sums = 0  # that streaming folds the group underway into
        self.centred = 0  # sums of groups whose advantages come at the end of the update
        self.total = False  # the ledger's own sum
        self.finished = False  # what is added up over the ranks already: a shard
        # bytes of each gradient that is to be added to it, seconds, and whether it can become it
        self.due: list[tuple[float, float, bool]] = []
        self.folded = 0  # samples of the group underway that streaming has folded
        self.graphs = 0.0  # bytes that retain keeps, wherever they are
        self.on_host = 0.0  # the most of them that were not on the device
        self.scoring: list[list[float]] = []  # seconds left of each reward underway, in order

    def spend(self, stage: str, seconds: float) -> None:
        """So much work; rewards are computed beside it, and slow it down and it them."""
        while seconds > 0:
            busy = [one for one in self.scoring if one[0] > 0][: self.w.workers]
            part = min([seconds, *(one[0] for one in busy)])
            took = part * (1 + self.c.drag * len(busy))
            for one in busy:
                one[0] -= part
            seconds -= part
            self.clock += took
            self.stages[stage] = self.stages.get(stage, 0.0) + took

    def wait(self, reward: list[float]) -> None:
        """Until a reward is known."""
        while reward[0] > 0:
            busy = [one for one in self.scoring if one[0] > 0][: self.w.workers]
            part = min(one[0] for one in busy)
            for one in busy:
                one[0] -= part
            self.clock += part
            self.stages["reward"] = self.stages.get("reward", 0.0) + part

    def reach(self, extra: float, at: str) -> None:
        """What is held now and `extra` bytes that come and go."""
        if self.held + extra > self.peak:
            self.peak, self.at = self.held + extra, at

    def hold(self, num_bytes: float, at: str) -> None:
        self.held += num_bytes
        self.reach(0.0, at)

    def run(self) -> Prediction:
        w = self.w
        self.reach(0.0, "between updates")
        self.spend("rollout", self.c.check)
        for _ in range(w.parts - 1):  # the other parts are sampled first, without gradients
            self._part(trained=False)
        self._part(trained=True)
        self._finish()
        for _ in range(w.parts * w.epochs - 1):
            self._replayed()
        stages = {name: seconds for name, seconds in self.stages.items() if seconds}
        peak, on_host = round(self.peak), round(self.on_host)
        return Prediction(self.o, self.clock, peak, self.at, stages, on_host)

    # sampling and rewards: the loop of `rollout`

    def _part(self, *, trained: bool) -> None:
        """A part of the rollout: forwards in order, and behind them rewards and advantages."""
        w, o = self.w, self.o
        sizes = w.slots(o.micro_batch)
        slots = [(wave, size) for wave in range(w.waves) for size in sizes]
        done: list[list[float]] = []
        entered = 0
        for n, (_, size) in enumerate(slots):
            if n % len(sizes) == 0 and w.prefix:
                one = self.c.steps.get(Key(1, o.checkpointing)) or self.step
                self.spend("rollout", one.call + w.prefix * one.forward)
            if w.encodes and n % len(sizes) == 0:
                self.spend("rollout", self.step.of(size / o.micro_batch).encode)
            self._sample(size, lean=trained and o.schedule != "native", keep=not trained)
            done.append(self._submit(size))
            while entered <= n:
                behind = slots[entered][0]
                end = (behind + 1) * len(sizes) - 1
                due = (entered if trained and o.schedule == "streaming" else end) + o.ahead
                if n < min(due, len(slots) - 1):
                    break
                self.wait(done[entered])
                if trained:
                    self._enter(slots[entered][1])
                    if entered == end:
                        self._close(behind)
                entered += 1

    def _submit(self, size: int) -> list[float]:
        """The seconds that the reward of a forward still takes, all of them to begin with."""
        left = [self.c.reward_call + size * self.c.reward]
        self.scoring = [*(one for one in self.scoring if one[0] > 0), left]
        return left

    def _sample(self, size: int, *, lean: bool, keep: bool) -> None:
        """A forward's trajectories; `lean`: with gradients, `keep`: for a later optimizer step."""
        w, o, c = self.w, self.o, self.c
        cost = self.step.of(size / o.micro_batch)
        plain = w.steps - w.prefix - (w.selected if lean else 0.0)
        self.spend("rollout", cost.call + plain * cost.forward)
        if w.reference:  # the selected steps once more, under the reference weights
            again = _replay(cost) - cost.forward_grad + cost.forward
            self.spend("rollout", w.selected * again)
        self.reach(cost.forward_peak, "a forward without gradients")
        if lean and o.schedule == "retain":
            self._retain(cost)
        elif lean:
            self._provisional(cost, size)
        if keep or w.epochs > 1 or o.schedule in DEFERRED:
            self.hold(w.selected * size * c.transition, "what is remembered of the steps")
        self.spend("decode", cost.decode)
        self.reach(cost.decode_peak, "decoding")

    def _retain(self, cost: StepCost) -> None:
        """The graphs of a forward's steps stay, on the device as far as the budget goes."""
        w = self.w
        seconds, total = w.selected * cost.forward_grad, w.selected * cost.kept
        self.spend("rollout", seconds)
        before = self._on_device(self.graphs)
        last = self._on_device(self.graphs + max(0.0, total - cost.kept))
        self.reach(last - before + cost.forward_grad_peak, "a forward with gradients")
        self.graphs += total
        self.on_host = max(self.on_host, self.graphs - self._on_device(self.graphs))
        here = self._on_device(self.graphs) - before
        self.hold(here, "graphs that are retained")
        self._copy(total - here, seconds)

    def _on_device(self, graphs: float) -> float:
        budget = self.o.activations
        return graphs if budget is None else min(graphs, budget)

    def _copy(self, num_bytes: float, beside: float) -> None:
        """Copies to or from the host run beside computing, and are waited for where longer."""
        if num_bytes > 0:
            self.spend("copy", max(0.0, num_bytes / self.c.host_bandwidth - beside))

    def _provisional(self, cost: StepCost, size: int) -> None:
        """Reweight and streaming: a trajectory's backwards, onto gradients of its own."""
        w, c = self.w, self.c
        graphs = w.selected if w.joint else 1.0  # alive at once
        self.spend("rollout", w.selected * cost.forward_grad)
        self.reach((graphs - 1) * cost.kept + cost.forward_grad_peak, "a forward with gradients")
        self._settle(graphs * cost.kept)
        # with a KL in the loss a graph is run twice, and so outlives its first backward
        again = cost.kept if w.kl_loss else 0
        self.spend("backward", (1 + w.kl_loss) * w.selected * cost.backward)
        start = graphs * cost.kept + again
        self.reach(start + cost.backward_first_peak, "a trajectory's first backward")
        if w.baseline or w.kl_loss:  # their share goes to the sum at once
            self.spend("backward", w.selected * size * c.add)
            if not self.total:
                self.total = True
                self.hold(c.summed, "the ledger's sum")
            start += c.gradient
        whole, before = self._left(cost, size)
        self.held += before
        if w.selected > 1:
            self.reach(start - (cost.kept if w.joint else 0) + cost.backward_peak, "a backward")
        self.hold(whole - before, "gradients that wait")
        self.held -= whole - self._waiting(cost, size)

    def _left(self, cost: StepCost, size: int) -> tuple[float, float]:
        """Bytes that a forward's backwards leave, all of them and all but the last."""
        if cost.waiting is None or cost.waiting_before is None:
            return size * self.c.gradient, size * self.c.gradient
        return cost.waiting, cost.waiting_before

    def _waiting(self, cost: StepCost, size: int) -> float:
        """The same once the next trajectory is sampled: narrower or elsewhere, if it is set so."""
        stowed = self.c.waiting / self.c.gradient if self.c.gradient else 1.0
        return self._left(cost, size)[0] * stowed

    # rewards and advantages

    def _enter(self, size: int) -> None:
        """The rewards of a forward are known: streaming folds its gradients into two sums."""
        w, c = self.w, self.c
        if self.o.schedule != "streaming":
            return
        cost = self.step.of(size / self.o.micro_batch)
        if cost.fold is not None:  # the samples of a batch at once, into all sums
            more, self.sums = w.sums - self.sums, w.sums
            self.spend("backward", w.sums * cost.fold)
            self.hold(more * c.summed, "gradients beside the sums they are folded into")
            self.held -= self._waiting(cost, size)
            return
        for _ in range(size):
            self.folded += 1
            more = min(self.folded, w.sums) - self.sums  # the first fold needs one, the others all
            self.spend("backward", (1 if self.folded == 1 else w.sums) * c.add)
            if more:
                self.sums += more
                self.hold(more * c.summed, "a gradient beside the sums it is folded into")
                self.held -= c.waiting
            else:
                self.held -= c.waiting

    def _close(self, wave: int) -> None:
        """The rewards of a group are all known, and those of the update with its last group."""
        w, o, c = self.w, self.o, self.c
        if o.schedule == "streaming":
            self.folded = 0
            if w.whole:
                self.spend("backward", c.add)
                self.held -= self.sums * c.summed
                self.held += (w.sums - 1 - self.centred) * c.summed
                self.centred, self.sums = w.sums - 1, 0
            else:
                self.due += [(c.summed, c.add, True)] * self.sums
                self.sums = 0
        if w.whole and wave + 1 < w.waves:
            return
        if o.schedule == "streaming":
            self.due += [(c.summed, c.add, True)] * self.centred
            self.centred = 0
        self.spend("backward", c.check)
        groups = w.waves if w.whole else 1
        if o.schedule == "reweight":
            for size in groups * w.slots(o.micro_batch):
                cost = self.step.of(size / o.micro_batch)
                if cost.fold is None:
                    self.due += [(c.waiting, c.add, c.waiting == c.summed)] * size
                else:
                    self.due.append((self._waiting(cost, size), cost.fold, False))
        if o.schedule in DEFERRED:
            for size in groups * w.slots(o.micro_batch):
                self._deferred(size)
        if o.sync == "group":
            self._hand_over()

    def _deferred(self, size: int) -> None:
        """Native and retain: the backwards of a forward's trajectories."""
        w, o, c = self.w, self.o, self.c
        cost = self.step.of(size / o.micro_batch)
        self.spend("backward", w.selected * cost.backward)
        if o.schedule == "native":
            self.spend("recompute", w.selected * _replay(cost))
            self._accumulate(cost, replayed=True)
        else:
            self._accumulate(cost, replayed=False)
            total = w.selected * cost.kept
            here = self._on_device(self.graphs) - self._on_device(self.graphs - total)
            self.graphs -= total
            self.held -= here
            self._copy(total - here, w.selected * cost.backward)
        if o.sync == "step":
            self._reduce(w.selected)
        if w.epochs == 1:
            self.held -= w.selected * size * c.transition

    def _accumulate(self, cost: StepCost, *, replayed: bool) -> None:
        """The backwards of a forward's steps, the graphs being there or made for each."""
        graph = cost.kept if replayed else 0
        whole, c = self._accumulated, self.c
        if replayed:
            self.reach(cost.forward_grad_peak, "a forward with gradients")
        if not self.accumulating:
            less = c.gradient - whole
            self.reach(graph + cost.backward_first_peak - less, "the first backward")
            self.accumulating = True
            self.held += whole
            gone = 0 if replayed else cost.kept  # the graph that has just been used
            self.reach(-gone, "the gradient")
            if self.w.selected <= 1:
                return
            self.reach(graph + cost.backward_peak - gone, "a backward")
        else:
            self.reach(graph + cost.backward_peak, "a backward")
        if replayed:
            self.reach(cost.forward_grad_peak, "a forward with gradients")

    @property
    def _accumulated(self) -> int:
        """Bytes of the gradient that native and retain add to: a shard, where FSDP2 reduces."""
        sharded = self.w.shards > 1 and self.o.sync == "step"
        return self.c.stepped if sharded else self.c.gradient

    def _settle(self, beside: float) -> None:
        """The ledger adds up what is due: before the next backward, or at the end."""
        c = self.c
        if not self.due:
            return
        self.reach(beside, "gradients that wait to be added up")
        self.spend("backward", sum(seconds for _, seconds, _ in self.due))
        first, _, becomes = self.due[0]
        if not self.total:  # the first becomes the sum itself, if it is kept in the same way
            self.total = True
            self.held += c.summed
            # layer by layer, each part of a batch goes as the sum of it is made
            self.reach(beside - first, "adding up")
            if not becomes and self.step.fold is None:
                self.reach(beside, "adding up")
        self.held -= sum(num_bytes for num_bytes, _, _ in self.due)
        self.due = []

    # the end

    def _reduce(self, times: float = 1.0) -> None:
        if self.w.ranks > 1:
            self.spend("sync", times * self.c.reduce)
            self.reach(self.c.reduce_peak, "adding up over the ranks")

    def _hand_over(self) -> None:
        """What the rank has since the last time goes into the finished gradient. A ledger gives
        it away bucket by bucket, corrected only then; native and retain have it whole till the end.
        """
        w, c = self.w, self.c
        if w.ranks == 1:
            self._settle(0.0)
            return
        self.spend("backward", sum(seconds for _, seconds, _ in self.due))
        ledger = sum(num_bytes for num_bytes, _, _ in self.due) + self.total * c.summed
        shard = 0 if self.finished else c.stepped
        self.held += max(0, shard - ledger)
        self._reduce()
        self.held -= max(0, ledger - shard)
        self.held -= self._accumulated if self.accumulating else 0
        self.finished = True
        self.due, self.total, self.accumulating = [], False, False

    def _finish(self) -> None:
        """The finished gradient, and the optimizer's step."""
        c = self.c
        if self.o.sync == "update":
            self._hand_over()
        has = c.summed if self.total else self._accumulated if self.accumulating else 0
        has = c.stepped if self.finished else has
        if has not in (0, c.stepped):
            self.reach(c.stepped, "the finished gradient")
        self.held += c.stepped - has
        self.total = self.accumulating = self.finished = False
        self._step()

    def _step(self) -> None:
        self.spend("optimizer", self.c.optimizer)
        self.reach(self.c.optimizer_peak, "the optimizer's step")
        self.held -= self.c.stepped

    def _replayed(self) -> None:
        """A later optimizer step: the selected steps of a part again, as native runs them."""
        w = self.w
        for size in w.waves * w.slots(self.o.micro_batch):
            cost = self.step.of(size / self.o.micro_batch)
            self.spend("recompute", w.selected * _replay(cost))
            self.spend("backward", w.selected * cost.backward)
            self._accumulate(cost, replayed=True)
        self._reduce()
        self.held += self.c.stepped - self._accumulated
        self.accumulating = False
        self._step()


def _replay(cost: StepCost) -> float:
    return cost.forward_grad if cost.replay is None else cost.replay
