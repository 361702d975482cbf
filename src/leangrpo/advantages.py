"""From rewards to advantages, and from an advantage to the weight of a log-probability's gradient.

Pure functions on small tensors: P prompts of M generations, or B samples of one step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .errors import problem


def group_advantages(
    rewards: Tensor,
    *,
    std: str = "prompt",
    ddof: int = 0,
    epsilon: float = 1e-4,
    clip: float | None = 5.0,
) -> Tensor:
    """A = (r - mean) / (std + epsilon), clipped to ±clip; `(P, M)` to `(P, M)` float64.

    The mean is the prompt's. `std` says whose deviation divides: that of the prompt's own group,
    that of all rewards ("global"), or none. Non-finite rewards are left out of all statistics and
    get exactly 0, and so does a group whose rewards are all equal, whatever rounding or epsilon.
    Source: FlowGRPO, PerPromptStatTracker (ddof 0, epsilon 1e-4, clip 5; `global_std` is
    "global"); DanceGRPO has ddof 1 and epsilon 1e-8.

    Raises LeanError for options outside their range or rewards of another shape.

    >>> group_advantages(torch.tensor([[1.0, torch.nan, 3.0]]), epsilon=0.0)
    tensor([[-1.,  0.,  1.]], dtype=torch.float64)
    """
    _check(rewards, std, ddof, epsilon, clip)
    r = rewards.detach().double()
    finite = torch.isfinite(r)
    r = torch.where(finite, r, 0.0)
    num = finite.sum(1, keepdim=True)
    deviation = torch.where(finite, r - r.sum(1, keepdim=True) / num.clamp(min=1), 0.0)
    top = torch.where(finite, r, -math.inf).amax(1, keepdim=True)
    bottom = torch.where(finite, r, math.inf).amin(1, keepdim=True)
    deviation = torch.where(top > bottom, deviation, 0.0)

    if std == "prompt":
        scale = _deviation(deviation.square().sum(1, keepdim=True), num, ddof) + epsilon
    elif std == "global":
        total = finite.sum()
        spread = torch.where(finite, r - r.sum() / total.clamp(min=1), 0.0)
        scale = _deviation(spread.square().sum(), total, ddof) + epsilon
    else:
        scale = torch.ones((), dtype=torch.float64)
    advantages = torch.where(deviation == 0, 0.0, deviation / scale)
    return advantages if clip is None else advantages.clamp(-clip, clip)


def _deviation(squares: Tensor, num: Tensor, ddof: int) -> Tensor:
    return torch.sqrt(squares / (num - ddof).clamp(min=1))


def _check(rewards: Tensor, std: str, ddof: int, epsilon: float, clip: float | None) -> None:
    if rewards.ndim != 2 or rewards.shape[1] < 1:
        rule = "the shape must be (prompts, generations)"
        raise problem("rewards", tuple(rewards.shape), rule)
    if std not in ("prompt", "global", "none"):
        raise problem("advantage.std", std, "must be prompt, global or none")
    if ddof not in (0, 1):
        raise problem("advantage.ddof", ddof, "must be 0 (population) or 1 (sample)")
    if not 0 <= epsilon < math.inf:
        raise problem("advantage.epsilon", epsilon, "must be a number of 0 or more")
    if clip is not None and not clip > 0:
        raise problem("advantage.clip", clip, "must be above 0", "Use null for no bound.")


def clipped_surrogate(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip_range: float
) -> Tensor:
    """max(-A·ρ, -A·clip(ρ, 1-ε, 1+ε)) with ρ = exp(l - l_old); all `(B,)` (paper eq. 2)."""
    ratio = torch.exp(log_prob - old_log_prob)
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    return torch.maximum(-advantage * ratio, -advantage * clipped)


def surrogate_coefficient(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip_range: float
) -> Tensor:
    """d `clipped_surrogate` / d l: -A·ρ, and 0 where the clip binds; all `(B,)`, no graph.

    It binds where ρ has already gone past its bound in the direction A asks for. On-policy, ρ = 1
    and the coefficient is exactly -A (paper eq. 5).
    """
    ratio = torch.exp(log_prob.detach() - old_log_prob.detach())
    binds = ((advantage > 0) & (ratio > 1 + clip_range)) | (
        (advantage < 0) & (ratio < 1 - clip_range)
    )
    return torch.where(binds, 0.0, -advantage * ratio)


def subtract_kl(rewards: Tensor, kl: Tensor, beta: float) -> Tensor:
    """r - β·KL, where KL `(P, M)` is a trajectory's sum over its selected steps.

    FlowGRPO's `kl_reward` (train_wan2_1) subtracts each step's own KL and so gives every step
    another advantage; the recompute-free schedules know one advantage a trajectory, hence the sum,
    which is the KL between the two policies' selected transitions. β = 0 returns the rewards.
    """
    return rewards - beta * kl.detach().to(rewards) if beta else rewards
