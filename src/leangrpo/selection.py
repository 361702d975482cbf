"""Which sampling steps are trained and which draw noise; integers only.

A draw depends on (seed, update) alone, and on the group or the sample where each has its own:
every process selects the same steps, and a resumed run needs no state. Steps are ranked by a hash,
not by a library's generator, so that the same run selects the same steps with any version of Python
or numpy.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .errors import LeanError, problem


class Rule(Protocol):
    """The `selection` branch of the settings."""

    @property
    def rule(self) -> str: ...
    @property
    def per(self) -> str: ...
    @property
    def fraction(self) -> float: ...
    @property
    def size(self) -> int | None: ...
    @property
    def range(self) -> tuple[int, int] | None: ...
    @property
    def move(self) -> str: ...
    @property
    def every(self) -> int: ...
    @property
    def stride(self) -> int: ...
    @property
    def decay(self) -> str: ...
    @property
    def wrap(self) -> bool: ...
    @property
    def steps(self) -> tuple[int, ...] | None: ...
    @property
    def last(self) -> bool: ...
    @property
    def outside(self) -> str: ...
    @property
    def last_noise(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Selection:
    """Steps of a trajectory, ascending: `selected` are trained, `stochastic` draw noise."""

    selected: tuple[int, ...]
    stochastic: tuple[int, ...]


def candidates(num_steps: int, stds: Sequence[float], last: bool) -> tuple[int, ...]:
    """Steps that can be trained: those that add noise, and the last one only if `last`.

    `stds` are the T = `num_steps` standard deviations of the noise. FlowGRPO and DanceGRPO both
    leave the last step out.

    >>> candidates(4, [0.7, 0.5, 0.0, 0.1], last=False)
    (0, 1)
    """
    if len(stds) != num_steps:
        raise problem("sampling.steps", num_steps, f"the sampler has {len(stds)} steps")
    return tuple(i for i in range(num_steps if last else num_steps - 1) if stds[i] > 0)


def select(
    rule: Rule,
    stds: Sequence[float],
    *,
    seed: int,
    update: int,
    group: int = 0,
    sample: int = 0,
) -> Selection:
    """The steps of generation `sample` of prompt `group` of an update; noise stds are `(T,)`.

    * fraction: the first int(n·fraction) of the n candidates (FlowGRPO, train_sd3).
    * random: as many, drawn without replacement (DanceGRPO, train_one_step).
    * window: `size` steps in a row inside `range`, the first one drawn (FlowGRPO-Fast, sd3
      pipeline) or moving on with the updates (MixGRPO, `grpo_states.py`; see `window_start`).
    * list: these.

    `per` says whether a draw is that of the update, of the group or of the sample. Unselected steps
    draw noise too, unless `outside` is deterministic; the last one unless `last_noise` is false.
    Raises LeanError when no step can be trained or the rule asks for one that cannot.
    """
    num_steps = len(stds)
    draw = {"update": (), "group": (group,), "sample": (group, sample)}[rule.per]
    possible = candidates(num_steps, stds, rule.last)
    if rule.rule == "list":
        selected = _listed(rule.steps or (), stds)
    elif not possible:
        raise problem(
            "selection",
            rule.rule,
            f"no step is left to train: of the sampler's {num_steps} only steps with noise count, "
            f"{'with' if rule.last else 'without'} the last one",
            "Take more sampling.steps, or set selection.last=true if the last step has noise.",
        )
    elif rule.rule == "window":
        selected = _window(rule, possible, seed, update, draw)
    elif rule.rule in ("fraction", "random"):
        # A product such as 100 x 0.29 is 28.999... in binary, and 29 is meant.
        num = max(1, int(len(possible) * rule.fraction + 1e-9))
        if rule.rule == "fraction":
            selected = possible[:num]
        else:
            ranked = sorted(possible, key=lambda step: _hash(seed, update, step, *draw))
            selected = tuple(sorted(ranked[:num]))
    else:
        raise problem("selection.rule", rule.rule, "must be fraction, random, window or list")
    if rule.outside == "deterministic":
        return Selection(selected, selected)
    num_noisy = num_steps if rule.last_noise or num_steps - 1 in selected else num_steps - 1
    return Selection(selected, tuple(i for i in range(num_noisy) if stds[i] > 0))


def _listed(steps: Sequence[int], stds: Sequence[float]) -> tuple[int, ...]:
    def refuse(rule: str, remedy: str = "") -> LeanError:
        return problem("selection.steps", list(steps), rule, remedy)

    if not steps:
        raise refuse("rule list needs at least one step")
    for step in steps:
        if not 0 <= step < len(stds):
            raise refuse(f"step {step} is outside 0..{len(stds) - 1}")
        if steps.count(step) > 1:
            raise refuse(f"step {step} is listed twice")
        if not stds[step] > 0:
            raise refuse(
                f"step {step} adds no noise, so it has no log-probability", "Leave it out."
            )
    return tuple(sorted(steps))


def _window(
    rule: Rule, possible: tuple[int, ...], seed: int, update: int, draw: tuple[int, ...]
) -> tuple[int, ...]:
    lo, hi = rule.range or (possible[0], possible[-1] + 1)
    missing = sorted(set(range(lo, hi)) - set(possible))
    if hi <= lo or missing:
        what = f"step {missing[0]} cannot be trained" if missing else "it is empty"
        steps = ", ".join(map(str, possible))
        raise problem("selection.range", [lo, hi], f"{what}; the candidates are {steps}")
    if rule.size is None or not 1 <= rule.size <= hi - lo:
        raise problem("selection.size", rule.size, f"the window [{lo}, {hi}) has 1 to {hi - lo}")
    places = hi - lo - rule.size + 1
    if rule.move == "progressive":
        start = window_start(rule, places, update)
    else:
        start = _hash(seed, update, -1, *draw) % places
    return tuple(range(lo + start, lo + start + rule.size))


def window_start(rule: Rule, places: int, update: int) -> int:
    """Where a progressive window stands at an update (0-based), among `places` positions.

    After `every` updates it moves by `stride`; past the last position it goes back to the first, or
    with `wrap` off stays at the last. `decay` shortens its stay at position c: linearly to 1 at the
    end, int(every·(1-p) + p) with p = c / places, or ceil(every·exp(-0.1·max(0, c - 13))).
    Source: MixGRPO, `fastvideo/utils/grpo_states.py`. Theirs goes on until the window is empty,
    shrinking on the way, which no published run reaches; ours keeps its size.
    """
    start = 0
    if rule.stride == 0:
        return start
    while True:
        stay = rule.every
        if rule.decay == "linear":
            share = start / places
            stay = max(1, int(rule.every * (1 - share) + share))
        elif rule.decay == "exponential":
            stay = math.ceil(rule.every * math.exp(-0.1 * max(0, start - 13)))
        if update < stay:
            return start
        update -= stay
        start += rule.stride
        if start >= places:
            if not rule.wrap:
                return places - 1
            start = 0


def _hash(seed: int, *numbers: int) -> int:
    """A number below 2^64 that is uniform over (seed, *numbers)."""
    packed = struct.pack(f"<{len(numbers) + 1}q", seed, *numbers)
    digest = hashlib.blake2b(packed, digest_size=8, person=b"selection").digest()
    return int.from_bytes(digest, "little")
