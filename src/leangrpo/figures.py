"""Drawing the figures of `paper`, each with its numbers as CSV and in words as Markdown.

All are readable without colour: schedules differ by grey, hatch, line style and mark.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

Rows = list[dict[str, Any]]


class Style(NamedTuple):
    """How a schedule looks: its bars, its lines, and its letter in the map."""

    grey: str
    hatch: str
    line: str
    mark: str
    letter: str


STYLES = {
    "native": Style("1.0", "", ":", "o", "N"),
    "retain": Style("0.75", "///", "--", "s", "T"),
    "reweight": Style("0.45", "xxxx", "-", "^", "W"),
    "streaming": Style("0.6", "...", "-.", "D", "S"),
}
"""T is for reTain and W for reWeight, which begin alike."""

ABLATION = {
    "native:step:classic": "native",
    "native:step": "+ shared prompts",
    "native": "+ one synchronisation",
    "retain": "retain",
    "reweight": "reweight",
}
ABLATION_BARS = (("1.0", ""), ("0.9", "\\\\"), ("0.8", "---"), ("0.65", "///"), ("0.4", "xxxx"))

STAGES = {
    "rollout": ("1.0", ""),
    "recompute": ("0.8", "xxxx"),
    "backward": ("0.6", "///"),
    "sync": ("0.4", "..."),
    "decode": ("0.95", "\\\\"),
    "reward": ("0.2", ""),
    "optimizer": ("0.75", "---"),
    "other": ("0.0", ""),
}
MIB = 2**20


def draw_speedup(result: dict[str, Any], folder: Path, *, command: str) -> list[Path]:
    """Figure 3: a panel for each comparison; what is compared differs by mark, the schedule by
    line."""
    rows: Rows = result["rows"]
    panels = _unique(rows, "panel")
    size = (3.4 * min(3, len(panels)), 3.4 * -(-len(panels) // 3) + 0.6)
    with _figure(folder / "figure3.svg", size, command) as figure:
        axes = figure.subplots(-(-len(panels) // 3), min(3, len(panels)), squeeze=False)
        for axis in axes.flat[len(panels) :]:
            axis.set_axis_off()
        for axis, panel in zip(axes.flat, panels, strict=False):
            mine = [r for r in rows if r["panel"] == panel]
            for i, line in enumerate(_unique(mine, "line")):
                for name in ("retain", "reweight"):
                    some = [r for r in mine if r["line"] == line and r["schedule"] == name]
                    x = [r["fraction"] for r in some]
                    low = [r["speedup"] - r["speedup_min"] for r in some]
                    high = [r["speedup_max"] - r["speedup"] for r in some]
                    axis.errorbar(
                        x,
                        [r["speedup"] for r in some],
                        yerr=(low, high),
                        linestyle=STYLES[name].line,
                        marker="os^D"[i],
                        color=("0.0", "0.35", "0.6", "0.75")[i],
                        markerfacecolor="white" if name == "retain" else None,
                        markersize=5,
                        linewidth=1.2,
                        elinewidth=0.5,
                        label=f"{line}, {name}",
                    )
            axis.axhline(1.0, color="black", linewidth=0.5)
            axis.set_title(f"({'abcdefgh'[panels.index(panel)]}) {panel}", fontsize=10)
            axis.set_xlabel("share of steps selected")
            axis.set_ylabel("times native")
            axis.grid(alpha=0.3)
            axis.legend(fontsize=6.5)
    return [folder / "figure3.svg", write(rows, folder / "figure3.csv")]


def draw_breakdown(result: dict[str, Any], folder: Path, *, command: str) -> list[Path]:
    """Figure 4: an update's stages, stacked, in parts of native's update."""
    rows: Rows = result["rows"]
    lines = _unique(rows, "line")
    with _figure(folder / "figure4.svg", (3.2 * len(lines), 4.2), command) as figure:
        axes = figure.subplots(1, len(lines), sharey=True, squeeze=False)[0]
        for axis, line in zip(axes, lines, strict=True):
            mine = [r for r in rows if r["line"] == line]
            bottom = [0.0] * len(mine)
            for stage, (grey, hatch) in STAGES.items():
                parts = [r.get(stage, 0.0) / mine[0]["seconds"] for r in mine]
                if not any(r.get(stage) for r in rows):
                    continue
                names = [r["schedule"] for r in mine]
                look = {"color": grey, "hatch": hatch, "edgecolor": "black", "linewidth": 0.6}
                axis.bar(names, parts, bottom=bottom, label=stage, **look)
                bottom = [a + b for a, b in zip(bottom, parts, strict=True)]
            for x, row in enumerate(mine):
                axis.text(x, bottom[x] + 0.01, f"{row['speedup']:.2f}x", ha="center", fontsize=9)
            axis.set_title(line, fontsize=10)
        axes[0].set_ylabel("time, native's update = 1")
        handles, names = axes[0].get_legend_handles_labels()
        figure.legend(handles[::-1], names[::-1], loc="outside right upper", fontsize=8)
    return [folder / "figure4.svg", write(rows, folder / "figure4.csv")]


def draw_ablation(result: dict[str, Any], folder: Path, *, command: str) -> list[Path]:
    """Table 1 as bars: each change's speedup, in the order in which they are made."""
    rows: Rows = result["rows"]
    lines = _unique(rows, "line")
    with _figure(folder / "table1.svg", (2.5 * len(lines) + 1, 4.0), command) as figure:
        axis = figure.subplots()
        looks = zip(ABLATION.items(), ABLATION_BARS, strict=True)
        for i, ((name, label), (grey, hatch)) in enumerate(looks):
            some = [r for r in rows if r["schedule"] == name]
            x = [lines.index(r["line"]) + 0.17 * (i - 2) for r in some]
            ratios = [r["speedup"] for r in some]
            axis.bar(
                x, ratios, 0.16, color=grey, hatch=hatch, edgecolor="black", lw=0.6, label=label
            )
            for place, ratio in zip(x, ratios, strict=True):
                axis.text(place, ratio + 0.01, f"{ratio:.2f}", ha="center", fontsize=8)
        axis.axhline(1.0, color="black", linewidth=0.5)
        axis.set_xticks(range(len(lines)), lines)
        axis.set_ylabel("times native")
        figure.legend(loc="outside upper center", ncols=len(ABLATION), fontsize=8)
    return [folder / "table1.svg", write(rows, folder / "table1.csv")]


def draw_memory(result: dict[str, Any], folder: Path, *, command: str) -> list[Path]:
    """Figure 6: what an update holds at most, and the gradients that wait, by selected steps."""
    rows: Rows = result["rows"]
    lines = _unique(rows, "line")
    with _figure(folder / "figure6.svg", (3.2 * len(lines), 6.2), command) as figure:
        axes = figure.subplots(2, len(lines), sharex=True, squeeze=False)
        kinds = (("peak_bytes", "peak of an update, MiB"), ("ledger_bytes", "ledger, MiB"))
        for above, (key, label) in zip(axes, kinds, strict=True):
            for axis, line in zip(above, lines, strict=True):
                mine = [r for r in rows if r["line"] == line]
                for name in _unique(mine, "schedule"):
                    some = sorted(
                        (r for r in mine if r["schedule"] == name), key=lambda r: r["selected"]
                    )
                    style = STYLES[name.partition(":")[0]]
                    axis.plot(
                        [r["selected"] for r in some],
                        [r[key] / MIB for r in some],
                        linestyle=style.line,
                        marker=style.mark,
                        color="black",
                        markerfacecolor=style.grey,
                        label=name,
                    )
                axis.set_ylim(bottom=0)
                axis.grid(alpha=0.3)
            above[0].set_ylabel(label)
        for axis, line in zip(axes[0], lines, strict=True):
            axis.set_title(line, fontsize=10)
        for axis in axes[1]:
            axis.set_xlabel("selected steps")
        axes[0][0].legend(fontsize=8)
    return [folder / "figure6.svg", write(rows, folder / "figure6.csv")]


def draw_map(result: dict[str, Any], folder: Path, *, command: str) -> list[Path]:
    """Figure 7: in each cell the schedule's letter and hatch, and its speedup below."""
    from matplotlib.patches import Patch, Rectangle

    rows: Rows = result["rows"]
    columns = list(dict.fromkeys((r["model"], r["train"]) for r in rows))
    kinds = _unique(rows, "axis")
    size = (3.0 * len(columns), 3.2 * len(kinds) + 0.8)
    with _figure(folder / "figure7.svg", size, f"{result['device']}\n{command}") as figure:
        axes = figure.subplots(len(kinds), len(columns), squeeze=False)
        for above, kind in zip(axes, kinds, strict=True):
            for axis, column in zip(above, columns, strict=True):
                mine = [r for r in rows if (r["model"], r["train"]) == column and r["axis"] == kind]
                memory, values = _unique(mine, "memory_gib"), _unique(mine, "value")
                for row in mine:
                    x, y = memory.index(row["memory_gib"]), values.index(row["value"])
                    style = STYLES.get(row["schedule"], Style("0.25", "", "", "", ""))
                    axis.add_patch(
                        Rectangle(
                            (x, y),
                            1,
                            1,
                            facecolor=_pale(style) if style.letter else "0.25",
                            hatch=style.hatch[:1],
                            edgecolor="0.55",
                            linewidth=0.8,
                        )
                    )
                    text = cell(row)
                    axis.text(
                        x + 0.5,
                        y + 0.5,
                        text,
                        ha="center",
                        va="center",
                        fontsize=8,
                        color="black" if style.letter else "white",
                        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.2}
                        if style.letter
                        else None,
                    )
                axis.set_xlim(0, len(memory))
                axis.set_ylim(0, len(values))
                axis.set_xticks([i + 0.5 for i in range(len(memory))], memory)
                axis.set_yticks([i + 0.5 for i in range(len(values))], values)
                axis.tick_params(length=0)
                axis.set_title(f"{column[0]}, {column[1]}", fontsize=10)
            above[0].set_ylabel(kind)
        for axis in axes[-1]:
            axis.set_xlabel("GiB of a GPU")
        used = [n for n in STYLES if any(r["schedule"] == n for r in rows)]
        handles = [
            Patch(
                facecolor=_pale(STYLES[n]),
                hatch=STYLES[n].hatch[:1] * 2,
                edgecolor="0.55",
                label=f"{STYLES[n].letter}: {n}",
            )
            for n in used
        ]
        handles += [
            Patch(facecolor="0.25", label="nothing fits"),
            Patch(facecolor="white", label="c: checkpointing, o: offload"),
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=8)
    return [folder / "figure7.svg", write(rows, folder / "figure7.csv")]


def _pale(style: Style) -> str:
    """Its grey, light enough for letters and hatches."""
    return str((1 + float(style.grey)) / 2)


def cell(row: dict[str, Any]) -> str:
    """A cell of the map: `W` for reweight, then c for checkpointing and o for offload; speedup."""
    if row["schedule"] is None:
        return "–"
    more = "c" * row["checkpointing"] + "o" * row["offload"]
    ratio = "" if row["speedup"] is None else f"{row['speedup']:.2f}"
    return f"{STYLES[row['schedule']].letter}{more}\n{ratio}"


# -- the same in words ---------------------------------------------------------------------------


def tell_speedup(result: dict[str, Any]) -> str:
    """Figure 3's ratios: retain / reweight at each share, and what the cost model allows."""
    body = []
    for panel, line in dict.fromkeys((r["panel"], r["line"]) for r in result["rows"]):
        mine = [r for r in result["rows"] if (r["panel"], r["line"]) == (panel, line)]
        cells = []
        for share in _unique(mine, "fraction"):
            found = {r["schedule"]: r for r in mine if r["fraction"] == share}
            text = f"{share:.0%}: " + " / ".join(f"{found[n]['speedup']:.2f}" for n in LEAN)
            limit = found["reweight"].get("limit")
            cells.append(text + (f" ({limit:.2f})" if limit else ""))
        body.append([panel, line, *cells])
    width = max(len(row) for row in body)
    body = [row + [""] * (width - len(row)) for row in body]
    return (
        "Share of the steps selected: retain / reweight, times native (in brackets what the cost "
        "model allows).\n\n" + table(["panel", "", *["share: ratios"] * (width - 2)], body)
    )


LEAN = ("retain", "reweight")


def tell_breakdown(result: dict[str, Any]) -> str:
    """Figure 4's shares, in percent of native's update."""
    rows: Rows = result["rows"]
    stages = [s for s in STAGES if any(r.get(s) for r in rows)]
    body = []
    for line in _unique(rows, "line"):
        mine = [r for r in rows if r["line"] == line]
        whole = mine[0]["seconds"]
        for r in mine:
            shares = [f"{r.get(s, 0.0) / whole:.0%}" for s in stages]
            body.append([line, r["schedule"], f"{r['speedup']:.2f}x", *shares])
    head = ["", "schedule", "times native", *stages]
    return "In percent of native's update.\n\n" + table(head, body)


def tell_ablation(result: dict[str, Any]) -> str:
    """Table 1: times native, by what is trained in which numbers."""
    rows: Rows = result["rows"]
    body = []
    for line in _unique(rows, "line"):
        found = {r["schedule"]: r for r in rows if r["line"] == line}
        body.append([line, *(f"{found[n]['speedup']:.2f}x" for n in ABLATION)])
    return table(["", *ABLATION.values()], body)


def tell_memory(result: dict[str, Any]) -> str:
    """Figure 6: the peak at the most selected steps, over that at the fewest, and over native's."""
    rows: Rows = result["rows"]
    body = []
    for line in _unique(rows, "line"):
        mine = [r for r in rows if r["line"] == line]
        few, most = (f(r["selected"] for r in mine) for f in (min, max))
        at = {(r["schedule"], r["selected"]): r for r in mine}
        for name in _unique(mine, "schedule"):
            peak = at[name, most]["peak_bytes"]
            growth = peak / at[name, few]["peak_bytes"]
            over = peak / at["native", most]["peak_bytes"]
            body.append(
                [
                    line,
                    name,
                    f"{growth:.2f}x",
                    f"{over:.2f}x",
                    f"{at[name, most]['ledger_bytes'] / MIB:.1f}",
                ]
            )
    few, most = (f(r["selected"] for r in rows) for f in (min, max))
    head = ["", "schedule", f"peak at {most} steps over that at {few}", "over native's"]
    return table([*head, "ledger, MiB"], body)


def tell_map(result: dict[str, Any]) -> str:
    """Figure 7: each cell's letter and speedup."""
    rows: Rows = result["rows"]
    memory = _unique(rows, "memory_gib")
    body = []
    for model, train, axis, value in dict.fromkeys(
        (r["model"], r["train"], r["axis"], r["value"]) for r in rows
    ):
        place = {"model": model, "train": train, "axis": axis, "value": value}
        mine = [r for r in rows if place.items() <= r.items()]
        cells = [cell(r).replace("\n", " ") for r in mine]
        body.append([model, train, f"{value} {axis}", *cells])
    letters = ", ".join(f"{s.letter} {n}" for n, s in STYLES.items())
    return (
        f"{letters}; c: with activation checkpointing, o: retained activations on the host. "
        f"Numbers: times the fastest usual loop that fits (native, a reduction at every backward). "
        f"{result['device']}.\n\n" + table(["model", "", "", *(f"{m} GiB" for m in memory)], body)
    )


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# -- what all share ------------------------------------------------------------------------------


def write(rows: Rows, file: Path) -> Path:
    """The numbers of a figure."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, columns)
        writer.writeheader()
        writer.writerows(rows)
    return file


@contextmanager
def _figure(file: Path, size: tuple[float, float], caption: str) -> Iterator[Any]:
    """A figure with a caption below it, saved as SVG: the same numbers give the same bytes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style = {"svg.fonttype": "none", "svg.hashsalt": file.stem, "hatch.linewidth": 0.5}
    with plt.rc_context(style):
        figure = plt.figure(figsize=size, layout="constrained")
        yield figure
        figure.supxlabel(caption, fontsize=8)
        figure.savefig(file, metadata={"Date": None})
        plt.close(figure)


def _unique(rows: Rows, key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))
