"""One denoising step as a Gaussian: its mean, its std and its log-density, as pure functions.

Symbols, for flow matching: x the latent z_t, v the predicted velocity (noise minus data), σ the
noise level now (1 is noise, 0 is data), σ' the next one, dt = σ' - σ (negative), h = -dt, μ the
mean of the transition, s the std of the noise that is added. For DDIM: ᾱ the cumulated alpha now,
ᾱ' the next one, ε the predicted noise, η the noise level.

x and the model output are `(B, ...)`, float32 or float64. All that depends on the step alone is a
0-d float32 tensor on the CPU, computed from the table in the sources' order, so that a mean equals
theirs to float32 rounding; a 0-d CPU tensor meets a GPU tensor without waiting for the GPU.

Sources: FlowGRPO = yifan123/flow_grpo, DanceGRPO = XueZeyue/DanceGRPO, DDPO =
kvablack/ddpo-pytorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .errors import LeanError, problem

Reduce = Literal["mean", "sum"]

NAMES = ("flow_sde", "flow_sde_wan", "dance_sde", "flow_cps", "ddim")
PREDICTION_TYPES = ("epsilon", "sample", "v_prediction")
LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


class Step(NamedTuple):
    """A transition N(mean, std²) of B latents.

    `mean` is `(B, ...)` in the latents' dtype. `std` is 0-d, the noise that is really added; 0 is
    a deterministic step. `kl_std` is 0-d, what the algorithm's own KL term divides by: g, without
    √h, for flow_sde and s for all others.
    """

    mean: Tensor
    std: Tensor
    kl_std: Tensor


def euler(x: Tensor, output: Tensor, table: Tensor, i: int) -> Step:
    """The flow's own deterministic step, μ = x + dt·v.

    `table` is the sigmas `(T+1,)`. Bitwise diffusers' FlowMatchEulerDiscreteScheduler.step.
    """
    dt = table[i + 1] - table[i]
    zero = torch.zeros_like(dt)
    return Step(x + dt * output, zero, zero)


def flow_sde(x: Tensor, output: Tensor, table: Tensor, i: int, *, noise_level: float) -> Step:
    """FlowGRPO's SDE: g = a·√(σ / (1-σ)), where a σ of 1 in 1-σ is replaced by σ₁.

    `table` is the sigmas `(T+1,)`, `noise_level` is a. The first step adds noise of std exactly a,
    as 1-σ₁ is its h. Source: FlowGRPO, sde_step_with_logprob, sde_type "sde".
    """
    sigma = table[i]
    below_one = table[1] if sigma > 1 - 1e-5 else sigma
    g = torch.sqrt(sigma / (1 - below_one)) * noise_level
    step = _sde(x, output, table, i, g)
    return step._replace(kl_std=g)


def flow_sde_wan(x: Tensor, output: Tensor, table: Tensor, i: int) -> Step:
    """FlowGRPO's SDE for Wan: g = σ_min + (σ_max - σ_min)·σ, with σ_max = σ₁ and σ_min = σ_T.

    `table` is the sigmas `(T+1,)`. Source: FlowGRPO, wan_pipeline_with_logprob.
    """
    sigma_max, sigma_min = table[1], table[-1]
    return _sde(x, output, table, i, sigma_min + (sigma_max - sigma_min) * table[i])


def dance_sde(x: Tensor, output: Tensor, table: Tensor, i: int, *, noise_level: float) -> Step:
    """DanceGRPO's SDE: g = η at every step.

    `table` is the sigmas `(T+1,)`, `noise_level` is η. Their score, -(x - (1-σ)x̂₀)/σ², is
    -(x + (1-σ)v)/σ, which makes their mean the one of `flow_sde` for another g and does without
    a difference divided by σ². Source: DanceGRPO, flux_step.
    """
    return _sde(x, output, table, i, torch.full_like(table[i], noise_level))


def flow_cps(x: Tensor, output: Tensor, table: Tensor, i: int, *, noise_level: float) -> Step:
    """Coefficients-preserving sampling: μ = (1-σ')·x̂₀ + √(σ'² - s²)·x̂₁, s = σ'·sin(a·π/2).

    `table` is the sigmas `(T+1,)`, `noise_level` is a; x̂₀ = x - σv, x̂₁ = x + (1-σ)v. The last
    step, to σ' = 0, adds no noise. Source: FlowGRPO, sde_step_with_logprob, sde_type "cps".
    """
    sigma, following = table[i], table[i + 1]
    s = following * math.sin(noise_level * math.pi / 2)
    data = x - sigma * output
    noise = x + output * (1 - sigma)
    return Step(data * (1 - following) + noise * torch.sqrt(following**2 - s**2), s, s)


def ddim(
    x: Tensor,
    output: Tensor,
    table: Tensor,
    i: int,
    *,
    noise_level: float,
    prediction_type: str,
    clip_range: float | None = None,
) -> Step:
    """DDIM with noise: μ = √ᾱ'·x̂₀ + √(1 - ᾱ' - s²)·ε, s² = η²·(1-ᾱ')/(1-ᾱ)·(1 - ᾱ/ᾱ').

    `table` `(T+1,)` holds ᾱ at each step and, last, after the last step. `clip_range` clamps x̂₀.
    With η = 0 bitwise diffusers' DDIMScheduler.step. Source: Song et al., arXiv 2010.02502, eqs.
    12 and 16; DDPO, ddim_step_with_logprob.
    """
    alpha, following = table[i], table[i + 1]
    beta = 1 - alpha
    if prediction_type == "epsilon":
        data, noise = (x - beta**0.5 * output) / alpha**0.5, output
    elif prediction_type == "sample":
        data, noise = output, (x - alpha**0.5 * output) / beta**0.5
    else:
        data = alpha**0.5 * x - beta**0.5 * output
        noise = alpha**0.5 * output + beta**0.5 * x
    if clip_range is not None:
        data = data.clamp(-clip_range, clip_range)
    variance = (1 - following) / beta * (1 - alpha / following)
    s = noise_level * variance**0.5
    direction = (1 - following - s**2) ** 0.5 * noise
    return Step(following**0.5 * data + direction, s, s)


def _sde(x: Tensor, v: Tensor, table: Tensor, i: int, g: Tensor) -> Step:
    """One Euler-Maruyama step of the SDE with diffusion g that has the flow's marginals.

    μ = x·(1 + g²/(2σ)·dt) + v·(1 + g²(1-σ)/(2σ))·dt and s = g·√h. With g = 0 it is bitwise
    `euler`. Source: FlowGRPO, sde_step_with_logprob.
    """
    sigma = table[i]
    dt = table[i + 1] - sigma
    drift = g**2 / (2 * sigma)
    mean = x * (1 + drift * dt) + v * ((1 + g**2 * (1 - sigma) / (2 * sigma)) * dt)
    s = g * torch.sqrt(-dt)
    return Step(mean, s, s)


def gaussian_log_prob(next_x: Tensor, step: Step, reduce: Reduce = "mean") -> Tensor:
    """log N(next_x; μ, s²), constants included, over the elements of each latent.

    `next_x` is `(B, ...)` and must be detached; the result is `(B,)` float64: the sum over some
    65,000 elements has no use for float32's 0.008, and in float64 it depends on no order.
    -(x'-μ)²/(2s²) - log s - log √(2π), FlowGRPO's and DDPO's; both average (`reduce="mean"`).
    """
    squares = _reduce((next_x - step.mean).square(), reduce)
    s = step.std.double()
    num = next_x[0].numel() if reduce == "sum" else 1
    return -squares / (2 * s**2) - num * (torch.log(s) + LOG_SQRT_2PI)


def cps_log_prob(next_x: Tensor, step: Step, reduce: Reduce = "mean") -> Tensor:
    """-(x'-μ)² over the elements of each latent: FlowGRPO's "cps" drops 1/(2s²) and constants.

    `next_x` is `(B, ...)` and must be detached; the result is `(B,)` float64.
    """
    return -_reduce((next_x - step.mean).square(), reduce)


def kl_to_reference(mean: Tensor, reference: Tensor, std: Tensor | None) -> Tensor:
    """KL of two transitions of one std, (μ - μ_ref)² / (2 std²), averaged over the elements.

    The means are `(B, ...)`; the result is `(B,)` float64. Without a `std` it is the mean square
    alone: of means (Flow-Factory) or of model outputs (DPOK, train_online_pg). Source: FlowGRPO,
    train_sd3_fast, divides by 2g² for flow_sde, which makes it h times the divergence; its Wan
    and cps forms by 2s², which is the divergence per element.
    """
    squares = _reduce((mean - reference).square(), "mean")
    return squares if std is None else squares / (2 * std.double() ** 2)


def _reduce(values: Tensor, reduce: Reduce) -> Tensor:
    """Over everything but the batch, `(B, ...)` to `(B,)` float64."""
    total = values.flatten(1)
    if reduce == "sum":
        return total.sum(1, dtype=torch.float64)
    return total.mean(1, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Kernel:
    """What a configuration names: a step, its log-density, its deterministic twin.

    `family` says which table it reads: sigmas ("flow") or cumulated alphas ("ddim").
    """

    name: str
    step: Callable[[Tensor, Tensor, Tensor, int], Step]
    deterministic: Callable[[Tensor, Tensor, Tensor, int], Step]
    log_prob: Callable[[Tensor, Step], Tensor]
    family: Literal["flow", "ddim"]


def make_kernel(
    name: str,
    *,
    noise_level: float | None = None,
    reduce: str = "mean",
    prediction_type: str = "epsilon",
    clip_range: float | None = None,
) -> Kernel:
    """The kernel of that name. `prediction_type` and `clip_range` are read by ddim only.

    Raises LeanError for an unknown name, a noise level without a density, an unknown reduction or
    an unknown kind of prediction.
    """
    if name not in NAMES:
        raise problem("kernel.name", name, f"must be one of {', '.join(NAMES)}")
    if reduce not in ("mean", "sum"):
        raise problem("kernel.reduce", reduce, "must be mean or sum")
    log_prob = cps_log_prob if name == "flow_cps" else gaussian_log_prob
    score = partial(log_prob, reduce="sum" if reduce == "sum" else "mean")
    if name == "flow_sde_wan":
        if noise_level is not None:
            rule = "flow_sde_wan takes its noise from the sigmas"
            raise problem("kernel.noise_level", noise_level, rule, "Set it to null.")
        return Kernel(name, flow_sde_wan, euler, score, "flow")
    level = _check_level(name, noise_level)
    if name == "ddim":
        if prediction_type not in PREDICTION_TYPES:
            rule = f"the scheduler's prediction_type must be one of {', '.join(PREDICTION_TYPES)}"
            raise problem("kernel.name", name, f"{rule}, and it is {prediction_type!r}")
        common = partial(ddim, prediction_type=prediction_type, clip_range=clip_range)
        step = partial(common, noise_level=level)
        return Kernel(name, step, partial(common, noise_level=0.0), score, "ddim")
    steps = {"flow_sde": flow_sde, "dance_sde": dance_sde, "flow_cps": flow_cps}
    return Kernel(name, partial(steps[name], noise_level=level), euler, score, "flow")


def _check_level(name: str, level: float | None) -> float:
    if level is None or isinstance(level, bool) or not 0 < level < math.inf:
        rule = "it must be a number above 0, because a step without noise has no log-probability"
        raise problem("kernel.noise_level", level, rule)
    if name in ("flow_cps", "ddim") and level > 1:
        rule = f"{name} has all its noise at 1"
        raise problem("kernel.noise_level", level, rule, "Take a value in (0, 1].")
    return float(level)


def stds(kernel: Kernel, table: Tensor) -> Tensor:
    """The std of every step, `(T,)`: a step of std 0 has no density and cannot be trained.

    Raises LeanError when the table gives a step no std at all: it repeats a value or goes back up.
    """
    x = torch.zeros(1, 1, dtype=table.dtype)
    std = torch.stack([kernel.step(x, x, table, i).std for i in range(len(table) - 1)])
    if not torch.isfinite(std).all():
        step = int((~torch.isfinite(std)).nonzero()[0])
        raise LeanError(
            f"Step {step} of the sampler goes from {float(table[step]):.6g} to "
            f"{float(table[step + 1]):.6g}, for which {kernel.name} has no finite noise. "
            "Choose other sampling.steps or sampling.sigmas."
        )
    return std
