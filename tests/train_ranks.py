"""Whole runs on several ranks, one process start for many of them.

    torchrun --nproc-per-node 2 tests/train_ranks.py JOBS.json

A job is one of

    {"train": [settings], "resume": false}
    {"copy": [folder, folder], "to": 1}     a run as a kill after update 1 leaves it
    {"kill": [settings], "at": 2}           killed while the checkpoint of update 2 is published
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist

CASES = {
    "full64": ["model={train: full, dtype: float64}"],
    "full": ["model.train=full"],
    "lora": ["model={train: lora, lora: {rank: 32, alpha: 16}}"],
}
"""What is trained, by the name of the run."""

AGAIN = ("full64", "lora")
"""Those that two ranks go on with; `full` is the same code as `full64`."""

OTHER = ["schedule=retain", "parallel={replicate: 1, layout: classic}"]
"""Another schedule and layout than that of the runs."""


def settings(root: Path, run: str, *more: str) -> list[str]:
    """Settings of a small run of the tiny pipeline in `root`; the case is the run's first word.

    With this epsilon a gradient that is nothing but rounding moves no weight.
    """
    return [
        f"model.pipeline={root / 'sd3'}",
        "sampling={steps: 3, height: 16, width: 16, call: {max_sequence_length: 16}}",
        "selection={rule: fraction, fraction: 1.0, steps: null}",
        "rollout={prompts: 2, generations: 2, micro_batch: 1}",
        f"prompts={{train: {root / 'prompts.txt'}, heldout: null}}",
        "rewards=[{name: 'many_ranks:brightness'}]",
        "optimizer={lr: 1e-3, eps: 1e-3, warmup: 3}",
        "ema.decay=0.9",
        "checkpoint={every: 1, keep: 3}",
        "updates=3",
        "parallel={replicate: 1}",
        *CASES[run.split("-")[0]],
        *more,
        f"run.dir={root / run}",
    ]


@cache
def two_ranks(base: Path) -> Path:
    """Runs of two ranks, each over its own half of the weights: the folder they are in,
    below a session's `base`.

    `<case>-whole` of three updates in one go, `-again` in two (of `AGAIN`), `-1` and `-4` left
    after the first for others to go on with, `full64-other` gone on with otherwise, `full-stopped`
    and `full-killed` after the first.
    """
    import tiny

    root = base / "two-ranks"
    root.mkdir()
    tiny.save(tiny.tiny_sd3(), root / "sd3")
    (root / "prompts.txt").write_text("a cat\na dog\na cup\na car\n", encoding="utf-8")
    jobs: list[dict[str, Any]] = []
    for case in CASES:
        jobs.append({"train": settings(root, f"{case}-whole")})
        for copy in ("again", "1", "4", "other"):
            jobs.append({"copy": [str(root / f"{case}-{n}") for n in ("whole", copy)], "to": 1})
    for case in AGAIN:
        jobs.append({"train": settings(root, f"{case}-again"), "resume": True})
    jobs.append({"train": settings(root, "full64-other", *OTHER), "resume": True})
    jobs.append({"train": settings(root, "full-stopped", "updates=1")})
    jobs.append({"kill": settings(root, "full-killed", "checkpoint.keep=1"), "at": 2})
    launch(2, jobs, root, killed=True)
    return root


def launch(ranks: int, jobs: list[dict[str, Any]], root: Path, *, killed: bool = False) -> None:
    """Do the jobs on so many ranks; `killed`: the last one ends them."""
    file = root / f"jobs-{ranks}.json"
    file.write_text(json.dumps(jobs), encoding="utf-8")
    here = Path(__file__)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(here), str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(here.parent)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    ended = file.with_suffix(".done").exists() and (result.returncode != 0) == killed
    assert ended, f"{ranks} ranks: {result.stderr[-6000:]}"


def python_path(tests: Path) -> str:
    """The tests first, then what this process was given: the same package in every process."""
    return os.pathsep.join([str(tests), *filter(None, [os.environ.get("PYTHONPATH")])])


def leave_at(update: int, source: Path, target: Path) -> None:
    """Copy a run without its newer checkpoints; its metrics stay longer, as a kill leaves them."""
    shutil.copytree(source, target)
    for folder in (target / "checkpoints").iterdir():
        if int(folder.name) > update:
            shutil.rmtree(folder)


def die_at(update: int) -> None:
    """Be killed when that update's checkpoint is about to get its name."""
    from leangrpo.checkpoint import Checkpoints

    publish = Checkpoints._publish

    def killed(self: Checkpoints, partial: Path, folder: Path, state: Any) -> None:
        if state["update"] == update:
            os.kill(os.getpid(), signal.SIGKILL)
        publish(self, partial, folder, state)

    Checkpoints._publish = killed  # type: ignore[method-assign]


def main(file: Path) -> None:
    from leangrpo.config import load_config
    from leangrpo.oracle import float64_throughout
    from leangrpo.parallel import leave
    from leangrpo.train import train

    rank = int(os.environ["RANK"])
    for job in json.loads(file.read_text(encoding="utf-8")):
        if "copy" in job:
            if rank == 0:
                leave_at(job["to"], *map(Path, job["copy"]))
            dist.barrier()
            continue
        config = load_config("embedded", job.get("train") or job["kill"])
        if "kill" in job and rank == 0:
            file.with_suffix(".done").touch()
            die_at(job["at"])
        with float64_throughout() if config.model.dtype == "float64" else nullcontext():
            train(config, resume=job.get("resume", False), quiet=True)
    if rank == 0:
        file.with_suffix(".done").touch()
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
