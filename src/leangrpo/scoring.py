"""Scoring: weighted rewards of pictures, computed beside the sampler, and every word checked."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from math import isfinite
from types import TracebackType
from typing import Literal, Self

import torch
from torch import Tensor

from .crew import Call, Crew, name_of
from .errors import LeanError, RewardError, problem
from .rewards import Metadata, Reward
from .settings import Reward as RewardSettings
from .settings import Scoring
from .workers import Job


@dataclass(frozen=True, slots=True)
class Scores:
    """What B samples scored.

    `total` is the weighted sum `(B,)` float64, `each` the unweighted scores of every reward
    `(B,)` float64, NaN where a sample is left out; `excluded` counts the NaN of `total`;
    `seconds` is the time from the first call to the last answer, `latency` that of each reward,
    further tries and the pauses before them included.
    """

    total: Tensor
    each: dict[str, Tensor]
    seconds: float
    latency: dict[str, float]
    excluded: int

    def part(self, start: int, stop: int) -> Scores:
        """Those of some samples; the time is the first's, so that it is counted once."""
        share = 0.0 if start else 1.0
        total = self.total[start:stop]
        return Scores(
            total,
            {name: scores[start:stop] for name, scores in self.each.items()},
            self.seconds * share,
            {name: seconds * share for name, seconds in self.latency.items()},
            excluded=int(total.isnan().sum()),
        )


class Scorer:
    """Runs weighted rewards in workers of its own, so that scoring overlaps sampling.

    `rewards` are (name, settings or callable, weight); a weight of 0 measures without adding.
    `scoring` says how many calls there may be at once, in threads or processes, how long one may
    take and how often it is tried again (`settings.Scoring`); a `crew` that has these rewards may
    be shared, and is closed with the first that is. `on_bad` says what a NaN or infinite score, or
    a picture that holds one, does: "stop" raises RewardError, "exclude" makes the sample NaN. Such
    a picture is never given to a reward: in 8 bits it would be black or white and score like any
    other (cf. diffusers#9096). `groupwise` says that a reward has to see whole groups.
    """

    def __init__(
        self,
        rewards: Sequence[tuple[str | RewardSettings | Reward, float]],
        *,
        on_bad: Literal["stop", "exclude"] = "stop",
        scoring: Scoring | None = None,
        crew: Crew | None = None,
    ) -> None:
        if on_bad not in ("stop", "exclude"):
            raise problem("on_bad_reward", on_bad, "it must be stop or exclude")
        self._weights: dict[str, float] = {}
        self.groupwise = any(isinstance(r, RewardSettings) and r.sees_groups for r, _ in rewards)
        for reward, weight in rewards:
            name = name_of(reward)
            if name in self._weights:
                raise problem("rewards", name, "it is listed twice")
            if not isfinite(weight):
                raise problem("rewards", weight, f"the weight of `{name}` must be finite")
            self._weights[name] = float(weight)
        self.on_bad = on_bad
        self._crew = crew or Crew([reward for reward, _ in rewards], scoring or Scoring())

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the rewards, in the order they were given."""
        return tuple(self._weights)

    def submit(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata] | None = None
    ) -> Future[Scores]:
        """Start scoring B samples and return at once; the future gives Scores or RewardError.

        `images` `(B, C, H, W)` or `(B, F, C, H, W)` of any float dtype and device: they are copied
        to a float32 CPU tensor here, unless they are one. Do not change them until it is done.
        """
        about = [{} for _ in prompts] if metadata is None else list(metadata)
        if not images.is_floating_point():
            raise LeanError(f"images are {images.dtype}: floats in [0, 1] are needed.")
        if images.ndim not in (4, 5) or not len(images) == len(prompts) == len(about):
            raise LeanError(
                f"images of shape {tuple(images.shape)}, {len(prompts)} prompts and {len(about)} "
                "metadata cannot be scored: (B, C, H, W) or (B, F, C, H, W) images, B prompts and "
                "B metadata are needed."
            )
        pictures = images.detach().to(device="cpu", dtype=torch.float32)
        return self._crew.submit(partial(self._score, pictures, list(prompts), about))

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata] | None = None
    ) -> Scores:
        """Score and wait."""
        return self.submit(images, prompts, metadata).result()

    def close(self, *, wait: bool = True) -> None:
        """End the workers: what waits is cancelled, what is being scored is finished with `wait`.

        Without it nothing is waited for, a thread that hangs is left behind and processes are
        killed; so it is when a `with` block ends by an error.
        """
        self._crew.close(wait=wait)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(wait=error is None)

    def _score(
        self, images: Tensor, prompts: list[str], metadata: list[Metadata], call: Call
    ) -> Scores:
        start = time.perf_counter()
        whole = images.isfinite().flatten(1).all(1)
        if self.on_bad == "stop":
            _refuse(~whole, prompts, "the sampled pictures hold NaN or infinite values")
        elif not whole.all():
            kept = whole.nonzero().flatten().tolist()
            images = images[whole]
            prompts = [prompts[i] for i in kept]
            metadata = [metadata[i] for i in kept]

        total = torch.zeros(len(whole), dtype=torch.float64)
        total[~whole] = torch.nan
        each, latency = {}, {}
        job = Job(images, prompts, metadata)
        for name, weight in self._weights.items():
            began = time.perf_counter()
            scores = torch.full((len(whole),), torch.nan, dtype=torch.float64)
            if prompts:
                scores[whole] = self._checked(name, call(name, job), prompts)
            each[name], latency[name] = scores, time.perf_counter() - began
            if weight:
                total += weight * scores
        seconds = time.perf_counter() - start
        return Scores(total, each, seconds, latency, excluded=int(total.isnan().sum()))

    def _checked(self, name: str, scores: Tensor, prompts: list[str]) -> Tensor:
        """One reward's scores `(B,)`, NaN for each bad one; RewardError where those stop."""
        bad = ~scores.isfinite()
        if self.on_bad == "stop":
            _refuse(bad, prompts, f"reward `{name}` gave NaN or infinite scores")
        return scores.masked_fill(bad, torch.nan)


def _refuse(bad: Tensor, prompts: list[str], what: str) -> None:
    """Raise RewardError if any of `bad` `(B,)` is true."""
    if bad.any():
        first = prompts[int(bad.nonzero()[0])]
        raise RewardError(
            f"{what}: {int(bad.sum())} of {len(prompts)}, the first for the prompt {first!r}. "
            "Setting on_bad_reward to exclude leaves such samples out."
        )
