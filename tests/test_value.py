"""The value baseline: what V sees and learns, that it helps, and that every rank has the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import value_ranks
from torch import Tensor
from torch.nn import functional as F

from leangrpo import checkpoint, settings
from leangrpo.data import SampleKey, Transition
from leangrpo.errors import LeanError
from leangrpo.loading import make_trainable
from leangrpo.parallel import World
from leangrpo.policy import Policy, Sampling
from leangrpo.value import Critic, Network, Value, pooled

SHAPES = {
    "sd": ((4, 64, 64), 4 * 8 * 8),
    "sd3": ((16, 128, 128), 16 * 8 * 8),
    "flux": ((4096, 64), 64 * 64),
    "wan": ((16, 21, 60, 104), 16 * 21 * 4 * 4),
    "cogvideox": ((13, 16, 60, 90), 13 * 16 * 4 * 4),
    "sound": ((64, 1024), 64 * 64),
    "small image": ((4, 8, 4), 4 * 8 * 4),
    "small tokens": ((16, 16), 16 * 16),
}


@pytest.mark.parametrize("name", SHAPES)
def test_features_of_every_layout(name: str) -> None:
    shape, num_features = SHAPES[name]
    features = pooled(torch.ones(2, *shape, dtype=torch.float64))
    assert features.shape == (2, num_features)
    assert features.dtype == torch.float32
    assert torch.allclose(features, torch.ones(()), rtol=1e-6)  # averages, not sums


def test_features_are_averages_over_cells() -> None:
    x = torch.randn(2, 3, 16, 24)
    cells = x.reshape(2, 3, 8, 2, 8, 3).mean(dim=(3, 5))
    assert torch.allclose(pooled(x), cells.flatten(1), atol=1e-6)
    x = torch.randn(2, 3, 5, 8, 12)
    cells = x.reshape(2, 3, 5, 4, 2, 4, 3).mean(dim=(4, 6))
    assert torch.allclose(pooled(x), cells.flatten(1), atol=1e-6)
    x = torch.randn(2, 256, 6)
    cells = x.reshape(2, 64, 4, 6).mean(dim=2)
    assert torch.allclose(pooled(x), cells.transpose(1, 2).flatten(1), atol=1e-6)
    assert torch.equal(pooled(x.transpose(1, 2)), pooled(x))  # sound: the longer axis is last


@pytest.mark.parametrize("shape", [(4,), (1, 2, 3, 4, 5)])
def test_latents_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(LeanError, match=r"latents of 2 to 4 axes.*another advantage.baseline"):
        Value(shape, 3, 4)


def data(n: int, num_steps: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Transitions whose reward depends on latent, text and step."""
    draw = torch.Generator().manual_seed(seed)
    features = pooled(torch.randn(n, 2, 4, 4, generator=draw))
    text = torch.randn(n, 3, generator=draw)
    steps = torch.randint(num_steps, (n,), generator=draw)
    rewards = 1 + features[:, 0] * (1 + steps) / num_steps + text[:, 1].tanh()
    return features, text, steps, rewards


def value_of(value: Value, features: Tensor, text: Tensor, steps: Tensor) -> Tensor:
    rows = zip(features, text, steps.tolist(), strict=True)
    return torch.cat([value.baseline(f[None], e[None], t) for f, e, t in rows])


def test_each_row_has_the_gates_of_its_step() -> None:
    net = Network(5, 4, 3, seed=1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    x, text, steps = torch.randn(6, 3), torch.randn(6, 2), torch.tensor([0, 1, 2, 0, 1, 2])
    found = net(x, text, steps)
    for i, t in enumerate(steps.tolist()):
        h = torch.cat([x[i], text[i]])
        for w, b, g in zip(net.weights, net.biases, net.gates, strict=True):
            h = F.relu(g[t] * (w @ h + b))
        assert torch.allclose(found[i], net.last[0] @ h + net.last_bias[0], rtol=1e-5, atol=1e-6)


def test_an_untrained_value_is_zero_everywhere() -> None:
    """And so the first update is that of a baseline 0."""
    value = Value((2, 4, 4), 3, 5)
    features, text, *_ = data(7, 5, seed=0)
    for step in range(5):
        found = value.baseline(features, text, step)
        assert torch.equal(found, torch.zeros(7, dtype=torch.float64))
        assert not found.requires_grad


def test_the_first_step_is_adamws() -> None:
    """Its first step moves every weight that has a gradient by lr, up to eps / |gradient|."""
    value = Value((2, 4, 4), 3, 5, steps=1, lr=1e-3)
    features, text, steps, rewards = data(50, 5, seed=0)
    value.remember(features, text, steps, rewards.abs())
    loss = value.learn()
    assert loss == pytest.approx(float(rewards.square().mean()), rel=1e-6)
    assert value.network.last_bias.item() == pytest.approx(1e-3, rel=1e-5)
    assert value.network.weights[0].grad is None


def test_it_learns_a_known_function() -> None:
    value = Value((2, 4, 4), 3, 4, lr=3e-3, steps=20, buffer=2000)
    held_out = data(300, 4, seed=99)
    error = (value_of(value, *held_out[:3]) - held_out[3]).square().mean()
    value.remember(*data(2000, 4, seed=1))
    losses = [value.learn() for _ in range(15)]
    learned = (value_of(value, *held_out[:3]) - held_out[3]).square().mean()
    assert learned < error / 10
    assert losses[-1] is not None and losses[0] is not None
    assert losses[-1] < losses[0] / 10


def test_the_gradient_has_less_variance_and_the_same_mean() -> None:
    """Score-function gradients of r = f(state) + a, a ~ N(theta, 1): d E[r] / d theta = 1.

    With e = a - theta and s = E r given the state, the variance of r e is E(s + e)^2 e^2 - 1 =
    E s^2 + 2, and of (r - V) e it is E(s - V)^2 + 2. The estimates' mean is 1 in both, within
    four standard errors.
    """
    value = Value((2, 4, 4), 3, 4, lr=3e-3, steps=20, buffer=4000)

    def rollout(n: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        features, text, steps, expected = data(n, 4, seed)
        expected = 2 * expected
        noise = torch.randn(n, generator=torch.Generator().manual_seed(seed + 1000))
        return features, text, steps, expected + noise, noise, expected

    features, text, steps, rewards, *_ = rollout(4000, seed=1)
    value.remember(features, text, steps, rewards)
    for _ in range(15):
        value.learn()
    n = 4000
    features, text, steps, rewards, noise, expected = rollout(n, seed=2)
    plain = (rewards * noise).double()
    with_value = (rewards - value_of(value, features, text, steps)) * noise
    for estimate in (plain, with_value):
        assert abs(estimate.mean() - 1) < 4 * estimate.std() / n**0.5
    assert plain.var() == pytest.approx(float(expected.square().mean()) + 2, rel=0.15)
    assert with_value.var() < plain.var() / 3


def test_the_buffer_keeps_the_newest() -> None:
    value = Value((2, 4, 4), 3, 4, buffer=10)
    for i in range(4):
        features, text, steps, _ = data(4, 4, seed=i)
        value.remember(features, text, steps, torch.full((4,), float(i)))
    assert sorted(value.buffer["rewards"].tolist()) == [1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
    assert {len(rows) for rows in value.buffer.values()} == {10}
    assert all(rows.untyped_storage().nbytes() == rows.nbytes for rows in value.buffer.values())


def test_of_a_large_update_a_fair_draw_is_kept() -> None:
    """Not the last prompts: of 1000 rows each has been kept with probability 0.1."""
    value = Value((2, 4, 4), 3, 4, buffer=100)
    features, text, steps, _ = data(1000, 4, seed=0)
    value.remember(features, text, steps, torch.arange(1000.0))
    kept = value.buffer["rewards"]
    assert len(set(kept.tolist())) == 100
    assert 30 < int((kept < 500).sum()) < 70  # four standard deviations of 5


def test_bad_rewards_are_left_out_and_nothing_teaches_nothing() -> None:
    value = Value((2, 4, 4), 3, 4, steps=1)
    features, text, steps, _ = data(3, 4, seed=0)
    value.remember(features, text, steps, torch.tensor([torch.nan, torch.inf, -torch.inf]))
    assert value.learn() is None
    rewards = torch.tensor([1.0, torch.nan, 2.0])
    value.remember(features, text, steps, rewards)
    for i, found in enumerate(value.buffer["rewards"].tolist()):
        row = rewards.tolist().index(found)
        assert torch.equal(value.buffer["features"][i], features[row])
        assert torch.equal(value.buffer["text"][i], text[row])
        assert value.buffer["steps"][i] == steps[row]
    assert sorted(value.buffer["rewards"].tolist()) == [1, 2]
    assert value.learn() == pytest.approx(2.5)


def rounds(value: Value, seeds: range) -> list[float | None]:
    losses = []
    for seed in seeds:
        value.remember(*data(40, 4, seed))
        losses.append(value.learn())
    return losses


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_it_depends_on_its_seed_and_draws_from_no_other_generator() -> None:
    def make(seed: int) -> Value:
        value = Value((2, 4, 4), 3, 4, batch=16, buffer=100, seed=seed)
        rounds(value, range(3))
        return value

    torch.manual_seed(0)
    before = torch.get_rng_state()
    one = make(0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert same(one.state_dict(), make(0).state_dict())
    assert not same(one.state_dict(), make(1).state_dict())


@pytest.mark.parametrize("done", [0, 3])
def test_it_resumes_bitwise(done: int, tmp_path: Path) -> None:
    def make() -> Critic:
        return Critic(Value((2, 4, 4), 3, 4, batch=16, buffer=100), None)

    through = make()
    rounds(through.value, range(done))
    pipe = tiny.tiny_sd3()
    make_trainable(pipe, "lora", rank=4, alpha=8, seed=0)
    policy = Policy(pipe, Sampling(2, guidance=1.0, call=dict(tiny.CALL["sd3"])))
    optimizer = torch.optim.AdamW(policy.parameters)
    extra = through.state_dict()
    saved = checkpoint.Checkpoints(tmp_path, 1).save(
        policy, optimizer, {"update": done}, extra=extra
    )
    losses = rounds(through.value, range(done, done + 3))
    resumed = make()
    resumed.load_state_dict(checkpoint.open_checkpoint(saved).extra)
    assert resumed.value.round == done
    assert rounds(resumed.value, range(done, done + 3)) == losses
    assert same(resumed.state_dict(), through.state_dict())


def test_a_checkpoint_of_another_network_is_named() -> None:
    state = Critic(Value((2, 4, 4), 3, 4, width=8), None).state_dict()
    with pytest.raises(LeanError, match=r"last is \(1, 8\) there and \(1, 9\) here"):
        Critic(Value((2, 4, 4), 3, 4, width=9), None).load_state_dict(state)
    with pytest.raises(LeanError, match="holds no value network"):
        Critic(Value((2, 4, 4), 3, 4), None).load_state_dict({"history": {}})


KERNELS = {"sd3": "flow_sde", "flux": "flow_sde", "wan": "flow_sde", "sd": "ddim"}


@pytest.mark.parametrize("name", KERNELS)
def test_a_critic_beside_a_pipeline(name: str) -> None:
    """Image, packed and video latents: baselines of the network as it was before the update."""
    policy = Policy(
        tiny.BUILDERS[name](),
        Sampling(4, guidance=3.0, call=dict(tiny.CALL[name])),
        kernel=KERNELS[name],
    )
    device = torch.device("cpu")
    c = settings.Value(lr=1e-2, buffer=50)
    critic = Critic.of(policy, c, seed=3, world=World(), device=device)
    rewards = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    for update in range(2):
        taken: list[Transition] = []

        def take(t: Transition, taken: list[Transition] = taken) -> None:
            critic.attach(t)
            taken.append(t)

        before = critic.value.state_dict()
        for p, prompt in enumerate(["a red cube", "a dog"]):
            keys = [SampleKey(update, p, g) for g in range(2)]
            policy.sample([prompt] * 2, keys, selected=(0, 2), grad=True, on_transition=take)
        assert same(critic.value.state_dict(), before)
        baselines = torch.stack([t.baseline for t in taken if t.baseline is not None])
        assert baselines.shape == (4, 2)
        assert baselines.dtype == torch.float64
        assert (baselines != 0).all() if update else not baselines.any()
        for t in taken:
            assert t.log_prob.requires_grad
            assert t.without_graph().baseline is t.baseline
        assert critic.after(rewards) is not None
        buffer = critic.value.buffer
        assert len(buffer["rewards"]) == 8 * (update + 1)
        for t in taken:
            assert t.latents is not None
            for key, row in zip(t.keys, pooled(t.latents), strict=True):
                assert isinstance(key, SampleKey)
                (i,) = (buffer["features"] == row).all(dim=1).nonzero()
                assert buffer["rewards"][i] == rewards[key.prompt, key.generation]
                assert buffer["steps"][i] == t.step


def test_a_transition_without_latents_is_refused() -> None:
    critic = Critic(Value((2, 4, 4), 3, 4), None)
    with pytest.raises(LeanError, match="Step 2 holds no latents"):
        critic.attach(Transition((SampleKey(0, 0, 0),), 2, torch.zeros(1)))


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_rank_has_the_value_network_of_one_process(num_ranks: int, tmp_path: Path) -> None:
    """Bitwise: the ranks' transitions come in one order, whoever has sampled them."""
    here = Path(__file__).parent
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += [str(here / "value_ranks.py"), str(tmp_path / "out.pt")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(done.stderr[-6000:])
    everyone: list[Any] = torch.load(tmp_path / "out.pt")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    state, losses = value_ranks.run(World())
    torch.set_num_threads(threads)
    assert len(state["value.buffer.rewards"]) == 30
    assert float(state["value.buffer.rewards"].max()) < 99
    assert len(everyone) == num_ranks
    for found, theirs in everyone:
        assert theirs == losses
        assert same(found, state)
