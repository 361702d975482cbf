"""Fewer deterministic steps: a coarser grid outside the noisy window, and a solver that affords it.

Inside its window of noisy steps a sampler is what it was: the same levels, means, noise. Outside,
the remaining way is cut into fewer steps, each a step of DPM-Solver++, which makes up for their
length with the predictions of the steps before.

Source: MixGRPO-Flash (arXiv 2507.21802), `Tencent-Hunyuan/MixGRPO`, `run_sample_step` and
`dpm_step` in fastvideo/utils/sampling_utils.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler
from torch import Tensor

from .errors import LeanError, problem

# A scheduler rounds the levels it is given to float32, and its shift rounds again.
ROUNDING = 1e-5


@dataclass(frozen=True, slots=True)
class Flash:
    """The `sampling.flash` settings: `ratio` of the steps that stay, `order` and `kind` of the
    solver, `where` steps are saved (after the window, or around it)."""

    ratio: float
    order: int = 2
    kind: str = "midpoint"
    where: str = "after"

    def __post_init__(self) -> None:
        """Raises LeanError for a value outside its range."""
        if not 0 < self.ratio <= 1:
            raise problem("sampling.flash.ratio", self.ratio, "must be in (0, 1]")
        for name, allowed in (
            ("order", (1, 2, 3)),
            ("kind", ("midpoint", "heun")),
            ("where", ("after", "around")),
        ):
            if (value := getattr(self, name)) not in allowed:
                words = ", ".join(map(str, allowed))
                raise problem(f"sampling.flash.{name}", value, f"must be one of {words}")


class Compressed(NamedTuple):
    """A shorter sampler: its unshifted `sigmas`, falling, without the 0 at the end.

    Step i of the window is its step i - `offset`. `origin` has, for each level, the index of the
    level it was, or None where it is new.
    """

    sigmas: list[float]
    offset: int
    origin: list[int | None]


def compress(sigmas: Sequence[float], start: int, stop: int, flash: Flash) -> Compressed:
    """Cut the way outside the window [start, stop) into fewer steps, equal before the shift.

    `sigmas` are the T unshifted levels. After the window they become the points of
    linspace(sigmas[stop], 0, n), n = int((T - stop + 1)·ratio), as in MixGRPO; it has one point at
    least, which ends above 0, here there are two. With `around` the way before the window becomes
    max(1, int(start·ratio)) steps, a rule of this package's own. Where no step is saved the levels
    stay. Raises LeanError for a window that is not inside the sampler.
    """
    total = len(sigmas)
    if not 0 <= start < stop <= total:
        raise problem("window", (start, stop), f"the sampler has the steps 0 to {total - 1}")
    before, after = _outside(total, start, stop, flash)
    levels, origin = list(sigmas), list[int | None](range(total))
    if after < total - stop:
        levels[stop:] = np.linspace(sigmas[stop], 0.0, after + 1)[:-1].tolist()
        origin[stop:] = [stop, *[None] * (after - 1)]
    if before < start:
        levels[:start] = np.linspace(sigmas[0], sigmas[start], before + 1)[:-1].tolist()
        origin[:start] = [0, *[None] * (before - 1)]
    return Compressed(levels, start - before, origin)


def num_steps(total: int, start: int, stop: int, flash: Flash | None) -> int:
    """Denoiser evaluations of a trajectory of `total` steps with the window [start, stop).

    >>> num_steps(25, 0, 4, Flash(0.4)), num_steps(25, 17, 21, Flash(0.4))
    (11, 22)
    """
    if flash is None:
        return total
    before, after = _outside(total, start, stop, flash)
    return before + stop - start + after


def window(noisy: Collection[int], flash: Flash | None) -> tuple[int, int] | None:
    """The [start, stop) of the noisy steps; None where there is nothing to compress.

    Raises LeanError when they are not contiguous.
    """
    if flash is None or not noisy:
        return None
    start, stop = min(noisy), max(noisy) + 1
    if stop - start != len(set(noisy)):
        rule = "sampling.flash saves steps outside one window, and these are several"
        raise problem("noisy", sorted(noisy), rule, "Make them contiguous.")
    return start, stop


def _outside(total: int, start: int, stop: int, flash: Flash) -> tuple[int, int]:
    """The numbers of steps before and after the window."""

    def share(num: int) -> int:
        # A product such as 100 x 0.29 is 28.999... in binary, and 29 is meant.
        return int(num * flash.ratio + 1e-9)

    before = max(1, share(start)) if start and flash.where == "around" else start
    after = max(2, share(total - stop + 1)) - 1 if stop < total else 0
    return before, after


def shorten(
    scheduler: Any,
    set_timesteps: Callable[..., None],
    given: Mapping[str, Any],
    window: tuple[int, int],
    flash: Flash,
) -> int:
    """Give a scheduler with its full table the compressed one; returns the window's offset.

    `set_timesteps` is the scheduler's own, `given` the arguments it has just been called with: the
    new levels go through the same shift, and the levels that stay are taken over bitwise. Raises
    LeanError where a level's place in the table depends on more than its value.
    """
    name = type(scheduler).__name__.removeprefix("Stochastic")
    timesteps, sigmas = scheduler.timesteps, scheduler.sigmas
    if "sigmas" not in inspect.signature(set_timesteps).parameters:
        raise _refusal(flash, f"a {name} takes no levels of others")
    base = _levels(scheduler, given, flash)
    short = compress(base, *window, flash)
    keep = {key: value for key, value in given.items() if key in ("device", "mu")}
    # Once more the last level, and then without it: shift_terminal stretches all by where it ends.
    set_timesteps(sigmas=np.array([*short.sigmas, base[-1]]), **keep)
    new_timesteps = scheduler.timesteps[:-1].to(timesteps.dtype, copy=True)
    new_sigmas = torch.cat([scheduler.sigmas[:-2].to(sigmas.dtype), sigmas[-1:]])
    kept = {new: old for new, old in enumerate(short.origin) if old is not None}
    to, at = list(kept), list(kept.values())
    if not torch.allclose(new_sigmas[to], sigmas[at], rtol=0, atol=ROUNDING):
        raise _refusal(flash, f"this {name} moves a level by more than its value")
    new_timesteps[to], new_sigmas[to] = timesteps[at], sigmas[at]
    falling = all(a > b for a, b in pairwise(new_sigmas.tolist()))
    rising = all(a < b for a, b in pairwise(new_sigmas.tolist()))  # Mochi's
    if not (falling or rising):
        values = [round(v, 4) for v in new_sigmas.tolist()]
        raise _refusal(flash, f"the compressed table is not monotonic: {values}")
    scheduler.timesteps, scheduler.sigmas = new_timesteps, new_sigmas
    scheduler.num_inference_steps = len(new_timesteps)
    return short.offset


def _levels(scheduler: Any, given: Mapping[str, Any], flash: Flash) -> Sequence[float]:
    """The levels `set_timesteps` starts from, before any shift; `shorten` checks them."""
    if given.get("timesteps") is not None:
        raise _refusal(flash, "the pipeline passes timesteps of its own")
    if given.get("sigmas") is not None:
        return [float(level) for level in given["sigmas"]]
    num, scale = given["num_inference_steps"], scheduler.config.num_train_timesteps
    if isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        first, last = scheduler.sigma_max * scale, scheduler.sigma_min * scale
        return (np.linspace(first, last, num) / scale).tolist()  # type: ignore[no-any-return]
    return np.linspace(1, 1 / scale, num + 1)[:-1].tolist()  # type: ignore[no-any-return]


def _refusal(flash: Flash, reason: str) -> LeanError:
    return problem("sampling.flash.ratio", flash.ratio, reason, "Set it to null.")


class Solver:
    """DPM-Solver++ on a flow's x̂₀ = x - σv, over a table that may hold steps of other kinds.

    `table` `(n+1,)` are the compressed sigmas, 0 at the end. Steps go by the index they have in the
    window's numbering, `offset` above their own. `history` are the x̂₀ `(B, ...)` of the last steps,
    at most `order`, the newest at the end; it is carried on in place.
    """

    def __init__(
        self,
        table: Tensor,
        window: tuple[int, int],
        offset: int,
        flash: Flash,
        history: list[Tensor],
    ) -> None:
        self.table, self.window, self.offset = table, window, offset
        self.flash, self.history = flash, history
        self.engine = DPMSolverMultistepScheduler(
            algorithm_type="dpmsolver++",
            prediction_type="flow_prediction",
            solver_order=flash.order,
            solver_type=flash.kind,
            use_flow_sigmas=True,
        )
        self.engine.sigmas = table.double()  # 0-d coefficients leave the latents' dtype alone

    def covers(self, i: int) -> bool:
        """Whether step i is the solver's: it lies outside the window, where steps are saved."""
        start, stop = self.window
        return i >= stop or (i < start and self.flash.where == "around")

    def note(self, x: Tensor, velocity: Tensor, i: int) -> None:
        """Remember what step i predicted, whoever takes it; x and v are `(B, ...)`."""
        sigma = self.table[i - self.offset].to(x.dtype)
        self.history.append((x - sigma * velocity).detach())
        del self.history[: -self.flash.order]

    def step(self, x: Tensor, i: int) -> Tensor:
        """The next latent `(B, ...)`, after `note` of the same step.

        Of order min(`order`, predictions known); the last step, to σ = 0, is of the first and
        returns x̂₀, and the one before it of the second at most where there are fewer than 15
        (MixGRPO, `dpm_step`; diffusers, DPMSolverMultistepScheduler.step). Source of the updates:
        DPM-Solver++, arXiv 2211.01095, with α = 1 - σ, through diffusers.
        """
        j, num = i - self.offset, len(self.table) - 1
        order = min(len(self.history), self.flash.order)
        if j == num - 1:
            order = 1
        elif j == num - 2 and num < 15:
            order = min(order, 2)
        self.engine._step_index = j
        known = self.history[-order:]
        if order == 1:
            update = self.engine.dpm_solver_first_order_update(known[-1], sample=x)
        elif order == 2:
            update = self.engine.multistep_dpm_solver_second_order_update(known, sample=x)
        else:
            update = self.engine.multistep_dpm_solver_third_order_update(known, sample=x)
        following: Tensor = update
        return following
