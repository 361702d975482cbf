"""The records that travel through a run; all of them know shapes, none of them knows a model.

Shape letters, used in every docstring of the package: B samples in one forward, M generations of
a prompt (the group), P prompts of an update, T sampling steps, S selected steps, C H W F channels,
height, width and frames.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor


class SampleKey(NamedTuple):
    """Whose noise and whose advantage: a generation of a prompt of an update.

    `prompt` counts the draws of an update, not the texts: a text drawn twice makes two groups.
    """

    update: int
    prompt: int
    generation: int


@dataclass(slots=True)
class Transition:
    """One selected denoising step of B samples, z_t -> z_{t-1}.

    `log_prob` is `(B,)` and carries its graph when the step was sampled with gradients. `latents`
    (z_t) and `next_latents` (z_{t-1}) are `(B, ...)` float32, exactly what the kernel read and
    what was handed on; a foreign trainer that feeds bare log-probabilities leaves them out.
    `std` is 0-d, of the noise that was added; `output` `(B, ...)` what the network said. `kl`
    `(B,)` is the divergence from the reference policy, where one is in the loss, and `reference`
    what it is taken to. `baseline` `(B,)` is subtracted from the samples' advantages at this step;
    it is known when the step is sampled. `weight` multiplies the step's loss; 0 is an idle step.
    `same_start`: the trajectory started from its group's noise (`Policy.sample(same_noise=True)`).
    `inputs` are further arguments of the pipeline's call, such as the picture to edit.
    """

    keys: tuple[Hashable, ...]
    step: int
    log_prob: Tensor
    prompts: tuple[str, ...] = ()
    latents: Tensor | None = None
    next_latents: Tensor | None = None
    mean: Tensor | None = None
    std: Tensor | None = None
    kl_std: Tensor | None = None
    output: Tensor | None = None
    kl: Tensor | None = None
    reference: Tensor | None = None
    baseline: Tensor | None = None
    weight: float = 1.0
    same_start: bool = False
    inputs: Mapping[str, Any] = field(default_factory=dict)
    version: int | None = None
    process: int = field(default_factory=os.getpid)

    def without_graph(self) -> Transition:
        """The same step for a later replay; its graph may go."""
        kl = None if self.kl is None else self.kl.detach()
        mean = None if self.mean is None else self.mean.detach()
        return replace(self, log_prob=self.log_prob.detach(), kl=kl, mean=mean, output=None)


@dataclass(frozen=True, slots=True)
class Rollout:
    """What one call of the policy gave: pictures, final latents and the selected transitions.

    `images` is `(B, C, H, W)` (video `(B, F, C, H, W)`) float32 in [0, 1] on the CPU, or None
    when nothing was decoded; `latents` `(B, ...)` is z_0. `transitions` is empty when a callback
    took them as they came.
    """

    keys: tuple[SampleKey, ...]
    prompts: tuple[str, ...]
    images: Tensor | None
    latents: Tensor
    transitions: tuple[Transition, ...]
