"""The race to a target reward: runs in turn, when they get there, and the drawing of it."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import tiny
from torch import Tensor

from leangrpo import race as race_module
from leangrpo.config import Config, load_config
from leangrpo.errors import LeanError
from leangrpo.race import COLUMNS, curves, draw, race, reached, targets, time_to_target, verdict


def darkness(images: Tensor, prompts: list[str], metadata: list[Any]) -> Tensor:
    return -images.mean(dim=(1, 2, 3))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Two updates of a tiny Stable Diffusion 3, scored at every one."""
    folder = tmp_path_factory.mktemp("model")
    tiny.save(tiny.tiny_sd3(), folder / "sd3")
    (folder / "prompts.txt").write_text("a cat\na dog\na cup\n", encoding="utf-8")
    words = [
        f"model.pipeline={folder / 'sd3'}",
        f"prompts={{train: '{folder / 'prompts.txt'}', heldout: '{folder / 'prompts.txt'}'}}",
        "rollout={prompts: 2, generations: 2, micro_batch: 2}",
        "sampling={steps: 3, height: 16, width: 16, call: {max_sequence_length: 16}}",
        "selection={rule: fraction, fraction: 1.0, steps: null}",
        "evaluation={every: 1, rewards: []}",
        "rewards=[{name: 'test_race:darkness'}]",
        "optimizer.lr=1e-3",
        "updates=2",
    ]
    return load_config("embedded", words)


@pytest.fixture(scope="module")
def result(config: Config) -> dict[str, Any]:
    return race(config, schedules=["native", "retain"], seeds=[3], target=1.0, say=lambda _: None)


def test_rows_come_in_turn(result: dict[str, Any]) -> None:
    rows = result["rows"]
    turns = [(r["seed"], r["update"], r["schedule"]) for r in rows]
    assert turns == [(3, u, name) for u in range(3) for name in ("native", "retain")]
    for name in ("native", "retain"):
        own = [r for r in rows if r["schedule"] == name]
        assert own[0]["seconds"] == 0.0
        assert own[0]["reward"] is None
        assert own[0]["seconds"] < own[1]["seconds"] < own[2]["seconds"]
        assert None not in [r["reward"] for r in own[1:]]
        assert len({r["heldout"] for r in own}) == 3  # it trained


def test_native_and_retain_earn_the_same_rewards_bit_by_bit(result: dict[str, Any]) -> None:
    earned: dict[str, list[Any]] = {"native": [], "retain": []}
    for r in result["rows"]:
        earned[r["schedule"]].append((r["update"], r["reward"], r["heldout"]))
    assert earned["native"] == earned["retain"]


def test_nobody_got_there(result: dict[str, Any]) -> None:
    assert [t["seconds"] for t in result["times"]] == [None, None]
    assert result["ratios"]["retain"] == {"mean": None, "each": [None]}
    assert "no ratio" in verdict(result)
    assert "retain with seed 3" in verdict(result)


def test_a_target_that_is_no_target(config: Config) -> None:
    with pytest.raises(LeanError, match=r"`target` is 0.0.*above 0"):
        race(config, schedules=["native"], seeds=[3], target=0.0)


@pytest.mark.parametrize(
    ("schedules", "seeds", "setting"),
    [
        (["natve"], [0], "schedules"),
        ([], [0], "schedules"),
        (["native", "native"], [0], "schedules"),
        (["native"], [], "seeds"),
        (["native"], [1, 1], "seeds"),
    ],
)
def test_refused(config: Config, schedules: list[str], seeds: list[int], setting: str) -> None:
    with pytest.raises(LeanError, match=f"`{setting}` is "):
        race(config, schedules=schedules, seeds=seeds)


@pytest.mark.parametrize(
    ("ys", "expected"),
    [
        ([0.0, 1.0, 3.0], 15.0),  # halfway between 1 and 3
        ([0.0, 2.0, 3.0], 10.0),  # exactly at a point
        ([0.0, 4.0, 1.0], 5.0),  # the first time counts, whatever comes after
        ([2.5, 1.0, 3.0], 0.0),
        ([0.0, 1.0, 1.9], None),
        ([], None),
    ],
)
def test_reached(ys: list[float], expected: float | None) -> None:
    assert reached([0.0, 10.0, 20.0][: len(ys)], ys, 2.0) == expected


def made(seed: int, name: str, pace: float, rewards: list[float]) -> list[dict[str, Any]]:
    """Rows of a run whose updates take `pace` seconds, scored at every second one."""
    values = [
        (seed, name, u, u * pace, float(u) if u else None, reward if u % 2 == 0 else None)
        for u, reward in enumerate(rewards)
    ]
    return [dict(zip(COLUMNS, one, strict=True)) for one in values]


def made_result(
    rows: list[dict[str, Any]], seeds: list[int], target: float | None = 3.0
) -> dict[str, Any]:
    names = ["native", "reweight"]
    about = {"recipe": "made", "train": "lora", "steps": 3, "prompts": 2, "generations": 4}
    return {
        **about,
        "micro_batch": 2,
        "updates": 4,
        "target": target,
        "schedules": names,
        "seeds": seeds,
        "rows": rows,
        **time_to_target(rows, names, seeds, target),
    }


UP = [0.0, 9.0, 2.0, 9.0, 4.0]  # what is not scored counts for nothing: 3 is reached at update 3
FLAT = [0.0, 9.0, 2.0, 9.0, 2.5]


def test_a_target_of_each_seed() -> None:
    """The most that all its schedules gained, so that each gets there; a seed's own."""
    higher = [0.0, 0.0, 3.0, 0.0, 6.0]
    rows = [*made(0, "native", 3.0, UP), *made(0, "reweight", 2.0, FLAT)]
    rows += [*made(1, "native", 4.0, higher), *made(1, "reweight", 2.0, higher)]
    result = made_result(rows, [0, 1], None)
    assert targets(result) == [2.5, 6.0]
    assert [t["target"] for t in result["times"]] == [2.5, 2.5, 6.0, 6.0]
    assert [t["update"] for t in result["times"]] == [2.5, 4.0, 4.0, 4.0]
    assert result["ratios"]["reweight"]["each"] == [7.5 / 8.0, 2.0]


def test_a_seed_that_gains_nothing_has_no_target(tmp_path: Path) -> None:
    rows = [*made(0, "native", 3.0, [0.0] * 5), *made(0, "reweight", 2.0, UP)]
    result = made_result(rows, [0], None)
    assert targets(result) == []
    assert result["ratios"]["reweight"] == {"mean": None, "each": [None]}
    image, _ = draw(result, tmp_path)
    assert "no ratio" in image.read_text(encoding="utf-8")


@pytest.fixture
def made_up() -> dict[str, Any]:
    rows = [*made(0, "native", 3.0, UP), *made(0, "reweight", 2.0, UP)]
    rows += [*made(1, "native", 4.0, UP), *made(1, "reweight", 2.0, UP)]
    return made_result(rows, [0, 1])


def test_ratios_of_made_up_curves(made_up: dict[str, Any]) -> None:
    assert [t["seconds"] for t in made_up["times"]] == [9.0, 6.0, 12.0, 6.0]
    assert [t["update"] for t in made_up["times"]] == [3.0] * 4
    assert made_up["ratios"]["reweight"] == {"mean": 1.75, "each": [1.5, 2.0]}
    assert "reweight reaches the target 1.75x sooner than native" in verdict(made_up)
    assert "1.50x to 2.00x" in verdict(made_up)


def test_one_seed_that_never_gets_there_leaves_no_ratio() -> None:
    rows = [*made(0, "native", 3.0, UP), *made(0, "reweight", 2.0, UP)]
    rows += [*made(1, "native", 4.0, FLAT), *made(1, "reweight", 2.0, UP)]
    result = made_result(rows, [0, 1])
    assert result["ratios"]["reweight"] == {"mean": None, "each": [1.5, None]}
    assert verdict(result) == ("reweight: no ratio, as native with seed 1 never reached the target")


def test_drawing(made_up: dict[str, Any], tmp_path: Path) -> None:
    image, data = draw(made_up, tmp_path / "out", command="leangrpo bench --paper --out out")
    with data.open(encoding="utf-8") as file:
        read = list(csv.DictReader(file))
    written = [{k: "" if v is None else str(v) for k, v in r.items()} for r in made_up["rows"]]
    assert read == written
    text = image.read_text(encoding="utf-8")
    for words in ("native", "reweight", "1.75x sooner", "leangrpo bench --paper --out out"):
        assert words in text


def test_the_drawing_of_a_race_that_nobody_won(result: dict[str, Any], tmp_path: Path) -> None:
    image, _ = draw(result, tmp_path)
    assert "no ratio" in image.read_text(encoding="utf-8")


def test_curves(made_up: dict[str, Any]) -> None:
    rows = made_up["rows"]
    next(r for r in rows if (r["seed"], r["schedule"], r["update"]) == (1, "native", 2))[
        "heldout"
    ] = 1.0
    assert curves(made_up, "native", "heldout") == {
        "update": [0, 2, 4],
        "seconds": [0.0, 7.0, 14.0],
        "mean": [0.0, 1.5, 4.0],
        "lowest": [0.0, 1.0, 4.0],
        "highest": [0.0, 2.0, 4.0],
    }


def test_the_default_race_is_of_the_embedded_pipeline() -> None:
    """Its settings are read without a model, and train every step that has noise but the last."""
    config = load_config(race_module.RECIPE, race_module.SETTINGS)
    assert config.model.pipeline == "embedded"
    assert (config.selection.rule, config.selection.fraction) == ("fraction", 1.0)


def test_the_target_is_a_gain() -> None:
    """Where a seed begins changes neither its time nor its curve of held-out reward."""
    low, high = UP, [reward + 5.0 for reward in UP]
    one, other = (
        made_result([*made(0, "native", 3.0, ys), *made(0, "reweight", 2.0, ys)], [0])
        for ys in (low, high)
    )
    assert one["times"] == other["times"]
    for name in ("native", "reweight"):
        assert curves(one, name, "heldout") == curves(other, name, "heldout")
