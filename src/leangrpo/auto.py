"""`schedule: auto`: measure what a step costs here, predict every option, take the best that fits.

Measured is only what the decision needs: larger micro-batches until they stop paying, activation
checkpointing only where something does not fit without it, within `BUDGET_S` seconds in all.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from .choice import Choice, candidates, choose, size, workload
from .config import Config, load_config
from .costs import Costs, Key, Option, StepCost, Workload
from .datasets import Example
from .errors import LeanError
from .gradients import Gradients
from .layout import Layout
from .parallel import World
from .planner import MARGIN, NOISE, LeftOut, predict
from .policy import Policy
from .probe import Probe
from .runfolder import CONFIG
from .scoring import Scorer, Scores

BUDGET_S = 180.0
"""Seconds after which no further micro-batch is tried."""

MISSES = 2
"""Micro-batches in a row that are no faster a sample before larger ones are left out."""

OUT_OF_MEMORY = "a step alone runs out of memory"

PICTURES = 4
"""In a call of a reward, to tell what a picture takes from what a call does."""

BESIDE_S = 0.1
"""Seconds of rewards that sampling is run beside, at most a call more."""

T = TypeVar("T", StepCost, Costs)


@dataclass
class Auto:
    """A decision in the making: the settings, and what the costs are measured on."""

    config: Config
    policy: Policy
    gradients: Gradients
    world: World
    layout: Layout
    optimizer: torch.optim.Optimizer
    scorer: Scorer
    example: Example
    examples: int
    others: Sequence[Tensor] = ()
    missing: dict[Key, str] = field(default_factory=dict, init=False)
    steps: dict[Key, StepCost] = field(default_factory=dict, init=False)
    too_large: bool = field(default=False, init=False)

    def decide(self) -> Choice:
        """The best option; the same on all ranks, from the slowest and largest of each cost.

        Raises LeanError where nothing fits.
        """
        began, policy = time.perf_counter(), self.policy
        sync, self.gradients.sync = self.gradients.sync, "update"
        try:
            return self._decide(began)
        finally:
            self.gradients.sync = sync
            if policy.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(policy.device)

    def _decide(self, began: float) -> Choice:
        config, policy, world, layout = self.config, self.policy, self.world, self.layout
        offload = policy.device.type == "cuda"
        limit = self.limit()
        options, left = candidates(config, ranks=world.size, held=layout.held, offload=offload)
        stds = policy.plan().std.tolist()
        load = workload(config, stds, layout, shards=world.shards, examples=self.examples)
        self.probe = Probe(policy, self.gradients, world, self.example.prompt, load.selected)
        fixed = self._fixed()
        for checkpointing in (False, True):
            if checkpointing and self._all_fit(options, load, fixed, limit):
                left = [one for one in left if "checkpointing" not in one.name]
                left.append(LeftOut("checkpointing", "everything fits without it"))
                options = [o for o in options if not o.checkpointing]
                break
            for per_sample in (False, True):
                keys = {Key.of(o) for o in options}
                wanted = checkpointing, per_sample
                some = [k for k in keys if (k.checkpointing, k.per_sample) == wanted]
                some.sort(key=lambda key: key.micro_batch)
                self._measure(some, load, fixed, limit, began)
        costs = replace(fixed, steps=self.steps, missing=self.missing)
        choice = choose(load, costs, options, limit=limit, left_out=left, offload=offload)
        return world.share(choice)  # type: ignore[no-any-return]

    def limit(self) -> int | None:
        """Bytes to plan with: `memory.limit`, else what the device has for this process."""
        device = self.policy.device
        if self.config.memory.limit is not None:
            return self.config.memory.limit
        if device.type != "cuda":
            return None
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        least: int = min(self.world.share_all(free))
        return least

    def _measure(
        self, keys: Sequence[Key], load: Workload, fixed: Costs, limit: int | None, began: float
    ) -> None:
        """Steps of growing micro-batches, until they do not pay or do not fit."""
        best, misses, last = (float("inf"), 0), 0, None
        for key in keys:
            m = key.micro_batch
            why = None
            if misses >= MISSES:
                why = f"m={best[1]} is as fast a sample, and holds less"
            elif last is not None and self.world.share(time.perf_counter() - began > BUDGET_S):
                why = f"not measured: the probe has had its {BUDGET_S:.0f} s"
            elif last is not None and limit is not None:
                alone = self.steps[last].of(m / last.micro_batch)
                least = fixed.resident + fixed.gradient + alone.forward_grad_peak
                if least > limit:
                    why, self.too_large = f"one step alone would need {size(least)}", True
            if why is None:
                found = self._one(key)
                if isinstance(found, StepCost):
                    self.steps[key], last = found, key
                    seconds = _per_sample(load, found) / m
                    misses = 0 if seconds < best[0] * (1 - NOISE) else misses + 1
                    best = min(best, (seconds, m))
                    continue
                why = found
            self.missing[key] = why

    def _one(self, key: Key) -> StepCost | str:
        """The cost of a step, the largest over the ranks, or why some rank has none."""
        outcome: StepCost | str
        try:
            outcome = self.probe.step(key)
        except torch.OutOfMemoryError:
            outcome = OUT_OF_MEMORY
        except LeanError as error:
            outcome = str(error)
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()
        every = self.world.share_all(outcome)
        failed = [one for one in every if isinstance(one, str)]
        self.too_large = self.too_large or OUT_OF_MEMORY in failed
        return failed[0] if failed else _largest(every)

    def _fixed(self) -> Costs:
        """What does not depend on the micro-batch."""
        probe, p = self.probe, self.config.parallel
        whole, summed, stepped = probe.gradient_bytes()
        waiting = whole
        if p.ledger_dtype:
            numel = sum(one.numel() for one in self.policy.parameters)
            waiting = numel * getattr(torch, p.ledger_dtype).itemsize
        if p.ledger_device == "host" and self.policy.device.type != "cpu":
            waiting = 0
        reward, reward_call, drag = self._reward()
        optimizer, add, peak = probe.optimizer(self.config.optimizer.max_grad_norm)
        reduce, reduce_peak = probe.reduce()
        own = Costs(
            steps={},
            resident=probe.resident(self.optimizer, self.others),
            gradient=whole,
            waiting=waiting,
            summed=summed,
            stepped=stepped,
            transition=probe.transition_bytes(),
            optimizer_peak=peak,
            reduce_peak=reduce_peak,
            reward=reward,
            reward_call=reward_call,
            drag=drag,
            add=add,
            reduce=reduce,
            optimizer=optimizer,
            check=probe.check(),
            host_bandwidth=probe.host_bandwidth(),
        )
        every: list[Costs] = self.world.share_all(own)
        return _largest(every)

    def _reward(self) -> tuple[float, float, float]:
        """Seconds of scoring one picture more, of scoring any, and what sampling loses of each.

        A reward that fails here will say so in training.
        """
        picture = self.probe.picture()
        about = self.example.about(self.example.open_images())

        def submit(num: int) -> Future[Scores]:
            pictures = picture.repeat(num, *[1] * (picture.ndim - 1))
            return self.scorer.submit(pictures, [self.example.prompt] * num, [about] * num)

        def sample() -> None:
            self.probe.plain(1, lambda name: None)
            if picture.device.type == "cuda":
                torch.cuda.synchronize(picture.device)

        try:
            submit(PICTURES).result()  # the first may have something to load
            few = _seconds(lambda: submit(1).result())
            many = _seconds(lambda: submit(PICTURES).result())
            alone = _seconds(sample)
            began, sampled = time.perf_counter(), 0
            calls = [submit(PICTURES) for _ in range(math.ceil(BESIDE_S / many))]
            while not all(call.done() for call in calls):
                sample()
                sampled += 1
            lost = time.perf_counter() - began - sampled * alone
            calls[-1].result()
        except LeanError:
            return 0.0, 0.0, 0.0
        each = max(0.0, many - few) / (PICTURES - 1)
        return each, max(0.0, few - each), max(0.0, lost / (len(calls) * many))

    def _all_fit(
        self, options: Sequence[Option], load: Workload, fixed: Costs, limit: int | None
    ) -> bool:
        if limit is None:
            return True
        costs, usable = replace(fixed, steps=self.steps), limit * (1 - MARGIN)
        known = [o for o in options if Key.of(o) in self.steps]
        fit = all(predict(load, costs, o).peak_bytes <= usable for o in known)
        return fit and not self.too_large


def _per_sample(load: Workload, cost: StepCost) -> float:
    """Seconds of a forward's trajectories, sampled and differentiated."""
    plain = load.steps - load.selected
    trained = load.selected * (cost.forward_grad + cost.backward)
    return cost.call + plain * cost.forward + trained + cost.decode


def _seconds(run: Callable[[], object]) -> float:
    """The median of three runs."""
    found = []
    for _ in range(3):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def _largest(every: Sequence[T]) -> T:
    """The slowest and largest of each cost over the ranks; the slowest of a bandwidth."""
    first = every[0]
    found: dict[str, Any] = {}
    for one in fields(first):
        values = [getattr(cost, one.name) for cost in every]
        if all(isinstance(value, int | float) for value in values):
            found[one.name] = min(values) if one.name == "host_bandwidth" else max(values)
    return replace(first, **found)


def adopted(config: Config, folder: Any) -> Config:
    """A run that is resumed goes on as it was begun: what auto decided stands in its folder."""
    stored = folder / CONFIG
    if not stored.is_file():
        return config
    was = load_config(stored)
    update: dict[str, Any] = {"schedule": was.schedule}
    for branch, names in DECIDED.items():
        values = {name: getattr(getattr(was, branch), name) for name in names}
        update[branch] = getattr(config, branch).model_copy(update=values)
    return config.model_copy(update=update)


DECIDED = {
    "rollout": ("micro_batch", "ahead"),
    "model": ("activation_checkpointing",),
    "parallel": ("sync", "ledger_dtype", "ledger_device"),
    "memory": ("activations",),
}
"""What `auto` decides, besides the schedule."""
