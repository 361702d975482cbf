"""Runs that an older version has begun: gone on with, or refused in so many words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from safetensors.torch import load_file

from leangrpo import checkpoint
from leangrpo.config import load_config, to_yaml
from leangrpo.errors import LeanError
from leangrpo.report import read_run
from leangrpo.resume import in_its_terms
from leangrpo.setup import make_policy
from leangrpo.train import train

FIXTURES = Path(__file__).parent / "fixtures"
FORMATS = (1, pytest.param(2, marks=pytest.mark.slow), 3)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the fixtures' relative paths lead: a pipeline and prompts."""
    monkeypatch.chdir(tmp_path)
    tiny.save(tiny.tiny_sd3(), tmp_path / "sd3")
    (tmp_path / "prompts.txt").write_text("a cat\na dog\na cup\na car\n", encoding="utf-8")
    return tmp_path


def lines(run: Path) -> list[dict[str, Any]]:
    return [{**line, "time": 0, "memory": 0, "reward_seconds": 0} for line in read_run(run).metrics]


@pytest.mark.parametrize("version", FORMATS)
def test_an_older_run_goes_on(version: int, place: Path) -> None:
    """As if nothing had been: the weights are those of a run of this version in one go. And again,
    which finds the settings and the checkpoint of two versions."""
    shutil.copytree(FIXTURES / f"run-format-{version}", place / "run")
    before = (place / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    stored = place / "run" / "config.yaml"
    again = train(load_config(stored, ["updates=2"]), resume=True, quiet=True)
    assert again["updates"] == 2
    summary = train(load_config(stored, ["updates=4"]), resume=True, quiet=True)
    assert summary["updates"] == 4
    assert (place / "run" / "metrics.jsonl").read_text(encoding="utf-8").startswith(before)
    state = json.loads((place / "run/checkpoints/000004/state.json").read_text(encoding="utf-8"))
    assert state["format"] == checkpoint.FORMAT
    if version == 1:  # its first two updates were computed otherwise
        return
    fresh = train(load_config(stored, ["run.dir=fresh"]), quiet=True)
    assert summary["weights_sha256"] == fresh["weights_sha256"]
    assert lines(place / "run")[2:] == lines(place / "fresh")[2:]


def test_the_optimizer_of_format_1(place: Path) -> None:
    """Every moment, as it stands in the file it had then."""
    folder = FIXTURES / "run-format-1"
    policy = make_policy(load_config(folder / "config.yaml"), torch.device("cpu"))
    optimizer = torch.optim.AdamW(policy.parameters, fused=True)
    checkpoint.restore(checkpoint.open_checkpoint(folder / "checkpoints/000002"), policy, optimizer)
    stored = load_file(folder / "checkpoints/000002/optimizer.safetensors")
    found = {
        f"{key}:{name}": value
        for name, parameter in policy.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    assert found.keys() == stored.keys() and len(found) > 10
    assert all(torch.equal(found[name], stored[name]) for name in stored)


@pytest.mark.parametrize("version", FORMATS)
def test_killed_before_its_first_checkpoint_of_this_version(version: int, place: Path) -> None:
    """Its settings are still those that the older checkpoint was made with."""
    run = place / "run"
    shutil.copytree(FIXTURES / f"run-format-{version}", run)
    stored = run / "config.yaml"
    train(load_config(stored, ["updates=2"]), resume=True, quiet=True)
    assert json.loads((run / "checkpoints/000002/state.json").read_text())["format"] == version
    assert train(load_config(stored, ["updates=3"]), resume=True, quiet=True)["updates"] == 3


def test_other_settings_than_the_older_run_are_refused(place: Path) -> None:
    run = place / "run"
    shutil.copytree(FIXTURES / "run-format-2", run)
    stored = run / "config.yaml"
    with pytest.raises(LeanError, match=r"`optimizer.lr` is 0.001 and was 0.01.*not be the same"):
        train(load_config(stored, ["optimizer.lr=1e-3", "updates=3"]), resume=True, quiet=True)
    more = ["advantage.baseline=global", "updates=3"]
    with pytest.raises(LeanError, match=r"`advantage.baseline` is 'global' and was 'prompt'"):
        train(load_config(stored, more), resume=True, quiet=True)
    stored.write_text(stored.read_text().replace("lr: 0.01", "lr: 0.02"), encoding="utf-8")
    with pytest.raises(LeanError, match=r"its config.yaml was changed"):
        train(load_config(stored, ["updates=3"]), resume=True, quiet=True)


def test_settings_are_kept_in_the_runs_own_terms(tmp_path: Path) -> None:
    config = load_config("embedded", ["scoring.retries=7", "seed=3"])
    tree = yaml.safe_load(to_yaml(config))
    del tree["scoring"], tree["memory"], tree["rollout"]["ahead"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    found = yaml.safe_load(in_its_terms(to_yaml(config), tmp_path))
    assert "memory" not in found and "ahead" not in found["rollout"]
    assert found["scoring"]["retries"] == 7  # not its default
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(found), encoding="utf-8")
    assert load_config(tmp_path / "again.yaml") == config
