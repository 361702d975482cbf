"""Where the time of an update goes: stages that nest, each booked without its inner ones."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Seconds by stage since the last `reset`.

    On a CUDA device the marks are events on its stream, resolved by `read` with one wait; nothing
    waits in between.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._cuda = device is not None and torch.device(device).type == "cuda"
        self.reset()

    def reset(self) -> None:
        """Forget all times; stages that are open go on from now."""
        self._spans: list[tuple[str, object, object]] = []
        self._open: list[str] = getattr(self, "_open", [])
        self._since = self.mark()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Book the time inside under `name`; a stage opened inside takes its part out of it."""
        self._book()
        self._open.append(name)
        try:
            yield
        finally:
            self._book()
            self._open.pop()

    def switch(self, name: str) -> None:
        """Book the rest of the innermost open stage under `name`; without one, do nothing."""
        if self._open:
            self._book()
            self._open[-1] = name

    def read(self) -> dict[str, float]:
        """Seconds of every stage; time outside all stages is `other`."""
        self._book()
        if self._cuda:
            torch.cuda.synchronize()
        times: dict[str, float] = {}
        for name, start, end in self._spans:
            times[name] = times.get(name, 0.0) + self.seconds(start, end)
        return times

    def _book(self) -> None:
        now = self.mark()
        self._spans.append((self._open[-1] if self._open else "other", self._since, now))
        self._since = now

    def mark(self) -> object:
        """This moment, for `seconds`."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    @staticmethod
    def seconds(start: object, end: object) -> float:
        """From one mark to another; on CUDA both must have been reached."""
        if isinstance(start, float) and isinstance(end, float):
            return end - start
        return float(start.elapsed_time(end)) / 1000  # type: ignore[attr-defined]
