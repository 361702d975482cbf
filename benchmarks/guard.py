"""Compare a fresh run of the suite with the recorded one, and say what got slower or heavier.

    python benchmarks/guard.py              # or: make guard; some minutes, ends with 1 if worse
    python benchmarks/guard.py --record     # run it three times and write benchmarks/recorded.json

Ratios are recorded, no seconds, with the machine they were taken on. A timed ratio is worse when it
has moved further than chance does. Chance is known from the recorded runs: with s the relative
standard deviation of a kind of figure, pooled over all figures of the kind, and R runs, a fresh one
differs from the mean of R by s·√(1 + 1/R), and the tolerance is three times that. Counts and bytes
are exact: one more is heavier. Only the peak of memory has a percent, as the scratch space of
matrix kernels differs between processors. On another processor timed ratios are shown, not judged.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import overhead
import suite
from rich.table import Table
from suite import Value

from leangrpo.console import for_tables

RECORDED = Path(__file__).with_name("recorded.json")
RUNS = 3
SIGMAS = 3.0
PEAK = 0.01


class Kind(NamedTuple):
    """How figures of a kind are judged.

    `up`: more is better. `words` for worse and better. `timed` ones have a tolerance from their
    spread, others a fixed `tolerance`. `most` is a bound that holds whatever was recorded.
    """

    up: bool
    words: tuple[str, str]
    timed: bool
    tolerance: float = 0.0
    most: float = math.inf


SPEED, WEIGHT = ("slower", "faster"), ("heavier", "lighter")
KINDS = {
    "speed-up": Kind(True, SPEED, True),
    "share of limit": Kind(True, SPEED, True),
    "overhead": Kind(False, SPEED, True, most=2.0),
    "part": Kind(False, SPEED, True),
    "peak bytes": Kind(False, WEIGHT, False, PEAK),
    "ledger bytes": Kind(False, WEIGHT, False),
    "calls": Kind(False, WEIGHT, False),
    "collectives": Kind(False, WEIGHT, False),
}
WORSE = ("slower", "heavier", "missing")


class Finding(NamedTuple):
    """A figure beside the recorded one; `change` is relative, None where one of them is missing."""

    name: str
    kind: str
    before: float | None
    now: float | None
    change: float | None
    verdict: str


def spread(runs: Sequence[Mapping[str, Value]]) -> dict[str, float]:
    """Each kind's tolerance, relative to the recorded value, from several runs; see the module."""
    found: dict[str, float] = {}
    for name, kind in KINDS.items():
        if not kind.timed:
            found[name] = kind.tolerance
            continue
        variances = [
            statistics.variance(values) / statistics.mean(values) ** 2
            for key, value in runs[0].items()
            if value.kind == name and (values := [run[key].value for run in runs])
        ]
        if variances:
            s = math.sqrt(statistics.mean(variances))
            found[name] = SIGMAS * s * math.sqrt(1 + 1 / len(runs))
    return found


def record(runs: Sequence[Mapping[str, Value]], machine: Mapping[str, Any]) -> dict[str, Any]:
    """What is written to recorded.json. Raises SystemExit where an exact figure is not exact."""
    values = {}
    for name, (kind, _) in runs[0].items():
        numbers = [run[name].value for run in runs]
        if not KINDS[kind].timed and not KINDS[kind].tolerance and len(set(numbers)) > 1:
            raise SystemExit(f"{name} should be exact, and was {numbers}.")
        mean = statistics.mean(numbers) if KINDS[kind].timed else max(numbers)
        values[name] = {"kind": kind, "value": mean}
        if KINDS[kind].timed:
            values[name] |= {"low": min(numbers), "high": max(numbers)}
    return {
        "machine": dict(machine),
        "date": datetime.date.today().isoformat(),
        "runs": len(runs),
        "tolerance": spread(runs),
        "values": values,
    }


def compare(
    recorded: Mapping[str, Any], fresh: Mapping[str, Value], *, same_machine: bool = True
) -> list[Finding]:
    """A finding for every figure, in the recorded order, new ones last.

    `same_machine`: whether timed figures are judged. What is recorded and was not measured is
    missing, which is as bad as worse: a figure must not be lost by renaming it.
    """
    found: list[Finding] = []
    for name, old in recorded["values"].items():
        before, now = old["value"], fresh.get(name)
        if now is None:
            found.append(Finding(name, old["kind"], before, None, None, "missing"))
            continue
        kind = KINDS[now.kind]
        change = now.value / before - 1 if before else math.inf if now.value else 0.0
        worse = -change if kind.up else change
        allowed = recorded["tolerance"][now.kind]
        verdict = "same"
        if kind.timed and not same_machine:
            verdict = "not judged"
        elif abs(worse) > allowed:
            verdict = kind.words[0] if worse > 0 else kind.words[1]
        if now.value > kind.most:
            verdict = kind.words[0]
        found.append(Finding(name, now.kind, before, now.value, change, verdict))
    for name, value in fresh.items():
        if name not in recorded["values"]:
            found.append(Finding(name, value.kind, None, value.value, None, "new"))
    return found


def differences(recorded: Mapping[str, Any], machine: Mapping[str, Any]) -> list[str]:
    """In which points a machine, or what is installed, is not the recorded one."""
    before = recorded["machine"]
    return [f"{k} {before.get(k)} -> {v}" for k, v in machine.items() if before.get(k) != v]


def is_same(recorded: Mapping[str, Any], machine: Mapping[str, Any]) -> bool:
    """Whether timed ratios can be compared: the same processor and threads, any versions."""
    before = recorded["machine"]
    return all(before.get(k) == machine.get(k) for k in ("processor", "cores", "threads"))


def show(recorded: Mapping[str, Any], findings: Sequence[Finding]) -> None:
    """Print every figure that moved, and how many did not."""
    console = for_tables()
    allowed = ", ".join(f"{k} {100 * v:.2g}%" for k, v in recorded["tolerance"].items())
    console.print(f"recorded {recorded['date']} in {recorded['runs']} runs; tolerances: {allowed}")
    table = Table()
    table.add_column("figure")
    for column in ("recorded", "now", "change", "allowed", "verdict"):
        table.add_column(column, justify="right")
    for one in findings:
        if one.verdict == "same":
            continue
        change = "" if one.change is None else f"{100 * one.change:+.2f}%"
        limit = recorded["tolerance"].get(one.kind)
        table.add_row(
            one.name,
            _figure(one.before),
            _figure(one.now),
            change,
            "" if limit is None else f"{100 * limit:.2g}%",
            one.verdict,
            style="bold" if one.verdict in WORSE else None,
        )
    if table.row_count:
        console.print(table)
    counts = {
        v: sum(f.verdict == v for f in findings) for v in dict.fromkeys(f[5] for f in findings)
    }
    console.print(", ".join(f"{number} {verdict}" for verdict, number in counts.items()))


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"


def main(words: Sequence[str] | None = None) -> int:
    """The command; 1 when something is worse."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="write benchmarks/recorded.json")
    parser.add_argument("--rounds", type=int, default=8, help="updates of each schedule, in turn")
    parser.add_argument("--json", type=Path, help="write the fresh figures there")
    given = parser.parse_args(words)
    if given.record:
        runs = [suite.run(given.rounds) for _ in range(RUNS)]
        text = json.dumps(record(runs, overhead.machine()), indent=1, ensure_ascii=False)
        RECORDED.write_text(text + "\n", encoding="utf-8")
        print(f"{RECORDED.name}: {len(runs[0])} figures of {RUNS} runs")
        return 0
    if not RECORDED.exists():
        raise SystemExit(f"There is no {RECORDED.name} to compare with: run with --record first.")
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    fresh = suite.run(given.rounds)
    if given.json is not None:
        figures = {name: value._asdict() for name, value in fresh.items()}
        given.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    machine = overhead.machine()
    if other := differences(recorded, machine):
        print("not as recorded: " + "; ".join(other))
    findings = compare(recorded, fresh, same_machine=is_same(recorded, machine))
    show(recorded, findings)
    return int(any(one.verdict in WORSE for one in findings))


if __name__ == "__main__":
    raise SystemExit(main())
