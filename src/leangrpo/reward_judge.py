"""Vision-language models as judges, over an OpenAI-compatible HTTP endpoint.

vLLM, SGLang, llama.cpp and hosted models answer `POST URL/chat/completions`. One picture is
rated (`judge`), or the pictures of a group are compared in pairs (`preference`). What comes back
is text: a number or a choice is searched in it by a regular expression, and nothing else is done
with it.
"""

from __future__ import annotations

import base64
import io
import json
import math
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from .errors import RewardError, UnavailableError
from .remote import RemoteReward
from .reward_models import as_pictures, option
from .settings import Reward as Settings

AT_ONCE = 8
"""Requests at the same time, where `batch_size` is not set (flow_grpo: 8)."""

LONGEST = 1 << 20
"""Bytes of an answer."""

RATE = (
    "This picture was made for the caption below. Rate from 0 to 5 how well it shows what the "
    "caption says and how good it looks. Explain briefly, and end with a line of the form\n"
    "Final Score: x\n\nCaption: {prompt}"
)
COMPARE = (
    "Two pictures were made for the caption below. Say which of them shows better what the "
    "caption says and looks better. Explain briefly, and end with one of these two sentences:\n"
    "Image 1 is better\nImage 2 is better\n\nCaption: {prompt}"
)


class _Model:
    """A model behind an endpoint: pictures and a text go there, a text comes back."""

    def __init__(self, settings: Settings, timeout: float | None, template: str) -> None:
        self.name = option(settings, "model")
        self.remote = RemoteReward(str(settings.url).rstrip("/") + "/chat/completions", timeout)
        self.pattern = re.compile(option(settings, "pattern"))
        self.at_once = settings.batch_size or AT_ONCE
        file = settings.template
        self.template = (
            template if file is None else Path(file).expanduser().read_text(encoding="utf-8")
        )

    def found(self, pictures: Sequence[Image.Image], prompt: str) -> str | None:
        """What the pattern's first group matches last in the answer; None where it does not.

        The last match, as an answer may think aloud before.
        """
        content: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": _data(picture)}} for picture in pictures
        ]
        content.append({"type": "text", "text": self.template.replace("{prompt}", prompt)})
        body = {
            "model": self.name,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
        }
        status, answer = self.remote.ask(
            "POST", json.dumps(body).encode(), self.remote.timeout, LONGEST
        )
        if status == 429 or status >= 500:
            raise UnavailableError(f"the model's server answered HTTP {status}")
        if status != 200:
            raise RewardError(f"the model's server answered HTTP {status}: {answer[:200]!r}")
        try:
            text = json.loads(answer)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            raise RewardError(f"it is no chat completion: {answer[:200]!r}") from None
        matches = list(self.pattern.finditer(text)) if isinstance(text, str) else []
        return matches[-1][1] if matches else None


def _data(picture: Image.Image) -> str:
    file = io.BytesIO()
    picture.save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


class Judge:
    """The number that `pattern` finds in a model's answer about each picture, divided by 5.

    flow_grpo, `unifiedreward`: "Final Score: x" / 5, with UnifiedReward-7b-v1.5. An answer without
    a number is NaN here and 0 there. Of a video, the mean over its frames.
    """

    def __init__(self, settings: Settings, timeout: float | None = None) -> None:
        self._model = _Model(settings, timeout, RATE)

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[Any]) -> list[float]:
        """Scores of B pictures or videos, several of them asked for at once."""
        frames = images.shape[1] if images.ndim == 5 else 1
        pictures = as_pictures(images.flatten(0, 1) if images.ndim == 5 else images)
        texts = [p for p in prompts for _ in range(frames)]
        with ThreadPoolExecutor(self._model.at_once) as pool:
            each = list(pool.map(self._score, pictures, texts))
        return [sum(each[i : i + frames]) / frames for i in range(0, len(each), frames)]

    def _score(self, picture: Image.Image, prompt: str) -> float:
        text = self._model.found([picture], prompt)
        try:
            return math.nan if text is None else float(text) / 5
        except ValueError:
            return math.nan


class Preference:
    """Win rate of each picture against the others of its group, in [0, 1] (Pref-GRPO).

    Every pair is shown once, the earlier picture first; an answer without a choice counts for
    neither, and a picture without any answer is NaN. Source: arXiv 2508.20751 and
    CodeGoat24/Pref-GRPO, `train_flux_pref_grpo.py`, with UnifiedReward-Think.
    """

    def __init__(self, settings: Settings, timeout: float | None = None) -> None:
        self._model = _Model(settings, timeout, COMPARE)

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[Any]) -> list[float]:
        """Win rates of the pictures `(B, C, H, W)` of one prompt; RewardError for several."""
        if len(set(prompts)) > 1:
            raise RewardError(
                "reward `preference` compares pictures of one prompt, not of several."
            )
        if images.ndim != 4:
            raise RewardError("reward `preference` compares pictures, and these are videos.")
        pictures = as_pictures(images)
        pairs = list(combinations(range(len(pictures)), 2))
        with ThreadPoolExecutor(self._model.at_once) as pool:
            chosen = list(
                pool.map(lambda ab: self._model.found([pictures[i] for i in ab], prompts[0]), pairs)
            )
        wins, games = [0] * len(pictures), [0] * len(pictures)
        for (a, b), choice in zip(pairs, chosen, strict=True):
            if choice in ("1", "2"):
                wins[a if choice == "1" else b] += 1
                games[a] += 1
                games[b] += 1
        return [w / g if g else math.nan for w, g in zip(wins, games, strict=True)]
