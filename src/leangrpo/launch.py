"""Several ranks of one machine without typing torchrun, and what ranks say when they fail.

torchrun's own agent starts them. What matters to a user is the first failure: a rank that ends
only because another one did says so in one line, and whoever started them names the first.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from .checks import check
from .config import Config
from .errors import LeanError, problem

FOLLOWED = 3
"""Exit code of a rank that ended because another one had."""

FROM_TORCH = (
    "gloo",
    "nccl",
    "processgroup",
    "c10d",
    "tcpstore",
    "pair.cc",
    "connection closed by peer",
    "connection reset by peer",
    "timed out waiting",
)
"""What a RuntimeError says that comes from a collective, and not from a model or a reward."""

STARTED = "LEANGRPO_NPROC"
"""In the environment of ranks that `launch` has started: how many they are."""

PATIENCE_S = 3600
"""Seconds that an interrupted update may take before it is killed; torchrun's own are 30."""


def launch(words: Sequence[str], nproc: int, folder: Path | None = None) -> int:
    """Run `leangrpo WORDS` on `nproc` ranks of this machine; returns the exit code.

    `folder` is the run's: what is said about a failure tells how to go on from it. An interrupt
    is handed on to the ranks once, to finish the update, and a second time, to stop.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    os.environ[STARTED] = str(nproc)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // nproc)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(PATIENCE_S))
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.CRITICAL)  # the agent's own account of what the ranks have said
    interrupts = 0

    def interrupt(number: int, _: Any) -> None:
        nonlocal interrupts
        interrupts += 1
        if interrupts <= 2:  # then the agent is waiting for the ranks to end, and must not be left
            raise SignalException("interrupted", signal.SIGINT)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with tempfile.TemporaryDirectory(prefix="leangrpo-") as errors:
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=nproc,
                run_id=f"leangrpo-{os.getpid()}",
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                local_addr="localhost",
                max_restarts=0,
                logs_specs=DefaultLogsSpecs(log_dir=errors),
                signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",
            )
            launch_agent(config, sys.executable, ["-m", "leangrpo", *words])
    except SignalException:
        if folder is not None and not (folder / "summary.json").exists():
            _say(f"stopped. {_how_to_go_on(folder, nproc)}")
        return 130
    except ChildFailedError as error:
        rank, failure = first_failure(error.failures)
        if failure.exitcode != 130:
            _say(f"error: {_ended(rank, failure.exitcode)}. {_how_to_go_on(folder, nproc)}")
        return failure.exitcode if failure.exitcode in (2, 130) else 1
    finally:
        # Once interrupted it is over: another Ctrl-C while Python exits would change the exit code.
        signal.signal(signal.SIGINT, signal.SIG_IGN if interrupts else before)
        del os.environ[STARTED]
        logging.disable(logging.NOTSET)
    return 0


def die_with_launcher() -> None:
    """Let a rank that `launch` has started end when the launcher is killed (Linux)."""
    if is_started() and sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def only_alone(command: str) -> None:
    """Refuse a command that works in one process, where there are several ranks."""
    if rank_of_several() is not None:
        raise LeanError(f"`leangrpo {command}` works in one process: start it without torchrun.")


def check_for(config: Config, nproc: int, *, resume: bool = False) -> None:
    """Refuse what would fail on `nproc` ranks of this machine, before any is started."""
    if nproc < 1:
        raise problem("--nproc", nproc, "it must be at least 1")
    if "RANK" in os.environ:
        raise problem("--nproc", nproc, "this is a rank already", "Leave it out under torchrun.")
    before = {name: os.environ.get(name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    os.environ.update(dict.fromkeys(before, str(nproc)))
    try:
        check(config, resume=resume)
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value
    import torch

    if torch.cuda.is_available() and nproc > torch.cuda.device_count():
        raise problem("--nproc", nproc, f"there are {torch.cuda.device_count()} GPUs here")


def expect_interrupts() -> None:
    """Let Ctrl-C end a rank at once until it trains.

    Python's own handler waits for a call to return, and a rank that waits for one that has ended
    would be there until parallel.timeout.
    """
    if rank_of_several() is not None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def complain(error: Exception) -> int:
    """Print what ended this process, once; returns its exit code.

    Of several ranks each says which it is. Alone, what is no LeanError is raised again.
    """
    rank = rank_of_several()
    if rank is None:
        if not isinstance(error, LeanError):
            raise error
        _say(f"error: {error}")
        return 2
    # From here on the launcher's SIGTERM, sent as another rank has ended, would hide how this did.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    reason = because_of_another(error)
    if reason is not None:
        _say(f"rank {rank}: stopped, because {reason}")
        return FOLLOWED
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)  # for the time, and for torchrun's own summary
    if isinstance(error, LeanError):
        _say(f"error: rank {rank}: {error}")
        return 2
    trace = "".join(traceback.format_exception(type(error), error, _from_the_command(error)))
    _say(f"error: rank {rank}: {type(error).__name__}: {error}\n{trace.rstrip()}")
    return 1


def because_of_another(error: BaseException) -> str | None:
    """Why a rank stops that another one has left alone; None for an error of its own."""
    from torch.distributed import DistError

    if not isinstance(error, RuntimeError | DistError):
        return None
    text = str(error).lower()
    if not isinstance(error, DistError) and not any(words in text for words in FROM_TORCH):
        return None
    if any(words in text for words in ("timed out", "timeout")):
        return "another rank did not answer within parallel.timeout"
    left = ("closed by peer", "reset by peer", "broken pipe", "remote process exited", "aborted")
    return "another rank did" if any(words in text for words in left) else None


def first_failure(failures: Mapping[int, Any]) -> tuple[int, Any]:
    """Rank and failure (torch's ProcessFailure) of the one that brought the others down."""

    def place(rank: int) -> tuple[bool, int, bool, int]:
        failure = failures[rank]
        follows = failure.exitcode in (FOLLOWED, -signal.SIGTERM)
        return follows, failure.timestamp, failure.exitcode > 0, rank  # whole seconds: signals win

    rank = min(failures, key=place)
    return rank, failures[rank]


def rank_of_several() -> int | None:
    """This process's rank, None where there is only one."""
    return int(os.environ.get("RANK", 0)) if int(os.environ.get("WORLD_SIZE", 1)) > 1 else None


def resume_command(folder: Path) -> str:
    """What to type to go on with a run, in the way it was started."""
    words = f"train {shlex.quote(str(folder))} --resume"
    size, local = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if started := os.environ.get(STARTED):
        return f"leangrpo {words} --nproc {started}"
    if size == "1":
        return f"leangrpo {words}"
    if size == local:
        return f"torchrun --nproc-per-node {size} -m leangrpo {words}"
    return f"torchrun (as before) -m leangrpo {words}"


def is_started() -> bool:
    """Whether `launch` has started this rank, and will have the last word."""
    return STARTED in os.environ


def cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _from_the_command(error: Exception) -> TracebackType | None:
    """The traceback from the last frame of the command line on: what is above it is its parser."""
    start = here = error.__traceback__
    while here is not None:
        if here.tb_frame.f_code.co_filename == str(Path(__file__).with_name("cli.py")):
            start = here
        here = here.tb_next
    return start


def _ended(rank: int, code: int) -> str:
    if code >= 0:
        return f"rank {rank} failed first, with exit code {code}; what it said is above"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"rank {rank} was killed by {name}, and the others stopped"


def _how_to_go_on(folder: Path | None, nproc: int) -> str:
    if folder is None or not (folder / "config.yaml").exists():
        return "Nothing was written."
    saved = [int(p.name) for p in (folder / "checkpoints").glob("*") if p.name.isdecimal()]
    return f"{max(saved, default=0)} updates are saved; go on with: {resume_command(folder)}"


def _say(text: str) -> None:
    """In one piece: several processes write to the same terminal."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
