"""Hostile input: a sample always, thousands of cases among the slow tests."""

from __future__ import annotations

import pytest
from fuzz import Tally, fuzz

from leangrpo.errors import LeanError

SOME = {"configs": 100, "prompts": 60, "checkpoints": 20, "answers": 25, "requests": 30}
MANY = {"configs": 2000, "prompts": 500, "checkpoints": 500, "answers": 300, "requests": 200}


@pytest.mark.parametrize("kind", SOME)
def test_some_hostile_input(kind: str) -> None:
    (tally,) = fuzz({kind: SOME[kind]}, 7)
    assert not tally.failures, "\n".join(tally.failures)
    assert sum(tally.outcomes.values()) >= SOME[kind]
    assert tally.outcomes["refused"] or kind == "requests"


@pytest.mark.slow
@pytest.mark.parametrize("kind", MANY)
def test_much_hostile_input(kind: str) -> None:
    (tally,) = fuzz({kind: MANY[kind]}, 0)
    assert not tally.failures, "\n".join(tally.failures)
    assert sum(tally.outcomes.values()) >= MANY[kind]


def test_a_traceback_and_a_hang_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzz.LIMIT_S", 0.05)
    tally = Tally("kind")

    def refused() -> None:
        raise LeanError("no")

    def hangs() -> None:
        while True:
            pass

    assert tally.run("a", refused) == "refused"
    assert tally.run("b", lambda: 1 / 0) == "failed"
    assert tally.run("c", hangs) == "failed"
    assert [f.split("\n")[0] for f in tally.failures] == ["b", "c"]
