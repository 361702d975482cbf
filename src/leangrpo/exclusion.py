"""When a trajectory is not finite: the same update again, without it and for all ranks alike.

A NaN cannot be weighed away afterwards: 0 · NaN is NaN, in a batch's backward it spreads to every
weight, and in a sum that ranks share to every rank. But an update that has made no optimizer step
has changed nothing, and noise belongs to samples: it is sampled again, to the same pictures, and
what was not finite is never sampled at all. The gradient is then, exactly, that of a group without
it: advantages over the rewards that remain, and N (paper eq. 5) still all trajectories asked for.

What a trajectory shows while it is sampled (latents, pictures, log-probabilities, KL) is looked at
as it comes, and costs nothing. A backward that overflows shows in the norm of the update's
gradient, which is computed anyway; only then are trajectories differentiated one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

import torch

from .data import SampleKey, Transition
from .errors import LeanError, NonFiniteError
from .rollout import draw
from .setup import Setup

T = TypeVar("T")


def until_finite(run: Callable[[Setup, int], T], s: Setup, update: int) -> T:
    """Run an update (0-based); where trajectories are not finite, again without them.

    Raises LeanError where none is left, where no single trajectory is the cause, and where the
    optimizer has made a step of this update already. Called on all ranks, which all do the same.
    """
    s.left_out = frozenset()
    version, history = s.policy.version, s.credit.history.state_dict()
    while True:
        try:
            return run(s, update)
        except NonFiniteError as error:
            if s.policy.version != version:
                raise
            keys, cause = error.keys, error
        _undo(s, history)
        bad = {k for k in keys if isinstance(k, SampleKey)} or _culprits(s, update)
        if not bad:
            raise cause
        s.left_out |= bad
        _say(s, update, bad, sampled=bool(keys))


def _undo(s: Setup, history: dict[str, list[float]]) -> None:
    """Forget what the update has left: gradients, and what advantages remember of it."""
    s.gradients.take()
    s.optimizer.zero_grad(set_to_none=True)
    s.credit.history.load_state_dict(history)
    if s.critic is not None:
        s.critic.forget()
    s.whole = True


def _say(s: Setup, update: int, bad: Collection[SampleKey], *, sampled: bool) -> None:
    num = s.config.rollout.prompts * s.config.rollout.generations
    drawn = draw(s.examples, s.config.seed, update, s.config.rollout.prompts)
    shown = [f"generation {k.generation} of {drawn[k.prompt].prompt!r}" for k in sorted(bad)[:3]]
    what = "latents, pictures or log-probabilities" if sampled else "gradients"
    text = f"the {what} of {', '.join(shown)}{' and more' if len(bad) > 3 else ''} are not finite"
    if len(s.left_out) >= num:
        raise LeanError(
            f"Update {update + 1} has no finite trajectory left: {text}. The model has diverged, "
            "or its numbers are too large for model.dtype. Nothing saved is lost. Start a new run "
            "with a lower optimizer.lr, or with model.dtype=float32."
        )
    s.record.note(
        f"update {update + 1}: {text}; it is repeated without them "
        f"({len(s.left_out)} of {num} trajectories left out)"
    )


def _culprits(s: Setup, update: int) -> set[SampleKey]:
    """The trajectories whose own gradient is not finite; a collective of all ranks.

    Each is sampled alone and its steps are run again. Those of a rank that has fewer are repeated,
    as every forward and backward is a collective where weights are sharded.
    """
    found: set[SampleKey] = set()
    gradients = s.gradients
    sync, gradients.sync = gradients.sync, "update"
    try:
        gradients.begin()
        for key, steps in _alone(s, update):
            for t in steps:
                new = s.policy.replay(t)
                new.weight = t.weight
                if not _differentiable(s, new):
                    found.add(key)
        s.optimizer.zero_grad(set_to_none=True)
        gradients.finish()
    finally:
        gradients.sync = sync
        s.optimizer.zero_grad(set_to_none=True)
    return {key for one in s.world.share_all(found) for key in one} - s.left_out


def _alone(s: Setup, update: int) -> Iterator[tuple[SampleKey, list[Transition]]]:
    """This rank's trajectories of the first part, each sampled by itself without gradients."""
    drawn = draw(s.examples, s.config.seed, update, s.config.rollout.prompts)
    for wave in s.layout.of(s.world.rank):
        for slot in wave.slots:
            for i in range(s.layout.micro_batch):
                g = slot.generations[min(i, len(slot.generations) - 1)]
                key, example = SampleKey(update, slot.prompt, g), drawn[slot.prompt]
                selection = s.select(update, slot.prompt, slot.generations[0])
                rollout = s.policy.sample(
                    [example.prompt],
                    [key],
                    selected=selection.selected,
                    noisy=selection.stochastic,
                    decode=False,
                    same_noise=s.config.rollout.initial_noise == "group",
                    inputs=example.open_images(),
                )
                steps = [s.policy.with_kl(t) if s.needs_kl else t for t in rollout.transitions]
                for t in steps:
                    t.weight = s.weights[t.step]
                yield key, steps


def _differentiable(s: Setup, t: Transition) -> bool:
    """Whether a step's gradient is finite, seeded as large as the run's schedule seeds it."""
    c = s.config
    scale = 1.0 / (c.rollout.prompts // c.rollout.parts * c.rollout.generations)
    share = 1.0 if s.schedule.name in ("reweight", "streaming") else scale
    values, seeds = [t.log_prob], [torch.full_like(t.log_prob, t.weight * share)]
    if c.objective.kl and t.kl is not None:
        values.append(t.kl)
        seeds.append(torch.full_like(t.kl, c.objective.kl * scale))
    s.gradients.before(idle=False)
    torch.autograd.backward(values, seeds)
    s.gradients.after()
    own = [g for g in s.gradients.take() if g is not None]
    most = torch.stack(torch._foreach_norm(own, ord=float("inf"))) if own else torch.zeros(1)
    return bool(most.isfinite().all())
