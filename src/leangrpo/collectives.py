"""Which collectives a rank runs, and in what order: counted as they are dispatched.

Under sharding every forward and backward gathers parameters, so ranks that hold the weights
together must run the same collectives in the same order. Where they do not, torch hangs or, when
the sizes happen to fit, mixes the shards without a word. With `parallel.check` the ranks compare
notes; `leangrpo bench --collectives` prints the counts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import _C, Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import LeanError
from .parallel import World

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_KINDS = {  # by how an operator's name begins
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
}


@dataclass(slots=True)
class Count:
    """Collectives of one kind: `calls`, and the elements (`numel`) and bytes of the whole tensors
    they made or took: gathered, or before they were scattered."""

    calls: int = 0
    numel: int = 0
    num_bytes: int = 0


class Collectives(TorchDispatchMode):
    """Inside `with`, counts this rank's collectives, those inside a backward too.

    `counts` by kind has all of them. `sequence` has, in words, those in which all of `ranks` take
    part, and the denoiser calls noted by `call`; it must be the same on all of `ranks`.
    """

    def __init__(self, ranks: Sequence[int] = (), group: Any = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ranks, self.group = tuple(ranks), group
        self._members: dict[str, tuple[int, ...]] = {}
        self._forget()

    @classmethod
    def of(cls, world: World) -> Collectives:
        """For the ranks that hold a copy of the weights together with this one."""
        if world.mesh is None:
            return cls((world.rank,))
        group = world.mesh.get_group("shard")
        return cls(dist.get_process_group_ranks(group), group)

    def __enter__(self) -> Collectives:
        """Start counting, from nothing."""
        self._forget()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator; note it if it is a collective."""
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it comes back as the plain operators it is made of
        if getattr(func, "namespace", None) in _NAMESPACES and (kind := _kind(func)):
            self._note(kind, func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    @property
    def digest(self) -> str:
        """The sequence so far, in a few characters."""
        return hashlib.sha256("\n".join(self.sequence).encode()).hexdigest()

    def call(self, name: str, step: int) -> None:
        """A denoiser is about to run, which it does on all of `ranks` or on none.

        Two denoisers of one shape would gather from each other without an error, so the names are
        compared before. The steps may differ where each sample has its own (`selection.per`).
        Raises LeanError on all ranks.
        """
        self.sequence.append(f"forward of {name}")
        if len(self.ranks) < 2:
            return
        found: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(found, (name, step), group=self.group)
        if len({one for one, _ in found}) > 1:
            said = ", ".join(
                f"rank {r} {one} at step {i}" for r, (one, i) in zip(self.ranks, found, strict=True)
            )
            raise LeanError(
                f"Ranks that hold the weights together are about to run different forwards: {said}."
                " They must call the same denoiser; what decides which one it is (a boundary "
                "timestep, the selected steps) must not differ between ranks."
            )

    def compare(self, world: World, when: str) -> None:
        """Raise LeanError, on all ranks, when `ranks` did not run the same collectives.

        A collective of the world itself. `when` says after what, as in "update 3".
        """
        so_far = list(self.sequence)
        digests = world.share_all((self.ranks, self.digest))
        if len({ranks for ranks, _ in digests}) == len(set(digests)):
            return
        for ranks, sequences in _by_ranks(world.share_all((self.ranks, so_far))):
            if difference := first_difference(ranks, sequences):
                raise LeanError(
                    f"After {when} the ranks have not run the same collectives: {difference}. "
                    "A rank has left out, or added, a forward or a backward."
                )

    def _forget(self) -> None:
        self.counts: dict[str, Count] = {}
        self.sequence: list[str] = []

    def _note(self, kind: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = [*args, *kwargs.values()]
        whole = max((list(_tensors(v)) for v in values), key=_num_bytes)
        count = self.counts.setdefault(kind, Count())
        count.calls += 1
        count.numel += sum(t.numel() for t in whole)
        count.num_bytes += _num_bytes(whole)
        members = self._group(func, values)
        if set(self.ranks) <= set(members):
            shapes = "+".join(f"{list(t.shape)}" for t in whole)
            dtype = str(whole[0].dtype).removeprefix("torch.") if whole else ""
            self.sequence.append(f"{kind} {shapes} {dtype} of ranks {list(members)}")

    def _group(self, func: Any, values: list[Any]) -> tuple[int, ...]:
        """The ranks of a collective: from its process group, or from the group's name."""
        for argument, value in zip(func._schema.arguments, values, strict=False):
            if argument.name in ("process_group", "group_name"):
                group = value
                if isinstance(value, str):
                    group = _C._distributed_c10d._resolve_process_group(value)  # type: ignore[arg-type]
                elif isinstance(value, torch.ScriptObject):
                    group = dist.ProcessGroup.unbox(value)
                if group.group_name not in self._members:
                    ranks = dist.get_process_group_ranks(group)
                    self._members[group.group_name] = tuple(ranks)
                return self._members[group.group_name]
        return ()


def in_order(update: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    """A function of `(setup, update)` that runs under `setup.order`, where there is one."""

    @wraps(update)
    def inside(setup: Any, number: int) -> Any:
        with setup.order or nullcontext():
            return update(setup, number)

    return inside


def first_difference(ranks: Sequence[int], sequences: Sequence[Sequence[str]]) -> str:
    """Where the sequences of some ranks part, in words; empty where they are the same.

    >>> first_difference([0, 2], [["a", "b"], ["a"]])
    'number 2 of 2 is b on rank 0, none (it has 1) on rank 2'
    """
    longest = max(map(len, sequences))
    for i in range(longest):
        there = [s[i] if i < len(s) else f"none (it has {len(s)})" for s in sequences]
        if len(set(there)) > 1:
            said = ", ".join(f"{w} on rank {r}" for r, w in zip(ranks, there, strict=True))
            return f"number {i + 1} of {longest} is {said}"
    return ""


def _by_ranks(
    shared: list[tuple[tuple[int, ...], list[str]]],
) -> Iterator[tuple[tuple[int, ...], list[list[str]]]]:
    """What every rank has, by the ranks that hold the weights together."""
    for ranks in dict.fromkeys(ranks for ranks, _ in shared):
        yield ranks, [shared[r][1] for r in ranks]


def _kind(func: Any) -> str | None:
    name = func._schema.name.partition("::")[2].strip("_")
    return next((kind for start, kind in _KINDS.items() if name.startswith(start)), None)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner)


def _num_bytes(tensors: list[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
