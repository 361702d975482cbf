"""Where backward leaves gradients, and how those of all ranks become one.

Three sources behind one protocol: one process (`Local`), whole copies on every rank
(`Replicated`), and FSDP2's shards (`Sharded`). A schedule reads a rank's own gradient with `take`,
which no other rank has touched, and gives back a finished one with `reduce`: correction first,
then one reduce-scatter (paper, sec. 4.3.2, eq. 25, and appendix C for why not the other way).

Under FSDP2 a provisional gradient *cannot* be synchronised early: it is taken out of the
unsharded parameter as autograd accumulates it, before FSDP2 looks for something to reduce. Only
public API: hooks on the unsharded parameters, one reduce-scatter, `DTensor.from_local`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .guard import Guard

Gradient = list[Tensor | None]
"""A gradient in the order of the parameters; None where backward did not reach."""

Part = Callable[[Sequence[int]], Gradient]
"""Gives a rank's own gradient for some parameters, corrected only when it is asked for."""

Sync = Literal["update", "group", "step"]
"""When gradients of the ranks are added: once an update, after every group, at every backward."""

BUCKET_BYTES = 32 * 2**20
"""Bytes that travel in one collective: small tensors together, and one under way at a time."""


_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Gradients(Protocol):
    """The contract; see the module.

    `parameters` are what the optimizer steps. `alone`: there are no other ranks. `skippable` says
    whether a rank may leave out a backward that others run. Between `before` and `after` lies one
    backward, which an `idle` one must leave no trace of. `reduce` adds up what `part(indices)`
    gives over the ranks, bucket by bucket, each called equally often on every rank; `reached` says
    where this rank has a gradient. `finish` writes `.grad`.
    """

    sync: Sync
    alone: bool

    @property
    def parameters(self) -> list[nn.Parameter]: ...

    @property
    def skippable(self) -> bool: ...

    def begin(self) -> None: ...

    def take(self) -> Gradient: ...

    def put(self, gradient: Gradient) -> None: ...

    def before(self, *, idle: bool) -> None: ...

    def after(self) -> None: ...

    def reduce(self, part: Part, reached: Sequence[bool]) -> None: ...

    def finish(self) -> None: ...


class Local:
    """One process: what autograd accumulates in `.grad` is the gradient."""

    sync: Sync = "update"
    skippable = True
    alone = True

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self._kept: Gradient | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters, in module order."""
        return self.guard.parameters

    def begin(self) -> None:
        """Open an update: gradients already in `.grad` are set aside, and added to at the end."""
        self._done = self.take()

    def take(self) -> Gradient:
        """Move what backward left out of `.grad`."""
        taken: Gradient = [p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return taken

    def put(self, gradient: Gradient) -> None:
        """Let backward accumulate on top of `gradient`."""
        for parameter, g in zip(self.parameters, gradient, strict=True):
            parameter.grad = g

    def before(self, *, idle: bool) -> None:
        """A backward is about to run."""
        self._kept = self.take() if idle else None

    def after(self) -> None:
        """A backward has run."""
        if self._kept is not None:
            self.put(self._kept)
            self._kept = None

    def reduce(self, part: Part, reached: Sequence[bool]) -> None:
        """Add this rank's gradient to the finished one."""
        every = range(len(self.parameters))
        _add(self._done, every, part(every))

    def finish(self) -> None:
        """Write the finished gradient to `.grad`, in each parameter's dtype."""
        for parameter, g in zip(self.parameters, self._done, strict=True):
            parameter.grad = None if g is None else g.to(parameter.dtype)
        self._done = []


class Replicated(Local):
    """A whole copy of the weights on every rank of `group`: one bucketed all-reduce."""

    alone = False

    def __init__(
        self,
        guard: Guard,
        group: Any,
        *,
        sync: Sync = "update",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(guard)
        self.group, self.sync, self.dtype = group, sync, dtype

    @property
    def skippable(self) -> bool:  # type: ignore[override]
        """No collective is inside a backward, unless each is followed by one."""
        return self.sync != "step"

    def before(self, *, idle: bool) -> None:
        """Set aside what is there, if this backward's own gradient is to be known alone."""
        self._idle = idle
        self._kept = self.take() if idle or self.sync == "step" else None

    def after(self) -> None:
        """Drop an idle backward's gradient; with sync=step, add up this one over the ranks."""
        if self._kept is None:
            return
        own = self.take()
        self.put(self._kept)
        self._kept = None
        if self.sync == "step":
            if self._idle:
                own = [None if g is None else torch.zeros_like(g) for g in own]
            self.reduce(lambda indices: [own[i] for i in indices], [g is not None for g in own])

    def reduce(self, part: Part, reached: Sequence[bool]) -> None:
        """Sum over the ranks what `part` gives, into the finished gradient."""
        anywhere = _anywhere(reached, self.parameters[0].device, self.group)
        _pipeline(self._send(indices, part) for indices in _buckets(self.parameters, anywhere))

    def _send(self, indices: list[int], part: Part) -> Callable[[], None]:
        shapes = [self.parameters[i].shape for i in indices]
        own = part(indices)
        dtype = _wire_dtype(self.parameters[indices[0]].dtype, self.dtype)
        flat = torch.cat(
            [
                torch.zeros(shape.numel(), dtype=dtype, device=self.parameters[i].device)
                if g is None
                else g.reshape(-1).to(dtype)
                for i, shape, g in zip(indices, shapes, own, strict=True)
            ]
        )
        work = dist.all_reduce(flat, group=self.group, async_op=True)

        def land() -> None:
            work.wait()
            parts = torch.split(flat, [shape.numel() for shape in shapes])
            whole: Gradient = [t.view(shape) for t, shape in zip(parts, shapes, strict=True)]
            _add(self._done, indices, whole)

        return land


class Sharded:
    """FSDP2's shards: unsharded gradients are caught as they form, and leave in reduce-scatters.

    `modules` are FSDP2 roots. With sync=step nothing is caught, and FSDP2 reduces at every
    backward: what other trainers do, and what a provisional gradient must never be put through.
    `mesh` has the dimension `shard` and maybe `replicate` before it (HSDP).
    """

    skippable = False
    alone = False

    def __init__(
        self,
        guard: Guard,
        modules: Iterable[nn.Module],
        mesh: Any,
        *,
        sync: Sync = "update",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        from torch.distributed.fsdp import FSDPModule

        self.guard, self.mesh, self.sync, self.dtype = guard, mesh, sync, dtype
        self.shard_group = mesh.get_group("shard")
        names = mesh.mesh_dim_names or ()
        self.replicate_group = mesh.get_group("replicate") if "replicate" in names else None
        self.num_shards = dist.get_world_size(self.shard_group)
        self._current: Gradient = []
        self._idle = self._open = False
        index = {id(p): i for i, p in enumerate(guard.parameters)}
        for root in modules:
            units: list[Any] = [m for m in root.modules() if isinstance(m, FSDPModule)]
            for unit in units:
                unit.set_gradient_divide_factor(1.0)  # a sum: the schedule divides by N S
                unit.set_force_sum_reduction_for_comms(True)  # gloo can add, but not scale and add
            for unit, owned in _owned(root, units).items():
                slots = [
                    (m, name, index[id(m._parameters[name])])
                    for m, name in owned
                    if id(m._parameters[name]) in index
                ]
                if slots:
                    # after FSDP2's own pre-hook, that is, when the parameters are whole
                    unit.register_forward_pre_hook(_Watch(self, slots))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters, as DTensors, in module order."""
        return self.guard.parameters

    def begin(self) -> None:
        """Open an update; gradients already in `.grad` are added to."""
        self._current, self._open = [None] * len(self.parameters), True
        self._done: Gradient = [None if p.grad is None else _local(p.grad) for p in self.parameters]
        if self.sync != "step":
            for parameter in self.parameters:
                parameter.grad = None

    def take(self) -> Gradient:
        """Move this rank's own unsharded gradient out; see `Local.take`."""
        taken = self._current
        self._current = [None] * len(self.parameters)
        return taken

    def put(self, gradient: Gradient) -> None:
        """Let backward accumulate on top of `gradient`."""
        self._current = gradient

    def before(self, *, idle: bool) -> None:
        """A backward is about to run; an idle one only takes part in the collectives."""
        self._idle = idle

    def after(self) -> None:
        """A backward has run."""
        self._idle = False

    def caught(self, index: int, parameter: Tensor) -> None:
        """Autograd has accumulated into an unsharded parameter: take the gradient away."""
        if not self._open:  # another schedule's update, over the same weights
            return
        g = parameter.grad
        assert g is not None
        if self.sync == "step":
            if self._idle:
                g.zero_()
            return
        parameter.grad = None
        if self._idle:
            return
        before = self._current[index]
        if before is None:
            self._current[index] = g
        else:
            before.add_(g)

    def reduce(self, part: Part, reached: Sequence[bool]) -> None:
        """Reduce-scatter what `part` gives, into the finished shards."""
        anywhere = _anywhere(reached, self.parameters[0].device, None)
        _pipeline(self._send(indices, part) for indices in _buckets(self.parameters, anywhere))

    def _send(self, indices: list[int], part: Part) -> Callable[[], None]:
        """Launch a bucket: row r of the buffer is what rank r of the shard group keeps."""
        some = [self.parameters[i] for i in indices]
        own = part(indices)
        dtype = _wire_dtype(some[0].dtype, self.dtype)
        ranks = self.num_shards
        rows = [-(-p.shape[0] // ranks) for p in some]  # as torch.chunk: the last may be short
        sizes = [row * p.shape[1:].numel() for row, p in zip(rows, some, strict=True)]
        buffer = torch.zeros(ranks, sum(sizes), dtype=dtype, device=some[0].device)
        at = 0
        for g, row, size in zip(own, rows, sizes, strict=True):
            if g is not None:
                for rank, chunk in enumerate(torch.split(g, row)):
                    buffer[rank, at : at + chunk.numel()] = chunk.reshape(-1)
            at += size
        shard = torch.empty(sum(sizes), dtype=dtype, device=buffer.device)
        work = _reduce_scatter(shard, buffer.view(-1), group=self.shard_group, async_op=True)

        def land() -> None:
            work.wait()
            if self.replicate_group is not None:
                dist.all_reduce(shard, group=self.replicate_group)
            parts = torch.split(shard, sizes)
            shapes = [_local(p).shape for p in some]
            whole: Gradient = [t[: s.numel()].view(s) for t, s in zip(parts, shapes, strict=True)]
            _add(self._done, indices, whole)

        return land

    def finish(self) -> None:
        """Write the finished shards to `.grad`, as DTensors of each parameter's dtype."""
        self._open = False
        if self.sync == "step":
            return  # FSDP2 has written them
        for parameter, g in zip(self.parameters, self._done, strict=True):
            if g is None:
                parameter.grad = None
                continue
            p: Any = parameter
            parameter.grad = DTensor.from_local(
                g.to(parameter.dtype).contiguous(),
                p.device_mesh,
                p.placements,
                run_check=False,
                shape=p.shape,
                stride=p.stride(),
            )
        self._done = []


class _Watch:
    """Before an FSDP2 unit's forward: a hook on each of its whole parameters, once."""

    def __init__(self, owner: Sharded, slots: list[tuple[nn.Module, str, int]]) -> None:
        self.owner, self.slots = owner, slots
        self.hooked: dict[int, Tensor] = {}

    def __call__(self, *_: Any) -> None:
        for module, name, index in self.slots:
            whole: Any = module._parameters[name]
            if self.hooked.get(index) is whole or not whole.requires_grad:
                continue
            self.hooked[index] = whole
            owner = self.owner
            whole.register_post_accumulate_grad_hook(
                lambda p, owner=owner, index=index: owner.caught(index, p)
            )


def _owned(
    root: nn.Module, units: Sequence[nn.Module]
) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """Which parameters each FSDP2 unit gathers: those below it and below no unit further down."""
    found: dict[nn.Module, list[tuple[nn.Module, str]]] = {unit: [] for unit in units}

    def walk(module: nn.Module, unit: nn.Module | None) -> None:
        unit = module if module in found else unit
        if unit is not None:
            found[unit] += [
                (module, name) for name, p in module._parameters.items() if p is not None
            ]
        for child in module.children():
            walk(child, unit)

    walk(root, None)
    return found


def _add(total: Gradient, indices: Iterable[int], gradient: Gradient) -> None:
    for i, g in zip(indices, gradient, strict=True):
        if g is None:
            continue
        before = total[i]
        if before is None:
            total[i] = g
        else:
            before.add_(g)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _anywhere(reached: Sequence[bool], device: torch.device, group: Any) -> list[bool]:
    """Which parameters have a gradient on some rank: all ranks must send the same ones."""
    mask = torch.tensor(list(reached), dtype=torch.uint8, device=device)
    dist.all_reduce(mask, op=dist.ReduceOp.MAX, group=group)
    return [bool(v) for v in mask.tolist()]


def _buckets(parameters: Sequence[nn.Parameter], reached: Sequence[bool]) -> Iterator[list[int]]:
    """The reached parameters in lists of at most BUCKET_BYTES, the last layer first."""
    bucket: list[int] = []
    filled, dtype = 0, None
    for i in reversed(range(len(parameters))):
        if not reached[i]:
            continue
        p = parameters[i]
        num_bytes = p.numel() * p.element_size()
        if bucket and (filled + num_bytes > BUCKET_BYTES or p.dtype != dtype):
            yield bucket
            bucket, filled = [], 0
        bucket.append(i)
        filled, dtype = filled + num_bytes, p.dtype
    if bucket:
        yield bucket


def _pipeline(launched: Iterator[Callable[[], None]]) -> None:
    """Prepare a bucket while the one before is under way; at most two are in memory."""
    before: Callable[[], None] | None = None
    for land in launched:
        if before is not None:
            before()
        before = land
    if before is not None:
        before()


def _wire_dtype(of_parameter: torch.dtype, wanted: torch.dtype) -> torch.dtype:
    """What travels: `wanted`, but float64 gradients stay float64."""
    return torch.float64 if of_parameter == torch.float64 else wanted
