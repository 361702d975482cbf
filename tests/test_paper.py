"""The paper's figures: what is measured for them, what is kept of it, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from leangrpo import bench, paper
from leangrpo.bench_model import make_bench_model
from leangrpo.checks import check
from leangrpo.cli import app
from leangrpo.errors import LeanError
from leangrpo.layout import classic_layout, shared_layout
from leangrpo.loading import load_pipeline

POINTS = {
    "figure3": paper.speedup_points(),
    "figure4": paper.breakdown_points(),
    "figure6": paper.precision_points(),
    "table1": paper.ablation_points(),
}


@pytest.mark.parametrize("name", POINTS)
def test_every_workload_is_allowed(name: str) -> None:
    for point in POINTS[name]:
        config = point.config()
        check(config, files=False)
        for variant in bench.bench_variants(config, point.schedules).values():
            make = shared_layout if variant.parallel.layout == "shared" else classic_layout
            r = variant.rollout
            layout = make(r.prompts, r.generations, point.ranks, r.micro_batch)
            assert layout.prompts * layout.generations == r.prompts * r.generations


def test_every_map_cell_is_allowed() -> None:
    for model in paper.MAP_MODELS:
        for train in ("full", "lora"):
            for axis, values in paper.MAP_AXES.items():
                for value in values:
                    config = paper.map_config(model, train, axis, value)
                    check(config, files=False)
                    held = config.rollout.generations / paper.MAP_RANKS
                    selected = config.selection.fraction * config.sampling.steps
                    wanted = held if axis == "generations of a rank" else selected
                    assert wanted == value


def test_figure_3_compares_what_the_paper_does() -> None:
    lines: dict[str, set[str]] = {}
    for point in POINTS["figure3"]:
        lines.setdefault(point.panel, set()).add(point.line)
    assert [len(names) for names in lines.values()] == [3, 3, 3, 3, 3]
    assert {p.ranks for p in POINTS["figure3"] if p.panel == "ranks"} == {1, 2, 4}
    own = [(p.panel, p.line, p.key) for p in POINTS["figure3"]]
    assert len(set(own)) == len(own)


def test_the_sizes_are_what_they_say(tmp_path: Path) -> None:
    number = make_bench_model(tmp_path / "model", *paper.SIZES["small"])
    pipe = load_pipeline(str(tmp_path / "model"))
    assert sum(p.numel() for p in pipe.transformer.parameters()) == number == 1_687_312
    assert all(p.any() for p in pipe.transformer.parameters())
    size = {"height": 32, "width": 32, "max_sequence_length": 16}
    (picture,) = pipe("a test", num_inference_steps=1, guidance_scale=1.0, **size).images
    assert picture.size == (32, 32)


ROWS = [
    {"schedule": n, "seconds": 3.0, "speedup": 1.0, "speedup_min": 1.0, "speedup_max": 1.0}
    | {"limit": None, "rollout": 1.0, "recompute": 1.0, "backward": 1.0}
    | {"peak_bytes": 4, "ledger_bytes": 0}
    for n in paper.LEAN
]


def test_what_is_measured_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted at the fifth point, four are on disk, and --redraw goes on from them."""
    asked: list[str] = []

    def answer(point: paper.Point, pipeline: str, rounds: int) -> dict[str, Any]:
        if len(asked) == 4:
            asked.append("interrupted")
            raise KeyboardInterrupt
        asked.append(point.key)
        config = point.config(pipeline)
        selected = round(10 * config.selection.fraction)
        about = {"parameters": 9, "ranks": 1, "micro_batch": 1, "steps": 10, "selected": selected}
        return about | {"rows": ROWS}

    monkeypatch.setattr(paper, "_measure", answer)
    monkeypatch.setattr(paper.Session, "pipeline", lambda session, size: "embedded")
    quiet: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        paper.run(tmp_path, only="figure6", say=quiet.append)
    kept = json.loads((tmp_path / paper.RESULTS).read_text(encoding="utf-8"))
    assert list(kept["points"]) == asked[:4]
    paper.run(tmp_path, only="figure6", redraw=True, say=quiet.append)
    assert sorted(asked[:4] + asked[5:]) == sorted(p.key for p in POINTS["figure6"])
    done = len(asked)
    (tmp_path / "figure6.svg").unlink()
    results = paper.run(tmp_path, only="figure6", redraw=True, say=quiet.append)
    assert len(asked) == done and (tmp_path / "figure6.svg").exists()
    assert [r["schedule"] for r in results["figures"]["figure6"]["result"]["rows"]][:3] == [
        *paper.LEAN
    ]
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "leangrpo bench --paper --only figure6 --out DIR" in text
    paper.run(tmp_path, only="figure6", say=quiet.append)  # anew without --redraw
    assert len(asked) == done + len(POINTS["figure6"])


def test_the_map_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper, "MAP_MODELS", {"tiny": "embedded+flow-grpo"})
    monkeypatch.setattr(paper, "MAP_AXES", {"selected steps": (1, 10)})
    results = paper.run(tmp_path, only="figure7")
    rows = results["figures"]["figure7"]["result"]["rows"]
    assert len(rows) == 2 * 2 * len(paper.MAP_MEMORY)
    assert all(r["speedup"] >= 1 for r in rows if r["schedule"])
    best = [max(r["speedup"] for r in rows if r["value"] == n) for n in (1, 10)]
    assert best[1] > best[0]  # the more steps are trained, the more there is to save
    assert "W" in (tmp_path / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "table1"], "only --paper has it"),
        (["--paper"], "--paper needs a folder"),
        (["--paper", "--out", "x", "updates=1"], "settings and schedules of its own"),
    ],
)
def test_what_does_not_go_together(words: list[str], said: str) -> None:
    with pytest.raises(LeanError, match=said):
        get_command(app).main(["bench", *words], standalone_mode=False)


def test_a_figure_there_is_not() -> None:
    with pytest.raises(LeanError, match=r"--only.*figure9.*table1, figure3"):
        paper.wanted("figure9")


def test_the_page_in_the_docs_is_what_its_results_say() -> None:
    docs = Path(__file__).parents[1] / "docs"
    results = json.loads((docs / "img/paper" / paper.RESULTS).read_text(encoding="utf-8"))
    assert paper.page(results, "img/paper/") in (docs / "results.md").read_text(encoding="utf-8")
    for name in results["figures"]:
        assert (docs / "img/paper" / f"{name}.svg").exists()
