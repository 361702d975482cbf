"""`schedule: auto` in a run: decided, written down, kept on resuming, and changing no bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml

from leangrpo.auto import adopted
from leangrpo.config import Config, load_config
from leangrpo.errors import LeanError
from leangrpo.runfolder import read_run
from leangrpo.train import train

SMALL = (
    "schedule=auto",
    "prompts.heldout=null",
    "updates=1",
    "rollout={prompts: 2, generations: 2, micro_batch: 1, ahead: 1}",
    "sampling={steps: 3, height: 16, width: 16, call: {max_sequence_length: 16}}",
    "model.lora.rank=4",
    "selection.steps=[0, 1]",
    "rewards=[{name: jpeg_compressibility}]",
    "advantage.clip=null",
    "evaluation.rewards=[]",
    "run.threads=1",
)


@pytest.fixture(scope="module", autouse=True)
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Stable Diffusion 3 on the disk."""
    MODEL.append(tiny.save(tiny.tiny_sd3(), tmp_path_factory.mktemp("model") / "sd3"))
    return MODEL[-1]


MODEL: list[Path] = []


def settings(run: Path, *more: str) -> Config:
    own = [f"model.pipeline={MODEL[-1]}", f"run.dir={run}"]
    return load_config("embedded-lora", [*SMALL, *own, *more])


def decided(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "plan.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that `auto` decided."""
    folder = tmp_path_factory.mktemp("auto") / "run"
    train(settings(folder), quiet=True)
    return folder


def by_hand(plan: dict[str, Any]) -> list[str]:
    return [
        f"{name}={'null' if value is None else str(value).lower()}"
        for name, value in plan["settings"].items()
    ]


def test_the_decision_is_written_down(run: Path) -> None:
    plan = decided(run)
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    assert config["schedule"] == plan["settings"]["schedule"] != "auto"
    assert config["rollout"]["micro_batch"] == plan["settings"]["rollout.micro_batch"]
    assert plan["chosen"] in [p["name"] for p in plan["fits"]]
    assert {p["option"]["schedule"] for p in plan["fits"]} == {
        "native",
        "retain",
        "reweight",
        "streaming",
    }
    assert plan["chosen"] in (run / "log.txt").read_text(encoding="utf-8")


def test_a_probed_run_is_the_run_with_its_settings(run: Path, tmp_path: Path) -> None:
    """Bitwise the same weights, and metrics: the probe draws nothing and steps nothing."""
    train(settings(tmp_path / "run", *by_hand(decided(run))), quiet=True)
    one, other = read_run(run), read_run(tmp_path / "run")
    assert one.summary is not None
    assert other.summary is not None
    assert one.summary["weights_sha256"] == other.summary["weights_sha256"]
    for mine, theirs in zip(one.metrics, other.metrics, strict=True):
        assert {k: v for k, v in mine.items() if k not in ("time", "memory", "reward_seconds")} == {
            k: v for k, v in theirs.items() if k not in ("time", "memory", "reward_seconds")
        }


@pytest.mark.slow
def test_resuming_goes_on_with_what_was_decided(
    run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No second probe, and bitwise the weights of a run that was not interrupted."""
    chosen = by_hand(decided(run))
    train(settings(tmp_path / "whole", *chosen, "updates=2"), quiet=True)

    def refuse(*_: Any) -> None:
        raise AssertionError("probed again")

    monkeypatch.setattr("leangrpo.auto.Auto.decide", refuse)
    before = (run / "plan.json").read_bytes()
    train(settings(run, "updates=2"), resume=True, quiet=True)
    assert (run / "plan.json").read_bytes() == before
    one, other = read_run(run).summary, read_run(tmp_path / "whole").summary
    assert one is not None
    assert other is not None
    assert one["updates"] == 2
    assert one["weights_sha256"] == other["weights_sha256"]
    config = adopted(settings(run), run)
    assert config.schedule == decided(run)["settings"]["schedule"]


def test_without_a_record_nothing_is_adopted(tmp_path: Path) -> None:
    config = settings(tmp_path)
    assert adopted(config, tmp_path) is config


@pytest.mark.slow
def test_a_limit_takes_a_smaller_option(run: Path, tmp_path: Path) -> None:
    """Room for little more than the smallest option: it fits, and the largest does not."""
    peaks = sorted(p["peak_bytes"] for p in decided(run)["fits"])
    limit = int(peaks[0] * 1.02 / 0.95)
    assert limit < peaks[-1]
    train(settings(tmp_path / "run", f"memory.limit={limit}"), quiet=True)
    plan = decided(tmp_path / "run")
    chosen = next(p for p in plan["fits"] if p["name"] == plan["chosen"])
    assert chosen["peak_bytes"] <= limit * 0.95
    assert plan["too_large"]
    assert all(p["peak_bytes"] > limit * 0.95 for p in plan["too_large"])


@pytest.mark.slow
def test_nothing_fits(tmp_path: Path) -> None:
    """Refused before a run folder exists."""
    with pytest.raises(LeanError, match="`schedule` is 'auto'"):
        train(settings(tmp_path / "run", "memory.limit=100KiB"), quiet=True)
    assert not (tmp_path / "run").exists()
