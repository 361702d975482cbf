"""The command line: parse, call, print.

Exit codes: 0 done, 1 a bug of ours, 2 a mistake to mend, 130 stopped; of a rank also 3, stopped
because another one was.

Nothing heavy is imported before a command runs, so that help and mistakes are instantaneous.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from . import __version__
from .config import Config, bare_config, described, load_config, recipe_names, recipe_text, to_yaml
from .cookbook import is_recipe
from .errors import LeanError, problem
from .launch import (
    check_for,
    complain,
    die_with_launcher,
    expect_interrupts,
    launch,
    only_alone,
)
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


def main() -> None:
    """Entry point of `leangrpo` and `python -m leangrpo`."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns about torchvision at import
    expect_interrupts()
    die_with_launcher()
    try:
        app()
    except KeyboardInterrupt:
        if _is_first_rank():
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
    config = _load(settings, resume=resume)
    _check_writable(json_file)
    from .checks import check

    if nproc is not None:
        check_for(config, nproc, resume=resume)
    if nproc is not None and nproc > 1:
        folder = run_folder(config)
        flags = ["--resume"] * resume + ["--quiet"] * quiet
        words = [*(settings or []), *([] if config.run.dir else [_run_dir(folder)])]
        _launch("train", words, flags, nproc, json_file, folder)
    check(config, resume=resume)
    from .parallel import leave
    from .train import train as run

    summary = run(config, resume=resume, quiet=quiet)
    leave()
    _write_json(json_file, summary)
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
    _check_writable(json_file)
    config = _of_run(run)
    from .inference import evaluate_run

    result = evaluate_run(config, run, update, ema)
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
    _check_writable(json_file)
    config = _of_run(run)
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
    _write_json(json_file, {"files": [str(f) for f in files]})


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
    _check_writable(json_file)
    config = _of_run(run)
    from .export import export_run

    result = export_run(config, run, out, update=update, ema=ema)
    what = "LoRA" if result["kind"] == "lora" else "pipeline"
    print(f"{out}: {what} of update {result['update']}; diffusers loads it with")
    for line in result["load"]:
        print(f"  {line}")
    _write_json(json_file, result)


@app.command()
def bench(
    settings: Settings = None,
    schedules: Annotated[
        str | None,
        typer.Option(
            help="Which to time, in turn; ratios are to the first. On several ranks also "
            "native:step, :group or :update (parallel.sync), and native:step:classic. Default: "
            "native,retain,reweight, on several ranks after native:step.",
            show_default=False,
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Updates of each schedule.")] = 5,
    collectives: Annotated[
        bool,
        typer.Option("--collectives", help="Count the collectives of an update instead of timing."),
    ] = False,
    ledger: Annotated[
        bool,
        typer.Option("--ledger", help="Measure waiting gradients against the group instead."),
    ] = False,
    groups: Annotated[
        str, typer.Option(metavar="N,N,...", help="With --ledger: the group sizes.")
    ] = "4,16,64",
    nproc: Nproc = None,
    json_file: JsonFile = None,
) -> None:
    """Time the schedules in turn in one job: sampling and backward, without reward.

    Examples: leangrpo bench; torchrun --nproc-per-node 2 -m leangrpo bench --collectives
    """
    _check_writable(json_file)
    config = _load(settings)
    if nproc is not None:
        check_for(config, nproc, resume=True)  # it leaves a run's folder alone
    else:
        from .checks import check

        check(config, files=False)
    if nproc is not None and nproc > 1:
        flags = [f"--schedules={schedules}"] if schedules else []
        flags += [f"--rounds={rounds}"] + ["--collectives"] * collectives
        _launch("bench", settings or [], flags, nproc, json_file)
    names = schedules.split(",") if schedules else None
    if ledger:
        from .bench_memory import ledger as measure

        _write_json(json_file, measure(config, names, _counts("--groups", groups)))
        return
    from .bench import bench as run
    from .parallel import leave

    result = run(config, names, rounds, collectives=collectives)
    leave()
    _write_json(json_file, result)


@app.command("check")
def check_model(
    model: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL [KEY.PATH=VALUE]...",
            help="A folder in diffusers format, a hub id, a recipe or a YAML file; then overrides.",
        ),
    ],
    tiny: Annotated[
        bool,
        typer.Option("--tiny", help="A random twin of two layers, from its configuration alone."),
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Say what is found in a pipeline and whether it can be trained; try one group.

    Examples: leangrpo check black-forest-labs/FLUX.1-dev --tiny;
    leangrpo check my-model model.train=lora model.dtype=bfloat16
    """
    _check_writable(json_file)
    source, *overrides = model
    known = is_recipe(source) or source.endswith((".yaml", ".yml")) or _is_run(source)
    config = _load(model) if known else bare_config(source, overrides)
    from .checks import check

    check(config, files=False)
    from .inspection import inspect_pipeline

    named = any(o.startswith("kernel.") for o in overrides)
    report = inspect_pipeline(config, tiny=tiny, kernel_given=known or named)
    _write_json(json_file, report)
    if not report["trainable"]:
        raise typer.Exit(1)


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
    from .serve import serve

    serve(name, host, port, token=token, workers=workers)


@app.command()
def plan(
    settings: Settings = None,
    gpus: Annotated[int, typer.Option(min=1, help="How many GPUs, one rank on each.")] = 1,
    device: Annotated[
        str, typer.Option(help="a6000, a100, h100, h200, l40s or 4090, by its data sheet.")
    ] = "a6000",
    memory: Annotated[
        str | None,
        typer.Option(help="Of one GPU, such as 48GiB; default: the device's.", show_default=False),
    ] = None,
    tflops: Annotated[
        float | None, typer.Option(help="Its bfloat16 peak, dense.", show_default=False)
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(help="Its memory's peak, in GB/s.", show_default=False)
    ] = None,
    link: Annotated[
        float | None,
        typer.Option(help="What collectives between GPUs achieve, in GB/s.", show_default=False),
    ] = None,
    efficiency: Annotated[
        float | None,
        typer.Option(help="Share of the peak that matrix products achieve.", show_default=False),
    ] = None,
    reward: Annotated[float, typer.Option(min=0, help="Seconds of one sample's reward.")] = 0.0,
    everything: Annotated[
        bool, typer.Option("--all", help="Every option, and those left out.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Predict time and memory of every schedule on hardware that is not here, and choose.

    Nothing is loaded or run: costs are counted from the model's configuration.

    Examples: leangrpo plan flux1-dev --gpus 8 --memory 48GiB;
    leangrpo plan wan21-14b --gpus 8 --device h100 model.train=full
    """
    _check_writable(json_file)
    config = _load(settings)
    from .checks import check

    check(config, files=False)
    from .device import device as described
    from .plan import plan as make

    facts = {"tflops": tflops, "bandwidth": bandwidth, "link": link, "efficiency": efficiency}
    result = make(config, described(device, gpus, memory=memory, **facts), reward=reward)
    result.show(everything=everything)
    _write_json(json_file, result.as_dict())
    if result.choice is None:
        raise typer.Exit(1)


@recipes.callback()
def _recipes(context: typer.Context, json_file: JsonFile = None) -> None:
    """List the recipes that come along."""
    if context.invoked_subcommand is not None:
        return
    _check_writable(json_file)
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
    _write_json(json_file, rows)


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


def _counts(option: str, text: str) -> list[int]:
    """Whole numbers, separated by commas."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        rule = "it must be whole numbers with commas between them"
        raise problem(option, text, rule, "Such as 4,16,64.") from None


def _launch(
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


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _write_json(file: Path | None, result: Any) -> None:
    if file is None or not _is_first_rank():
        return
    try:
        file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise LeanError(f"--json {file}: cannot be written: {error.strerror}.") from error
