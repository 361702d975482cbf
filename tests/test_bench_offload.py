"""The command that compares plain retain with retain within a budget, on the embedded pipeline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from leangrpo.cli import app

SMALL = ["rollout={generations: 2, micro_batch: 1}", "sampling.steps=3"]
SMALL += ["selection={rule: list, steps: [0, 1]}", "run.threads=1"]


def test_a_tenth_of_what_it_needs(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    arguments = ["bench", "embedded", *SMALL, "--offload", "--rounds", "1", "--json", str(file)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    found = json.loads(file.read_text())
    assert found["bitwise"]
    assert found["budget"] == found["needed"] // 10
    assert 0 < found["waiting"] <= found["budget"]
    assert found["offloaded"] >= found["needed"] - found["budget"]
    plain, bounded = found["rows"]
    # The allocator agrees: beside graphs there are latents, noise and log-probabilities only.
    beside = plain["held"] - found["needed"]
    assert 0 <= beside < 0.05 * found["needed"]
    assert bounded["held"] <= found["budget"] + beside
    assert bounded["peak"] < plain["peak"]
    assert "below the budget" in done.output
    assert "bitwise equal: yes" in done.output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [(["--budget", "1MiB"], "Add --offload"), (["--offload", "--budget", "much"], "64MiB")],
)
def test_a_budget_that_is_none(arguments: list[str], complaint: str) -> None:
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert done.exit_code != 0
    assert complaint in done.output + str(done.exception)
