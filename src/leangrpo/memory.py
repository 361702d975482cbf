"""The most memory that was held at once, measured, on a CPU as on an accelerator.

CUDA counts itself. A CPU's allocator tells the profiler of every allocation and release, which are
added up here in order; what a C library allocates by itself is not seen, and what was allocated
before the measurement is not missed when it is released.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._profiler import RecordScope

_profiler: Any = torch.autograd.profiler
"""Where torch keeps what its profiler is made of; it has no types."""

MARK = "leangrpo::mark"

ON_A_CPU = "DefaultCPUAllocator"
"""What torch's CPU allocator calls itself, in a plain RuntimeError."""


@dataclass(slots=True)
class Phase:
    """What happened from a mark to the next: bytes `held` when it began, as the difference to the
    start of the measurement, and `peak` the most that was held above that."""

    name: str
    held: int
    peak: int = 0


@dataclass(slots=True)
class Trace:
    """A measurement underway; its `phases` are complete once it has ended."""

    device: torch.device
    phases: list[Phase] = field(default_factory=list)
    _start: int = 0

    def mark(self, name: str) -> None:
        """End the phase underway and begin the next."""
        if self.device.type == "cuda":
            self._close()
            held = torch.cuda.memory_allocated(self.device) - self._start
            self.phases.append(Phase(name, held))
            return
        self.phases.append(Phase(name, 0))
        with torch.profiler.record_function(MARK):
            pass

    def begin(self) -> None:
        """Start measuring."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self._start = torch.cuda.memory_allocated(self.device)
        else:
            # Kineto greets at every start otherwise
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")
            _profile_memory()
        self.mark("start")

    def end(self) -> None:
        """Stop measuring, and know the phases."""
        if self.device.type == "cuda":
            self._close()
            return
        held, number = 0, -1
        events = _profiler._disable_profiler().events()
        for event in sorted(events, key=lambda e: e.start_ns()):
            name = event.name()
            if name == MARK:
                number += 1
                self.phases[number].held = held
            elif name == "[memory]" and number >= 0:
                held += event.nbytes()
                phase = self.phases[number]
                phase.peak = max(phase.peak, held - phase.held)

    def _close(self) -> None:
        if self.phases:
            last = self.phases[-1]
            most = torch.cuda.max_memory_allocated(self.device) - self._start
            last.peak = max(0, most - last.held)
        torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def peak(self) -> int:
        """The most that was held above what there was at the start."""
        return max(phase.held + phase.peak for phase in self.phases)


def _profile_memory() -> None:
    """Start torch's profiler on what the allocator tells and on marks, not on operators.

    `torch.profiler.profile` records every operator too, which took gigabytes and most of the time
    where an update of 31 million parameters was measured; its class has no way to say otherwise.
    """
    config = _profiler.profile(profile_memory=True).config(create_trace_id=True)
    activities = {torch.profiler.ProfilerActivity.CPU}
    _profiler._prepare_profiler(config, activities)
    _profiler._enable_profiler(config, activities, {RecordScope.USER_SCOPE})


@contextmanager
def peak_memory(device: torch.device | str = "cpu") -> Iterator[Trace]:
    """Measure what is held inside; the trace's `peak` and `phases` are there afterwards.

    On CUDA this resets the device's own peak counter. On a CPU only this thread is measured, and
    every allocation takes some microseconds more: no times should be taken inside.
    """
    trace = Trace(torch.device(device))
    trace.begin()
    try:
        yield trace
    finally:
        trace.end()


def storages(tensors: Any) -> dict[int, int]:
    """Bytes of the storages of tensors, each once, by address; of a DTensor its local part."""
    found: dict[int, int] = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        storage = local.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
    return found


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that an allocator found no room, on an accelerator or a CPU."""
    return isinstance(error, torch.OutOfMemoryError) or ON_A_CPU in str(error)
