"""What the change is worth: updates before and after in turn, and the ratio of their seconds.

    python examples/adopting/measure.py

On one thread, as otherwise cores that are shared with others decide.
"""

import statistics
import time

import dance_grpo_after
import dance_grpo_before
import flow_grpo_after
import flow_grpo_before
import torch

from leangrpo import Retain, Reweight

ROUNDS = 5

if __name__ == "__main__":
    torch.set_num_threads(1)
    pairs = {
        "FlowGRPO, all weights": (flow_grpo_before, flow_grpo_after),
        "DanceGRPO, LoRA": (dance_grpo_before, dance_grpo_after),
    }
    for title, (before, after) in pairs.items():
        runs = {
            "native": before.train(ROUNDS + 1, size="large"),
            "retain": after.train(ROUNDS + 1, size="large", schedule_type=Retain),
            "reweight": after.train(ROUNDS + 1, size="large", schedule_type=Reweight),
        }
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(ROUNDS + 1):
            for name, run in runs.items():
                began = time.perf_counter()
                next(run)
                seconds[name].append(time.perf_counter() - began)
        for name in ("retain", "reweight"):
            pairs_of_rounds = zip(seconds["native"][1:], seconds[name][1:], strict=True)
            ratios = sorted(a / b for a, b in pairs_of_rounds)
            print(
                f"{title}: {name} {statistics.median(ratios):.2f}x "
                f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
            )
