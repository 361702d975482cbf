"""The results of `gpu_check` as tables and a figure that can be read in black and white."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SCHEDULES = ("native", "retain", "reweight", "streaming")
HATCHES = {"native": "", "retain": "///", "reweight": "...", "streaming": "xxx"}
GREYS = {"native": "0.35", "retain": "0.75", "reweight": "1.0", "streaming": "0.9"}
WAY = ["workload", "checkpointing", "compiled", "schedule", "rounds"]
SPEED = [*WAY, "seconds", "speedup", "speedup_min", "speedup_max", "limit", "share_of_limit"]
SPEED += ["peak_bytes", "ledger_bytes"]
VERIFY = ["workload", "schedule", "protocol", "quantity", "dtype", "cosine", "rel_l2", "max_abs"]
VERIFY += ["bitwise"]
LEDGER = ["workload", "schedule", "group", "gradients", "bytes", "peak_bytes", "rel_l2"]


def write(result: Mapping[str, Any], out: Path) -> None:
    """`gpu_check.json`, `speed.csv`, `verify.csv`, `ledger.csv`, `gpu_check.svg`, `summary.md`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu_check.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    speed = list(speed_rows(result))
    _csv(out / "speed.csv", SPEED, speed)
    _csv(out / "verify.csv", VERIFY, list(rows_of(result, "verify", "rows")))
    _csv(out / "ledger.csv", LEDGER, list(rows_of(result, "ledger", "ledger")))
    (out / "gpu_check.svg").unlink(missing_ok=True)  # of an earlier check
    if speed:
        _figure(result, speed, out / "gpu_check.svg")
    (out / "summary.md").write_text(summary(result, speed), encoding="utf-8")


def rows_of(result: Mapping[str, Any], stage: str, key: str) -> Iterator[dict[str, Any]]:
    """The rows of a stage's results, each with its workload."""
    for job in result["jobs"]:
        if job["stage"] == stage and job["result"]:
            for row in job["result"].get(key, ()):
                yield {"workload": job["workload"], **row}


def speed_rows(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each workload, way of running it and schedule."""
    for job in result["jobs"]:
        if job["stage"] in ("bench", "compiled") and job["status"] == "ok":
            for row in job["result"]["rows"]:
                yield {
                    "workload": job["workload"],
                    "checkpointing": job["checkpointing"],
                    "compiled": job["stage"] == "compiled",
                    "rounds": job["result"]["rounds"],
                    **row,
                }


def _csv(file: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    with file.open("w", encoding="utf-8", newline="") as opened:
        writer = csv.DictWriter(opened, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def _way(row: Mapping[str, Any]) -> tuple[str, bool, bool]:
    return row["workload"], row["checkpointing"], row["compiled"]


def _label(way: tuple[str, bool, bool]) -> str:
    workload, checkpointing, compiled = way
    return workload + ", checkpointing" * checkpointing + ", compiled" * compiled


def _figure(result: Mapping[str, Any], speed: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Speedup over native (whiskers: least and most of a round; line: the cost model's limit), and
    the most memory held at once."""
    ways = list(dict.fromkeys(_way(row) for row in speed))
    memory = any(row.get("peak_bytes") for row in speed)
    height = 1.2 + 0.75 * len(ways)
    with plt.rc_context({"svg.hashsalt": "leangrpo", "font.size": 8}):
        figure, axes = plt.subplots(
            1, 1 + memory, figsize=(5 + 4 * memory, height), squeeze=False, layout="constrained"
        )
        left = axes[0][0]
        bar = 0.8 / len(SCHEDULES)
        for row in speed:
            number = SCHEDULES.index(row["schedule"])
            y = ways.index(_way(row)) + (number - (len(SCHEDULES) - 1) / 2) * bar
            look = {
                "color": GREYS[row["schedule"]],
                "hatch": HATCHES[row["schedule"]],
                "edgecolor": "black",
                "height": 0.9 * bar,
            }
            least, most = row["speedup_min"], row["speedup_max"]
            whiskers = [[row["speedup"] - least], [most - row["speedup"]]]
            left.barh(y, row["speedup"], xerr=whiskers, ecolor="black", capsize=2, **look)
            if row.get("limit"):
                left.vlines(row["limit"], y - bar / 2, y + bar / 2, color="black", linewidth=2)
            if memory and row.get("peak_bytes"):
                axes[0][1].barh(y, row["peak_bytes"] / 2**30, **look)
        for axis in axes[0]:
            axis.set_yticks(range(len(ways)), [_label(way) for way in ways])
            axis.invert_yaxis()
            axis.grid(axis="x", linewidth=0.3)
            axis.set_axisbelow(True)
        left.axvline(1, color="black", linewidth=0.8, linestyle=":")
        left.set_xlabel("speedup over native (thick line: the cost model's limit)")
        if memory:
            axes[0][1].set_xlabel("most memory of an update above its start, GiB")
            axes[0][1].set_yticklabels([])
        looks = [
            plt.Rectangle((0, 0), 1, 1, facecolor=GREYS[s], hatch=HATCHES[s], edgecolor="black")
            for s in SCHEDULES
        ]
        figure.legend(looks, SCHEDULES, loc="outside upper right", ncols=len(SCHEDULES))
        figure.suptitle(result["machine"]["device"], x=0.01, ha="left")
        figure.savefig(file, metadata={"Date": None})
        plt.close(figure)


def summary(result: Mapping[str, Any], speed: Sequence[Mapping[str, Any]]) -> str:
    """The results for people, in Markdown."""
    machine = result["machine"]
    lines = [
        f"# GPU check: {machine['device']}",
        "",
        f"{machine['tflops']:.3g} TFLOP/s in a bfloat16 matrix product; torch {machine['torch']}, "
        f"CUDA {machine['cuda']}; {result['seconds']:.0f} s of {60 * result['minutes']:.0f} s."
        + (" Narrow models (`--tiny`): the figures mean nothing." if result["tiny"] else ""),
        "",
        "## Jobs",
        "",
        "| job | result | seconds | |",
        "|---|---|---|---|",
    ]
    for job in result["jobs"]:
        way = ", checkpointing" if job.get("checkpointing") else ""
        took = "" if job["seconds"] is None else f"{job['seconds']:.0f}"
        status = "broke a bound" if job["broken"] else job["status"]
        reason = " ".join(job["reason"].split()).replace("|", "/")
        lines.append(f"| {job['stage']} {job['workload']}{way} | {status} | {took} | {reason} |")
    if speed:
        lines += [
            "",
            "## Speed and memory",
            "",
            "| workload | schedule | seconds | speedup | of limit | peak, GiB | ledger, GiB |",
            "|---|---|---|---|---|---|---|",
        ]
    for row in speed:
        share = row.get("share_of_limit")
        lines.append(
            f"| {_label(_way(row))} | {row['schedule']} | {row['seconds']:.3f} | "
            f"{row['speedup']:.2f}x ({row['speedup_min']:.2f}-{row['speedup_max']:.2f}) | "
            f"{'' if share is None else f'{share:.0%}'} | {_gib(row.get('peak_bytes'))} | "
            f"{_gib(row.get('ledger_bytes'))} |"
        )
    compiled = list(_compiled(speed))
    if compiled:
        lines += [
            "",
            "## Compiled",
            "",
            "| workload | schedule | eager / compiled |",
            "|---|---|---|",
        ]
        lines += [f"| {name} | {schedule} | {gain:.2f}x |" for name, schedule, gain in compiled]
    lines += ["", "## Broken bounds", ""]
    lines += [f"- {one.pop('job')}: {one}" for one in map(dict, result["broken"])] or ["None."]
    if result["failed"]:
        lines += ["", "## Failed", "", *(f"- {name}" for name in result["failed"])]
    return "\n".join(lines) + "\n"


def _compiled(speed: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, float]]:
    """Seconds without compiling over those with it, of what ran both ways."""
    eager = {
        (r["workload"], r["checkpointing"], r["schedule"]): r["seconds"]
        for r in speed
        if not r["compiled"]
    }
    for r in speed:
        key = (r["workload"], r["checkpointing"], r["schedule"])
        if r["compiled"] and key in eager:
            yield (
                _label((r["workload"], r["checkpointing"], False)),
                r["schedule"],
                (eager[key] / r["seconds"]),
            )


def _gib(num_bytes: float | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 2**30:.3g}"
