"""What an audit found: per optimizer step, altogether, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

KINDS = {
    "sampled": "sampled",
    "kept": "sampled with gradients",
    "redundant": "again, same weights: redundant",
    "changed": "again, changed weights: necessary",
    "elsewhere": "again, by another network",
    "fresh": "gradients, never sampled here",
    "other": "no gradients, not a rollout",
    "recomputed": "checkpoint recomputation",
    "backward": "backward",
}
"""Kinds of calls and how they are called in the table. `recomputed` is a part of `backward`."""

CLASSES = {
    "recomputes": "recomputes sampled transitions; rollout and update share process and network",
    "another network": "recomputes what another network of this process has sampled",
    "off-policy": "evaluates again only under weights that have changed",
    "separate": "recomputes; the rollout is in another process, or there is none",
    "no target recomputation": "trains on inputs that are no steps of its rollouts",
    "reuses": "differentiates the rollout itself",
    "samples only": "samples, and takes no gradients",
    "nothing": "no call of a denoiser was seen",
}
"""The classes of trainers, as the paper's appendix G tells them apart, and what lies between."""

GUIDE = "docs/adopting.md"


@dataclass(slots=True)
class Tally:
    """Calls of the network, transitions (rows at a time) in them, and their seconds; `saved` are
    those that would fall away."""

    calls: int = 0
    transitions: int = 0
    seconds: float = 0.0
    saved: float = 0.0

    def __iadd__(self, other: Tally) -> Tally:
        """Sum."""
        self.calls += other.calls
        self.transitions += other.transitions
        self.seconds += other.seconds
        self.saved += other.saved
        return self


@dataclass(slots=True)
class Step:
    """What happened until an optimizer step, from the one before. `seconds` is all of it.

    `trajectories`: those begun. `stepped` is False of what comes after the last optimizer step.
    """

    number: int
    seconds: float
    kinds: dict[str, Tally]
    trajectories: int
    stepped: bool = True


@dataclass(slots=True)
class Network:
    """The denoiser that was found."""

    name: str
    parameters: int
    trained: int
    gradient_bytes: int


@dataclass(slots=True)
class Report:
    """The result of an audit.

    `differences`: what makes a reused graph another computation than the evaluation it replaces,
    with the number of transitions and an example of each. `own_seconds`: what the auditor took.
    `failures`: calls it could not read, by reason. `ended`: how the program ended.
    """

    networks: list[Network] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    differences: dict[str, tuple[int, str]] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    candidates: list[str] = field(default_factory=list)
    own_seconds: float = 0.0
    ended: str = "running"
    rank: int | None = None

    def total(self, kind: str, steps: Sequence[Step] | None = None) -> Tally:
        """The sum over steps, all of them by default."""
        tally = Tally()
        for step in self.steps if steps is None else steps:
            tally += step.kinds.get(kind, Tally())
        return tally

    def counted(self) -> list[Step]:
        """The steps that times are taken from: those after the first rollout's, which warm up.

        All, where there is one rollout only; never what comes after the last optimizer step.
        """
        steps = [s for s in self.steps if s.stepped]
        starts = [i for i, s in enumerate(steps) if {"sampled", "kept"} & s.kinds.keys()]
        return steps[starts[1] :] if len(starts) > 1 else steps

    @property
    def limit(self) -> float:
        """total / (total - redundant) in seconds: the cost model's bound (docs/bench.md)."""
        steps = self.counted()
        total = sum(s.seconds for s in steps)
        return _ratio(total, self.total("redundant", steps).seconds)

    @property
    def speedup(self) -> float:
        """What retain and reweight would give: the same with the seconds that fall away.

        A redundant evaluation is what the rollout's own graph replaces, which has to be built then;
        see `audit_match.saving`.
        """
        steps = self.counted()
        total = sum(s.seconds for s in steps)
        return _ratio(total, self.total("redundant", steps).saved)

    @property
    def redundant_share(self) -> float:
        """Seconds of redundant evaluations, of all seconds."""
        steps = self.counted()
        total = sum(s.seconds for s in steps)
        return self.total("redundant", steps).seconds / total if total > 0 else 0.0

    @property
    def classified(self) -> str:
        """One of `CLASSES`, by what most of the gradients' transitions are."""
        number = {kind: self.total(kind).transitions for kind in KINDS}
        if number["redundant"]:
            return "recomputes"
        if not (self.total("backward").calls or any(s.stepped for s in self.steps)):
            return "samples only" if any(number.values()) else "nothing"
        gradients = {k: number[k] for k in ("elsewhere", "kept", "fresh", "changed")}
        kind = max(gradients, key=lambda k: gradients[k])
        if not gradients[kind]:
            return "samples only" if number["sampled"] + number["other"] else "nothing"
        if kind == "fresh":
            return "no target recomputation" if number["sampled"] else "separate"
        return {"elsewhere": "another network", "kept": "reuses", "changed": "off-policy"}[kind]

    @property
    def colocated(self) -> bool:
        """Whether rollout and update share process and network, so that a graph can be kept."""
        again = ("redundant", "changed", "kept")
        return any(self.total(kind).transitions for kind in again)

    def advice(self) -> list[str]:
        """What to change, in sentences."""
        kind = self.classified
        if kind != "recomputes":
            return [_ADVICE[kind]]
        steps = self.counted()
        kept = max(s.kinds["redundant"].transitions for s in steps if "redundant" in s.kinds)
        samples = max(s.trajectories for s in steps)
        size = sum(n.gradient_bytes for n in self.networks) / 2**20
        said = [
            f"Keep the rollout's own graph instead of evaluating it again: {GUIDE}.",
            f"retain: sample these steps with gradients; {kept} transitions' graphs wait for an "
            "optimizer step, fewer if each group is trained when its rewards are known.",
            f"reweight: call backward while sampling; a gradient of {size:.1f} MiB waits for each "
            f"sample ({samples} begin before a step).",
        ]
        if self.total("changed").transitions:
            said.append(
                "Only the first optimizer step after a rollout can do without; the later ones need "
                "the changed weights' forward."
            )
        hints = {
            "dropout": "Dropout is active: switch it off, or a kept graph is not the policy's.",
            "guidance": "Guidance differs between rollout and update: sample what is trained.",
            "rounding": "The latent was rounded between rollout and update: a kept graph has a "
            "ratio of exactly 1, which the second evaluation has not.",
            "compiled": "Compiled and eager forwards round otherwise: compile both or none.",
            "autocast": "Use the same autocast for rollout and update.",
        }
        return said + [text for name, text in hints.items() if name in self.differences]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        kind = self.classified
        return {
            "class": kind,
            "meaning": CLASSES[kind],
            "colocated": self.colocated,
            "limit": self.limit,
            "speedup": self.speedup,
            "redundant_share": self.redundant_share,
            "optimizer_steps": sum(s.stepped for s in self.steps),
            "totals": {k: asdict(t) for k in KINDS if (t := self.total(k)).calls},
            "differences": {
                k: {"transitions": n, "example": e} for k, (n, e) in self.differences.items()
            },
            "advice": self.advice(),
            "networks": [asdict(n) for n in self.networks],
            "steps": [asdict(s) for s in self.steps],
            "candidates": self.candidates,
            "failures": self.failures,
            "own_seconds": self.own_seconds,
            "ended": self.ended,
            "rank": self.rank,
        }


_ADVICE = {
    "another network": "The rollout ran on another network of this process, whose graph is of no "
    f"use. Sample with the network that is trained, then see {GUIDE}.",
    "off-policy": "The weights have changed whenever a transition was evaluated again, so that "
    "nothing is redundant.",
    "separate": "There is no graph to keep where the rollout is in another process. Sampling with "
    f"the trained network, in its process, would make one: {GUIDE}.",
    "no target recomputation": "Nothing to change: no sampled transition is evaluated again.",
    "reuses": "Nothing to change: the rollout's own graph is used.",
    "samples only": "There was no gradient to judge. Let the program run to an optimizer step.",
    "nothing": "No network that takes a time was called. Name yours with --module.",
}


def _ratio(total: float, saved: float) -> float:
    return total / (total - saved) if total > saved else 1.0
