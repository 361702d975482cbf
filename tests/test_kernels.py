"""Kernels against the published implementations' numbers, diffusers' schedulers, and algebra."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from torch import Tensor

from leangrpo import kernels
from leangrpo.errors import LeanError
from leangrpo.kernels import (
    Kernel,
    Step,
    cps_log_prob,
    ddim,
    euler,
    flow_cps,
    flow_sde,
    flow_sde_wan,
    gaussian_log_prob,
    kl_to_reference,
    make_kernel,
    stds,
)

U = 2.0**-24
"""Relative error of one float32 operation."""

GOLDEN = json.loads((Path(__file__).parent / "golden" / "transition_kernels.json").read_text())
FLOW_KERNELS = {"flow_sde": 0.7, "flow_sde_wan": None, "dance_sde": 0.3, "flow_cps": 0.8}


def sigmas(num_steps: int, shift: float = 3.0, dtype: torch.dtype = torch.float32) -> Tensor:
    t = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
    return (shift * t / (1 + (shift - 1) * t)).to(dtype)


def ddim_scheduler(num_steps: int, **config: Any) -> DDIMScheduler:
    defaults = {
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "clip_sample": False,
        "set_alpha_to_one": False,
        "steps_offset": 1,
    }
    scheduler = DDIMScheduler(**{**defaults, **config})
    scheduler.set_timesteps(num_steps)
    return scheduler


def alphas(scheduler: DDIMScheduler) -> Tensor:
    steps = scheduler.timesteps
    after = int(steps[-1]) - 1000 // len(steps)
    last = scheduler.alphas_cumprod[after] if after >= 0 else scheduler.final_alpha_cumprod
    return torch.cat([scheduler.alphas_cumprod[steps], last.reshape(1)])


def latents(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# -- the published implementations ---------------------------------------------------------------


def golden_kernel(case: dict[str, Any]) -> tuple[Kernel, Tensor]:
    if case["kernel"] != "ddim":
        level = case.get("noise_level", case.get("eta"))
        return make_kernel(case["kernel"], noise_level=level), torch.tensor(case["sigmas"])
    names = ("beta_start", "beta_end", "beta_schedule", "set_alpha_to_one", "steps_offset")
    scheduler = ddim_scheduler(case["num_steps"], **{name: case[name] for name in names})
    assert scheduler.timesteps[case["step_index"]] == case["timestep"]
    kind = case["prediction_type"]
    return make_kernel("ddim", noise_level=case["eta"], prediction_type=kind), alphas(scheduler)


@pytest.mark.parametrize(
    "case",
    GOLDEN["cases"],
    ids=[f"{c['kernel']}-{c['num_steps']}-{c['step_index']}" for c in GOLDEN["cases"]],
)
def test_golden(case: dict[str, Any]) -> None:
    """Means and log-probabilities of the public code, to float32 rounding.

    A mean is a sum of terms no larger than |x| + |v|, after some 4 roundings on either side, 8u
    in all. DanceGRPO divides a difference of such terms by σ² and multiplies it by s²/2; DDIM
    divides by √ᾱ and multiplies by √ᾱ'. A log-probability is off by the mean's error times its
    slope |x' - μ|/s², and by its own roundings: 4 a term on either side, and 6 levels of a float32
    sum of 48, 16u in all, of terms d²/2s² (which counts twice, as s is rounded too), log s and 1.
    """
    kernel, table = golden_kernel(case)
    i = case["step_index"]
    x, v, following = (
        torch.tensor(case[name]).reshape(case["shape"])
        for name in ("sample", "model_output", "next_sample")
    )
    step = kernel.step(x, v, table, i)
    assert step.mean.dtype == torch.float32
    assert step.std.shape == step.kl_std.shape == ()
    s = step.std.double()
    if kernel.family == "flow":
        factor = 1 + s**2 / (2 * table[i].double() ** 2)
    else:
        factor = 1 + (table[i + 1] / table[i]).double().sqrt()
    mean_bound = 8 * U * (x.abs() + v.abs()).double() * factor
    if "mean" in case:
        difference = step.mean - torch.tensor(case["mean"]).reshape(case["shape"])
        assert (difference.abs() <= mean_bound).all()
    if "std_total" in case:
        torch.testing.assert_close(
            step.std.expand(2), torch.tensor(case["std_total"]), rtol=4 * U, atol=0
        )
    off = (following.double() - step.mean).abs()
    slope = (off / s**2 * mean_bound).flatten(1).mean(1)
    terms = (off**2 / s**2 + s.log().abs() + 1).flatten(1).mean(1)
    log_prob = kernel.log_prob(following, step)
    expected = torch.tensor(case["log_prob"], dtype=torch.float64)
    assert log_prob.shape == (2,)
    assert ((log_prob - expected).abs() <= slope + 16 * U * terms).all()


def test_golden_file_covers_what_it_should() -> None:
    assert [c["kernel"] for c in GOLDEN["cases"]].count("flow_sde") == 8
    assert {c["kernel"] for c in GOLDEN["cases"]} == {"flow_sde", "dance_sde", "ddim"}


# -- diffusers' own schedulers -------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [1, 4, 10, 28])
@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
def test_euler_is_the_flow_scheduler_bitwise(num_steps: int, shift: float) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(num_steps)
    x = latents(2, 4, 8, 8)
    for i, t in enumerate(scheduler.timesteps):
        v = latents(2, 4, 8, 8, seed=i + 1)
        step = euler(x, v, scheduler.sigmas, i)
        x = scheduler.step(v, t, x, return_dict=False)[0]
        assert torch.equal(step.mean, x)
        assert step.std == 0


@pytest.mark.parametrize("prediction_type", kernels.PREDICTION_TYPES)
@pytest.mark.parametrize("clip", [None, 1.5])
@pytest.mark.parametrize("num_steps", [4, 20, 50])
def test_ddim_without_noise_is_the_scheduler_bitwise(
    prediction_type: str, clip: float | None, num_steps: int
) -> None:
    scheduler = ddim_scheduler(
        num_steps,
        prediction_type=prediction_type,
        clip_sample=clip is not None,
        clip_sample_range=clip or 1.0,
    )
    kernel = make_kernel("ddim", noise_level=1.0, prediction_type=prediction_type, clip_range=clip)
    table = alphas(scheduler)
    x = latents(2, 4, 8, 8)
    for i, t in enumerate(scheduler.timesteps):
        output = latents(2, 4, 8, 8, seed=i + 1)
        step = kernel.deterministic(x, output, table, i)
        x = scheduler.step(output, int(t), x, return_dict=False)[0]
        assert torch.equal(step.mean, x)
        assert step.std == 0


@pytest.mark.parametrize("prediction_type", kernels.PREDICTION_TYPES)
def test_ddim_with_noise_is_the_scheduler_bitwise(prediction_type: str) -> None:
    scheduler = ddim_scheduler(20, prediction_type=prediction_type)
    kernel = make_kernel("ddim", noise_level=0.6, prediction_type=prediction_type)
    x, output, noise = (latents(2, 4, 8, 8, seed=seed) for seed in range(3))
    for i, t in enumerate(scheduler.timesteps):
        step = kernel.step(x, output, alphas(scheduler), i)
        expected = scheduler.step(output, int(t), x, eta=0.6, variance_noise=noise)
        assert torch.equal(step.mean + step.std * noise, expected.prev_sample)


@pytest.mark.parametrize(
    ("steps_offset", "set_alpha_to_one", "variance"),
    [(0, True, 0.0), (0, False, 0.0), (1, True, 0.0), (1, False, 4.26e-4)],
)
def test_ddim_variance_of_the_last_step(
    steps_offset: int, set_alpha_to_one: bool, variance: float
) -> None:
    scheduler = ddim_scheduler(50, steps_offset=steps_offset, set_alpha_to_one=set_alpha_to_one)
    std = stds(make_kernel("ddim", noise_level=1.0), alphas(scheduler))
    assert (std[:-1] > 0).all()
    assert float(std[-1]) ** 2 == pytest.approx(variance, rel=1e-3, abs=0)


# -- algebra -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [1, 2, 10, 40])
@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
def test_first_flowgrpo_step_adds_exactly_the_noise_level(num_steps: int, shift: float) -> None:
    """1 - σ₁ is h, so g√h = a·√(1/h)·√h: five roundings."""
    std = stds(make_kernel("flow_sde", noise_level=0.7), sigmas(num_steps, shift))
    assert float(std[0]) == pytest.approx(0.7, rel=5 * U)


@pytest.mark.parametrize("i", range(8))
@pytest.mark.parametrize("name", ["flow_sde", "flow_sde_wan", "dance_sde"])
def test_one_sde_family(name: str, i: int) -> None:
    """All three are x + v·dt - ½g²·score·dt for their g, with DanceGRPO's own form of the score."""
    table = sigmas(8, dtype=torch.float64)
    x, v = latents(2, 3, 4, dtype=torch.float64), latents(2, 3, 4, seed=1, dtype=torch.float64)
    sigma, dt = table[i], table[i + 1] - table[i]
    g = {
        "flow_sde": 0.7 * torch.sqrt(sigma / (1 - (table[1] if i == 0 else sigma))),
        "flow_sde_wan": table[1] * sigma,
        "dance_sde": torch.tensor(0.3, dtype=torch.float64),
    }[name]
    score = -(x - (1 - sigma) * (x - sigma * v)) / sigma**2
    step = make_kernel(name, noise_level=FLOW_KERNELS[name]).step(x, v, table, i)
    expected = x + v * dt - 0.5 * g**2 * score * dt
    torch.testing.assert_close(step.mean, expected, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(step.std, g * torch.sqrt(-dt), rtol=1e-15, atol=0)
    torch.testing.assert_close(step.kl_std, g if name == "flow_sde" else step.std)


@pytest.mark.parametrize("i", range(10))
def test_no_noise_is_euler(i: int) -> None:
    table, x, v = sigmas(10), latents(2, 3, 4), latents(2, 3, 4, seed=1)
    expected = euler(x, v, table, i).mean
    assert torch.equal(flow_sde(x, v, table, i, noise_level=0.0).mean, expected)
    assert torch.equal(kernels.dance_sde(x, v, table, i, noise_level=0.0).mean, expected)
    # (1-σ')(x-σv) + σ'(x+(1-σ)v): seven roundings of terms below |x| + |v|.
    cps = flow_cps(x, v, table, i, noise_level=0.0)
    assert ((cps.mean - expected).abs() <= 7 * U * (x.abs() + v.abs())).all()
    assert cps.std == 0


@pytest.mark.parametrize("name", ["flow_sde", "dance_sde", "flow_cps"])
def test_noise_vanishes_with_its_level(name: str) -> None:
    """The mean's distance from Euler is quadratic in the noise level, the std linear."""
    table = sigmas(10, dtype=torch.float64)
    x, v = latents(2, 3, 4, dtype=torch.float64), latents(2, 3, 4, seed=1, dtype=torch.float64)
    exact = euler(x, v, table, 4).mean
    coarse, fine = (
        make_kernel(name, noise_level=level).step(x, v, table, 4) for level in (1e-2, 1e-3)
    )
    ratio = (coarse.mean - exact).norm() / (fine.mean - exact).norm()
    assert float(ratio) == pytest.approx(100, rel=1e-3)
    assert float(coarse.std / fine.std) == pytest.approx(10, rel=1e-3)


@pytest.mark.parametrize("level", [0.3, 0.8, 1.0])
@pytest.mark.parametrize("i", [0, 4, 9])
def test_cps_keeps_the_coefficients(level: float, i: int) -> None:
    """From (1-σ)x₀ + σx₁ to (1-σ')x₀ + √(σ'² - s²)x₁, so that noise restores a variance of σ'²."""
    table = sigmas(10, dtype=torch.float64)
    data, noise = latents(2, 5, dtype=torch.float64), latents(2, 5, seed=1, dtype=torch.float64)
    sigma, following = table[i], table[i + 1]
    x = (1 - sigma) * data + sigma * noise
    step = flow_cps(x, noise - data, table, i, noise_level=level)
    s = following * math.sin(level * math.pi / 2)
    expected = (1 - following) * data + torch.sqrt(following**2 - s**2) * noise
    torch.testing.assert_close(step.mean, expected, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(step.std, s, rtol=0, atol=0)
    torch.testing.assert_close(step.kl_std, s, rtol=0, atol=0)


@pytest.mark.parametrize("prediction_type", kernels.PREDICTION_TYPES)
def test_ddim_keeps_the_coefficients(prediction_type: str) -> None:
    """The three kinds of prediction are one step when they say the same thing."""
    table = alphas(ddim_scheduler(20)).double()
    data, noise = latents(2, 5, dtype=torch.float64), latents(2, 5, seed=1, dtype=torch.float64)
    i = 7
    a, following = table[i], table[i + 1]
    output = {
        "epsilon": noise,
        "sample": data,
        "v_prediction": a.sqrt() * noise - (1 - a).sqrt() * data,
    }[prediction_type]
    x = a.sqrt() * data + (1 - a).sqrt() * noise
    step = ddim(x, output, table, i, noise_level=0.8, prediction_type=prediction_type)
    variance = 0.8**2 * (1 - following) / (1 - a) * (1 - a / following)
    expected = following.sqrt() * data + (1 - following - variance).sqrt() * noise
    torch.testing.assert_close(step.mean, expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(step.std, variance.sqrt(), rtol=1e-14, atol=0)


def test_wan_noise_falls_with_sigma() -> None:
    table = sigmas(10, shift=5.0)
    x = latents(1, 2, 3)
    g = [
        float(flow_sde_wan(x, x, table, i).std / (table[i] - table[i + 1]).sqrt())
        for i in range(10)
    ]
    assert g == pytest.approx((table[1] * table[:-1]).tolist(), rel=8 * U)


# -- densities -----------------------------------------------------------------------------------


def test_log_prob_is_torchs_normal() -> None:
    mean, following = latents(3, 4, 5, dtype=torch.float64), latents(3, 4, 5, seed=1).double()
    std = torch.tensor(0.3)
    normal = torch.distributions.Normal(mean, std.double())
    expected = normal.log_prob(following).flatten(1)
    step = Step(mean, std, std)
    torch.testing.assert_close(gaussian_log_prob(following, step), expected.mean(1))
    torch.testing.assert_close(gaussian_log_prob(following, step, "sum"), expected.sum(1))
    squares = (following - mean).square().flatten(1)
    torch.testing.assert_close(cps_log_prob(following, step), -squares.mean(1))
    torch.testing.assert_close(cps_log_prob(following, step, "sum"), -squares.sum(1))


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_gradient_of_log_prob(reduce: str) -> None:
    """d l / d v = b·(x' - μ)/s², over the number of elements for a mean, where μ = a·x + b·v."""
    table = sigmas(8, dtype=torch.float64)
    x, v, noise = (latents(2, 3, 4, seed=seed, dtype=torch.float64) for seed in range(3))
    v.requires_grad_()
    kernel = make_kernel("flow_sde", noise_level=0.7, reduce=reduce)
    step = kernel.step(x, v, table, 3)
    following = (step.mean + step.std * noise).detach()
    kernel.log_prob(following, step).sum().backward()
    sigma, dt = table[3], table[4] - table[3]
    g = 0.7 * torch.sqrt(sigma / (1 - sigma))
    b = (1 + g**2 * (1 - sigma) / (2 * sigma)) * dt
    num = 12 if reduce == "mean" else 1
    expected = b * noise / (g * torch.sqrt(-dt)) / num
    torch.testing.assert_close(v.grad, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", [*FLOW_KERNELS, "ddim"])
def test_gradient_reaches_the_output(name: str) -> None:
    table = alphas(ddim_scheduler(8)) if name == "ddim" else sigmas(8)
    kernel = make_kernel(name, noise_level={**FLOW_KERNELS, "ddim": 1.0}[name])
    x = latents(2, 3, dtype=torch.float64)
    following = latents(2, 3, seed=2, dtype=torch.float64)

    def log_prob(v: Tensor) -> Tensor:
        return kernel.log_prob(following, kernel.step(x, v, table, 2))

    v = latents(2, 3, seed=1, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(log_prob, v)


def test_long_sums_keep_small_differences() -> None:
    """A sum over 2^18 elements is some -3e5: one float32 step there is 0.03, a ratio of 1.03."""
    step = Step(torch.zeros(1, 2**18), torch.tensor(1.0), torch.tensor(1.0))
    following = latents(1, 2**18)
    moved = step._replace(mean=torch.full_like(following, 1e-6))
    difference = gaussian_log_prob(following, moved, "sum") - gaussian_log_prob(
        following, step, "sum"
    )
    expected = (following.double() * 1e-6 - 0.5e-12).sum()
    # Each of the 2^18 differences is rounded, independently: √(2^18)·u·E|x|² is 3e-5.
    assert float(difference) == pytest.approx(float(expected), abs=2e-4)


def test_kl_is_torchs_kl() -> None:
    mean, other = latents(3, 4, 5, dtype=torch.float64), latents(3, 4, 5, seed=1).double()
    std = torch.tensor(0.25)
    kl = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean, std.double()),
        torch.distributions.Normal(other, std.double()),
    )
    torch.testing.assert_close(kl_to_reference(mean, other, std), kl.flatten(1).mean(1))
    assert torch.equal(kl_to_reference(mean, mean, std), torch.zeros(3, dtype=torch.float64))


def test_flowgrpos_kl_is_h_times_the_divergence() -> None:
    table, x = sigmas(10), latents(2, 3, 4)
    v, reference = latents(2, 3, 4, seed=1), latents(2, 3, 4, seed=2)
    step = flow_sde(x, v, table, 5, noise_level=0.7)
    other = flow_sde(x, reference, table, 5, noise_level=0.7).mean
    true = kl_to_reference(step.mean, other, step.std)
    h = table[5] - table[6]
    torch.testing.assert_close(
        kl_to_reference(step.mean, other, step.kl_std), h * true, rtol=8 * U, atol=0
    )


# -- every kernel --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", kernels.NAMES)
def test_every_kernel(name: str, dtype: torch.dtype) -> None:
    level = {**FLOW_KERNELS, "ddim": 1.0}[name]
    kernel = make_kernel(name, noise_level=level)
    table = alphas(ddim_scheduler(6)) if kernel.family == "ddim" else sigmas(6)
    std = stds(kernel, table)
    assert std.shape == (6,)
    assert (std[:-1] > 0).all()
    x, v = latents(2, 3, 4, dtype=dtype), latents(2, 3, 4, seed=1, dtype=dtype)
    for i in range(6):
        step, still = kernel.step(x, v, table, i), kernel.deterministic(x, v, table, i)
        assert step.mean.dtype == still.mean.dtype == dtype
        assert step.mean.shape == still.mean.shape == x.shape
        assert step.std == std[i]
        assert still.std == 0
        assert step.std.shape == step.kl_std.shape == still.std.shape == ()
        if step.std > 0:
            assert torch.isfinite(kernel.log_prob(v, step)).all()


def test_only_cps_has_a_last_step_without_noise() -> None:
    last = {
        name: float(stds(make_kernel(name, noise_level=level), sigmas(10))[-1])
        for name, level in FLOW_KERNELS.items()
    }
    assert {name for name, std in last.items() if std == 0} == {"flow_cps"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "sde"}, "`kernel.name` is 'sde': must be one of flow_sde, flow_sde_wan"),
        ({"name": "flow_sde"}, "`kernel.noise_level` is None: it must be a number above 0"),
        ({"name": "flow_sde", "noise_level": 0.0}, "`kernel.noise_level` is 0.0: .* no log-prob"),
        ({"name": "dance_sde", "noise_level": -0.1}, "`kernel.noise_level` is -0.1"),
        ({"name": "flow_sde", "noise_level": math.nan}, "`kernel.noise_level` is nan"),
        ({"name": "ddim", "noise_level": 0.0}, "`kernel.noise_level` is 0.0"),
        ({"name": "ddim", "noise_level": 1.5}, "`kernel.noise_level` is 1.5: ddim has all its"),
        ({"name": "flow_cps", "noise_level": 1.1}, "flow_cps has all its noise at 1. Take a"),
        ({"name": "flow_sde_wan", "noise_level": 0.7}, "takes its noise from the sigmas. Set it"),
        ({"name": "flow_sde", "noise_level": 0.7, "reduce": "max"}, "`kernel.reduce` is 'max'"),
        (
            {"name": "ddim", "noise_level": 1.0, "prediction_type": "flow_prediction"},
            "one of epsilon, sample, v_prediction, and it is 'flow_prediction'",
        ),
    ],
)
def test_refusals(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(LeanError, match=message):
        make_kernel(**arguments)


def test_a_table_without_steps_is_refused() -> None:
    kernel = make_kernel("flow_sde", noise_level=0.7)
    with pytest.raises(LeanError, match=r"Step 0 of the sampler goes from 1 to 1, .* no finite"):
        stds(kernel, torch.tensor([1.0, 1.0, 0.5, 0.0]))
    with pytest.raises(LeanError, match=r"Step 1 of the sampler goes from 0.4 to 0.6"):
        stds(kernel, torch.tensor([0.8, 0.4, 0.6, 0.0]))
