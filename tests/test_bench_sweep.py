"""A setting through several values: every point is checked first, and each is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_cli import complaint, leangrpo

from leangrpo.bench_sweep import points, values
from leangrpo.errors import LeanError

SMALL = ["rollout.generations=2", "rollout.micro_batch=2", "sampling.steps=2"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.2:1.0", ["0.2", "0.4", "0.6", "0.8", "1.0"]),
        ("1:0", ["1", "0.75", "0.5", "0.25", "0"]),
        ("4:10:3", ["4", "7", "10"]),
        ("4:10:4", ["4", "8"]),
        ("0.1:0.5:0.2", ["0.1", "0.3", "0.5"]),
        ("float32, bfloat16", ["float32", "bfloat16"]),
        ("[0, 1],[1, 2]", ["[0, 1]", "[1, 2]"]),
        ("embedded:reward", ["embedded:reward"]),
    ],
)
def test_values(text: str, expected: list[str]) -> None:
    assert values(text) == expected


@pytest.mark.parametrize("text", ["1:1", "1:2:0", "1:2:-1", "0:1:0.0001"])
def test_a_range_that_is_none(text: str) -> None:
    with pytest.raises(LeanError, match="--sweep"):
        values(text)


def test_fraction_brings_what_it_needs() -> None:
    for point in points(SMALL, "fraction=0.5,1"):
        chosen = point.config.selection
        assert (chosen.rule, chosen.last, chosen.steps) == ("fraction", True, None)
        assert chosen.fraction == point.value
    (one,) = points([*SMALL, "selection.rule=random", "selection.last=false"], "fraction=0.5")
    assert (one.config.selection.rule, one.config.selection.last) == ("random", False)
    (one,) = points([*SMALL, "selection={rule: random}"], "fraction=0.5")
    assert one.config.selection.fraction == 0.5


def test_values_are_those_of_the_settings() -> None:
    found = points(SMALL, "rollout.micro_batch=1,2")
    assert [point.value for point in found] == [1, 2]
    found = points(SMALL, "rewards.0.weight=1:3:1")
    assert [point.value for point in found] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("sweep", "said"),
    [
        ("fraction", "KEY=V,V,..."),
        ("fraction=", "KEY=V,V,..."),
        ("fraction=0.5,2", "--sweep fraction=2: `selection.fraction` is 2"),
        ("rollout.generations=2:7", "--sweep rollout.generations=3.25"),
        ("rollout.micro_batch=1,3", "--sweep rollout.micro_batch=3"),
        ("sampling.step=3", "--sweep sampling.step=3"),
    ],
)
def test_refused_before_any_point_is_run(
    sweep: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        pytest.fail("a point was run")

    monkeypatch.setattr("leangrpo.bench_sweep.measure", fail)
    words = [*SMALL, "selection.rule=fraction"]
    assert said in complaint(leangrpo("bench", *words, "--sweep", sweep))


def test_a_row_of_every_value_and_schedule(tmp_path: Path) -> None:
    file = tmp_path / "sweep.json"
    options = ["--rounds", 1, "--schedules", "native,reweight", "--json", file]
    ended = leangrpo("bench", *SMALL, "--sweep", "fraction=0.5,1", *options)
    assert ended.code == 0
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["sweep"] == "fraction"
    assert [(p["value"], p["selected"]) for p in result["points"]] == [(0.5, 1), (1, 2)]
    for point in result["points"]:
        assert [row["schedule"] for row in point["rows"]] == ["native", "reweight"]
    assert "2 of 2" in ended.out and "left out: decode" in ended.out
