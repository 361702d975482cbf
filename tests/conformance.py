"""Every algorithm on every kind of backbone, under all three schedules, through the real loop.

    python tests/conformance.py [--algorithms a,b] [--models sd,sd3,...] [--json FILE]

Prints a table with a row for each pair of an algorithm (its recipe, made small) and a tiny pipeline
of random weights (`tiny`), and ends with 1 when a row fails. A row holds when

* retain's gradient of the first optimizer step is native's bitwise, and so are the weights after
  two updates, in float32;
* reweight's is native's to a relative L2 of 1e-12, in float64;
* every update calls the denoisers exactly as often as `expected_calls` says, which knows the
  settings and nothing of the code;
* a run resumed from its first update ends with bitwise the weights of one that ran through.

A pair that cannot be, such as a DDIM kernel on a flow-matching model, must be refused; these pairs
are listed below the table with the reason.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import tiny
import torch
from torch import Tensor

from leangrpo import train as loop
from leangrpo.config import Config, load_config
from leangrpo.cookbook import FOLDER
from leangrpo.errors import LeanError
from leangrpo.loading import denoisers, load_pipeline
from leangrpo.oracle import float64_throughout
from leangrpo.setup import Setup, set_up

SCHEDULES = ("native", "retain", "reweight")
BOUND = 1e-12
UPDATES = 2

MODELS: dict[str, list[str]] = {
    "sd": ["sampling.guidance=4.0"],
    "sdxl": ["sampling.guidance=4.0"],
    "sd3": ["sampling.guidance=4.0"],
    "flux": ["sampling.guidance=3.5"],
    "wan": ["sampling.guidance=4.0"],
    "wan22": ["sampling.guidance=1.0"],
}
"""The tiny pipelines, and their guidance: real in sd, sd3 and wan, an embedding in flux."""

NOISE_PREDICTING = ("sd", "sdxl")
"""Models whose transitions are DDIM's; those of the others are flow matching's."""

TWO_CALLS = ("wan",)
"""Pipelines whose guidance is a second call of the denoiser, not a batch of twice the size."""

SMALL = [
    "sampling.steps=5",
    "rollout.prompts=2",
    "rollout.generations=3",
    "rollout.micro_batch=1",
    "checkpoint.every=1",
]

WINDOW = ["selection.size=2", "selection.range=[0, 4]"]

TWO_PARTS = ["rollout.parts=2"]

ALGORITHMS: dict[str, list[str]] = {
    "flow-grpo": [],
    "flow-grpo-fast": WINDOW,
    "flow-grpo-fast-branch": WINDOW,
    "grpo-guard": [],
    "flow-cps": [],
    "dance-grpo": [],
    "dance-grpo-best-of": ["rollout.generations=4", "advantage.best_of=2"],
    "mix-grpo": [*WINDOW, "selection.every=1", *TWO_PARTS],
    "mix-grpo-flash": [*WINDOW, "selection.every=1", *TWO_PARTS, "sampling.steps=12"],
    "mix-grpo-flash-star": [*WINDOW, *TWO_PARTS, "sampling.steps=12"],
    "ddpo": [*TWO_PARTS, "advantage.history=5", "advantage.min_history=4"],
    "ddpo-on-policy": ["advantage.history=5", "advantage.min_history=4"],
    "dpok": [],
}
"""Recipes, and what makes each one small besides `SMALL`. DDPO's history is shorter than two
updates, so that it decides the second; MixGRPO's window moves between them."""


# -- rewards, named `conformance:...` in the settings ----------------------------------------------


def brightness(images: Tensor, prompts: list[str], metadata: list[Any]) -> Tensor:
    """Mean brightness, weighted so that no two pixels count the same."""
    flat = images.flatten(1).double()
    return (flat * torch.linspace(0, 1, flat.shape[1], dtype=torch.float64)).mean(dim=1)


def contrast(images: Tensor, prompts: list[str], metadata: list[Any]) -> Tensor:
    return images.flatten(1).double().std(dim=1)


# -- what it should cost ---------------------------------------------------------------------------


def evaluations(c: Config, steps: Sequence[int]) -> tuple[int, int]:
    """Denoiser evaluations of a trajectory that trains `steps`: in all, and before its window."""
    total, first, stop = c.sampling.steps, min(steps), max(steps) + 1
    flash = getattr(c.sampling, "flash", None)
    if flash is None or flash.ratio is None:
        return total, first
    before, after = first, total - stop
    if after:  # int((T - stop + 1) ratio) grid points, the window's end being one of them
        after = max(2, int((total - stop + 1) * flash.ratio + 1e-9)) - 1
    if before and flash.where == "around":
        before = max(1, int(before * flash.ratio + 1e-9))
    return before + (stop - first) + after, before


def expected_calls(
    c: Config, schedule: str, trained: Callable[[int, int], Sequence[int]], per_step: int
) -> int:
    """Denoiser calls of an update with one sample in a forward; `trained(p, m)` are the steps.

    Sampling runs all steps of all samples, a shared prefix once for its group. Native runs the
    trained steps of the first part again, and every later optimizer step those of its part; samples
    left out by best-of are not run again. A KL adds the reference at every trained step.
    """
    r, sampled = c.rollout, 0
    num_trained = {len(trained(p, m)) for p in range(r.prompts) for m in range(r.generations)}
    (num_steps,) = num_trained
    for p in range(r.prompts):
        lengths = [evaluations(c, trained(p, m)) for m in range(r.generations)]
        sampled += sum(total for total, _ in lengths)
        if r.share_prefix:
            sampled -= (r.generations - 1) * lengths[0][1]
    kept = c.advantage.best_of or r.generations
    replays = (schedule == "native") + r.parts * r.epochs - 1
    replayed = replays * (r.prompts // r.parts) * kept * num_steps
    compared = r.prompts * r.generations * num_steps if c.objective.needs_reference else 0
    return per_step * (sampled + replayed + compared)


# -- a run, and what is seen of it -----------------------------------------------------------------


@dataclass
class Seen:
    """What a run shows from outside."""

    calls: list[int] = field(default_factory=list)
    expected: list[int] = field(default_factory=list)
    gradient: Tensor = field(default_factory=lambda: torch.empty(0))
    weights: str = ""
    notes: dict[str, Any] = field(default_factory=dict)


@contextmanager
def watched(seen: Seen, model: str) -> Iterator[None]:
    """Inside, `train` starts from moved weights, and its calls and first gradient are seen."""

    def patched(config: Config, *, resume: bool = False, quiet: bool = False) -> Setup:
        s = set_up(config, resume=resume, quiet=quiet)
        if not resume:
            move(s)
        if s.critic is not None and config.model.dtype == "float64":
            s.critic.value.network.double()  # its features are, inside float64_throughout
        watch(s, seen, model)
        return s

    with mock.patch.object(loop, "set_up", patched):
        yield


def move(s: Setup, size: float = 0.02) -> None:
    """Away from the start, where no KL has a gradient and a value network says 0."""
    generator = torch.Generator().manual_seed(5)
    value = [s.critic.value.network.last] if s.critic is not None else []
    with torch.no_grad():
        for p in (*s.policy.parameters, *value):
            p += size * torch.randn(p.shape, generator=generator).to(p)


def watch(s: Setup, seen: Seen, model: str) -> None:
    count = [0]

    def call(*_: Any) -> None:
        count[0] += 1

    def step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not seen.gradient.numel():
            some = [p.grad.flatten() for p in s.policy.parameters if p.grad is not None]
            seen.gradient = torch.cat(some).double()

    for module in (*s.policy.denoisers, *(s.policy._reference or {}).values()):
        module.register_forward_pre_hook(call)
    s.optimizer.register_step_pre_hook(step)
    record = s.record.metrics

    def metrics(line: dict[str, Any]) -> None:
        c, update = s.config, line["update"] - 1
        guided = model in TWO_CALLS and c.sampling.guidance > 1
        seen.expected.append(
            expected_calls(
                c, c.schedule, lambda p, m: s.select(update, p, m).selected, 2 if guided else 1
            )
        )
        seen.calls.append(count[0])
        seen.notes |= {"zero": line["zero_variance_groups"], "steps": line["steps"]}
        prompts = range(c.rollout.prompts)
        starts = [min(s.select(update, p).selected) for p in prompts]
        seen.notes.setdefault("starts", []).extend(starts)
        count[0] = 0
        record(line)

    s.record.metrics = metrics  # type: ignore[method-assign]


def settings(algorithm: str, model: str, root: Path, run: Path, *more: str) -> Config:
    call = tiny.CALL[model]
    own = [
        f"sampling.{key}={call[key]}" for key in ("height", "width", "num_frames") if key in call
    ]
    more_of_call = {k: v for k, v in call.items() if k == "max_sequence_length"}
    return load_config(
        str(FOLDER / "algorithms" / f"{algorithm}.yaml"),  # alone, without what goes with a model
        [
            f"model.pipeline={root / model}",
            f"prompts={{train: {root / 'prompts.txt'}, heldout: null}}",
            "rewards=[{name: 'conformance:brightness'}, "
            "{name: 'conformance:contrast', weight: 0.5}]",
            f"sampling.call={more_of_call}",
            *own,
            *MODELS[model],
            *SMALL,
            *ALGORITHMS[algorithm],
            f"updates={UPDATES}",
            f"run.dir={run}",
            *more,
        ],
    )


def load_in_float64(source: str, **options: Any) -> Any:
    """Also what diffusers keeps in float32 whatever is asked for, such as Wan's time embedding."""
    pipe = load_pipeline(source, **options)
    for module in denoisers(pipe).values():
        torch.nn.Module.to(module, torch.float64)  # diffusers' own warns of the other way round
    return pipe


def run(config: Config, model: str, *, resume: bool = False) -> Seen:
    seen = Seen()
    with ExitStack() as stack:
        if config.model.dtype == "float64":
            stack.enter_context(float64_throughout())
            stack.enter_context(mock.patch("leangrpo.setup.load_pipeline", load_in_float64))
        stack.enter_context(watched(seen, model))
        stack.enter_context(redirect_stdout(io.StringIO()))
        seen.weights = loop.train(config, resume=resume, quiet=True)["weights_sha256"]
    return seen


# -- a row -----------------------------------------------------------------------------------------


@dataclass
class Row:
    """A pair of an algorithm and a model, and what went wrong with it (`failures`)."""

    algorithm: str
    model: str
    refused: str | None = None
    retain: bool | None = None
    reweight: float | None = None
    calls: dict[str, list[int]] = field(default_factory=dict)
    updates: int = 0
    optimizer_steps: int = 0
    resumed: bool | None = None
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0


def make_models(root: Path, names: Sequence[str] = tuple(MODELS)) -> Path:
    """Write the tiny pipelines in diffusers format, and prompts that come again in every update."""
    for name in names:
        tiny.save(tiny.BUILDERS[name](), root / name)
    (root / "prompts.txt").write_text("a cat\na dog\n", encoding="utf-8")
    return root


def row(algorithm: str, model: str, root: Path, work: Path) -> Row:
    """Run a pair under all schedules; `root` is of `make_models`, `work` an empty folder."""
    began, r = time.perf_counter(), Row(algorithm, model)

    def make(schedule: str, *more: str) -> Config:
        name = "-".join([schedule, *more]).replace("=", "-")
        return settings(algorithm, model, root, work / name, f"schedule={schedule}", *more)

    wrong = (make("native").kernel.name == "ddim") != (model in NOISE_PREDICTING)
    try:
        seen = {schedule: run(make(schedule), model) for schedule in SCHEDULES}
    except LeanError as error:
        r.refused = str(error)
        if not wrong or "kernel.name" not in r.refused:
            r.failures.append(f"refused: {error}")
        return r
    if wrong:
        r.failures.append("its kernel is of the other family, and it was not refused")
    compare(r, seen)
    double = [
        run(make(schedule, "model.dtype=float64", "updates=1"), model).gradient
        for schedule in ("native", "reweight")
    ]
    r.reweight = float((double[1] - double[0]).norm() / double[0].norm())
    if not r.reweight <= BOUND:
        r.failures.append(f"reweight is {r.reweight:.1e} away from native in float64")
    r.resumed = resumes(make("reweight"), model, seen["reweight"].weights)
    if not r.resumed:
        r.failures.append("a resumed run has other weights")
    r.notes = notes(make("native"), seen["reweight"])
    r.seconds = time.perf_counter() - began
    return r


def compare(r: Row, seen: dict[str, Seen]) -> None:
    """What a row says of its three float32 runs."""
    native, retain = seen["native"], seen["retain"]
    r.updates = len(native.calls)
    r.optimizer_steps = len(native.notes["steps"])
    r.retain = torch.equal(retain.gradient, native.gradient) and retain.weights == native.weights
    if not r.retain:
        r.failures.append("retain is not native bitwise")
    if not float(native.gradient.norm()) > 0:
        r.failures.append("there is no gradient")
    for schedule, one in seen.items():
        r.calls[schedule] = one.calls
        if one.calls != one.expected:
            r.failures.append(f"{schedule}: {one.calls} calls, {one.expected} expected")
        if len(one.calls) != UPDATES or one.notes["zero"]:
            r.failures.append(f"{schedule}: {len(one.calls)} updates, {one.notes['zero']} flat")


def resumes(config: Config, model: str, weights: str) -> bool:
    """Whether the run, gone on with from its first update, ends with the same weights."""
    whole = Path(config.run.dir or "")
    again = whole.with_name(f"{whole.name}-again")
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / f"{UPDATES:06d}")
    own = config.run.model_copy(update={"dir": str(again)})
    seen = run(config.model_copy(update={"run": own}), model, resume=True)
    return seen.weights == weights and len(seen.calls) == UPDATES - 1


def notes(c: Config, seen: Seen) -> list[str]:
    """What saves evaluations, or adds some."""
    found = []
    if c.rollout.share_prefix:
        num, steps = c.rollout.generations, c.sampling.steps
        fewer = ", ".join(str(start + num * (steps - start)) for start in seen.notes["starts"])
        found.append(f"shared prefix: groups of {fewer}, not {num * steps}")
    if c.advantage.best_of:
        found.append(f"best {c.advantage.best_of} of {c.rollout.generations}")
    if c.objective.needs_reference:
        found.append("reference")
    if (flash := getattr(c.sampling, "flash", None)) is not None and flash.ratio is not None:
        found.append(f"flash {flash.ratio:g}")
    if (steps := c.rollout.parts * c.rollout.epochs) > 1:
        found.append(f"{steps} optimizer steps")
    return found


# -- the table -------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> Any:
    from rich import box
    from rich.table import Table

    made = Table(box=box.MARKDOWN)
    for name in ("algorithm", "model", "retain", "reweight", "native calls", "lean calls"):
        made.add_column(name, no_wrap=True)
    for name in ("updates", "resumed", "notes"):
        made.add_column(name)
    for r in rows:
        if r.refused and not r.failures:
            continue
        native, lean = (r.calls.get(schedule, []) for schedule in ("native", "reweight"))
        made.add_row(
            r.algorithm,
            r.model,
            {True: "bitwise", False: "DIFFERS", None: ""}[r.retain],
            "" if r.reweight is None else f"{r.reweight:.0e}",
            ", ".join(map(str, native)),
            ", ".join(map(str, lean)),
            str(r.updates),
            {True: "bitwise", False: "DIFFERS", None: ""}[r.resumed],
            "FAILED, see below" if r.failures else "; ".join(r.notes),
        )
    return made


def refusals(rows: Sequence[Row]) -> dict[str, dict[str, str]]:
    """Reason -> algorithms -> models, of the pairs that cannot be."""
    found: dict[str, dict[str, str]] = {}
    for r in rows:
        if r.refused and not r.failures:
            pairs = found.setdefault(r.refused.partition(": ")[2], {})
            models = pairs.get(r.algorithm)
            pairs[r.algorithm] = f"{models}, {r.model}" if models else r.model
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    from rich.console import Console

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS), help="separated by commas")
    parser.add_argument("--models", default=",".join(MODELS), help="separated by commas")
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    given = parser.parse_args(arguments)
    algorithms, models = given.algorithms.split(","), given.models.split(",")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    for what, names, known in (
        ("algorithm", algorithms, ALGORITHMS),
        ("model", models, MODELS),
    ):
        for name in names:
            if name not in known:
                parser.error(f"there is no {what} {name!r}; there are {', '.join(known)}")
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        root = make_models(Path(folder), models)
        for algorithm in algorithms:
            for model in models:
                work = root / "runs" / f"{algorithm}-{model}"
                rows.append(row(algorithm, model, root, work))
                print(".", end="", flush=True, file=sys.stderr)
    print(file=sys.stderr)
    Console(width=180).print(table(rows))
    for reason, pairs in refusals(rows).items():
        print(f"refused: {'; '.join(f'{a} on {m}' for a, m in pairs.items())}: {reason}")
    for r in rows:
        for failure in r.failures:
            print(f"FAILED: {r.algorithm} on {r.model}: {failure}")
    if given.json:
        given.json.write_text(json.dumps([asdict(r) for r in rows], indent=1), encoding="utf-8")
    failed = [r for r in rows if r.failures]
    ran = [r for r in rows if not r.refused]
    print(f"{len(ran)} pairs ran, {len(rows) - len(ran)} were refused, {len(failed)} failed.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
