"""What `bench` prints: tables of results of `measure`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from .console import for_tables

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
OPTIONAL = ("decode", "reward", "optimizer")
WIDTH = 150
"""Columns of a table that no terminal shows."""


def title(result: Mapping[str, Any]) -> str:
    """What was run."""
    groups = f"{result['prompts']} x {result['generations']} generations"
    ranks = f", {result['ranks']} ranks" if result["ranks"] > 1 else ""
    return (
        f"{result['pipeline']}, {result['train']}, {result['dtype']}, "
        f"{result['parameters'] / 1e6:.1f}M trained{ranks}: "
        f"{result['selected']} of {result['steps']} steps selected, {groups}"
    )


def scope(result: Mapping[str, Any]) -> str:
    """Which stages the seconds are the sum of, and which they leave out."""
    left_out = [stage for stage in OPTIONAL if stage not in result["includes"]]
    text = f"seconds of {', '.join(result['includes'])}"
    return text + (f"; left out: {', '.join(left_out)}" if left_out else "; nothing left out")


def print_times(result: dict[str, Any]) -> dict[str, Any]:
    """A row of each schedule; returns the result."""
    lines = f"{title(result)}\nmedians of {result['rounds']} updates; {scope(result)}"
    table = Table(title=lines, title_justify="left")
    stages = [s for s in result["includes"] if result["ranks"] > 1 or s != "sync"]
    table.add_column("schedule", no_wrap=True)
    names = ("seconds", "speedup", "(min-max)", "limit", "share", *stages, "peak MB", "ledger MB")
    for name in names:
        table.add_column(name, justify="right")
    for row in result["rows"]:
        table.add_row(
            row.get("label", row["schedule"]),
            f"{row['seconds']:.3f}",
            *ratios(row),
            *(f"{row[s]:.3f}" for s in stages),
            *memory(row),
        )
    console = for_tables(WIDTH)
    console.print(table)
    console.print(LEGEND)
    return result


LEGEND = (
    "speedup: over the first row. limit: of the speedup over native, had the schedule saved its "
    "second forward and nothing else; share: how much of that limit was reached"
)


def ratios(row: Mapping[str, Any]) -> list[str]:
    """The cells of speedup, spread, limit and share."""
    limit, share = row["limit"], row["share_of_limit"]
    return [
        f"{row['speedup']:.2f}x",
        f"{row['speedup_min']:.2f}-{row['speedup_max']:.2f}",
        "-" if limit is None else f"{limit:.2f}x",
        "-" if share is None else f"{share:.1%}",
    ]


def memory(row: Mapping[str, Any]) -> list[str]:
    """The cells of peak and ledger, MB."""
    return [f"{row[name] / 1e6:.1f}" for name in ("peak_bytes", "ledger_bytes")]


def print_sweep(result: dict[str, Any]) -> dict[str, Any]:
    """A row of each value and schedule; returns the result."""
    points: Sequence[dict[str, Any]] = result["points"]
    key, one = result["sweep"], points[0]
    same = {name for name in one if all(point[name] == one[name] for point in points)}
    about = [str(one[name]) for name in ("pipeline", "train", "dtype") if name in same]
    if one["ranks"] > 1:
        about.append(f"{one['ranks']} ranks")
    lines = f"{', '.join(about)}\nmedians of {one['rounds']} updates; {scope(one)}"
    table = Table(title=lines, title_justify="left")
    table.add_column(key)
    table.add_column("schedule", no_wrap=True)
    names = ("selected", "seconds", "speedup", "(min-max)", "limit", "share", "peak MB")
    for name in (*names, "ledger MB"):
        table.add_column(name, justify="right")
    for point in points:
        for row in point["rows"]:
            table.add_row(
                str(point["value"]),
                row["schedule"],
                f"{point['selected']} of {point['steps']}",
                f"{row['seconds']:.3f}",
                *ratios(row),
                *memory(row),
                end_section=row is point["rows"][-1],
            )
    console = for_tables(WIDTH)
    console.print(table)
    console.print(LEGEND)
    return result


def print_counts(result: dict[str, Any]) -> dict[str, Any]:
    """The collectives of each schedule; returns the result."""
    table = Table(
        title=f"{title(result)}\ncollectives of an update on one rank, whole tensors' MB",
        title_justify="left",
    )
    table.add_column("schedule", no_wrap=True)
    for kind in KINDS:
        table.add_column(kind.replace("_", "\n"), justify="right")
        table.add_column("MB", justify="right")
    table.add_column("passes", justify="right")
    for row in result["rows"]:
        cells: list[str] = []
        for kind in KINDS:
            calls, num_bytes = row["calls"].get(kind, 0), row["num_bytes"].get(kind, 0)
            cells += [str(calls), f"{num_bytes / 1e6:.2f}"]
        table.add_row(row["schedule"], *cells, f"{row['passes']:.2f}")
    console = for_tables()
    console.print(table)
    console.print("passes: how often all trained parameters were added up over the ranks")
    return result
