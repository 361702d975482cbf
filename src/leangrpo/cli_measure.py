"""Commands to look before training: `check`, `verify`, `bench` and `plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .cli_options import (
    JsonFile,
    Nproc,
    Settings,
    check_writable,
    counts,
    is_first_rank,
    is_run,
    launch_ranks,
    load,
    load_model,
    progress,
    size_of,
    write_json,
)
from .config import Config
from .errors import problem
from .launch import check_for, only_alone
from .runfolder import VERIFIED

app = typer.Typer()


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
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Updates of each schedule; default: 5, with --paper 3.",
            show_default=False,
        ),
    ] = None,
    reward: Annotated[
        bool,
        typer.Option(
            "--reward",
            help="Time whole updates as train makes them, with pictures (decode), rewards and "
            "optimizer steps. Default: sampling and gradient alone.",
        ),
    ] = False,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=V,V,...|A:B[:STEP]",
            help="Time at each value of a setting; A:B are 5 values. fraction is short for "
            "selection.fraction with rule fraction: --sweep fraction=0.2:1.0.",
            show_default=False,
        ),
    ] = None,
    ablation: Annotated[
        bool,
        typer.Option(
            "--ablation",
            help="On several ranks: native, + shared prompts, + coalesced sync, then retain, "
            "reweight and streaming.",
        ),
    ] = False,
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
    micro_batches: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Time reweight (or --schedules) with so many generations a forward, in turn, and "
            "compare the gradients with native's one by one.",
            show_default=False,
        ),
    ] = None,
    offload: Annotated[
        bool,
        typer.Option("--offload", help="Measure retain within a budget of activations instead."),
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="With --offload: such as 64MiB. Default: a tenth of what retain needs.",
            show_default=False,
        ),
    ] = None,
    paper: Annotated[
        bool,
        typer.Option(
            "--paper", help="Measure and draw the paper's tables and figures, into --out."
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Of --paper.", show_default=False)
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...", help="With --paper: table1, figure3, ...", show_default=False
        ),
    ] = None,
    larger: Annotated[
        bool, typer.Option("--larger", help="With --paper: models of 31 to 392M parameters.")
    ] = False,
    redraw: Annotated[
        bool,
        typer.Option("--redraw", help="With --paper: take what DIR has, measure what is missing."),
    ] = False,
    nproc: Nproc = None,
    json_file: JsonFile = None,
) -> None:
    """Time the schedules in turn in one job, stage by stage, beside the cost model's limit.

    Examples: leangrpo bench; leangrpo bench --sweep fraction=0.2:1.0;
    leangrpo bench --nproc 2 --ablation --reward; leangrpo bench --paper --out figures
    """
    check_writable(json_file)
    rounds = rounds or (3 if paper else 5)  # as paper.ROUNDS, whose module imports torch
    sizes = None if micro_batches is None else counts("--micro-batches", micro_batches)
    kinds = {
        "--sweep": sweep is not None,
        "--ablation": ablation,
        "--collectives": collectives,
        "--ledger": ledger,
        "--micro-batches": sizes is not None,
        "--offload": offload,
        "--paper": paper,
    }
    asked = [name for name, wanted in kinds.items() if wanted]
    if len(asked) > 1:
        raise problem(asked[1], True, f"it measures something else than {asked[0]}", "Take one.")
    alone = [name for name in asked if name not in ("--sweep", "--ablation", "--collectives")]
    if alone and (nproc or 1) > 1:
        raise problem("--nproc", nproc, f"{alone[0]} measures one process", "Leave it out.")
    untimed = [name for name in asked if name not in ("--sweep", "--ablation")]
    if reward and untimed:
        raise problem("--reward", True, f"{untimed[0]} makes no pictures", "Leave it out.")
    if ablation and schedules:
        rule = "--ablation has schedules of its own"
        raise problem("--schedules", schedules, rule, "Leave one of them out.")
    of_paper = {"--out": out, "--only": only, "--larger": larger, "--redraw": redraw}
    for name, value in of_paper.items():
        if value and not paper:
            raise problem(name, value, "only --paper has it", "Add --paper.")
    if paper:
        if settings or schedules:
            rule = "--paper has settings and schedules of its own"
            raise problem("--paper", " ".join(settings or [str(schedules)]), rule, "Leave it out.")
        if out is None:
            raise problem("--out", out, "--paper needs a folder", "Add --out DIR.")
        only_alone("bench --paper")
        from .paper import run as make

        made = make(out, only=only, larger=larger, redraw=redraw, rounds=rounds)
        write_json(json_file, made)
        return
    # one of them stands for the micro-batch, which has to divide the group, of the recipe
    config = load([*(settings or []), *([] if sizes is None else ["rollout.micro_batch=1"])])
    num_bytes = size_of("--budget", budget)
    if num_bytes is not None and not offload:
        raise problem("--budget", budget, "only --offload has a budget", "Add --offload.")
    names = schedules.split(",") if schedules else None
    chosen = []
    if sweep is not None:
        from .bench_sweep import check_points, points

        chosen = points(settings or [], sweep)
        check_points(sweep, chosen, names, lambda one: _check_bench(one, nproc, files=reward))
    else:
        _check_bench(config, nproc, files=reward)
    if nproc is not None and nproc > 1:
        flags = [f"--schedules={schedules}"] if schedules else []
        flags += [f"--rounds={rounds}"] + ["--collectives"] * collectives + ["--reward"] * reward
        flags += ["--ablation"] * ablation + ([] if sweep is None else [f"--sweep={sweep}"])
        launch_ranks("bench", settings or [], flags, nproc, json_file)
    if ledger:
        from .bench_memory import ledger as measure

        write_json(json_file, measure(config, names, counts("--groups", groups)))
        return
    if sizes is not None:
        from .bench_batches import batches

        write_json(json_file, batches(config, sizes, rounds, names))
        return
    if offload:
        from .bench_offload import offload as compare

        write_json(json_file, compare(config, num_bytes, rounds))
        return
    from .bench import ablation as ablate
    from .bench import bench as run
    from .parallel import leave

    if sweep is not None:
        from .bench_sweep import sweep as through

        result = through(sweep.partition("=")[0].strip(), chosen, names, rounds, reward=reward)
    elif ablation:
        result = ablate(config, rounds, reward=reward)
    else:
        result = run(config, names, rounds, reward=reward, collectives=collectives)
    leave()
    write_json(json_file, result)


def _check_bench(config: Config, nproc: int | None, *, files: bool) -> None:
    """Refuse settings that no bench can run with; a run's folder is left alone."""
    if nproc is not None:
        check_for(config, nproc, resume=True)
    else:
        from .checks import check

        check(config, resume=True, files=files)


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
    check_writable(json_file)
    config, known = load_model(model)
    from .checks import check

    check(config, files=False)
    from .inspection import inspect_pipeline

    named = any(o.startswith("kernel.") for o in model[1:])
    report = inspect_pipeline(config, tiny=tiny, kernel_given=known or named)
    write_json(json_file, report)
    if not report["trainable"]:
        raise typer.Exit(1)


@app.command()
def verify(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE|YAML|RUN|MODEL] [KEY.PATH=VALUE]...",
            help="What to verify, or a folder in diffusers format (default: two prompts of the "
            "embedded recipe in float32); then overrides.",
            show_default=False,
        ),
    ] = None,
    schedules: Annotated[
        str | None,
        typer.Option(
            help="Which to compare with native: retain, reweight, streaming; with :step, :group or "
            ":offload; or MODULE:FUNCTION. Default: all there are.",
            show_default=False,
        ),
    ] = None,
    oracle: Annotated[
        bool,
        typer.Option(
            help="Compare with plain autograd in a higher precision too: a second copy of the "
            "pipeline on every rank."
        ),
    ] = True,
    nproc: Nproc = None,
    json_file: JsonFile = None,
) -> None:
    """Prove that the schedules give native's gradient, on your model and machine.

    One update under each of them from the same state. Ends with 1 when a bound is broken, and says
    what the mistake is.

    Examples: leangrpo verify; leangrpo verify embedded-lora model.dtype=bfloat16 --nproc 2;
    leangrpo verify --schedules native,my_module:MySchedule
    """
    check_writable(json_file)
    words = settings or []
    if not words or "=" in words[0]:
        words = ["embedded", "rollout.prompts=2", *words]
    config, _ = load_model(words)
    if nproc is not None and nproc > 1:
        check_for(config, nproc, resume=True)  # it leaves a run's folder alone
        flags = [f"--schedules={schedules}"] if schedules else []
        flags += [] if oracle else ["--no-oracle"]
        launch_ranks("verify", words, flags, nproc, json_file)
    from .checks import check

    check(config, files=False)
    from .parallel import leave
    from .verify import verify as run

    names = schedules.split(",") if schedules else None
    result = run(config, names, oracle=oracle, say=progress)
    leave()
    if is_first_rank():
        from .verify_table import show

        show(result.as_dict())
    write_json(json_file, result.as_dict())
    if is_run(words[0]):
        write_json(Path(words[0]) / VERIFIED, result.as_dict())
    if result.broken:
        raise typer.Exit(1)


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
    host_memory: Annotated[
        str | None,
        typer.Option(help="Of the host, for each GPU; default: twice its own.", show_default=False),
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
    check_writable(json_file)
    config = load(settings)
    from .device import device as described
    from .plan import plan as make

    facts = {"tflops": tflops, "bandwidth": bandwidth, "link": link, "efficiency": efficiency}
    there = described(device, gpus, memory=memory, host_memory=host_memory, **facts)
    result = make(config, there, reward=reward)
    result.show(everything=everything)
    write_json(json_file, result.as_dict())
    if result.choice is None:
        raise typer.Exit(1)
