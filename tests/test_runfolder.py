"""Where a run goes when no folder is named."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from leangrpo import runfolder
from leangrpo.config import load_config
from leangrpo.runfolder import run_folder


@pytest.mark.parametrize("name", ["../../etc", "/tmp/x", "a/b", "..", "\n", "x" * 500, "ä b"])
def test_a_recipe_leads_nowhere_else(name: str) -> None:
    folder = run_folder(load_config("embedded", [f"recipe={json.dumps(name)}"]))
    assert folder.parent == Path("runs")
    assert folder.resolve().parent == Path("runs").resolve()
    assert len(folder.name) < 120


def test_a_clock_that_is_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run at the same second of the clock gets a folder of its own."""

    class Stopped(datetime):
        @classmethod
        def now(cls, tz: object = None) -> Stopped:
            return cls(2026, 1, 2, 3, 4, 5)

    monkeypatch.setattr(runfolder, "datetime", Stopped)
    monkeypatch.chdir(tmp_path)
    config = load_config("embedded")
    names = []
    for _ in range(3):
        folder = run_folder(config)
        folder.mkdir(parents=True)
        names.append(folder.name)
    first = "embedded-20260102-030405"
    assert names == [first, f"{first}-2", f"{first}-3"]
