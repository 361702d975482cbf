"""The slow, certain way: plain autograd on the clipped loss, one sample and one step at a time.

It shares no code with the policy, the kernels, the ledger or the schedules, knows no hook and
writes the formulas out again from their sources, so that they cannot all be wrong together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from .data import Transition


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Inside, a float64 network is float64 all through; forward and backward must both be inside.

    Many networks compute norms and rotary embeddings in float32 whatever their dtype
    (`x.float()`), which would leave 1e-9 of rounding in what is to be compared to 1e-12. The casts
    of torch.Tensor are replaced for the while, so that recomputed blocks see them too.
    """

    def keep(original: Any) -> Any:
        def cast(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.dtype is torch.float64:
                if original is _FLOAT:
                    return self
                args = tuple(torch.float64 if a is torch.float32 else a for a in args)
                kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
            return original(self, *args, **kwargs)

        return cast

    with ExitStack() as stack:
        for name in ("float", "to", "type"):
            original = getattr(Tensor, name)
            stack.enter_context(mock.patch.object(Tensor, name, keep(original)))
        yield


_FLOAT = Tensor.float


class _Stop(Exception):
    """Ends a pipeline's call once its first guided model output is there."""


def oracle_gradient(
    pipe: Any,
    transitions: Sequence[Transition],
    advantages: Mapping[Any, float],
    *,
    kernel: str,
    noise_level: float,
    call: Mapping[str, Any],
    clip_range: float = 1e-4,
    on_policy: bool = False,
) -> dict[str, Tensor]:
    """Gradient of the clipped GRPO loss by name of every trainable denoiser parameter.

    loss = 1/(N S) sum_i sum_t max(-A r, -A clip(r, 1 +- eps)), r = exp(log p - log p_old) (paper
    eq. 2), over N trajectories and S steps; `pipe` is a plain pipeline in float32 or float64
    (another copy than the policy's, with the same weights), `call` what its `__call__` is given.
    `on_policy` takes p_old for p itself, for transitions that were scored in a lower precision.
    """
    names = [n for n in ("transformer", "transformer_2", "unet") if getattr(pipe, n, None)]
    modules: dict[str, nn.Module] = {n: getattr(pipe, n) for n in names}
    samples = len(advantages)
    steps = sum(len(t.keys) for t in transitions) // samples
    for module in modules.values():
        module.zero_grad(set_to_none=True)
    for t in transitions:
        assert t.latents is not None and t.next_latents is not None
        for row, key in enumerate(t.keys):
            x, following = t.latents[row : row + 1], t.next_latents[row : row + 1]
            output, table = _model_output(pipe, t.prompts[row], x, t.step, dict(call))
            new = _log_prob(kernel, output, x, following, table, t.step, noise_level, pipe)
            old = new.detach() if on_policy else t.log_prob[row].detach().to(new.dtype)
            ratio = (new - old).exp()
            a = advantages[key]
            clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
            loss = torch.maximum(-a * ratio, -a * clipped) * t.weight / (samples * steps)
            loss.backward()  # type: ignore[no-untyped-call]
    return {
        f"{name}.{key}": torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, module in modules.items()
        for key, p in module.named_parameters()
        if p.requires_grad
    }


def _model_output(
    pipe: Any, prompt: str, x: Tensor, index: int, call: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The guided model output at step `index` from latents `x` (1, ...), and the noise table."""
    scheduler = pipe.scheduler
    kind = type(scheduler)
    caught: list[Tensor] = []
    tables: list[Tensor] = []

    def step(model_output: Tensor, *_: Any, **__: Any) -> None:
        caught.append(model_output)
        raise _Stop

    def set_timesteps(*args: Any, **kwargs: Any) -> None:
        kind.set_timesteps(scheduler, *args, **kwargs)
        if hasattr(scheduler, "alphas_cumprod") and not scheduler.config.get("use_flow_sigmas"):
            stride = scheduler.config.num_train_timesteps // len(scheduler.timesteps)
            rows = [scheduler.alphas_cumprod[t] for t in scheduler.timesteps]
            last = int(scheduler.timesteps[-1]) - stride
            end = scheduler.alphas_cumprod[last] if last >= 0 else scheduler.final_alpha_cumprod
            tables.append(torch.stack([*rows, end]))
        else:
            tables.append(scheduler.sigmas.cpu())
        scheduler.timesteps = scheduler.timesteps[index : index + 1]

    scheduler.step = step
    scheduler.set_timesteps = functools.wraps(scheduler.set_timesteps)(set_timesteps)
    call_method: Any = type(pipe).__call__
    plain = call_method.__wrapped__  # without diffusers' torch.no_grad
    try:
        with torch.enable_grad():
            plain(pipe, prompt=[prompt], latents=x, output_type="latent", **call)
    except _Stop:
        pass
    finally:
        del scheduler.step, scheduler.set_timesteps
    return caught[0], tables[0]


def _log_prob(
    kernel: str,
    v: Tensor,
    x: Tensor,
    following: Tensor,
    table: Tensor,
    i: int,
    level: float,
    pipe: Any,
) -> Tensor:
    """Log-density of `following` given `x`, mean over elements; coefficients in float64."""
    a, b = float(table[i]), float(table[i + 1])
    if kernel == "ddim":  # Song et al. 2021, eqs. 12 and 16; eta = level
        std = level * math.sqrt((1 - b) / (1 - a) * (1 - a / b))
        root, rest = math.sqrt(a), math.sqrt(1 - a)
        prediction = pipe.scheduler.config.prediction_type
        if prediction == "epsilon":
            clean, noise = (x - rest * v) / root, v
        elif prediction == "sample":
            clean, noise = v, (x - root * v) / rest
        else:
            clean, noise = root * x - rest * v, root * v + rest * x
        mean = math.sqrt(b) * clean + math.sqrt(1 - b - std**2) * noise
    elif (
        kernel == "flow_cps"
    ):  # Flow-CPS: (1-s') x0 + sqrt(s'^2 - std^2) x1, std = s' sin(level pi/2)
        std = b * math.sin(level * math.pi / 2)
        mean = (1 - b) * (x - a * v) + math.sqrt(b * b - std * std) * (x + (1 - a) * v)
        return -((following - mean) ** 2).mean()
    else:  # one SDE with three diffusion coefficients g: mean = x + v dt - g^2/2 score dt
        first, last, dt = float(table[1]), float(table[-1]), b - a
        g = {
            "flow_sde": level * math.sqrt(a / (1 - (first if a == 1 else a))),
            "flow_sde_wan": last + (first - last) * a,
            "dance_sde": level,
        }[kernel]
        score = -(x + (1 - a) * v) / a
        mean = x + v * dt - 0.5 * g * g * score * dt
        std = g * math.sqrt(-dt)
    return (
        -((following - mean) ** 2) / (2 * std * std) - math.log(std * math.sqrt(2 * math.pi))
    ).mean()
