"""Ctrl-C and SIGTERM: the first asks for the end of the update, the second ends it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .parallel import World

SAME_REQUEST_S = 2.0
"""Seconds within which two signals to a rank are one request to stop."""


@contextmanager
def stop_requests(world: World) -> Iterator[threading.Event]:
    """Make the first Ctrl-C (or SIGTERM) a request to finish the update; a second Ctrl-C stops.

    With several ranks a batch system and torchrun may both pass on the same request: it is a second
    one after `SAME_REQUEST_S`. When this rank ends for an interrupt or an error, torchrun may have
    seen another one end so and send SIGTERM: it is ignored, as this one is about to end itself.
    """
    asked = threading.Event()
    since, ending = 0.0, True
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def handle(number: int, _: Any) -> None:
        nonlocal since
        if asked.is_set():
            if world.size == 1 or time.monotonic() - since > SAME_REQUEST_S:
                raise KeyboardInterrupt
            return
        asked.set()
        since = time.monotonic()
        # torchrun also sends SIGTERM when another rank has failed, and then nothing is saved
        if world.is_main and (world.size == 1 or number == signal.SIGINT):
            text = "\nFinishing this update, then saving. Once more to stop at once."
            print(text, flush=True)

    before = {n: signal.signal(n, handle) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
        ending = asked.is_set()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if ending and world.size > 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
