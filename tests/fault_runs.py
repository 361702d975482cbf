"""Real training processes that start in a moment, for whoever is going to kill them.

They are forked from a process that has imported everything (`forkserver`), so that no time is spent
on it; what runs in them is `leangrpo.train`, as a user's does, with one process or several ranks.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

SETTINGS = (
    "rollout={prompts: 2, generations: 2, micro_batch: 1}",
    "sampling={steps: 3, height: 16, width: 16, call: {max_sequence_length: 16}}",
    "selection={rule: fraction, fraction: 1.0, steps: null}",
    "optimizer.lr=1e-3",
    "ema.decay=0.9",
    "checkpoint={every: 1, keep: 2}",
    "scoring={timeout: 2.0, retries: 1, backoff: 0.05}",
    "parallel.timeout=60",
)
TIMES = ("time", "memory", "reward_seconds")
"""What of a line of metrics may be another: seconds and bytes."""


def brightness(images: torch.Tensor, prompts: list[str], metadata: list[Any]) -> Any:
    """A reward that a file beside the model spoils: NaN, Inf, an exception, a wrong count."""
    scores = images.double().mean(dim=(1, 2, 3))
    mood = Path(os.environ.get("FAULTS_MOOD", "/nonexistent"))
    if not mood.is_file():
        return scores
    act = mood.read_text(encoding="utf-8")
    if act == "raise":
        raise RuntimeError("the reward's model is gone")
    if act == "count":
        return [*scores.tolist(), 0.0]
    if act == "text":
        return ["good"] * len(scores)
    return scores * (math.nan if act == "nan" else math.inf)


@dataclass
class Factory:
    """A folder with a tiny pipeline and prompts, and the processes that train in it."""

    root: Path
    context: Any = field(init=False)

    def __post_init__(self) -> None:
        import tiny

        self.root.mkdir(parents=True, exist_ok=True)
        tiny.save(tiny.tiny_sd3(), self.root / "sd3")
        (self.root / "prompts.txt").write_text("a cat\na dog\na cup\na car\n", encoding="utf-8")
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(
            [
                "leangrpo.train",
                "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3",
                "torch.utils.tensorboard",
                "fault_runs",
            ]
        )

    def settings(self, run: str, *more: str) -> list[str]:
        """Of a run in `root/run`; rewards are those of this module."""
        return [
            *SETTINGS,
            f"model.pipeline={self.root / 'sd3'}",
            f"prompts={{train: {self.root / 'prompts.txt'}, heldout: null}}",
            "rewards=[{name: 'fault_runs:brightness'}]",
            *more,
            f"run.dir={self.root / run}",
        ]

    def start(
        self,
        run: str,
        *more: str,
        ranks: int = 1,
        resume: bool | None = None,
        hook: str = "",
        mood: str = "",
    ) -> Ranks:
        """Begin a run, or go on with it where it has begun. `hook`: one of `HOOKS` is called first;
        `mood`: what the reward does (see `brightness`)."""
        if resume is None:
            resume = (self.root / run / "config.yaml").is_file()
        port = _free_port()
        folder = self.root / "said"
        folder.mkdir(exist_ok=True)
        said = [folder / f"{run}-{time.monotonic_ns()}-{rank}.txt" for rank in range(ranks)]
        processes = []
        for rank in range(ranks):
            environment = {
                "OMP_NUM_THREADS": "1",
                "FAULTS_MOOD": str(self.root / "mood") if mood else "",
            }
            if ranks > 1:
                environment |= {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                }
            arguments = self.settings(run, *more), resume, environment, str(said[rank]), hook
            processes.append(self.context.Process(target=work, args=arguments))
        if mood:
            (self.root / "mood").write_text(mood, encoding="utf-8")
        for process in processes:
            process.start()
        return Ranks(processes, said)

    def whole(self, run: str, *more: str, ranks: int = 1, **options: Any) -> float:
        """Train until the end; returns the seconds it took. Raises RuntimeError if it fails."""
        began = time.monotonic()
        started = self.start(run, *more, ranks=ranks, **options)
        started.join(240)
        if set(started.codes) != {0}:
            raise RuntimeError(f"{run} ended with {started.codes}: {started.text()[-3000:]}")
        return time.monotonic() - began


@dataclass
class Ranks:
    """The processes of a run; what they printed is in `said`."""

    processes: list[Any]
    said: list[Path]

    def join(self, seconds: float) -> None:
        """Wait for all of them, and kill those that take longer."""
        end = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.1, end - time.monotonic()))
        self.kill()

    def kill(self, which: Callable[[int], bool] = lambda rank: True) -> None:
        """SIGKILL, and wait until they are gone."""
        some = [p for rank, p in enumerate(self.processes) if which(rank)]
        for process in some:
            process.kill()
        for process in some:
            process.join(60)

    def signal(self, number: int) -> None:
        """To all of them, as a batch system does."""
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, number)

    @property
    def alive(self) -> bool:
        return all(p.is_alive() for p in self.processes)

    @property
    def codes(self) -> list[int | None]:
        return [p.exitcode for p in self.processes]

    def text(self) -> str:
        return "".join(
            p.read_text(encoding="utf-8", errors="replace") for p in self.said if p.exists()
        )


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


# -- inside such a process -------------------------------------------------------------------------


def work(
    overrides: list[str], resume: bool, environment: Mapping[str, str], said: str, hook: str
) -> None:
    """Train, print what a user would see into a file, and end with the command line's exit code."""
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.environ.update(environment)
    torch.set_num_threads(1)
    from leangrpo.config import load_config
    from leangrpo.launch import complain, expect_interrupts
    from leangrpo.parallel import leave
    from leangrpo.train import train

    expect_interrupts()
    code = 1
    try:
        if hook:
            name, _, argument = hook.partition(":")
            HOOKS[name](argument)
        summary = train(load_config("embedded", overrides), resume=resume, quiet=True)
        leave()
        code = 130 if summary["stopped"] == "interrupted" else 0
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        try:
            code = complain(error)
        except Exception:
            import traceback

            traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    for drain in DRAINS:
        os.closerange(1, 3)
        drain.wait()
    os._exit(code)


DRAINS: list[subprocess.Popen[bytes]] = []


def slow_writes(argument: str) -> None:
    """Take so many seconds between two files of a checkpoint, so that kills meet its writing."""
    from leangrpo import checkpoint

    flush = checkpoint._flush

    def slowly(path: Path) -> None:
        time.sleep(float(argument))
        flush(path)

    checkpoint._flush = slowly


def small_files(argument: str) -> None:
    """Let no file grow beyond so many bytes, as on a disk that is full."""
    out = os.dup(1)
    pipe = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=out)  # what is said has room
    assert pipe.stdin is not None
    os.dup2(pipe.stdin.fileno(), 1)
    os.dup2(pipe.stdin.fileno(), 2)
    pipe.stdin.close()
    os.close(out)
    DRAINS.append(pipe)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(argument), resource.RLIM_INFINITY))


def jumping_clock(argument: str) -> None:
    """Hours forward and back again, at every other look at the time."""
    really, looks = time.time, iter(range(10**9))

    def now() -> float:
        return really() + (-1) ** next(looks) * float(argument) * 3600

    class Datetime(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.fromtimestamp(now(), tz)

    from leangrpo import runfolder

    time.time = now
    runfolder.datetime = Datetime  # type: ignore[misc]


def poisoned(argument: str) -> None:
    """In update N something of one trajectory is not finite: `latents,2`."""
    import poison

    from leangrpo import setup

    kind, update = argument.split(",")
    make = setup.make_policy

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        policy = make(*args, **kwargs)
        poison.poison(policy, [(0, 1)], kind, update=int(update) - 1)
        return policy

    setup.make_policy = spoiled


HOOKS: dict[str, Callable[[str], None]] = {
    "slow_writes": slow_writes,
    "small_files": small_files,
    "jumping_clock": jumping_clock,
    "poisoned": poisoned,
}


# -- what is left of a run -------------------------------------------------------------------------


def lines(run: Path) -> list[dict[str, Any]]:
    """The metrics without what may be another at every run."""
    from leangrpo.runfolder import read_lines

    found = read_lines(run / "metrics.jsonl")
    return [{k: v for k, v in line.items() if k not in TIMES} for line in found]


def sha(run: Path) -> str:
    """Of the final weights."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return str(summary["weights_sha256"])


def resumable(run: Path) -> int:
    """The update that a resume would begin after."""
    from leangrpo.checkpoint import newest

    found, _ = newest(run / "checkpoints")
    return 0 if found is None else found.update


def published(run: Path) -> int:
    """The newest checkpoint by its name."""
    names = (p.name for p in (run / "checkpoints").glob("[0-9]*"))
    return max((int(n) for n in names if n.isdecimal()), default=0)


def waited(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether it came true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.002)
    return False


def flips(data: bytes, positions: Iterator[int]) -> bytes:
    """With a bit of some bytes turned over."""
    found = bytearray(data)
    for at in positions:
        found[at % len(found)] ^= 1 << (at % 8)
    return bytes(found)
