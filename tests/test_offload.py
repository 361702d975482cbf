"""Kept graphs within a budget: the same bits, no more bytes, and both given back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny import CALL, tiny_flux, tiny_sd3
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from leangrpo.config import load_config
from leangrpo.data import SampleKey, Transition
from leangrpo.errors import LeanError
from leangrpo.offload import Offload
from leangrpo.pipeline import Sampling
from leangrpo.policy import Policy
from leangrpo.schedules import Native, Retain
from leangrpo.setup import make_policy, make_schedule
from leangrpo.stopwatch import Stopwatch

KIB = 1 << 10


class Net(nn.Module):
    """Activations of 16 KiB (64, 64), four of them a block."""

    def __init__(self, blocks: int = 4, *, checkpointing: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.SiLU()) for _ in range(blocks)
        )
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return x.square().mean()


def point(seed: int = 1) -> Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))


def gradient(net: nn.Module) -> list[Tensor]:
    found = [p.grad for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    return found


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(
        torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


def plain(net: nn.Module, *seeds: int) -> list[Tensor]:
    for seed in seeds:
        net(point(seed)).backward()
    return gradient(net)


def needed(net: nn.Module) -> int:
    counting = Offload([net], None)
    with counting:
        loss = net(point())
    del loss
    return counting.peak_bytes


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0, 100.0])
def test_a_network_within_a_budget(share: float) -> None:
    net = Net()
    budget = int(share * needed(net))
    offload = Offload([net], budget)
    with offload:
        loss = net(point())
    assert offload.resident_bytes <= budget
    loss.backward()
    assert same(gradient(net), plain(net, 1))
    assert (offload.offloaded_bytes == 0) == (share >= 1.0)
    if share >= 0.5:  # below, one node of the backward needs more than that at once
        assert offload.peak_bytes <= budget
    del loss
    assert offload.resident_bytes == 0


# -- pipelines -------------------------------------------------------------------------------------


def tiny(build: Callable[[], Any], name: str) -> Policy:
    pipe = build()
    call = {"height": 16, "width": 16, "max_sequence_length": CALL[name]["max_sequence_length"]}
    return Policy(pipe, Sampling(steps=3, guidance=1.0, call=call), noise_level=0.7, seed=5)


def embedded() -> Policy:
    settings = ["model.train=lora", "sampling.steps=3", "selection.steps=[0, 1]", "run.threads=1"]
    return make_policy(load_config("embedded-lora", settings), torch.device("cpu"))


POLICIES: dict[str, Callable[[], Policy]] = {
    "sd3": lambda: tiny(tiny_sd3, "sd3"),
    "flux": lambda: tiny(tiny_flux, "flux"),
    "embedded": embedded,
}


def update(policy: Policy, schedule: Retain, groups: int) -> list[Tensor]:
    """Groups of two prompts' samples, sampled one after another before any advantage is known."""
    schedule.begin(2 * groups, 2)
    for group in range(groups):
        keys = [SampleKey(0, group, m) for m in range(2)]
        with schedule.sampling():
            policy.sample(
                ["ab"] * 2,
                keys,
                selected=[0, 1],
                noisy=[0, 1],
                grad=True,
                decode=False,
                on_transition=schedule.transition,
            )
    for group in reversed(range(groups)):  # as with one group ahead, and in another order
        schedule.advantages({SampleKey(0, group, m): 1.5 - 2 * m for m in range(2)})
    schedule.finish()
    found = [p.grad for p in policy.parameters if p.grad is not None]
    for p in policy.parameters:
        p.grad = None
    return found


@pytest.mark.parametrize(("name", "groups"), [("sd3", 2), ("flux", 2), ("embedded", 1)])
def test_pipelines(name: str, groups: int) -> None:
    policy = POLICIES[name]()
    reference = update(policy, Retain(policy), groups)
    counting = Retain(policy, activations=1 << 60)
    assert same(update(policy, counting, groups), reference)
    assert counting.offload is not None
    budget = counting.offload.peak_bytes // 10
    bounded = Retain(policy, activations=budget)
    assert bounded.offload is not None
    for _ in range(2):  # the second update finds buffers of the first
        assert same(update(policy, bounded, groups), reference)
        assert bounded.offload.peak_bytes <= budget
        assert bounded.offload.offloaded_bytes >= counting.offload.peak_bytes - budget
        assert bounded.offload.resident_bytes == 0


@pytest.mark.parametrize("size", ["null", "16MiB"])
def test_the_setting_reaches_the_schedule(size: str) -> None:
    config = load_config("embedded", ["schedule=retain", f"memory.activations={size}"])
    policy = tiny(tiny_sd3, "sd3")
    schedule = make_schedule(config, policy, Stopwatch(policy.device))
    assert isinstance(schedule, Retain)
    budget = None if schedule.offload is None else schedule.offload.budget
    assert budget == (None if size == "null" else 16 << 20)


# -- what a budget of zero says about every storage ------------------------------------------------


def test_views_of_one_storage_stay_that() -> None:
    """Two views are copied once, and come back over the same bytes."""
    net = nn.Linear(256, 256)
    offload = Offload([net], 0)
    with offload:
        x = net(torch.ones(64, 256))
        y = (x[:, ::2] * x[:, 1::2].flip(0)).sum() + (x.t() * x.t()).sum()
    a = offload.offloaded_bytes
    x = x.detach()
    y.backward()
    assert a == 64 * 256 * 4 + 64 * 128 * 4 + 64 * 256 * 4  # x, what flip made of it, the input
    found = gradient(net)
    x = net(torch.ones(64, 256))
    ((x[:, ::2] * x[:, 1::2].flip(0)).sum() + (x.t() * x.t()).sum()).backward()
    assert same(found, gradient(net))


@pytest.mark.parametrize("kind", ["conj", "neg", "half", "expanded", "scalar"])
def test_every_kind_of_view(kind: str) -> None:
    def loss(w: Tensor) -> Tensor:
        x = w * 1.5
        if kind == "conj":
            z = torch.view_as_complex(x.view(-1, 2)).conj()
            return (z * z * z).real.sum()
        if kind == "neg":
            z = torch.view_as_complex(x.view(-1, 2)).conj().imag
            return (z * z.sin()).sum()
        if kind == "half":
            return (x.to(torch.bfloat16) ** 3).float().sum()
        if kind == "expanded":
            return (x[:, :1].expand(64, 64) * x.t()).sum()
        return (x * x.sum()).sum() * x.mean()

    net = nn.ParameterList([nn.Parameter(point())])
    offload = Offload([net], 0)
    with offload:
        out = loss(net[0])
    assert offload.offloaded_bytes > 0
    out.backward()
    found = gradient(net)
    loss(net[0]).backward()
    assert same(found, gradient(net))


@pytest.mark.parametrize("budget", [0, 1 << 30])
@pytest.mark.parametrize("view", [False, True])
def test_modified_in_place(budget: int, view: bool) -> None:
    net = nn.Linear(64, 64)
    with Offload([net], budget):
        x = net(point())
        y = (x.t() if view else x).exp()
        loss = (y * y).sum()
    y.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace .* shape \(64, 64\)"):
        loss.backward()


def test_modified_before_it_was_saved_again() -> None:
    """A buffer that is written to between two uses is saved twice, as it was each time."""
    net = nn.Linear(64, 64)
    with Offload([net], 0):
        x = net(point()).detach()
        first = (net(x) * 2).sum()
        kept = gradient_of(first, net)
        x.mul_(3)
        second = net(x).sum()
    assert same(gradient_of(second, net), gradient_of(net(x).sum(), net))
    assert not same(kept, gradient_of(net(x).sum(), net))


def gradient_of(loss: Tensor, net: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(net.parameters())))


@pytest.mark.parametrize("ahead", [False, True])
def test_two_graphs_underway(ahead: bool) -> None:
    """Both are kept at once, and differentiated in either order."""
    net = Net()
    offload = Offload([net], needed(net) // 2)
    with offload:
        first = net(point(1))
    with offload:
        second = net(point(2))
    order = (second, first) if ahead else (first, second)
    for loss in order:
        loss.backward()
    assert offload.peak_bytes <= needed(net) // 2
    assert same(gradient(net), plain(net, *((2, 1) if ahead else (1, 2))))


def test_a_second_backward_of_a_graph() -> None:
    net = Net()
    with Offload([net], 0):
        loss = net(point())
    loss.backward(retain_graph=True)
    loss.backward()
    assert same(gradient(net), plain(net, 1, 1))


@pytest.mark.parametrize("budget", [0, 100 * KIB, 1 << 30])
def test_dropped_graphs_give_their_bytes_back(budget: int) -> None:
    net = Net()
    offload = Offload([net], budget)
    sizes = []
    for _ in range(4):
        with offload:
            loss = net(point())
        del loss  # never differentiated
        assert offload.resident_bytes == 0
        sizes.append(offload._notes.pool.num_bytes)
        offload.begin()
    assert sizes == sizes[:1] * 4  # the host's memory is used again


# -- what is not offloaded -------------------------------------------------------------------------


def test_weights_and_buffers_are_not_counted() -> None:
    net = nn.Linear(512, 512)  # 1 MiB of weights
    offload = Offload([net], 0)
    with offload:
        out = net(net(torch.ones(1, 512))).sum()
    assert offload.offloaded_bytes == 2 * 512 * 4
    out.backward()


def test_activation_checkpointing() -> None:
    """A block's input waits on the host; what its recomputation saves is nobody's to offload."""
    net = Net(checkpointing=True)
    offload = Offload([net], 0)
    with offload:
        loss = net(point())
    inputs = 64 * 64 * 4 * len(net.blocks)
    assert offload.offloaded_bytes == inputs + 64 * 64 * 4  # and what is squared
    loss.backward()
    assert same(gradient(net), plain(net, 1))
    assert offload.offloaded_bytes == inputs + 64 * 64 * 4


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of one rank: FSDP2 in this process."""
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    dist.destroy_process_group()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_unsharded_parameters_under_fsdp2(checkpointing: bool, mesh: Any) -> None:
    """They are neither copied to the host nor kept: the bytes are those of the plain network."""
    net = Net(checkpointing=checkpointing)
    reference, alone = plain(net, 1), Offload([net], 0)
    with alone:
        del_me = net(point())
    del del_me
    for block in net.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(net, mesh=mesh, reshard_after_forward=True)
    offload = Offload([net], 0)
    with offload:
        loss = net(point())
    assert offload.offloaded_bytes == alone.offloaded_bytes
    assert not offload._alive
    loss.backward()
    assert same([g.full_tensor() for g in gradient(net)], reference)  # type: ignore[attr-defined]


def test_a_network_that_moved() -> None:
    net = Net()
    offload = Offload([net], 0)
    net.to("meta")
    with pytest.raises(LeanError, match="was on cpu .* on meta now"), offload:
        pass


def test_no_room_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    net = Net()
    with (
        pytest.raises(LeanError, match=r"memory.activations.*No space left.*TMPDIR"),
        Offload([net], 0),
    ):
        net(point())


# -- trajectories without a backward ---------------------------------------------------------------


class Counted(nn.Module):
    """A log-probability whose backwards are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.backwards = nn.Linear(64, 64), 0

    def forward(self, x: Tensor) -> Tensor:
        out = -self.net(x).square().mean()[None]
        if out.requires_grad:
            out.register_hook(self._count)
        return out

    def _count(self, _: Tensor) -> None:
        self.backwards += 1


@pytest.mark.parametrize("kind", ["native", "retain", "offloaded"])
@pytest.mark.parametrize(
    ("advantages", "chosen"),
    [
        ([0.0, 1.0, 0.0, -1.0], 2),  # rewards that are the group's mean
        ([0.0] * 3 + [2.0], 1),  # the best one of four
        ([0.0] * 4, 0),  # a group that says nothing
    ],
)
def test_only_what_counts_is_differentiated(
    kind: str, advantages: list[float], chosen: int
) -> None:
    model = Counted()

    def replay(t: Transition) -> Transition:
        return Transition(t.keys, t.step, model(t.latents), latents=t.latents)

    schedule: Native | Retain
    if kind == "native":
        schedule = Native(model, replay=replay)
    else:
        schedule = Retain(model, activations=0 if kind == "offloaded" else None)
    schedule.begin(4, 2)
    for key in range(4):
        for step in range(2):
            with schedule.sampling(), torch.set_grad_enabled(schedule.needs_graph):
                x = point(key)
                score = model(x)
            schedule.transition(Transition((key,), step, score, latents=x))
            del score
    schedule.advantages(dict(enumerate(advantages)))
    statistics = schedule.finish()
    assert model.backwards == statistics.num_backwards == 2 * chosen
    assert statistics.num_skipped == 2 * (4 - chosen)
    if isinstance(schedule, Native):
        assert statistics.num_replays == 2 * chosen
    elif schedule.offload is not None:
        pool = schedule.offload._notes.pool
        free = sum(len(host.data) for some in pool._free.values() for host in some)
        assert schedule.offload.offloaded_bytes == free  # each buffer is back
        assert schedule.offload.resident_bytes == 0


def test_without_a_budget_there_is_no_hook() -> None:
    assert isinstance(Retain(Net()).sampling(), nullcontext)
