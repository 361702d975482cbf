"""What a wrong gradient is: the mistake that explains its difference from the right one.

A schedule that is off is compared with what known mistakes would have given, made of the gradients
of single steps: the sum of all trajectories whatever their advantage (ranks were added up before
the correction), a step, a trajectory or a single step of one left out or counted twice, a wrong
factor, or the right gradient at other weights. The one that leaves least unexplained is named, if
it leaves little.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .parallel import World, local, scatter_like
from .witness import Column

EXPLAINED = 0.1
"""A mistake is named if it leaves at most this share of the difference unexplained."""

NOTHING = 1e-3
"""A gradient is none if it is shorter than this share of the right one."""

Parts = Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Finding:
    """A mistake that was looked for: what it `leaves` of the difference, as a share of it."""

    text: str
    leaves: float


class Suspects:
    """The right gradient and a wrong one, as this rank holds them, and what could be between.

    `right` and `wrong` are this rank's parts of the trained parameters. All methods are
    collectives.
    """

    def __init__(self, right: Parts, wrong: Parts, world: World) -> None:
        self.world = world
        self.right, self.wrong = [g.double() for g in right], [g.double() for g in wrong]
        self.missing = [a - b for a, b in zip(self.right, self.wrong, strict=True)]
        self.size = self._dot(self.missing, self.missing)
        self.findings: list[Finding] = []

    def _own(self, a: Parts, b: Parts) -> float:
        return sum(float((x.double() * y.double()).sum()) for x, y in zip(a, b, strict=True))

    def _dot(self, *pair: Parts) -> float:
        return float(self.world.sum(torch.tensor(self._own(*pair), dtype=torch.float64)))

    def _enter(self, text: str, left: float) -> None:
        """A mistake that leaves the squared length `left` unexplained."""
        self.findings.append(Finding(text, math.sqrt(max(0.0, left) / self.size)))

    def is_nothing(self) -> bool:
        """Whether there is hardly a gradient."""
        return self._dot(self.wrong, self.wrong) < NOTHING**2 * self._dot(self.right, self.right)

    def factor(self) -> None:
        """The right gradient, times a number."""
        along, size = self._dot(self.right, self.wrong), self._dot(self.right, self.right)
        c = along / size
        left = self._dot(self.wrong, self.wrong) - c * along
        self._enter(
            f"it is {c:.4g} times the right one: look at the sign, and at what divides it (the "
            "number of trajectories, steps and ranks)",
            left,
        )

    def steps(self, columns: Iterable[Column], layout: Sequence[Tensor]) -> None:
        """Mistakes with single steps and trajectories; and advantages that came too late.

        `columns` are whole gradients; `layout` the parameters, for the part that is this rank's.
        """
        zeros = [torch.zeros_like(g) for g in self.right]
        together, of_step = [g.clone() for g in zeros], dict[int, list[Tensor]]()
        trajectory, of_one = None, [g.clone() for g in zeros]
        for key, step, coefficient, weight, whole in columns:
            own = [local(scatter_like(g.double(), p)) for g, p in zip(whole, layout, strict=True)]
            mine = [coefficient * g for g in own]
            if key != trajectory:
                self._trajectory(trajectory, of_one)
                trajectory, of_one = key, [g.clone() for g in zeros]
            for sums, parts in (
                (together, [weight * g for g in own]),
                (of_step.setdefault(step, [g.clone() for g in zeros]), mine),
                (of_one, mine),
            ):
                for total, part in zip(sums, parts, strict=True):
                    total += part
            self._part(f"step {step} of {_name(key)}", mine)
        self._trajectory(trajectory, of_one)
        for step, gradient in of_step.items():
            self._part(f"step {step}", gradient)
        # Each rank may have multiplied the sum with advantages of its own.
        length = self._own(together, together)
        along = self._own(together, self.wrong)
        left = self._own(self.wrong, self.wrong) - (along**2 / length if length else 0.0)
        self._enter(
            "it is the sum of all trajectories' gradients, each with the same factor: the "
            "advantages came after the trajectories had been added up (a premature reduction), "
            "and nothing corrects that sum. Multiply each trajectory by its own advantage first",
            float(self.world.sum(torch.tensor(left, dtype=torch.float64))),
        )

    def _trajectory(self, key: object, gradient: Parts) -> None:
        if key is not None:
            self._part(_name(key), gradient)

    def _part(self, name: str, gradient: Parts) -> None:
        """A part of the sum that is there another number of times than once."""
        size = self._dot(gradient, gradient)
        if not size:
            return
        along = self._dot(self.missing, gradient)
        times = 1 - along / size
        if abs(times) < 0.02:
            text = f"the gradient of {name} is missing"
        else:
            text = f"the gradient of {name} is in it {times:.3g} times"
        self._enter(text, self.size - along**2 / size)

    def stale(self, before: Parts) -> None:
        """The right gradient, but at the weights before the last optimizer step."""
        gap = [a.double() - b for a, b in zip(before, self.wrong, strict=True)]
        self._enter(
            "it is the gradient at the weights before the last optimizer step (stale weights): "
            "something keeps a copy of them, or graphs made with them",
            self._dot(gap, gap),
        )

    def best(self) -> str:
        """The mistake that explains most, in words."""
        if self.is_nothing():
            return (
                "there is no gradient left. The advantages of a group add up to 0, and so does "
                "the sum of trajectories when all of it is multiplied with each of them: they came "
                "after the trajectories had been added up (a premature reduction), or no "
                "trajectory was counted at all"
            )
        first = min(self.findings, key=lambda finding: finding.leaves)
        if first.leaves <= EXPLAINED:
            return first.text
        return (
            "none of the mistakes looked for explains it (closest: "
            f"{first.text}; {first.leaves:.0%} of the difference is left)"
        )


def _name(key: object) -> str:
    prompt, generation = getattr(key, "prompt", None), getattr(key, "generation", None)
    return f"trajectory {key}" if prompt is None else f"prompt {prompt}, generation {generation}"
