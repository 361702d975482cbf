"""Held-out evaluation: what changes from one to the next is the policy, and nothing else."""

from __future__ import annotations

import json
import math
from typing import Any, ClassVar
from unittest import mock

import pytest
import tiny
import torch
from torch import Tensor

from leangrpo.data import SampleKey
from leangrpo.datasets import Example
from leangrpo.evaluation import EXACT, Evaluation, evaluate
from leangrpo.loading import make_trainable
from leangrpo.parallel import World
from leangrpo.policy import Policy, Sampling
from leangrpo.scoring import Scorer

PROMPTS = ("a cat", "a dog", "a cup", "a car", "a hat")
EXAMPLES = [Example(prompt) for prompt in PROMPTS]


def brightness(images: Tensor, prompts: list[str], metadata: list[Any]) -> Tensor:
    return images.mean(dim=(1, 2, 3))


def length(images: Tensor, prompts: list[str], metadata: list[Any]) -> list[float]:
    return [math.nan if prompt == "a cup" else float(len(prompt)) for prompt in prompts]


@pytest.fixture(scope="module")
def policy() -> Policy:
    pipe = tiny.tiny_sd3()
    make_trainable(pipe, "full")
    return Policy(pipe, Sampling(2, guidance=1.0, call=dict(tiny.CALL["sd3"])), kernel="flow_sde")


def score(policy: Policy, batch: int, num_images: int = 5) -> Evaluation:
    with Scorer([(brightness, 1.0)]) as scorer:
        return evaluate(policy, scorer, EXAMPLES, batch=batch, num_images=num_images)


def test_the_same_twice(policy: Policy) -> None:
    """Whatever was drawn and sampled in between."""
    first = score(policy, 2)
    torch.manual_seed(7)
    policy.sample(["a tree"], [SampleKey(3, 0, 0)], selected=[0])
    second = score(policy, 2)
    assert torch.equal(first.images, second.images)
    assert torch.equal(first.reward, second.reward)
    assert first.line(0, 0.0) == second.line(0, 0.0)


def test_the_batch_is_only_a_matter_of_speed(policy: Policy) -> None:
    one, three, all_ = score(policy, 1), score(policy, 3), score(policy, 99)
    assert one.prompts == three.prompts == PROMPTS
    assert len(one.images) == len(three.images) == 5
    torch.testing.assert_close(three.images, one.images, rtol=0, atol=1e-5)
    torch.testing.assert_close(all_.images, one.images, rtol=0, atol=1e-5)
    torch.testing.assert_close(three.reward, one.reward, rtol=0, atol=1e-6)
    assert len({round(r, 9) for r in one.reward.tolist()}) == 5, "each prompt has noise of its own"


@pytest.mark.parametrize(("num", "batch"), [(0, 2), (1, 2), (2, 2), (3, 2), (5, 2), (9, 2), (2, 9)])
def test_the_first_pictures_are_kept(num: int, batch: int, policy: Policy) -> None:
    found = score(policy, batch, num)
    assert len(found.images) == min(num, 5)
    if num:
        assert torch.equal(found.images, score(policy, batch).images[:num])


def test_the_weights_are_left_alone(policy: Policy) -> None:
    version = policy.version
    for p in policy.parameters:
        p.grad = torch.ones_like(p)
    score(policy, 5)
    assert policy.version == version
    assert all(bool((p.grad == 1).all()) for p in policy.parameters if p.grad is not None)
    assert all(p.requires_grad for p in policy.parameters)
    for p in policy.parameters:
        p.grad = None


def test_line(policy: Policy) -> None:
    """A missing score is left out of the mean, and there is no `exact` without `ocr_exact`."""
    with Scorer([(brightness, 2.0), (length, 0.0)], on_bad="exclude") as scorer:
        found = evaluate(policy, scorer, EXAMPLES, batch=2)
    line = json.loads(json.dumps(found.line(4, 1.5)))
    assert (line["update"], line["seconds"], line["num_prompts"]) == (4, 1.5, 5)
    assert line["exact"] is None
    assert line["rewards"]["length"] == 5.0
    assert line["reward"] == pytest.approx(2 * line["rewards"]["brightness"])
    assert [row["prompt"] for row in line["per_prompt"]] == list(PROMPTS)
    assert {row["exact"] for row in line["per_prompt"]} == {None}


def test_exact() -> None:
    exact = torch.tensor([1.0, 0.0, math.nan], dtype=torch.float64)
    reward = torch.tensor([0.5, 0.1, 0.3], dtype=torch.float64)
    found = Evaluation(("a", "b", "c"), reward, {EXACT: exact}, torch.empty(0))
    line = found.line(0, 0.0)
    assert line["exact"] == 0.5
    assert [row["exact"] for row in line["per_prompt"]][:2] == [1.0, 0.0]


class Recorded(World):
    """A rank of several without the others: what is gathered is put down for the first."""

    said: ClassVar[list[Any]] = []

    def gather(self, value: Any) -> list[Any]:
        self.said.append(value)
        return list(reversed(self.said)) if self.is_main else []


@pytest.mark.parametrize(("size", "batch"), [(2, 2), (2, 1), (4, 2), (4, 1), (3, 99)])
def test_ranks_share_the_batches(size: int, batch: int, policy: Policy) -> None:
    """Each prompt is scored once, with the pictures of a single process, in as many forwards on
    every rank."""
    Recorded.said.clear()
    calls = []
    with Scorer([(brightness, 1.0)]) as scorer:
        for rank in reversed(range(size)):
            world = Recorded(rank, size)
            num, sample = [0], policy.sample

            def counted(*args: Any, num: list[int] = num, sample: Any = sample, **kw: Any) -> Any:
                num[0] += 1
                return sample(*args, **kw)

            with mock.patch.object(policy, "sample", counted):
                found = evaluate(policy, scorer, EXAMPLES, batch=batch, num_images=3, world=world)
            assert (found is None) == (rank > 0)
            calls.append(num[0])
    assert found is not None
    assert len(set(calls)) == 1
    expected = score(policy, batch, 3)
    assert torch.equal(found.reward, expected.reward)
    assert torch.equal(found.images, expected.images)
    assert found.line(0, 0.0) == expected.line(0, 0.0)
