"""What is asked and what it is answered from: options, workloads, and the costs of a step.

Plain numbers, from `probe` (measured here) or counted for a device that is not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .gradients import Sync

DEFERRED = ("native", "retain")
"""Schedules whose backwards wait for the advantages."""

LEDGERS = ("reweight", "streaming")
"""Schedules whose gradients wait for the advantages."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run an update: what `schedule: auto` decides.

    `activations` is retain's budget of kept activations on the device, None = all stay there.
    """

    schedule: str
    micro_batch: int = 1
    checkpointing: bool = False
    sync: Sync = "update"
    activations: int | None = None
    ahead: int = 1

    @property
    def name(self) -> str:
        """Such as `retain+offload m=2 checkpointing`."""
        words = [self.schedule + ("+offload" if self.activations is not None else "")]
        words.append(f"m={self.micro_batch}")
        words += ["checkpointing"] if self.checkpointing else []
        words += [f"sync={self.sync}"] if self.sync != "update" else []
        words += [f"ahead={self.ahead}"] if self.ahead != int(self.schedule != "streaming") else []
        return " ".join(words)

    @property
    def per_sample(self) -> bool:
        """Whether its backwards must keep the samples of a batch apart."""
        return self.schedule in LEDGERS and self.micro_batch > 1

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that run it, by their dotted names."""
        return {
            "schedule": self.schedule,
            "rollout.micro_batch": self.micro_batch,
            "rollout.ahead": self.ahead,
            "model.activation_checkpointing": self.checkpointing,
            "parallel.sync": self.sync,
            "memory.activations": self.activations,
        }


@dataclass(frozen=True, slots=True)
class StepCost:
    """A denoising step of a micro-batch, with all denoiser calls it makes (guidance).

    Seconds: `forward` without gradients, `forward_grad` with, `backward`, `replay` (a call of the
    pipeline for one step with gradients, as native makes it; None = `forward_grad`), `call` (what
    sampling takes besides its steps and decoding), `encode` (of prompts that are new), `decode`.

    Bytes: `kept` by autograd between forward and backward, each storage once and without weights.
    The others are the most that a phase holds above what was there when it began: `forward_peak`,
    `forward_grad_peak` (`kept` included), `backward_first_peak` and `backward_peak` (the graph is
    there at the start; the gradients are too, but for the first), `decode_peak`. `waiting` is what
    a batch leaves behind that is differentiated sample by sample, all its steps together, and
    `waiting_before` the same before its last step (None = a whole gradient for each sample);
    `fold` are the seconds of adding it to a sum.
    """

    forward: float
    forward_grad: float
    backward: float
    kept: int
    forward_peak: int
    forward_grad_peak: int
    backward_first_peak: int
    backward_peak: int
    replay: float | None = None
    call: float = 0.0
    encode: float = 0.0
    decode: float = 0.0
    decode_peak: int = 0
    waiting: int | None = None
    waiting_before: int | None = None
    fold: float | None = None

    def of(self, share: float) -> StepCost:
        """The same for a batch of `share` times the samples: all in proportion."""
        if share == 1.0:
            return self
        scaled: dict[str, Any] = {}
        for one in fields(self):
            value = getattr(self, one.name)
            scaled[one.name] = None if value is None else type(value)(value * share)
        return StepCost(**scaled)


@dataclass(frozen=True, slots=True)
class Key:
    """Which `StepCost`: of a micro-batch, with activation checkpointing or without; `per_sample`
    is the one whose backward gives a gradient for every sample (reweight, streaming)."""

    micro_batch: int
    checkpointing: bool = False
    per_sample: bool = False

    @classmethod
    def of(cls, option: Option) -> Key:
        """The one an option needs."""
        return cls(option.micro_batch, option.checkpointing, option.per_sample)


@dataclass(frozen=True, slots=True)
class Costs:
    """What the model and the device cost, measured (`probe`) or counted.

    `steps` has what could be measured; `missing` says why another key could not. Bytes:
    `resident` is everything between two updates (weights, the optimizer's state, prompts),
    `gradient` one gradient as a backward makes it (full, not sharded), `waiting` one that waits in
    a ledger on the device, `summed` an advantage-weighted sum, `stepped` what the optimizer steps
    (a shard of it), `transition` what is remembered of a sample's selected step besides a graph,
    `optimizer_peak` and `reduce_peak` above what was there. Seconds: `reward` of one sample,
    `reward_call` of scoring a batch whatever its size, `drag` what sampling loses to each second
    of a reward that is computed beside it (0: nothing, 1: they share one core),
    `add` of adding one gradient onto another, `reduce` of adding a whole gradient over the ranks,
    `optimizer` of a step, `check` of comparing the weights with those of the update's start.
    `host_bandwidth`: bytes a second to the host's memory and back.
    """

    steps: Mapping[Key, StepCost]
    resident: int
    gradient: int
    waiting: int
    summed: int
    stepped: int
    transition: int = 0
    optimizer_peak: int = 0
    reduce_peak: int = 0
    reward: float = 0.0
    reward_call: float = 0.0
    drag: float = 0.0
    add: float = 0.0
    reduce: float = 0.0
    optimizer: float = 0.0
    check: float = 0.0
    host_bandwidth: float = float("inf")
    missing: Mapping[Key, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; what is infinite is null."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        if self.host_bandwidth == float("inf"):
            found["host_bandwidth"] = None
        found["steps"] = [asdict(key) | asdict(cost) for key, cost in self.steps.items()]
        found["missing"] = [asdict(key) | {"reason": why} for key, why in self.missing.items()]
        return found


@dataclass(frozen=True, slots=True)
class Workload:
    """How much one rank does in an update; see `workload` for how it follows from the settings.

    A trajectory has `steps` T, of which `selected` S are trained (an expected number where they are
    drawn) and the first `prefix` are run once for a group. The rank samples `held` generations of
    each of `waves` groups for the first optimizer step; `parts` and `epochs` as in the settings.
    `whole`: advantages need the rewards of the whole update. `joint`: a trajectory's graphs live
    until it ends. `reference`: each selected step is also run under the reference weights.
    `encodes`: groups have prompts that have not been encoded lately. `kl_loss`: a KL is in the
    loss. `baseline`: steps have baselines of their own. `sums`: those that streaming folds a group
    into, one more than rewards that are normalised one by one.
    """

    steps: float
    selected: float
    held: int
    waves: int
    prefix: float = 0.0
    parts: int = 1
    epochs: int = 1
    whole: bool = False
    joint: bool = False
    reference: bool = False
    kl_loss: bool = False
    baseline: bool = False
    encodes: bool = False
    ranks: int = 1
    shards: int = 1
    workers: int = 1
    sums: int = 2

    def slots(self, micro_batch: int) -> list[int]:
        """The sizes of the forwards of a wave, in order."""
        full, rest = divmod(self.held, micro_batch)
        return [micro_batch] * full + ([rest] if rest else [])
