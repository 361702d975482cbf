"""Rewards: callables from pictures and prompts to scores; the built-in ones, and how one is called.

    reward(images, prompts, metadata) -> scores

`images` is a float32 CPU tensor `(B, C, H, W)` in [0, 1] (a video: `(B, F, C, H, W)`), `prompts` a
list of B strings, `metadata` a list of B dictionaries; `scores` is anything that makes a float
tensor `(B,)`: a list, an array, a tensor. The contract is ddpo-pytorch's without its second return
value. `scoring.Scorer` runs several of them in the background.
"""

from __future__ import annotations

import inspect
import io
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias
from urllib.error import HTTPError

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .catalogue import CATALOGUE, REMOTE
from .config import load_object
from .errors import LeanError, RewardError, UnavailableError, problem
from .ocr import Reading, model_file, recogniser, rgb
from .remote import RemoteReward, is_url
from .settings import Reward as Settings

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


Readings: TypeAlias = dict[int, tuple[Tensor, list[Reading]]]
"""What was read in some pictures, by their id; it holds them, so that the id stays theirs."""

_readings: ContextVar[Readings | None] = ContextVar("readings", default=None)


@contextmanager
def sharing(readings: Readings) -> Iterator[None]:
    """Let the `ocr` rewards called inside share one pass over the same pictures."""
    token = _readings.set(readings)
    try:
        yield
    finally:
        _readings.reset(token)


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


def load_reward(reward: str | Settings, timeout: float | None = None) -> Reward:
    """A built-in reward by its name, your own as `module:function`, or a server's as its URL.

    A class (`module:Class`) is made into its instance, once, without arguments: the place for a
    model of your own. A call gives up on a server that is silent for `timeout` seconds. Raises
    LeanError for an unknown name, a package that is missing, a module that cannot be imported, a
    thing that cannot be called with three arguments, a URL that no server can have, or a model that
    cannot be loaded.
    """
    from .reward_models import Batched, Scaled

    settings = Settings(name=reward) if isinstance(reward, str) else reward
    found = _load(settings, timeout)
    entry = CATALOGUE.get(settings.name)
    if settings.batch_size and not (settings.sees_groups or (entry and entry.batches)):
        found = Batched(found, settings.batch_size)
    return found if settings.normalise is None else Scaled(found, *settings.normalise)


def _load(settings: Settings, timeout: float | None) -> Reward:
    name = settings.name
    if is_url(name):
        return RemoteReward(name, timeout)
    if ":" in name:
        return _own_reward(name)
    if name not in CATALOGUE:
        close = get_close_matches(name, CATALOGUE, n=1)
        remedy = f"Did you mean `{close[0]}`? " if close else ""
        names = ", ".join(f"`{n}`" for n in CATALOGUE)
        remedy += f"Names: {names}, your own as module:function, or a server's URL."
        raise problem("rewards", name, "no reward has this name", remedy)
    if settings.url is not None and name in REMOTE:
        return RemoteReward(settings.url, timeout)
    for need in CATALOGUE[name].needs:
        if getattr(settings, need) is None:
            raise problem(f"rewards.{need}", None, f"reward `{name}` needs it")
    if name.startswith("ocr"):
        model_file()  # a missing package is said now, not after the first rollout
    return REWARDS[name] if name in REWARDS else _with_a_model(settings, timeout)


def _with_a_model(settings: Settings, timeout: float | None) -> Reward:
    """A reward that has a network or asks a judge."""
    from . import reward_clip, reward_geneval, reward_judge, reward_vision

    makers: dict[str, Callable[[Settings], Reward]] = {
        "pickscore": reward_clip.pickscore,
        "hpsv2": reward_clip.hpsv2,
        "clipscore": reward_clip.clipscore,
        "aesthetic": reward_clip.aesthetic,
        "similarity": reward_clip.similarity,
        "imagereward": reward_vision.imagereward,
        "hpsv3": reward_vision.hpsv3,
        "geneval": reward_geneval.geneval,
        "judge": lambda s: reward_judge.Judge(s, timeout),
        "preference": lambda s: reward_judge.Preference(s, timeout),
    }
    return makers[settings.name](settings)


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


# -- calling one -----------------------------------------------------------------------------------


def call_reward(
    name: str, reward: Reward, images: Tensor, prompts: list[str], metadata: list[Metadata]
) -> Tensor:
    """One reward's scores of B samples, `(B,)` float64 on the CPU; they may be NaN or infinite.

    Raises RewardError if it raises, edits the images or returns anything but B numbers, and of
    that UnavailableError where another try may succeed: a connection failed, a server is busy.
    """
    # Tensors made in inference mode count no versions.
    version = None if images.is_inference() else images._version
    try:
        with torch.no_grad():  # a flag of this thread; the sampler's own stays as it is
            returned = reward(images, list(prompts), list(metadata))
    except UnavailableError:
        raise
    except LeanError as error:
        raise RewardError(f"reward `{name}`: {error}") from error
    except BaseException as error:  # in a thread of its own even an interrupt is only a failure
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if _may_pass(error):
            raise UnavailableError(said) from error
        at = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(at.filename).name}, line {at.lineno}"
        raise RewardError(f"reward `{name}` raised {said} ({place})") from error
    if version is not None and images._version != version:
        raise RewardError(
            f"reward `{name}` changed the images in place, and other rewards and the sample "
            "grid see them too. Work on a copy: images = images.clone()."
        )
    return _as_scores(name, returned, len(prompts))


# OSErrors that say something of this machine's files rather than of a connection.
_OF_FILES = (
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)


def _may_pass(error: BaseException) -> bool:
    """Whether an error may be gone at the next try: one of a connection, or of a busy server."""
    if isinstance(error, HTTPError):
        return error.code == 429 or error.code >= 500
    return isinstance(error, OSError) and not isinstance(error, _OF_FILES)


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
