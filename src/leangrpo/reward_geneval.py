"""GenEval: the objects a prompt asks for, their number, colours and places, by a detector.

Which objects is in the metadata, in GenEval's own form (djghosh13/geneval, `prompts/*.jsonl`):
`{"tag": ..., "include": [{"class": "dog", "count": 1, "color": "red",
"position": ["left of", 0]}], "exclude": [...]}`. Published with Mask2Former by mmdet, whose masks
grey the background of what is shown to the colour classifier; here any detector of transformers
finds boxes, so that the background inside a box is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from .errors import RewardError
from .reward_clip import Clip
from .reward_models import ModelReward, option
from .settings import Reward as Settings
from .weights import model, pretrained

COLORS = (
    *("red", "orange", "yellow", "green", "blue"),
    *("purple", "pink", "brown", "black", "white"),
)
THRESHOLD, COUNTING_THRESHOLD, MAX_OBJECTS, POSITION_THRESHOLD = 0.3, 0.9, 16, 0.1
"""GenEval's defaults (`evaluate_images.py`); the second is for the tag `counting`."""

ALIASES = {"mouse": "computer mouse", "remote": "tv remote", "keyboard": "computer keyboard"}
"""COCO's names that GenEval writes otherwise."""

Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Found:
    """A detected object: its box (left, top, right, bottom) in pixels, and how sure it is."""

    box: Box
    score: float


Objects = Mapping[str, Sequence[Found]]
"""What was detected, by class, the surest first."""

Colours = Callable[[Sequence[Found], str], list[str]]
"""The colour of each of some objects of a class."""


def strict_score(objects: Objects, wanted: Mapping[str, Any], colours: Colours) -> float:
    """The reward of flow_grpo's GenEval server (yifan123/reward-server, `gen_eval.py`), `scores`.

    The mean over requirements: 1 - |wanted - found| / wanted objects of each class; where the
    number is right, the same of those of the wanted colour, and 1 or 0 for the place; a colour or
    place asked of a wrong number of objects adds a 0. A place that is wrong adds a 0 and a 1, as
    theirs does. 0 without requirements.
    """
    parts: list[float] = []
    groups: list[Sequence[Found] | None] = []
    for need in wanted.get("include", []):
        name, count = need["class"], need["count"]
        found = objects.get(name, [])
        parts.append(1 - abs(count - len(found)) / count)
        matched = len(found) == count
        if not matched and ("color" in need or "position" in need):
            parts.append(0.0)
        if matched and "color" in need:
            right = colours(found, name).count(need["color"])
            parts.append(1 - abs(count - right) / count)
            matched = right == count
        if matched and "position" in need:
            relation, target = need["position"]
            others = groups[target]
            if others is None:
                parts.append(0.0)
                matched = False
            else:
                matched = all(
                    relation in relative_position(one.box, other.box)
                    for one in found
                    for other in others
                )
                parts += [1.0] if matched else [0.0, 1.0]
        groups.append(found if matched else None)
    return sum(parts) / len(parts) if parts else 0.0


def relative_position(a: Box, b: Box) -> set[str]:
    """Where box a lies from b: left of, right of, above, below (GenEval, `relative_position`).

    The offset of centres, less a tenth of both sizes, must make up half of the whole offset.
    """
    centre = [((a[i] + a[i + 2]) - (b[i] + b[i + 2])) / 2 for i in (0, 1)]
    sizes = [abs(a[i + 2] - a[i]) + abs(b[i + 2] - b[i]) for i in (0, 1)]
    less = [
        max(abs(c) - POSITION_THRESHOLD * s, 0.0) * (1 if c > 0 else -1)
        for c, s in zip(centre, sizes, strict=True)
    ]
    if all(abs(x) < 1e-3 for x in less):
        return set()
    whole = (centre[0] ** 2 + centre[1] ** 2) ** 0.5
    dx, dy = (x / whole for x in less)
    words = {"left of": dx < -0.5, "right of": dx > 0.5, "above": dy < -0.5, "below": dy > 0.5}
    return {word for word, holds in words.items() if holds}


def detections(
    logits: Tensor, boxes: Tensor, size: tuple[int, int], names: Mapping[int, str], threshold: float
) -> dict[str, list[Found]]:
    """A DETR-like detector's output for one picture: objects above `threshold`, 16 a class.

    `logits` `(Q, C)` of as many classes as `names` has are independent (sigmoid), of one more a
    softmax whose last class is nothing; `boxes` `(Q, 4)` are centre and size, in shares of `size`
    (width, height).
    """
    extra = logits.shape[-1] > len(names)
    probabilities = logits.float().softmax(-1)[:, :-1] if extra else logits.float().sigmoid()
    scores, classes = probabilities.max(-1)
    found: dict[str, list[Found]] = {}
    for i in scores.argsort(descending=True, stable=True).tolist():
        if float(scores[i]) <= threshold:
            break
        x, y, w, h = boxes[i].float().tolist()
        box = (x - w / 2) * size[0], (y - h / 2) * size[1], (x + w / 2) * size[0]
        name = names[int(classes[i])]
        kept = found.setdefault(ALIASES.get(name, name), [])
        if len(kept) < MAX_OBJECTS:
            kept.append(Found((*box, (y + h / 2) * size[1]), float(scores[i])))
    return found


class ColourNamer:
    """Zero-shot colours by CLIP, three sentences averaged (GenEval, `color_classification`)."""

    def __init__(self, clip: Clip) -> None:
        self.clip = clip

    def __call__(self, picture: Image.Image, found: Sequence[Found], name: str) -> list[str]:
        """The colour of each object of class `name`."""
        classes = []
        for colour in COLORS:
            each = self.clip.texts(
                [
                    f"a photo of a {colour} {name}",
                    f"a photo of a {colour}-colored {name}",
                    f"a photo of a {colour} object",
                ]
            )
            mean = each.float().mean(0)
            classes.append(mean / mean.norm())
        crops = [picture.crop(_inside(one.box, picture.size)) for one in found]
        seen = self.clip.images(crops).float()
        return [COLORS[i] for i in (seen @ torch.stack(classes).T).argmax(-1).tolist()]


def _inside(box: Box, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """A box in whole pixels of the picture, one at least."""
    left = min(max(round(box[0]), 0), size[0] - 1)
    top = min(max(round(box[1]), 0), size[1] - 1)
    return (
        left,
        top,
        max(left + 1, min(round(box[2]), size[0])),
        max(top + 1, min(round(box[3]), size[1])),
    )


def geneval(settings: Settings) -> ModelReward:
    """`strict_score` of what `model` detects and `clip` names the colours of."""
    from transformers import AutoModelForObjectDetection
    from transformers.models.detr.image_processing_pil_detr import DetrImageProcessorPil

    source = option(settings, "model")
    detector: Any = model("rewards.model", source, AutoModelForObjectDetection)
    prepare = pretrained("rewards.model", source, DetrImageProcessorPil)
    about_clip = option(settings, "clip")
    clip = Clip("rewards.clip", about_clip, about_clip)
    namer = ColourNamer(clip)
    names = {int(i): str(name) for i, name in detector.config.id2label.items()}

    def score(pictures: list[Image.Image], prompts: list[str], metadata: list[Any]) -> Tensor:
        at = next(detector.parameters())
        scores = []
        for picture, about in zip(pictures, metadata, strict=True):
            check_wanted(about)
            pixels = prepare(images=[picture], return_tensors="pt")["pixel_values"]
            seen = detector(pixel_values=pixels.to(at.device, at.dtype))
            limit = COUNTING_THRESHOLD if about.get("tag") == "counting" else THRESHOLD
            objects = detections(seen.logits[0], seen.pred_boxes[0], picture.size, names, limit)
            scores.append(strict_score(objects, about, partial(namer, picture)))
        return torch.tensor(scores)

    return ModelReward(settings, [detector, clip.network], score)


def check_wanted(about: Mapping[str, Any]) -> None:
    """Raise RewardError where metadata is not of GenEval's form."""
    wanted = about.get("include")
    if not isinstance(wanted, list) or not wanted:
        raise RewardError('reward `geneval` needs metadata["include"], a list of what to find.')
    for n, need in enumerate(wanted):
        count = need.get("count") if isinstance(need, dict) else None
        if not isinstance(count, int) or count < 1 or not isinstance(need.get("class"), str):
            raise RewardError(f'metadata["include"][{n}] needs a "class" and a "count" above 0.')
        if need.get("color", COLORS[0]) not in COLORS:
            raise RewardError(f'metadata["include"][{n}]: colours are {", ".join(COLORS)}.')
        place = need.get("position")
        if place is not None and not (
            isinstance(place, list | tuple) and len(place) == 2 and place[1] in range(n)
        ):
            rule = '"position" is a relation and the number of an earlier entry'
            raise RewardError(f'metadata["include"][{n}]: {rule}.')
