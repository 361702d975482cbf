"""The command line: parse, call, print.

Exit codes: 0 done, 1 a bug of ours, 2 a mistake to mend, 130 stopped.

Nothing heavy is imported before a command runs, so that help and mistakes are instantaneous.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from . import __version__
from .config import Config, load_config, recipe_names, recipe_text
from .errors import LeanError

app = typer.Typer(
    name="leangrpo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Reinforcement-learning post-training of diffusers pipelines, without the second forward.",
)
recipes = typer.Typer(no_args_is_help=False, invoke_without_command=True)
app.add_typer(recipes, name="recipes", help="List, show or copy the recipes that come along.")

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
AtUpdate = Annotated[
    int | None, typer.Option(help="Which checkpoint; default: the newest one.", show_default=False)
]


def main() -> None:
    """Entry point of `leangrpo` and `python -m leangrpo`."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns about torchvision at import
    try:
        app()
    except LeanError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"leangrpo {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    settings: Settings = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the run in run.dir from its last checkpoint."),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Train a pipeline; without arguments the embedded recipe, in a few minutes on a CPU.

    Examples: leangrpo train; leangrpo train schedule=retain updates=10;
    leangrpo train sd35m-ocr prompts.train=prompts.txt run.dir=runs/mine;
    leangrpo train run.dir=runs/mine --resume
    """
    config = _load(settings, resume=resume)
    _check_writable(json_file)
    from .config import check

    check(config, resume=resume)
    from .train import train as run

    summary = run(config, resume=resume, quiet=quiet)
    _write_json(json_file, summary)
    if summary["stopped"] == "interrupted":
        raise typer.Exit(130)


@app.command()
def evaluate(run: RunFolder, update: AtUpdate = None, json_file: JsonFile = None) -> None:
    """Score a run's checkpoint on its held-out prompts."""
    _check_writable(json_file)
    config = _of_run(run)
    from .inference import evaluate_run

    result = evaluate_run(config, run, update)
    for name, value in result["rewards"].items():
        print(f"{name:24s} {value:.4f}")
    print(f"{result['num_prompts']} held-out prompts, weights of update {result['update']}")
    _write_json(json_file, result)


@app.command()
def sample(
    run: RunFolder,
    prompt: Annotated[list[str], typer.Option("--prompt", "-p", help="A prompt; may be repeated.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the pictures.")] = Path(
        "samples"
    ),
    num: Annotated[int, typer.Option(min=1, help="Pictures per prompt.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of the noise they start from.")] = 0,
    update: AtUpdate = None,
    json_file: JsonFile = None,
) -> None:
    """Make pictures with a run's weights, by the pipeline's own deterministic sampler."""
    _check_writable(json_file)
    config = _of_run(run)
    from .inference import sample_run

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LeanError(f"--out {out}: {error.strerror}. Choose another folder.") from error
    files = sample_run(config, run, prompt, out, num=num, seed=seed, update=update)
    for file in files:
        print(file)
    _write_json(json_file, {"files": [str(f) for f in files]})


@app.command()
def bench(
    settings: Settings = None,
    schedules: Annotated[
        str, typer.Option(help="Which to time, in turn; ratios are to the first.")
    ] = "native,retain,reweight",
    rounds: Annotated[int, typer.Option(min=1, help="Updates of each schedule.")] = 5,
    json_file: JsonFile = None,
) -> None:
    """Time the schedules in turn in one process: sampling and backward, without reward."""
    _check_writable(json_file)
    config = _load(settings)
    from .bench import bench as run

    _write_json(json_file, run(config, schedules.split(","), rounds))


@recipes.callback()
def _recipes(context: typer.Context, json_file: JsonFile = None) -> None:
    """List the recipes that come along."""
    if context.invoked_subcommand is not None:
        return
    _check_writable(json_file)
    rows = {name: load_config(name).description for name in recipe_names()}
    width = max(map(len, rows))
    for name, description in rows.items():
        print(f"{name:{width}s}  {description}")
    _write_json(json_file, rows)


@recipes.command("list")
def list_recipes(context: typer.Context, json_file: JsonFile = None) -> None:
    """List the recipes that come along."""
    context.invoked_subcommand = None
    _recipes(context, json_file)


@recipes.command("show")
def show_recipe(name: Annotated[str, typer.Argument(help="A recipe's name.")]) -> None:
    """Print a recipe's YAML."""
    print(recipe_text(name), end="")


@recipes.command("copy")
def copy_recipe(
    name: Annotated[str, typer.Argument(help="A recipe's name.")],
    file: Annotated[Path, typer.Argument(help="Where to write it; must not exist yet.")],
) -> None:
    """Write a recipe to a file of your own, to change it."""
    text = recipe_text(name)
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except OSError as error:
        raise LeanError(f"Cannot write {file}: {error.strerror}. Choose another file.") from error
    print(f"{file}: train it with `leangrpo train {file}`")


def _load(settings: list[str] | None, *, resume: bool = False) -> Config:
    """The config of `[SOURCE] [KEY=VALUE]...`; a run's folder stands for its own config.yaml."""
    words = list(settings or [])
    source = words.pop(0) if words and ("=" not in words[0] or _is_run(words[0])) else None
    if source and _is_run(source):
        words.insert(0, _run_dir(source))
        source = os.path.join(source, "config.yaml")
    if resume and source is None:
        given = [w.partition("=")[2] for w in words if w.startswith("run.dir=")]
        if given and _is_run(given[-1]):
            source = os.path.join(given[-1], "config.yaml")
    return load_config(source, words)


def _of_run(run: Path) -> Config:
    if not _is_run(run):
        raise LeanError(f"{run} is not a run: it has no config.yaml. Give a folder made by train.")
    return load_config(run / "config.yaml", [_run_dir(run)])


def _is_run(folder: str | Path) -> bool:
    # Unlike Path.is_file, false for a name that no file can have.
    return os.path.isfile(os.path.join(folder, "config.yaml"))


def _run_dir(folder: str | Path) -> str:
    """The override `run.dir=...`, quoted: a folder may be called 2024 or [x]."""
    return f"run.dir={json.dumps(str(folder), ensure_ascii=False)}"


def _check_writable(file: Path | None) -> None:
    if file is None:
        return
    target = file if os.path.exists(file) else file.parent
    if os.path.isdir(file) or not os.access(target, os.W_OK):
        raise LeanError(f"--json {file}: cannot be written. Choose a file in an existing folder.")


def _write_json(file: Path | None, result: Any) -> None:
    if file is None:
        return
    try:
        file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise LeanError(f"--json {file}: cannot be written: {error.strerror}.") from error
