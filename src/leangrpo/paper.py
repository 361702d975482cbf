"""The tables and figures of the LeanGRPO paper (arXiv 2609.03528) on this machine, by one command.

Which measurements make which figure, and how they are taken. `figures` draws them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from . import figures, race
from .config import Config, load_config
from .costs import Option
from .errors import LeanError, problem
from .machine import machine

RESULTS = "results.json"

ROUNDS = 3
"""Updates of each schedule that are timed."""

SIZES = {"small": (3, 2), "middle": (4, 4), "large": (6, 6)}
"""Layers, and heads of 64, of the random Stable Diffusion 3: 1.7, 9 and 31 million parameters."""

LARGER = {"small": (6, 6), "middle": (12, 8), "large": (18, 12)}
"""With `--larger`: 31, 118 and 392 million."""

LEAN = ("native", "retain", "reweight")
ABLATION = tuple(figures.ABLATION)
FRACTIONS = (0.2, 0.6, 1.0)

SHAPE = (
    "sampling={steps: 10, height: 32, width: 32, call: {max_sequence_length: 16}}",
    "rollout={prompts: 1, generations: 2, micro_batch: 1}",
    "selection={rule: fraction, last: true, steps: null}",
)
"""Ten steps of 32 x 32 pixels (64 tokens), a group of two, a sample a forward."""

PRECISIONS = {
    "BF16, all weights": ("model.train=full", "model.dtype=bfloat16"),
    "BF16, LoRA": ("model.train=lora", "model.dtype=bfloat16"),
    "FP32, LoRA": ("model.train=lora", "model.dtype=float32"),
}
ALL_FOUR = {"FP32, all weights": ("model.train=full", "model.dtype=float32"), **PRECISIONS}


@dataclass(frozen=True)
class Point:
    """A measurement: its place in a figure, and what `leangrpo bench` is asked for."""

    panel: str
    line: str
    size: str
    settings: tuple[str, ...]
    schedules: tuple[str, ...] = LEAN
    source: str = "embedded"
    ranks: int = 1
    reward: bool = False

    def config(self, pipeline: str | None = None) -> Config:
        """Its settings; `pipeline` is the folder of a model of its size."""
        more = [] if pipeline is None else [f"model.pipeline={pipeline}"]
        return load_config(self.source, [*self.settings, *more])

    @property
    def key(self) -> str:
        """All that it depends on: the same in two figures is measured once."""
        parts = (self.source, self.size, self.ranks, self.reward, self.schedules, self.settings)
        return json.dumps(parts)


def by_fraction(
    panel: str, line: str, size: str, *settings: str, schedules: tuple[str, ...] = LEAN, **more: Any
) -> list[Point]:
    """A line of figure 3: the same with more and more of the steps selected."""
    return [
        Point(panel, line, size, (*SHAPE, *settings, f"selection.fraction={f}"), schedules, **more)
        for f in FRACTIONS
    ]


def precision_points() -> list[Point]:
    """Figure 3 (a), and what figure 6 takes its memory from."""
    return [
        p
        for name, settings in PRECISIONS.items()
        for p in by_fraction("precision", name, "middle", *settings)
    ]


def speedup_points() -> list[Point]:
    """Figure 3: speedup against the share of selected steps, in five panels."""
    found = precision_points()
    for size in SIZES:
        found += by_fraction("model size", size, size)
    found += by_fraction("algorithm", "FlowGRPO", "small", source="embedded+flow-grpo")
    windows = (("FlowGRPO-Fast", "flow-grpo-fast", 5), ("MixGRPO-Flash", "mix-grpo-flash", 8))
    for name, recipe, last in windows:
        found += [
            Point(
                "algorithm",
                name,
                "small",
                (*SHAPE[:2], f"selection.range=[0, {last}]", f"selection.size={n}"),
                source=f"embedded+{recipe}",
            )
            for n in sorted({2, (last + 2) // 2, last})
        ]
    four = ("rollout={prompts: 1, generations: 4, micro_batch: 1}",)
    for ranks in (1, 2, 4):
        name = f"{ranks} rank{'s' * (ranks > 1)}"
        stepwise = ("native:step", "retain", "reweight")
        found += by_fraction("ranks", name, "small", *four, schedules=stepwise, ranks=ranks)
    for batch in (1, 2, 4):
        name = f"micro-batch {batch}"
        found += by_fraction("micro-batch", name, "small", *four, f"rollout.micro_batch={batch}")
    return found


def breakdown_points() -> list[Point]:
    """Figure 4: every step selected, with pictures, reward and optimizer."""
    rest = ("selection.fraction=1.0", "rewards=[{name: jpeg_compressibility}]", "ema.decay=0")
    return [
        Point(name, name, "middle", (*SHAPE, *settings, *rest), reward=True)
        for name, settings in PRECISIONS.items()
    ]


def ablation_points() -> list[Point]:
    """Table 1: what each change brings on two ranks, every step selected."""
    two = "rollout={prompts: 2, generations: 2, micro_batch: 1}"
    return [
        Point(
            "ablation",
            name,
            "middle",
            (*SHAPE, two, *settings, "selection.fraction=1.0"),
            ABLATION,
            ranks=2,
        )
        for name, settings in ALL_FOUR.items()
    ]


# -- the suitability map -------------------------------------------------------------------------

MAP_MODELS = {"SD3.5-M": "sd35-medium+flow-grpo", "FLUX.1-dev": "flux1-dev+flow-grpo"}
MAP_MEMORY = (24, 48, 80, 141)
MAP_AXES = {
    "generations of a rank": (1, 2, 4, 8, 16),
    "selected steps": (1, 3, 5, 7, 10),
}
MAP_RANKS = 8
MAP_DEVICE = "h100"


def map_config(model: str, train: str, axis: str, value: int) -> Config:
    """A cell's settings: 10 steps, one update on a rollout; two generations on each rank
    where the selected steps vary."""
    held = value if axis == "generations of a rank" else 2
    selected = value if axis == "selected steps" else 10
    settings = [
        f"model.train={train}",
        "sampling.steps=10",
        f"selection={{rule: fraction, fraction: {selected / 10}, last: true, steps: null}}",
        f"rollout={{prompts: 8, generations: {held * MAP_RANKS}, micro_batch: 1, parts: 1}}",
        "objective.kl=0",
    ]
    return load_config(MAP_MODELS[model], settings)


def suitability(_: Session) -> dict[str, Any]:
    """Figure 7: what the planner takes on eight GPUs of so much memory, and what it gains."""
    from .device import device
    from .plan import measure, plan

    rows: list[dict[str, Any]] = []
    for name in MAP_MODELS:
        for train in ("full", "lora"):
            model = measure(map_config(name, train, "selected steps", 10))
            for axis, values in MAP_AXES.items():
                for value in values:
                    config = map_config(name, train, axis, value)
                    for memory in MAP_MEMORY:
                        there = device(MAP_DEVICE, MAP_RANKS, memory=f"{memory}GiB")
                        found = plan(config, there, model=model)
                        row: dict[str, Any] = {
                            "model": name,
                            "train": train,
                            "axis": axis,
                            "value": value,
                        }
                        row |= {"memory_gib": memory, "schedule": None, "speedup": None}
                        if found.choice is not None:
                            best = found.choice.chosen
                            row["schedule"] = best.option.schedule
                            row["checkpointing"] = best.option.checkpointing
                            row["offload"] = best.option.activations is not None
                            usual = [p for p in found.choice.fits if _is_usual(p.option)]
                            row["speedup"] = usual[0].seconds / best.seconds if usual else None
                            row["peak_bytes"] = best.peak_bytes
                        rows.append(row)
    name = device(MAP_DEVICE).name
    return {"device": f"{MAP_RANKS} x {name}, by its data sheet but for the memory", "rows": rows}


def _is_usual(option: Option) -> bool:
    """The usual loop: native, a reduction at every backward, no sampling ahead of rewards."""
    return (option.schedule, option.sync, option.ahead) == ("native", "step", 0)


def _say(text: str) -> None:
    print(text, flush=True)


# -- measuring -----------------------------------------------------------------------------------


@dataclass
class Session:
    """A folder's results: what is measured stays on disk, point by point and figure by figure.

    With `redraw` what the folder has already is taken, and only the rest is measured.
    """

    folder: Path
    rounds: int = ROUNDS
    larger: bool = False
    redraw: bool = False
    say: Callable[[str], None] = _say
    results: dict[str, Any] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    models: Path | None = None

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / RESULTS
        if path.exists():
            self.results = _read(path)
        here = machine() | {"larger": self.larger, "rounds": self.rounds}
        if not self.redraw:
            self.results.setdefault("machine", here)
            if self.results["machine"] != here:  # nothing measured elsewhere stays beside this
                self.results = {"machine": here}
        self.results.setdefault("machine", here)
        self.results.setdefault("points", {})
        self.results.setdefault("figures", {})

    def save(self) -> None:
        """Write all there is, so that an interrupt loses one measurement at most."""
        path = self.folder / RESULTS
        text = json.dumps(self.results, indent=1) + "\n"
        path.with_suffix(".part").write_text(text, encoding="utf-8")
        os.replace(path.with_suffix(".part"), path)

    def pipeline(self, size: str) -> str:
        """The folder of a model of this size, written when it is first asked for."""
        from .bench_model import make_bench_model

        assert self.models is not None, "models live in the temporary folder of `run`"
        folder = self.models / size
        if not folder.exists():
            make_bench_model(folder, *(LARGER if self.larger else SIZES)[size])
        return str(folder)

    def measured(self, point: Point) -> dict[str, Any]:
        """What `bench.measure` says of a point: taken once for all figures of a command."""
        points: dict[str, Any] = self.results["points"]
        if point.key not in points or not (self.redraw or point.key in self.taken):
            points[point.key] = _measure(point, self.pipeline(point.size), self.rounds)
            self.taken.add(point.key)
            self.save()
        found: dict[str, Any] = points[point.key]
        return found

    def rows(self, points: Sequence[Point]) -> list[dict[str, Any]]:
        """The measurements of a figure: a row for each point and schedule."""
        found: list[dict[str, Any]] = []
        began, new = time.monotonic(), len(self.taken)
        for number, point in enumerate(points, 1):
            result = self.measured(point)
            about = {
                "panel": point.panel,
                "line": point.line,
                "parameters": result["parameters"],
                "ranks": result["ranks"],
                "micro_batch": result["micro_batch"],
                "steps": result["steps"],
                "selected": result["selected"],
                "fraction": result["selected"] / result["steps"],
            }
            found += [about | row for row in result["rows"]]
            if len(self.taken) > new:
                left = (time.monotonic() - began) / number * (len(points) - number)
                place = f"{point.line}, {result['selected']} of {result['steps']} steps"
                self.say(f"  {number} of {len(points)}: {place}; {_minutes(left)} left")
        return found


def _measure(point: Point, pipeline: str, rounds: int) -> dict[str, Any]:
    """In this process, or, for several ranks, in `leangrpo bench --nproc` of its own."""
    if point.ranks == 1:
        from .bench import measure

        config = point.config(pipeline)
        return measure(config, point.schedules, rounds, reward=point.reward)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        words = [sys.executable, "-m", "leangrpo", "bench", "--nproc", str(point.ranks)]
        words += ["--schedules", ",".join(point.schedules), "--rounds", str(rounds)]
        words += ["--json", str(file), "--", point.source, *point.settings]
        words += [f"model.pipeline={pipeline}"]
        ended = subprocess.run(words, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise LeanError(f"{point.ranks} ranks could not be timed: {ended.stderr.strip()}")
        return _read(file)


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise problem("--out", str(path), f"it is not JSON: {error}", "Remove it.") from error
    return found


def _minutes(seconds: float) -> str:
    return f"about {seconds / 60:.0f} min" if seconds >= 60 else f"about {seconds:.0f} s"


# -- the figures ---------------------------------------------------------------------------------


class Figure(NamedTuple):
    """`run` measures, `draw(result, folder, command=...)` writes `NAME.svg` and `NAME.csv` and
    `tell` says it in Markdown. `minutes`: on two cores."""

    name: str
    title: str
    minutes: float
    run: Callable[[Session], dict[str, Any]]
    draw: Callable[..., Any]
    tell: Callable[[dict[str, Any]], str]


FIGURES = (
    Figure(
        "table1",
        "Ablation: what each change brings, on two ranks",
        8.0,
        lambda s: {"rows": s.rows(ablation_points())},
        figures.draw_ablation,
        figures.tell_ablation,
    ),
    Figure(
        "figure3",
        "Speedup over native against the share of selected steps",
        14.0,
        lambda s: {"rows": s.rows(speedup_points())},
        figures.draw_speedup,
        figures.tell_speedup,
    ),
    Figure(
        "figure4",
        "Where the time of an update goes, all steps selected",
        1.5,
        lambda s: {"rows": s.rows(breakdown_points())},
        figures.draw_breakdown,
        figures.tell_breakdown,
    ),
    Figure(
        "figure5",
        "Reward against updates and against time, and the time to a target",
        11.0,
        lambda s: race.race(say=s.say),
        race.draw,
        race.verdict,
    ),
    Figure(
        "figure6",
        "Memory against selected steps",
        2.0,
        lambda s: {"rows": s.rows(precision_points())},
        figures.draw_memory,
        figures.tell_memory,
    ),
    Figure(
        "figure7",
        "Suitability: what the planner takes",
        0.5,
        suitability,
        figures.draw_map,
        figures.tell_map,
    ),
)


def command(name: str, *, larger: bool, rounds: int) -> str:
    """What to type for a figure."""
    more = " --larger" * larger + (f" --rounds {rounds}" if rounds != ROUNDS else "")
    return f"leangrpo bench --paper --only {name} --out DIR{more}"


def wanted(only: str | None) -> list[Figure]:
    """The figures of `--only NAME,...`, in order; all without it.

    Raises LeanError for a name there is not.
    """
    known = [figure.name for figure in FIGURES]
    names = known if only is None else [name.strip() for name in only.split(",")]
    for name in names:
        if name not in known:
            raise problem("--only", name, f"must be among {', '.join(known)}")
    return [figure for figure in FIGURES if figure.name in names]


def run(
    folder: Path,
    *,
    only: str | None = None,
    larger: bool = False,
    redraw: bool = False,
    rounds: int = ROUNDS,
    say: Callable[[str], None] = _say,
) -> dict[str, Any]:
    """Measure, draw and tell: `NAME.svg`, `NAME.csv`, `results.json` and `README.md` in `folder`.

    Returns what `results.json` holds. Raises LeanError for a figure there is not, and where
    `results.json` is of something else.
    """
    chosen = wanted(only)
    session = Session(folder, rounds, larger, redraw, say)
    stored: dict[str, Any] = session.results["figures"]
    with TemporaryDirectory() as models:
        session.models = Path(models)
        for number, figure in enumerate(chosen, 1):
            typed = command(figure.name, larger=larger, rounds=rounds)
            place = f"{figure.name} ({number} of {len(chosen)}): {figure.title}"
            before = stored.get(figure.name)
            if redraw and before is not None and before["command"] == typed:
                say(f"{place}; as it was measured")
            else:
                say(f"{place}; {_minutes(60 * figure.minutes)} on two cores")
                began = time.monotonic()
                stored[figure.name] = {"command": typed, "result": figure.run(session)}
                stored[figure.name]["seconds"] = time.monotonic() - began
                session.save()
            one = stored[figure.name]
            figure.draw(one["result"], folder, command=typed)
    (folder / "README.md").write_text(page(session.results), encoding="utf-8")
    say(f"{folder / 'README.md'}")
    return session.results


def page(results: dict[str, Any], images: str = "") -> str:
    """All figures that were made, with their ratios, as Markdown; `images` leads to the folder."""
    m = results["machine"]
    text = [
        f"Measured on {m['processor']}, {m['cores']} cores, {m['threads']} threads, "
        f"torch {m['torch']}; medians of {m['rounds']} rounds, the schedules in turn.",
    ]
    for figure in FIGURES:
        one = results["figures"].get(figure.name)
        if one is None:
            continue
        name = f"{figure.name[:-1].capitalize()} {figure.name[-1]}"
        text += [
            f"## {name}. {figure.title}",
            f"![{figure.title}]({images}{figure.name}.svg)",
            figure.tell(one["result"]),
            f"`{one['command']}` ({_minutes(one['seconds'])}; [data]({images}{figure.name}.csv))",
        ]
    return "\n\n".join(text) + "\n"


if __name__ == "__main__":  # the measured part of docs/results.md
    print(page(_read(Path(sys.argv[1]) / RESULTS), *sys.argv[2:]), end="")
