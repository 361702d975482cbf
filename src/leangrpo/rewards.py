"""Rewards: callables from pictures and prompts to scores, and the threads that run them.

    reward(images, prompts, metadata) -> scores

`images` is a float32 CPU tensor `(B, C, H, W)` in [0, 1] (a video: `(B, F, C, H, W)`), `prompts` a
list of B strings, `metadata` a list of B dictionaries; `scores` is anything that makes a float
tensor `(B,)`: a list, an array, a tensor. The contract is ddpo-pytorch's without its second return
value. `Scorer` runs several of them in the background and checks every word they say.
"""

from __future__ import annotations

import inspect
import io
import re
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .config import load_object
from .errors import LeanError, RewardError, problem
from .ocr import Reading, model_file, recogniser, rgb

Metadata: TypeAlias = dict[str, Any]
Reward: TypeAlias = Callable[[Tensor, list[str], list[Metadata]], Any]
"""`(images, prompts, metadata) -> scores`, as the module's docstring says."""


def wanted_text(prompt: str, metadata: Metadata | None = None) -> str:
    """The text a picture of `prompt` should show.

    `metadata["text"]` if there is one, else what the first pair of double quotes holds
    (flow_grpo's rule), else the first run of digits. Raises RewardError if there is none.
    """
    found = re.search(r'"([^"]*)"', prompt)
    digits = re.search(r"[0-9]+", prompt)
    candidates = (
        str((metadata or {}).get("text") or ""),
        found[1] if found else "",
        digits[0] if digits else "",
    )
    for text in candidates:
        if text.strip():
            return text.strip()
    raise RewardError(
        f"the prompt {prompt!r} names no text to look for. Put the text into double quotes, write "
        'digits, or give metadata["text"].'
    )


# What was read during one call of a Scorer, so that the `ocr` rewards share one pass. It dies with
# the call, and holds the pictures, so that an id cannot come to mean another tensor.
_Readings: TypeAlias = dict[int, tuple[Tensor, list[Reading]]]
_readings: ContextVar[_Readings | None] = ContextVar("readings", default=None)


def _read(images: Tensor, prompts: list[str], metadata: list[Metadata]) -> list[list[Reading]]:
    """The readings of each sample: one for a picture, one per frame for a video."""
    seen = _readings.get()
    frames = images.shape[1] if images.ndim == 5 else 1
    if seen is not None and id(images) in seen:
        flat = seen[id(images)][1]
    else:
        texts = [wanted_text(*pair) for pair in zip(prompts, metadata, strict=True)]
        pictures = images.flatten(0, 1) if images.ndim == 5 else images
        flat = recogniser().read(pictures, [text for text in texts for _ in range(frames)])
        if seen is not None:
            seen[id(images)] = (images, flat)
    return [flat[i : i + frames] for i in range(0, len(flat), frames)]


def _ocr_scores(
    score: Callable[[Reading, str], float],
    images: Tensor,
    prompts: list[str],
    metadata: list[Metadata],
) -> list[float]:
    """`score(reading, wanted text)` of each picture; of a video, the mean over its frames."""
    texts = [wanted_text(*pair) for pair in zip(prompts, metadata, strict=True)]
    samples = _read(images, prompts, metadata)
    return [
        sum(score(reading, text) for reading in readings) / len(readings)
        for readings, text in zip(samples, texts, strict=True)
    ]


# -- the built-in rewards --------------------------------------------------------------------------


def ocr(images: Tensor, prompts: list[str], metadata: list[Metadata]) -> list[float]:
    """1 - min(d, n) / n, with d = 0 if the text is part of what is read, else their edit distance.

    n is the text's length; spaces are dropped and case is ignored (flow_grpo, `ocr.py`). In [0, 1].
    """
    return _ocr_scores(lambda r, text: ocr_formula(r.text, text), images, prompts, metadata)


def ocr_log_prob(images: Tensor, prompts: list[str], metadata: list[Metadata]) -> list[float]:
    """CTC log-probability of the text, per character, in [-20, 0]: graded where `ocr` is flat.

    The text is taken as it is written: case and inner spaces count.
    """
    return _ocr_scores(lambda r, text: r.log_prob, images, prompts, metadata)


def ocr_exact(images: Tensor, prompts: list[str], metadata: list[Metadata]) -> list[float]:
    """1 if what is read equals the text, spaces dropped and case ignored, else 0."""
    return _ocr_scores(
        lambda r, text: float(_plain(r.text) == _plain(text)), images, prompts, metadata
    )


def ocr_formula(read: str, text: str) -> float:
    """flow_grpo's score of what was read against the wanted text, in [0, 1]."""
    read, text = _plain(read), _plain(text)
    distance = 0 if text in read else min(edit_distance(read, text), len(text))
    return 1 - distance / len(text)


def _plain(text: str) -> str:
    return text.replace(" ", "").lower()


def edit_distance(a: str, b: str) -> int:
    """Levenshtein's: the fewest insertions, deletions and replacements that make `a` into `b`."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


def jpeg_incompressibility(
    images: Tensor, prompts: list[str], metadata: list[Metadata]
) -> list[float]:
    """Size as a JPEG of quality 95, in kB of 1000 bytes (ddpo-pytorch, `rewards.py`).

    Of a video, the mean over its frames.
    """
    frames = images.shape[1] if images.ndim == 5 else 1
    pictures = rgb(images.flatten(0, 1) if images.ndim == 5 else images)
    sizes = []
    for picture in (pictures.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1):
        file = io.BytesIO()
        Image.fromarray(picture.numpy()).save(file, format="JPEG", quality=95)
        sizes.append(file.tell() / 1000)
    return [sum(sizes[i : i + frames]) / frames for i in range(0, len(sizes), frames)]


def jpeg_compressibility(
    images: Tensor, prompts: list[str], metadata: list[Metadata]
) -> list[float]:
    """Minus the size as a JPEG of quality 95 in kB (ddpo-pytorch). flow_grpo's is this / 500."""
    return [-size for size in jpeg_incompressibility(images, prompts, metadata)]


REWARDS: dict[str, Reward] = {
    "ocr": ocr,
    "ocr_log_prob": ocr_log_prob,
    "ocr_exact": ocr_exact,
    "jpeg_compressibility": jpeg_compressibility,
    "jpeg_incompressibility": jpeg_incompressibility,
}


def load_reward(name: str) -> Reward:
    """A built-in reward by its name, or your own as `module:function`.

    A class (`module:Class`) is made into its instance, once, without arguments: the place for a
    model of your own. Raises LeanError for an unknown name, a package that is missing, a module
    that cannot be imported, or a thing that cannot be called with three arguments.
    """
    if ":" in name:
        return _own_reward(name)
    if name not in REWARDS:
        close = get_close_matches(name, REWARDS, n=1)
        remedy = f"Did you mean `{close[0]}`? " if close else ""
        names = ", ".join(f"`{n}`" for n in REWARDS)
        remedy += f"Names: {names}, or your own as module:function."
        raise problem("rewards", name, "no reward has this name", remedy)
    if name.startswith("ocr"):
        model_file()  # a missing package is said now, not after the first rollout
    return REWARDS[name]


def _own_reward(name: str) -> Reward:
    found = load_object("rewards", name)
    try:
        reward = found() if inspect.isclass(found) else found
    except Exception as error:  # a user's constructor may raise anything
        rule = f"making it raised {type(error).__name__}: {' '.join(str(error).split())}"
        raise problem("rewards", name, rule, "It is called without arguments.") from error
    remedy = "A reward is called as reward(images, prompts, metadata)."
    if not callable(reward):
        raise problem("rewards", name, "its instances are not callable", remedy)
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):  # a function written in C may have none
        signature = None
    try:
        if signature is not None:
            signature.bind(None, None, None)
    except TypeError as error:
        rule = f"it takes {signature}, and three arguments are given"
        raise problem("rewards", name, rule, remedy) from error
    checked: Reward = reward
    return checked


def check_prompts(
    names: Sequence[str], prompts: Sequence[str], metadata: Sequence[Metadata] | None = None
) -> None:
    """Refuse prompts that an `ocr` reward among `names` could not score, before anything runs.

    Raises RewardError naming the first such prompt.
    """
    reading = next((name for name in names if name in ("ocr", "ocr_log_prob", "ocr_exact")), None)
    if reading is None:
        return
    reader = recogniser()
    for prompt, about in zip(prompts, metadata or [{}] * len(prompts), strict=True):
        try:
            reader.classes(wanted_text(prompt, about))
        except RewardError as error:
            raise RewardError(f"reward `{reading}`, prompt {prompt!r}: {error}") from None


# -- running them ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scores:
    """What B samples scored.

    `total` is the weighted sum `(B,)` float64, `each` the unweighted scores of every reward
    `(B,)` float64, NaN where a sample is left out; `excluded` counts the NaN of `total`;
    `seconds` is the time the rewards took, in their thread.
    """

    total: Tensor
    each: dict[str, Tensor]
    seconds: float
    excluded: int


class Scorer:
    """Runs weighted rewards in threads of its own, so that scoring overlaps sampling.

    `rewards` are (name or callable, weight); a weight of 0 measures without adding. With more than
    one worker a reward may be called from several threads at once. `on_bad` says what a NaN or
    infinite score, or a picture that holds one, does: "stop" raises RewardError, "exclude" makes
    the sample NaN. Such a picture is never given to a reward: in 8 bits it would be black or white
    and score like any other (cf. diffusers#9096).
    """

    def __init__(
        self,
        rewards: Sequence[tuple[str | Reward, float]],
        *,
        on_bad: Literal["stop", "exclude"] = "stop",
        num_workers: int = 1,
    ) -> None:
        if on_bad not in ("stop", "exclude"):
            raise problem("on_bad_reward", on_bad, "it must be stop or exclude")
        if num_workers < 1:
            raise problem("num_workers", num_workers, "it must be 1 or more")
        self._rewards: dict[str, tuple[Reward, float]] = {}
        for reward, weight in rewards:
            name = reward if isinstance(reward, str) else _name(reward)
            if name in self._rewards:
                raise problem("rewards", name, "it is listed twice")
            if not isfinite(weight):
                raise problem("rewards", weight, f"the weight of `{name}` must be finite")
            loaded = load_reward(reward) if isinstance(reward, str) else reward
            self._rewards[name] = (loaded, float(weight))
        self.on_bad = on_bad
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="reward")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the rewards, in the order they were given."""
        return tuple(self._rewards)

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
        return self._pool.submit(self._score, pictures, list(prompts), about)

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata] | None = None
    ) -> Scores:
        """Score and wait."""
        return self.submit(images, prompts, metadata).result()

    def close(self) -> None:
        """End the threads: what is being scored is finished, what waits is cancelled."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _score(self, images: Tensor, prompts: list[str], metadata: list[Metadata]) -> Scores:
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
        each = {}
        token = _readings.set({})
        try:
            for name, (reward, weight) in self._rewards.items():
                scores = torch.full((len(whole),), torch.nan, dtype=torch.float64)
                if prompts:
                    scores[whole] = self._one(name, reward, images, prompts, metadata)
                each[name] = scores
                if weight:
                    total += weight * scores
        finally:
            _readings.reset(token)
        seconds = time.perf_counter() - start
        return Scores(total, each, seconds, excluded=int(total.isnan().sum()))

    def _one(
        self,
        name: str,
        reward: Reward,
        images: Tensor,
        prompts: list[str],
        metadata: list[Metadata],
    ) -> Tensor:
        """One reward's checked scores `(B,)`, float64 on the CPU; NaN for each bad one."""
        # Tensors made in inference mode count no versions.
        version = None if images.is_inference() else images._version
        try:
            with torch.no_grad():  # a flag of this thread; the sampler's own stays as it is
                returned = reward(images, list(prompts), list(metadata))
        except LeanError as error:
            raise RewardError(f"reward `{name}`: {error}") from error
        except (Exception, SystemExit) as error:
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"
            at = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(at.filename).name}, line {at.lineno}"
            raise RewardError(f"reward `{name}` raised {said} ({place})") from error
        if version is not None and images._version != version:
            raise RewardError(
                f"reward `{name}` changed the images in place, and other rewards and the sample "
                "grid see them too. Work on a copy: images = images.clone()."
            )
        scores = _as_scores(name, returned, len(prompts))
        bad = ~scores.isfinite()
        if self.on_bad == "stop":
            _refuse(bad, prompts, f"reward `{name}` gave NaN or infinite scores")
        return scores.masked_fill(bad, torch.nan)


def _name(reward: Reward) -> str:
    return str(getattr(reward, "__name__", type(reward).__name__))


def _refuse(bad: Tensor, prompts: list[str], what: str) -> None:
    """Raise RewardError if any of `bad` `(B,)` is true."""
    if bad.any():
        first = prompts[int(bad.nonzero()[0])]
        raise RewardError(
            f"{what}: {int(bad.sum())} of {len(prompts)}, the first for the prompt {first!r}. "
            "Setting on_bad_reward to exclude leaves such samples out."
        )


def _as_scores(name: str, returned: object, count: int) -> Tensor:
    """`(count,)` float64 from whatever a reward returned, or RewardError saying what it was."""
    hint = ""
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict):
        hint = " Return the scores alone, without the dictionary."
    if isinstance(returned, Tensor):
        returned = returned.detach().to("cpu")
        returned = returned.double() if not returned.is_complex() else returned
        array = returned.numpy()
    else:
        try:
            if isinstance(returned, list | tuple):  # of numbers, or of tensors with one number
                returned = [x.item() if isinstance(x, Tensor) else x for x in returned]
            array = np.asarray(returned)
        except Exception:  # ragged lists, tensors with several numbers, odd objects
            array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise RewardError(
            f"reward `{name}` returned {_shown(returned)}, which is no list of numbers.{hint}"
        )
    if array.ndim == 1 and len(array) != count:
        raise RewardError(f"reward `{name}` returned {len(array)} scores for {count} images.")
    if array.ndim != 1:
        raise RewardError(
            f"reward `{name}` returned scores of shape {array.shape} for {count} images, and "
            f"({count},) is needed."
        )
    return torch.from_numpy(array.astype(np.float64))


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
