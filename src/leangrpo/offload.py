"""Kept graphs within a budget of bytes: activations that do not fit wait in the host's memory.

Between rollout and backward a graph is nothing but what autograd saved for it, and autograd lets
that be packed and unpacked (`torch.autograd.graph.saved_tensors_hooks`). What is decided here is
where each *storage* waits, as several saved tensors may be views of one:

* on the device, while all that waits there fits into the budget;
* else in the host's memory. From the first storage that does not fit, a quarter of the budget is
  left to copies on their way: out while the sampler goes on, back shortly before backward needs
  them, which is in the reverse order of packing.

On CUDA the host's memory is pinned, and the copies have streams of their own. On a CPU it would be
the same memory, so there it is a mapping of a temporary file without a name, whose pages the
system may write to the disk: what leaves is the process's own (anonymous) memory.

Gradients are those of graphs left alone, bit by bit: a storage comes back with the same bytes, and
views of one storage as views of one storage. Weights and buffers are neither copied nor counted,
nor are the unsharded parameters of FSDP2, whose memory comes and goes by itself.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from .errors import problem

GRAIN = 512
"""Bytes of the smallest block of CUDA's allocator: moving less frees nothing, so it stays."""

SLAB = 1 << 26
"""Bytes the host's memory is asked for at a time, at least; its buffers are cut from that."""

WINDOW = 4
"""One part in this many of the budget is for copies on their way, once not everything fits."""


class Event(Protocol):
    """The end of a copy."""

    def query(self) -> bool: ...


class Host:
    """A buffer on the host: its bytes `(n,)` uint8, and the last copy from or into them."""

    __slots__ = ("data", "last")

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.last: Event | None = None


class Copies(Protocol):
    """How bytes travel; all that differs between devices."""

    def memory(self, num_bytes: int) -> Tensor:
        """Fresh memory of the host `(num_bytes,)` uint8."""

    def out(self, source: Tensor, host: Host) -> Event:
        """Copy `source` `(n,)` uint8 to the host."""

    def back(self, host: Host, num_bytes: int) -> tuple[Tensor, Event]:
        """A copy `(num_bytes,)` uint8 on the device."""

    def wait(self, event: Event) -> None:
        """Let what the device does from now on come after a copy."""


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


class Stored:
    """A storage that autograd saved: on the device (`data`, its bytes), on the host, or both."""

    __slots__ = (
        "__weakref__",
        "before",
        "data",
        "event",
        "host",
        "num_bytes",
        "number",
        "owner",
        "source",
        "version",
        "waited",
    )

    def __init__(
        self, owner: Offload, storage: torch.UntypedStorage, version: Version, number: int
    ) -> None:
        self.owner, self.number, self.version = owner, number, version
        self.num_bytes = storage.nbytes()
        self.source = StorageWeakRef(storage)  # while it exists no other storage has this address
        self.data: Tensor | None = None
        self.host: Host | None = None
        self.event: Event | None = None
        self.waited = True
        self.before: Callable[[], Stored | None] = _no_one

    def __del__(self) -> None:
        """Any thread may collect this at any moment, so it only leaves notes, which is atomic."""
        if self.data is not None:
            self.owner.gone.append(self.num_bytes)
        if self.host is not None:
            if not self.waited and self.event is not None and self.data is not None:
                self.owner.unused.append((self.event, self.data))
            self.owner.pool.give(self.host)


class View:
    """A saved tensor: where it is in its storage, and its version."""

    __slots__ = ("conj", "dtype", "neg", "offset", "shape", "stored", "stride", "version")

    def __init__(self, t: Tensor, stored: Stored, version: Version) -> None:
        self.stored, self.version = stored, version
        self.dtype, self.shape, self.stride = t.dtype, t.shape, t.stride()
        self.offset, self.conj, self.neg = t.storage_offset(), t.is_conj(), t.is_neg()

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
        self.window = 0 if budget is None else budget // WINDOW
        self._make = copies or copies_for
        self._open: list[Any] = []
        self._lock = threading.RLock()  # a backward has threads of its own
        self._device: torch.device | None = None
        self.pool = Pool()
        self.gone: deque[int] = deque()
        self.unused: deque[tuple[Event, Tensor]] = deque()
        self._flights: deque[tuple[Event, Tensor]] = deque()
        self._flying = self._resident = self._number = 0
        self.begin()

    def begin(self) -> None:
        """Count from now; what still waits of an earlier update stays and is counted."""
        self._known: weakref.WeakValueDictionary[int, Stored] = weakref.WeakValueDictionary()
        self._kept: list[weakref.ref[Stored]] = []
        self._alive: dict[int, torch.UntypedStorage] = {}
        self._limit = self.budget
        self._last: Callable[[], Stored | None] = _no_one
        self._front: Callable[[], Stored | None] = _no_one
        self._lowest = self.offloaded_bytes = self.peak_bytes = 0
        self._note_peak()

    def __enter__(self) -> Offload:
        device = next(p.device for m in self.modules for p in m.parameters())
        if self._device != device:
            self._device, self._copies = device, self._make(device)
            self.pool = Pool(self._copies.memory)
            self._nothing = torch.empty(0, device=device)
        for module in self.modules:  # every time: an adapter may have been added
            for t in (*module.parameters(), *module.buffers()):
                storage = t.untyped_storage()
                self._alive[storage._cdata] = storage
        hooks: Any = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._open.append(hooks)
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.pop().__exit__(*exception)
        if not self._open:
            self._alive.clear()

    @property
    def resident_bytes(self) -> int:
        """Bytes that wait on the device now, those on their way from it included."""
        while self.gone:
            self._resident -= self.gone.popleft()
        return self._resident + self._flying

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
                stored = Stored(self, storage, version, self._number)
                self._number += 1
                self._known[storage._cdata] = stored
                self._place(
                    stored, torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage)
                )
            return View(t, stored, version)

    def _storage_of(self, t: Tensor) -> torch.UntypedStorage | None:
        """The storage a saved tensor keeps alive; None where it does not, or is not a plain one."""
        if type(t) not in (Tensor, nn.Parameter) or t.device != self._device:
            return None
        if t.layout is not torch.strided or t.is_quantized or t.is_nested:
            return None
        storage = t.untyped_storage()
        if isinstance(t if t._base is None else t._base, nn.Parameter):
            self._alive[storage._cdata] = storage  # such as FSDP2's unsharded ones
        return None if storage._cdata in self._alive or not storage.nbytes() else storage

    def _place(self, stored: Stored, data: Tensor) -> None:
        """Keep a new storage, or send it to the host."""
        self._land()
        stored.data = data
        self._resident += stored.num_bytes
        if self._limit is not None and self.resident_bytes > self._limit:
            if self._limit == self.budget:
                self._limit -= self.window
                self._make_room(stored.num_bytes)
            if stored.num_bytes >= GRAIN:
                self._send(stored)
        elif self._limit == self.budget:
            self._kept.append(weakref.ref(stored))
        self._note_peak()

    def _make_room(self, but: int) -> None:
        """Send away what was kept last, until the rest is within the limit; the new one aside."""
        assert self._limit is not None
        excess, late = self.resident_bytes - but - self._limit, []
        while excess > 0 and self._kept:
            stored = self._kept.pop()()
            if stored is not None and stored.num_bytes >= GRAIN:
                late.append(stored)
                excess -= stored.num_bytes
        self._kept.clear()
        for stored in reversed(late):  # in the order of packing
            self._send(stored)

    def _send(self, stored: Stored) -> None:
        """To the host; the source is held until the copy has ended, or the device waits for it."""
        source, stored.data = stored.data, None
        assert source is not None
        while self._flights and self._flying + stored.num_bytes > self.window:
            self._land(wait=True)
        stored.host = self.pool.take(stored.num_bytes)
        self._flights.append((self._copies.out(source, stored.host), source))
        self._resident -= stored.num_bytes
        self._flying += stored.num_bytes
        self.offloaded_bytes += stored.num_bytes
        stored.before, self._last = self._last, weakref.ref(stored)
        self._land(wait=stored.num_bytes > self.window)

    def _land(self, *, wait: bool = False) -> None:
        """Let go of what has been copied; with `wait`, of the oldest copy in any case."""
        while self._flights and (wait or self._flights[0][0].query()):
            event, source = self._flights.popleft()
            if wait:
                self._copies.wait(event)
            self._flying -= source.numel()
            wait = False
        while self.unused and self.unused[0][0].query():
            self.unused.popleft()

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
            front = following
        self._front = weakref.ref(front)


class Pool:
    """Buffers on the host, used again by size: only the first update asks for memory."""

    def __init__(self, memory: Callable[[int], Tensor] | None = None) -> None:
        self._memory = memory
        self._free: defaultdict[int, deque[Host]] = defaultdict(deque)
        self._slab: Tensor | None = None
        self.num_bytes = 0

    def take(self, num_bytes: int) -> Host:
        """A buffer of at least `num_bytes`; the one that was given back first."""
        size = -(-num_bytes // GRAIN) * GRAIN
        if free := self._free[size]:
            return free.popleft()
        if self._slab is None or len(self._slab) < size:
            assert self._memory is not None
            whole = 1 << (max(SLAB, 4 * size) - 1).bit_length()  # pinned memory comes in such sizes
            self._slab = self._memory(whole)
            self.num_bytes += whole
        buffer, self._slab = self._slab[:size], self._slab[size:]
        return Host(buffer)

    def give(self, host: Host) -> None:
        """Take a buffer back. Its last copy may still be on its way: the next one waits for it."""
        self._free[len(host.data)].append(host)


class Mapped:
    """Copies on a CPU, at once, into a mapping of a temporary file that has no name."""

    def memory(self, num_bytes: int) -> Tensor:
        """Raises LeanError when the disk is full: later, a page without room would be a signal."""
        with tempfile.TemporaryFile() as file:
            try:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            except OSError as error:
                rule = f"no {num_bytes / 1e6:.0f} MB for activations in {tempfile.gettempdir()}"
                remedy = "Make room, point TMPDIR elsewhere, or raise memory.activations."
                raise problem("memory.activations", error.strerror, rule, remedy) from error
            return torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)

    def out(self, source: Tensor, host: Host) -> Event:
        host.data[: len(source)].copy_(source)
        return _PAST

    def back(self, host: Host, num_bytes: int) -> tuple[Tensor, Event]:
        return host.data[:num_bytes].clone(), _PAST

    def wait(self, event: Event) -> None:
        pass


class Pinned:
    """Copies between a CUDA device and pinned memory, on a stream for each direction.

    `current_stream` is the one the network runs on; autograd runs a node's backward on the stream
    of its forward. Memory of the device is allocated and freed on that stream, so the order of its
    kernels decides when memory is used again, and no `record_stream` is needed:

    * out: the copy comes after what wrote the source. Until the copy has ended, or that stream
      waits for it, `Offload` holds the source.
    * back: the copy comes after what was queued when its memory was allocated, which may still be
      used by that. Whoever reads it waits for the copy; unread, `Offload` holds it until its end.
    * a buffer's next copy, in either direction, comes after its last one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._outwards, self._backwards = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def out(self, source: Tensor, host: Host) -> Event:
        return self._copy(self._outwards, host, host.data[: len(source)], source)

    def back(self, host: Host, num_bytes: int) -> tuple[Tensor, Event]:
        data = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return data, self._copy(self._backwards, host, data, host.data[:num_bytes])

    def wait(self, event: Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)

    def _copy(self, stream: Any, host: Host, to: Tensor, source: Tensor) -> Event:
        stream.wait_stream(torch.cuda.current_stream(self.device))
        if host.last is not None:
            stream.wait_event(host.last)
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
        host.last = event = stream.record_event()
        return event


def copies_for(device: torch.device) -> Copies:
    """Pinned memory and streams for CUDA; files for a CPU."""
    return Pinned(device) if device.type == "cuda" else Mapped()


class _Past:
    def query(self) -> bool:
        return True


_PAST = _Past()


def _no_one() -> None:
    return None


def _require(unchanged: bool, shape: torch.Size) -> None:
    if not unchanged:
        raise RuntimeError(
            "One of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of shape {tuple(shape)}, after it was saved for backward."
        )
