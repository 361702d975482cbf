"""How good the predictions behind `schedule: auto` are: each option predicted, run and compared.

    python scripts/plan_accuracy.py [--quick] [--only NAME]

Workloads: adapters or all weights, a small or a large group, one trained step or most of them, and
two resolutions, in such a half of the combinations that every pair of values occurs; and the
embedded recipe with its OCR. For each, `auto` probes and chooses, before the measurements, in
their middle and after them (costs are the medians: a machine slows down and speeds up). Every
option is run in turn, A B C A B C, as training runs it; seconds are medians of the rounds.
Peak memory is that of an update of its own: the tensors that exist before it, found by the garbage
collector, and what the allocator was asked for during it.

With `--processor-time` all clocks, the probe's too, are the processor time of this process: on one
core (`taskset -c 0`), it is what the seconds would be if nobody else used it.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
import make_bench_model

from leangrpo.auto import Auto
from leangrpo.choice import Choice, choose, configured
from leangrpo.config import Config, load_config
from leangrpo.costs import Costs, Key, Option, StepCost
from leangrpo.memory import peak_memory, storages
from leangrpo.planner import Prediction, predict
from leangrpo.recompute import set_checkpointing
from leangrpo.setup import Setup, make_layout, make_schedule, set_up
from leangrpo.train import one_update

TURNS_S = 24.0
"""Seconds that the options of a workload are run for together, in 3 to 12 turns."""

SCHEDULES = ("native", "retain", "reweight", "streaming")


@dataclass(frozen=True, slots=True)
class Case:
    """A workload: its name and settings, and the micro-batches that are measured."""

    name: str
    settings: tuple[str, ...]
    micro: tuple[int, ...]
    recipe: str | None = None


def cases(model: Path) -> list[Case]:
    """A half fraction of train x group x window x resolution, and the embedded recipe."""
    made = []
    for number in range(8):
        full, large, long = number & 4, number & 2, number & 1
        high = bool(full) ^ bool(large) ^ bool(long)
        size = 64 if high else 32
        made.append(
            Case(
                f"{'full' if full else 'lora'}, group of {6 if large else 3}, "
                f"{3 if long else 1} of 4 steps, {size} x {size}",
                (
                    f"model.pipeline={model}",
                    "model.dtype=float32",
                    f"model.train={'full' if full else 'lora'}",
                    f"sampling.height={size}",
                    f"sampling.width={size}",
                    "sampling.steps=4",
                    "sampling.guidance=1.0",
                    "sampling.call={max_sequence_length: 16}",
                    "selection.rule=list",
                    f"selection.steps={[0, 1, 2] if long else [1]}",
                    f"rollout.generations={6 if large else 3}",
                    "rewards=[{name: jpeg_compressibility, weight: 1.0}]",
                ),
                (1, 3, 6) if large else (1, 3),
            )
        )
    made.append(
        Case("embedded, full, group of 6, OCR", ("rollout.generations=6",), (1, 6), "embedded")
    )
    return made


def settings(case: Case, folder: Path) -> Config:
    """The run's settings, with `auto`."""
    return load_config(
        case.recipe or "embedded",
        [
            "schedule=auto",
            "advantage.clip=null",
            "rollout.prompts=2",
            "rollout.ahead=1",
            "rollout.micro_batch=1",
            "run.threads=1",
            *case.settings,
            f"run.dir={folder}",
        ],
    )


@dataclass
class Measured:
    """What an option took."""

    option: Option
    seconds: list[float]
    peak: int = 0


class Bench:
    """A run that is never finished: its updates under any option."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.s = set_up(config, quiet=True)
        self.gradients: Any = self.s.schedule.gradients  # type: ignore[attr-defined]

    def probe(self) -> Choice:
        s = self.s
        auto = Auto(
            self.config,
            s.policy,
            self.gradients,
            s.world,
            s.layout,
            s.optimizer,
            s.scorer,
            s.examples[0],
            len(s.examples),
        )
        return auto.decide()

    def under(self, option: Option) -> Setup:
        s, config = self.s, configured(self.config, option)
        set_checkpointing(s.policy, option.checkpointing)
        schedule = make_schedule(config, s.policy, s.watch, self.gradients)
        layout = make_layout(config, s.world)
        return replace(s, config=config, schedule=schedule, layout=layout)

    def update(self, option: Option, number: int) -> float:
        s = self.under(option)
        began = time.perf_counter()
        one_update(s, number)
        return time.perf_counter() - began

    def peak(self, option: Option, number: int) -> int:
        s = self.under(option)
        gc.collect()
        before = sum(storages(o for o in gc.get_objects() if isinstance(o, torch.Tensor)).values())
        with peak_memory(s.device) as trace:
            one_update(s, number)
        return before + trace.peak


def medians(some: Sequence[Any]) -> Any:
    """Of every number of several costs."""
    found = {}
    for field in fields(some[0]):
        values = [getattr(one, field.name) for one in some]
        if all(isinstance(value, int | float) for value in values):
            found[field.name] = type(values[0])(statistics.median(values))
    return replace(some[0], **found)


def between(some: Sequence[Costs]) -> Costs:
    """The costs that all probes know, and the medians of them."""
    known = [key for key in some[0].steps if all(key in one.steps for one in some)]
    found: Costs = medians(some)
    steps: dict[Key, StepCost] = {k: medians([one.steps[k] for one in some]) for k in known}
    return replace(found, steps=steps)


def measure(
    case: Case, folder: Path, quick: bool
) -> tuple[list[tuple[Prediction, Measured]], Choice]:
    """Predictions and measurements of a workload's options, and what was chosen."""
    bench = Bench(settings(case, folder))
    try:
        first = bench.s.choice
        assert first is not None
        done = [Measured(Option(name, m), []) for name in SCHEDULES for m in case.micro]
        done = [one for one in done if Key.of(one.option) in first.costs.steps]
        probed = [first.costs]

        def turn(some: list[Measured], number: int) -> None:
            for one in some:
                seconds = bench.update(one.option, number)
                if number:  # the first one warms up
                    one.seconds.append(seconds)

        began = time.perf_counter()
        turn(done, 0)
        seconds = time.perf_counter() - began
        rounds = 2 if quick else min(12, max(3, math.ceil(TURNS_S / seconds)))
        for number in range(1, rounds + 1):
            turn(done, number)
            if number in (rounds // 2, rounds):
                probed.append(bench.probe().costs)
        costs = between(probed)
        known = [p.option for p in first.fits if Key.of(p.option) in costs.steps]
        choice = choose(first.workload, costs, known)
        if choice.chosen.option not in [one.option for one in done]:
            done.append(Measured(choice.chosen.option, []))
            for number in range(
                rounds + 1
            ):  # beside the others again: the machine may have changed
                turn(done, number)
        for one in done:
            one.peak = bench.peak(one.option, rounds + 1)
        done = [one for one in done if Key.of(one.option) in costs.steps]
        return [(predict(first.workload, costs, one.option), one) for one in done], choice
    finally:
        bench.s.scorer.close()


def show(
    console: Console, case: Case, pairs: Sequence[tuple[Prediction, Measured]], choice: Choice
) -> tuple[float, float, float]:
    """Print a workload's table; the worst errors, and what the choice loses to the best."""
    table = Table(title=case.name, title_justify="left")
    table.add_column("option", no_wrap=True)
    for column in ("s, predicted", "measured", "off", "MiB, predicted", "measured", "off"):
        table.add_column(column, justify="right")
    took = {m.option: statistics.median(m.seconds) for _, m in pairs}
    times, peaks = [], []
    for p, m in sorted(pairs, key=lambda pair: took[pair[1].option]):
        seconds = took[m.option]
        times.append(p.seconds / seconds - 1)
        peaks.append(p.peak_bytes / m.peak - 1)
        mark = " *" if m.option == choice.chosen.option else ""
        table.add_row(
            m.option.name + mark,
            f"{p.seconds:.3f}",
            f"{seconds:.3f}",
            f"{times[-1]:+.1%}",
            f"{p.peak_bytes / 2**20:.1f}",
            f"{m.peak / 2**20:.1f}",
            f"{peaks[-1]:+.1%}",
        )
    console.print(table)
    loss = took[choice.chosen.option] / min(took.values()) - 1
    worst = max(map(abs, times)), max(map(abs, peaks))
    console.print(
        f"worst: seconds {worst[0]:.1%}, peak {worst[1]:.1%}; "
        f"chosen (*): {loss:.1%} slower than the fastest\n"
    )
    return *worst, loss


def main(quick: bool, only: str | None) -> None:
    console = Console(width=110)
    logging.disable()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_bench_model.main(folder / "model", layers=3, heads=2)
        chosen = cases(folder / "model")
        if only is not None:
            chosen = [one for one in chosen if only in one.name]
        elif quick:
            chosen = [chosen[1], chosen[6]]
        found = []
        for number, case in enumerate(chosen):
            pairs, choice = measure(case, folder / f"run{number}", quick)
            found.append(show(console, case, pairs, choice))
    seconds, peak, loss = (max(column) for column in zip(*found, strict=True))
    console.print(
        f"{len(found)} workloads in {time.perf_counter() - began:.0f} s; worst of all: "
        f"seconds {seconds:.1%}, peak {peak:.1%}, chosen {loss:.1%} slower than the fastest"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two workloads, two rounds")
    parser.add_argument("--processor-time", action="store_true", help="of a core that others use")
    parser.add_argument("--only", help="those with this in their name")
    args = parser.parse_args()
    if args.processor_time:
        time.perf_counter = time.process_time
    main(args.quick, args.only)
