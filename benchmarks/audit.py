"""What the audit predicts for the trainers of examples/audit, and what adopting them measures.

    python benchmarks/audit.py                       # predicted and measured speedup
    python benchmarks/audit.py --overhead            # what the audit takes, at 30M parameters

Native and adopted updates (or audited ones and not) run in turn, A B A B, in one process; compare
ratios, not seconds. The medians of the rounds are divided.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "audit"))

from leangrpo.audit import watch

TRAINERS = ("ddpo_style", "flow_grpo_style", "dance_grpo_style", "diffusion_nft_style")


def timed(updates: Iterator[Any]) -> float:
    """Seconds of the next update."""
    start = time.perf_counter()
    next(updates)
    return time.perf_counter() - start


def speedup(name: str, rounds: int, size: str) -> None:
    """Print what is predicted and what is measured for one trainer."""
    trainer = importlib.import_module(name)
    with watch() as audit:
        for _ in trainer.main(rounds + 1, size=size):
            pass
    native, adopted = (trainer.main(rounds + 1, adopted=a, size=size) for a in (False, True))
    times = [(timed(native), timed(adopted)) for _ in range(rounds + 1)][1:]
    before, after = (statistics.median(column) for column in zip(*times, strict=True))
    ratios = [a / b for a, b in times]
    found, measured = audit.report, before / after
    print(
        f"{name:20s} {found.classified:24s} predicted {found.speedup:.3f} (limit {found.limit:.3f})"
        f"  measured {measured:.3f} ({min(ratios):.3f}-{max(ratios):.3f})"
        f"  off by {found.speedup / measured - 1:+.1%}",
        flush=True,
    )


def overhead(name: str, rounds: int, size: str) -> None:
    """Print how much longer an audited update takes."""
    updates = importlib.import_module(name).main(2 * rounds + 1, size=size)
    next(updates)
    pairs, own = [], 0.0
    for _ in range(rounds):
        pair = []
        for context in (nullcontext(None), watch()):
            with context as audit:
                pair.append(timed(updates))
            own += audit.report.own_seconds if audit else 0.0
        pairs.append(pair)
        print(f"  plain {pair[0]:.3f} s, audited {pair[1]:.3f} s", flush=True)
    plain, audited = (sum(column) for column in zip(*pairs, strict=True))
    print(f"{name}, {size}: {audited / plain - 1:+.2%}; readings {own / audited:.3%} of the time")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--overhead", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", default=None)
    parser.add_argument("--trainers", default=None, help="with commas between")
    words = parser.parse_args()
    if words.overhead:
        for chosen in (words.trainers or "dance_grpo_style").split(","):
            overhead(chosen, words.rounds, words.size or "30M")
    else:
        for chosen in (words.trainers or ",".join(TRAINERS)).split(","):
            speedup(chosen, words.rounds, words.size or "large")
