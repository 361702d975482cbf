"""Built-in rewards by name: which settings each reads, and which weights it takes by default.

Plain data, so that settings are checked before anything heavy is imported; `rewards`,
`reward_clip`, `reward_vision` and `reward_judge` have the code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

CLIP_L = "openai/clip-vit-large-patch14"
CLIP_H = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"

HUB_FILE = re.compile(r"\w[\w.-]*/[\w.-]+/[\w./-]+")
"""A file of the hub: owner/repository/file."""

PLACEMENT = ("device", "dtype", "offload")
"""What a reward with a network of its own may be told besides."""

OPTIONS = (
    *("model", "weights", "tokenizer", "clip", "url", "template", "pattern", "reference"),
    *PLACEMENT,
)
"""Settings of a reward that only some rewards read."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What one built-in reward is: the `options` it reads, `needs` without a default, `defaults`.

    `network`: it loads one, which `device`, `dtype` and `offload` place. `groupwise`: it sees all
    pictures of a prompt at once. `batches`: it reads `batch_size` itself.
    """

    options: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    defaults: dict[str, str] = field(default_factory=dict)
    network: bool = False
    groupwise: bool = False
    batches: bool = False

    @property
    def reads(self) -> tuple[str, ...]:
        """All of `OPTIONS` that it reads."""
        return (*self.options, *(PLACEMENT if self.network else ()))


CATALOGUE: dict[str, Entry] = {
    "ocr": Entry(),
    "ocr_log_prob": Entry(),
    "ocr_exact": Entry(),
    "jpeg_compressibility": Entry(),
    "jpeg_incompressibility": Entry(),
    "pickscore": Entry(
        ("model", "tokenizer"),
        defaults={"model": "yuvalkirstain/PickScore_v1", "tokenizer": CLIP_H},
        network=True,
        batches=True,
    ),
    "hpsv2": Entry(
        ("model", "weights", "tokenizer"),
        defaults={"model": CLIP_H, "weights": "xswu/HPSv2/HPS_v2.1_compressed.pt"},
        network=True,
        batches=True,
    ),
    "hpsv3": Entry(
        ("model", "weights", "template"),
        needs=("template",),
        defaults={
            "model": "Qwen/Qwen2-VL-7B-Instruct",
            "weights": "MizzenAI/HPSv3/HPSv3.safetensors",
        },
        network=True,
        batches=True,
    ),
    "imagereward": Entry(
        ("weights", "tokenizer"),
        defaults={
            "weights": "THUDM/ImageReward/ImageReward.pt",
            "tokenizer": "google-bert/bert-base-uncased",
        },
        network=True,
        batches=True,
    ),
    "clipscore": Entry(
        ("model", "tokenizer"), defaults={"model": CLIP_L}, network=True, batches=True
    ),
    "aesthetic": Entry(
        ("model", "weights"),
        defaults={
            "model": CLIP_L,
            "weights": "trl-lib/ddpo-aesthetic-predictor/aesthetic-model.pth",
        },
        network=True,
        batches=True,
    ),
    "similarity": Entry(
        ("model", "reference"), defaults={"model": CLIP_L, "reference": "image"}, network=True
    ),
    "geneval": Entry(
        ("model", "clip"),
        defaults={"model": "hustvl/yolos-base", "clip": CLIP_L},
        network=True,
        batches=True,
    ),
    "judge": Entry(
        ("url", "model", "template", "pattern"),
        needs=("url", "model"),
        defaults={"pattern": r"Final Score:\s*([0-9]+(?:\.[0-9]+)?)"},
        batches=True,
    ),
    "preference": Entry(
        ("url", "model", "template", "pattern"),
        needs=("url", "model"),
        defaults={"pattern": r"Image ([12]) is better"},
        groupwise=True,
    ),
    "videoalign": Entry(("url",), needs=("url",)),
}

REMOTE = ("geneval", "videoalign")
"""Names that stand for a server of the usual form where `url` is set."""

WITHOUT_PROMPT = ("jpeg_compressibility", "jpeg_incompressibility", "aesthetic", "similarity")
"""Rewards that look at the picture only."""
