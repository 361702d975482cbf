"""What `verify` found, as tables like the paper's 2 to 4."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from .alignment import BOUNDS, ORACLE_BOUND
from .console import for_tables

TITLES = {
    "fixed": "Fixed trajectory: the same recorded steps and advantages, deterministic kernels",
    "end_to_end": "End to end: each samples for itself and is rewarded",
}


def show(result: dict[str, Any], console: Console | None = None) -> None:
    """Print the tables, what is broken and why, and a last line with the verdict."""
    console = console or for_tables()
    console.print(_about(result), highlight=False)
    for protocol, title in TITLES.items():
        console.print(f"\n{title}", highlight=False)
        console.print(_alignments(result, protocol))
    if result.get("oracle"):
        title = f"Gradients against plain autograd in {result['oracle']}, fixed trajectory"
        console.print(f"\n{title}", highlight=False)
        console.print(_oracle(result))
    for left_out in result["refused"]:
        console.print(f"left out: {left_out['schedule']}: {left_out['reason']}", markup=False)
    for note in result["notes"]:
        console.print(f"note: {note}", markup=False)
    told: set[tuple[str, str]] = set()
    for one in result["broken"]:  # the same mistake under both protocols is told once
        if (one["schedule"], one["diagnosis"]) not in told:
            console.print(_broken(one), style="bold red", markup=False, highlight=False)
        told.add((one["schedule"], one["diagnosis"]))
    console.print(_verdict(result), style="bold", markup=False, highlight=False)


def _about(result: dict[str, Any]) -> str:
    ranks = f", {result['ranks']} ranks" if result["ranks"] > 1 else ""
    return (
        f"{result['pipeline']}, {result['train']}, {result['dtype']}, "
        f"{result['parameters'] / 1e6:.2f}M trained{ranks}: one update of {result['prompts']} x "
        f"{result['generations']} generations, {result['selected']} steps trained, "
        f"{result['micro_batch']} a forward"
    )


def _table(*columns: str) -> Table:
    table = Table()
    table.add_column("schedule", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _alignments(result: dict[str, Any], protocol: str) -> Table:
    table = _table(
        "gradient\ncosine",
        "gradient\nrel. L2",
        "gradient\nmax abs",
        "update\ncosine",
        "update\nrel. L2",
        "moment 1\nrel. L2",
        "moment 2\nrel. L2",
        "all\nbitwise",
    )
    found: dict[str, dict[str, Any]] = {}
    for row in result["rows"]:
        if row["protocol"] == protocol:
            found.setdefault(row["schedule"], {})[row["quantity"]] = row
    for name, by in found.items():
        gradient, update = by["gradient"], by["update"]
        table.add_row(
            "native, twice" if name == "native" else name,
            _cosine(gradient["cosine"]),
            _distance(gradient["rel_l2"]),
            _distance(gradient["max_abs"]),
            _cosine(update["cosine"]),
            _distance(update["rel_l2"]),
            _distance(by["first_moment"]["rel_l2"]),
            _distance(by["second_moment"]["rel_l2"]),
            "yes" if all(row["bitwise"] for row in by.values()) else "no",
        )
    return table


def _oracle(result: dict[str, Any]) -> Table:
    table = _table("relative L2", "of native's")
    rows = [
        row
        for row in result["rows"]
        if row["protocol"] == "fixed" and row["oracle_rel_l2"] is not None
    ]
    native = next(row["oracle_rel_l2"] for row in rows if row["schedule"] == "native")
    for row in rows:
        share = row["oracle_rel_l2"] / native if native else 1.0
        table.add_row(str(row["schedule"]), _distance(row["oracle_rel_l2"]), f"{share:.3f}")
    return table


def _broken(one: dict[str, Any]) -> str:
    if one["quantity"] is None:
        return f"{one['schedule']}: {one['diagnosis']}"
    return (
        f"{one['schedule']}, {TITLES[one['protocol']].partition(':')[0].lower()}: the "
        f"{one['quantity'].replace('_', ' ')} is off by {one['rel_l2']:.2g} (allowed: "
        f"{one['bound']}). {one['diagnosis'][0].upper()}{one['diagnosis'][1:]}."
    )


def _verdict(result: dict[str, Any]) -> str:
    if result["broken"]:
        names = dict.fromkeys(one["schedule"] for one in result["broken"])
        return f"NOT exact: {', '.join(names)}"
    every = dict.fromkeys(str(row["schedule"]) for row in result["rows"])
    bound = BOUNDS.get(result["dtype"])
    others = (
        f"the others within {bound:g}"
        if bound
        else f"the others at most {ORACLE_BOUND} times as far from the oracle as native"
        if result.get("oracle")
        else "the others without a bound, as there is no oracle"
    )
    exact = ", ".join(name for name in every if name != "native")
    return f"exact: {exact} (retain bitwise, {others}; more only where native itself varies)"


def _cosine(value: float) -> str:
    return f"{value:.6f}"


def _distance(value: float) -> str:
    return f"{value:.2e}" if value else "0"
