"""How near two gradients are, and how near a schedule's has to be to native's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .parallel import World

QUANTITIES = ("gradient", "update", "first_moment", "second_moment")
BOUNDS = {"float64": 1e-12, "float32": 5e-6}
"""Largest relative L2 distance of a gradient from native's, where it need not be bitwise.

A gradient is the sum of some 1e3 to 1e4 rounded terms of random signs; see `docs/verify.md`.
"""
ORACLE_BOUND = 1.1
"""In 16 bits, how much further from the oracle than native a gradient may be."""
NOISE = 4.0
"""Where native does not repeat itself bitwise, how many times its own distance is allowed."""


def alignment(a: Sequence[Tensor], b: Sequence[Tensor], world: World) -> dict[str, Any]:
    """Cosine, relative L2 |a - b| / |b|, largest difference of an element, and whether bitwise.

    `a` and `b` are this rank's parts, summed over in float64; with copies on every rank each
    counts equally often, which leaves the ratios as they are.
    """
    sums = torch.zeros(4, dtype=torch.float64)
    most = torch.zeros(2, dtype=torch.float64)
    for mine, theirs in zip(a, b, strict=True):
        x, y = mine.double(), theirs.double()
        gap = x - y
        sums += torch.stack([(x * y).sum(), (x * x).sum(), (y * y).sum(), (gap * gap).sum()])
        if len(gap):
            most[0] = torch.maximum(most[0], gap.abs().max())
        most[1] = max(float(most[1]), float(not torch.equal(mine, theirs)))
    dot, size_a, size_b, gap_size = world.sum(sums).tolist()
    max_abs, differs = world.max(most).tolist()
    lengths = math.sqrt(size_a * size_b)
    return {
        "cosine": dot / lengths if lengths else float(size_a == size_b),
        "rel_l2": math.sqrt(gap_size / size_b) if size_b else (math.inf if gap_size else 0.0),
        "max_abs": max_abs,
        "bitwise": not differs,
    }


def judge(
    rows: Mapping[str, dict[str, Any]], noise: Mapping[str, dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """The bounds that a schedule breaks, by its rows and those of native's second update.

    What need not be bitwise is held to its gradient: the update and the moments follow from it.
    """
    gradient, own = rows["gradient"], noise["gradient"]
    name, dtype = gradient["schedule"], gradient["dtype"]
    allowed = NOISE * own["rel_l2"]
    if name in ("retain", "retain:offload"):
        for quantity, row in rows.items():
            if noise[quantity]["bitwise"] and not row["bitwise"]:
                yield {**row, "bound": "bitwise native's"}
                return
        if not own["bitwise"] and not gradient["rel_l2"] <= allowed:
            yield {**gradient, "bound": f"{NOISE:g} times the distance of two native updates"}
    elif dtype in BOUNDS:
        if not gradient["rel_l2"] <= max(BOUNDS[dtype], allowed):
            yield {**gradient, "bound": f"relative L2 at most {max(BOUNDS[dtype], allowed):.2g}"}
    elif own["bitwise"] and gradient["oracle_rel_l2"] is not None:
        most = ORACLE_BOUND * own["oracle_rel_l2"]
        if not gradient["oracle_rel_l2"] <= most:
            bound = f"{ORACLE_BOUND} times native's distance from the oracle ({most:.3g})"
            yield {**gradient, "bound": bound}
