"""A process that calls rewards: they share no interpreter lock, and one that hangs can be killed.

Pictures go there as bytes, their prompts and metadata pickled; what comes back is JSON, a list of
numbers or an error's text, so that nothing a reward makes is ever unpickled here.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor

from .errors import LeanError, RewardError, UnavailableError
from .rewards import call_reward, load_reward, sharing
from .settings import Reward as Settings
from .workers import GRACE_S, Job, LostError

LONGEST = 1 << 26
"""Bytes of an answer: far more than the scores of any batch."""


class ProcessWorker:
    """Calls rewards in a process of its own, which loads them by their names when it starts.

    `timeout` is that of calls: a reward on a server frees its connection after twice as long.
    """

    def __init__(self, names: Sequence[str | Settings], timeout: float | None) -> None:
        spawn = multiprocessing.get_context("spawn")  # a fork of a process with threads may lock up
        self._pipe, theirs = spawn.Pipe()
        patience = None if timeout is None else 2 * timeout
        arguments = theirs, list(names), patience, torch.get_num_threads()
        self._process = spawn.Process(target=_work, args=arguments, daemon=True, name="reward")
        self._process.start()
        theirs.close()  # so that the end of the process is the end of the pipe
        self._there = -1

    def wait(self) -> None:
        """Return when the rewards are loaded; raises LeanError if one cannot be."""
        try:
            self._answer(None)
        except LostError as error:
            raise LeanError(
                f"rewards cannot be loaded in a process (scoring.processes): {error}. What it "
                'printed is above; a script that starts it needs `if __name__ == "__main__":`.'
            ) from error

    def call(self, name: str, job: Job, timeout: float | None) -> Tensor:
        """As `Worker.call`; the process of a call that takes longer is killed by `end`."""
        try:
            if job.number != self._there:  # pictures travel once a job, not once a reward
                self._pipe.send((tuple(job.images.shape), job.prompts, job.metadata))
                pixels = job.images.contiguous().numpy()
                self._pipe.send_bytes(pixels.data.cast("B"))
                self._there = job.number
            self._pipe.send(name)
        except OSError:
            raise LostError(self._fate()) from None
        except Exception as error:  # pickling runs code of whatever the metadata holds
            said = f"{type(error).__name__}: {error}"
            raise RewardError(f"metadata cannot be given to a process: {said}.") from error
        scores = self._answer(timeout)["scores"]
        return torch.tensor(scores, dtype=torch.float64)

    def end(self, *, kindly: bool) -> None:
        """End the process; not `kindly`: kill it."""
        if kindly:
            self._pipe.close()
            self._process.join(GRACE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(GRACE_S)  # or it stays in the system's table

    def _answer(self, timeout: float | None) -> dict[str, Any]:
        """The next answer; raises the error it tells of."""
        ready = wait([self._pipe, self._process.sentinel], timeout)
        if not ready:
            raise LostError(f"no answer within {timeout:g} s (scoring.timeout)")
        try:
            if self._pipe not in ready and not self._pipe.poll():
                raise EOFError
            answer: dict[str, Any] = json.loads(self._pipe.recv_bytes(LONGEST))
        except (EOFError, OSError):
            raise LostError(self._fate()) from None
        kinds = {"bug": RewardError, "unavailable": UnavailableError, "load": LeanError}
        for kind, error in kinds.items():
            if kind in answer:
                raise error(answer[kind])
        return answer

    def _fate(self) -> str:
        """How the process has ended, in words."""
        self._process.join(GRACE_S)
        code, pid = self._process.exitcode, self._process.pid
        if code is None:
            return f"process {pid} no longer answers"
        if code >= 0:
            return f"process {pid} ended with exit code {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        why = ", as the system does when memory runs out" if name == "SIGKILL" else ""
        return f"process {pid} was ended by {name}{why}"


def _work(
    pipe: Connection, names: list[str | Settings], patience: float | None, threads: int
) -> None:
    """What the process does: load the rewards, then call them until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the trainer ends this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_leave_with_trainer, daemon=True).start()
    torch.set_num_threads(threads)  # sums are bitwise the same only for one number of threads
    try:
        rewards = {
            name if isinstance(name, str) else name.name: load_reward(name, patience)
            for name in names
        }
    except LeanError as error:
        _send(pipe, {"load": str(error)})
        return
    _send(pipe, {})
    job: Job | None = None
    while True:
        try:
            message = pipe.recv()
            if isinstance(message, tuple):
                shape, prompts, metadata = message
                images = torch.empty(shape, dtype=torch.float32)
                pipe.recv_bytes_into(images.numpy().data.cast("B"))
                job = Job(images, prompts, metadata)
                continue
        except EOFError:
            return
        assert job is not None
        _send(pipe, _called(message, rewards[message], job))


def _called(name: str, reward: Any, job: Job) -> dict[str, Any]:
    try:
        with sharing(job.readings):
            scores = call_reward(name, reward, job.images, job.prompts, job.metadata)
    except UnavailableError as error:
        return {"unavailable": str(error)}
    except RewardError as error:
        return {"bug": str(error)}
    return {"scores": scores.tolist()}


def _send(pipe: Connection, answer: dict[str, Any]) -> None:
    try:
        pipe.send_bytes(json.dumps(answer).encode())
    except OSError:  # the trainer has ended
        os._exit(1)


def _leave_with_trainer() -> None:
    """End this process when its parent has, even by SIGKILL and during a call."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
