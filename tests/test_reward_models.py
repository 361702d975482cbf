"""Placement, batches and scales of rewards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from leangrpo.errors import LeanError, RewardError
from leangrpo.reward_models import Batched, ModelReward, Scaled, as_pictures, per_sample
from leangrpo.scoring import Scorer
from leangrpo.settings import Reward


def test_networks_are_placed_before_and_after() -> None:
    network = nn.Linear(1, 1)
    moves: list[str] = []
    network.to = lambda *a, **k: moves.append(str(a[0] if a else k["dtype"])) or network  # type: ignore

    def score(pictures, prompts, metadata):
        moves.append(f"call of {len(pictures)}")
        return torch.zeros(len(pictures))

    settings = Reward(name="clipscore", device="cpu", offload=True, batch_size=2, dtype="bfloat16")
    reward = ModelReward(settings, [network], score)
    assert moves == ["torch.bfloat16", "cpu"]
    moves.clear()
    assert reward(torch.rand(5, 3, 4, 4), ["a"] * 5, [{}] * 5).shape == (5,)
    assert moves == ["cpu", "call of 2", "call of 2", "call of 1", "cpu"]

    def fail(pictures, prompts, metadata):
        raise RewardError("no")

    moves.clear()
    with pytest.raises(RewardError):
        ModelReward(settings, [network], fail)(torch.rand(1, 3, 4, 4), ["a"], [{}])
    assert moves[-1] == "cpu"  # it waits there after a failure as well


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(LeanError, match="torch sees no CUDA device"):
        ModelReward(Reward(name="clipscore", device="cuda:0"), [], lambda *a: torch.zeros(1))


def test_pictures_are_rounded_to_eight_bits() -> None:
    images = torch.tensor([0.0, 1.0, 0.4999, 127.6 / 255, 2.0]).view(1, 1, 1, 5)
    found = as_pictures(images)[0]
    assert found.mode == "RGB"
    assert [found.getpixel((x, 0))[0] for x in range(5)] == [0, 255, 127, 128, 255]


def test_batched_and_scaled() -> None:
    sizes = []

    def count(images, prompts, metadata):
        sizes.append(len(prompts))
        return images.flatten(1).sum(1)

    images = torch.arange(5.0).view(5, 1, 1, 1)
    assert Batched(count, 2)(images, ["a"] * 5, [{}] * 5) == [0, 1, 2, 3, 4]
    assert sizes == [2, 2, 1]
    assert Scaled(count, 1.0, 2.0)(images, ["a"] * 5, [{}] * 5).tolist() == [-0.5, 0, 0.5, 1, 1.5]


def test_the_settings_reach_the_scores() -> None:
    plain = Reward(name="jpeg_compressibility")
    flow_grpo = Reward(name="jpeg_compressibility", normalise=(0, 500), batch_size=1, weight=3)
    images = torch.rand(3, 3, 8, 8)
    with Scorer([(plain, 1.0)]) as one, Scorer([(flow_grpo, 3.0)]) as other:
        a, b = one(images, ["x"] * 3), other(images, ["x"] * 3)
    name = "jpeg_compressibility"
    assert torch.equal(b.each[name], a.each[name] / 500)
    assert torch.equal(b.total, 3 * b.each[name])
    assert b.latency[name] > 0 and not one.groupwise


def test_metadata_that_is_missing() -> None:
    assert per_sample("it", [{"a": 1}, {"a": 2}], "a") == [1, 2]
    with pytest.raises(RewardError, match=r"needs metadata\['a'\]"):
        per_sample("it", [{"a": 1}, {}], "a")
