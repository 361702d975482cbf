"""Collectives of an update, counted; and what ranks that do not keep together are told.

Two ranks are started once for all of it (`collective_ranks.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from train_ranks import python_path

from leangrpo.bench import bench
from leangrpo.collectives import Collectives, first_difference
from leangrpo.config import load_config
from leangrpo.errors import LeanError

UNITS = 3  # two blocks and the root
TRAJECTORIES, STEPS = 2, 10  # on a rank: one of each of B = 2 groups; T = S


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("collectives")
    tiny.save(tiny.tiny_sd3(), folder / "sd3")
    here = Path(__file__).parent
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += [str(here / "collective_ranks.py"), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(here)}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(done.stderr[-6000:])
    found: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return {**found, "output": done.stdout}


def rows(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["schedule"]: row for row in result["rows"]}


@pytest.mark.parametrize("train", ["full", "lora"])
def test_one_reduce_scatter_in_place_of_one_per_block_and_backward(results, train) -> None:
    found = rows(results[train])
    backwards = TRAJECTORIES * STEPS
    for name in found.keys() & {"native:step", "native:step:classic"}:
        assert found[name]["calls"]["reduce_scatter"] >= backwards * (UNITS - 1)
        assert found[name]["passes"] >= backwards * 0.99
    for name in found.keys() & {"native", "retain", "reweight"}:
        assert found[name]["calls"]["reduce_scatter"] == 1
        assert found[name]["passes"] == pytest.approx(1, rel=0.01)  # rows filled up to the ranks


def test_parameters_are_gathered_once_a_forward_and_once_a_backward(results) -> None:
    found = rows(results["full"])
    assert found["native:step"]["calls"]["reduce_scatter"] == TRAJECTORIES * STEPS * UNITS
    passes = {"native:step": 3, "native:step:classic": 3, "native": 3, "retain": 2, "reweight": 2}
    for name, number in passes.items():
        assert found[name]["calls"]["all_gather"] == TRAJECTORIES * STEPS * UNITS * number


def test_copies_gather_nothing_and_reduce_once(results) -> None:
    found = rows(results["copies"])
    assert "all_gather" not in found["reweight"]["calls"]
    assert found["reweight"]["passes"] == pytest.approx(1, abs=0.01)
    assert found["native:step"]["passes"] == pytest.approx(TRAJECTORIES * STEPS, rel=0.01)


def test_the_tables_are_printed_by_the_first_rank(results) -> None:
    assert results["output"].count("collectives of an update on one rank") == 3
    assert results["output"].count("medians of 1") == 1


def test_bench_on_several_ranks_times_the_sync(results) -> None:
    found = rows(results["timed"])
    assert list(found) == ["native:step:classic", "native:group", "reweight"]
    assert found["native:step:classic"]["speedup"] == 1
    assert found["native:step:classic"]["sync"] >= 0
    assert all(found[name]["sync"] > 0 for name in ("native:group", "reweight"))
    assert results["timed"]["ranks"] == results["timed"]["prompts"] == 2
    assert all(row["limit"] is None for row in found.values()), "no native of reweight's sync"


def test_several_forwards_then_several_backwards(results) -> None:
    assert len(results["graphs"]) == 8
    assert all(results["graphs"].values()), results["graphs"]


def test_a_trained_parameter_outside_fsdp2_is_refused(results) -> None:
    for said in results["left_out"]:
        assert "Net.extra is trained but not sharded" in said


def test_parameters_from_before_sharding_are_refused(results) -> None:
    for said in results["too_early"]:
        assert "before" in said and "sharded" in said


def test_ranks_that_call_different_denoisers_are_stopped_before(results) -> None:
    for said in results["two_denoisers"]:
        assert "rank 0 transformer at step 1, rank 1 transformer_2 at step 1" in said


def test_ranks_that_ran_different_collectives_are_told_the_first(results) -> None:
    for said in results["other_collective"]:
        assert said.startswith("After update 3 the ranks have not run the same collectives")
        assert "number 2 of 2 is all_gather" in said
        assert "float32 of ranks [0, 1] on rank 0" in said
        assert "int32 of ranks [0, 1] on rank 1" in said


def test_a_mode_that_sees_no_collective_counts_none() -> None:
    with Collectives((0,)) as seen:
        (torch.ones(2, requires_grad=True) * 2).sum().backward()
        seen.call("transformer", 3)
    assert (seen.counts, seen.sequence) == ({}, ["forward of transformer"])
    assert first_difference([0, 1], [seen.sequence, seen.sequence]) == ""


def test_one_process_has_nothing_to_count() -> None:
    with pytest.raises(LeanError, match=r"--collectives.*torchrun"):
        bench(load_config("embedded"), None, 1, collectives=True)


@pytest.mark.parametrize("name", ["native:often", "native:step:round", "native:step:classic:x"])
def test_an_unknown_variant(name) -> None:
    with pytest.raises(LeanError, match="native:step:classic"):
        bench(load_config("embedded"), [name], 1)
