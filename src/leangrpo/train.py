"""The loop: sample, score, advantages, gradient, step; and nothing but the loop.

The schedule decides when gradients are formed; no line here changes with it.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import checkpoint
from .advantages import group_advantages, subtract_kl
from .config import Config, config_hash
from .data import SampleKey, Transition
from .errors import LeanError
from .evaluation import Evaluation, evaluate
from .noise import generator
from .policy import Policy
from .runfolder import EVALUATIONS, read_lines
from .schedules import Schedule, Statistics
from .selection import select
from .setup import Setup, set_up


def train(config: Config, *, resume: bool = False, quiet: bool = False) -> dict[str, Any]:
    """Train as `config` says, into its run folder; returns what `summary.json` says.

    Raises LeanError for what the user can mend. Whatever ends the run, the last finished update is
    in a checkpoint, and `resume=True` goes on from there to bitwise the same weights.
    """
    began = time.perf_counter()
    s = set_up(config, resume=resume, quiet=quiet)
    done, saved = s.start, s.start if resume else -1
    policy, record, stopped = s.policy, s.record, "finished"

    def keep(update: int) -> None:
        nonlocal saved
        if update != saved:
            state = {
                "update": update,
                "config": config_hash(config),
                "table": policy.plan().table.tolist(),
                "seed": config.seed,
                "policy_version": policy.version,
            }
            root = Path(record.folder) / "checkpoints"
            checkpoint.save(root, policy, s.optimizer, state, config.checkpoint.keep)
            saved = update

    try:
        with s.scorer, s.judge, _interrupt() as interrupted:
            if _is_due(s, done):  # also one that a failure has left out
                _evaluate(s, done)
            while done < config.updates and not interrupted.is_set():
                line = one_update(s, done)
                record.metrics(line)
                done += 1
                s.whole = True
                if _is_due(s, done):
                    _evaluate(s, done)
                if done % config.checkpoint.every == 0:
                    keep(done)
            if interrupted.is_set() and done < config.updates:
                stopped = "interrupted"
            keep(done)
    except BaseException as error:
        if done > max(saved, 0) and s.whole:
            keep(done)
        record.failed(error, done)
        raise
    summary = {
        "schedule": config.schedule,
        "seed": config.seed,
        "updates": done,
        "seconds": time.perf_counter() - began,
        "weights_sha256": checkpoint.weights_sha256(policy),
        "stopped": stopped,
    }
    return record.finish(summary)


def one_update(s: Setup, update: int) -> dict[str, Any]:
    """One optimizer update (0-based); returns its line of `metrics.jsonl`."""
    config, policy, schedule, watch = s.config, s.policy, s.schedule, s.watch
    watch.reset()
    num_prompts, num_generations = config.rollout.prompts, config.rollout.generations
    selection = select(config.selection, s.stds, seed=config.seed, update=update)
    schedule.begin(num_prompts * num_generations, len(selection.selected))
    rewards = torch.zeros(num_prompts, num_generations, dtype=torch.float64)
    kl = torch.zeros_like(rewards)
    each: dict[str, list[Tensor]] = {}
    excluded = 0
    waiting = []

    for p, prompt in enumerate(draw_prompts(s.prompts, config.seed, update, num_prompts)):
        for g in range(0, num_generations, config.rollout.micro_batch):
            size = min(config.rollout.micro_batch, num_generations - g)
            keys = [SampleKey(update, p, g + i) for i in range(size)]
            rollout = policy.sample(
                [prompt] * size,
                keys,
                selected=selection.selected,
                noisy=selection.stochastic,
                grad=schedule.needs_graph,
                capture=schedule.capture,
                on_transition=None if s.needs_kl else schedule.transition,
            )
            for transition in rollout.transitions:
                _take_with_kl(policy, schedule, transition, kl[p, g : g + size])
            assert rollout.images is not None
            waiting.append((p, g, s.scorer.submit(rollout.images, rollout.prompts)))
        if config.advantage.std == "global" and p + 1 < num_prompts:
            continue  # the deviation is that of the whole update
        with watch.stage("reward"):
            for row, column, future in waiting:
                scores = future.result()
                rewards[row, column : column + len(scores.total)] = scores.total
                excluded += scores.excluded
                for name, values in scores.each.items():
                    each.setdefault(name, []).append(values)
        groups = sorted({row for row, _, _ in waiting})
        waiting.clear()
        trained_on = subtract_kl(rewards, kl, config.objective.kl_in_reward)
        a = group_advantages(trained_on[groups], **s.advantage)
        schedule.advantages(
            {
                SampleKey(update, row, m): float(a[i, m])
                for i, row in enumerate(groups)
                for m in range(num_generations)
            }
        )
        s.advantages[groups] = a

    statistics = schedule.finish()
    with watch.stage("optimizer"):
        grad_norm, stepped = step(s, update)
    return _line(
        s, update, selection.selected, rewards, each, excluded, statistics, grad_norm, stepped
    )


def step(s: Setup, update: int) -> tuple[float, bool]:
    """Clip and step; returns the gradient's norm before clipping and whether a step was made.

    An update whose groups all had equal rewards has no gradient: the optimizer is not stepped, as
    its momentum would move the weights all the same. Raises LeanError for a non-finite gradient.
    """
    parameters = [p for p in s.policy.parameters if p.grad is not None]
    if not parameters:
        return 0.0, False
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, s.config.optimizer.max_grad_norm))
    if not np.isfinite(norm):
        raise LeanError(
            f"The gradient of update {update + 1} is not finite. The weights are those of update "
            f"{update}. Lower optimizer.lr, or use model.dtype=float32."
        )
    s.whole = False
    if update == s.start:
        _name_unreached(s)
    s.optimizer.step()
    s.optimizer.zero_grad(set_to_none=True)
    return norm, True


def _name_unreached(s: Setup) -> None:
    """Say which trainable parameters got no gradient: a few may be by design, all are a mistake."""
    unreached = [name for name, p in s.policy.named_parameters() if p.grad is None]
    if unreached:
        s.record.note(
            f"{len(unreached)} of {len(s.policy.parameters)} trainable parameters are not reached "
            f"by the gradient and will not move: {', '.join(unreached[:6])}"
            + (" ..." if len(unreached) > 6 else "")
        )


def draw_prompts(prompts: list[str], seed: int, update: int, num: int) -> list[str]:
    """The prompts of an update: a keyed shuffle of the file, epoch after epoch, each once in each.

    Depends on (seed, update) only, so that a resumed run needs no position.
    """
    drawn = []
    for position in range(update * num, (update + 1) * num):
        epoch, place = divmod(position, len(prompts))
        order = generator(seed, -2, epoch).permutation(len(prompts))
        drawn.append(prompts[int(order[place])])
    return drawn


def _take_with_kl(policy: Policy, schedule: Schedule, transition: Transition, kl: Tensor) -> None:
    """Attach the divergence from the reference policy, hand the step on, and add up `kl` `(B,)`."""
    transition = policy.with_kl(transition)
    assert transition.kl is not None
    kl += transition.kl.detach().to(kl)
    schedule.transition(transition)


def _line(
    s: Setup,
    update: int,
    selected: tuple[int, ...],
    rewards: Tensor,
    each: dict[str, list[Tensor]],
    excluded: int,
    statistics: Statistics,
    grad_norm: float,
    stepped: bool,
) -> dict[str, Any]:
    """A line of `metrics.jsonl`; all but `time` and `memory` is reproducible bitwise."""
    finite = rewards[torch.isfinite(rewards)]
    spread = s.advantages
    times: dict[str, float] = s.watch.read()
    total = sum(times.values())
    cuda = s.device.type == "cuda"
    return {
        "update": update + 1,
        "schedule": s.config.schedule,
        "reward_mean": float(finite.mean()) if len(finite) else None,
        "reward_std": float(finite.std(correction=0)) if len(finite) else None,
        "rewards": {name: float(torch.cat(values).nanmean()) for name, values in each.items()},
        "advantage_std": float(spread.std(correction=0)),
        "advantage_abs_max": float(spread.abs().max()),
        "loss": statistics.loss,
        "grad_norm": grad_norm,
        "lr": s.config.optimizer.lr,
        "images": rewards.numel(),
        "selected_steps": list(selected),
        "zero_variance_groups": int((spread == 0).all(dim=1).sum()),
        "excluded": excluded,
        "optimizer_stepped": stepped,
        "kl": statistics.kl,
        "ratio_error": statistics.ratio_error,
        "policy_version": update + 1,
        "time": {**times, "total": total, "images_per_s": rewards.numel() / total},
        "memory": {
            "peak_bytes": torch.cuda.max_memory_allocated(s.device) if cuda else None,
            "ledger_bytes": statistics.ledger_bytes,
        },
    }


def _is_due(s: Setup, update: int) -> bool:
    """Whether the held-out prompts are to be scored after this many updates, and are not yet."""
    due = update % s.config.evaluation.every == 0 or update == s.config.updates
    if not s.heldout or not due:
        return False
    lines = read_lines(Path(s.record.folder) / EVALUATIONS)
    return all(line["update"] != update for line in lines)


def _evaluate(s: Setup, update: int) -> None:
    started = time.perf_counter()
    c = s.config.evaluation
    result: Evaluation = evaluate(s.policy, s.judge, s.heldout, batch=c.batch, num_images=c.grid)
    line = result.line(update, time.perf_counter() - started)
    scores = result.reward[: c.grid].tolist()
    s.record.evaluation(line, result.images, list(result.prompts[: c.grid]), scores)


@contextmanager
def _interrupt() -> Iterator[threading.Event]:
    """Make the first Ctrl-C (or SIGTERM) a request to finish the update; a second one stops."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def handle(number: int, _: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        print("\nFinishing this update, then saving. Once more to stop at once.", flush=True)

    before = {n: signal.signal(n, handle) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
