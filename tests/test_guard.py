"""Case "stale graph": a gradient of one policy version is never used on another.

Torch itself notices only a plain module under the default AdamW; every cell must raise ours.
"""

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from leangrpo.data import Transition
from leangrpo.errors import LeanError, StaleGraphError
from leangrpo.gradients import Sharded
from leangrpo.guard import Guard
from leangrpo.reweight import Reweight
from leangrpo.schedules import Native, Retain


class Toy(nn.Module):
    def __init__(self, checkpointing: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointing:
            return checkpoint(self.body, x, use_reentrant=False)
        return self.body(x)


def transition(model: nn.Module, key: int, step: int = 0) -> Transition:
    x = torch.full((1, 4), 0.1 * (key + 1))
    return Transition((key,), step, model(x).square().mean(dim=1))


def adamw(model: nn.Module, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)


def optimizer_step(fused: bool) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        optimizer = adamw(model, fused)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.zero_grad()

    return change


def ema_swap(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data * 0.99


def edit_in_place(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.mul_(0.99)


def load(model: nn.Module) -> None:
    model.load_state_dict({k: v * 0.99 for k, v in model.state_dict().items()})


CHANGES = {
    "adamw": optimizer_step(False),
    "fused adamw": optimizer_step(True),
    "ema swap": ema_swap,
    "edit": edit_in_place,
    "load_state_dict": load,
}


@pytest.mark.parametrize(
    ("change", "checkpointing", "kind"),
    list(itertools.product(CHANGES, (False, True), (Retain, Reweight))),
)
def test_weights_changed_between_rollout_and_update(change, checkpointing, kind) -> None:
    model = Toy(checkpointing)
    schedule = kind(model)
    schedule.begin(2, 1)
    for key in range(2):
        schedule.transition(transition(model, key))
    CHANGES[change](model)
    with pytest.raises(StaleGraphError, match=r"policy version 0 cannot be used on version 1"):
        schedule.advantages({0: 1.0, 1: -1.0})


@pytest.mark.parametrize("kind", [Retain, Reweight])
def test_weights_changed_in_the_middle_of_a_rollout(kind) -> None:
    model = Toy()
    schedule = kind(model)
    schedule.begin(2, 1)
    schedule.transition(transition(model, 0))
    optimizer_step(True)(model)
    with pytest.raises(StaleGraphError, match="AdamW.step()"):
        schedule.transition(transition(model, 1))


def test_an_unchanged_policy_passes_and_a_foreign_optimizer_does_not_count() -> None:
    model, other = Toy(), Toy()
    schedule = Retain(model)
    schedule.begin(1, 1)
    schedule.transition(transition(model, 0))
    optimizer_step(False)(other)
    schedule.advantages({0: 1.0})
    schedule.finish()
    assert model.body[0].weight.grad is not None


@pytest.mark.parametrize("kind", [Retain, Reweight])
def test_a_rollout_without_graph(kind) -> None:
    model = Toy()
    schedule = kind(model)
    schedule.begin(1, 1)
    with torch.no_grad():
        t = transition(model, 0)
    with pytest.raises(StaleGraphError, match="without a graph.*schedule 'native'"):
        schedule.transition(t)


def test_inference_mode_is_explained() -> None:
    model = Toy()
    schedule = Retain(model)
    schedule.begin(1, 1)
    with torch.inference_mode():
        t = transition(model, 0)
    with pytest.raises(StaleGraphError, match="inference_mode.*no_grad"):
        schedule.transition(t)


def test_another_process() -> None:
    model = Toy()
    schedule = Reweight(model)
    schedule.begin(1, 1)
    t = transition(model, 0)
    t.process = os.getpid() + 1
    with pytest.raises(StaleGraphError, match="no graph travels between processes"):
        schedule.transition(t)


@pytest.mark.parametrize("kind", [Retain, Reweight])
def test_active_dropout_is_refused(kind) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
    schedule = kind(model)
    with pytest.raises(LeanError, match=r"`1` is an active dropout layer"):
        schedule.begin(1, 1)
    model.eval()
    schedule.begin(1, 1)
    Native(model.train(), replay=lambda t: t).begin(1, 1)  # a second forward draws its own mask


def test_nothing_to_train() -> None:
    model = Toy().requires_grad_(False)
    with pytest.raises(LeanError, match="nothing to train"):
        Retain(model).begin(1, 1)


def test_a_dead_guard_leaves_no_hook_behind() -> None:
    from torch.optim import optimizer as module

    before = len(module._global_optimizer_post_hooks)
    guard = Guard(Toy())
    assert len(module._global_optimizer_post_hooks) == before + 1
    del guard
    assert len(module._global_optimizer_post_hooks) == before


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of one rank: FSDP2 in this process."""
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    dist.destroy_process_group()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("schedule", [Retain, Reweight])
def test_a_stale_graph_under_fsdp2(schedule, checkpointing, fused, mesh) -> None:
    """Torch says nothing here, and the gradient would match neither the old nor the new weights."""
    model = Toy(checkpointing)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    guard = Guard(model)
    gradients = Sharded(guard, [model], mesh)
    one = schedule(guard, gradients=gradients)
    one.begin(2, 1)
    one.transition(transition(model, 0))
    late = transition(model, 1)
    late.version = guard.version
    optimizer = adamw(model, fused)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.raises(StaleGraphError, match="policy version 0 cannot be used on version 1"):
        one.transition(late)
    with pytest.raises(StaleGraphError, match="policy version 0 cannot be used on version 1"):
        one.advantages({0: 1.0})


@pytest.mark.parametrize("schedule", [Retain, Reweight])
def test_fsdp2_gives_the_plain_gradient(schedule, mesh) -> None:
    plain, sharded = Toy(), Toy()
    fully_shard(sharded, mesh=mesh, reshard_after_forward=True)
    for model in (plain, sharded):
        guard = Guard(model)
        gradients = None if model is plain else Sharded(guard, [model], mesh)
        one = schedule(guard, gradients=gradients)
        one.begin(2, 2)
        for key in (0, 1):
            for step in (0, 1):
                one.transition(transition(model, key, step))
        one.advantages({0: 1.5, 1: -0.5})
        one.finish()
    for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad.full_tensor())
