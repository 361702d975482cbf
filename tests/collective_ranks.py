"""What two ranks do together, one process start for all of it.

    torchrun --nproc-per-node 2 tests/collective_ranks.py FOLDER

FOLDER has the tiny SD3 pipeline as `sd3`. Rank 0 writes FOLDER/results.json; see
test_collectives.py for what is expected.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import tiny
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from leangrpo.bench import bench
from leangrpo.collectives import Collectives
from leangrpo.config import load_config
from leangrpo.data import SampleKey
from leangrpo.errors import LeanError
from leangrpo.gradients import Sharded
from leangrpo.guard import Guard
from leangrpo.parallel import World, join, leave, make_gradients, shard_denoiser, whole
from leangrpo.policy import Policy, Sampling
from leangrpo.setup import make_order

EVERY = ["native:step", "native:step:classic", "native", "retain", "reweight"]
TWO = ["native:step", "reweight"]


def settings(folder: Path, *more: str) -> list[str]:
    return [
        f"model.pipeline={folder / 'sd3'}",
        "sampling={steps: 10, height: 16, width: 16}",
        "sampling.call={max_sequence_length: 16}",
        "selection={rule: fraction, fraction: 1.0, steps: null, last: true}",
        "rollout={prompts: 2, generations: 2, micro_batch: 1}",
        *more,
    ]


def counted(folder: Path, names: list[str], *more: str) -> Any:
    return bench(load_config("embedded", settings(folder, *more)), names, 1, collectives=True)


def timed(folder: Path) -> Any:
    config = load_config("embedded", settings(folder, "sampling.steps=2"))
    return bench(config, ["native:step:classic", "native:group", "reweight"], 1)


class Net(nn.Module):
    """Layers of odd sizes, so that no shard is like another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 7)
        self.last = nn.Linear(7, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x))))).sum()


def inputs(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(2, 3, dtype=torch.float64, generator=generator) for _ in range(3)]


def several_graphs(world: World) -> dict[str, bool]:
    """Three forwards kept, three backwards: equal to whole copies of the network, bitwise."""
    equal: dict[str, bool] = {}
    for order in ([0, 1, 2], [2, 1, 0]):
        each = []
        for rank in range(world.size):
            net = Net()
            losses = [net(x) for x in inputs(rank)]
            for i in order:
                losses[i].backward()
            each.append([p.grad for p in net.parameters()])
        expected = [a + b for a, b in zip(*each, strict=True)]
        for reshard in (True, False):
            for sync in ("update", "step"):
                net = Net()
                for part in (net.first, net.second, net.last, net):
                    fully_shard(part, mesh=world.mesh["shard"], reshard_after_forward=reshard)
                guard = Guard(net)
                gradients = Sharded(guard, [net], world.mesh["shard"], sync=sync)
                gradients.begin()
                losses = [net(x) for x in inputs(world.rank)]
                for i in order:
                    gradients.before(idle=False)
                    losses[i].backward()
                    gradients.after()
                if sync == "update":
                    own = gradients.take()
                    gradients.reduce(lambda some, own=own: [own[i] for i in some], [True] * 6)
                gradients.finish()
                found = [whole(p.grad) for p in guard.parameters]
                # added up over ranks at every step, the additions are in another order
                equals = torch.equal if sync == "update" else _to_rounding
                equal[f"{order} reshard={reshard} {sync}"] = all(map(equals, found, expected))
    return equal


def _to_rounding(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-13, atol=1e-15)


def complaint(do: Callable[[], Any]) -> str:
    try:
        do()
    except LeanError as error:
        return str(error)
    return ""


def left_out(world: World) -> str:
    """A trained parameter that was added after sharding."""
    net = Net()
    fully_shard(net, mesh=world.mesh["shard"])
    net.extra = nn.Parameter(torch.ones(3))
    return complaint(
        lambda: make_gradients(Guard(net), [net], world, sync="update", reduce=torch.float32)
    )


def too_early(world: World) -> str:
    """Parameters that were looked up, as for an optimizer, before sharding replaced them."""
    net = Net()
    guard = Guard(net)
    fully_shard(net, mesh=world.mesh["shard"])
    return complaint(
        lambda: make_gradients(guard, [net], world, sync="update", reduce=torch.float32)
    )


def two_denoisers(world: World) -> str:
    """A pipeline of two experts, whose boundary is elsewhere on each rank."""
    pipe = tiny.tiny_wan()
    pipe.register_modules(transformer_2=deepcopy(pipe.transformer))
    pipe.register_to_config(boundary_ratio=0.9 if world.rank else 0.1)
    for module in (pipe.transformer, pipe.transformer_2):
        shard_denoiser(module, world.mesh)
    policy = Policy(pipe, Sampling(steps=3, guidance=1.0, call=tiny.CALL["wan"]))
    make_order(policy, world)
    return complaint(lambda: policy.sample(["a"], [SampleKey(0, 0, world.rank)], decode=False))


def other_collective(world: World) -> str:
    """As many bytes of another dtype: gloo gathers them without a word."""
    with Collectives.of(world) as order:
        own = torch.ones(4, dtype=torch.int32 if world.rank else torch.float32)
        dist.all_reduce(torch.ones(1))
        dist.all_gather([torch.empty_like(own) for _ in range(world.size)], own)
        return complaint(lambda: order.compare(world, "update 3"))


def main(folder: Path) -> None:
    results: dict[str, Any] = {
        "full": counted(folder, EVERY),
        "lora": counted(folder, TWO, "model={train: lora, lora: {rank: 4}}"),
        "copies": counted(folder, TWO, "parallel={shard: 1}"),
        "timed": timed(folder),
    }
    world = join(2, 1, timeout_s=60, master=False)
    results["graphs"] = several_graphs(world)
    for task in (left_out, too_early, two_denoisers, other_collective):
        results[task.__name__] = world.share_all(task(world))
    if world.is_main:
        (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
