"""The drawings of the paper's figures: the numbers beside them, and their captions."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leangrpo import figures

COMMAND = "leangrpo bench --paper --only this --out DIR"


def row(schedule: str, fraction: float = 1.0, **more: Any) -> dict[str, Any]:
    """A made-up measurement: retain 1.25 times as fast as native, reweight 1.5 times."""
    ratio = {"retain": 1.25, "reweight": 1.5}.get(schedule, 1.0)
    return {
        "panel": "one",
        "line": "LoRA",
        "fraction": fraction,
        "selected": round(10 * fraction),
        "schedule": schedule,
        "seconds": 3.0 / ratio,
        "speedup": ratio,
        "speedup_min": ratio - 0.125,
        "speedup_max": ratio + 0.125,
        "limit": None if schedule == "native" else 1.625,
        "rollout": 1.0,
        "recompute": 3.0 / ratio - 2.0,
        "backward": 1.0,
        "peak_bytes": 2**20 * (1 + 3 * fraction * (schedule == "retain")),
        "ledger_bytes": 2**20 * (schedule == "reweight"),
    } | more


LEAN = ("native", "retain", "reweight")
SWEEP = {"rows": [row(name, f) for f in (0.5, 1.0) for name in LEAN]}
ABLATION = {"rows": [row(name, line=line) for line in "AB" for name in figures.ABLATION]}
CELL = {"model": "M", "train": "full", "axis": "steps"}
MAP = {
    "device": "8 x GPU",
    "rows": [
        CELL | {"value": v, "memory_gib": m, "schedule": s, "speedup": x}
        | {"checkpointing": m == 24, "offload": False}
        for v in (1, 2)
        for m, s, x in ((24, None, None), (48, "retain", 1.25), (80, "reweight", 1.5))
    ],
}  # fmt: skip

DRAWN = [
    ("figure3", figures.draw_speedup, SWEEP),
    ("figure4", figures.draw_breakdown, {"rows": SWEEP["rows"][3:]}),
    ("figure6", figures.draw_memory, SWEEP),
    ("figure7", figures.draw_map, MAP),
    ("table1", figures.draw_ablation, ABLATION),
]


@pytest.mark.parametrize(("name", "draw", "result"), DRAWN, ids=[name for name, *_ in DRAWN])
def test_a_drawing_its_numbers_and_its_caption(
    name: str, draw: Callable[..., list[Path]], result: dict[str, Any], tmp_path: Path
) -> None:
    image, data = draw(result, tmp_path, command=COMMAND)
    assert (image.name, data.name) == (f"{name}.svg", f"{name}.csv")
    drawn = image.read_text(encoding="utf-8")
    assert COMMAND in drawn
    with data.open(encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    written = [{k: "" if v is None else str(v) for k, v in r.items()} for r in result["rows"]]
    assert found == written
    draw(result, tmp_path, command=COMMAND)
    assert image.read_text(encoding="utf-8") == drawn  # nothing of the moment in it


def test_the_same_in_words() -> None:
    assert "| 50%: 1.25 / 1.50 (1.62) | 100%: 1.25 / 1.50 (1.62) |" in figures.tell_speedup(SWEEP)
    assert "| A | 1.00x | 1.00x | 1.00x | 1.25x | 1.50x |" in figures.tell_ablation(ABLATION)
    shares = figures.tell_breakdown({"rows": SWEEP["rows"][3:]})
    assert "| LoRA | native | 1.00x | 33% | 33% | 33% |" in shares
    assert "| LoRA | reweight | 1.50x | 33% | 0% | 33% |" in shares
    memory = figures.tell_memory(SWEEP)
    assert "peak at 10 steps over that at 5" in memory
    assert "| LoRA | retain | 1.60x | 4.00x | 0.0 |" in memory
    assert "| LoRA | reweight | 1.00x | 1.00x | 1.0 |" in memory
    assert "| M | full | 2 steps | – | T 1.25 | W 1.50 |" in figures.tell_map(MAP)


def test_schedules_differ_without_colour() -> None:
    looks = list(figures.STYLES.values())
    for part in ("grey", "line", "mark", "letter", "hatch"):
        assert len({getattr(one, part) for one in looks}) == len(looks)
