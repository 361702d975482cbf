"""An audit's report for people."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from .audit_report import CLASSES, KINDS, Report
from .console import is_terminal


def print_report(report: Report, *, most_steps: int = 8) -> None:
    """Print it to standard error, as standard output is the audited program's."""
    console = Console(stderr=True) if is_terminal() else Console(file=sys.stderr, width=110)
    say = console.print
    networks = ", ".join(f"{n.name} ({n.trained / 1e6:.1f}M trained)" for n in report.networks)
    rank = "" if report.rank is None else f", rank {report.rank}"
    say(f"\n[bold]leangrpo audit[/bold]: {networks or 'no denoiser'}{rank}; {report.ended}")
    kind = report.classified
    say(f"[bold]{kind}[/bold]: {CLASSES[kind]}.", highlight=False)
    if report.steps:
        say(_totals(report))
        say(_steps(report, most_steps))
    if kind == "recomputes":
        seconds = sum(s.seconds for s in report.counted())
        say(
            f"{report.redundant_share:.1%} of {seconds:.2f} s is redundant: without it "
            f"[bold]{report.speedup:.2f}x[/bold] as fast (limit {report.limit:.2f}x)."
        )
    for name, (number, example) in report.differences.items():
        say(f"  {name}: {example} ({number} transitions)", markup=False)
    if kind == "nothing" and report.candidates:
        say(f"  networks with a time: {', '.join(report.candidates)}", markup=False)
    for reason, number in report.failures.items():
        say(f"  not read, {number} times: {reason}", markup=False)
    for text in report.advice():
        say(f"- {text}", markup=False, highlight=False)
    say(f"The audit itself took {report.own_seconds:.2f} s of readings.", highlight=False)


def _totals(report: Report) -> Table:
    table = Table(title="all steps", title_justify="left")
    table.add_column("evaluations")
    for name in ("calls", "transitions", "seconds"):
        table.add_column(name, justify="right")
    for kind, words in KINDS.items():
        tally = report.total(kind)
        if tally.calls or tally.transitions:
            number = "" if kind in ("recomputed", "backward") else str(tally.transitions)
            table.add_row(words, str(tally.calls), number, f"{tally.seconds:.3f}")
    table.add_row("everything", "", "", f"{sum(s.seconds for s in report.steps):.3f}")
    return table


def _steps(report: Report, most: int) -> Table:
    title = "transitions of each optimizer step"
    if len(report.steps) > most:
        title += f" (the last {most} of {len(report.steps)})"
    shown = report.steps[-most:]
    kinds = [k for k in KINDS if k != "backward" and report.total(k, shown).calls]
    table = Table(title=title, title_justify="left")
    for name in ("step", *kinds, "seconds"):
        table.add_column(name, justify="right")
    for step in shown:
        cells = []
        for kind in kinds:
            tally = step.kinds.get(kind)
            number = 0 if tally is None else tally.transitions or tally.calls
            cells.append(str(number))
        number_or_rest = str(step.number) if step.stepped else "after"
        table.add_row(number_or_rest, *cells, f"{step.seconds:.3f}")
    return table
