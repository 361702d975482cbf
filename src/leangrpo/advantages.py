"""From rewards to advantages, and from an advantage to the weight of a log-probability's gradient.

Pure functions on small tensors: P prompts of M generations, or B samples of one step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import problem


def group_advantages(
    rewards: Tensor,
    *,
    baseline: str = "prompt",
    std: str = "prompt",
    ddof: int = 0,
    epsilon: float = 1e-4,
    clip: float | None = 5.0,
) -> Tensor:
    """A = (r - mean) / (std + epsilon), clipped to ±clip; `(P, M)` to `(P, M)` float64.

    The mean is the prompt's, or of all rewards (`baseline` "global": TRL's DDPO without a tracker),
    or 0 ("value": the baseline of each step is subtracted later, see `Transition.baseline`). `std`
    says whose deviation divides: that of the prompt's own group, that of all rewards ("global"), or
    none. Non-finite rewards are left out of all statistics and get exactly 0, and so does a group
    whose rewards are all those of its mean, whatever rounding or epsilon.
    Source: FlowGRPO, PerPromptStatTracker (ddof 0, epsilon 1e-4, clip 5; `global_std` is
    "global"); DanceGRPO has ddof 1 and epsilon 1e-8.

    Raises LeanError for options outside their range or rewards of another shape.

    >>> group_advantages(torch.tensor([[1.0, torch.nan, 3.0]]), epsilon=0.0)
    tensor([[-1.,  0.,  1.]], dtype=torch.float64)
    """
    _check(rewards, baseline, std, ddof, epsilon, clip)
    r = rewards.detach().double()
    finite = torch.isfinite(r)
    r = torch.where(finite, r, 0.0)
    own, num = _deviations(r, finite, dim=1)
    every, total = _deviations(r, finite, dim=None)
    deviation = {"prompt": own, "global": every, "value": r}[baseline]

    scale = torch.ones((), dtype=torch.float64)
    if std == "global" or (std == "prompt" and baseline == "global"):
        scale = _deviation(every.square().sum(), total, ddof) + epsilon
    elif std == "prompt":
        scale = _deviation(own.square().sum(1, keepdim=True), num, ddof) + epsilon
    advantages = torch.where(deviation == 0, 0.0, deviation / scale)
    return advantages if clip is None else advantages.clamp(-clip, clip)


def _deviations(r: Tensor, finite: Tensor, dim: int | None) -> tuple[Tensor, Tensor]:
    """From the mean of the finite ones, exactly 0 where these are all equal; and their number."""
    dims = (0, 1) if dim is None else (dim,)
    num = finite.sum(dims, keepdim=True)
    away = torch.where(finite, r - r.sum(dims, keepdim=True) / num.clamp(min=1), 0.0)
    top = torch.where(finite, r, -math.inf).amax(dims, keepdim=True)
    bottom = torch.where(finite, r, math.inf).amin(dims, keepdim=True)
    return torch.where(top > bottom, away, 0.0), num


class History:
    """A prompt's last rewards, over all updates: DDPO's running statistics.

    `update` takes the rewards of an update and gives (r - mean) / (std + epsilon), the mean and the
    deviation being those of the prompt's last `size` rewards, these included; a prompt with fewer
    than `min_count` of them takes those of the update instead. A text that is drawn twice is one
    prompt. Source: DDPO, `ddpo_pytorch/stat_tracking.py` (size 16, min_count 16, ddof 0, epsilon
    1e-6; 32 for its aesthetic and alignment rewards).
    """

    def __init__(self, size: int = 16, min_count: int = 16) -> None:
        self.size, self.min_count = size, min_count
        self.rewards: dict[str, list[float]] = {}

    def update(
        self,
        prompts: Sequence[str],
        rewards: Tensor,
        *,
        ddof: int = 0,
        epsilon: float = 1e-6,
        clip: float | None = 5.0,
    ) -> Tensor:
        """Advantages `(P, M)` float64 of `rewards` `(P, M)`, after taking them in.

        Non-finite rewards are not taken in and get exactly 0.
        """
        whole = group_advantages(rewards, baseline="global", ddof=ddof, epsilon=epsilon, clip=clip)
        r = rewards.detach().double()
        for prompt, row in zip(prompts, r.tolist(), strict=True):
            kept = self.rewards.setdefault(prompt, [])
            kept += [value for value in row if math.isfinite(value)]
            del kept[: -self.size]
        for p, prompt in enumerate(prompts):
            past = torch.tensor([self.rewards[prompt]], dtype=torch.float64)
            if past.numel() < self.min_count:
                continue
            away, num = _deviations(past, torch.ones_like(past, dtype=torch.bool), dim=1)
            centre = past.mean() if away.any() else past[0, 0]
            scale = _deviation(away.square().sum(), num, ddof).squeeze() + epsilon
            deviation = r[p] - centre
            whole[p] = torch.where(deviation == 0, 0.0, deviation / scale)
        whole = torch.where(torch.isfinite(r), whole, 0.0)
        return whole if clip is None else whole.clamp(-clip, clip)

    def state_dict(self) -> dict[str, list[float]]:
        """What a checkpoint keeps."""
        return {prompt: list(kept) for prompt, kept in self.rewards.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Go on from a checkpoint."""
        self.rewards = {prompt: list(kept) for prompt, kept in state.items()}


def weigh_each(rewards: Sequence[Tensor], weights: Sequence[float], **options: Any) -> Tensor:
    """Each reward `(P, M)` normalised on its own, then their weighted sum; weights add up to 1.

    `options` are those of `group_advantages`; the clip binds on the sum. A sample without one of
    its rewards has none. Source: MixGRPO, train_grpo_flux, `advantage_aggr`.
    """
    clip = options.pop("clip", 5.0)
    total = torch.zeros_like(rewards[0], dtype=torch.float64)
    for reward, weight in zip(without_missing(rewards), weights, strict=True):
        total += weight / sum(weights) * group_advantages(reward, clip=None, **options)
    return total if clip is None else total.clamp(-clip, clip)


def gdpo(rewards: Sequence[Tensor], weights: Sequence[float], **options: Any) -> Tensor:
    """Each reward `(P, M)` normalised on its own, their weighted sum, and that over the update.

    `options` are those of `group_advantages`, the first time; the second time mean and deviation
    are those of all sums, with the same `ddof`, `epsilon` and `clip`. A sample without one of its
    rewards has none; a group that is flat in all of them gets exactly 0. Source: Flow-Factory,
    `advantage_processor.py`, `gdpo` (there the deviation is at least 1e-6, nothing is added).
    """
    clip = options.pop("clip", 5.0)
    rewards = without_missing(rewards)
    total = torch.zeros_like(rewards[0], dtype=torch.float64)
    for reward, weight in zip(rewards, weights, strict=True):
        total += weight * group_advantages(reward, clip=None, **options)
    total = torch.where(torch.isfinite(rewards[0]), total, math.nan)
    again = {name: options[name] for name in ("ddof", "epsilon") if name in options}
    whole = group_advantages(total, baseline="global", clip=clip, **again)
    return torch.where((total.nan_to_num() == 0).all(1, keepdim=True), 0.0, whole)


def without_missing(rewards: Sequence[Tensor]) -> list[Tensor]:
    """The rewards with NaN in all of them where one is not finite."""
    missing = ~torch.isfinite(torch.stack(list(rewards))).all(0)
    return [torch.where(missing, math.nan, reward) for reward in rewards]


def best_of(advantages: Tensor, num: int) -> Tensor:
    """Keep the advantages of each group's lowest num // 2 and of its highest, an odd one on top.

    `(P, M)`; the others become 0. Source: DanceGRPO, train_grpo_hunyuan, `bestofn`; theirs ranks
    all samples of a rank's call, over its prompts, ours each group. They are not normalised again.
    """
    order = advantages.argsort(dim=1, stable=True)
    low = num // 2
    kept = torch.cat([order[:, :low], order[:, advantages.shape[1] - (num - low) :]], dim=1)
    return torch.zeros_like(advantages).scatter(1, kept, advantages.gather(1, kept))


def _deviation(squares: Tensor, num: Tensor, ddof: int) -> Tensor:
    return torch.sqrt(squares / (num - ddof).clamp(min=1))


def _check(
    rewards: Tensor, baseline: str, std: str, ddof: int, epsilon: float, clip: float | None
) -> None:
    if rewards.ndim != 2 or rewards.shape[1] < 1:
        rule = "the shape must be (prompts, generations)"
        raise problem("rewards", tuple(rewards.shape), rule)
    if baseline not in ("prompt", "global", "value"):
        raise problem("advantage.baseline", baseline, "must be prompt, global or value")
    if std not in ("prompt", "global", "none"):
        raise problem("advantage.std", std, "must be prompt, global or none")
    if ddof not in (0, 1):
        raise problem("advantage.ddof", ddof, "must be 0 (population) or 1 (sample)")
    if not 0 <= epsilon < math.inf:
        raise problem("advantage.epsilon", epsilon, "must be a number of 0 or more")
    if clip is not None and not clip > 0:
        raise problem("advantage.clip", clip, "must be above 0", "Use null for no bound.")


def clipped_surrogate(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip_range: float, form: str = "clip"
) -> Tensor:
    """max(-A·ρ, -A·clip(ρ, 1-ε, 1+ε)) with ρ = exp(l - l_old); all `(B,)` (paper eq. 2).

    `form` "clamp" is -A·clip(ρ, 1-ε, 1+ε) alone (DPOK, train_online_pg).
    """
    ratio = torch.exp(log_prob - old_log_prob)
    clipped = -advantage * ratio.clamp(1 - clip_range, 1 + clip_range)
    return clipped if form == "clamp" else torch.maximum(-advantage * ratio, clipped)


def surrogate_coefficient(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip_range: float, form: str = "clip"
) -> Tensor:
    """d `clipped_surrogate` / d l: -A·ρ, and 0 where the clip binds; all `(B,)`, no graph.

    It binds where ρ has already gone past its bound in the direction A asks for, and with `form`
    "clamp" past either. On-policy, ρ = 1 and the coefficient is exactly -A (paper eq. 5).
    """
    ratio = torch.exp(log_prob.detach() - old_log_prob.detach())
    high, low = ratio > 1 + clip_range, ratio < 1 - clip_range
    binds = high | low if form == "clamp" else ((advantage > 0) & high) | ((advantage < 0) & low)
    return torch.where(binds, 0.0, -advantage * ratio)


def subtract_kl(rewards: Tensor, kl: Tensor, beta: float) -> Tensor:
    """r - β·KL, where KL `(P, M)` is a trajectory's sum over its selected steps.

    FlowGRPO's `kl_reward` (train_wan2_1) subtracts each step's own KL and so gives every step
    another advantage; the recompute-free schedules know one advantage a trajectory, hence the sum,
    which is the KL between the two policies' selected transitions. β = 0 returns the rewards.
    """
    return rewards - beta * kl.detach().to(rewards) if beta else rewards
