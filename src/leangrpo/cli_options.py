"""What commands have in common: their arguments, the settings these name, results as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from pydantic import TypeAdapter, ValidationError

from .config import Config, bare_config, load_config
from .cookbook import is_recipe
from .errors import LeanError, problem
from .launch import launch
from .settings_model import Size

Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECIPE|YAML|RUN] [KEY.PATH=VALUE]...",
        help="A recipe's name, a YAML file or a run's folder (default: embedded), then overrides.",
        show_default=False,
    ),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the result there as JSON too.")
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")]
Nproc = Annotated[
    int | None,
    typer.Option(
        "--nproc",
        metavar="N",
        help="Start N ranks on this machine, as torchrun would.",
        show_default=False,
    ),
]
AtUpdate = Annotated[
    int | None, typer.Option(help="Which checkpoint; default: the newest one.", show_default=False)
]
RunningMean = Annotated[
    bool | None,
    typer.Option(
        "--ema/--no-ema",
        help="The running mean of the weights, or the weights; default: the mean where there is "
        "one.",
        show_default=False,
    ),
]


def load(settings: list[str] | None, *, resume: bool = False) -> Config:
    """The config of `[SOURCE] [KEY=VALUE]...`; a run's folder stands for its own config.yaml."""
    words = list(settings or [])
    source = words.pop(0) if words and ("=" not in words[0] or is_run(words[0])) else None
    if source and is_run(source):
        words.insert(0, run_dir(source))
        source = os.path.join(source, "config.yaml")
    if resume and source is None:
        given = [w.partition("=")[2] for w in words if w.startswith("run.dir=")]
        if given and is_run(given[-1]):
            source = os.path.join(given[-1], "config.yaml")
    return load_config(source, words)


def load_model(words: list[str]) -> tuple[Config, bool]:
    """The same for a command that takes a bare model too; whether it is a recipe, file or run."""
    source, *overrides = words
    known = is_recipe(source) or source.endswith((".yaml", ".yml")) or is_run(source)
    return load(words) if known else bare_config(source, overrides), known


def of_run(run: Path) -> Config:
    """The config of a run's folder. Raises LeanError where it is none."""
    if not is_run(run):
        raise LeanError(f"{run} is not a run: it has no config.yaml. Give a folder made by train.")
    return load_config(run / "config.yaml", [run_dir(run)])


def is_run(folder: str | Path) -> bool:
    """Whether a folder is one that train has made."""
    # Unlike Path.is_file, false for a name that no file can have.
    return os.path.isfile(os.path.join(folder, "config.yaml"))


def run_dir(folder: str | Path) -> str:
    """The override `run.dir=...`, quoted: a folder may be called 2024 or [x]."""
    return f"run.dir={json.dumps(str(folder), ensure_ascii=False)}"


def check_writable(file: Path | None) -> None:
    """Raise LeanError when the result could not be written, before it is computed."""
    if file is None:
        return
    target = file if os.path.exists(file) else file.parent
    if os.path.isdir(file) or not os.access(target, os.W_OK):
        raise LeanError(f"--json {file}: cannot be written. Choose a file in an existing folder.")


def counts(option: str, text: str) -> list[int]:
    """Whole numbers, separated by commas."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        rule = "it must be whole numbers with commas between them"
        raise problem(option, text, rule, "Such as 4,16,64.") from None


def size_of(option: str, text: str | None) -> int | None:
    """Bytes, from a number of them or a text such as 64MiB."""
    try:
        return TypeAdapter(Size | None).validate_python(text)
    except ValidationError as error:
        raise problem(option, text, "it must be a size such as 64MiB") from error


def launch_ranks(
    command: str,
    settings: list[str],
    flags: list[str],
    nproc: int,
    json_file: Path | None,
    folder: Path | None = None,
) -> NoReturn:
    """Run a command on several ranks, and end as they do."""
    out = [] if json_file is None else ["--json", str(json_file)]
    raise typer.Exit(launch([command, *flags, *out, "--", *settings], nproc, folder))


def is_first_rank() -> bool:
    """Whether this process is the one that speaks."""
    return os.environ.get("RANK", "0") == "0"


def progress(text: str) -> None:
    """A line on what is under way, beside the result."""
    if is_first_rank():
        print(text, file=sys.stderr, flush=True)


def write_json(file: Path | None, result: Any) -> None:
    """Write a result to where `--json` says."""
    if file is None or not is_first_rank():
        return
    try:
        file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise LeanError(f"--json {file}: cannot be written: {error.strerror}.") from error
