"""Workers and their work: what is to be scored goes to the next free one, and is tried again.

Each worker has a driver, a thread that takes one piece of work after another and replaces the
worker where a call has hung or its process has died. Drivers are daemons, as workers are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from .catalogue import REMOTE
from .errors import LeanError, RewardError, UnavailableError, problem
from .processes import ProcessWorker
from .remote import RemoteReward, is_url
from .rewards import Reward, load_reward
from .settings import Reward as RewardSettings
from .settings import Scoring
from .workers import GRACE_S, Job, LostError, ThreadWorker, Worker

T = TypeVar("T")

Call: TypeAlias = Callable[[str, Job], Tensor]
"""`(name, job) -> scores`: one reward's unweighted scores `(B,)` float64, or RewardError."""


class Crew:
    """So many workers as `scoring.workers` says, with these rewards loaded.

    A function is a reward of its own name; processes take only names, as each loads its own.
    Raises LeanError for a reward that cannot be loaded, and a server that does not answer.
    """

    def __init__(self, rewards: Sequence[str | RewardSettings | Reward], scoring: Scoring) -> None:
        self.scoring = scoring
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._work: SimpleQueue[tuple[Future[Any], Callable[[Call], Any]] | None] = SimpleQueue()
        named = {name_of(reward): reward for reward in rewards}
        for url in filter(None, map(_server_of, named.values())):
            RemoteReward(url).check()
        if scoring.processes:
            specs = [r for r in named.values() if isinstance(r, str | RewardSettings)]
            own = [name for name, reward in named.items() if reward not in specs]
            if own:
                rule = f"`{own[0]}` is given as an object, and a process loads a reward by its name"
                raise problem("scoring.processes", True, rule, "Name it as module:function.")
            self._make: Callable[[], Worker] = partial(ProcessWorker, specs, scoring.timeout)
        else:
            patience = None if scoring.timeout is None else 2 * scoring.timeout
            loaded = {
                name: load_reward(r, patience) if isinstance(r, str | RewardSettings) else r
                for name, r in named.items()
            }
            self._make = partial(ThreadWorker, loaded)
        self._workers: list[Worker | None] = [self._make() for _ in range(scoring.workers)]
        self._drivers: list[threading.Thread] = []
        try:
            for worker in filter(None, self._workers):
                worker.wait()
        except BaseException:
            self.close(wait=False)
            raise
        self._drivers = [
            threading.Thread(target=self._drive, args=(n,), daemon=True, name=f"scoring {n}")
            for n in range(scoring.workers)
        ]
        for driver in self._drivers:
            driver.start()

    def submit(self, task: Callable[[Call], T]) -> Future[T]:
        """Run `task` when a worker is free; what it is given calls a reward, again if need be.

        Raises RuntimeError after `close`.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._closing.is_set():
                raise RuntimeError("scoring was ended: it takes no more pictures.")
            self._work.put((future, task))
        return future

    def close(self, *, wait: bool = True) -> None:
        """End the workers: what waits is cancelled, and with `wait` what is scored is finished.

        Without, no call is waited for, and futures of what was being scored raise RewardError.
        """
        with self._lock:
            self._closing.set()
            try:
                while (item := self._work.get_nowait()) is not None:
                    item[0].cancel()
            except Empty:
                pass
            for _ in self._drivers:
                self._work.put(None)
            if not wait:
                for worker in filter(None, self._workers):
                    worker.end(kindly=False)
        for driver in self._drivers:
            driver.join(None if wait else GRACE_S)

    def _drive(self, number: int) -> None:
        while (item := self._work.get()) is not None:
            future, task = item
            if future.set_running_or_notify_cancel():
                try:
                    result = task(partial(self._call, number))
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            del item, future, task  # while it waits for the next, it holds no pictures
        worker = self._workers[number]
        if worker is not None:
            worker.end(kindly=True)

    def _call(self, number: int, name: str, job: Job) -> Tensor:
        """Call a reward until it answers, `scoring.retries` further times at most."""
        scoring, began = self.scoring, time.perf_counter()
        for attempt in range(scoring.retries + 1):
            if attempt:
                self._closing.wait(scoring.pause(attempt))
            try:
                return self._worker(number).call(name, job, scoring.timeout)
            except UnavailableError as error:
                failure = error
                if isinstance(error, LostError):
                    self._give_up(number)
            if self._closing.is_set():
                raise RewardError(f"reward `{name}`: scoring was ended.") from failure
        tries = scoring.retries + 1
        raise UnavailableError(
            f"reward `{name}` was tried {'once' if tries == 1 else f'{tries} times'} in "
            f"{time.perf_counter() - began:.1f} s for {_shown(job.prompts)}; the last time: "
            f"{failure}. Mend it, or raise scoring.timeout or scoring.retries; no update that is "
            "saved is lost, and --resume goes on from there."
        ) from failure

    def _worker(self, number: int) -> Worker:
        """A driver's worker, a new one if the last was given up; raises RewardError if it fails."""
        worker = self._workers[number]
        if worker is None:
            try:
                worker = self._make()
                worker.wait()
            except LeanError as error:
                raise RewardError(f"a worker cannot be replaced: {error}") from error
            with self._lock:
                self._workers[number] = worker
                if self._closing.is_set():
                    worker.end(kindly=False)
        return worker

    def _give_up(self, number: int) -> None:
        with self._lock:
            worker, self._workers[number] = self._workers[number], None
        if worker is not None:
            worker.end(kindly=False)


def name_of(reward: str | RewardSettings | Reward) -> str:
    """A reward's name: its own, or that of its class."""
    if isinstance(reward, str):
        return reward
    if isinstance(reward, RewardSettings):
        return reward.name
    return str(getattr(reward, "__name__", type(reward).__name__))


def _server_of(reward: str | RewardSettings | Reward) -> str | None:
    """The URL of a reward's server of this project's form, if it has one."""
    if isinstance(reward, RewardSettings) and reward.url is not None:
        return reward.url if reward.name in REMOTE else None
    name = name_of(reward)
    return name if is_url(name) else None


def _shown(prompts: Sequence[str]) -> str:
    """A few prompts by their text, the others by their number."""
    some = ", ".join(repr(p) for p in dict.fromkeys(prompts[:3]))
    more = f" and {len(prompts) - 3} more" if len(prompts) > 3 else ""
    return f"the prompt{'s' if len(prompts) > 1 else ''} {some}{more}"
