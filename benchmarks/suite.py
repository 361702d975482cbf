"""What the guard against regressions measures: ratios and exact counts, by readable names.

Three parts. `timed` runs `leangrpo bench` on the pipeline inside the package, with all weights one
sample at a time and with LoRA eight at a time (whose gradients reweight tells apart). `counted`
runs one update of each schedule, and one on two ranks, and counts. `overhead` is the benchmark of
that name. Everything has one thread, nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import overhead
import torch

from leangrpo.bench import measure
from leangrpo.bench_memory import take_gradient, update
from leangrpo.config import Config, load_config
from leangrpo.loading import load_pipeline
from leangrpo.selection import select
from leangrpo.setup import make_policy, make_schedule
from leangrpo.stopwatch import Stopwatch

SCHEDULES = ["native", "retain", "reweight", "streaming"]
ON_RANKS = ["native:step", "native", "retain", "reweight", "streaming"]
COMMON = ["selection={rule: fraction, fraction: 1.0, steps: null, last: true}", "run.threads=1"]
WORKLOADS = {
    "full": ["embedded", "rollout={prompts: 1, generations: 4, micro_batch: 1}"],
    "lora": ["embedded-lora", "rollout={prompts: 1, generations: 8, micro_batch: 8}"],
}
"""Name, recipe and settings beside `COMMON`."""
RANKS = "rollout={prompts: 2, generations: 2, micro_batch: 1}"


class Value(NamedTuple):
    """One figure; `kind` is one of the guard's `KINDS`."""

    kind: str
    value: float


Values = dict[str, Value]


def workload(name: str) -> Config:
    """The recipe with small settings."""
    recipe, *settings = WORKLOADS[name]
    return load_config(recipe, [*COMMON, *settings])


def timed(name: str, rounds: int) -> Values:
    """Speed-ups over native, shares of the cost model's limit, and bytes."""
    found: Values = {}
    for row in measure(workload(name), SCHEDULES, rounds)["rows"]:
        title = f"{name} {row['schedule']}"
        if row["schedule"] != "native":
            found[f"{title}: speed-up over native"] = Value("speed-up", row["speedup"])
            found[f"{title}: share of the limit"] = Value("share of limit", row["share_of_limit"])
        found[f"{title}: peak bytes"] = Value("peak bytes", row["peak_bytes"])
        found[f"{title}: ledger bytes"] = Value("ledger bytes", row["ledger_bytes"])
    return found


def counted(name: str) -> Values:
    """Denoiser calls of one update under each schedule."""
    config = workload(name)
    policy = make_policy(config, torch.device("cpu"))
    steps = select(config.selection, policy.plan().std.tolist(), seed=config.seed, update=0)
    found: Values = {}
    for schedule in SCHEDULES:
        calls: Counter[str] = Counter()
        policy.on_call = lambda network, _, calls=calls: calls.update([network])
        named = config.model_copy(update={"schedule": schedule})
        one = make_schedule(named, policy, Stopwatch())
        update(config, policy, one, steps, config.rollout.generations)
        take_gradient(policy)
        found[f"{name} {schedule}: denoiser calls"] = Value("calls", calls.total())
    policy.on_call = None
    return found


def collectives() -> Values:
    """Collectives of an update on two ranks that share the weights, and their bytes."""
    recipe = WORKLOADS["full"][0]
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "counts.json"
        words = ["bench", recipe, *COMMON, RANKS, "--collectives", "--nproc", "2"]
        words += ["--schedules", ",".join(ON_RANKS), "--json", str(out)]
        done = subprocess.run(
            [sys.executable, "-m", "leangrpo", *words],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"leangrpo {' '.join(words)} failed:\n{done.stderr[-3000:]}")
        rows: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))["rows"]
    found: Values = {}
    for row in rows:
        for what in ("calls", "num_bytes"):
            for kind, number in row[what].items():
                title = f"2 ranks {row['schedule']}: {kind.replace('_', '-')}"
                ending = " bytes" if what == "num_bytes" else "s"
                found[title + ending] = Value("collectives", number)
    return found


def overheads(rounds: int) -> Values:
    """What the policy adds to a bare step, and each part, in percent of a forward."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = overhead.bench_model(Path(scratch) / "model")
        pipe = load_pipeline(str(folder), dtype=torch.float32)
    result = overhead.measure(pipe, overhead.CALL, steps=10, selected=10, rounds=rounds)
    found: Values = {}
    for row in result["calls"]:
        title = f"policy {'with' if row['gradients'] else 'without'} gradients: % over a bare step"
        found[title] = Value("overhead", row["outside"])
    for row in result["pieces"][1:]:
        if "own" not in row["piece"]:
            found[f"{row['piece']}: % of a forward"] = Value("part", row["of_forward"])
    return found


def run(rounds: int) -> Values:
    """All of it, once."""
    found: Values = {}
    for name in WORKLOADS:
        found |= timed(name, rounds) | counted(name)
    return found | collectives() | overheads(rounds)
