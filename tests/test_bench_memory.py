"""The ledger's bytes against the group: measured, and the gradient beside them right."""

from __future__ import annotations

import pytest

from leangrpo.bench_memory import ledger
from leangrpo.config import load_config
from leangrpo.errors import LeanError

SMALL = ["rollout={generations: 2, micro_batch: 1}", "sampling.steps=2"]
SMALL += ["selection={rule: list, steps: [0]}", "run.threads=1"]


def test_streaming_is_constant_and_reweight_grows(capsys: pytest.CaptureFixture[str]) -> None:
    result = ledger(load_config("embedded", SMALL), groups=[3, 6])
    rows = {(row["schedule"], row["group"]): row for row in result["ledger"]}
    assert [rows["reweight", m]["gradients"] for m in (3, 6)] == [3, 6]
    assert [rows["streaming", m]["gradients"] for m in (3, 6)] == [3, 3]
    for row in rows.values():
        assert row["rel_l2"] <= 5e-6
        # the allocator saw these gradients, and beside them one graph and temporary tensors
        assert row["bytes"] <= row["peak_bytes"] <= row["bytes"] + result["gradient_bytes"]
    assert "gradients held" in capsys.readouterr().out


@pytest.mark.parametrize("group", [1, 5])
def test_a_group_it_cannot_measure(group: int) -> None:
    config = load_config("embedded", [*SMALL, "rollout.micro_batch=2"])
    with pytest.raises(LeanError, match="--groups"):
        ledger(config, groups=[group])
