"""The guard against regressions, on made-up figures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import guard
from suite import Value

MACHINE = {"processor": "A", "cores": 2, "threads": 1, "torch": "1"}


def figures(speed: float = 1.5, ledger: float = 100, peak: float = 1000) -> dict[str, Value]:
    return {
        "lora reweight: speed-up": Value("speed-up", speed),
        "lora reweight: ledger bytes": Value("ledger bytes", ledger),
        "lora reweight: peak bytes": Value("peak bytes", peak),
        "policy: % over a bare step": Value("overhead", 0.5),
    }


@pytest.fixture
def recorded() -> dict[str, object]:
    return guard.record([figures(1.48), figures(1.5), figures(1.52)], MACHINE)


def verdicts(recorded, fresh, **options) -> dict[str, str]:
    return {f.name: f.verdict for f in guard.compare(recorded, fresh, **options)}


def test_what_has_not_moved_passes(recorded) -> None:
    assert set(verdicts(recorded, figures(1.49, peak=1009)).values()) == {"same"}


@pytest.mark.parametrize(
    ("fresh", "name", "verdict"),
    [
        (figures(speed=1.3), "lora reweight: speed-up", "slower"),
        (figures(speed=1.7), "lora reweight: speed-up", "faster"),
        (figures(ledger=101), "lora reweight: ledger bytes", "heavier"),
        (figures(ledger=99), "lora reweight: ledger bytes", "lighter"),
        (figures(peak=1011), "lora reweight: peak bytes", "heavier"),
    ],
)
def test_what_has_moved_is_named(recorded, fresh, name, verdict) -> None:
    found = verdicts(recorded, fresh)
    assert found.pop(name) == verdict and set(found.values()) == {"same"}


def test_overhead_has_a_bound_whatever_was_recorded(recorded) -> None:
    fresh = figures() | {"policy: % over a bare step": Value("overhead", 2.1)}
    assert verdicts(recorded, fresh, same_machine=False)["policy: % over a bare step"] == "slower"


def test_what_is_missing_or_new(recorded) -> None:
    fresh = figures()
    del fresh["lora reweight: ledger bytes"]
    found = verdicts(recorded, fresh | {"other": Value("calls", 3)})
    assert found["lora reweight: ledger bytes"] == "missing" and found["other"] == "new"


def test_another_processor_is_not_judged_by_times(recorded) -> None:
    assert not guard.is_same(recorded, MACHINE | {"processor": "B"})
    found = verdicts(recorded, figures(speed=1.0, ledger=101), same_machine=False)
    assert found["lora reweight: speed-up"] == "not judged"
    assert found["lora reweight: ledger bytes"] == "heavier"


def test_counts_must_be_exact_to_be_recorded() -> None:
    with pytest.raises(SystemExit, match="should be exact"):
        guard.record([figures(ledger=100), figures(ledger=101)], MACHINE)
