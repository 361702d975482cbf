"""Which sampling steps are trained and which draw noise; integers only.

A draw depends on (seed, update) alone: every process selects the same steps, and a resumed run
needs no state. Steps are ranked by a hash, not by a library's generator, so that the same run
selects the same steps with any version of Python or numpy.
"""

from __future__ import annotations

import hashlib
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
    def fraction(self) -> float: ...
    @property
    def size(self) -> int | None: ...
    @property
    def range(self) -> tuple[int, int] | None: ...
    @property
    def steps(self) -> tuple[int, ...] | None: ...
    @property
    def last(self) -> bool: ...
    @property
    def outside(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Selection:
    """The steps of an update, ascending: `selected` are trained, `stochastic` draw noise."""

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


def select(rule: Rule, stds: Sequence[float], *, seed: int, update: int) -> Selection:
    """The steps of one update, for a sampler whose steps add noise of `stds` `(T,)`.

    * fraction: the first int(n·fraction) of the n candidates (FlowGRPO, train_sd3).
    * random: as many, drawn without replacement (DanceGRPO, train_one_step), for the whole update
      rather than per sample.
    * window: `size` steps in a row inside `range`, the first one drawn (FlowGRPO-Fast, sd3
      pipeline; MixGRPO).
    * list: these.

    Unselected steps draw noise too, unless `outside` is deterministic. Raises LeanError when no
    step can be trained or the rule asks for one that cannot.
    """
    num_steps = len(stds)
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
        selected = _window(rule, possible, seed, update)
    elif rule.rule in ("fraction", "random"):
        # A product such as 100 x 0.29 is 28.999... in binary, and 29 is meant.
        num = max(1, int(len(possible) * rule.fraction + 1e-9))
        if rule.rule == "fraction":
            selected = possible[:num]
        else:
            ranked = sorted(possible, key=lambda step: _hash(seed, update, step))
            selected = tuple(sorted(ranked[:num]))
    else:
        raise problem("selection.rule", rule.rule, "must be fraction, random, window or list")
    if rule.outside == "deterministic":
        return Selection(selected, selected)
    return Selection(selected, tuple(i for i, std in enumerate(stds) if std > 0))


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


def _window(rule: Rule, possible: tuple[int, ...], seed: int, update: int) -> tuple[int, ...]:
    lo, hi = rule.range or (possible[0], possible[-1] + 1)
    missing = sorted(set(range(lo, hi)) - set(possible))
    if hi <= lo or missing:
        what = f"step {missing[0]} cannot be trained" if missing else "it is empty"
        steps = ", ".join(map(str, possible))
        raise problem("selection.range", [lo, hi], f"{what}; the candidates are {steps}")
    if rule.size is None or not 1 <= rule.size <= hi - lo:
        raise problem("selection.size", rule.size, f"the window [{lo}, {hi}) has 1 to {hi - lo}")
    start = lo + _hash(seed, update, -1) % (hi - lo - rule.size + 1)
    return tuple(range(start, start + rule.size))


def _hash(seed: int, update: int, step: int) -> int:
    """A number below 2^64 that is uniform over (seed, update, step)."""
    packed = struct.pack("<3q", seed, update, step)
    digest = hashlib.blake2b(packed, digest_size=8, person=b"selection").digest()
    return int.from_bytes(digest, "little")
