"""The probe: its bytes are those of a step taken for real, and it leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tiny
import torch

from leangrpo.costs import Key
from leangrpo.data import SampleKey, Transition
from leangrpo.loading import make_trainable
from leangrpo.memory import peak_memory
from leangrpo.policy import Policy, Sampling
from leangrpo.probe import Probe, kept_of, waiting_bytes
from leangrpo.recompute import is_checkpointed
from leangrpo.reweight import Reweight
from leangrpo.samples import num_bytes
from leangrpo.schedules import Retain


def make(train: str = "full") -> Policy:
    pipe = tiny.tiny_sd3()
    make_trainable(pipe, train, rank=4, alpha=8)
    call = {k: v for k, v in tiny.CALL["sd3"].items() if k != "num_inference_steps"}
    return Policy(pipe, Sampling(4, guidance=1.0, sigmas="pipeline", call=call), noise_level=0.7)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return make()


def probe(policy: Policy, selected: float = 2.0) -> Probe:
    return Probe(policy, Retain(policy).gradients, selected=selected)


def sample(policy: Policy, m: int, steps: tuple[int, ...]) -> Iterator[Transition]:
    keys = [SampleKey(0, 0, g) for g in range(m)]
    yield from policy.sample(
        ["a test"] * m, keys, selected=steps, noisy=steps, grad=True, decode=False
    ).transitions


def test_kept_is_what_a_graph_holds(policy: Policy) -> None:
    """Retained graphs of one step and of two differ by the bytes that the probe calls kept.

    Beside a graph a transition holds its latents, `(4, 8, 8)` float32 four times at most."""
    held = []
    for steps in ((0,), (0, 1)):
        policy.sample(["a test"] * 2, [SampleKey(0, 0, g) for g in range(2)])  # drops older graphs
        with peak_memory() as trace:
            found = list(sample(policy, 2, steps))
            trace.mark("held")
        held.append(trace.phases[-1].held)
        del found
    cost = probe(policy).step(Key(2))
    beside = 2 * 4 * 8 * 8 * 4
    assert abs(held[1] - held[0] - cost.kept) <= 4 * beside
    assert cost.kept > 16 * beside  # far more than what may be off


def test_peaks_are_those_of_a_step(policy: Policy) -> None:
    """Of a first backward and of one onto its gradients, in a loop of another kind."""
    with peak_memory() as trace:

        def backward(t: Transition) -> None:
            trace.mark(f"backward {t.step}")
            torch.autograd.backward([t.log_prob], [torch.ones_like(t.log_prob)])
            trace.mark("rest")

        policy.sample(
            ["a test"], [SampleKey(0, 0, 0)], selected=(0, 1), noisy=(0, 1), grad=True,
            decode=False, on_transition=backward,
        )  # fmt: skip
    cost = probe(policy).step(Key(1))
    peaks = {phase.name: phase.peak for phase in trace.phases}
    assert peaks["backward 1"] == pytest.approx(cost.backward_peak, abs=4096)
    assert peaks["backward 0"] == pytest.approx(cost.backward_first_peak, abs=4096)
    for p in policy.parameters:
        p.grad = None


@pytest.mark.parametrize("train", ["full", "lora"])
@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_what_waits_of_a_batch(train: str, steps: int) -> None:
    """Predicted from one step, and held by a ledger after so many: layers whose factors have
    outgrown their gradients are kept as these."""
    policy, keys = make(train), [SampleKey(0, 0, g) for g in range(2)]
    schedule = Reweight(policy)
    schedule.begin(2, steps)
    left = []

    def take(t: Transition) -> None:
        schedule.transition(t)
        if not left:
            for samples in schedule._ledger.batches.values():
                left.extend(kept_of(samples))

    some = range(steps)
    with schedule.sampling():
        policy.sample(
            ["a", "a"], keys, selected=some, noisy=some, grad=True, decode=False,
            capture=schedule.capture, on_transition=take,
        )  # fmt: skip
    (samples,) = schedule._ledger.batches.values()
    assert waiting_bytes(left, steps) == num_bytes(samples.tensors())
    found = probe(policy, steps).step(Key(2, per_sample=True))
    assert found.waiting == num_bytes(samples.tensors())


def test_nothing_is_left_behind(policy: Policy) -> None:
    """Weights, gradients, version, random state, hooks: all as before."""
    weights = [p.detach().clone() for p in policy.parameters]
    for p in policy.parameters:
        p.grad = torch.ones_like(p)
    version, state, on_call = policy.version, torch.get_rng_state(), policy.on_call
    one = probe(policy)
    for key in (Key(1), Key(2, checkpointing=True), Key(2, per_sample=True)):
        one.step(key)
    one.picture()
    one.optimizer(1.0)
    assert all(torch.equal(p, w) for p, w in zip(policy.parameters, weights, strict=True))
    assert all(p.grad is not None and bool((p.grad == 1).all()) for p in policy.parameters)
    assert (policy.version, policy.on_call) == (version, on_call)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(is_checkpointed(module) for module in policy.denoisers)
    for p in policy.parameters:
        p.grad = None


def test_checkpointing_keeps_less(policy: Policy) -> None:
    one = probe(policy)
    assert one.step(Key(1, checkpointing=True)).kept < one.step(Key(1)).kept


def test_bytes_that_follow_from_the_parameters(policy: Policy) -> None:
    """float32 weights: a gradient, a sum and what is stepped are all 4 bytes an element."""
    size = 4 * sum(p.numel() for p in policy.parameters)
    assert probe(policy).gradient_bytes() == (size, size, size)
    adam = torch.optim.AdamW(policy.parameters)
    everything = sum(
        t.numel() * t.element_size()
        for module in policy.pipe.components.values()
        if isinstance(module, torch.nn.Module)
        for t in (*module.parameters(), *module.buffers())
    )
    assert probe(policy).resident(adam) == everything + 2 * size
