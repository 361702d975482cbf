"""A diffusers scheduler that samples: the pipeline's own call becomes the whole policy.

Put in place of `pipe.scheduler`, it keeps the original's configuration and tables (shift, sigmas,
dynamic shifting) and replaces only `step`: the transition's mean and std come from the model
output *after* guidance, the next latent is drawn, its log-probability recorded, with its graph
when gradients are on. Latents and means are float32 (float64 when the model is), log-densities
float64; only the denoiser runs in its own dtype. Steps are carried by index, never looked up by
timestep.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_utils import SchedulerOutput
from torch import Tensor

from .capture import Capture
from .data import SampleKey, Transition
from .errors import LeanError, problem
from .kernels import Kernel
from .noise import normal


@dataclass(slots=True)
class Tape:
    """What one call of the pipeline is to do and where its transitions go.

    `selected` steps are recorded (with gradients if `grad`), `noisy` steps draw noise and the rest
    are deterministic. `span` restricts the call to the steps [start, stop), and `latents`
    `(B, ...)` are what its first one starts from. For a replay, `next_latents` is the other end of
    the stored transition, which is scored, not drawn.
    `capture` is told the batch of every denoiser call.
    """

    keys: tuple[SampleKey, ...] = ()
    prompts: tuple[str, ...] = ()
    seed: int = 0
    selected: frozenset[int] = frozenset()
    noisy: frozenset[int] = frozenset()
    grad: bool = False
    span: tuple[int, int] | None = None
    latents: Tensor | None = None
    next_latents: Tensor | None = None
    version: int = 0
    sink: Callable[[Transition], None] | None = None
    last_step: Callable[[], None] | None = None
    capture: Capture | None = None
    shape: tuple[int, ...] | None = field(default=None, init=False)


class Stochastic:
    """The part that `make_stochastic` puts in front of a diffusers scheduler class."""

    kernel: Kernel
    tape: Tape | None = None
    sigma_rule: str | Sequence[float] = "pipeline"
    table: Tensor
    timesteps: Tensor
    cursor: int = 0
    num_steps: int = 0
    _emitted: Tensor | None = None

    def set_timesteps(self, *args: Any, **kwargs: Any) -> None:
        """The original's `set_timesteps`; its table is kept, its steps are cut to the span."""
        original = super().set_timesteps  # type: ignore[misc]
        if self.sigma_rule != "pipeline":
            given = inspect.signature(original).bind(*args, **kwargs).arguments
            sigmas_given = given.get("sigmas")  # a pipeline's own table, or only its length
            wanted = given["num_inference_steps"] if sigmas_given is None else len(sigmas_given)
            rule = self.sigma_rule
            sigmas = np.linspace(1.0, 1.0 / wanted, wanted).tolist() if rule == "linear" else rule
            keep = {k: v for k, v in given.items() if k in ("device", "mu")}
            original(sigmas=list(sigmas), **keep)
        else:
            original(*args, **kwargs)
        everything = self.full_timesteps = self.timesteps
        self.table = self._make_table()
        self.num_steps = len(everything)
        start, stop = (self.tape.span if self.tape else None) or (0, self.num_steps)
        if not 0 <= start < stop <= self.num_steps:
            raise problem(
                "selection", (start, stop), f"the sampler has the steps 0 to {self.num_steps - 1}"
            )
        self.timesteps = everything[start:stop]
        self.cursor = start
        self._emitted = None

    def _make_table(self) -> Tensor:
        """`(T+1,)` float32 on the CPU: the sigmas, or for DDIM the cumulated alphas."""
        if self.kernel.family == "flow":
            return self.sigmas.detach().to("cpu", torch.float32)  # type: ignore[attr-defined,no-any-return]
        steps = self.timesteps.cpu()
        stride = self.config.num_train_timesteps // len(steps)  # type: ignore[attr-defined]
        last = int(steps[-1]) - stride
        end = self.alphas_cumprod[last] if last >= 0 else self.final_alpha_cumprod  # type: ignore[attr-defined]
        following = steps - stride
        table = self.alphas_cumprod[steps]  # type: ignore[attr-defined]
        if not torch.equal(following[:-1], steps[1:]):
            raise LeanError(
                f"{len(steps)} DDIM steps do not divide {self.config.num_train_timesteps} training "  # type: ignore[attr-defined]
                "timesteps evenly, so a step would not end where the next one starts. "
                "Set sampling.steps to a divisor."
            )
        return torch.cat([table, end.reshape(1)]).to(torch.float32)

    def step(
        self,
        model_output: Tensor,
        timestep: Any,
        sample: Tensor,
        *args: Any,
        return_dict: bool = True,
        **kwargs: Any,
    ) -> SchedulerOutput | tuple[Tensor]:
        """One transition of `sample` `(B, ...)`; the next latent comes back detached."""
        tape, i = self.tape or Tape(), self.cursor
        dtype = torch.promote_types(
            torch.promote_types(model_output.dtype, sample.dtype), torch.float32
        )
        begins = tape.latents is not None and i == (tape.span or (0,))[0]
        x = (
            tape.latents.to(dtype)
            if begins and tape.latents is not None
            else self._exact(sample, dtype)
        )
        output = model_output.to(dtype)
        tape.shape = tuple(sample.shape)
        noisy, selected = i in tape.noisy, i in tape.selected
        table = self.table.to(dtype)  # a float64 model wants float64 coefficients too
        step = (self.kernel.step if noisy else self.kernel.deterministic)(x, output, table, i)
        mean = step.mean.detach()
        if tape.next_latents is not None:
            following = tape.next_latents.to(dtype)
        elif noisy:
            noise = normal(tape.seed, tape.keys, i, x.shape[1:], like=mean)
            following = torch.addcmul(mean, noise, step.std.to(mean.device, dtype))
        else:
            following = mean
        if selected:
            log_prob = self.kernel.log_prob(following, step)
        if tape.grad:
            torch.set_grad_enabled(False)
        self.cursor = i + 1
        self._step_index = self.cursor
        self._emitted = following
        if selected and tape.sink is not None:
            tape.sink(
                Transition(
                    keys=tape.keys,
                    step=i,
                    log_prob=log_prob,
                    prompts=tape.prompts,
                    latents=x,
                    next_latents=following,
                    mean=step.mean,
                    std=step.std,
                    kl_std=step.kl_std,
                    output=output,
                    version=tape.version,
                )
            )
        if self.cursor == self.num_steps and tape.last_step is not None:
            tape.last_step()
        return SchedulerOutput(prev_sample=following) if return_dict else (following,)

    def _exact(self, sample: Tensor, dtype: torch.dtype) -> Tensor:
        """What the pipeline hands back, in full precision.

        A pipeline may round the latent to its own dtype between two steps; the transition that is
        scored must start from the one that was emitted, so the unrounded value is put back.
        """
        emitted = self._emitted
        if emitted is None or sample.dtype == emitted.dtype or sample.shape != emitted.shape:
            return sample.detach().to(dtype)
        same = torch.equal(sample, emitted.to(sample.dtype))
        return emitted if same else sample.detach().to(dtype)


def make_stochastic(scheduler: Any, kernel: Kernel, sigma_rule: str | Sequence[float]) -> Any:
    """A stochastic twin of a pipeline's scheduler, with its configuration.

    Flow-matching schedulers stay what they are where they have an Euler table (or
    `use_flow_sigmas`); any other flow scheduler becomes FlowMatchEulerDiscreteScheduler, and one
    with cumulated alphas becomes DDIM, both by `from_config`. Raises LeanError when the kernel
    belongs to the other family, or the scheduler to neither.
    """
    config = scheduler.config
    is_flow = isinstance(scheduler, FlowMatchEulerDiscreteScheduler) or (
        hasattr(scheduler, "scale_noise") or bool(config.get("use_flow_sigmas"))
    )
    name = type(scheduler).__name__
    base: Any
    if is_flow:
        base = type(scheduler) if config.get("use_flow_sigmas") else FlowMatchEulerDiscreteScheduler
        if isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
            base = type(scheduler)
        if config.get("invert_sigmas"):
            raise LeanError(f"{name} runs its sigmas upwards (invert_sigmas): not supported.")
    elif hasattr(scheduler, "alphas_cumprod"):
        base = DDIMScheduler
    else:
        raise LeanError(
            f"The pipeline's scheduler is a {name}, which is neither a flow-matching scheduler nor "
            "one with cumulated alphas: no transition kernel is known for it. "
            "Replace pipe.scheduler by FlowMatchEulerDiscreteScheduler or DDIMScheduler."
        )
    family = "flow" if is_flow else "ddim"
    if kernel.family != family:
        names = "flow_sde, flow_sde_wan, dance_sde, flow_cps" if is_flow else "ddim"
        raise problem("kernel.name", kernel.name, f"a {name} needs one of: {names}")
    if sigma_rule != "pipeline" and not is_flow:
        raise problem("sampling.sigmas", sigma_rule, f"a {name} has no sigmas", "Use 'pipeline'.")
    if config.get("thresholding"):
        raise LeanError(f"{name} thresholds its prediction: no density is known. Switch it off.")
    twin = _class(base).from_config(config)
    twin.kernel, twin.sigma_rule = kernel, sigma_rule
    return twin


@functools.cache
def _class(base: Any) -> Any:
    """`Stochastic` in front of `base`, with the signature pipelines look at (`sigmas`, `mu`)."""
    made = type(f"Stochastic{base.__name__}", (Stochastic, base), {"__module__": __name__})
    set_timesteps = functools.wraps(base.set_timesteps)(
        lambda self, *args, **kwargs: Stochastic.set_timesteps(self, *args, **kwargs)
    )
    made.set_timesteps = set_timesteps  # type: ignore[attr-defined]
    return made
