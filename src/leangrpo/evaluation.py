"""Held-out evaluation: the same prompts and noise every time, so that change is progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .data import SampleKey
from .policy import Policy
from .rewards import Scorer

EXACT = "ocr_exact"
"""The reward whose mean is reported as `exact`: the share of pictures that are right."""

_EVALUATION = -1
"""The `update` of evaluation noise: no training update has it."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores of the held-out prompts in order, `(N,)` float64 each; pictures of the first ones."""

    prompts: tuple[str, ...]
    reward: Tensor
    each: dict[str, Tensor]
    images: Tensor

    def line(self, update: int, seconds: float) -> dict[str, Any]:
        """The line of `evaluations.jsonl`."""
        exact = self.each.get(EXACT)
        rows = [
            {"prompt": p, "reward": float(r), "exact": None if exact is None else float(exact[i])}
            for i, (p, r) in enumerate(zip(self.prompts, self.reward, strict=True))
        ]
        return {
            "update": update,
            "reward": float(self.reward.nanmean()),
            "rewards": {name: float(values.nanmean()) for name, values in self.each.items()},
            "exact": None if exact is None else float(exact.nanmean()),
            "num_prompts": len(self.prompts),
            "per_prompt": rows,
            "seconds": seconds,
        }


def evaluate(
    policy: Policy, scorer: Scorer, prompts: Sequence[str], *, batch: int, num_images: int = 0
) -> Evaluation:
    """Score one deterministic sample of every prompt; keep the first `num_images` pictures.

    `scorer` weighs evaluation-only rewards with 0, so that `reward` is the training reward.
    """
    futures, kept = [], []
    for start in range(0, len(prompts), batch):
        some = list(prompts[start : start + batch])
        keys = [SampleKey(_EVALUATION, start + i, 0) for i in range(len(some))]
        with torch.no_grad():
            images = policy.sample(some, keys).images
        assert images is not None
        if start < num_images:
            kept.append(images[: num_images - start])
        futures.append(scorer.submit(images, some))
    scores = [future.result() for future in futures]
    each = {name: torch.cat([s.each[name] for s in scores]) for name in scores[0].each}
    total = torch.cat([s.total for s in scores])
    pictures = torch.cat(kept) if kept else torch.empty(0)
    return Evaluation(tuple(prompts), total, each, pictures)
