"""Reward models in place: on their device, in batches, off it again where they are to be.

`reward_clip`, `reward_vision`, `reward_geneval` and `reward_judge` have the formulas. Pictures are
handed on in 8 bits, as PIL pictures, as the published scorers take them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from PIL import Image
from torch import Tensor, nn

from .catalogue import CATALOGUE
from .errors import RewardError, problem
from .ocr import rgb
from .settings import Reward as Settings

Score: TypeAlias = Callable[[list[Image.Image], list[str], list[dict[str, Any]]], Tensor]
"""`(pictures, prompts, metadata) -> (B,)`, with the networks on their device."""


def option(settings: Settings, name: str) -> str:
    """A reward's setting, or what the catalogue has for it."""
    value = getattr(settings, name)
    return str(CATALOGUE[settings.name].defaults.get(name, "") if value is None else value)


def device_of(settings: Settings) -> torch.device:
    """Where its networks compute: `auto` is the first accelerator; LeanError if there is none."""
    name = settings.device
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise problem("rewards.device", name, "torch sees no CUDA device", "Use cpu.")
    return torch.device(name)


class ModelReward:
    """A reward with networks, placed as its settings say; called by any thread, one at a time.

    Of a video, the mean over its frames. With `offload` the networks are on the CPU between calls.
    """

    def __init__(self, settings: Settings, modules: Sequence[nn.Module], score: Score) -> None:
        self.modules, self.score = list(modules), score
        self.device, self.offload = device_of(settings), settings.offload
        self.batch_size, self._lock = settings.batch_size, threading.Lock()
        for module in self.modules:
            module.eval().requires_grad_(False)
            module.to(dtype=getattr(torch, settings.dtype))
            module.to("cpu" if self.offload else self.device)

    def __call__(
        self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]
    ) -> Tensor:
        """Scores `(B,)` float32 of `(B, C, H, W)` or `(B, F, C, H, W)`."""
        frames = images.shape[1] if images.ndim == 5 else 1
        pictures = as_pictures(images.flatten(0, 1) if images.ndim == 5 else images)
        prompts = [p for p in prompts for _ in range(frames)]
        metadata = [m for m in metadata for _ in range(frames)]
        num = self.batch_size or len(pictures)
        with self._lock, self._placed(), torch.no_grad():
            parts = [
                self.score(pictures[i : i + num], prompts[i : i + num], metadata[i : i + num])
                .float()
                .cpu()
                for i in range(0, len(pictures), num)
            ]
        return torch.cat(parts).view(-1, frames).mean(1)

    @contextmanager
    def _placed(self) -> Iterator[None]:
        if not self.offload:
            yield
            return
        try:
            for module in self.modules:
                module.to(self.device)
            yield
        finally:
            for module in self.modules:
                module.to("cpu")
            if self.device.type == "cuda":
                torch.cuda.empty_cache()


def as_pictures(images: Tensor) -> list[Image.Image]:
    """`(N, 1 or 3, H, W)` in [0, 1] as RGB pictures of 8 bits."""
    pixels = (rgb(images).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
    return [Image.fromarray(x.numpy()) for x in pixels]


class Scaled:
    """Another reward's scores, (score - mean) / std: published variants differ by no more."""

    def __init__(self, reward: Any, mean: float, std: float) -> None:
        self.reward, self.mean, self.std = reward, mean, std

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[Any]) -> Tensor:
        """Scores `(B,)` float64."""
        scores = self.reward(images, prompts, metadata)
        return (torch.as_tensor(scores, dtype=torch.float64) - self.mean) / self.std


class Batched:
    """Another reward, called with so many samples at most."""

    def __init__(self, reward: Any, size: int) -> None:
        self.reward, self.size = reward, size

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[Any]) -> list[Any]:
        """All scores in order."""
        scores: list[Any] = []
        for i in range(0, len(prompts), self.size):
            part = slice(i, i + self.size)
            scores += list(self.reward(images[part], prompts[part], metadata[part]))
        return scores


def per_sample(what: str, metadata: Sequence[dict[str, Any]], key: str) -> list[Any]:
    """`key` of every sample's metadata; RewardError where one has none."""
    for about in metadata:
        if key not in about:
            raise RewardError(f"{what} needs metadata[{key!r}], and a sample has none.")
    return [about[key] for about in metadata]
