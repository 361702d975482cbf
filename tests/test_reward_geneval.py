"""GenEval's rules on boxes that are known, and the whole with a random detector and CLIP."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from reward_twins import PROMPTS, clip_folder, pictures, yolos_folder
from transformers import YolosForObjectDetection
from transformers.models.detr.image_processing_pil_detr import DetrImageProcessorPil

from leangrpo.errors import RewardError
from leangrpo.reward_clip import Clip
from leangrpo.reward_geneval import (
    COLORS,
    ColourNamer,
    Found,
    check_wanted,
    detections,
    relative_position,
    strict_score,
)
from leangrpo.reward_models import as_pictures
from leangrpo.rewards import load_reward
from leangrpo.settings import Reward

LEFT, RIGHT = Found((0, 0, 10, 10), 0.9), Found((90, 0, 100, 10), 0.8)


def never(found, name):
    raise AssertionError("no colour was asked for")


@pytest.mark.parametrize(
    ("objects", "include", "colours", "score"),
    [
        ({"dog": [LEFT]}, [{"class": "dog", "count": 1}], never, 1.0),
        ({}, [{"class": "dog", "count": 2}], never, 0.0),
        ({"dog": [LEFT]}, [{"class": "dog", "count": 2}], never, 0.5),
        # Too many are as wrong as too few, and far too many worse than none.
        ({"dog": [LEFT] * 3}, [{"class": "dog", "count": 1}], never, -1.0),
        ({"dog": [LEFT]}, [{"class": "dog", "count": 1, "color": "red"}], ["red"], 1.0),
        ({"dog": [LEFT]}, [{"class": "dog", "count": 1, "color": "red"}], ["blue"], 0.5),
        # The colour of a wrong number is not looked at.
        ({"dog": [LEFT] * 2}, [{"class": "dog", "count": 1, "color": "red"}], never, 0.0),
        (
            {"dog": [LEFT], "cat": [RIGHT]},
            [
                {"class": "dog", "count": 1},
                {"class": "cat", "count": 1, "position": ["right of", 0]},
            ],
            never,
            1.0,
        ),
        (
            {"dog": [LEFT], "cat": [RIGHT]},
            [
                {"class": "dog", "count": 1},
                {"class": "cat", "count": 1, "position": ["left of", 0]},
            ],
            never,
            3 / 4,  # 1, 1, and the published 0 with a 1
        ),
        (
            {"cat": [RIGHT]},
            [
                {"class": "dog", "count": 1},
                {"class": "cat", "count": 1, "position": ["left of", 0]},
            ],
            never,
            1 / 3,
        ),
        ({}, [], never, 0.0),
    ],
)
def test_strict_score(objects, include, colours, score) -> None:
    named = colours if callable(colours) else lambda found, name: colours
    assert strict_score(objects, {"include": include}, named) == pytest.approx(score)


def test_relative_position() -> None:
    box = (40.0, 40.0, 60.0, 60.0)
    assert relative_position((0, 40, 20, 60), box) == {"left of"}
    assert relative_position((80, 40, 100, 60), box) == {"right of"}
    assert relative_position((40, 0, 60, 20), box) == {"above"}
    assert relative_position((40, 80, 60, 100), box) == {"below"}
    assert relative_position((0, 0, 20, 20), box) == {"left of", "above"}
    assert relative_position((42, 40, 62, 60), box) == set()  # 2 apart, a tenth of the sizes is 4


def test_detections_of_both_kinds_of_detectors() -> None:
    names = {0: "dog", 1: "mouse"}
    boxes = torch.tensor([[0.5, 0.5, 0.2, 0.4]] * 3)
    logits = torch.tensor([[9.0, 0.0, 0.0], [0.0, 0.0, 9.0], [0.0, 2.0, 0.0]])
    found = detections(logits, boxes, (100, 50), names, 0.3)
    assert set(found) == {"dog", "computer mouse"}  # the second query found nothing
    assert found["dog"][0].box == pytest.approx((40, 15, 60, 35))
    assert found["dog"][0].score == pytest.approx(float(logits[0].softmax(-1)[0]))
    found = detections(logits[:, :2], boxes, (100, 50), names, 0.6)
    assert [len(found[n]) for n in ("dog", "computer mouse")] == [1, 1]
    many = detections(torch.full((30, 2), 5.0), boxes[:1].expand(30, 4), (9, 9), names, 0.3)
    assert len(many["dog"]) == 16


def test_colours_are_those_of_the_nearest_sentences(tmp_path: Path) -> None:
    folder = str(clip_folder(tmp_path))
    clip = Clip("m", folder, folder)
    picture = as_pictures(pictures(1))[0]
    found = [Found((0, 0, 20, 20), 0.9), Found((30, 10, 90, 35), 0.8)]
    with torch.no_grad():
        named = ColourNamer(clip)(picture, found, "dog")
        crops = [picture.crop((0, 0, 20, 20)), picture.crop((30, 10, 52, 35))]
        seen = clip.images(crops)
        cosines = []
        for colour in COLORS:
            texts = [f"a photo of a {colour} dog", f"a photo of a {colour}-colored dog"]
            mean = clip.texts([*texts, f"a photo of a {colour} object"]).mean(0)
            cosines.append(seen @ (mean / mean.norm()))
    assert named == [COLORS[i] for i in torch.stack(cosines).argmax(0).tolist()]


def test_geneval_with_a_random_detector(tmp_path: Path) -> None:
    yolos, clip = str(yolos_folder(tmp_path / "yolos")), str(clip_folder(tmp_path / "clip"))
    reward = load_reward(Reward(name="geneval", model=yolos, clip=clip))
    images = pictures()
    detector = YolosForObjectDetection.from_pretrained(yolos).eval()
    pixels = DetrImageProcessorPil.from_pretrained(yolos)(
        images=as_pictures(images), return_tensors="pt"
    )["pixel_values"]
    with torch.no_grad():
        seen = detector(pixel_values=pixels)
    counts = []
    for logits in seen.logits:
        sure = logits.softmax(-1)[:, :-1].max(-1)
        counts.append(int(((sure.indices == 0) & (sure.values > 0.3)).sum()))
    about = [{"tag": "single_object", "include": [{"class": "dog", "count": 1}]}] * 3
    scores = reward(images, PROMPTS, about)
    assert scores.tolist() == pytest.approx([1 - abs(1 - n) for n in counts])
    colour = [{"include": [{"class": "dog", "count": max(n, 1), "color": "red"}]} for n in counts]
    assert reward(images, PROMPTS, colour).isfinite().all()
    with pytest.raises(RewardError, match="a list of what to find"):
        reward(images, PROMPTS, [{}] * 3)


@pytest.mark.parametrize(
    ("need", "text"),
    [
        ({"class": "dog"}, 'needs a "class" and a "count" above 0'),
        ({"class": "dog", "count": 0}, 'needs a "class" and a "count" above 0'),
        ({"class": "dog", "count": 1, "color": "teal"}, "colours are red, "),
        ({"class": "dog", "count": 1, "position": ["above", 0]}, "the number of an earlier entry"),
        ("dog", 'needs a "class"'),
    ],
)
def test_metadata_of_another_form(need, text: str) -> None:
    with pytest.raises(RewardError, match=text):
        check_wanted({"include": [need]})
