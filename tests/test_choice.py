"""What is chosen of known predictions, and what is said of the rest."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from leangrpo.choice import candidates, choose, configured, size, workload
from leangrpo.config import load_config
from leangrpo.costs import Costs, Key, Option, StepCost, Workload
from leangrpo.errors import LeanError
from leangrpo.layout import classic_layout
from leangrpo.planner import MARGIN, predict
from leangrpo.settings import Memory

STEP = StepCost(1.0, 1.5, 3.0, 1000, 30, 1200, 70, 50)
COSTS = Costs(
    steps={Key(1): STEP},
    resident=10_000,
    gradient=400,
    waiting=400,
    summed=400,
    stepped=400,
    missing={Key(2): "it did not run"},
)
LOAD = Workload(steps=4, selected=2, held=6, waves=1)
OPTIONS = [Option(name) for name in ("native", "retain", "reweight", "streaming")]
NEEDS = {o.schedule: predict(LOAD, COSTS, o).peak_bytes for o in OPTIONS}


def test_equal_times_go_to_the_smallest_then_the_simplest() -> None:
    """The three lean schedules take the same seconds here; streaming's three gradients are least,
    and where a gradient weighs nothing reweight, which has fewer parts, comes before it."""
    assert NEEDS["native"] < NEEDS["streaming"] < NEEDS["reweight"] < NEEDS["retain"]
    choice = choose(LOAD, COSTS, OPTIONS)
    assert choice.chosen.option.schedule == "streaming"
    weightless = replace(COSTS, gradient=0, waiting=0, summed=0, stepped=0)
    assert choose(LOAD, weightless, OPTIONS).chosen.option.schedule == "reweight"


def test_slower_by_more_than_noise_is_not_equal() -> None:
    """Adding up at 1 s a gradient: retain is the fastest, and 6% and more before the others."""
    slow = replace(COSTS, add=1.0)
    choice = choose(LOAD, slow, OPTIONS)
    assert choice.chosen.option.schedule == "retain"
    assert choice.reason == "the fastest"
    assert [p.option.schedule for p in choice.alternatives()] == ["reweight", "native", "streaming"]


def test_a_limit_leaves_out_what_does_not_fit() -> None:
    limit = int(NEEDS["native"] / (1 - MARGIN)) + 1
    choice = choose(LOAD, COSTS, OPTIONS, limit=limit)
    assert choice.chosen.option.schedule == "native"
    assert {p.option.schedule for p in choice.too_large} == {"retain", "reweight", "streaming"}
    assert choice.reason.startswith("the fastest that fits; 3 faster ones need more than")
    assert choice.alternatives() == []


def test_nothing_fits() -> None:
    with pytest.raises(
        LeanError, match="no schedule fits in 9.77 KiB with 5% left free: the small"
    ):
        choose(LOAD, COSTS, OPTIONS, limit=10_000)


def test_nothing_measured() -> None:
    with pytest.raises(LeanError, match="no option could be measured .native m=2: it did not run"):
        choose(LOAD, COSTS, [Option("native", 2)])


def test_what_could_not_be_measured_is_left_out_with_its_reason() -> None:
    choice = choose(LOAD, COSTS, [*OPTIONS, Option("retain", 2)])
    (left,) = choice.left_out
    assert (left.name, left.reason) == ("retain m=2", "it did not run")
    assert "it did not run" in choice.text()


def test_offloading_takes_what_does_not_fit_to_the_host() -> None:
    """In whole MiB: of 16 graphs of 4 MiB as many bytes stay as there is room for."""
    mib = 2**20
    big = replace(COSTS, steps={Key(1): replace(STEP, kept=4 * mib, forward_grad_peak=5 * mib)})
    load = replace(LOAD, held=8)
    whole = predict(load, big, Option("retain")).peak_bytes
    limit = int((whole - 20 * mib) / (1 - MARGIN))
    choice = choose(load, big, [Option("retain")], limit=limit, offload=True)
    budget = choice.chosen.option.activations
    assert budget is not None
    assert 0 < budget < 16 * 4 * mib
    assert budget % mib == 0
    assert limit * (1 - MARGIN) - 2 * mib < choice.chosen.peak_bytes <= limit * (1 - MARGIN)
    with pytest.raises(LeanError, match="no schedule fits"):
        choose(load, big, [Option("retain")], limit=limit)


def test_json_and_text() -> None:
    choice = choose(LOAD, COSTS, OPTIONS, limit=1 << 30)
    said = json.loads(json.dumps(choice.as_dict(), allow_nan=False))
    assert said["chosen"] == "streaming m=1 ahead=1"
    assert len(said["fits"]) == 4
    assert said["settings"]["schedule"] == "streaming"
    text = choice.text()
    assert all(o.name in text for o in OPTIONS)


def test_candidates_are_what_the_settings_allow() -> None:
    """A clip of the advantages binds streaming; micro-batches divide the group."""
    config = load_config("embedded", ["rollout.generations=6", "rollout.micro_batch=6"])
    options, left = candidates(config, offload=False)
    assert {o.schedule for o in options} == {"native", "retain", "reweight", "streaming"}
    assert {o.micro_batch for o in options} == {1, 2, 3, 6}
    assert {o.ahead for o in options if o.micro_batch == 2} == {0, 1, 3}
    assert [one.name for one in left] == ["retain+offload"]
    options, _ = candidates(config.model_copy(update={"memory": Memory(activations=2**20)}))
    budgets = {(o.schedule == "retain", o.activations) for o in options}
    assert budgets == {(True, 2**20), (False, None)}
    replayed = load_config(
        "embedded",
        ["rollout.ahead=2", "selection={rule: random, fraction: 0.5, steps: null, per: sample}"],
    )
    options, left = candidates(replayed)
    assert {(o.micro_batch, o.ahead) for o in options} == {(1, 2)}
    assert any("selection.per" in one.reason for one in left)
    several, left = candidates(config, ranks=2)
    often = {"update", "group"}
    assert {o.sync for o in several if o.schedule in ("native", "retain")} == often | {"step"}
    assert {o.sync for o in several if o.schedule in ("reweight", "streaming")} == often


def test_configured_says_everything_that_was_decided() -> None:
    config = load_config("embedded", ["schedule=auto", "parallel.ledger_dtype=bfloat16"])
    for option in (Option("retain", 3, True, "update", 5, 0), Option("streaming", 2)):
        done = configured(config, option)
        for name, value in option.settings.items():
            found = done
            for part in name.split("."):
                found = getattr(found, part)
            assert found == value
        kept = "bfloat16" if option.schedule == "streaming" else None
        assert done.parallel.ledger_dtype == kept


def test_workload_follows_the_settings() -> None:
    config = load_config("embedded", ["rollout.prompts=3", "rollout.generations=4"])
    load = workload(config, [0.5] * 9 + [0.0], classic_layout(3, 4, 1, 1))
    assert (load.steps, load.selected, load.held, load.waves) == (10, 4, 4, 3)
    assert load.slots(3) == [3, 1]
    assert not load.whole


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(12, "12 B"), (3 * 2**19, "1.5 MiB"), (5 * 2**30, "5.00 GiB")]
)
def test_size(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text
