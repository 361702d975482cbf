"""A running mean of the trained weights: steadier than they are, so what is shown and exported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .parallel import local
from .policy import Policy


class Ema:
    """An exponential moving average of a policy's trainable parameters, sharded as they are.

    The decay of step n is min(decay, (1 + n)/(10 + n)), one step every `every` updates
    (FlowGRPO, `flow_grpo/ema.py`, EMAModuleWrapper). Kept in float32 at least.
    """

    def __init__(self, policy: Policy, decay: float, every: int = 1) -> None:
        self.policy, self.decay, self.every = policy, decay, every
        self.mean = [_wide(p) for p in policy.parameters]

    @torch.no_grad()
    def step(self, update: int) -> None:
        """Take in the weights after `update` (counted from 1)."""
        if update % self.every:
            return
        n = update // self.every
        decay = min(self.decay, (1 + n) / (10 + n))
        for mean, parameter in zip(self.mean, self.policy.parameters, strict=True):
            mean.lerp_(local(parameter.detach()).to(mean.dtype), 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the policy has the mean for its weights."""
        kept = [local(p.detach()).clone() for p in self.policy.parameters]
        self._write(self.mean)
        try:
            yield
        finally:
            self._write(kept)

    @torch.no_grad()
    def _write(self, tensors: list[Tensor]) -> None:
        for parameter, tensor in zip(self.policy.parameters, tensors, strict=True):
            local(parameter.detach()).copy_(tensor)
        self.policy.guard.bump("the running mean was swapped")


def _wide(parameter: Tensor) -> Tensor:
    own = local(parameter.detach())
    return own.to(torch.promote_types(own.dtype, torch.float32), copy=True)
