"""The bench command measures what it says; its ratios are not tested, as nothing timed is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cli import complaint, leangrpo

from leangrpo.bench import ABLATION, STAGES, Bench, bench, bench_variants, measure
from leangrpo.bench import _rows as rows_of
from leangrpo.config import Config, load_config
from leangrpo.errors import LeanError
from leangrpo.train import one_update

SMALL = ["rollout.generations=2", "rollout.micro_batch=2", "sampling.steps=3"]
SMALL += ["rollout.prompts=2", "selection={rule: fraction, steps: null}"]
SECONDS = ("rollout", "recompute", "backward", "sync", "other")


def small(*more: str) -> Config:
    return load_config("embedded", [*SMALL, *more])


def test_every_schedule_is_timed_by_stage(capsys: pytest.CaptureFixture[str]) -> None:
    result = bench(small(), ["retain", "native", "reweight"], rounds=1)
    rows = {row["schedule"]: row for row in result["rows"]}
    assert list(rows) == ["retain", "native", "reweight"]
    assert result["includes"] == [*SECONDS] and result["prompts"] == 1
    assert rows["retain"]["speedup"] == 1
    assert rows["native"]["recompute"] > 0
    assert rows["retain"]["recompute"] == rows["reweight"]["recompute"] == 0
    for row in rows.values():
        assert row["backward"] > 0 and row["peak_bytes"] > 0
        assert row["seconds"] == pytest.approx(sum(row[stage] for stage in SECONDS))
        assert "reward" not in row
    assert rows["reweight"]["ledger_bytes"] > 0
    assert rows["native"]["ledger_bytes"] == rows["retain"]["ledger_bytes"] == 0
    printed = capsys.readouterr().out
    assert "left out: decode, reward, optimizer" in " ".join(printed.split())
    native = rows["native"]
    limit = native["seconds"] / (native["seconds"] - native["recompute"])
    for name in ("retain", "reweight"):
        assert rows[name]["limit"] == pytest.approx(limit)
        reached = native["seconds"] / rows[name]["seconds"]
        assert rows[name]["share_of_limit"] == pytest.approx(reached / limit)
    assert native["limit"] is native["share_of_limit"] is None


def test_with_rewards_the_updates_are_those_of_training(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "leangrpo.bench.one_update", lambda s, turn: lines.append(one_update(s, turn)) or lines[-1]
    )
    result = measure(small(), ["native", "reweight"], 1, reward=True)
    assert capsys.readouterr().out == "" and not list(tmp_path.iterdir()), "nothing is left behind"
    assert {*result["includes"]} == {*SECONDS, "decode", "reward", "optimizer"}
    assert result["prompts"] == 2
    for row, line in zip(result["rows"], lines[-2:], strict=True):
        assert row["schedule"] == line["schedule"] and line["images"] == 4
        assert all(row[stage] == line["time"].get(stage, 0.0) for stage in result["includes"])
        assert row["seconds"] == pytest.approx(line["time"]["total"])
        assert row["decode"] > 0 and row["optimizer"] > 0


def test_the_limit_of_the_cost_model() -> None:
    """T = 10 and S = 5 forwards of 1 s, b = 2: (10 + 5 * 3) / (10 - 5 + 5 * 3) = 25/20."""
    native = {"rollout": 10.0, "recompute": 5.0, "backward": 10.0}
    lean = {"rollout": 10.0, "backward": 12.0}
    configs = bench_variants(small(), ["retain", "native"])
    found = rows_of(
        {"retain": [lean] * 2, "native": [native] * 2}, STAGES, configs, saved=1.0, alone=True
    )
    assert found[0]["limit"] == 25 / 20
    assert found[0]["share_of_limit"] == (25 / 22) / (25 / 20)
    assert found[1]["speedup"] == 22 / 25
    half = rows_of({"retain": [lean], "native": [native]}, STAGES, configs, saved=0.5, alone=True)
    assert half[0]["limit"] == 25 / 22.5, "of two optimizer steps the second runs the model again"


def test_ranks_are_compared_with_native_of_the_same_layout() -> None:
    names = list(ABLATION.values())
    configs = bench_variants(small(), names)
    seconds = {"rollout": 3.0, "recompute": 1.0}
    found = rows_of({name: [seconds] for name in names}, STAGES, configs, saved=1.0, alone=False)
    limits = [row["limit"] for row in found]
    assert limits == [None, None, None, 4 / 3, 4 / 3, 4 / 3]
    configs = bench_variants(small(), ["native:step", "retain"])
    found = rows_of({name: [seconds] for name in configs}, STAGES, configs, saved=1.0, alone=False)
    assert found[1]["limit"] is None


def test_medians_and_spread_are_of_ratios_within_a_round() -> None:
    configs = bench_variants(small(), ["native", "retain"])
    slow = [{"rollout": s} for s in (2.0, 20.0, 9.0)]
    fast = [{"rollout": s} for s in (1.0, 5.0, 3.0)]
    row = rows_of({"native": slow, "retain": fast}, STAGES, configs, saved=1.0, alone=True)[1]
    assert (row["speedup"], row["speedup_min"], row["speedup_max"]) == (3.0, 2.0, 4.0)
    assert row["seconds"] == 3.0


def test_the_schedules_take_turns_and_the_first_round_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, int]] = []

    def update(self: Bench, variant: Any, turn: int) -> tuple[dict[str, float], int]:
        calls.append((variant.schedule.name, turn))
        torch.ones(1000)
        return {"rollout": 100.0 if turn == 0 else float(turn)}, 7

    monkeypatch.setattr(Bench, "update", update)
    found = measure(small(), ["native", "retain"], 3)["rows"]
    assert calls == [
        ("native", 0),
        *((name, turn) for turn in range(4) for name in ("native", "retain")),
    ]
    assert [row["seconds"] for row in found] == [2.0, 2.0]
    assert all(row["ledger_bytes"] == 7 and row["peak_bytes"] >= 4000 for row in found)


def test_an_unknown_schedule() -> None:
    with pytest.raises(LeanError, match=r"native, retain, reweight"):
        bench(small(), ["lazy"], rounds=1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ablation"], "`--ablation` is True: it compares how ranks work together"),
        (["--ablation", "--schedules", "native"], "--ablation has schedules of its own"),
        (["--ablation", "--ledger"], "it measures something else than --ablation"),
        (["--reward", "--ledger"], "--ledger makes no pictures"),
        (["--sweep", "seed=1,2", "--collectives"], "it measures something else than --sweep"),
    ],
)
def test_refused(words: list[str], said: str) -> None:
    assert said in complaint(leangrpo("bench", *words))


@pytest.mark.slow
def test_the_ablation_on_two_ranks(tmp_path: Path) -> None:
    file = tmp_path / "ablation.json"
    options = ["--ablation", "--reward", "--rounds", 1, "--nproc", 2, "--json", file]
    assert leangrpo("bench", *SMALL, *options).code == 0
    result = json.loads(file.read_text(encoding="utf-8"))
    assert [row["label"] for row in result["rows"]] == list(ABLATION)
    assert result["ranks"] == 2
    found = {row["label"]: row for row in result["rows"]}
    assert all(found[name]["limit"] > 1 for name in ("retain", "reweight", "streaming"))
    assert found["+ coalesced sync"]["sync"] > 0
