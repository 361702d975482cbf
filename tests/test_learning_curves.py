"""The drawing of all algorithms' rewards against wall time."""

from __future__ import annotations

import csv
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import synthetic_run

from leangrpo.report import read_run

SCRIPT = Path(__file__).parents[1] / "scripts" / "learning_curves.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("learning_curves", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_curves(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that are there are drawn, not trained again."""
    runs = tmp_path / "runs"
    for name in ("flow-grpo", "ddpo"):
        synthetic_run(tmp_path / "made", updates=6, every=2).rename(tmp_path / name)
        (runs / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).rename(runs / name)
    out = tmp_path / "img" / "curves.svg"
    words = ["curves", "--out", str(out), "--runs", str(runs), "--algorithms", "flow-grpo", "ddpo"]
    monkeypatch.setattr(sys, "argv", words)
    script.main()
    run = read_run(runs / "ddpo")
    with out.with_suffix(".csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["algorithm"] == "ddpo"]
    assert [int(row["update"]) for row in rows] == [e["update"] for e in run.evaluations]
    assert [float(row["reward"]) for row in rows] == [e["reward"] for e in run.evaluations]
    total = sum(line["time"]["total"] for line in run.metrics)
    assert float(rows[-1]["minutes"]) == pytest.approx(total / 60)
    assert float(rows[0]["minutes"]) == 0.0
    assert "<svg" in out.read_text(encoding="utf-8")
