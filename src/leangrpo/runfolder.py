"""A run's folder as files: what they are called, reading them back, replacing one safely."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from .config import Config, parse_yaml
from .errors import LeanError, problem

CONFIG, SUMMARY, LOG, PAGE = "config.yaml", "summary.json", "log.txt", "report.html"
PLAN, VERIFIED = "plan.json", "verify.json"
METRICS, EVALUATIONS = "metrics.jsonl", "evaluations.jsonl"


@dataclass(frozen=True, slots=True)
class Run:
    """A run folder, read: its settings, its lines, and its summary once it has ended."""

    folder: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    summary: dict[str, Any] | None


def run_folder(config: Config) -> Path:
    """The run's folder; without `run.dir`, `runs/<recipe>-<date-time>`, a new one.

    A recipe's name that holds a path leads nowhere else; a clock set back, to no older run.
    """
    if config.run.dir:
        return Path(config.run.dir).expanduser()
    name = re.sub(r"[^\w.+-]+", "-", config.recipe).strip(".-")[:80] or "run"
    name = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    names = (name, *(f"{name}-{n}" for n in range(2, 100)))
    free = (n for n in names if not (Path("runs") / n).exists())
    return Path("runs") / next(free, name)


def lock(folder: Path) -> Any:
    """Hold a run's folder for this process, until the returned file is closed or the process ends.

    Raises LeanError when another process holds it: two would mix their lines and checkpoints.
    """
    file = (folder / ".lock").open("a", encoding="utf-8")
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        rule = "another process is training in it"
        raise problem(
            "run.dir", str(folder), rule, "Wait for it, or name another folder."
        ) from error
    except (ImportError, OSError):
        pass  # no locks here, as on some network disks: the run goes on without
    return file


def read_run(folder: str | Path) -> Run:
    """Read a run folder, also one that is being written; raises LeanError when it is none."""
    folder = Path(folder)
    try:
        config = parse_yaml((folder / CONFIG).read_text(encoding="utf-8"), CONFIG)
    except FileNotFoundError as error:
        raise LeanError(
            f"{folder} is not a run: it has no {CONFIG}. Give a folder made by train."
        ) from error
    except (OSError, ValueError) as error:
        raise LeanError(f"{folder} is not a run: its {CONFIG} cannot be read.") from error
    if not isinstance(config, dict):
        raise LeanError(f"{folder} is not a run: its {CONFIG} holds no settings.")
    return Run(
        folder,
        config,
        read_lines(folder / METRICS),
        read_lines(folder / EVALUATIONS),
        _read_summary(folder / SUMMARY),
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file; a half-written last one, as a kill leaves it, is left out."""
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            break
        if not isinstance(line, dict):
            break
        lines.append(line)
    return lines


def _read_summary(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return summary if isinstance(summary, dict) else None


def replace_file(path: Path, text: str) -> None:
    """Write a file so that a kill leaves the old one or the new one.

    Raises LeanError when the disk refuses.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise unwritable(path, error) from error


def append_line(path: Path, text: str) -> None:
    """Append one line and have it on the disk; raises LeanError when the disk refuses."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> LeanError:
    """The complaint about a file of a run that cannot be written."""
    return LeanError(
        f"{path} cannot be written: {error.strerror}. Free space or mend its permissions, then go "
        "on with --resume."
    )
