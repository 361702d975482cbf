"""Time to a target reward: one recipe under several schedules, in turn, update by update.

All runs of a seed live in one process, and after native's update k comes everybody else's update k:
whatever slows the machine down slows all of them. A run's clock is the sum of its own updates.
"""

from __future__ import annotations

import csv
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from .aside import set_up_aside
from .config import Config, load_config
from .errors import problem
from .evaluation import evaluate
from .setup import Setup
from .train import one_update

RECIPE = "embedded-lora"
SETTINGS = (
    "updates=20",
    "sampling.steps=6",
    "selection={rule: fraction, fraction: 1.0}",
    "rollout={prompts: 6, generations: 8, micro_batch: 4}",
    "evaluation={every: 4, batch: 16, rewards: []}",
)
"""Every step that can be trained is, with few pictures a forward: what a large model's memory
leaves room for, and where a forward more or less can be seen in the time of a whole update."""
SEEDS = (3, 4, 5)
HELD_OUT = 48
"""Held-out prompts that are scored, spread over the whole list, which may be sorted."""
SCHEDULES = ("native", "reweight")
COLUMNS = ("seed", "schedule", "update", "seconds", "reward", "heldout")
STYLES = ("-", "--", "-.", ":")
MARKS = ("o", "s", "^", "D")


def race(
    config: Config | None = None,
    *,
    schedules: Sequence[str] = SCHEDULES,
    seeds: Sequence[int] = SEEDS,
    target: float | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train `config` (None: `RECIPE` with `SETTINGS`) under each schedule with each seed.

    `rows` of the result have the `COLUMNS`: seconds of all updates so far (sampling, decoding,
    reward, gradient, optimizer; no loading, no evaluation), the update's mean training reward and,
    every `evaluation.every` updates, the mean reward of `HELD_OUT` held-out prompts; None where
    there is none. `times` says when a run's held-out reward had gained `target`, and `ratios` how
    much sooner than the first schedule each did (see `time_to_target`). With no `target` each seed
    has its own: what all its schedules gained at their best, so that nothing has to be guessed.

    Raises LeanError for an unknown schedule, for schedules or seeds that are none or given twice,
    and for a target that is no gain.
    """
    _check(schedules, seeds)
    if target is not None and not target > 0:
        raise problem("target", target, "it is a gain of held-out reward, and must be above 0")
    config = config or load_config(RECIPE, SETTINGS)
    rows: list[dict[str, Any]] = []
    for seed in seeds:
        with _runs(config, schedules, seed) as runs:
            for row in _in_turn(runs, seed):
                rows.append(row)
                if row["heldout"] is None:
                    continue
                say(
                    f"seed {seed}, {row['schedule']}, update {row['update']}: held-out reward "
                    f"{row['heldout']:.3f} after {row['seconds']:.1f} s"
                )
    r = config.rollout
    return {
        "recipe": config.recipe,
        "train": config.model.train,
        "steps": config.sampling.steps,
        "prompts": r.prompts,
        "generations": r.generations,
        "micro_batch": r.micro_batch,
        "updates": config.updates,
        "target": target,
        "schedules": list(schedules),
        "seeds": list(seeds),
        "rows": rows,
        **time_to_target(rows, schedules, seeds, target),
    }


def _check(schedules: Sequence[str], seeds: Sequence[int]) -> None:
    known = ("native", "retain", "reweight", "streaming")
    for name in schedules:
        if name not in known:
            raise problem("schedules", name, f"must be among {', '.join(known)}")
    for setting, some in (("schedules", schedules), ("seeds", seeds)):
        if not some or len(set(some)) < len(some):
            raise problem(setting, list(some), "there must be one at least, and each once")


@contextmanager
def _runs(config: Config, schedules: Sequence[str], seed: int) -> Iterator[dict[str, Setup]]:
    """A run of each schedule, with its own weights."""
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(
                set_up_aside(config.model_copy(update={"schedule": name, "seed": seed}))
            )
            for name in schedules
        }


def _in_turn(runs: dict[str, Setup], seed: int) -> Iterator[dict[str, Any]]:
    seconds = dict.fromkeys(runs, 0.0)
    for update in range(next(iter(runs.values())).config.updates + 1):
        for name, s in runs.items():
            reward = None
            if update:
                began = time.perf_counter()
                reward = one_update(s, update - 1)["reward_mean"]
                seconds[name] += time.perf_counter() - began
            values = (seed, name, update, seconds[name], reward, _held_out(s, update))
            yield dict(zip(COLUMNS, values, strict=True))


def _held_out(s: Setup, update: int) -> float | None:
    c = s.config.evaluation
    if update % c.every and update != s.config.updates:
        return None
    some = s.heldout[:: -(-len(s.heldout) // HELD_OUT)]
    found = evaluate(s.policy, s.judge, some, batch=c.batch, steps=c.steps, world=s.world)
    return None if found is None else float(found.reward.nanmean())


def time_to_target(
    rows: Sequence[dict[str, Any]],
    schedules: Sequence[str],
    seeds: Sequence[int],
    target: float | None = None,
) -> dict[str, Any]:
    """`times`: of each seed and schedule, the target and seconds and updates to it; None: never.

    `target` is a gain over the held-out reward before training. If it is None, a seed's is the
    most that each of its schedules gained: that of the one that gained least. It is None in
    `times`, as are the times, if one of them gained nothing.

    `ratios`: for each schedule the first one's seconds over its own, of every seed (`each`) and
    their `mean`; None where one of the runs never got there, as a mean of the others would flatter.
    """
    times: list[dict[str, Any]] = []
    for seed in seeds:
        scored = {name: _scored(rows, seed, name) for name in schedules}
        gains = {n: [r["heldout"] - some[0]["heldout"] for r in some] for n, some in scored.items()}
        goal = min(max(g) for g in gains.values()) if target is None else target
        for name, some in scored.items():
            when = {
                k: reached([r[k] for r in some], gains[name], goal) if goal > 0 else None
                for k in COLUMNS[2:4]
            }
            times.append(
                {"seed": seed, "schedule": name, "target": goal if goal > 0 else None, **when}
            )
    ratios: dict[str, dict[str, Any]] = {}
    base = [t["seconds"] for t in times if t["schedule"] == schedules[0]]
    for name in schedules:
        own = [t["seconds"] for t in times if t["schedule"] == name]
        each = [a / b if a and b else None for a, b in zip(base, own, strict=True)]
        there = [e for e in each if e is not None]
        mean = statistics.fmean(there) if len(there) == len(each) else None
        ratios[name] = {"mean": mean, "each": each}
    return {"times": times, "ratios": ratios}


def _scored(rows: Sequence[dict[str, Any]], seed: int, name: str) -> list[dict[str, Any]]:
    return [
        r for r in rows if (r["seed"], r["schedule"]) == (seed, name) and r["heldout"] is not None
    ]


def targets(result: dict[str, Any]) -> list[float]:
    """The gain that every seed's runs were to reach, in the order of the seeds."""
    first = result["schedules"][0]
    found = [t["target"] for t in result["times"] if t["schedule"] == first]
    return [target for target in found if target is not None]


def reached(xs: Sequence[float], ys: Sequence[float], target: float) -> float | None:
    """Where the line through the points first comes up to `target`; None if it never does."""
    before: tuple[float, float] | None = None
    for x, y in zip(xs, ys, strict=True):
        if y >= target:
            if before is None:
                return x
            return before[0] + (x - before[0]) * (target - before[1]) / (y - before[1])
        before = x, y
    return None


def verdict(result: dict[str, Any]) -> str:
    """How much sooner than the first schedule the others reach the target, in words."""
    first, *others = result["schedules"]
    parts: list[str] = []
    for name in others:
        ratio = result["ratios"][name]
        if ratio["mean"] is None:
            missed = [
                f"{t['schedule']} with seed {t['seed']}"
                for t in result["times"]
                if t["schedule"] in (first, name) and t["seconds"] is None
            ]
            parts.append(f"{name}: no ratio, as {', '.join(missed)} never reached the target")
        else:
            each = ratio["each"]
            parts.append(
                f"{name} reaches the target {ratio['mean']:.2f}x sooner than {first} (mean of "
                f"{len(each)} seeds; {min(each):.2f}x to {max(each):.2f}x)"
            )
    return "; ".join(parts)


def curves(result: dict[str, Any], name: str, column: str) -> dict[str, list[float]]:
    """A schedule's `column` over the seeds: update, mean seconds, mean, lowest and highest.

    `heldout` is taken as the gain over what it was before training.
    """
    began = {
        r["seed"]: r["heldout"] for r in result["rows"] if (r["schedule"], r["update"]) == (name, 0)
    }
    found: dict[str, list[float]] = {
        k: [] for k in ("update", "seconds", "mean", "lowest", "highest")
    }
    for update in range(result["updates"] + 1):
        some = [r for r in result["rows"] if (r["schedule"], r["update"]) == (name, update)]
        values = [
            r[column] - (began[r["seed"]] if column == "heldout" else 0.0)
            for r in some
            if r[column] is not None
        ]
        if len(values) < len(result["seeds"]):
            continue
        seconds = statistics.fmean(r["seconds"] for r in some)
        numbers = (update, seconds, statistics.fmean(values), min(values), max(values))
        for key, number in zip(found, numbers, strict=True):
            found[key].append(number)
    return found


def draw(
    result: dict[str, Any], folder: str | Path, *, command: str = "leangrpo bench --paper"
) -> list[Path]:
    """Figure 5: `figure5.svg`, readable in black and white, and its rows as `figure5.csv`.

    Lines are means over the seeds, bands reach from the lowest seed to the highest; in the right
    half each update stands at the mean of its seconds. `command` is printed below.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    image, data = folder / "figure5.svg", folder / "figure5.csv"
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "figure5"}):
        figure, axes = plt.subplots(
            2, 2, figsize=(10, 7.4), sharex="col", sharey="row", layout="constrained"
        )
        labels = {"heldout": "held-out reward, gain over update 0", "reward": "training reward"}
        for axis_row, (column, label) in zip(axes, labels.items(), strict=True):
            for axis, x in zip(axis_row, ("update", "seconds"), strict=True):
                for i, name in enumerate(result["schedules"]):
                    c = curves(result, name, column)
                    grey, style = str(0.55 * (i % 2)), STYLES[i % len(STYLES)]
                    mark = MARKS[i % len(MARKS)]
                    axis.plot(c[x], c["mean"], style, color=grey, marker=mark, ms=4, label=name)
                    axis.fill_between(c[x], c["lowest"], c["highest"], color=grey, alpha=0.15, lw=0)
                axis.grid(alpha=0.3)
            axis_row[0].set_ylabel(label)
        for axis, x in zip(axes[0], ("update", "seconds"), strict=True):
            goals = targets(result)
            for i, goal in enumerate(goals):
                label = "" if i else f"target{'s' * (len(goals) > 1)}"
                axis.axhline(goal, color="black", lw=0.8, ls=(0, (1, 3)), label=label)
            for name, mark in zip(result["schedules"], MARKS, strict=False):
                times = [t[x] for t in result["times"] if t["schedule"] == name]
                if None not in times:  # a vertical stroke where the seeds get there in the mean
                    axis.axvline(statistics.fmean(times), color="black", lw=0.6, ls=":")
                    axis.plot(
                        [statistics.fmean(times)],
                        [statistics.fmean(goals)],
                        mark,
                        color="white",
                        mec="black",
                        ms=9,
                        zorder=3,
                    )
        axes[0][0].legend()
        axes[1][0].set_xlabel("updates")
        axes[1][0].xaxis.get_major_locator().set_params(integer=True)
        axes[1][1].set_xlabel("seconds of updates, in one process in turn")
        figure.supxlabel(f"{caption(result)}\n{command}", fontsize=8)
        figure.savefig(image, metadata={"Date": None})
        plt.close(figure)
    with data.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(result["rows"])
    return [image, data]


def caption(result: dict[str, Any]) -> str:
    """What was run, what line and band are, and what came of it."""
    return (
        f"{result['recipe']} ({result['train']}): {result['prompts']} prompts x "
        f"{result['generations']} generations an update, {result['micro_batch']} a forward, "
        f"{result['steps']} steps; {len(result['seeds'])} seeds.\nLine: mean. Band: lowest to "
        f"highest seed. {_target(result)}\n{verdict(result)}."
    )


def _target(result: dict[str, Any]) -> str:
    if result["target"] is not None:
        return f"Dotted: the target, a gain of {result['target']:g}, set beforehand."
    each = ", ".join(f"{goal:.3f}" for goal in targets(result))
    return f"Dotted: a seed's target, the most that all its schedules gained ({each})."
