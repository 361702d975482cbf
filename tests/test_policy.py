"""A pipeline as a policy: noise, transitions, replay, gradients, and what is left behind."""

from __future__ import annotations

import gc
import itertools
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
import zoo

from leangrpo.config import load_config
from leangrpo.data import SampleKey
from leangrpo.errors import LeanError
from leangrpo.loading import attention_targets, copy_denoisers, make_trainable
from leangrpo.policy import Policy, Prefix, Sampling
from leangrpo.setup import make_sampling
from leangrpo.solver import Flash, num_steps

BUILD = {"sd3": tiny.tiny_sd3, "flux": tiny.tiny_flux, "wan": tiny.tiny_wan, "sd": tiny.tiny_sd}
KERNEL = {"sd3": "flow_sde", "flux": "flow_sde", "wan": "flow_sde", "sd": "ddim"}
STEPS = 4
KEYS = [SampleKey(0, 0, g) for g in range(3)]


def call_of(name: str) -> dict[str, Any]:
    return {k: v for k, v in tiny.CALL[name].items() if k not in ("num_inference_steps",)}


def make(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Policy:
    pipe = options.pop("pipe", None) or BUILD[name]().to(dtype)
    steps = options.pop("steps", STEPS)
    guidance = options.pop("guidance", 4.0)
    sigmas = options.pop("sigmas", "pipeline")
    flash = options.pop("flash", None)
    options.setdefault("kernel", KERNEL[name])
    sampling = Sampling(steps, guidance=guidance, sigmas=sigmas, call=call_of(name), flash=flash)
    return Policy(pipe, sampling, **{"noise_level": 0.7, **options})


def sample(policy: Policy, keys=KEYS[:1], **options: Any):
    return policy.sample(["a red cube"] * len(keys), keys, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "batch"), list(itertools.product(BUILD, (1, 3))))
def test_replay_is_the_rollout_bitwise(name, batch, dtype) -> None:
    """Every step, the first included, where some pipelines see rounded latents and timesteps."""
    policy = make(name, dtype)
    rollout = sample(policy, KEYS[:batch], selected=range(STEPS - 1), grad=True, decode=False)
    assert [t.step for t in rollout.transitions] == list(range(STEPS - 1))
    for t in rollout.transitions:
        assert t.log_prob.requires_grad
        assert t.latents.dtype == t.next_latents.dtype == torch.float32
        again = policy.replay(t)
        assert torch.equal(again.log_prob, t.log_prob)
        assert torch.equal(policy.replay(t, grad=False).log_prob, t.log_prob)


@pytest.mark.parametrize("name", BUILD)
def test_without_noise_it_is_the_stock_pipeline(name) -> None:
    """Same latents, steps, guidance, dtype: the same image, twice in a row, and after `detach`."""
    pipe = BUILD[name]()
    policy = make(name, pipe=pipe)
    images = [sample(policy, KEYS[:2]).images for _ in range(2)]
    noise = policy.sample(["a red cube"] * 2, KEYS[:2], decode=False)
    assert torch.equal(images[0], images[1])
    from leangrpo.noise import INITIAL, normal

    latents = normal(0, KEYS[:2], INITIAL, policy.plan().shape, torch.empty(0))
    policy.detach()
    stock = pipe(
        prompt=["a red cube"] * 2, latents=latents, num_inference_steps=STEPS,
        guidance_scale=4.0, output_type="pt", return_dict=False, **call_of(name),
    )[0]  # fmt: skip
    assert type(pipe.scheduler) is type(policy.original_scheduler)
    assert torch.equal(torch.as_tensor(stock), images[0])
    assert torch.isfinite(noise.latents).all()


@pytest.mark.parametrize("name", BUILD)
def test_a_samples_noise_knows_no_batch(name) -> None:
    """The same sample in any order and batch, but for the rounding of other matrix shapes."""
    policy = make(name)
    options = {"selected": [1], "decode": False}
    together = sample(policy, KEYS, **options).latents
    shuffled = sample(policy, [KEYS[i] for i in (2, 0, 1)], **options).latents
    torch.testing.assert_close(shuffled, together[[2, 0, 1]], rtol=1e-4, atol=1e-4)
    alone = torch.cat([sample(policy, [key], **options).latents for key in KEYS])
    torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-4)
    other = sample(make(name, seed=1), KEYS, **options).latents
    assert not torch.allclose(other, together)


def test_gradients_are_on_for_selected_steps_only() -> None:
    policy = make("sd3")
    seen = []
    policy.denoisers[0].register_forward_hook(
        lambda *_: seen.append((torch.is_grad_enabled(), policy.pipe.scheduler.cursor))
    )
    taken = []
    sample(policy, selected=[1], grad=True, on_transition=taken.append)
    assert seen == [(i == 1, i) for i in range(STEPS)]
    assert [t.step for t in taken] == [1]
    assert torch.is_grad_enabled()
    with torch.no_grad():
        (t,) = sample(policy, selected=[1], grad=True, decode=False).transitions
        assert t.log_prob.requires_grad
        assert not torch.is_grad_enabled()


def test_prompts_are_encoded_once() -> None:
    policy = make("sd3")
    calls = []
    policy.pipe.text_encoder.register_forward_hook(lambda *_: calls.append(1))
    for key in KEYS:
        (t,) = sample(policy, [key], selected=[0]).transitions
        policy.replay(t)
    assert len(calls) == 2  # the prompt and the negative one


@pytest.mark.parametrize("name", BUILD)
def test_nothing_is_left_behind(name) -> None:
    """As many live tensors after a group as before it."""
    policy = make(name)

    def group() -> None:
        for key in KEYS:
            for t in sample(policy, [key], selected=[0, 2], grad=True).transitions:
                t.log_prob.sum().backward()
        policy.pipe.scheduler._emitted = None

    def alive() -> int:
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    group()
    before = alive()
    group()
    assert alive() <= before


def test_the_timestep_reaches_the_network_unrounded() -> None:
    """bfloat16 would make 976 or 980 of 978.2609 (cf. diffusers#9405)."""
    for name, unit in (("sd3", 1.0), ("flux", 1000.0), ("wan", 1.0)):
        pipe = BUILD[name]().to(torch.bfloat16)
        if name != "wan":
            pipe.scheduler = type(pipe.scheduler).from_config(
                pipe.scheduler.config, shift=5.0, use_dynamic_shifting=False
            )
        policy = make(name, pipe=pipe, steps=10, sigmas="linear")
        seen: list[torch.Tensor] = []
        policy.denoisers[0].register_forward_pre_hook(
            lambda m, args, kwargs, seen=seen: seen.append(kwargs["timestep"].double()),
            with_kwargs=True,
        )
        (t,) = sample(policy, selected=[7], decode=False).transitions
        policy.replay(t)
        values = [float(t.flatten()[0]) * unit for t in seen]
        per_step = (len(seen) - 1) // 10  # two calls a step where guidance is a second call
        assert values[per_step] == pytest.approx(978.2609, abs=1e-3)
        assert values[7 * per_step] == pytest.approx(681.8182, abs=1e-3)
        assert values[-1] == values[7 * per_step]


TABLES = {
    ("sd3", "pipeline"): [0.2780, 0.0089, 0.0],
    ("sd3", "linear"): [0.4286, 0.25, 0.0],
}


@pytest.mark.parametrize(("name", "rule"), TABLES)
def test_sigma_tables_are_pinned(name, rule) -> None:
    """The default SD3 table of diffusers 0.42 is shifted twice; FlowGRPO's recipes use it."""
    policy = make(name, steps=10, sigmas=rule)
    table = policy.plan().table
    assert table[-3:].tolist() == pytest.approx(TABLES[name, rule], abs=1e-4)
    assert len(table) == 11


@pytest.mark.parametrize("steps", [1, 4, 10, 28])
@pytest.mark.parametrize("name", ["sd3", "flux", "wan"])
def test_any_number_of_steps(name, steps) -> None:
    plan = make(name, steps=steps).plan()
    assert len(plan.table) == steps + 1
    assert len(plan.std) == steps
    assert (plan.table[1:] < plan.table[:-1]).all()
    assert torch.isfinite(plan.std).all()


def test_an_explicit_table_and_a_repeated_sigma() -> None:
    plan = make("sd3", steps=2, sigmas=(0.9, 0.5)).plan()
    assert plan.table.tolist() == pytest.approx([27 / 28, 0.75, 0.0], abs=1e-6)
    with pytest.raises(LeanError, match="repeats a value"):
        make("sd3", steps=2, sigmas=(0.5, 0.5))


def test_unipc_keeps_its_own_table() -> None:
    policy = make("wan", pipe=tiny.tiny_wan(unipc=True), kernel="flow_sde_wan", noise_level=None)
    (t,) = sample(policy, selected=[1], grad=True, decode=False).transitions
    assert torch.equal(policy.replay(t).log_prob, t.log_prob)
    assert type(policy.original_scheduler).__name__ == "UniPCMultistepScheduler"
    std = make("wan", pipe=tiny.tiny_wan(unipc=True)).plan().std
    assert float(std.max()) < 1.5  # its first sigma is 1 - 1e-6, not 1: no explosion


def test_what_a_pipeline_rounds_is_put_back() -> None:
    """Scoring a float32 latent but going on from a rounded one gives ratios of 0.94."""
    policy = make("sd3", torch.bfloat16)
    scheduler = policy.pipe.scheduler
    emitted = torch.randn(1, 4, 8, 8)
    scheduler._emitted = emitted
    assert scheduler._exact(emitted.bfloat16(), torch.float32) is emitted
    foreign = torch.randn(1, 4, 8, 8).bfloat16()
    assert torch.equal(scheduler._exact(foreign, torch.float32), foreign.float())


def test_ddim_steps_without_variance_are_refused() -> None:
    pipe = tiny.tiny_sd()
    pipe.scheduler = type(pipe.scheduler).from_config(
        pipe.scheduler.config, steps_offset=0, set_alpha_to_one=False
    )
    policy = make("sd", pipe=pipe)
    assert float(policy.plan().std[-1]) == 0
    with pytest.raises(LeanError, match="adds no noise"):
        sample(policy, selected=[STEPS - 1])
    with pytest.raises(LeanError, match=r"kernel\.noise_level"):
        make("sd", noise_level=0.0)


def test_the_trainable_set_survives_the_reference() -> None:
    """PEFT turns frozen adapters trainable in disable_adapters."""
    pipe = tiny.tiny_sd3()
    make_trainable(pipe, "lora", rank=2, alpha=4)
    for name, p in pipe.transformer.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.05)
    policy = make("sd3", pipe=pipe)
    frozen = next(n for n, _ in policy.named_parameters())
    dict(pipe.transformer.named_parameters())[frozen.removeprefix("transformer.")].requires_grad_(
        False
    )
    before = [n for n, _ in policy.named_parameters()]
    (t,) = sample(policy, selected=[1], grad=True, decode=False).transitions
    with policy.reference():
        away = policy.replay(t, grad=False)
    assert [n for n, _ in policy.named_parameters()] == before
    assert not torch.equal(away.log_prob, t.log_prob)
    assert torch.equal(policy.replay(t).log_prob, t.log_prob)


@pytest.mark.parametrize("train", ["full", "lora"])
def test_the_reference_is_the_start(train) -> None:
    pipe = tiny.tiny_sd3()
    make_trainable(pipe, train, rank=2, alpha=4)
    reference = copy_denoisers(pipe) if train == "full" else None
    policy = make("sd3", pipe=pipe, reference=reference)
    (t,) = sample(policy, selected=[1], grad=True, decode=False).transitions
    policy.with_kl(t)
    assert float(t.kl.detach()) == 0
    with torch.no_grad():
        for _, p in policy.named_parameters():
            p.add_(0.01)
    (t,) = sample(policy, selected=[1], grad=True, decode=False).transitions
    policy.with_kl(t)
    assert float(t.kl.detach()) > 0
    assert t.kl.requires_grad


def test_no_reference_no_kl() -> None:
    policy = make("sd3")
    (t,) = sample(policy, selected=[1], grad=True, decode=False).transitions
    with pytest.raises(LeanError, match="copy_denoisers"):
        policy.with_kl(t)


def test_inference_mode_is_detected() -> None:
    policy = make("sd3")
    with torch.inference_mode(), pytest.raises(LeanError, match=r"inference_mode.*no_grad"):
        sample(policy, selected=[0], grad=True)


def test_mistakes_are_explained() -> None:
    policy = make("sd3")
    with pytest.raises(LeanError, match=r"steps 0 to 3"):
        sample(policy, selected=[4])
    with pytest.raises(LeanError, match=r"StableDiffusion3Pipeline takes no argument 'frames'"):
        policy.plan(Sampling(2, call={"frames": 3}))
    with pytest.raises(LeanError, match=r"`kernel.name` is 'ddim'"):
        make("sd3", kernel="ddim")
    pipe = tiny.tiny_sd3()
    pipe.transformer = None
    with pytest.raises(LeanError, match="has no denoiser"):
        make("sd3", pipe=pipe)


@pytest.mark.parametrize("name", BUILD)
def test_attention_projections_are_found(name) -> None:
    targets = attention_targets(tiny.denoiser(BUILD[name]()))
    for projection in ("to_q", "to_k", "to_v"):
        assert any(t.endswith(projection) for t in targets)


def test_a_pipeline_can_be_given_a_new_policy() -> None:
    pipe = tiny.tiny_sd3()
    make("sd3", pipe=pipe)
    policy = make("sd3", pipe=pipe, noise_level=0.5)
    assert len(policy.denoisers[0]._forward_pre_hooks) == 1
    assert policy.plan().std[0] == pytest.approx(0.5)


FLOW = {
    "sd3": tiny.tiny_sd3,
    "flux": tiny.tiny_flux,
    "wan": tiny.tiny_wan,
    "unipc": lambda: tiny.tiny_wan(unipc=True),
}
WINDOW = [3, 4, 5]


def make_flash(name: str, flash: Flash | None, dtype: torch.dtype = torch.float32, **options: Any):
    pipe = FLOW[name]().to(dtype)
    return make(name.replace("unipc", "wan"), dtype, pipe=pipe, steps=12, flash=flash, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", ["after", "around"])
@pytest.mark.parametrize("name", FLOW)
def test_flash_evaluates_as_often_as_computed_and_replays_bitwise(name, where, dtype) -> None:
    flash = Flash(0.4, where=where)
    policy = make_flash(name, flash, dtype)
    calls: list[int] = []
    policy.on_call = lambda _, step: calls.append(step)
    options = {"selected": WINDOW[::2], "noisy": WINDOW, "grad": True, "decode": False}
    rollout = sample(policy, KEYS[:2], **options)
    per_step = 2 if "wan" in type(policy.pipe).__name__.lower() else 1
    first = 2 if where == "around" else 0
    assert [s for s in calls[::per_step]] == list(range(first, 7))
    assert len(calls) == per_step * num_steps(12, 3, 6, flash)
    assert [t.step for t in rollout.transitions] == WINDOW[::2]
    for t in rollout.transitions:
        assert torch.equal(policy.replay(t).log_prob, t.log_prob)
        assert torch.equal(policy.replay(t, grad=False).log_prob, t.log_prob)
    calls.clear()
    policy.replay(rollout.transitions[0])
    assert set(calls) == {3}


@pytest.mark.parametrize("name", FLOW)
def test_flash_changes_nothing_up_to_the_windows_end(name) -> None:
    """And nothing at all where no noise is drawn: evaluation takes every step."""
    options = {"selected": WINDOW, "noisy": WINDOW, "decode": False}
    full, short = make_flash(name, None), make_flash(name, Flash(0.4))
    a, b = sample(full, **options), sample(short, **options)
    for mine, theirs in zip(a.transitions, b.transitions, strict=True):
        assert torch.equal(mine.latents, theirs.latents)
        assert torch.equal(mine.next_latents, theirs.next_latents)
        assert torch.equal(mine.log_prob, theirs.log_prob)
    assert not torch.allclose(a.latents, b.latents)
    assert torch.equal(sample(full).images, sample(short).images)
    for mine, theirs in ((getattr(p.plan(), n) for p in (full, short)) for n in ("table", "std")):
        assert torch.equal(mine, theirs)
    assert torch.equal(full.plan().timesteps, short.plan().timesteps)


def test_flash_around_keeps_the_windows_noise_and_levels() -> None:
    """Kernels whose std reads other levels than their own step's take those of all T steps."""
    policy = make_flash("wan", Flash(0.4, where="around"), kernel="flow_sde_wan", noise_level=None)
    (t,) = sample(policy, selected=[4], noisy=WINDOW, decode=False).transitions
    assert float(t.std) == float(policy.plan().std[4])


@pytest.mark.parametrize("where", ["after", "around"])
def test_a_shared_prefix_hands_its_history_on(where) -> None:
    """Two calls are one trajectory bitwise, and the third order sees steps of the first."""
    policy = make_flash("sd3", Flash(0.5, order=3, where=where))
    options = {"selected": [3], "noisy": [3], "decode": False}
    whole = sample(policy, same_noise=True, **options)
    prefix = policy.prefix("a red cube", KEYS[0], 3)
    assert len(prefix.history) == {"after": 3, "around": 1}[where]
    rest = sample(policy, prefix=prefix, **options)
    assert torch.equal(rest.transitions[0].latents, whole.transitions[0].latents)
    assert torch.equal(rest.latents, whole.latents)
    forgetful = sample(policy, prefix=Prefix(3, prefix.latents), **options)
    assert not torch.equal(forgetful.latents, whole.latents)
    with pytest.raises(LeanError, match="begin where the prefix ends"):
        sample(policy, prefix=prefix, selected=[5], noisy=[5])


def test_flash_comes_from_the_settings() -> None:
    assert make_sampling(load_config(None)).flash is None
    config = load_config(None, ["sampling.flash.ratio=0.2", "sampling.flash.where=around"])
    assert make_sampling(config).flash == Flash(0.2, 2, "midpoint", "around")


def test_flash_is_refused_where_it_cannot_be() -> None:
    policy = make_flash("sd3", Flash(0.4))
    with pytest.raises(LeanError, match=r"`noisy` is \[2, 4\]: .*Make them contiguous"):
        sample(policy, selected=[4], noisy=[2, 4])
    with pytest.raises(LeanError, match="needs a kernel of flow matching"):
        make("sd", flash=Flash(0.4))
    pipe = tiny.tiny_sd3()
    pipe.scheduler = type(pipe.scheduler).from_config(
        pipe.scheduler.config, use_exponential_sigmas=True
    )
    with pytest.raises(LeanError, match="moves a level by more than its value"):
        make("sd3", pipe=pipe, steps=12, flash=Flash(0.4))
    make("sd3", pipe=pipe, steps=12)


def make_zoo_flash(name: str, where: str) -> Policy:
    torch.manual_seed(0)
    specimen = zoo.SPECIMENS[name]
    flash = Flash(0.5, where=where)
    sampling = replace(zoo.sampling_of(specimen, False), steps=8, flash=flash)
    return Policy(specimen.build(), sampling, kernel="flow_sde", noise_level=0.7)


@pytest.mark.filterwarnings("ignore:In CPU autocast")  # Mochi's pipeline opens one in float32
@pytest.mark.parametrize("where", ["after", "around"])
@pytest.mark.parametrize("name", ["QwenImage", "ZImage", "Mochi", "LTXImageToVideo"])
def test_flash_and_the_ways_of_pipelines(name, where) -> None:
    """Latents in lists, sigmas upwards, pipelines that start from what they draw themselves."""
    policy = make_zoo_flash(name, where)
    calls: list[int] = []
    policy.on_call = lambda _, step: calls.append(step)
    options = {"selected": [2, 3], "noisy": [2, 3], "decode": False}
    whole = sample(policy, same_noise=True, **options)
    first = {"after": 0, "around": 1}[where]
    total = num_steps(8, 2, 4, policy.sampling.flash)
    assert sorted(set(calls)) == list(range(first, first + total))
    for t in whole.transitions:
        assert torch.equal(policy.replay(t).log_prob, t.log_prob)
    rest = sample(policy, prefix=policy.prefix("a red cube", KEYS[0], 2), **options)
    assert torch.equal(rest.latents, whole.latents)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("FluxImg2Img", "starts in the middle"),
        ("LTX2ImageToVideo", "steps several latents together"),
        ("CogView4", "passes timesteps of its own"),
    ],
)
def test_pipelines_without_flash_say_why(name, reason) -> None:
    with pytest.raises(LeanError, match=rf"`sampling\.flash\.ratio` is 0\.5: .*{reason}"):
        make_zoo_flash(name, "after")
