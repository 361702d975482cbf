"""Using a finished or running run: its weights on held-out prompts, or on prompts of your own."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from . import checkpoint
from .config import Config
from .data import SampleKey
from .datasets import read_examples
from .errors import LeanError
from .evaluation import evaluate
from .policy import Policy
from .setup import make_policy, make_scorers, pick_device

_OWN_PROMPTS = -3
"""The `update` of the noise of `sample`: neither training nor evaluation has it."""


def load_run(
    config: Config, run: Path, update: int | None = None, ema: bool | None = None
) -> tuple[Policy, int]:
    """A run's policy with the weights of a checkpoint (the newest sound one by default).

    Their running mean with `ema`; by default where the run has one, and the terminal says so.
    """
    has_mean = config.ema.decay > 0
    if ema and not has_mean:
        raise LeanError(f"{run} has no running mean: it was made with ema.decay=0. Use --no-ema.")
    ema = has_mean if ema is None else ema
    root = run / "checkpoints"
    if update is None:
        found, complaints = checkpoint.newest(root)
        for complaint in complaints:
            print(f"warning: {complaint} Using an older one.", flush=True)
        if found is None:
            raise LeanError(f"{run} has no checkpoint yet. Wait for one, or train it first.")
    else:
        if not (root / f"{update:06d}").is_dir():
            there = ", ".join(str(int(p.name)) for p in checkpoint.folders(root)) or "none"
            raise LeanError(f"{run} has no checkpoint of update {update}. It has: {there}.")
        found = checkpoint.open_checkpoint(root / f"{update:06d}")
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    # Without steps to take there is no need for master weights, nor for a reference policy.
    model = config.model.model_copy(update={"master_dtype": None})
    objective = config.objective.model_copy(update={"kl": 0.0, "kl_in_reward": 0.0})
    config = config.model_copy(update={"model": model, "objective": objective})
    policy = make_policy(config, pick_device(config.run.device))
    checkpoint.load_weights(policy, found.folder, ema=ema)
    if has_mean:
        what = "the running mean of the weights" if ema else "the weights, not their running mean"
        print(f"update {found.update}: {what}", file=sys.stderr, flush=True)
    return policy, found.update


def evaluate_run(
    config: Config, run: Path, update: int | None, ema: bool | None = None
) -> dict[str, Any]:
    """Score a checkpoint on the run's held-out prompts; the line of `evaluations.jsonl`."""
    if not config.prompts.heldout:
        raise LeanError(
            f"{run} has no held-out prompts: prompts.heldout is null in its config.yaml."
        )
    examples = read_examples(config.prompts, heldout=True)[: config.evaluation.prompts]
    policy, at = load_run(config, run, update, ema)
    started = time.perf_counter()
    scorer, judge = make_scorers(config)
    with scorer, judge:
        c = config.evaluation
        result = evaluate(policy, judge, examples, batch=c.batch, steps=c.steps)
    assert result is not None
    return result.line(at, time.perf_counter() - started)


def sample_run(
    config: Config,
    run: Path,
    prompts: Sequence[str],
    out: Path,
    *,
    num: int,
    seed: int,
    update: int | None,
    ema: bool | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Write `num` pictures (PNG; videos as GIF) of every prompt to `out`; returns the files.

    `inputs` are further arguments of the pipeline's call, such as a picture to edit.
    """
    from PIL import Image

    policy, _ = load_run(config, run, update, ema)
    out.mkdir(parents=True, exist_ok=True)
    policy.seed = seed
    steps = config.evaluation.steps or policy.sampling.steps
    sampling = replace(policy.sampling, steps=steps)
    files = []
    for p, prompt in enumerate(prompts):
        for n in range(num):
            key = SampleKey(_OWN_PROMPTS, p, n)
            images = policy.sample([prompt], [key], sampling=sampling, inputs=inputs).images
            assert images is not None
            frames = images[0] if images.dim() == 5 else images[:1]
            pixels = (frames.clamp(0, 1) * 255).round().to(torch.uint8).movedim(1, -1).numpy()
            pictures = [Image.fromarray(frame) for frame in pixels]
            file = out / f"{p:03d}-{n:03d}.{'png' if len(pictures) == 1 else 'gif'}"
            if len(pictures) == 1:
                pictures[0].save(file)
            else:
                pictures[0].save(file, save_all=True, append_images=pictures[1:], duration=125)
            files.append(file)
    return files
