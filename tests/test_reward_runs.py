"""Runs with several rewards: weights, a server, evaluation only, whole groups, what is logged."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from leangrpo.config import Config, load_config
from leangrpo.report import read_run
from leangrpo.serve import RewardServer
from leangrpo.settings import Reward
from leangrpo.train import train

SEEN: list[tuple[int, set[str]]] = []


def brightness(images: Tensor, prompts: list[str], metadata: list[Any]) -> Tensor:
    return images.mean(dim=(1, 2, 3))


def rank(images: Tensor, prompts: list[str], metadata: list[Any]) -> Tensor:
    """The place of each picture in its group by brightness, from 0 to 1."""
    SEEN.append((len(prompts), set(prompts)))
    bright = images.mean(dim=(1, 2, 3))
    return bright.argsort().argsort() / (len(bright) - 1)


def config(folder: Path, *words: str) -> Config:
    return load_config(
        "embedded",
        [
            "rollout={prompts: 2, generations: 3, micro_batch: 1}",
            "sampling.steps=3",
            "selection={rule: fraction, fraction: 1.0, steps: null}",
            "evaluation={prompts: 2, grid: 2, rewards: []}",
            "updates=1",
            f"run.dir={folder}",
            *words,
        ],
    )


def test_three_rewards_one_of_them_on_a_server(tmp_path: Path) -> None:
    served = Reward(name="test_reward_runs:brightness", normalise=(0.5, 0.1))
    with RewardServer(served, port=0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        rewards = (
            f"rewards=[{{name: ocr, weight: 2}}, {{name: '{server.url}', weight: 0.5}}, "
            "{name: jpeg_compressibility, normalise: [0, 500], batch_size: 2}, "
            "{name: ocr_exact, evaluate_only: true}]"
        )
        train(config(tmp_path / "run", rewards, "advantage.rewards=gdpo"), quiet=True)
        server.shutdown()
        thread.join()
    run = read_run(tmp_path / "run")
    line = run.metrics[0]
    names = ["ocr", server.url, "jpeg_compressibility"]
    assert list(line["rewards"]) == names and list(line["reward_seconds"]) == names
    assert all(seconds > 0 for seconds in line["reward_seconds"].values())
    weighed = sum(w * line["rewards"][n] for w, n in zip((2, 0.5, 1), names, strict=True))
    assert line["reward_mean"] == pytest.approx(weighed, rel=1e-9)
    assert -0.02 < line["rewards"]["jpeg_compressibility"] < 0  # kB / 500
    held = run.evaluations[0]["rewards"]
    assert set(held) == {*names, "ocr_exact"}
    weighed = sum(w * held[n] for w, n in zip((2, 0.5, 1), names, strict=True))
    assert run.evaluations[0]["reward"] == pytest.approx(weighed, rel=1e-9)


@pytest.mark.parametrize("schedule", ["retain", "reweight"])
def test_a_groupwise_reward_sees_whole_groups(tmp_path: Path, schedule: str) -> None:
    SEEN.clear()
    rewards = (
        "rewards=[{name: 'test_reward_runs:rank', groupwise: true}, "
        "{name: 'test_reward_runs:brightness', weight: 0}]"
    )
    train(config(tmp_path / "run", rewards, f"schedule={schedule}"), quiet=True)
    assert [num for num, _ in SEEN] == [3, 3]  # never one picture at a time, nor in the evaluation
    assert all(len(prompts) == 1 for _, prompts in SEEN)
    run = read_run(tmp_path / "run")
    line = run.metrics[0]
    assert line["rewards"]["test_reward_runs:rank"] == pytest.approx(0.5)
    # Ranks 0, 1/2 and 1 have a deviation of sqrt(1/6); epsilon is 1e-4.
    assert line["advantage_abs_max"] == pytest.approx(0.5 / ((1 / 6) ** 0.5 + 1e-4))
    assert line["optimizer_stepped"] and line["zero_variance_groups"] == 0
    assert list(run.evaluations[0]["rewards"]) == ["test_reward_runs:brightness"]
