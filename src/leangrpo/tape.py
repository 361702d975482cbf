"""What one call of a pipeline is to do: the note that a policy puts into its scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from .capture import Capture
from .data import SampleKey, Transition
from .kernels import Step
from .solver import Flash


class Finished(Exception):
    """Ends a pipeline's call once it has done what it was called for."""


class Part(NamedTuple):
    """What one scheduler's `step` gave to a transition: all of it, where there is one latent."""

    x: Tensor
    following: Tensor
    step: Step
    output: Tensor


@dataclass(slots=True)
class Tape:
    """What one call of the pipeline is to do and where its transitions go.

    `selected` steps are recorded (with gradients if `grad`), `noisy` steps draw noise and the rest
    are deterministic. `begin` is the step the pipeline starts at, `voices` the number of latents
    that step together. `span` restricts the call to the steps [start, stop), and `stop` ends it
    there, before anything is decoded. `latents` `(B, ...)` are those before step `at`: until then
    they are handed on as they are. For a replay, `next_latents` is the other end of the stored
    transition, which is scored, not drawn. `same_start` and `inputs`: see `Policy.sample`.
    `capture` is told the batch of every denoiser call. A `planning` call finds out `begin` and
    `voices`, and the denoisers of each step (`calls`); with `given` `(B, ...)` it ends by telling
    whether that is where the loop started. With `flash` the steps outside `window` are fewer (see
    `solver`); indices are still those of all T steps. `history` is what the solver remembers: of
    an earlier call that this one goes on from, and at the end of this one.
    """

    keys: tuple[SampleKey, ...] = ()
    prompts: tuple[str, ...] = ()
    seed: int = 0
    selected: frozenset[int] = frozenset()
    noisy: frozenset[int] = frozenset()
    grad: bool = False
    span: tuple[int, int] | None = None
    latents: Tensor | None = None
    at: int = 0
    next_latents: Tensor | None = None
    version: int = 0
    sink: Callable[[Transition], None] | None = None
    last_step: Callable[[], None] | None = None
    capture: Capture | None = None
    stop: int | None = None
    same_start: bool = False
    inputs: Mapping[str, Any] = field(default_factory=dict)
    flash: Flash | None = None
    window: tuple[int, int] | None = None
    history: list[Tensor] = field(default_factory=list)
    begin: int = 0
    voices: int = 1
    planning: bool = False
    calls: dict[int, dict[str, None]] = field(default_factory=dict, init=False)
    given: Tensor | None = None
    taken_as_given: bool = field(default=False, init=False)
    cursor: int = field(default=0, init=False)
    copies: int = field(default=0, init=False)
    copied: bool = field(default=False, init=False)
    started: bool = field(default=False, init=False)
    over: bool = field(default=False, init=False)
    parts: list[Part] = field(default_factory=list, init=False)
    state: Tensor | None = field(default=None, init=False)
    final: Tensor | None = field(default=None, init=False)
    shape: tuple[int, ...] | None = field(default=None, init=False)

    def count(self) -> None:
        """Planning: how many latents have stepped together, and their shape as one."""
        if len(self.parts) >= self.voices:
            self.voices = len(self.parts)
        if self.voices > 1 and self.parts:
            self.shape = (1, sum(part.x[0].numel() for part in self.parts))

    def recorded(self) -> bool:
        """Whether the step underway is one of the selected."""
        return not self.over and self.cursor in self.selected

    def advance(self) -> None:
        """The step underway is done, for all its latents."""
        self.parts.clear()
        self.cursor += 1
