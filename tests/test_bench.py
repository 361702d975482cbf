"""The bench command measures what it says; its ratios are not tested, as nothing timed is."""

from __future__ import annotations

import pytest

from leangrpo.bench import bench
from leangrpo.config import load_config
from leangrpo.errors import LeanError

SMALL = ["rollout.generations=2", "rollout.micro_batch=2", "sampling.steps=3"]
SMALL += ["selection={rule: fraction, steps: null}"]


def test_every_schedule_is_timed_by_stage(capsys) -> None:
    result = bench(load_config("embedded", SMALL), ["native", "retain", "reweight"], rounds=1)
    rows = {row["schedule"]: row for row in result["rows"]}
    assert rows["native"]["speedup"] == 1
    assert rows["native"]["recompute"] > 0
    assert rows["retain"]["recompute"] == rows["reweight"]["recompute"] == 0
    assert all(row["backward"] > 0 for row in rows.values())
    assert rows["native"]["limit"] is None
    assert rows["retain"]["limit"] == rows["reweight"]["limit"] > 1
    assert "speedup" in capsys.readouterr().out


def test_an_unknown_schedule() -> None:
    with pytest.raises(LeanError, match=r"native, retain, reweight"):
        bench(load_config("embedded", SMALL), ["lazy"], rounds=1)
