"""The claim of the project, on every tiny pipeline: three schedules, one gradient.

Layers, cheapest first: retain == native bitwise (gradients, weights, AdamW state); reweight ==
native to rounding; all of them == the oracle, which shares no code with them.

Bounds. float64: some 1e3 additions of relative rounding 1.1e-16 stay below 1e-12. float32: the
same count at 6e-8, with random signs, below 5e-6. bfloat16: measured against the float32 oracle,
where reweight may not be worse than native by more than 10%.
"""

from __future__ import annotations

import functools
import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import tiny
import torch

from leangrpo.data import SampleKey, Transition
from leangrpo.loading import make_trainable
from leangrpo.oracle import float64_throughout, oracle_gradient
from leangrpo.policy import Policy, Sampling
from leangrpo.reweight import Reweight
from leangrpo.schedules import Native, Retain
from leangrpo.solver import Flash, num_steps

BUILD = {"sd3": tiny.tiny_sd3, "flux": tiny.tiny_flux, "wan": tiny.tiny_wan, "sd": tiny.tiny_sd}
KERNEL = {"sd3": "flow_sde", "flux": "flow_cps", "wan": "dance_sde", "sd": "ddim"}
LEVEL = {"flow_sde": 0.7, "flow_cps": 0.8, "dance_sde": 0.3, "ddim": 1.0}
DTYPE = {"f32": torch.float32, "bf16": torch.bfloat16, "f64": torch.float64}
STEPS, SELECTED, GENERATIONS = 4, (0, 2), 3
FLASH_STEPS, FLASH_SELECTED, FLASH_WINDOW = 10, (2, 4), (2, 3, 4)
ADVANTAGES = (0.7, -1.9, 1.2)
PROMPT = "a red cube"


def pipeline(name: str, train: str, dtype: torch.dtype, *, checkpointing: bool = False) -> Any:
    """The same weights every time; a LoRA whose second factor is not zero."""
    pipe = BUILD[name]().to(dtype)
    make_trainable(pipe, train, rank=4, alpha=8, activation_checkpointing=checkpointing)
    generator = torch.Generator().manual_seed(1)
    for part in (getattr(pipe, n, None) for n in ("transformer", "unet")):
        for key, parameter in part.named_parameters() if part is not None else ():
            if "lora_B" in key:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.data.copy_(0.05 * noise)
    return pipe


def call_of(name: str, guided: bool) -> dict[str, Any]:
    size = dict(tiny.CALL[name])
    size.pop("num_inference_steps", None)
    if name == "flux" and guided:  # a distilled model: real guidance is a second network call
        return {**size, "guidance_scale": 3.5, "true_cfg_scale": 2.0, "negative_prompt": "blurred"}
    return {**size, "guidance_scale": 4.0 if guided else 1.0}


def make_policy(pipe: Any, name: str, guided: bool, flash: Flash | None = None) -> Policy:
    kernel = KERNEL[name]
    call = call_of(name, guided)
    guidance, negative = call.pop("guidance_scale"), call.pop("negative_prompt", None)
    sampling = Sampling(
        FLASH_STEPS if flash else STEPS,
        guidance=guidance,
        negative_prompt=negative,
        call=call,
        flash=flash,
    )
    return Policy(pipe, sampling, kernel=kernel, noise_level=LEVEL[kernel], seed=5)


def update(kind: type, name: str, train: str, dtype: torch.dtype, **options: Any) -> dict[str, Any]:
    """One optimizer update from the same start; everything that must agree afterwards."""
    batch = options.pop("batch", 1)
    guided, flash = options.pop("guided", False), options.pop("flash", None)
    selected, noisy = (FLASH_SELECTED, FLASH_WINDOW) if flash else (SELECTED, None)
    pipe = pipeline(name, train, dtype, **options)
    policy = make_policy(pipe, name, guided, flash)
    calls = []
    for module in policy.denoisers:
        module.register_forward_pre_hook(lambda *_: calls.append(1))
    schedule = kind(policy, replay=policy.replay) if kind is Native else kind(policy)
    optimizer = torch.optim.AdamW(policy.parameters, lr=1e-3, fused=True)
    schedule.begin(GENERATIONS, len(SELECTED))
    keys = [SampleKey(0, 0, g) for g in range(GENERATIONS)]
    transitions: list[Transition] = []
    latents = []

    def take(t: Transition) -> None:
        transitions.append(
            Transition(t.keys, t.step, t.log_prob.detach(), t.prompts, t.latents, t.next_latents)
        )
        schedule.transition(t)

    for g in range(0, GENERATIONS, batch):
        some = keys[g : g + batch]
        rollout = policy.sample(
            [PROMPT] * len(some), some, selected=selected, noisy=noisy,
            grad=schedule.needs_graph, decode=False, on_transition=take, capture=schedule.capture,
        )  # fmt: skip
        latents.append(rollout.latents)
    schedule.rewards({k: [a] for k, a in zip(keys, ADVANTAGES, strict=True)})  # for streaming
    schedule.advantages(dict(zip(keys, ADVANTAGES, strict=True)))
    statistics = schedule.finish()
    gradient = {k: None if p.grad is None else p.grad.clone() for k, p in policy.named_parameters()}
    optimizer.step()
    return {
        "gradient": gradient,
        "weights": {k: p.detach().clone() for k, p in policy.named_parameters()},
        "state": [{k: v.clone() for k, v in optimizer.state[p].items()} for p in policy.parameters],
        "latents": torch.cat(latents),
        "transitions": transitions,
        "calls": len(calls),
        "statistics": statistics,
    }


@functools.cache
def native(name: str, train: str, dtype: torch.dtype, **options: Any) -> dict[str, Any]:
    """The reference of several tests, made once; float64 all through where that is the dtype."""
    with float64_throughout() if dtype is torch.float64 else nullcontext():
        return update(Native, name, train, dtype, **options)


def flat(gradient: dict[str, torch.Tensor | None]) -> torch.Tensor:
    return torch.cat([g.flatten().double() for g in gradient.values() if g is not None])


def relative(a: dict[str, Any], b: dict[str, Any]) -> float:
    assert [k for k, v in a.items() if v is None] == [k for k, v in b.items() if v is None]
    return float((flat(a) - flat(b)).norm() / flat(b).norm())


def assert_same(a: Any, b: Any) -> None:
    assert torch.equal(a["latents"], b["latents"])
    for part in ("gradient", "weights"):
        assert a[part].keys() == b[part].keys()
        for key, value in a[part].items():
            assert value is not None, f"{key} got no gradient"
            assert torch.equal(value, b[part][key]), f"{part} of {key}"
    for mine, theirs in zip(a["state"], b["state"], strict=True):
        assert all(torch.equal(mine[k], theirs[k]) for k in theirs)


MATRIX = [
    # a half in which every pair of values occurs; the other half with the slow ones
    pytest.param(*case, marks=[pytest.mark.slow] if odd else [])
    for case in itertools.product(BUILD, ("full", "lora"), (False, True), (False, True))
    for odd in [([*BUILD].index(case[0]) + (case[1] == "lora") + case[2] + case[3]) % 2]
]


@pytest.mark.parametrize("dtype", ["f32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "train", "guided", "checkpointing"), MATRIX)
def test_retain_is_native_bitwise(name, train, guided, checkpointing, dtype) -> None:
    options = {"guided": guided, "checkpointing": checkpointing}
    expected = native(name, train, DTYPE[dtype], **options)
    retain = update(Retain, name, train, DTYPE[dtype], **options)
    assert_same(retain, expected)
    assert expected["statistics"].ratio_error == 0.0
    per_step = expected["calls"] // (GENERATIONS * (STEPS + len(SELECTED)))
    assert per_step == (2 if guided and name in ("flux", "wan") else 1)
    assert expected["calls"] == per_step * GENERATIONS * (STEPS + len(SELECTED))
    assert retain["calls"] == per_step * GENERATIONS * STEPS


@pytest.mark.parametrize("name", BUILD)
def test_retain_is_native_bitwise_in_micro_batches(name) -> None:
    options = {"guided": True, "batch": 3}
    assert_same(
        update(Retain, name, "full", torch.float32, **options),
        update(Native, name, "full", torch.float32, **options),
    )


@pytest.mark.parametrize(("dtype", "bound"), [("f32", 5e-6), ("f64", 1e-12)])
@pytest.mark.parametrize(("name", "train", "guided", "checkpointing"), MATRIX)
def test_reweight_is_native(name, train, guided, checkpointing, dtype, bound) -> None:
    options = {"guided": guided, "checkpointing": checkpointing}
    expected = native(name, train, DTYPE[dtype], **options)
    with float64_throughout() if dtype == "f64" else nullcontext():
        reweight = update(Reweight, name, train, DTYPE[dtype], **options)
    assert torch.equal(expected["latents"], reweight["latents"])
    assert relative(reweight["gradient"], expected["gradient"]) <= bound
    assert reweight["calls"] * (STEPS + len(SELECTED)) == expected["calls"] * STEPS
    assert reweight["statistics"].loss == expected["statistics"].loss


@pytest.mark.parametrize(
    ("dtype", "bound"), [pytest.param("f32", 5e-6, marks=pytest.mark.slow), ("f64", 1e-12)]
)
@pytest.mark.parametrize(("name", "train", "guided", "checkpointing"), MATRIX)
def test_reweight_is_native_in_micro_batches(
    name, train, guided, checkpointing, dtype, bound
) -> None:
    """Three in a forward, against one after the other; the float32 latents differ by rounding."""
    options = {"guided": guided, "checkpointing": checkpointing}
    expected = native(name, train, DTYPE[dtype], **options, batch=3)
    alone = native(name, train, torch.float64, **options)
    with float64_throughout() if dtype == "f64" else nullcontext():
        reweight = update(Reweight, name, train, DTYPE[dtype], **options, batch=3)
    assert torch.equal(expected["latents"], reweight["latents"])
    assert relative(reweight["gradient"], expected["gradient"]) <= bound
    if dtype == "f64":
        assert relative(reweight["gradient"], alone["gradient"]) <= bound
    per_step = alone["calls"] // (GENERATIONS * (STEPS + len(SELECTED)))
    assert reweight["calls"] == per_step * STEPS


def oracle(
    name: str,
    train: str,
    guided: bool,
    transitions: list[Transition],
    dtype: torch.dtype,
    steps: int = STEPS,
):
    pipe = pipeline(name, train, torch.bfloat16 if dtype is torch.bfloat16 else dtype)
    wide = torch.promote_types(dtype, torch.float32)
    pipe = pipe.to(wide)  # a bfloat16 model's weights, in float32 arithmetic
    pipe.set_progress_bar_config(disable=True)
    for t in transitions:
        t.latents, t.next_latents = t.latents.to(wide), t.next_latents.to(wide)
    return oracle_gradient(
        pipe,
        transitions,
        {SampleKey(0, 0, g): a for g, a in enumerate(ADVANTAGES)},
        kernel=KERNEL[name],
        noise_level=LEVEL[KERNEL[name]],
        call={"num_inference_steps": steps, **call_of(name, guided)},
        on_policy=dtype is torch.bfloat16,  # scored in bfloat16, the ratio would not be 1
    )


@pytest.mark.parametrize("kind", [Native, Retain, Reweight])
@pytest.mark.parametrize(
    ("name", "train", "guided"), list(itertools.product(BUILD, ("full", "lora"), (False, True)))
)
def test_each_is_the_oracles_gradient(name, train, guided, kind) -> None:
    if kind is Native:
        result = native(name, train, torch.float64, guided=guided, checkpointing=False)
    else:
        with float64_throughout():
            result = update(kind, name, train, torch.float64, guided=guided)
    transitions, expected = oracle_of(name, train, guided)
    for mine, theirs in zip(result["transitions"], transitions, strict=True):
        assert torch.equal(mine.latents, theirs.latents)
        assert torch.equal(mine.next_latents, theirs.next_latents)
    assert relative(result["gradient"], expected) <= 1e-12


@functools.cache
def oracle_of(name: str, train: str, guided: bool) -> tuple[list[Transition], dict[str, Any]]:
    """The oracle's gradient of native's trajectory, which every schedule must have sampled."""
    sampled = native(name, train, torch.float64, guided=guided, checkpointing=False)["transitions"]
    with float64_throughout():
        return sampled, oracle(name, train, guided, sampled, torch.float64)


@pytest.mark.parametrize("where", ["after", "around"])
@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_with_fewer_steps_outside_the_window(name, where) -> None:
    """Compressed rollouts: the same claims, and the oracle's gradient, which knows no compression.

    A transition of the window is one of the sampler of all steps, so that is what scores it.
    """
    flash = Flash(0.6, where=where)
    total = num_steps(FLASH_STEPS, FLASH_WINDOW[0], FLASH_WINDOW[-1] + 1, flash)
    assert total == {"after": 7, "around": 6}[where]
    options = {"guided": True, "flash": flash}
    per_step = 2 if name == "flux" else 1
    expected = native(name, "full", torch.float32, **options)
    retain = update(Retain, name, "full", torch.float32, **options)
    assert_same(retain, expected)
    assert expected["statistics"].ratio_error == 0.0
    assert retain["calls"] == per_step * GENERATIONS * total
    assert expected["calls"] == per_step * GENERATIONS * (total + len(FLASH_SELECTED))
    expected = native(name, "full", torch.float64, **options)
    with float64_throughout():
        reweight = update(Reweight, name, "full", torch.float64, **options)
        transitions = expected["transitions"]
        truth = oracle(name, "full", True, transitions, torch.float64, steps=FLASH_STEPS)
    assert torch.equal(expected["latents"], reweight["latents"])
    assert relative(reweight["gradient"], expected["gradient"]) <= 1e-12
    assert relative(reweight["gradient"], truth) <= 1e-12


@pytest.mark.parametrize("name", BUILD)
def test_reweight_rounds_no_worse_than_native_in_bfloat16(name) -> None:
    errors = {}
    for kind in (Native, Reweight):
        result = update(kind, name, "full", torch.bfloat16, guided=True)
        expected = oracle(name, "full", True, result["transitions"], torch.bfloat16)
        errors[kind] = relative(result["gradient"], expected)
    print(
        f"{name}, relative error in bfloat16: "
        f"native {errors[Native]:.4f}, reweight {errors[Reweight]:.4f}"
    )
    assert 0 < errors[Native] < 0.5
    assert errors[Reweight] <= 1.1 * errors[Native]
