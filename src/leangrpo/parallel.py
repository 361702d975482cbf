"""Several ranks: who is here, who holds which part of the weights, and what they tell one another.

PyTorch's own engine does the work: torchrun starts the ranks, a device mesh names them, FSDP2
shards the denoisers. One process is the case of one rank, with no process group at all.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from .errors import LeanError, problem
from .gradients import Gradients, Local, Replicated, Sharded, Sync
from .guard import Guard
from .layout import Layout


@dataclass
class World:
    """The ranks of a run. `mesh` has the dimensions `replicate` and `shard`; None in one process.

    Its methods are collectives: called by all ranks, or by all peers of a prompt, or not at all.
    """

    rank: int = 0
    size: int = 1
    mesh: Any = None
    whole_because: str | None = None  # why the weights are not sharded although they could be
    _teams: dict[tuple[int, ...], Any] = field(default_factory=dict)

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the run folder and speaks to the user."""
        return self.rank == 0

    @property
    def shards(self) -> int:
        """Ranks that hold one copy of the weights between them."""
        return 1 if self.mesh is None else int(self.mesh["shard"].size())

    def hold_whole(self, because: str) -> None:
        """Keep a whole copy of the weights on every rank, from before they are sharded.

        A collective; `because` is what the user is told.
        """
        kind = self.mesh.device_type
        names = ("replicate", "shard")
        self.mesh = init_device_mesh(kind, (self.size, 1), mesh_dim_names=names)
        self.whole_because = because

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of a CPU tensor over the ranks. Exact where only one of them is not zero."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> Tensor:
        """The largest of a CPU tensor over the ranks, element by element."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def any(self, flag: bool) -> bool:
        """Whether the flag is up on some rank, which all of them learn."""
        return bool(self.max(torch.tensor(int(flag))))

    def share(self, value: Any) -> Any:
        """What rank 0 has, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def share_all(self, value: Any) -> list[Any]:
        """What every rank has, on every rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def gather(self, value: Any) -> list[Any]:
        """What every rank has, on rank 0 by rank; an empty list on the others."""
        if self.size == 1:
            return [value]
        found: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(value, found, dst=0)
        return found or []

    def open_teams(self, layout: Layout) -> None:
        """Make the process groups of the ranks that share a prompt; the same calls on all ranks."""
        for team in layout.teams:
            if len(team) > 1 and team not in self._teams:
                self._teams[team] = dist.new_group(list(team), backend="gloo")

    def gather_group(self, layout: Layout, prompt: int, own: Tensor) -> Tensor:
        """A prompt's values `(K, M)` in the order of generations, from each peer's own `(K, n)`.

        `own` are those of the generations this rank ran, in the order it ran them. All peers get
        the same numbers in the same order, and so the same advantages (sec. 4.1 of the paper).
        """
        team = layout.peers(prompt)
        places = layout.places()
        if len(team) == 1:
            return own[:, [j for _, j in places]]
        row = torch.zeros(len(own), layout.held, dtype=own.dtype)
        row[:, : own.shape[1]] = own
        rows = [torch.empty_like(row) for _ in team]
        dist.all_gather(rows, row, group=self._teams[team])
        return torch.stack([rows[i][:, j] for i, j in places], dim=1)

    def _reduce(self, tensor: Tensor, op: Any) -> Tensor:
        if self.size == 1:
            return tensor
        tensor = tensor.clone()
        dist.all_reduce(tensor, op=op)
        return tensor


def join(
    shard: int | None,
    replicate: int | None,
    *,
    timeout_s: float,
    master: bool,
    device: torch.device | str = "cpu",
) -> World:
    """Join the ranks that torchrun started; without it, a world of one.

    `shard` ranks hold one copy of the weights (None: those of a node), in `replicate` copies
    (None: as many as there are). `master`: FSDP2 is wanted on one rank too, to keep weights in
    another dtype than it computes in. Raises LeanError when the numbers do not make up the world.
    """
    size = world_size()
    if size == 1 and not master:
        return World()
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        options: dict[str, Any] = {}
        if size == 1:
            options = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **options)
    shard, replicate = divide(size, shard, replicate)
    mesh = init_device_mesh(kind, (replicate, shard), mesh_dim_names=("replicate", "shard"))
    return World(dist.get_rank(), size, mesh)


def world_size() -> int:
    """Ranks of this job, from torchrun's environment; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1))


def divide(size: int, shard: int | None, replicate: int | None) -> tuple[int, int]:
    """`(shard, replicate)` with shard * replicate = size; see `join`. Raises LeanError if not."""
    if shard is None:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        shard = size // replicate if replicate else local
    replicate = replicate or size // shard
    if shard * replicate != size:
        raise problem(
            "parallel.shard",
            shard,
            f"shard x replicate must be the number of ranks, and {shard} x {replicate} is not "
            f"{size}",
            "Leave one of parallel.shard and parallel.replicate null.",
        )
    return shard, replicate


def leave() -> None:
    """Close the process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def shard_denoiser(
    module: nn.Module,
    mesh: Any,
    *,
    compute: torch.dtype | None = None,
    reduce: torch.dtype = torch.float32,
) -> nn.Module:
    """Shard a denoiser in place with FSDP2, block by block, before an optimizer is built.

    The blocks are those the model itself names as repeated, or not to be split. With `compute`,
    forward and backward run in that dtype and the weights stay in theirs (master weights).
    Inputs are not cast here: a timestep rounded to 16 bits would be another one.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    wide = any(p.dtype == torch.float64 for p in module.parameters())
    policy = MixedPrecisionPolicy(
        param_dtype=compute,
        reduce_dtype=None if wide else reduce,
        cast_forward_inputs=False,
    )
    exact = MixedPrecisionPolicy(cast_forward_inputs=False)
    whole = mesh["shard"] if mesh["replicate"].size() == 1 else mesh
    for part in _exact_parts(module) if compute else ():
        fully_shard(part, mesh=whole, mp_policy=exact)
    for block in blocks(module):
        fully_shard(block, mesh=whole, mp_policy=policy)
    # the root too: between two forwards a parameter is always a shard, whoever looks at it
    fully_shard(module, mesh=whole, mp_policy=policy, reshard_after_forward=True)
    return module


def blocks(module: nn.Module) -> list[nn.Module]:
    """The blocks of a model, in order: its repeated blocks by diffusers' own list, or the largest
    list of like modules where it has none."""
    names = {*(getattr(module, "_repeated_blocks", None) or ())}
    names |= {*(getattr(module, "_no_split_modules", None) or ())}
    found = [m for m in module.modules() if type(m).__name__ in names and m is not module]
    if not found:
        lists = [m for m in module.modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
        sizes = [sum(p.numel() for p in m.parameters()) for m in lists]
        if lists:
            found = list(lists[sizes.index(max(sizes))])
    return [m for m in found if any(True for _ in m.parameters()) and not _inside(m, found)]


def mixed_dtypes(module: nn.Module) -> list[str]:
    """The dtypes of the trained parameters of a part FSDP2 would shard at once, if more than one.

    It refuses such a part: Wan, for one, keeps modules in float32 beside weights in bfloat16.
    """
    taken: set[nn.Parameter] = set()
    for part in (*blocks(module), module):
        own = [p for p in part.parameters() if p not in taken]
        taken.update(own)
        dtypes = {p.dtype for p in own if p.requires_grad}
        if len(dtypes) > 1:
            return sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return []


def make_gradients(
    guard: Guard, denoisers: Iterable[nn.Module], world: World, *, sync: Sync, reduce: torch.dtype
) -> Gradients:
    """Where the gradients of these denoisers are found, and how the ranks add them up."""
    from torch.distributed.fsdp import FSDPModule

    modules = list(denoisers)
    sharded = [isinstance(m, FSDPModule) for m in modules]
    if all(sharded) and modules:
        _refuse_unsharded(modules, guard)
        mesh = world.mesh["shard"] if world.size == world.shards else world.mesh
        return Sharded(guard, modules, mesh, sync=sync, dtype=reduce)
    if world.size == 1:
        return Local(guard)
    return Replicated(guard, None, sync=sync, dtype=reduce)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; a plain one is its own."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a sharded tensor, a collective; a plain one is its own."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def scatter_like(full: Tensor, like: Tensor) -> Tensor:
    """`full`, which every rank has, laid out as `like` is; no collective."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor):
        return full
    full = full.to(like.device)
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)


def _refuse_unsharded(modules: Sequence[nn.Module], guard: Guard) -> None:
    """A trained parameter outside every FSDP2 unit would never be averaged, and one that sharding
    has replaced would never be updated."""
    from torch.distributed.tensor import DTensor

    for module in modules:
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                raise LeanError(
                    f"{type(module).__name__}.{name} is trained but not sharded: its gradient "
                    "would differ between ranks. Add it before the model is sharded."
                )
    if not all(isinstance(parameter, DTensor) for parameter in guard.parameters):
        raise LeanError(
            "The parameters to train were looked up before the model was sharded, which replaced "
            "them. Build the policy, and the optimizer, after sharding."
        )


def _exact_parts(module: nn.Module) -> list[nn.Module]:
    """Submodules the model wants in float32 whatever it computes in."""
    names = getattr(module, "_keep_in_fp32_modules", None) or ()
    found = [
        m
        for name, m in module.named_modules()
        if name and any(n in name.split(".") for n in names) and any(True for _ in m.parameters())
    ]
    return [m for m in found if not _inside(m, found)]


def _inside(module: nn.Module, others: Sequence[nn.Module]) -> bool:
    return any(module is not other and module in set(other.modules()) for other in others)
