"""Micro-batches under reweight: the gradient of one by one, and a table; nothing timed is tested.

Bounds as in test_exactness: 5e-6 in float32, 1e-12 in float64. In float32 part of the distance is
not the schedule's: matrix kernels round by the size of a batch, so that the samples differ.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from leangrpo.bench_batches import batches
from leangrpo.cli import app
from leangrpo.config import load_config
from leangrpo.errors import LeanError
from leangrpo.samples import Samples

SMALL = ["rollout={generations: 2, micro_batch: 1}", "sampling.steps=3", "run.threads=1"]
SMALL += ["selection={rule: list, steps: [0, 1]}"]
BOUND = {"float32": 5e-6, "float64": 1e-12}


@pytest.mark.parametrize(
    ("recipe", "dtype", "guidance", "checkpointing"),
    [
        ("embedded-lora", "float32", 1.0, False),
        ("embedded-lora", "float32", 4.0, False),
        pytest.param("embedded-lora", "float64", 4.0, True, marks=pytest.mark.slow),
        pytest.param("embedded", "float64", 1.0, False, marks=pytest.mark.slow),
        ("embedded", "float64", 4.0, True),
    ],
)
def test_every_size_gives_the_gradient_of_one_by_one(
    recipe: str, dtype: str, guidance: float, checkpointing: bool
) -> None:
    settings = [*SMALL, f"model.dtype={dtype}", f"sampling.guidance={guidance}"]
    settings += [f"model.activation_checkpointing={str(checkpointing).lower()}"]
    result = batches(load_config(recipe, settings), [1, 2], 1)
    assert [row["micro_batch"] for row in result["rows"]] == [1, 2]
    for row in result["rows"]:
        assert row["rel_l2"] <= BOUND[dtype]
        assert 0 < row["gradients"] <= 2
        assert row["images_per_second"] == 2 / row["seconds"]
    assert result["rows"][0]["gradients"] == 2
    assert result["rows"][0]["speedup"] == 1


def test_a_wrong_gradient_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples of a batch exchanged: what the last column is there to find."""
    fold = Samples.fold

    def exchanged(self: Samples, coefficients: torch.Tensor, *rest: object, **more: bool) -> None:
        fold(self, coefficients.roll(1), *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Samples, "fold", exchanged)
    (row,) = batches(load_config("embedded-lora", SMALL), [2], 1)["rows"]
    assert row["rel_l2"] > 0.1


def test_streaming_holds_a_batch_and_two_sums(tmp_path: Path) -> None:
    """From the command line: the recipe's micro-batch of 12 need not divide the group."""
    file = tmp_path / "result.json"
    words = ["bench", "embedded-lora", *SMALL[1:], "rollout.generations=4"]
    words += ["--micro-batches", "1,2", "--schedules", "streaming", "--rounds", "1"]
    run = CliRunner().invoke(app, [*words, "--json", str(file)])
    assert run.exit_code == 0, run.output
    assert "images/s" in run.output
    alone, pair = json.loads(file.read_text())["rows"]
    assert alone["gradients"] == 3  # two sums and the gradient being formed
    assert 2 < pair["gradients"] <= 4
    assert max(alone["rel_l2"], pair["rel_l2"]) <= BOUND["float32"]


@pytest.mark.parametrize(
    ("sizes", "schedules", "rule"),
    [
        ([1, 3], None, r"--micro-batches.* is 3: each must divide rollout.generations, which is 2"),
        ([0], None, "--micro-batches"),
        ([1], ["lazy"], "must be native, retain, reweight or streaming"),
    ],
)
def test_what_it_refuses(sizes: list[int], schedules: list[str] | None, rule: str) -> None:
    with pytest.raises(LeanError, match=rule):
        batches(load_config("embedded-lora", SMALL), sizes, 1, schedules)


def test_layers_it_cannot_split() -> None:
    config = load_config("embedded-lora", [*SMALL, "model.compile=true"])
    with pytest.raises(LeanError, match="compiled block by sample"):
        batches(config, [2], 1)


@pytest.mark.parametrize("other", [["--ledger"], ["--collectives"], ["--nproc", "2"]])
def test_one_measurement_at_a_time(other: list[str]) -> None:
    run = CliRunner().invoke(app, ["bench", "--micro-batches", "1", *other])
    assert isinstance(run.exception, LeanError)
    assert "--micro-batches" in str(run.exception)
