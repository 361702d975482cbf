"""Kept graphs within a budget of bytes: activations that do not fit wait in the host's memory.

Between rollout and backward a graph is nothing but what autograd saved for it, and autograd lets
that be packed and unpacked (`torch.autograd.graph.saved_tensors_hooks`). What is decided here is
where each *storage* waits, as several saved tensors may be views of one:

* on the device, while all that waits there fits into the budget;
* else in the host's memory. From the first storage that does not fit, a quarter of the budget (more
  where storages are large) is left to copies on their way: out while the sampler goes on, back
  shortly before backward needs them, which is in the reverse order of packing.

On CUDA the host's memory is pinned, and the copies have streams of their own. On a CPU it would be
the same memory, so there it is a mapping of a temporary file without a name, whose pages the
system may write to the disk: what leaves is the process's own (anonymous) memory.

Gradients are those of graphs left alone, bit by bit: a storage comes back with the same bytes, and
views of one storage as views of one storage. Weights and buffers are neither copied nor counted,
nor are the unsharded parameters of FSDP2, whose memory comes and goes by itself. Of a checkpointed
block its inputs are kept like any other saved tensor; what its recomputation saves is not.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from .copies import Copies, Event, Host, Pool, copies_for
from .errors import LeanError

WINDOW = 4
"""One part in this many of the budget is for copies on their way, once not everything fits."""

NODE = 6
"""That part holds so many of the largest storage at least: what a node of the backward reads at
once. Attention saves five tensors: queries, keys, values, what it returns and the sums."""


def _no_one() -> None:
    return None


class Version:
    """Whether a tensor has been modified in place; holds its counter and not its storage."""

    __slots__ = ("at", "probe")

    def __init__(self, t: Tensor, nothing: Tensor) -> None:
        self.probe = t.detach()  # shares the version counter
        self.probe.data = nothing  # which stays when the storage goes
        self.at = t._version

    @property
    def changed(self) -> bool:
        return self.probe._version != self.at


@dataclass(slots=True, eq=False, weakref_slot=True)
class Stored:
    """A storage that autograd saved: on the device (`data`, its bytes), on the host, or both.

    `source` keeps the storage's address from being another's; `before` leads to what was sent to
    the host before it; `waited` says that its reader waited for the copy back (`event`).
    """

    number: int
    num_bytes: int
    source: StorageWeakRef
    version: Version
    notes: Notes
    data: Tensor | None
    host: Host | None = None
    event: Event | None = None
    waited: bool = True
    before: Callable[[], Stored | None] = _no_one

    def __del__(self) -> None:
        if self.data is not None:
            self.notes.gone.append(self.num_bytes)
        if self.host is not None:
            if not self.waited and self.event is not None and self.data is not None:
                self.notes.unread.append((self.event, self.data))
            self.notes.pool.give(self.host)


@dataclass(slots=True, eq=False)
class Notes:
    """What storages leave when they go, at any moment and in any thread: each note is atomic."""

    pool: Pool
    gone: deque[int] = field(default_factory=deque)
    unread: deque[tuple[Event, Tensor]] = field(default_factory=deque)


class View(NamedTuple):
    """A saved tensor: where it is in its storage, and its version."""

    stored: Stored
    version: Version
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    conj: bool
    neg: bool

    def over(self, data: Tensor) -> Tensor:
        """The tensor again, over the bytes of its storage."""
        t = torch.empty(0, dtype=self.dtype, device=data.device)
        t.set_(data.untyped_storage(), self.offset, self.shape, self.stride)
        if self.conj:
            t = t.conj()
        return torch._neg_view(t) if self.neg else t


class Shared(NamedTuple):
    """A saved tensor that is there anyway."""

    tensor: Tensor
    version: int


class Offload:
    """While it is on (`with offload:`), what autograd saves is kept within `budget` bytes.

    `modules` are those whose weights and buffers are there anyway. Without a budget everything
    stays and is counted. `peak_bytes` is the most that waited on the device since `begin`, copies
    on their way included, `offloaded_bytes` what went to the host. Bytes return to the budget when
    a backward has used them or a graph is dropped.

    A backward that needs more at once than is left of the budget gets it: the peak tells.
    Raises LeanError when a CPU's temporary file finds no room, and RuntimeError, as autograd does,
    when a tensor was modified in place after it was saved.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        budget: int | None,
        *,
        copies: Callable[[torch.device], Copies] | None = None,
    ) -> None:
        self.modules, self.budget = list(modules), budget
        self.window = self._largest = 0
        self._open: list[ExitStack] = []
        self._lock = threading.RLock()  # a backward has threads of its own
        self.device = self._find_device()
        self._copies = (copies or copies_for)(self.device)
        self._notes = Notes(Pool(self._copies.memory))
        self._nothing = torch.empty(0, device=self.device)
        self._flights: deque[tuple[Event, Tensor]] = deque()
        self._flying = self._resident = self._number = 0
        self.begin()

    def begin(self) -> None:
        """Count from now; what still waits of an earlier update stays and is counted."""
        self._known: weakref.WeakValueDictionary[int, Stored] = weakref.WeakValueDictionary()
        self._kept: list[weakref.ref[Stored]] = []
        self._alive: dict[int, torch.UntypedStorage] = {}
        self._limit, self._full = self.budget, False
        self._ahead: list[weakref.ref[Stored]] = []
        self._last: Callable[[], Stored | None] = _no_one
        self._front: Callable[[], Stored | None] = _no_one
        self._lowest = self.offloaded_bytes = self.peak_bytes = 0
        self._note_peak()

    def cut(self) -> None:
        """What follows is another graph: the backward of one does not bring back the other's."""
        self._last = _no_one

    def __enter__(self) -> Offload:
        if (device := self._find_device()) != self.device:
            raise LeanError(
                f"The network was on {self.device} when its activations got a budget, and is on "
                f"{device} now: make the schedule after moving it."
            )
        opened = ExitStack()
        for module in self.modules:  # every time: an adapter may have been added
            self._spare(module)
            for part in module.modules():
                if isinstance(part, FSDPModule):  # its own hook, which unshards, comes first
                    handle = part.register_forward_pre_hook(self._spare)
                    opened.callback(handle.remove)
        hooks: Any = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        opened.enter_context(hooks)
        self._open.append(opened)
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.pop().close()
        if not self._open:
            self._alive.clear()

    def _spare(self, module: nn.Module, *_: object) -> None:
        """Leave a module's weights and buffers alone: they are there anyway."""
        for t in (*module.parameters(), *module.buffers()):
            if not isinstance(t, DTensor):  # sharded: no graph saves it
                storage = t.untyped_storage()
                self._alive[storage._cdata] = storage

    def _find_device(self) -> torch.device:
        return next(p.device for m in self.modules for p in m.parameters())

    @property
    def resident_bytes(self) -> int:
        """Bytes that wait on the device now, those on their way from it included."""
        return self._waiting() + self._flying

    def _waiting(self) -> int:
        while self._notes.gone:
            self._resident -= self._notes.gone.popleft()
        return self._resident

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes)

    # -- forward -----------------------------------------------------------------------------------

    def _pack(self, t: Tensor) -> View | Shared:
        with self._lock:
            storage = self._storage_of(t)
            if storage is None:  # detached: a node that held its own output would never go
                return Shared(t.detach(), t._version)
            version = Version(t, self._nothing)
            stored = self._known.get(storage._cdata)
            if stored is None or stored.version.changed:
                self._number += 1
                source: Any = StorageWeakRef
                data = torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage)
                stored = Stored(
                    self._number, len(data), source(storage), version, self._notes, data
                )
                self._known[storage._cdata] = stored
                self._place(stored)
            flags = t.is_conj(), t.is_neg()
            offset = int(t.storage_offset())
            return View(stored, version, t.dtype, offset, t.shape, t.stride(), *flags)

    def _storage_of(self, t: Tensor) -> torch.UntypedStorage | None:
        """The storage a saved tensor keeps alive; None where it does not, or is not a plain one."""
        if type(t) not in (Tensor, nn.Parameter) or t.device != self.device:
            return None
        if t.layout is not torch.strided or t.is_quantized or t.is_nested:
            return None
        storage = t.untyped_storage()
        return None if storage._cdata in self._alive or not storage.nbytes() else storage

    def _place(self, stored: Stored) -> None:
        """Keep a new storage, or send it to the host."""
        self._land()
        self._resident += stored.num_bytes
        self._largest = max(self._largest, stored.num_bytes)
        if self.budget is None or self._limit is None:
            pass
        elif self._waiting() > self._limit:
            if not self._full:
                self._full = True
                part = max(self.budget // WINDOW, NODE * self._largest)
                self.window = min(self.budget, part)
                self._limit = self.budget - self.window
                self._make_room(stored.num_bytes)
            self._send(stored)
        elif not self._full:
            self._kept.append(weakref.ref(stored))
        self._note_peak()

    def _make_room(self, but: int) -> None:
        """Send away what was kept last, until the rest is within the limit; the new one aside."""
        assert self._limit is not None
        excess, late = self._waiting() - but - self._limit, []
        while excess > 0 and self._kept:
            stored = self._kept.pop()()
            if stored is not None:
                late.append(stored)
                excess -= stored.num_bytes
        self._kept.clear()
        for stored in reversed(late):  # in the order of packing
            self._send(stored)

    def _send(self, stored: Stored) -> None:
        """To the host; the source is held until the copy has ended, or the device waits for it."""
        num_bytes, source = stored.num_bytes, stored.data
        assert source is not None
        host = self._notes.pool.take(num_bytes)
        while self._flights and self._flying + num_bytes > self.window:
            self._land(wait=True)
        self._flights.append((self._copies.out(source, host), source))
        stored.host, stored.data = host, None
        self._resident -= num_bytes
        self._flying += num_bytes
        self.offloaded_bytes += num_bytes
        stored.before, self._last = self._last, weakref.ref(stored)
        self._land(wait=num_bytes > self.window)

    def _land(self, *, wait: bool = False) -> None:
        """Let go of what has been copied; with `wait`, of the oldest copy in any case."""
        while self._flights and (wait or self._flights[0][0].query()):
            event, source = self._flights.popleft()
            if wait:
                self._copies.wait(event)
            self._flying -= source.numel()
            wait = False
        while self._notes.unread and self._notes.unread[0][0].query():
            self._notes.unread.popleft()

    # -- backward ----------------------------------------------------------------------------------

    def _unpack(self, saved: View | Shared) -> Tensor:
        with self._lock:
            if isinstance(saved, Shared):
                _require(saved.tensor._version == saved.version, saved.tensor.shape)
                return saved.tensor
            _require(not saved.version.changed, saved.shape)
            stored = saved.stored
            if stored.host is not None:
                self._land()
                if stored.data is None:
                    self._make_way(stored.num_bytes)
                    self._fetch(stored)
                assert stored.event is not None
                self._copies.wait(stored.event)
                stored.waited = True
                self._prefetch(stored)
            assert stored.data is not None
            return saved.over(stored.data)

    def _fetch(self, stored: Stored) -> None:
        assert stored.host is not None
        stored.data, stored.event = self._copies.back(stored.host, stored.num_bytes)
        stored.waited = False
        self._resident += stored.num_bytes
        self._note_peak()

    def _make_way(self, num_bytes: int) -> None:
        """Let go of what was brought back last and not read yet: the host has it still."""
        assert self.budget is not None
        while self._ahead and self.resident_bytes + num_bytes > self.budget:
            stored = self._ahead.pop()()
            if stored is not None and stored.event is not None and not stored.waited:
                self._copies.wait(stored.event)
                stored.data, stored.waited = None, True
                self._resident -= stored.num_bytes
                self._front = _no_one

    def _prefetch(self, stored: Stored) -> None:
        """Bring back what was packed before, as far as the budget goes: backward needs it next."""
        assert self.budget is not None
        front = self._front()
        if front is None or front.number > stored.number or stored.number > self._lowest:
            front = stored  # another graph, or an order of its own
        self._lowest = stored.number
        while (following := front.before()) is not None:
            if following.data is None:
                if self.resident_bytes + following.num_bytes > self.budget:
                    break
                self._fetch(following)
                self._ahead.append(weakref.ref(following))
            front = following
        self._front = weakref.ref(front)


def _require(unchanged: bool, shape: torch.Size) -> None:
    if not unchanged:
        raise RuntimeError(
            "One of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of shape {tuple(shape)}, after it was saved for backward."
        )
