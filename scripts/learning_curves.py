"""Train the embedded pipelines with every algorithm and draw their rewards against wall time.

    python scripts/learning_curves.py --out docs/img/algorithms.svg

Each algorithm is the recipe of its name, as `leangrpo train NAME` would run it, one after another.
Beside the drawing lies its data as CSV: one row an evaluation on the held-out prompts. Wall time is
that of the updates (sampling, reward, backward, optimizer); loading and evaluations are left out.
`--runs DIR` keeps the runs, and draws those that are already there without training them again.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from leangrpo.runfolder import read_run

ALGORITHMS = ("flow-grpo", "flow-grpo-fast", "dance-grpo", "mix-grpo", "embedded-ddpo")
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
MARKS = ("o", "s", "^", "D", "v")


class Curve(NamedTuple):
    """Held-out scores of a run: minutes of training, mean reward, share of exact pictures."""

    name: str
    updates: list[int]
    minutes: list[float]
    reward: list[float]
    exact: list[float]


def curve(name: str, folder: Path) -> Curve:
    """The evaluations of a run against the time its updates took."""
    run = read_run(folder)
    elapsed = [0.0]
    for line in run.metrics:
        elapsed.append(elapsed[-1] + line["time"]["total"] / 60)
    some = run.evaluations
    return Curve(
        name,
        [e["update"] for e in some],
        [elapsed[e["update"]] for e in some],
        [e["reward"] for e in some],
        [e["exact"] for e in some],
    )


def draw(curves: list[Curve], out: Path) -> None:
    """Reward and exact pictures against minutes, readable in black and white."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    for one, style, mark in zip(curves, STYLES, MARKS, strict=False):
        for axis, values in zip(axes, (one.reward, one.exact), strict=True):
            axis.plot(
                one.minutes, values, linestyle=style, marker=mark, markersize=4, label=one.name
            )
    axes[0].set_ylabel("held-out reward (log-probability of the text)")
    axes[1].set_ylabel("held-out pictures that are exact")
    for axis in axes:
        axis.set_xlabel("minutes of training")
        axis.grid(alpha=0.3)
    axes[1].legend()
    figure.savefig(out)
    plt.close(figure)


def write(curves: list[Curve], out: Path) -> None:
    """The data of the drawing."""
    with out.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["algorithm", "update", "minutes", "reward", "exact"])
        for one in curves:
            for row in zip(*one[1:], strict=True):
                rows.writerow([one.name, *row])


def main() -> None:
    """Train what is not there yet, draw all, and say what each gained."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/img/algorithms.svg"))
    parser.add_argument("--runs", type=Path, default=Path("runs/curves"))
    parser.add_argument("--algorithms", nargs="+", default=ALGORITHMS)
    options = parser.parse_args()
    curves = []
    for name in options.algorithms:
        folder = options.runs / name
        if not (folder / "summary.json").exists():
            subprocess.run(
                [sys.executable, "-m", "leangrpo", "train", name, f"run.dir={folder}", "--quiet"],
                check=True,
            )
        one = curve(name, folder)
        print(
            f"{name:16s} {one.minutes[-1]:5.2f} min, {one.updates[-1]} updates: reward "
            f"{one.reward[0]:.3f} -> {one.reward[-1]:.3f}, exact {one.exact[0]:.1%} -> "
            f"{one.exact[-1]:.1%}",
            flush=True,
        )
        curves.append(one)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    draw(curves, options.out)
    write(curves, options.out.with_suffix(".csv"))
    print(options.out)


if __name__ == "__main__":
    main()
