"""What a pipeline's steps are, found out by running some of them, before anything is trained."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .components import main_dtype
from .data import SampleKey, Transition
from .errors import LeanError, problem
from .kernels import stds
from .noise import INITIAL, normal
from .pipeline import Sampling
from .tape import Tape

if TYPE_CHECKING:
    from .policy import Policy


@dataclass(frozen=True, slots=True)
class Plan:
    """What a first, empty run of the pipeline told: `shape` of one sample's latent (without B),
    the scheduler's `table` `(T+1,)` (sigmas, or cumulated alphas), the `timesteps` `(T,)` the
    network sees and the `std` `(T,)` of every transition, 0 where none is trained.

    The pipeline starts at step `begin`; `voices` latents step together. `direct` pipelines take
    the latents to start from as an argument, others draw them with a generator. `served` says
    which denoisers each step calls, where some are frozen (else it is empty).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    table: Tensor
    timesteps: Tensor
    std: Tensor
    begin: int = 0
    voices: int = 1
    direct: bool = True
    served: tuple[tuple[str, ...], ...] = ()


def make_plan(policy: Policy, sampling: Sampling) -> Plan:
    """Run the first step of a way of sampling, or all of them where some denoisers are frozen.

    Steps that no trained denoiser serves get a std of 0: they stay deterministic and cannot be
    selected, since a gradient of theirs would be zero and their noise would only add variance.
    Raises LeanError when the pipeline cannot be called so, or has steps without a density.
    """
    tape = Tape(planning=True)
    policy.call(sampling, tape, output_type="latent")
    if tape.shape is None:
        raise LeanError(
            f"{type(policy.pipe).__name__} never called scheduler.step(): its loop does not "
            "go through the scheduler, so there is no transition to sample."
        )
    scheduler = policy.pipe.scheduler
    table, timesteps, shape = scheduler.table, scheduler.full_timesteps.cpu(), tape.shape[1:]
    _check_table(table, policy.kernel.family == "flow", sampling.steps)
    std = stds(policy.kernel, table)
    std[: tape.begin] = 0
    served = tuple(tuple(tape.calls.get(i, ())) for i in range(len(std)))
    if not policy.all_trained():
        for i, names in enumerate(served):
            if not policy.trained().keys() & set(names):
                std[i] = 0
    plan = Plan(
        shape=shape,
        dtype=torch.promote_types(main_dtype(policy.denoisers[0]), torch.float32),
        table=table,
        timesteps=timesteps,
        std=std,
        begin=tape.begin,
        voices=tape.voices,
        direct=tape.voices == 1 and tape.begin == 0 and _starts_from(policy, sampling, shape),
        served=() if policy.all_trained() else served,
    )
    _check_flash(policy, sampling, plan)
    return plan


def _check_flash(policy: Policy, sampling: Sampling, plan: Plan) -> None:
    """Refuse now what a pipeline's sampler cannot save steps of."""
    if sampling.flash is None:
        return
    if plan.begin or plan.voices > 1:
        what = "starts in the middle" if plan.begin else "steps several latents together"
        rule = f"{type(policy.pipe).__name__} {what}"
        raise problem("sampling.flash.ratio", sampling.flash.ratio, rule, "Set it to null.")
    tape = Tape(stop=1, flash=sampling.flash, window=(0, 1))
    policy.call(sampling, tape, latents=policy.initial_noise(tape, plan), output_type="latent")


def _check_table(table: Tensor, flow: bool, steps: int) -> None:
    if flow and float(table.max()) > 1 + 1e-6:
        raise LeanError(
            f"The scheduler's sigmas go up to {float(table.max()):.6g}: the latents are data plus "
            "sigma times noise, as EDM has them, which is no flow matching."
        )
    repeats = flow and bool((table[1:] == table[:-1]).any())
    if repeats or not torch.isfinite(table).all():
        raise LeanError(
            f"The scheduler's table for sampling.steps={steps} repeats a value or is not finite "
            f"({[round(v, 4) for v in table.tolist()]}): such a step has no density. "
            "Choose other sampling.steps or sampling.sigmas."
        )


def _starts_from(policy: Policy, sampling: Sampling, shape: tuple[int, ...]) -> bool:
    """Whether the pipeline's loop starts from the latents it is given, as they are.

    Not asked of those that take a `strength`: they start from a picture with noise on it.
    """
    takes = inspect.signature(type(policy.pipe).__call__).parameters
    if "latents" not in takes or "strength" in takes:
        return False
    like = torch.empty(0, dtype=torch.float32, device=policy.device)
    given = normal(policy.seed, [SampleKey(0, 0, 0)], INITIAL, shape, like=like)
    tape = Tape(planning=True, given=given)
    try:
        policy.call(sampling, tape, latents=given, output_type="latent")
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, RuntimeError, IndexError):
        return False  # it wants them in another shape
    return tape.taken_as_given


def check_memory(policy: Policy) -> None:
    """Raise LeanError when a step depends on more than its latents, by replaying two of them.

    A transition is a function of its latents. A pipeline that carries something else from one
    step to the next (the momentum of a guidance, say) would hand a graph on as well. Looked at are
    the second step and the last one, for what begins late: one whole trajectory.
    """
    plan = policy.plan()
    later = [i for i in range(plan.begin + 1, len(plan.std)) if plan.std[i] > 0]
    if not later:
        return
    steps = frozenset((later[0], later[-1]))
    taken: list[Transition] = []
    tape = Tape(
        keys=(SampleKey(0, 0, 0),),
        prompts=("a",),  # not the empty one, against which guidance would do nothing
        seed=policy.seed,
        selected=steps,
        noisy=steps,
        stop=later[-1] + 1,
        sink=taken.append,
        begin=plan.begin,
        voices=plan.voices,
    )
    policy.call(
        policy.sampling, tape, latents=policy.initial_noise(tape, plan), output_type="latent"
    )
    for transition in taken:
        again = policy.replay(transition, grad=False)
        assert transition.mean is not None and again.mean is not None
        error = float((again.mean - transition.mean).abs().max())
        if not error <= 1e-3 * float(transition.mean.abs().max()):
            raise LeanError(
                f"{type(policy.pipe).__name__} carries more than the latents from one step to the "
                "next (such as the momentum of its guidance), so that a step has no probability of "
                "its own. Switch that off in sampling.call, or use another sampling.guidance."
            )
