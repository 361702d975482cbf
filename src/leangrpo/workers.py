"""What calls a reward and may be given up: the common form, and a thread that does it.

The thread is a daemon: a reward that never returns keeps no interpreter from ending, which a
`ThreadPoolExecutor` would, as it joins its threads at exit.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from queue import Empty, SimpleQueue
from typing import Protocol

from torch import Tensor

from .errors import UnavailableError
from .rewards import Metadata, Readings, Reward, call_reward, sharing

_numbers = count()

GRACE_S = 5.0
"""Seconds that what is idle has to end by itself."""


@dataclass(frozen=True, slots=True)
class Job:
    """B samples to be scored; `readings` is what the `ocr` rewards have read of them already."""

    images: Tensor
    prompts: list[str]
    metadata: list[Metadata]
    readings: Readings = field(default_factory=dict)
    number: int = field(default_factory=lambda: next(_numbers))


class LostError(UnavailableError):
    """A call has hung, or its process has died: the worker is of no more use."""


class Worker(Protocol):
    """What calls rewards, one at a time."""

    def wait(self) -> None:
        """Return when the rewards are loaded; raises LeanError if one cannot be."""

    def call(self, name: str, job: Job, timeout: float | None) -> Tensor:
        """As `call_reward`; raises LostError after `timeout` seconds or when it has died."""

    def end(self, *, kindly: bool) -> None:
        """End it; not `kindly`: at once, and a call in progress raises LostError."""


class ThreadWorker:
    """Calls rewards of this process in a thread of its own."""

    def __init__(self, rewards: Mapping[str, Reward]) -> None:
        self._calls: SimpleQueue[tuple[str, Job] | None] = SimpleQueue()
        self._answers: SimpleQueue[Tensor | BaseException] = SimpleQueue()
        queues = self._calls, self._answers
        self._thread = threading.Thread(
            target=_work, args=(dict(rewards), *queues), daemon=True, name="reward"
        )
        self._thread.start()

    def wait(self) -> None:
        """They are."""

    def call(self, name: str, job: Job, timeout: float | None) -> Tensor:
        """As `Worker.call`; a call that takes longer goes on, and nobody listens."""
        self._calls.put((name, job))
        try:
            answer = self._answers.get(timeout=timeout)
        except Empty:
            raise LostError(f"no answer within {timeout:g} s (scoring.timeout)") from None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def end(self, *, kindly: bool) -> None:
        """Let the thread end when its call returns, if it ever does."""
        self._calls.put(None)
        if kindly:  # inside torch at the interpreter's end, a thread would abort the process
            self._thread.join(GRACE_S)
        else:
            self._answers.put(LostError("scoring was ended"))


def _work(
    rewards: Mapping[str, Reward],
    calls: SimpleQueue[tuple[str, Job] | None],
    answers: SimpleQueue[Tensor | BaseException],
) -> None:
    while (item := calls.get()) is not None:
        name, job = item
        try:
            with sharing(job.readings):
                scores = call_reward(name, rewards[name], job.images, job.prompts, job.metadata)
        except BaseException as error:
            answers.put(error)
        else:
            answers.put(scores)
        del item, job  # while it waits for the next, it holds no pictures
