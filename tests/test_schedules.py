"""Three schedules, one gradient, on a function small enough to differentiate by hand.

The pipelines come in test_exactness.py; here every event of the protocol is exercised.
"""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from leangrpo.data import Transition
from leangrpo.errors import LeanError
from leangrpo.reweight import Reweight
from leangrpo.schedules import Native, Retain

N, S = 4, 3
ADVANTAGES = {0: 1.3, 1: -0.4, 2: 0.0, 3: -0.9}
KINDS = [Native, Retain, Reweight]


class Toy(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Linear(16, 3)).to(dtype)
        self.calls = 0

    def score(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, 3) -> (B,)."""
        self.calls += 1
        return -self.net(x).square().mean(dim=1)


def point(key: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.sin(torch.arange(3, dtype=torch.float64) + 3 * key + step).to(dtype)[None]


def make(kind, model: Toy, **extra):
    def replay(t: Transition) -> Transition:
        score = model.score(t.latents)
        kl = None if t.kl is None else score.square()
        return Transition(t.keys, t.step, score, weight=t.weight, kl=kl)

    return kind(model, replay=replay, **extra) if kind is Native else kind(model, **extra)


def value(key: int, step: int) -> float:
    """A learned value of a step, as DPOK has one."""
    return 0.3 * key - 0.2 * step + 0.1


def run(
    kind,
    model: Toy,
    *,
    weights=(1.0,) * S,
    batch: int = 1,
    kl: float = 0.0,
    repeat: int = 1,
    baseline: bool = False,
):
    dtype = next(model.parameters()).dtype
    schedule = make(kind, model, kl=kl)
    schedule.begin(N, S * repeat)
    for first in range(0, N, batch):
        keys = tuple(range(first, first + batch))
        for step in range(S):
            x = torch.cat([point(key, step, dtype) for key in keys])
            for _ in range(repeat):
                inside = (
                    schedule.capture(len(x)) if schedule.capture and batch > 1 else nullcontext()
                )
                with torch.set_grad_enabled(schedule.needs_graph), inside:
                    score = model.score(x)
                t = Transition(keys, step, score, latents=x, weight=weights[step])
                if kl:
                    t.kl = score.square()
                if baseline:
                    t.baseline = torch.tensor([value(k, step) for k in keys], dtype=torch.float64)
                schedule.transition(t)
    schedule.advantages({k: ADVANTAGES[k] for k in (0, 1)})
    schedule.advantages({k: ADVANTAGES[k] for k in (2, 3)})
    statistics = schedule.finish()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return gradient, statistics


def oracle(
    model: Toy, *, weights=(1.0,) * S, kl: float = 0.0, baseline: bool = False
) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    loss = torch.zeros((), dtype=dtype)
    for key, a in ADVANTAGES.items():
        for step in range(S):
            score = model.score(point(key, step, dtype))
            known = a - value(key, step) * baseline
            loss = loss - (known * weights[step] * score).sum() / (N * S)
            loss = loss + kl * score.square().sum() / (N * S)
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([g.flatten() for g in gradient])


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kl", [0.0, 0.3])
@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (0.5, 2.0, 0.1)])
def test_each_is_the_oracles_gradient(kind, kl, weights, batch) -> None:
    """float64: about 100 additions of rounding 1e-16 each."""
    model = Toy()
    gradient, _ = run(kind, model, weights=weights, kl=kl, batch=batch)
    assert relative(gradient, oracle(model, weights=weights, kl=kl)) < 1e-14


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kl", [0.0, 0.3])
@pytest.mark.parametrize("batch", [1, 2])
def test_an_advantage_of_each_step(kind, kl, batch) -> None:
    """A - V(z_t): reweight knows V at once and needs no second backward for it."""
    model, weights = Toy(), (0.5, 2.0, 0.1)
    gradient, statistics = run(kind, model, weights=weights, batch=batch, kl=kl, baseline=True)
    expected = oracle(model, weights=weights, kl=kl, baseline=True)
    assert relative(gradient, expected) < 1e-14
    loss = sum(
        -(a - value(key, step)) * weights[step]
        for key, a in ADVANTAGES.items()
        for step in range(S)
    ) / (N * S)
    assert statistics.loss - kl * (statistics.kl or 0.0) == pytest.approx(loss, rel=1e-13)
    if kind is Reweight and not kl:
        assert statistics.num_backwards == N * S // batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kl", [0.0, 0.3])
@pytest.mark.parametrize("baseline", [False, True])
def test_retain_is_bitwise_native(dtype, batch, kl, baseline) -> None:
    model = Toy(dtype)
    native, a = run(Native, model, batch=batch, kl=kl, baseline=baseline)
    retain, b = run(Retain, model, batch=batch, kl=kl, baseline=baseline)
    assert torch.equal(native, retain)
    assert (a.loss, a.kl) == (b.loss, b.kl)


def test_losses_agree_to_the_last_bit() -> None:
    model = Toy(torch.float32)
    losses = {run(kind, model)[1].loss for kind in KINDS}
    assert len(losses) == 1
    assert losses.pop() == pytest.approx(-sum(ADVANTAGES.values()) / N, abs=1e-15)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mean_over_steps_not_a_sum(kind) -> None:
    """Every selected step taken twice: the same gradient."""
    model = Toy()
    once, _ = run(kind, model)
    twice, _ = run(kind, model, repeat=2)
    assert relative(twice, once) < 1e-14


def test_evaluations_and_backwards_are_counted() -> None:
    """No second evaluation; zero advantages cost retain and native no backward."""
    for kind, forwards, backwards, skipped in [
        (Native, N * S + 3 * S, 3 * S, S),
        (Retain, N * S, 3 * S, S),
        (Reweight, N * S, N * S, 0),
    ]:
        model = Toy()
        _, statistics = run(kind, model)
        assert model.calls == forwards
        assert (statistics.num_backwards, statistics.num_skipped) == (backwards, skipped)


@pytest.mark.parametrize("kind", KINDS)
def test_a_dead_update_has_no_gradient_at_all(kind) -> None:
    model = Toy()
    schedule = make(kind, model)
    schedule.begin(1, 1)
    with torch.set_grad_enabled(schedule.needs_graph):
        x = point(0, 0, torch.float64)
        schedule.transition(Transition((0,), 0, model.score(x), latents=x))
    schedule.advantages({0: 0.0})
    schedule.finish()
    assert all(p.grad is None for p in model.parameters())


def test_native_clips_when_the_weights_have_moved() -> None:
    model = Toy()
    schedule = make(Native, model)
    schedule.begin(2, 1)
    for key in range(2):
        x = point(key, 0, torch.float64)
        with torch.no_grad():
            t = Transition((key,), 0, model.score(x) + 1.0, latents=x)  # ratio exp(-1)
        schedule.transition(t)
    schedule.advantages({0: 1.0, 1: -1.0})
    statistics = schedule.finish()
    assert statistics.ratio_error == pytest.approx(1 - torch.e**-1)
    x = point(0, 0, torch.float64)  # A > 0 and a small ratio: not clipped, -A r
    (expected,) = torch.autograd.grad(model.score(x).sum(), [model.net[0].weight])
    torch.testing.assert_close(model.net[0].weight.grad, -expected * torch.e**-1 / 2)


# -- GRPO-Guard's ratio: l = log N(x'; mu(theta), s^2), mean over 3 elements ---------------------

STD, DT = 0.4, 0.1


def gaussian(model: Toy, x: torch.Tensor) -> Transition:
    """A step whose mean is the network's output; x' is 0."""
    mean = model.net(x)
    std = torch.tensor(STD, dtype=x.dtype)
    log_prob = -mean.square().mean(1) / (2 * STD**2)
    return Transition((0,), 0, log_prob, latents=x, mean=mean, std=std, weight=STD / DT)


def guard_loss(model: Toy, old: Transition, advantage: float, clip_range: float) -> torch.Tensor:
    """The published loss, per sample: r = exp((l - l_old + b) q s_t), s_t = g, q = sqrt(h)."""
    new, q, g = gaussian(model, old.latents), DT**0.5, STD / DT**0.5
    b = (new.mean - old.mean).square().mean(1) / (2 * (q * g) ** 2)
    r = torch.exp((new.log_prob - old.log_prob + b) * q * g)
    surrogate = torch.maximum(-advantage * r, -advantage * r.clamp(1 - clip_range, 1 + clip_range))
    return (surrogate / q**2).sum()


@pytest.mark.parametrize("advantage", [0.8, -0.8])
@pytest.mark.parametrize("moved", [0.0, 1e-3, 0.05])
def test_grpo_guard(advantage, moved) -> None:
    model = Toy()
    with torch.no_grad():
        old = gaussian(model, point(0, 0, torch.float64))
        for p in model.parameters():
            p += moved
    loss = guard_loss(model, old, advantage, 0.01)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    schedule = Native(
        model, replay=lambda t: gaussian(model, t.latents), clip_range=0.01, ratio="guard"
    )
    schedule.begin(1, 1)
    schedule.transition(old)
    schedule.advantages({0: advantage})
    statistics = schedule.finish()
    assert statistics.loss == pytest.approx(loss.item(), rel=1e-12)
    for p, g in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-12, atol=1e-15)


def test_grpo_guard_is_lean_at_ratio_one() -> None:
    """-A s/h grad l: what retain and reweight make of the transition's weight."""
    gradients = []
    for kind, extra in [(Native, {"ratio": "guard"}), (Retain, {}), (Reweight, {})]:
        model = Toy()
        if kind is Native:
            extra["replay"] = lambda t, model=model: gaussian(model, t.latents)
        schedule = kind(model, **extra)
        schedule.begin(1, 1)
        schedule.transition(gaussian(model, point(0, 0, torch.float64)))
        schedule.advantages({0: 0.7})
        schedule.finish()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.equal(gradients[0], gradients[1])
    assert relative(gradients[2], gradients[0]) < 1e-15


@pytest.mark.parametrize("kind", [Retain, Reweight])
def test_nothing_is_held_after_an_update(kind) -> None:
    model = Toy()
    seen = []
    schedule = make(kind, model)
    schedule.begin(1, 1)
    score = model.score(point(0, 0, torch.float64))
    seen.append(weakref.ref(score))
    schedule.transition(Transition((0,), 0, score))
    del score
    gc.collect()
    if kind is Reweight:
        assert seen[0]() is None, "reweight gives a graph back at once"
    schedule.advantages({0: 1.0})
    schedule.finish()
    gc.collect()
    assert seen[0]() is None


@pytest.mark.parametrize("kind", KINDS)
def test_misuse_is_explained(kind) -> None:
    model = Toy()
    schedule = make(kind, model)
    with pytest.raises(LeanError, match=r"begin\(\) comes before"):
        schedule.finish()
    with pytest.raises(LeanError, match="at least 1"):
        schedule.begin(0, 1)
    x = point(0, 0, torch.float64)
    schedule.begin(1, 1)
    with torch.set_grad_enabled(schedule.needs_graph):
        schedule.transition(Transition((0,), 0, model.score(x), latents=x))
    with pytest.raises(LeanError, match="never got an advantage"):
        schedule.finish()
    schedule.begin(1, 1)
    with torch.set_grad_enabled(schedule.needs_graph):
        schedule.transition(Transition((0,), 0, model.score(x), latents=x))
    with pytest.raises(LeanError, match="advantage of 0 is nan"):
        schedule.advantages({0: float("nan")})


def test_reweight_wants_a_gradient_per_sample() -> None:
    """Outside `capture` a batch leaves only a sum, which cannot be corrected any more."""
    model = Toy()
    schedule = make(Reweight, model)
    schedule.begin(2, 1)
    x = torch.cat([point(0, 0, torch.float64), point(1, 0, torch.float64)])
    with pytest.raises(
        LeanError, match=r"2 samples in one transition.*not sampled inside its `capture`"
    ):
        schedule.transition(Transition((0, 1), 0, model.score(x)))


def test_premature_sum_cannot_be_corrected() -> None:
    """Appendix C: the sum of the gradients does not determine the advantage-weighted sum.

    Adding u h^T with h.1 = 0 to the per-sample gradients leaves their sum as it is and moves the
    wanted gradient by u (h.A): no function of the sum can serve both.
    """
    torch.manual_seed(0)
    a = torch.tensor(list(ADVANTAGES.values()), dtype=torch.float64)
    gradients = torch.randn(5, N, dtype=torch.float64)
    h = torch.tensor([1.0, -1.0, 0.0, 0.0], dtype=torch.float64)
    other = gradients + torch.outer(torch.ones(5, dtype=torch.float64), h)
    torch.testing.assert_close(gradients.sum(1), other.sum(1))
    torch.testing.assert_close((other - gradients) @ a, torch.full((5,), float(h @ a)).double())
    assert abs(float(h @ a)) > 1
