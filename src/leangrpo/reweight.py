"""Reweight: backpropagate at once with advantage one, correct when the advantage is known."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor

from .capture import Capture
from .data import Transition
from .errors import LeanError
from .gradients import Gradients
from .ledger import Ledger
from .samples import Samples
from .schedules import Common, Statistics, Target
from .stopwatch import Stopwatch


class Reweight(Common):
    """Backpropagate at once with advantage one; multiply the gradient by A when it is known
    (paper eq. 7, algorithm 1).

    Graphs are freed step by step; what waits is one gradient per trajectory. Equal to native in
    exact arithmetic, not bitwise: the scaling comes after the backward, not before. A batch of
    several samples has one backward but as many advantages: sampled inside `capture`, it
    leaves a gradient for each of them.
    """

    name = "reweight"
    needs_graph = True
    splits = True
    capture: Capture

    def __init__(
        self,
        target: Target,
        *,
        kl: float = 0.0,
        gradients: Gradients | None = None,
        ledger_dtype: torch.dtype | None = None,
        ledger_on_host: bool = False,
        watch: Stopwatch | None = None,
    ) -> None:
        """`ledger_dtype` and `ledger_on_host`: how waiting gradients are kept (`Ledger`).

        Raises LeanError when ranks would add up provisional gradients, which nothing can correct
        afterwards (paper, appendix C).
        """
        super().__init__(target, kl=kl, gradients=gradients, watch=watch)
        self._dtype, self._host = ledger_dtype, ledger_on_host
        if self.gradients.sync == "step":
            raise LeanError(
                f"schedule {self.name!r} cannot synchronise at every step: a gradient must be "
                "multiplied by its advantage before ranks are added up, and no factor can do it "
                "afterwards. Use parallel.sync=update or group, or schedule 'retain' or 'native'."
            )

    def begin(self, num_samples: int, num_steps: int) -> None:
        """Open an update; gradients already in `.grad` are kept and added to."""
        super().begin(num_samples, num_steps)
        self._ledger = Ledger(self.guard.parameters, dtype=self._dtype, host=self._host)
        self._steps: dict[Hashable, list[float]] = {}
        self.capture = Capture(self.guard.modules, self.guard.parameters)

    def transition(self, transition: Transition) -> None:
        """Backward of one step, onto its trajectories' provisional gradients."""
        self._require_open("transition")
        t = transition
        self.guard.accept(t, self.name)
        self._note(t)
        for key in t.keys if t.weight else ():
            if key in self._known:
                raise LeanError(
                    f"schedule {self.name!r}: {key} was sampled on after its advantage."
                )
            self._steps.setdefault(key, []).append(t.weight)
        if t.baseline is not None:
            self.statistics.loss += float(t.baseline.sum()) * (t.weight * self._scale)
        kl_seed = self._kl_seed(t)
        with self.watch.stage("backward"):
            self._ledger.settle()
            if len(t.keys) == 1:
                self._one(t, kl_seed)
            else:
                self._batch(t, kl_seed)
        self.statistics.num_backwards += 1

    def _run(self, t: Transition, value: Tensor, seed: Tensor, *, again: bool = False) -> None:
        self.gradients.before(idle=t.weight == 0.0)
        torch.autograd.backward([value], [seed], retain_graph=again)
        self.gradients.after()

    def _one(self, t: Transition, kl_seed: Tensor | None) -> None:
        """A single sample: its gradient is what autograd accumulates."""
        ledger, (key,) = self._ledger, t.keys
        if t.weight and t.baseline is None:
            self.gradients.put(ledger.reopen(key))
        seed = torch.full_like(t.log_prob, t.weight)
        self._run(t, t.log_prob, seed, again=kl_seed is not None)
        if t.weight and t.baseline is None:
            ledger.hold(key, self.gradients.take())
        elif t.weight and t.baseline is not None:
            alone = self.gradients.take()  # the baseline's share does not wait for the advantage
            ledger.add_scaled(alone, float(t.baseline) * self._scale)
            ledger.join(key, alone)
        if kl_seed is not None and t.kl is not None:  # not scaled by A: goes to the sum
            self._run(t, t.kl, kl_seed)
            ledger.add(self.gradients.take())

    def _batch(self, t: Transition, kl_seed: Tensor | None) -> None:
        """Several samples: their gradients are what `capture` takes from the layers."""
        ledger, step = self._ledger, None
        if t.weight:
            step = ledger.batch(t.keys) if t.baseline is None else Samples(len(t.keys))
        seed = torch.full_like(t.log_prob, t.weight)
        with self.capture.into(step):
            self._run(t, t.log_prob, seed, again=kl_seed is not None)
        alone = self.gradients.take()
        if not self.capture.seen:
            raise LeanError(
                f"schedule {self.name!r} got {len(t.keys)} samples in one transition that were not "
                "sampled inside its `capture`: it needs a gradient per sample. Sample one at a "
                "time, use `with schedule.capture(rows):` around the network, or schedule 'retain'."
            )
        self.capture.refuse(alone)
        if step is not None and t.baseline is not None:
            shares = t.baseline.detach().to("cpu", torch.float64) * self._scale
            ledger.add_samples(step, shares)  # the baseline's share does not wait
            ledger.batch(t.keys).join(step)
        if kl_seed is not None and t.kl is not None:  # not scaled by A: one gradient for all
            together = Samples(1)
            with self.capture.into(together if t.weight else None):
                self._run(t, t.kl, kl_seed)
            self.capture.refuse(self.gradients.take())
            ledger.add_samples(together, torch.ones(1, dtype=torch.float64))

    def advantages(self, advantages: Mapping[Hashable, float]) -> None:
        """Correct and add up the gradients of finished trajectories."""
        self._learn(advantages)
        self.guard.check(self.name)
        self._ledger.measure()
        with self.watch.stage("backward"):
            for key, advantage in advantages.items():
                if key not in self._steps:
                    raise LeanError(f"schedule {self.name!r}: {key} has an advantage but no steps.")
                if key in self._ledger.waiting:
                    self._ledger.fold(key, -advantage * self._scale)
                for weight in self._steps[key]:
                    self.statistics.loss += -advantage * (weight * self._scale)
            self._ledger.fold_batches(self._known, -self._scale)
        if self.gradients.sync == "group":
            self._synchronise()

    def _synchronise(self) -> None:
        """Correct bucket by bucket, each while the one before is added up over the ranks."""
        with self.watch.stage(self._sync_stage):
            self.gradients.reduce(self._ledger.part, self._ledger.reached())
            self._ledger.settle()

    def finish(self) -> Statistics:
        """Write the sum into `.grad`. Raises LeanError when a trajectory got no advantage."""
        self._require_open("finish")
        if waiting := len(self._steps.keys() - self._known.keys()):
            raise LeanError(
                f"schedule {self.name!r}: {waiting} trajectories never got an "
                "advantage. Call advantages() for every trajectory before finish()."
            )
        self.statistics.ledger_bytes = self._ledger.peak_bytes
        if self.gradients.sync == "update":
            self._synchronise()
        self.gradients.finish()
        return self._close()
