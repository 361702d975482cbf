"""A run folder without a run: numbers and pictures that look like one of the embedded recipe."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from leangrpo.config import load_config, to_yaml
from leangrpo.report import RunRecord

COLORS = ("red", "green", "blue", "orange", "purple", "teal", "brown", "gray")
NUMBERS = (47, 80, 13, 92, 35, 61, 28, 74, 56, 19, 83, 40, 67, 22, 95, 38)


def heldout(num: int = 16) -> list[str]:
    return [f"the number {NUMBERS[i % 16]} in {COLORS[i % 8]}" for i in range(num)]


def config(**overrides: Any) -> str:
    return to_yaml(load_config("embedded", [f"{k}={v}" for k, v in overrides.items()]))


def progress(update: int, updates: int) -> float:
    return 1 - math.exp(-3 * update / max(updates, 1))


def metrics(update: int, updates: int = 40, **changes: Any) -> dict[str, Any]:
    """A line of `metrics.jsonl`."""
    draw = random.Random(update)
    mean = -6.5 + 5.2 * progress(update, updates) + draw.gauss(0, 0.2)
    time = {
        "rollout": 2.8 + draw.gauss(0, 0.1),
        "decode": 0.25,
        "backward": 1.7 + draw.gauss(0, 0.1),
        "reward": 0.6,
        "optimizer": 0.02,
        "other": 0.07,
    }
    total = sum(time.values())
    return {
        "update": update,
        "schedule": "reweight",
        "reward_mean": mean,
        "reward_std": 2.5 - 1.2 * progress(update, updates),
        "rewards": {"ocr_log_prob": mean},
        "reward_seconds": {"ocr_log_prob": 0.9},
        "advantage_std": 1 - draw.random() / 100,
        "advantage_abs_max": 2.7 + draw.gauss(0, 0.2),
        "loss": -1.4e-17,
        "grad_norm": 0.2 * math.exp(-update / 30) + draw.random() / 20,
        "lr": 5e-5,
        "images": 96,
        "selected_steps": [1, 3, 4, 8],
        "zero_variance_groups": 0,
        "excluded": 0,
        "optimizer_stepped": True,
        "kl": None,
        "ratio_error": 0.0,
        "policy_version": update,
        "time": {**time, "total": total, "images_per_s": 96 / total},
        "memory": {"peak_bytes": None, "ledger_bytes": 1 << 20},
        **changes,
    }


def evaluation(update: int, updates: int = 40, prompts: list[str] | None = None) -> dict[str, Any]:
    """A line of `evaluations.jsonl`, before the record adds its grid."""
    draw = random.Random(update)
    rows = []
    for i, prompt in enumerate(heldout() if prompts is None else prompts):
        right = progress(update, updates) > 0.15 + 0.85 * ((i * 7) % 16) / 16
        reward = -0.05 - draw.random() / 5 if right else -6.2 + draw.gauss(0, 1)
        rows.append({"prompt": prompt, "reward": reward, "exact": float(right)})
    num = max(len(rows), 1)
    return {
        "update": update,
        "reward": sum(r["reward"] for r in rows) / num,
        "rewards": {"ocr_log_prob": sum(r["reward"] for r in rows) / num},
        "exact": sum(r["exact"] for r in rows) / num,
        "num_prompts": len(rows),
        "per_prompt": rows,
        "seconds": 1.5,
    }


def pictures(update: int, updates: int = 40, num: int = 16, size: int = 32) -> Tensor:
    """Numbers in colours under noise that fades with training, `(num, 3, size, size)`."""
    generator = torch.Generator().manual_seed(0)
    font = ImageFont.load_default(size * 0.72)
    found = []
    for i in range(num):
        sheet = Image.new("RGB", (size, size), "white")
        ink = ImageDraw.Draw(sheet)
        middle = (size / 2, size / 2)
        ink.text(middle, str(NUMBERS[i % 16]), fill=COLORS[i % 8], font=font, anchor="mm")
        clean = torch.tensor(list(sheet.tobytes()), dtype=torch.float32) / 255
        clean = clean.view(size, size, 3).movedim(-1, 0)
        noise = torch.rand(3, size, size, generator=generator)
        share = 0.75 * (1 - progress(update, updates))
        found.append((1 - share) * clean + share * noise)
    return torch.stack(found)


def synthetic_run(
    folder: Path,
    updates: int = 40,
    every: int = 10,
    prompts: list[str] | None = None,
    size: int = 32,
    finish: bool = True,
) -> Path:
    """Write a whole run folder through `RunRecord`; returns the folder."""
    prompts = heldout(64) if prompts is None else prompts
    record = RunRecord.create(folder, config(updates=max(updates, 1)), quiet=True)
    shown = prompts[:16]
    for update in range(updates + 1):
        if update:
            record.metrics(metrics(update, updates))
        if every and (update % every == 0 or update == updates):
            line = evaluation(update, updates, prompts)
            scores = [row["reward"] for row in line["per_prompt"][: len(shown)]]
            record.evaluation(line, pictures(update, updates, len(shown), size), shown, scores)
    if finish:
        record.finish(
            {
                "schedule": "reweight",
                "seed": 0,
                "updates": updates,
                "seconds": 5.4 * updates,
                "weights_sha256": "0" * 64,
                "stopped": "finished",
            }
        )
    else:
        record.close()
    return folder
