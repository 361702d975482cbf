"""The loop: sample, score, advantages, gradient, step; and nothing but the loop.

The schedule decides when gradients are formed; no line here changes with it.
"""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from .advantages import subtract_kl
from .checkpoint import Checkpoints, weights_sha256
from .collectives import in_order
from .config import Config, config_hash
from .data import Transition
from .errors import LeanError, NonFiniteError
from .evaluation import evaluate
from .exclusion import until_finite
from .fallback import until_it_fits
from .interrupt import stop_requests
from .parallel import whole
from .report import Onlooker
from .rollout import roll_out
from .runfolder import EVALUATIONS, read_lines
from .schedules import Schedule
from .scoreboard import Scoreboard
from .setup import Setup, plan_text, set_up

T = TypeVar("T")


def train(config: Config, *, resume: bool = False, quiet: bool = False) -> dict[str, Any]:
    """Train as `config` says, into its run folder; returns what `summary.json` says.

    Raises LeanError for what the user can mend. Whatever ends the run, the last finished update is
    in a checkpoint, and `resume=True` goes on from there to bitwise the same weights.
    """
    began = time.perf_counter()
    s = set_up(config, resume=resume, quiet=quiet)
    config, policy, record, world = s.config, s.policy, s.record, s.world
    stopped = "finished"
    checkpoints = Checkpoints(Path(record.folder) / "checkpoints", config.checkpoint.keep, world)
    done, saved = s.start, s.start if resume else -1

    def keep(update: int) -> None:
        nonlocal saved
        if update != saved:
            state = {
                "update": update,
                "config": config_hash(config),
                "table": policy.plan().table.tolist(),
                "seed": config.seed,
                "policy_version": policy.version,
                "examples": s.digest,
            }
            checkpoints.save(policy, s.optimizer, state, s.ema, s.memory())
            saved = update

    record.plan(plan_text(s))
    try:
        with s.scorer, s.judge, stop_requests(world) as interrupted:
            if _is_due(s, done):  # also one that a failure has left out
                _evaluate(s, done)
            while done < config.updates and not world.any(interrupted.is_set()):
                line = until_it_fits(partial(until_finite, one_update), s, done)
                record.metrics(line)
                done += 1
                s.whole = True
                checkpoints.poll()
                if _is_due(s, done):
                    _evaluate(s, done)
                if done % config.checkpoint.every == 0:
                    keep(done)
            if done < config.updates:
                stopped = "interrupted"
            keep(done)
            checkpoints.wait()
    except BaseException as error:
        if done > max(saved, 0) and s.whole and world.size == 1:
            keep(done)
        with suppress(Exception):  # the first error counts
            checkpoints.poll()
        record.failed(error, checkpoints.published)
        raise
    summary = {
        "schedule": s.config.schedule,
        "seed": config.seed,
        "updates": done,
        "seconds": time.perf_counter() - began,
        "ranks": world.size,
        "weights_sha256": weights_sha256(policy),
        "stopped": stopped,
    }
    # All ranks stay until the first has written its files: one that ends may end the others.
    return world.share(record.finish(summary))  # type: ignore[no-any-return]


@in_order
def one_update(s: Setup, update: int) -> dict[str, Any]:
    """A rollout and its optimizer steps (0-based); returns its line of `metrics.jsonl`.

    With `rollout.parts` the prompts are split and each part has a step of its own; with
    `rollout.epochs` all parts are passed again. Only the first step is on-policy: the others run
    the model again at the weights they find, with the clipped ratio (paper, table 6).
    Raises NonFiniteError, on all ranks, before the step of what `exclusion` can leave out.
    """
    c, watch = s.config.rollout, s.watch
    watch.reset()
    num_samples = c.prompts // c.parts * (s.credit.kept or c.generations)
    num_steps = len(s.select(update).selected)
    table = Scoreboard(c.prompts, c.generations, s.scorer.names)
    stored: dict[int, list[Transition]] = {part: [] for part in range(c.parts)}
    steps = [(epoch, part) for epoch in range(c.epochs) for part in range(c.parts)]

    s.schedule.begin(num_samples, num_steps)
    for part in reversed(range(c.parts)):  # the first last: its graphs wait for no other sampling
        roll_out(s, update, part, table, stored[part], last=part == 0)
    if s.world.any(bool(table.bad)):
        bad = [key for one in s.world.share_all(table.bad) for key in one]
        raise NonFiniteError(f"{len(bad)} trajectories of update {update + 1} are not finite.", bad)
    line_steps = [finish_step(s, update, s.schedule, lean=s.schedule.needs_graph)]
    for _, part in steps[1:]:
        s.later.begin(num_samples, num_steps)
        for transition in stored[part]:
            s.later.transition(transition)
        s.later.advantages(
            {k: table.advantage(k) for t in stored[part] if t.weight for k in t.keys}
        )
        line_steps.append(finish_step(s, update, s.later, lean=False))
    if s.ema is not None:
        s.ema.step(update + 1)
    value_loss = None
    if s.critic is not None:
        with watch.stage("optimizer"):
            s.whole = False  # it has seen an update that is not counted yet
            beta = s.config.objective.kl_in_reward
            value_loss = s.critic.after(subtract_kl(table.rewards, table.kl, beta))
    for place, one in zip(steps, line_steps, strict=True):
        one |= dict(zip(("epoch", "part"), place, strict=True))
    line = _line(s, update, table, line_steps)
    return line if s.critic is None else line | {"value_loss": value_loss}


def finish_step(s: Setup, update: int, schedule: Schedule, *, lean: bool) -> dict[str, Any]:
    """Close a schedule's update and step the optimizer; what the metrics say of it."""
    statistics = schedule.finish()
    with s.watch.stage("optimizer"):
        norm, stepped = step(s, update)
    sums = torch.tensor([statistics.loss, statistics.kl or 0.0], dtype=torch.float64)
    most = torch.tensor([statistics.ratio_error, statistics.ledger_bytes], dtype=torch.float64)
    loss, kl = s.world.sum(sums).tolist()
    ratio_error, ledger_bytes = s.world.max(most).tolist()
    return {
        "lean": lean,
        "stepped": stepped,
        "loss": loss,
        "kl": None if statistics.kl is None else kl,
        "grad_norm": norm,
        "ratio_error": ratio_error,
        "ledger_bytes": int(ledger_bytes),
    }


def step(s: Setup, update: int) -> tuple[float, bool]:
    """Clip and step; returns the gradient's norm before clipping and whether a step was made.

    An update whose groups all had equal rewards has no gradient: the optimizer is not stepped, as
    its momentum would move the weights all the same. Raises NonFiniteError for one not finite.
    """
    parameters = [p for p in s.policy.parameters if p.grad is not None]
    if not parameters:
        return 0.0, False
    c = s.config.optimizer
    norm = float(whole(torch.nn.utils.clip_grad_norm_(parameters, c.max_grad_norm)))
    if not np.isfinite(norm):
        raise NonFiniteError(
            f"The gradient of update {update + 1} is not finite. The weights are those of update "
            f"{update}. Lower optimizer.lr, or use model.dtype=float32."
        )
    s.whole = False
    if update == s.start:
        _name_unreached(s)
    for group in s.optimizer.param_groups:
        group["lr"] = learning_rate(s.config, update)
    s.optimizer.step()
    s.optimizer.zero_grad(set_to_none=True)
    return norm, True


def learning_rate(config: Config, update: int) -> float:
    """The learning rate of an update (0-based): a linear warm-up, then constant."""
    c = config.optimizer
    return c.lr * min(1.0, (update + 1) / c.warmup) if c.warmup else c.lr


def _name_unreached(s: Setup) -> None:
    """Say which trainable parameters got no gradient: a few may be by design, all are a mistake."""
    unreached = [name for name, p in s.policy.named_parameters() if p.grad is None]
    if unreached:
        s.record.note(
            f"{len(unreached)} of {len(s.policy.parameters)} trainable parameters are not reached "
            f"by the gradient and will not move: {', '.join(unreached[:6])}"
            + (" ..." if len(unreached) > 6 else "")
        )


def _line(
    s: Setup,
    update: int,
    table: Scoreboard,
    steps: list[dict[str, Any]],
) -> dict[str, Any]:
    """A line of `metrics.jsonl`; all but `time`, `reward_seconds` and `memory` is
    reproducible bitwise."""
    world, first = s.world, steps[0]
    table.join(world)
    ledger_bytes = max(one.pop("ledger_bytes") for one in steps)
    if s.order is not None:
        s.order.compare(world, f"update {update + 1}")
        _compare_weights(s, update)
    rewards, spread = table.rewards, table.advantages
    finite = rewards[torch.isfinite(rewards)]
    times: dict[str, float] = s.watch.read()
    total = sum(times.values())
    cuda = s.device.type == "cuda"
    return {
        "update": update + 1,
        "schedule": s.config.schedule,
        "reward_mean": float(finite.mean()) if len(finite) else None,
        "reward_std": float(finite.std(correction=0)) if len(finite) else None,
        "rewards": {name: float(values.nanmean()) for name, values in table.each.items()},
        "reward_seconds": table.seconds,
        "advantage_std": float(spread.std(correction=0)),
        "advantage_abs_max": float(spread.abs().max()),
        "loss": first["loss"],
        "grad_norm": first["grad_norm"],
        "lr": learning_rate(s.config, update),
        "images": rewards.numel(),
        "selected_steps": s.selected_anywhere(update),
        "zero_variance_groups": int((spread == 0).all(dim=1).sum()),
        "excluded": table.excluded,
        "optimizer_stepped": any(one["stepped"] for one in steps),
        "kl": first["kl"],
        "ratio_error": first["ratio_error"],
        "steps": steps,
        "policy_version": update + 1,
        "time": {**times, "total": total, "images_per_s": rewards.numel() / total},
        "memory": {
            "peak_bytes": torch.cuda.max_memory_allocated(s.device) if cuda else None,
            "ledger_bytes": ledger_bytes,
        },
    }


def _compare_weights(s: Setup, update: int) -> None:
    """Raise LeanError when copies of the weights on different ranks are no longer the same."""
    digests = s.world.share_all(weights_sha256(s.policy))
    if len(set(digests)) > 1:
        raise LeanError(
            f"After update {update + 1} the ranks have different weights: "
            + ", ".join(f"rank {r} {d[:8]}" for r, d in enumerate(digests))
            + ". A rank has trained on something that the others have not."
        )


def _is_due(s: Setup, update: int) -> bool:
    """Whether the held-out prompts are to be scored after this many updates, and are not yet."""
    due = update % s.config.evaluation.every == 0 or update == s.config.updates
    if not s.heldout or not due:
        return False
    lines = read_lines(Path(s.record.folder) / EVALUATIONS) if s.world.is_main else []
    return bool(s.world.share(all(line.get("update") != update for line in lines)))


def _evaluate(s: Setup, update: int) -> None:
    started = time.perf_counter()
    c = s.config.evaluation
    with s.ema.in_place() if s.ema is not None else nullcontext():
        result = evaluate(
            s.policy,
            s.judge,
            s.heldout,
            batch=c.batch,
            steps=c.steps,
            num_images=c.grid,
            world=s.world,
        )
    if result is None or isinstance(s.record, Onlooker):
        return
    line = result.line(update, time.perf_counter() - started)
    scores = result.reward[: c.grid].tolist()
    s.record.evaluation(line, result.images, list(result.prompts[: c.grid]), scores)
