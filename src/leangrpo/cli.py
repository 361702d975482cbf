"""The command line: parse, call, print.

Exit codes: 0 done, 1 a bug of ours, 2 a mistake to mend, 130 stopped; of a rank also 3, stopped
because another one was.

Nothing heavy is imported before a command runs, so that help and mistakes are instantaneous.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from . import __version__
from .cli_audit import audit_app
from .cli_manifest import manifest
from .cli_measure import app as measuring
from .cli_options import (
    AtUpdate,
    JsonFile,
    Nproc,
    RunFolder,
    RunningMean,
    Settings,
    check_writable,
    is_first_rank,
    launch_ranks,
    load,
    of_run,
    run_dir,
    write_json,
)
from .cli_score import score
from .config import described, load_config, recipe_names, recipe_text, to_yaml
from .errors import LeanError, problem
from .launch import check_for, complain, die_with_launcher, expect_interrupts, only_alone
from .runfolder import run_folder

app = typer.Typer(
    name="leangrpo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Reinforcement-learning post-training of diffusers pipelines, without the second forward.",
)
recipes = typer.Typer(no_args_is_help=False, invoke_without_command=True)
app.add_typer(recipes, name="recipes", help="List, show or copy the recipes that come along.")


def main() -> None:
    """Entry point of `leangrpo` and `python -m leangrpo`."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns about torchvision at import
    expect_interrupts()
    die_with_launcher()
    try:
        app()
    except KeyboardInterrupt:
        if is_first_rank():
            print("stopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        sys.exit(complain(error))


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
    nproc: Nproc = None,
    json_file: JsonFile = None,
) -> None:
    """Train a pipeline; without arguments the embedded recipe, in a few minutes on a CPU.

    Examples: leangrpo train; leangrpo train schedule=retain updates=10;
    leangrpo train sd35m-ocr prompts.train=prompts.txt run.dir=runs/mine;
    leangrpo train run.dir=runs/mine --resume
    """
    config = load(settings, resume=resume)
    check_writable(json_file)
    from .checks import check

    if nproc is not None:
        check_for(config, nproc, resume=resume)
    if nproc is not None and nproc > 1:
        folder = run_folder(config)
        flags = ["--resume"] * resume + ["--quiet"] * quiet
        words = [*(settings or []), *([] if config.run.dir else [run_dir(folder)])]
        launch_ranks("train", words, flags, nproc, json_file, folder)
    check(config, resume=resume)
    from .parallel import leave
    from .train import train as run

    summary = run(config, resume=resume, quiet=quiet)
    leave()
    write_json(json_file, summary)
    if summary["stopped"] == "interrupted":
        raise typer.Exit(130)


@app.command()
def evaluate(
    run: RunFolder,
    update: AtUpdate = None,
    ema: RunningMean = None,
    json_file: JsonFile = None,
) -> None:
    """Score a run's checkpoint on its held-out prompts."""
    only_alone("evaluate")
    check_writable(json_file)
    config = of_run(run)
    from .inference import evaluate_run

    result = evaluate_run(config, run, update, ema)
    for name, value in result["rewards"].items():
        print(f"{name:24s} {value:.4f}")
    print(f"{result['num_prompts']} held-out prompts, weights of update {result['update']}")
    write_json(json_file, result)


@app.command()
def sample(
    run: RunFolder,
    prompt: Annotated[list[str], typer.Option("--prompt", "-p", help="A prompt; may be repeated.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the pictures.")] = Path(
        "samples"
    ),
    image: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ARGUMENT=FILE",
            help="A picture the pipeline is called with, such as image=room.png; may be repeated.",
            show_default=False,
        ),
    ] = None,
    num: Annotated[int, typer.Option(min=1, help="Pictures per prompt.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of the noise they start from.")] = 0,
    update: AtUpdate = None,
    ema: RunningMean = None,
    json_file: JsonFile = None,
) -> None:
    """Make pictures with a run's weights, by the pipeline's own deterministic sampler."""
    only_alone("sample")
    check_writable(json_file)
    config = of_run(run)
    from .datasets import Example
    from .inference import sample_run

    pairs = [word.partition("=") for word in image or []]
    for argument, equals, file in pairs:
        if not (argument and equals and os.path.isfile(file)):
            word = f"{argument}{equals}{file}"
            raise problem("--image", word, "it must be ARGUMENT=FILE, and the file must be there")
    inputs = Example("", {}, {name: Path(file) for name, _, file in pairs}).open_images()

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LeanError(f"--out {out}: {error.strerror}. Choose another folder.") from error
    weights: dict[str, Any] = {"update": update, "ema": ema}
    files = sample_run(config, run, prompt, out, num=num, seed=seed, inputs=inputs, **weights)
    for path in files:
        print(path)
    write_json(json_file, {"files": [str(f) for f in files]})


@app.command()
def export(
    run: RunFolder,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new or an empty folder.")],
    update: AtUpdate = None,
    ema: RunningMean = None,
    json_file: JsonFile = None,
) -> None:
    """Write a run's weights for plain diffusers: a LoRA file, or a whole pipeline.

    Example: leangrpo export runs/mine my-model
    """
    only_alone("export")
    check_writable(json_file)
    config = of_run(run)
    from .export import export_run

    result = export_run(config, run, out, update=update, ema=ema)
    what = "LoRA" if result["kind"] == "lora" else "pipeline"
    print(f"{out}: {what} of update {result['update']}; diffusers loads it with")
    for line in result["load"]:
        print(f"  {line}")
    write_json(json_file, result)


app.add_typer(measuring)
app.add_typer(audit_app, name="audit")
audit_app.command()(manifest)
app.command()(score)


@app.command("serve-reward")
def serve_reward(
    name: Annotated[str, typer.Argument(help="A reward's name, or your own as module:function.")],
    host: Annotated[str, typer.Option(help="The address it listens on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="LEANGRPO_TOKEN",
            help="What a trainer has to show; a must for an address other machines reach.",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Calls at the same time.")] = 1,
) -> None:
    """Serve a reward over HTTP, for trainers that name it by its URL.

    Example: leangrpo serve-reward my_rewards:Model --port 8000; then
    leangrpo train 'rewards=[{name: "http://127.0.0.1:8000"}]'
    """
    only_alone("serve-reward")
    from .cli_score import reward_of
    from .serve import serve

    serve(reward_of("NAME", name)[0], host, port, token=token, workers=workers)


@recipes.callback()
def _recipes(context: typer.Context, json_file: JsonFile = None) -> None:
    """List the recipes that come along."""
    if context.invoked_subcommand is not None:
        return
    check_writable(json_file)
    rows = {kind: _descriptions(kind) for kind in ("runs", "models", "algorithms", "pairs")}
    heads = {
        "runs": "Whole runs: leangrpo train NAME",
        "models": "Models: leangrpo train MODEL+ALGORITHM",
        "algorithms": "Algorithms: leangrpo train ALGORITHM, on the embedded pipeline",
        "pairs": "Pairs with published settings of their own",
    }
    width = max(len(name) for some in rows.values() for name in some)
    for kind, some in rows.items():
        print(heads[kind])
        for name, description in some.items():
            print(f"  {name:{width}s}  {description}")
    write_json(json_file, rows)


def _descriptions(kind: str) -> dict[str, str]:
    """The description of each recipe of a kind, its own and not that of what it extends."""
    return {name: described(kind, name) for name in recipe_names(kind)}


@recipes.command("list")
def list_recipes(context: typer.Context, json_file: JsonFile = None) -> None:
    """List the recipes that come along."""
    context.invoked_subcommand = None
    _recipes(context, json_file)


@recipes.command("show")
def show_recipe(
    name: Annotated[str, typer.Argument(help="A recipe's name, or MODEL+ALGORITHM.")],
) -> None:
    """Print a recipe's YAML, or the files that a combined one is made of."""
    print(recipe_text(name), end="")


@recipes.command("copy")
def copy_recipe(
    name: Annotated[str, typer.Argument(help="A recipe's name, or MODEL+ALGORITHM.")],
    file: Annotated[Path, typer.Argument(help="Where to write it; must not exist yet.")],
) -> None:
    """Write a recipe to a file of your own, to change it.

    A combined one is written as all its settings; shorter is a file that says extends: NAME.
    """
    text = recipe_text(name) if name in recipe_names() else to_yaml(load_config(name))
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except OSError as error:
        raise LeanError(f"Cannot write {file}: {error.strerror}. Choose another file.") from error
    print(f"{file}: train it with `leangrpo train {file}`")
