"""The published algorithms, written out again: log-probabilities, ratios, losses, gradients.

The formulas below are those of the sources named with each, in float64, with the network called by
hand; they share no code with the kernels, the advantages or the schedules. A fixed trajectory is
sampled, the weights are moved, and the real schedules must give the same numbers.

The bound is a relative 1e-12, some 1e3 float64 roundings of 1.1e-16 with a margin. A loss is a sum
of numbers near 1 that nearly cancel, so it also gets their absolute rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from test_kernels import GOLDEN
from torch import Tensor

from leangrpo.config import load_config
from leangrpo.credit import Credit, step_weights
from leangrpo.data import SampleKey, Transition
from leangrpo.loading import copy_denoisers
from leangrpo.oracle import float64_throughout
from leangrpo.policy import Policy, Sampling
from leangrpo.reweight import Reweight
from leangrpo.schedules import Native, Retain, Schedule

BOUND = 1e-12
STEPS = 5
PROMPT = "a red cube"
KEYS = [SampleKey(0, 0, g) for g in range(4)]
ADVANTAGES = [0.7, -1.9, 1.2, -0.4]

# -- the transitions -------------------------------------------------------------------------------

Gaussian = tuple[Tensor, float]
"""The mean `(B, ...)` and the std of the noise that is added."""


def flow_grpo_sde(x: Tensor, v: Tensor, sigmas: Sequence[float], i: int, a: float) -> Gaussian:
    """yifan123/flow_grpo, sde_step_with_logprob, sde_type "sde"; MixGRPO's flow_grpo_step."""
    sigma, dt = sigmas[i], sigmas[i + 1] - sigmas[i]
    g = a * math.sqrt(sigma / (1 - (sigmas[1] if sigma == 1 else sigma)))
    mean = x * (1 + g**2 / (2 * sigma) * dt) + v * (1 + g**2 * (1 - sigma) / (2 * sigma)) * dt
    return mean, g * math.sqrt(-dt)


def flow_cps(x: Tensor, v: Tensor, sigmas: Sequence[float], i: int, a: float) -> Gaussian:
    """yifan123/flow_grpo, sde_step_with_logprob, sde_type "cps"."""
    sigma, following = sigmas[i], sigmas[i + 1]
    s = following * math.sin(a * math.pi / 2)
    clean, noise = x - sigma * v, x + (1 - sigma) * v
    return (1 - following) * clean + math.sqrt(following**2 - s**2) * noise, s


def dance(x: Tensor, v: Tensor, sigmas: Sequence[float], i: int, eta: float) -> Gaussian:
    """XueZeyue/DanceGRPO, flux_step."""
    sigma, dt = sigmas[i], sigmas[i + 1] - sigmas[i]
    clean = x - sigma * v
    score = -(x - (1 - sigma) * clean) / sigma**2
    return x + v * dt - 0.5 * eta**2 * score * dt, eta * math.sqrt(-dt)


def ddpo(x: Tensor, noise: Tensor, alphas: Sequence[float], i: int, eta: float) -> Gaussian:
    """kvablack/ddpo-pytorch, ddim_step_with_logprob, for a network that predicts noise."""
    now, following = alphas[i], alphas[i + 1]
    s = eta * math.sqrt((1 - following) / (1 - now) * (1 - now / following))
    clean = (x - math.sqrt(1 - now) * noise) / math.sqrt(now)
    return math.sqrt(following) * clean + math.sqrt(1 - following - s**2) * noise, s


def gaussian(following: Tensor, mean: Tensor, s: float) -> Tensor:
    """Constants included, averaged over a sample's elements: all four but CPS."""
    density = -((following - mean) ** 2) / (2 * s**2) - math.log(s) - math.log(2 * math.pi) / 2
    return density.flatten(1).mean(1)


def without_scale(following: Tensor, mean: Tensor, s: float) -> Tensor:
    """Flow-CPS drops 1/2s² and the constants."""
    return -((following - mean) ** 2).flatten(1).mean(1)


# -- the algorithms --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Algorithm:
    kernel: str
    level: float
    step: Callable[[Tensor, Tensor, Sequence[float], int, float], Gaussian]
    log_prob: Callable[[Tensor, Tensor, float], Tensor]
    selected: tuple[int, ...]
    noisy: tuple[int, ...] | None = None

    @property
    def model(self) -> str:
        return "sd" if self.kernel == "ddim" else "sd3"


ALGORITHMS = {
    "FlowGRPO": Algorithm("flow_sde", 0.7, flow_grpo_sde, gaussian, (0, 1, 2, 3)),
    "FlowGRPO-CPS": Algorithm("flow_cps", 0.8, flow_cps, without_scale, (0, 1, 2, 3)),
    "DanceGRPO": Algorithm("dance_sde", 0.3, dance, gaussian, (0, 3)),
    "MixGRPO": Algorithm("flow_sde", 0.7, flow_grpo_sde, gaussian, (1, 2), (1, 2)),
    "DDPO": Algorithm("ddim", 1.0, ddpo, gaussian, (0, 1, 2, 3, 4)),
}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with float64_throughout():
        yield


class Setting:
    """A policy in float64, a trajectory of its own, and the network to be called by hand."""

    def __init__(self, name: str, schedule: type | None = None, **options: Any) -> None:
        self.a = a = ALGORITHMS[name]
        self.pipe = tiny.BUILDERS[a.model]().to(torch.float64)
        self.prompt = self.pipe.encode_prompt(**self._words())
        self.table, self.timesteps = self._table()
        reference = copy_denoisers(self.pipe)
        call = dict(tiny.CALL[a.model])
        self.policy = Policy(
            self.pipe,
            Sampling(STEPS, guidance=1.0, call=call),
            kernel=a.kernel,
            noise_level=a.level,
            seed=5,
            reference=reference,
            **options,
        )
        self.network, self.reference = tiny.denoiser(self.pipe), next(iter(reference.values()))

    def _words(self) -> dict[str, Any]:
        if self.a.model == "sd":
            none = {"do_classifier_free_guidance": False, "num_images_per_prompt": 1}
            return {"prompt": PROMPT, "device": "cpu", **none}
        more = {"do_classifier_free_guidance": False, "max_sequence_length": tiny.T5_LENGTH}
        return {"prompt": PROMPT, "prompt_2": None, "prompt_3": None, **more}

    def _table(self) -> tuple[list[float], Tensor]:
        if self.a.model == "sd3":
            flow = FlowMatchEulerDiscreteScheduler(shift=3.0)
            flow.set_timesteps(STEPS)
            return flow.sigmas.tolist(), flow.timesteps
        ddim = DDIMScheduler.from_config(self.pipe.scheduler.config)
        ddim.set_timesteps(STEPS)
        # the step after t is t - 1000/T, at the least 0: DDPO clamps, diffusers is told to
        after = [max(int(t) - 1000 // STEPS, 0) for t in ddim.timesteps]
        alphas = [float(ddim.alphas_cumprod[t]) for t in (ddim.timesteps[0], *after)]
        return alphas, ddim.timesteps

    def output(self, x: Tensor, i: int, network: Any = None) -> Tensor:
        network = network or self.network
        t = self.timesteps[i].expand(len(x))
        if self.a.model == "sd":
            text = self.prompt[0].expand(len(x), -1, -1)
            return network(x, t, encoder_hidden_states=text, return_dict=False)[0]
        text, _, pooled, _ = self.prompt
        return network(
            hidden_states=x,
            timestep=t,
            encoder_hidden_states=text.expand(len(x), -1, -1),
            pooled_projections=pooled.expand(len(x), -1),
            return_dict=False,
        )[0]

    def sample(
        self, schedule: Schedule, prepare: Callable[[Transition], Transition] = lambda t: t
    ) -> list[Transition]:
        """Begin an update and sample it; the transitions, without their graphs."""
        taken: list[Transition] = []
        schedule.begin(len(KEYS), len(self.a.selected))
        for key in KEYS:
            rollout = self.policy.sample(
                [PROMPT],
                [key],
                selected=self.a.selected,
                noisy=self.a.noisy,
                grad=schedule.needs_graph,
                decode=False,
            )
            for t in map(prepare, rollout.transitions):
                taken.append(t.without_graph())
                schedule.transition(t)
        return taken

    def native(self, **options: Any) -> Native:
        return Native(self.policy, replay=self.policy.replay, **options)

    def finish(self, schedule: Schedule) -> tuple[float, Tensor]:
        """The value of the loss, and its gradient."""
        schedule.advantages(dict(zip(KEYS, ADVANTAGES, strict=True)))
        loss = schedule.finish().loss
        return loss, self.gradient()

    def gradient(self) -> Tensor:
        """And none left behind."""
        taken = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.policy.parameters]
        self.network.zero_grad(set_to_none=True)
        return torch.cat([g.flatten() for g in taken])

    def move(self, size: float) -> None:
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for p in self.policy.parameters:
                p += size * torch.randn(p.shape, generator=generator, dtype=p.dtype)

    def score(self, t: Transition) -> Tensor:
        """The formulas' log-probability of a transition under the weights of now, `(1,)`."""
        mean, s = self.a.step(
            t.latents, self.output(t.latents, t.step), self.table, t.step, self.a.level
        )
        return self.a.log_prob(t.next_latents, mean, s)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


# -- log-probabilities, ratios, the clipped loss ---------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
def test_log_probabilities_before_and_after_the_weights_move(name: str) -> None:
    s = Setting(name)
    transitions = s.sample(s.native())
    assert [t.step for t in transitions] == [*s.a.selected] * len(KEYS)
    before = torch.cat([t.log_prob for t in transitions])
    with torch.no_grad():
        expected = torch.cat([s.score(t) for t in transitions])
    torch.testing.assert_close(before, expected, rtol=BOUND, atol=BOUND)
    s.move(1e-3)
    with torch.no_grad():
        moved = torch.cat([s.score(t) for t in transitions])
        after = torch.cat([s.policy.replay(t).log_prob for t in transitions])
    torch.testing.assert_close(after, moved, rtol=BOUND, atol=BOUND)
    torch.testing.assert_close((after - before).exp(), (moved - expected).exp(), rtol=BOUND, atol=0)
    assert float((moved - expected).abs().max()) > 1e-6, "they must have moved"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_noise_is_that_of_the_formula(name: str) -> None:
    """x' = μ + s·n, with the same n in every algorithm: n is known from its key."""
    from leangrpo.noise import normal

    s = Setting(name)
    for t in s.sample(s.native()):
        with torch.no_grad():
            mean, std = s.a.step(t.latents, s.output(t.latents, t.step), s.table, t.step, s.a.level)
        noise = normal(5, t.keys, t.step, mean.shape[1:], like=mean)
        torch.testing.assert_close(t.next_latents, mean + std * noise, rtol=BOUND, atol=BOUND)


def expected_loss(
    s: Setting, transitions: list[Transition], loss: Callable[[Tensor, Transition, float], Tensor]
) -> tuple[float, Tensor, list[float]]:
    """1/(N S) times the sum of `loss(l, transition, A)`, its gradient, and the ratios."""
    total, ratios = 0.0, []
    normaliser = len(KEYS) * len(s.a.selected)
    for t in transitions:
        advantage = ADVANTAGES[KEYS.index(t.keys[0])]
        now = s.score(t)
        one = loss(now, t, advantage).sum() / normaliser
        one.backward()
        total += float(one.detach())
        ratios.append(float((now.detach() - t.log_prob).exp()))
    return total, s.gradient(), ratios


def clipped(epsilon: float) -> Callable[[Tensor, Transition, float], Tensor]:
    """max(-A r, -A clamp(r, 1-ε, 1+ε)), r = exp(l - l_old): DDPO, FlowGRPO, DanceGRPO, MixGRPO."""

    def loss(now: Tensor, t: Transition, advantage: float) -> Tensor:
        r = torch.exp(now - t.log_prob)
        return torch.maximum(-advantage * r, -advantage * r.clamp(1 - epsilon, 1 + epsilon))

    return loss


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_clipped_loss_after_the_weights_have_moved(name: str) -> None:
    """With a range that some samples have left in the direction that counts, and others not."""
    s = Setting(name)
    epsilon = 2e-5 if s.a.log_prob is without_scale else 1e-4
    schedule = s.native(clip_range=epsilon)
    transitions = s.sample(schedule)
    s.move(1e-3)
    loss, gradient = s.finish(schedule)
    expected, own, ratios = expected_loss(s, transitions, clipped(epsilon))
    signs = [ADVANTAGES[KEYS.index(t.keys[0])] > 0 for t in transitions]
    binds = [
        (r > 1 + epsilon) if up else (r < 1 - epsilon) for r, up in zip(ratios, signs, strict=True)
    ]
    outside = [abs(r - 1) > epsilon for r in ratios]
    assert 0 < sum(binds) < sum(outside) <= len(ratios), "clipped, outside the other way, inside"
    assert loss == pytest.approx(expected, rel=BOUND, abs=1e-15)
    assert relative(gradient, own) < BOUND


@pytest.mark.parametrize("kind", [Retain, Reweight])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_at_ratio_one_the_lean_schedules_have_its_gradient(name: str, kind: type) -> None:
    s = Setting(name)
    schedule = kind(s.policy)
    transitions = s.sample(schedule)
    loss, gradient = s.finish(schedule)
    expected, own, ratios = expected_loss(s, transitions, clipped(1e-4))
    assert max(abs(r - 1) for r in ratios) < 1e-12
    assert loss == pytest.approx(expected, abs=1e-12)
    assert relative(gradient, own) < BOUND


def test_dpoks_clamped_ratio() -> None:
    """-A·clamp(r, 1±ε) alone: outside the band, on either side, no gradient (train_online_pg)."""
    s, epsilon = Setting("DDPO"), 1e-4
    schedule = s.native(clip_range=epsilon, ratio="clamp")
    transitions = s.sample(schedule)
    s.move(1e-3)
    loss, gradient = s.finish(schedule)

    def clamp(now: Tensor, t: Transition, advantage: float) -> Tensor:
        return -advantage * torch.exp(now - t.log_prob).clamp(1 - epsilon, 1 + epsilon)

    expected, own, ratios = expected_loss(s, transitions, clamp)
    assert 0 < sum(abs(r - 1) > epsilon for r in ratios) < len(ratios)
    assert loss == pytest.approx(expected, rel=BOUND, abs=1e-15)
    assert relative(gradient, own) < BOUND


# -- GRPO-Guard, Flow-CPS, KL ----------------------------------------------------------------------


def guarded(s: Setting) -> Callable[[Transition], Transition]:
    """Transitions with the weight s/h, which the loop gives them (`credit.step_weights`)."""

    def weigh(t: Transition) -> Transition:
        t.weight = float(t.std.double()) / (s.table[t.step] - s.table[t.step + 1])
        return t

    return weigh


def guard(s: Setting, epsilon: float) -> Callable[[Tensor, Transition, float], Tensor]:
    """r = exp(s·(l - l_old + b)), b = mean((μ - μ_old)²)/2s², the loss over h; s = g√h.

    yifan123/flow_grpo, train_sd3_GRPO_Guard, with a b for each sample.
    """

    def loss(now: Tensor, t: Transition, advantage: float) -> Tensor:
        h = s.table[t.step] - s.table[t.step + 1]
        output = s.output(t.latents, t.step)
        mean, std = s.a.step(t.latents, output, s.table, t.step, s.a.level)
        b = ((mean - t.mean) ** 2).flatten(1).mean(1) / (2 * std**2)
        r = torch.exp((now - t.log_prob + b) * std)
        both = -advantage * r, -advantage * r.clamp(1 - epsilon, 1 + epsilon)
        return torch.maximum(*both) / h

    return loss


@pytest.mark.parametrize("name", ["FlowGRPO", "DanceGRPO"])
def test_grpo_guards_ratio(name: str) -> None:
    s, epsilon = Setting(name), 2e-5
    schedule = s.native(clip_range=epsilon, ratio="guard")
    transitions = s.sample(schedule, guarded(s))
    s.move(1e-3)
    loss, gradient = s.finish(schedule)
    # 2e-5 is wide for some steps and narrow for others: both are in the sum
    expected, own, _ = expected_loss(s, transitions, guard(s, epsilon))
    wide, _, _ = expected_loss(s, transitions, guard(s, 1.0))
    assert abs(expected - wide) > 1e-9, "some ratio must be clipped"
    assert loss == pytest.approx(expected, rel=1e-11)
    assert relative(gradient, own) < BOUND


@pytest.mark.parametrize("kind", [Retain, Reweight])
def test_grpo_guards_first_step(kind: type) -> None:
    """At ratio 1 its gradient is -A·(g/√h)·∇l: a weight of the step."""
    s = Setting("FlowGRPO")
    config = load_config("embedded", [f"sampling.steps={STEPS}", "objective.ratio=guard"])
    weights = step_weights(config, s.policy)
    for i in s.a.selected:
        _, std = flow_grpo_sde(torch.zeros(1, 1), torch.zeros(1, 1), s.table, i, s.a.level)
        h = s.table[i] - s.table[i + 1]
        g = std / math.sqrt(h)
        assert weights[i] == pytest.approx(g / math.sqrt(h), rel=1e-6)  # the table is in float32
    schedule = kind(s.policy)
    transitions = s.sample(schedule, guarded(s))
    _, gradient = s.finish(schedule)
    _, own, _ = expected_loss(s, transitions, guard(s, 1e-4))
    assert relative(gradient, own) < BOUND


def test_cps_is_the_gaussian_with_a_weight_of_2s2() -> None:
    """∇(-(x'-μ)²) = 2s²·∇ log N(x'; μ, s²), step by step."""
    s = Setting("FlowGRPO-CPS")
    for t in s.sample(s.native())[: len(s.a.selected)]:
        s.policy.replay(t).log_prob.sum().backward()
        ours = s.gradient()
        mean, std = flow_cps(t.latents, s.output(t.latents, t.step), s.table, t.step, s.a.level)
        gaussian(t.next_latents, mean, std).sum().backward()
        assert relative(ours, 2 * std**2 * s.gradient()) < BOUND


KL = [
    ("FlowGRPO", "flow_grpo", "2g2"),
    ("FlowGRPO", "exact", "2s2"),
    ("FlowGRPO", "mean", "1"),
    ("FlowGRPO-CPS", "flow_grpo", "2s2"),
    ("DDPO", "output", "output"),
]
"""Algorithm, setting, what it divides by: flow_grpo's sde has 2g² and its cps 2s² (train_sd3_fast),
its Wan 2s² (train_wan2_1), Flow-Factory nothing; DPOK compares the network's outputs."""


@pytest.mark.parametrize("kind", [Native, Retain, Reweight])
@pytest.mark.parametrize(("name", "form", "divisor"), KL)
def test_kl(name: str, form: str, divisor: str, kind: type) -> None:
    """β/(N S)·Σ over steps, beside the policy loss, at weights that have left the reference."""
    s, beta = Setting(name, kl_form=form), 0.3
    s.move(1e-2)
    schedule = s.native(kl=beta) if kind is Native else kind(s.policy, kl=beta)

    transitions = s.sample(schedule, s.policy.with_kl)
    loss, gradient = s.finish(schedule)

    def both(now: Tensor, t: Transition, advantage: float) -> Tensor:
        outputs = [s.output(t.latents, t.step)]
        with torch.no_grad():
            outputs.append(s.output(t.latents, t.step, s.reference))
        steps = [s.a.step(t.latents, o, s.table, t.step, s.a.level) for o in outputs]
        (mine, std), (theirs, _) = steps
        if divisor == "output":
            mine, theirs = outputs
        h = s.table[t.step] - s.table[t.step + 1]
        over = {"2g2": 2 * std**2 / h, "2s2": 2 * std**2, "1": 1.0, "output": 1.0}[divisor]
        kl = ((mine - theirs) ** 2).flatten(1).mean(1) / over
        return clipped(1e-4)(now, t, advantage) + beta * kl

    expected, own, _ = expected_loss(s, transitions, both)
    policy_loss, alone, _ = expected_loss(s, transitions, clipped(1e-4))
    assert expected - policy_loss > 1e-9 and relative(own, alone) > 1e-3, "the KL must matter"
    assert loss == pytest.approx(expected, rel=1e-10, abs=1e-13)
    assert relative(gradient, own) < BOUND


# -- the golden file -------------------------------------------------------------------------------


PRINTED = [c for c in GOLDEN["cases"] if c.get("prediction_type", "epsilon") == "epsilon"]


@pytest.mark.parametrize(
    "case", PRINTED, ids=[f"{c['kernel']}-{c['num_steps']}-{c['step_index']}" for c in PRINTED]
)
def test_these_formulas_are_the_public_codes(case: dict[str, Any]) -> None:
    """What the public code printed, in float32: 1e-4 absolute, on log-probabilities of about 1.

    A check of this file, not of the package: `test_kernels` derives tight bounds for that.
    """
    x, v, following = (
        torch.tensor(case[name]).double().reshape(case["shape"])
        for name in ("sample", "model_output", "next_sample")
    )
    i, level = case["step_index"], case.get("noise_level", case.get("eta"))
    if case["kernel"] == "ddim":
        names = ("beta_start", "beta_end", "beta_schedule", "set_alpha_to_one", "steps_offset")
        scheduler = DDIMScheduler(**{name: case[name] for name in names}, clip_sample=False)
        scheduler.set_timesteps(case["num_steps"])
        t = int(scheduler.timesteps[i])
        after = max(t - 1000 // case["num_steps"], 0)
        table = {i: scheduler.alphas_cumprod[t], i + 1: scheduler.alphas_cumprod[after]}
        alphas = [float(table.get(k, 0.5)) for k in range(i + 2)]
        mean, s = ddpo(x, v, alphas, i, level)
    else:
        step = {"flow_sde": flow_grpo_sde, "dance_sde": dance}[case["kernel"]]
        mean, s = step(x, v, case["sigmas"], i, level)
    if "mean" in case:
        scale = (x.abs() + v.abs()).max() * (1 + s**2 / (2 * case["sigmas"][i] ** 2))
        torch.testing.assert_close(
            mean, torch.tensor(case["mean"]).double().reshape(case["shape"]),
            rtol=0, atol=1e-6 * float(scale),
        )  # fmt: skip
    if "std_total" in case:
        assert s == pytest.approx(case["std_total"][0], rel=1e-6)
    printed = torch.tensor(case["log_prob"], dtype=torch.float64)
    torch.testing.assert_close(gaussian(following, mean, s), printed, rtol=1e-4, atol=1e-4)


# -- advantages ------------------------------------------------------------------------------------

REWARDS = np.array([[0.2, 0.9, 0.4, 0.3], [1.5, 1.1, -0.7, 0.6], [0.1, 0.12, 0.11, 5.0]])
OTHERS = np.array([[3.0, 1.0, 2.0, 2.5], [0.0, 4.0, 1.0, 1.5], [2.0, 2.2, 1.0, 0.0]])


def per_group(r: np.ndarray, ddof: int, epsilon: float) -> np.ndarray:
    return (r - r.mean(1, keepdims=True)) / (r.std(1, ddof=ddof, keepdims=True) + epsilon)


def global_deviation(r: np.ndarray) -> np.ndarray:
    """flow_grpo's stat_tracking with global_std: a prompt's mean, everybody's deviation."""
    return (r - r.mean(1, keepdims=True)) / (r.std() + 1e-4)


def over_the_batch(r: np.ndarray) -> np.ndarray:
    """TRL's DDPO without its tracker, and DDPO's while a prompt has too few rewards."""
    return (r - r.mean()) / (r.std() + 1e-8)


def each(*weighted_rewards: tuple[np.ndarray, float]) -> np.ndarray:
    """MixGRPO's advantage_aggr: normalised one by one, weights that add up to 1."""
    total = sum(w for _, w in weighted_rewards)
    return sum(w / total * per_group(r, 1, 1e-8) for r, w in weighted_rewards)


def ends(a: np.ndarray, num: int) -> np.ndarray:
    """DanceGRPO's best-of-n: the lowest half and the highest, the others left out."""
    kept = np.zeros_like(a)
    for row, out in zip(a, kept, strict=True):
        order = np.argsort(row)
        for k in (*order[: num // 2], *order[len(order) - (num - num // 2) :]):
            out[k] = row[k]
    return kept


PUBLISHED: dict[str, tuple[list[str], np.ndarray]] = {
    "FlowGRPO": (["advantage.std=global"], global_deviation(REWARDS)),
    "FlowGRPO, per prompt": ([], per_group(REWARDS, 0, 1e-4)),
    "FlowGRPO, clipped": (["advantage.clip=1.2"], per_group(REWARDS, 0, 1e-4).clip(-1.2, 1.2)),
    "DanceGRPO": (["advantage={ddof: 1, epsilon: 1e-8}"], per_group(REWARDS, 1, 1e-8)),
    "DanceGRPO, best of": (
        ["advantage={ddof: 1, epsilon: 1e-8, best_of: 3}"],
        ends(per_group(REWARDS, 1, 1e-8), 3),
    ),
    "TRL's DDPO": (
        ["advantage={baseline: global, std: prompt, epsilon: 1e-8}"],
        over_the_batch(REWARDS),
    ),
    "MixGRPO": (
        [
            "advantage={ddof: 1, epsilon: 1e-8, rewards: each}",
            "rewards=[{name: ocr, weight: 3.0}, {name: jpeg_compressibility, weight: 1.0}]",
        ],
        each((REWARDS, 3.0), (OTHERS, 1.0)),
    ),
    "DPOK": (["advantage={baseline: value, std: none, clip: null}"], REWARDS),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_advantages(name: str) -> None:
    overrides, expected = PUBLISHED[name]
    credit = Credit(load_config("embedded", overrides))
    rewards = {"ocr": torch.tensor(REWARDS), "jpeg_compressibility": torch.tensor(OTHERS)}
    a = credit.advantages(rewards["ocr"], rewards, torch.zeros(3, 4), ["x", "y", "z"])
    np.testing.assert_allclose(a.numpy(), expected, rtol=1e-12, atol=1e-14)


def test_ddpos_history() -> None:
    """A deque of a prompt's rewards; the batch's statistics until it holds enough."""
    overrides = ["advantage={baseline: history, history: 6, min_history: 6, epsilon: 1e-6}"]
    credit = Credit(load_config("embedded", overrides))
    prompts = ["x", "y", "x"]  # "x" has 8 of the 12 rewards, "y" 4
    a = credit.advantages(torch.tensor(REWARDS), {}, torch.zeros(3, 4), prompts)
    x = np.concatenate([REWARDS[0], REWARDS[2]])[-6:]
    expected = (REWARDS - x.mean()) / (x.std() + 1e-6)
    expected[1] = (REWARDS[1] - REWARDS.mean()) / (REWARDS.std() + 1e-6)
    np.testing.assert_allclose(a.numpy(), expected.clip(-5, 5), rtol=1e-12)
    a = credit.advantages(torch.tensor(OTHERS[:1]), {}, torch.zeros(1, 4), ["y"])
    y = np.concatenate([REWARDS[1], OTHERS[0]])[-6:]
    np.testing.assert_allclose(a.numpy()[0], (OTHERS[0] - y.mean()) / (y.std() + 1e-6), rtol=1e-12)


def test_a_kl_in_the_reward() -> None:
    credit = Credit(load_config("embedded", ["objective.kl_in_reward=0.5"]))
    a = credit.advantages(torch.tensor(REWARDS), {}, torch.tensor(OTHERS), ["x", "y", "z"])
    np.testing.assert_allclose(a.numpy(), per_group(REWARDS - 0.5 * OTHERS, 0, 1e-4), rtol=1e-12)
