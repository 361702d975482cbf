"""The fault campaign: a few of its faults always, all of them among the slow tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import KINDS, Row, main, run, table


def assert_good(rows: list[Row]) -> None:
    bad = [problem for row in rows for problem in row.problems]
    assert not bad, "\n".join(bad)
    assert all(row.good for row in rows), table(rows)


def test_a_few_faults(tmp_path: Path) -> None:
    """Two kills while a checkpoint is written."""
    (row,) = run(tmp_path, ["kill_writing"], kills=2, seed=1, updates=4, quiet=True)
    assert_good([row])
    assert row.injected == 2 and row.compared


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_campaign(kind: str, tmp_path: Path) -> None:
    assert_good(run(tmp_path, [kind], kills=50, seed=0, quiet=True))


def test_a_row_that_is_not_good() -> None:
    """A lost update, a traceback or another weight is seen."""
    row = Row("kind")
    assert not row.good, "nothing was injected"
    row.fault(True)
    assert row.good
    row.fault(True, "", lost=1)
    assert not row.good
    assert "| kind | 2 | 2 | 1 | 0 of 0 |" in table([row])


def test_an_unknown_kind_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["faults.py", "--only", "fire"])
    with pytest.raises(SystemExit):
        main()
    assert "'fire' is none of kill, kill_writing" in capsys.readouterr().err
