"""The loop: sample, score, advantages, gradient, step; and nothing but the loop.

The schedule decides when gradients are formed; no line here changes with it.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .advantages import group_advantages, subtract_kl
from .checkpoint import Checkpoints, weights_sha256
from .config import Config, config_hash
from .data import SampleKey, Transition
from .errors import LeanError
from .evaluation import evaluate
from .layout import Slot
from .noise import generator
from .parallel import World, whole
from .policy import Policy
from .report import Onlooker
from .rewards import Scores
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
    policy, record, world, stopped = s.policy, s.record, s.world, "finished"
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
            }
            checkpoints.save(policy, s.optimizer, state, s.ema)
            saved = update

    try:
        with s.scorer, s.judge, _interrupt(world) as interrupted:
            if _is_due(s, done):  # also one that a failure has left out
                _evaluate(s, done)
            while done < config.updates and not world.any(interrupted.is_set()):
                line = one_update(s, done)
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
        record.failed(error, done)
        raise
    summary = {
        "schedule": config.schedule,
        "seed": config.seed,
        "updates": done,
        "seconds": time.perf_counter() - began,
        "ranks": world.size,
        "weights_sha256": weights_sha256(policy),
        "stopped": stopped,
    }
    return record.finish(summary)


def one_update(s: Setup, update: int) -> dict[str, Any]:
    """One optimizer update (0-based); returns its line of `metrics.jsonl`."""
    config, policy, schedule, watch, world = s.config, s.policy, s.schedule, s.watch, s.world
    watch.reset()
    num_prompts, num_generations = config.rollout.prompts, config.rollout.generations
    selection = select(config.selection, s.stds, seed=config.seed, update=update)
    schedule.begin(num_prompts * num_generations, len(selection.selected))
    drawn = draw_prompts(s.prompts, config.seed, update, num_prompts)
    table = Scoreboard(num_prompts, num_generations, s.scorer.names)
    waves = s.layout.of(world.rank)

    for number, wave in enumerate(waves, start=1):
        waiting = []
        for slot in wave.slots:
            prompts = [drawn[slot.prompt]] * len(slot.generations)
            keys = [SampleKey(update, slot.prompt, g) for g in slot.generations]
            rollout = policy.sample(
                prompts,
                keys,
                selected=selection.selected,
                noisy=selection.stochastic,
                grad=schedule.needs_graph,
                capture=schedule.capture,
                decode=not slot.idle,
                on_transition=None if s.needs_kl else partial(_take, schedule, slot),
            )
            for transition in rollout.transitions:
                kl = _take_with_kl(policy, schedule, slot, transition)
                if not slot.idle:
                    table.kl[slot.prompt, list(slot.generations)] += kl
            if not slot.idle:
                assert rollout.images is not None
                waiting.append((slot, s.scorer.submit(rollout.images, rollout.prompts)))
        with watch.stage("reward"):
            for slot, future in waiting:
                table.enter(slot, future.result())
        if config.advantage.std == "global":
            if number < len(waves):
                continue  # the deviation is that of the whole update
            rewards, kl = world.sum(torch.stack([table.rewards, table.kl])).unbind()
            groups, own = list(range(num_prompts)), table.owned
        else:
            groups = [] if wave.prompt is None else [wave.prompt]
            own = [(slot.prompt, g) for slot, _ in waiting for g in slot.generations]
            rewards, kl = table.rewards, table.kl
            for p in groups:
                mine = torch.stack([rewards[p], kl[p]])[:, [g for _, g in own]]
                rewards[p], kl[p] = world.gather_group(s.layout, p, mine)
        if groups:
            trained_on = subtract_kl(rewards[groups], kl[groups], config.objective.kl_in_reward)
            table.advantages[groups] = group_advantages(trained_on, **s.advantage)
        schedule.advantages({SampleKey(update, p, g): table.advantage(p, g) for p, g in own})

    statistics = schedule.finish()
    with watch.stage("optimizer"):
        grad_norm, stepped = step(s, update)
    return _line(s, update, selection.selected, table, statistics, grad_norm, stepped)


class Scoreboard:
    """Rewards, KL and advantages of an update, `(P, M)` float64; filled in where a rank knows them.

    `owned` lists the (prompt, generation) pairs this rank has sampled.
    """

    def __init__(self, num_prompts: int, num_generations: int, names: Sequence[str]) -> None:
        shape = (num_prompts, num_generations)
        self.rewards = torch.zeros(shape, dtype=torch.float64)
        self.kl, self.advantages = torch.zeros_like(self.rewards), torch.zeros_like(self.rewards)
        self.each = {name: torch.zeros_like(self.rewards) for name in names}
        self.owned: list[tuple[int, int]] = []
        self.excluded = 0

    def enter(self, slot: Slot, scores: Scores) -> None:
        """Write down the scores of a slot's samples."""
        at = slot.prompt, list(slot.generations)
        self.rewards[at] = scores.total
        for name, values in scores.each.items():
            self.each[name][at] = values
        self.owned += [(slot.prompt, g) for g in slot.generations]
        self.excluded += scores.excluded

    def advantage(self, prompt: int, generation: int) -> float:
        """One sample's advantage."""
        return float(self.advantages[prompt, generation])

    def join(self, world: World) -> None:
        """Fill in what other ranks know, from the rank that owns each sample; a collective."""
        if world.size == 1:
            return
        tensors = [self.rewards, self.advantages, *self.each.values()]
        mine = torch.zeros(self.rewards.shape, dtype=torch.bool)
        for p, g in self.owned:
            mine[p, g] = True
        joined = world.sum(torch.stack([torch.where(mine, t, 0.0) for t in tensors]))
        self.rewards, self.advantages, *each = joined.unbind()
        self.each = dict(zip(self.each, each, strict=True))
        self.excluded = int(world.sum(torch.tensor(self.excluded)))


def step(s: Setup, update: int) -> tuple[float, bool]:
    """Clip and step; returns the gradient's norm before clipping and whether a step was made.

    An update whose groups all had equal rewards has no gradient: the optimizer is not stepped, as
    its momentum would move the weights all the same. Raises LeanError for a non-finite gradient.
    """
    parameters = [p for p in s.policy.parameters if p.grad is not None]
    if not parameters:
        return 0.0, False
    c = s.config.optimizer
    norm = float(whole(torch.nn.utils.clip_grad_norm_(parameters, c.max_grad_norm)))
    if not np.isfinite(norm):
        raise LeanError(
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
    if s.ema is not None:
        s.ema.step(update + 1)
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


def _take(schedule: Schedule, slot: Slot, transition: Transition) -> None:
    """Hand a step on; of an idle slot it counts for nothing."""
    transition.weight = 0.0 if slot.idle else 1.0
    schedule.transition(transition)


def _take_with_kl(policy: Policy, schedule: Schedule, slot: Slot, transition: Transition) -> Tensor:
    """Attach the divergence from the reference policy, hand the step on, return the KL `(B,)`."""
    transition = policy.with_kl(transition)
    assert transition.kl is not None
    kl = transition.kl.detach().to("cpu", torch.float64)
    _take(schedule, slot, transition)
    return kl


def _line(
    s: Setup,
    update: int,
    selected: tuple[int, ...],
    table: Scoreboard,
    statistics: Statistics,
    grad_norm: float,
    stepped: bool,
) -> dict[str, Any]:
    """A line of `metrics.jsonl`; all but `time` and `memory` is reproducible bitwise."""
    world = s.world
    table.join(world)
    sums = world.sum(torch.tensor([statistics.loss, statistics.kl or 0.0], dtype=torch.float64))
    most = world.max(
        torch.tensor([statistics.ratio_error, statistics.ledger_bytes], dtype=torch.float64)
    )
    loss, kl = sums.tolist()
    ratio_error, ledger_bytes = most.tolist()
    if s.config.parallel.check and world.size > 1:
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
        "advantage_std": float(spread.std(correction=0)),
        "advantage_abs_max": float(spread.abs().max()),
        "loss": loss,
        "grad_norm": grad_norm,
        "lr": learning_rate(s.config, update),
        "images": rewards.numel(),
        "selected_steps": list(selected),
        "zero_variance_groups": int((spread == 0).all(dim=1).sum()),
        "excluded": table.excluded,
        "optimizer_stepped": stepped,
        "kl": None if statistics.kl is None else kl,
        "ratio_error": ratio_error,
        "policy_version": update + 1,
        "time": {**times, "total": total, "images_per_s": rewards.numel() / total},
        "memory": {
            "peak_bytes": torch.cuda.max_memory_allocated(s.device) if cuda else None,
            "ledger_bytes": int(ledger_bytes),
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
    return bool(s.world.share(all(line["update"] != update for line in lines)))


def _evaluate(s: Setup, update: int) -> None:
    started = time.perf_counter()
    c = s.config.evaluation
    with s.ema.in_place() if s.ema is not None else nullcontext():
        result = evaluate(
            s.policy, s.judge, s.heldout, batch=c.batch, num_images=c.grid, world=s.world
        )
    if result is None or isinstance(s.record, Onlooker):
        return
    line = result.line(update, time.perf_counter() - started)
    scores = result.reward[: c.grid].tolist()
    s.record.evaluation(line, result.images, list(result.prompts[: c.grid]), scores)


@contextmanager
def _interrupt(world: World) -> Iterator[threading.Event]:
    """Make the first Ctrl-C (or SIGTERM) a request to finish the update; a second Ctrl-C stops.

    With several ranks the launcher passes a Ctrl-C on as SIGTERM, so that one is never a second.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def handle(number: int, _: Any) -> None:
        if asked.is_set():
            if number == signal.SIGINT or world.size == 1:
                raise KeyboardInterrupt
            return
        asked.set()
        if world.is_main:
            text = "\nFinishing this update, then saving. Once more to stop at once."
            print(text, flush=True)

    before = {n: signal.signal(n, handle) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
