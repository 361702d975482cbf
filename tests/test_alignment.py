"""How near two gradients are, on vectors whose distances are known; and what is allowed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from leangrpo.alignment import BOUNDS, NOISE, ORACLE_BOUND, QUANTITIES, alignment, judge
from leangrpo.parallel import World


def of(*values: float) -> list[torch.Tensor]:
    return [torch.tensor(values[:2]), torch.tensor(values[2:])]


def test_distances() -> None:
    found = alignment(of(1, 2, 2, 0), of(1, 2, 2, 3), World())
    assert found["cosine"] == pytest.approx(9 / math.sqrt(9 * 18))
    assert found["rel_l2"] == pytest.approx(3 / math.sqrt(18))
    assert found["max_abs"] == 3 and found["bitwise"] is False
    same = alignment(of(1, 2, 2, 3), of(1, 2, 2, 3), World())
    assert same == {"cosine": 1.0, "rel_l2": 0.0, "max_abs": 0.0, "bitwise": True}
    assert alignment(of(1, 0, 0, 0), of(0, 0, 0, 0), World())["rel_l2"] == math.inf
    nan = alignment(of(math.nan, 0, 0, 0), of(1, 0, 0, 0), World())
    assert math.isnan(nan["rel_l2"]) and not nan["bitwise"]


def rows(name: str, dtype: str, away: float, oracle: float | None = None) -> dict[str, Any]:
    return {
        quantity: {
            "schedule": name,
            "protocol": "fixed",
            "quantity": quantity,
            "dtype": dtype,
            "rel_l2": away,
            "bitwise": away == 0,
            "oracle_rel_l2": oracle,
        }
        for quantity in QUANTITIES
    }


@pytest.mark.parametrize("dtype", BOUNDS)
def test_what_is_allowed(dtype) -> None:
    exact, bound = rows("native", dtype, 0.0), BOUNDS[dtype]
    assert not list(judge(rows("retain", dtype, 0.0), exact))
    assert next(judge(rows("retain", dtype, 1e-16), exact))["bound"] == "bitwise native's"
    assert not list(judge(rows("reweight", dtype, bound), exact))
    assert list(judge(rows("reweight", dtype, 1.01 * bound), exact))
    assert list(judge(rows("reweight", dtype, math.nan), exact))
    noisy = rows("native", dtype, 0.03)  # a machine that does not repeat itself
    for name in ("retain", "reweight"):
        assert not list(judge(rows(name, dtype, 0.99 * NOISE * 0.03), noisy))
        assert list(judge(rows(name, dtype, 1.01 * NOISE * 0.03), noisy))


def test_sixteen_bits_are_held_to_the_oracle() -> None:
    native = rows("native", "bfloat16", 0.0, oracle=0.02)
    assert not list(judge(rows("reweight", "bfloat16", 0.3, oracle=0.0219), native))
    (broken,) = judge(rows("reweight", "bfloat16", 0.01, oracle=0.0221), native)
    assert broken["bound"].startswith(f"{ORACLE_BOUND} times")
    assert list(judge(rows("reweight", "bfloat16", 0.01, oracle=math.nan), native))
    assert not list(judge(rows("reweight", "bfloat16", 0.3), native))  # without an oracle
