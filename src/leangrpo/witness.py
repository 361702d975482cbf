"""Plain autograd in a higher precision, on the steps that a schedule was given.

What `verify` judges schedules by. A whole copy of the pipeline on every rank, one backward for each
recorded step, sums in `.grad`: no schedule, no ledger, no shards and no capture has a part in it.
(The oracle of the tests, `oracle`, shares no kernel and no policy with the rest either, but knows
four kernels only; this one evaluates whatever the policy can.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .config import Config
from .data import SampleKey, Transition
from .oracle import float64_throughout
from .parallel import World, whole
from .policy import Policy
from .setup import make_policy

HIGHER = {
    "float16": "float32",
    "bfloat16": "float32",
    "float32": "float64",
    "float64": "float64",
}
"""The precision a compute dtype is judged in."""

Column = tuple[SampleKey, int, float, float, list[Tensor]]
"""Sample, step, its coefficient in the gradient, its weight, and the gradient of log p."""


class Witness:
    """The same pipeline with the same weights, in `HIGHER` precision and unsharded.

    Gradients are lists of whole CPU tensors, in the order of the policy's parameters, summed over
    the ranks: all methods are collectives.
    """

    def __init__(self, config: Config, policy: Policy, world: World) -> None:
        m = config.model
        self.dtype = HIGHER[m.dtype]
        plain = {"dtype": self.dtype, "master_dtype": None, "compile": False, "offload": False}
        model = m.model_copy(update=plain)
        self.world = world
        self.kl = config.objective.kl
        self.policy = make_policy(config.model_copy(update={"model": model}), policy.device)
        self.follow(policy)

    def _throughout(self) -> AbstractContextManager[Any]:
        return float64_throughout() if self.dtype == "float64" else nullcontext()

    @torch.no_grad()
    def follow(self, policy: Policy) -> None:
        """Take over all weights and buffers of a policy, text encoders and VAE included."""
        for name, component in policy.pipe.components.items():
            mine = self.policy.pipe.components[name]
            if not isinstance(component, nn.Module):
                continue
            for kind in (nn.Module.parameters, nn.Module.buffers):
                for theirs, own in zip(kind(component), kind(mine), strict=True):
                    own.copy_(whole(theirs.detach()))
        self.policy.guard.bump("weights were copied")

    def gradient(
        self, transitions: Sequence[Transition], advantages: Mapping[Any, float], scale: float
    ) -> list[Tensor]:
        """- `scale` sum of w (A - V) grad log p over all ranks' steps (paper eq. 5), and the KL's.

        The clipped surrogate has this gradient at ratio 1, where a rollout is on-policy.
        """
        parameters = self.policy.parameters
        with self._throughout():
            for t in transitions:
                if t.weight == 0.0:
                    continue
                new = self.policy.replay(t)
                seed = torch.tensor(_coefficients(t, advantages, scale), dtype=torch.float64)
                value = (seed.to(new.log_prob) * new.log_prob).sum()
                if self.kl and new.kl is not None:
                    value = value + self.kl * scale * new.kl.sum()
                value.backward()  # type: ignore[no-untyped-call]
        found = [_on_cpu(p.grad, p) for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        return [self.world.sum(g) for g in found]

    def columns(
        self, transitions: Sequence[Transition], advantages: Mapping[Any, float], scale: float
    ) -> Iterator[Column]:
        """The gradient of every sample's log-probability at every step, one after another.

        Ordered by sample and step; every rank gets those of all ranks.
        """
        own: dict[tuple[SampleKey, int], tuple[Transition, int, float]] = {}
        for t in transitions:
            if t.weight:
                for row, coefficient in enumerate(_coefficients(t, advantages, scale)):
                    own[t.keys[row], t.step] = t, row, coefficient  # type: ignore[index]
        places = sorted(place for some in self.world.share_all(list(own)) for place in some)
        parameters = self.policy.parameters
        for place in places:
            found = [torch.zeros(p.shape, dtype=p.dtype) for p in parameters]
            facts = torch.zeros(2, dtype=torch.float64)
            if place in own:
                t, row, coefficient = own[place]
                with self._throughout():
                    new = self.policy.replay(t)
                    some = torch.autograd.grad(
                        new.log_prob[row], parameters, allow_unused=True, materialize_grads=True
                    )
                found = [_on_cpu(g, p) for g, p in zip(some, parameters, strict=True)]
                facts = torch.tensor([coefficient, t.weight], dtype=torch.float64)
            coefficient, weight = self.world.sum(facts).tolist()
            yield *place, coefficient, weight, [self.world.sum(g) for g in found]


def _coefficients(t: Transition, advantages: Mapping[Any, float], scale: float) -> list[float]:
    """What each sample's log-probability is multiplied with in the loss: - w (A - V) / (N S)."""
    baselines = [0.0] * len(t.keys) if t.baseline is None else t.baseline.double().tolist()
    return [
        -(advantages[key] - baseline) * t.weight * scale
        for key, baseline in zip(t.keys, baselines, strict=True)
    ]


def _on_cpu(gradient: Tensor | None, like: Tensor) -> Tensor:
    if gradient is None:
        return torch.zeros(like.shape, dtype=like.dtype)
    return gradient.detach().cpu().clone()
