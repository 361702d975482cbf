"""Copies between a device and its host's memory, and the buffers they go to."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from .errors import problem

GRAIN = 512
"""Bytes of the smallest block of CUDA's allocator; sizes of buffers are multiples of it."""

SLAB = 1 << 26
"""Bytes the host's memory is asked for at a time, at least; buffers are cut from that."""


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


class Pool:
    """Buffers on the host, used again by size: only the first update asks for memory."""

    def __init__(self, memory: Callable[[int], Tensor]) -> None:
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
            file.truncate(num_bytes)
            try:
                if hasattr(os, "posix_fallocate"):  # not on macOS
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
        stream: Any = torch.cuda.Stream
        self._outwards, self._backwards = stream(device), stream(device)

    def memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def out(self, source: Tensor, host: Host) -> Event:
        return self._copy(self._outwards, host, host.data[: len(source)], source)

    def back(self, host: Host, num_bytes: int) -> tuple[Tensor, Event]:
        data = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return data, self._copy(self._backwards, host, data, host.data[:num_bytes])

    def wait(self, event: Event) -> None:
        stream: Any = torch.cuda.current_stream(self.device)
        stream.wait_event(event)

    def _copy(self, stream: Any, host: Host, to: Tensor, source: Tensor) -> Event:
        stream.wait_stream(torch.cuda.current_stream(self.device))
        if host.last is not None:
            stream.wait_event(host.last)
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
        event: Event = stream.record_event()
        host.last = event
        return event


def copies_for(device: torch.device) -> Copies:
    """Pinned memory and streams for CUDA; files for a CPU."""
    return Pinned(device) if device.type == "cuda" else Mapped()


class _Past:
    def query(self) -> bool:
        return True


_PAST = _Past()
