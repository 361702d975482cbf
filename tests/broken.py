"""Schedules with one mistake each, as `verify --schedules native,broken:NAME` takes them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from leangrpo.data import Transition
from leangrpo.gradients import Gradients
from leangrpo.reweight import Reweight
from leangrpo.schedules import Native, Retain


class premature(Reweight):
    """Adds up all trajectories, over the ranks too, and applies the advantages to that sum."""

    def __init__(self, policy: Any, *, gradients: Gradients, **options: Any) -> None:
        super().__init__(policy, gradients=gradients, **options)

    def advantages(self, advantages: Mapping[Hashable, float]) -> None:
        super().advantages(dict.fromkeys(advantages, 1.0))
        self.mine = [*getattr(self, "mine", []), *advantages.values()]

    def finish(self) -> Any:
        statistics = super().finish()
        # what a rank's own last trajectory got: the mean over a group would be 0
        for parameter in self.gradients.parameters:
            if parameter.grad is not None:
                parameter.grad *= self.mine[-1]
        self.mine = []
        return statistics


class averaged(premature):
    """The same with the mean of all advantages, which is 0 for a normalised group."""

    def finish(self) -> Any:
        self.mine = [sum(self.mine) / len(self.mine)]
        return super().finish()


class dropped(Retain):
    """Forgets a selected step of every trajectory."""

    def transition(self, transition: Transition) -> None:
        if transition.step != 2:
            super().transition(transition)


class dropped_once(Retain):
    """Forgets a selected step of the first forward only."""

    def begin(self, num_samples: int, num_steps: int) -> None:
        super().begin(num_samples, num_steps)
        self.forgotten = False

    def transition(self, transition: Transition) -> None:
        if not self.forgotten and transition.step == 2:
            self.forgotten = True
        else:
            super().transition(transition)


class twice(Reweight):
    """Counts the second trajectory double."""

    def advantages(self, advantages: Mapping[Hashable, float]) -> None:
        super().advantages({k: a * (2 if k.generation == 1 else 1) for k, a in advantages.items()})


class unscaled(Retain):
    """Divides by the trajectories, and not by the steps."""

    def begin(self, num_samples: int, num_steps: int) -> None:
        super().begin(num_samples, 1)


class stale(Native):
    """Trains on a copy of the weights that was made once."""

    def __init__(self, policy: Any, **options: Any) -> None:
        self.copy = [p.detach().clone() for p in policy.parameters]
        super().__init__(policy, replay=policy.replay, **options)

    def _differentiate(self, t: Transition) -> None:
        now = [p.detach().clone() for p in self.gradients.parameters]
        self._load(self.copy)
        t.log_prob = self.replay(t).log_prob.detach()  # on-policy there
        super()._differentiate(t)
        self._load(now)

    @torch.no_grad()
    def _load(self, weights: list[Tensor]) -> None:
        for parameter, value in zip(self.gradients.parameters, weights, strict=True):
            parameter.copy_(value)
