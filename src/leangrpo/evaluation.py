"""Held-out evaluation: the same prompts and noise every time, so that change is progress."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .data import SampleKey
from .datasets import Example
from .parallel import World
from .policy import Policy
from .scoring import Scorer

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
    policy: Policy,
    scorer: Scorer,
    examples: Sequence[Example],
    *,
    batch: int,
    steps: int | None = None,
    num_images: int = 0,
    world: World | None = None,
) -> Evaluation | None:
    """Score one deterministic sample of every example; keep the first `num_images` pictures.

    `steps` is the number of sampling steps, where it is not that of training.
    `scorer` weighs evaluation-only rewards with 0, so that `reward` is the training reward. Ranks
    take whole batches in turn, the batches of a single process, so that pictures are the same; the
    first rank gets the result, the others None. A rank without a batch left repeats one, as
    sharded weights are gathered by all.
    """
    world = world or World()
    sampling = replace(policy.sampling, steps=steps or policy.sampling.steps)
    if any(example.images for example in examples):
        batch = 1  # each with its own picture
    starts = list(range(0, len(examples), batch))
    futures: dict[int, Future[Any]] = {}
    kept: dict[int, Tensor] = {}
    for turn in range(0, len(starts), world.size):
        mine = turn + world.rank
        start = starts[mine] if mine < len(starts) else starts[turn]
        some = examples[start : start + batch]
        prompts = [example.prompt for example in some]
        keys = [SampleKey(_EVALUATION, start + i, 0) for i in range(len(some))]
        with torch.no_grad():
            inputs = some[0].open_images()
            images = policy.sample(prompts, keys, sampling=sampling, inputs=inputs).images
        assert images is not None
        if mine >= len(starts):
            continue
        if start < num_images:
            kept[start] = images[: num_images - start]
        futures[start] = scorer.submit(images, prompts, [e.about(inputs) for e in some])
    own = {start: future.result() for start, future in futures.items()}
    parts = world.gather((own, kept))
    if not parts:
        return None
    found = {start: scores for one, _ in parts for start, scores in one.items()}
    scores = [found[start] for start in starts]
    each = {name: torch.cat([s.each[name] for s in scores]) for name in scores[0].each}
    total = torch.cat([s.total for s in scores])
    shown = {start: images for _, one in parts for start, images in one.items()}
    pictures = torch.cat([shown[s] for s in sorted(shown)]) if shown else torch.empty(0)
    return Evaluation(tuple(e.prompt for e in examples), total, each, pictures)
