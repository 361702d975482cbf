"""A text recogniser: what is written in a picture, and how likely a wanted text is.

PP-OCRv6's recognition network, read straight from the file that the package rapidocr ships, by
ONNX Runtime; a line of text is the whole picture, so there is no detection step.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import LeanError, RewardError

MODEL_FILE = "PP-OCRv6_rec_small.onnx"
HEIGHT = 48  # pixels; the recogniser was trained on lines of this height
MIN_WIDTH = 16  # pixels; narrower leaves the network a single step
BATCH = 16  # pictures in one pass; larger ones are no faster on a CPU
FLOOR = -20.0  # lowest log-probability per character


class Reading(NamedTuple):
    """What the recogniser sees in one picture: `text`, and `log_prob` of the text asked for."""

    text: str
    log_prob: float


class Recogniser:
    """PP-OCRv6's text recogniser (rapidocr's file, run by onnxruntime): a picture is one line.

    The whole canvas is resized to 48 pixels high at its own aspect, so the text should fill it;
    a network step is 8 pixels of that width, and a character takes at least one.
    Raises LeanError if onnxruntime or the model file is missing.
    """

    def __init__(self, num_threads: int = 1) -> None:
        model = model_file()
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(
            str(model), options, providers=["CPUExecutionProvider"]
        )
        characters = self._session.get_modelmeta().custom_metadata_map["character"].split("\n")
        # Class 0 is CTC's blank; the space is not in the list and comes last.
        self._characters = ["", *characters, " "]
        self._classes = {c: i for i, c in enumerate(self._characters) if i}
        self.num_threads = num_threads

    def read(self, images: Tensor, texts: Sequence[str]) -> list[Reading]:
        """Read `(B, C, H, W)` pictures and rate the B `texts`.

        `log_prob` is the CTC log-probability of the text divided by its length, in [-20, 0]. The
        floor keeps it finite where a float32 softmax has rounded to zero.
        Raises RewardError for a text with an unknown character or too long for the canvas.
        """
        readings: list[Reading] = []
        for start in range(0, len(texts), BATCH):
            lines = _lines(images[start : start + BATCH])
            (probabilities,) = self._session.run(None, {"x": lines})
            for steps, text in zip(probabilities, texts[start : start + BATCH], strict=True):
                readings.append(Reading(self._decode(steps), self._log_prob(steps, text)))
        return readings

    def classes(self, text: str) -> list[int]:
        """The network's class of each character. Raises RewardError for one it does not have."""
        unknown = [c for c in text if c not in self._classes]
        if unknown:
            raise RewardError(
                f"the text recogniser has no character {unknown[0]!r}, so no picture can be read "
                f'as "{text}". Write the text without it.'
            )
        return [self._classes[c] for c in text]

    def _decode(self, steps: npt.NDArray[np.float32]) -> str:
        """Greedy CTC: the likeliest class of each step, repeats merged, blanks dropped."""
        best = steps.argmax(axis=-1)
        fresh = np.concatenate(([True], best[1:] != best[:-1]))
        return "".join(self._characters[i] for i in best[fresh])

    def _log_prob(self, steps: npt.NDArray[np.float32], text: str) -> float:
        labels = self.classes(text)
        needed = len(labels) + sum(a == b for a, b in pairwise(labels))
        if needed > len(steps):
            raise RewardError(
                f'the text "{text}" takes {needed} steps of the recogniser, and a picture of this '
                f"shape has {len(steps)} (6 for a square). Use a shorter text or wider pictures."
            )
        # CTC looks only at the blank and the text's own classes: five columns, not 18710.
        columns = [0, *sorted(set(labels))]
        logs = np.log(np.maximum(steps[:, columns].astype(np.float64), 1e-45))
        loss = F.ctc_loss(
            torch.from_numpy(logs)[:, None],
            torch.tensor([[columns.index(i) for i in labels]]),
            torch.tensor([len(logs)]),
            torch.tensor([len(labels)]),
            reduction="sum",
        )
        return max(-loss.item() / len(labels), FLOOR)


def model_file() -> Path:
    """Where rapidocr keeps the recogniser. Nothing of rapidocr is imported: it would need cv2."""
    spec = importlib.util.find_spec("rapidocr")
    folders = spec.submodule_search_locations if spec else None
    if not folders or importlib.util.find_spec("onnxruntime") is None:
        missing = "rapidocr" if not folders else "onnxruntime"
        raise LeanError(
            f"the `ocr` rewards need the package {missing}, which is not installed. "
            'Run: pip install "leangrpo[ocr]"'
        )
    found = [path for folder in folders if (path := Path(folder) / "models" / MODEL_FILE).is_file()]
    if not found:
        raise LeanError(
            f"the installed rapidocr has no file models/{MODEL_FILE}, which the `ocr` rewards "
            'read. Run: pip install "leangrpo[ocr]" "rapidocr>=3.10"'
        )
    return found[0]


def _lines(images: Tensor) -> npt.NDArray[np.float32]:
    """`(B, C, H, W)` in [0, 1] as the network takes it: `(B, 3, 48, W')`, BGR, in [-1, 1]."""
    height, width = images.shape[-2:]
    size = (HEIGHT, max(MIN_WIDTH, round(HEIGHT * width / height)))
    resized = F.interpolate(rgb(images), size, mode="bicubic", antialias=True).clamp(0, 1)
    return np.ascontiguousarray(((resized.flip(1) - 0.5) / 0.5).numpy())


def rgb(images: Tensor) -> Tensor:
    """`(N, 3, H, W)` from grey or colour pictures."""
    channels = images.shape[1]
    if channels not in (1, 3):
        raise RewardError(f"pictures have {channels} channels, and 1 (grey) or 3 (RGB) are needed.")
    return images.expand(-1, 3, -1, -1)


_recogniser: Recogniser | None = None
_recogniser_lock = threading.Lock()


def recogniser(num_threads: int | None = None) -> Recogniser:
    """The process's one recogniser, made at first use; `num_threads` (first: 1) remakes it.

    A session may be run from several threads at once, so one is enough.
    """
    global _recogniser
    with _recogniser_lock:
        if _recogniser is None or num_threads not in (None, _recogniser.num_threads):
            _recogniser = Recogniser(num_threads or 1)
        return _recogniser
