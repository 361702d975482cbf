"""The page of a run: complete, self-contained, harmless, and there for runs of any length."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, PngImagePlugin
from synthetic_run import config, heldout, metrics, synthetic_run

from leangrpo import charts
from leangrpo.errors import LeanError
from leangrpo.page import render, write_page
from leangrpo.pictures import cut_out
from leangrpo.runfolder import Run, read_run

VOID = {"meta", "link", "img", "input", "br"}


class Page(HTMLParser):
    """Checks that elements nest, and collects them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ""
        if inside == "script":
            self.scripts.append(data)
        elif inside != "style":
            self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def run_of(updates: int = 0, **fields: Any) -> Run:
    tree = {"recipe": "r", "updates": updates, "schedule": "retain"}
    lines = [metrics(n, updates) for n in range(1, updates + 1)]
    return Run(Path("none"), tree, fields.pop("metrics", lines), [], None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_run(tmp_path_factory.mktemp("page"), updates=12, every=4)


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return Page(write_page(folder).read_text(encoding="utf-8"))


def test_sections(page: Page) -> None:
    words = " ".join(page.text)
    for title in (
        "Rewards",
        "Same prompts, same noise",
        "Where the time goes",
        "Gradient",
        "Held-out prompts",
        "How to read this page",
        "Settings",
    ):
        assert title in words
    assert "two-digit numbers in eight colours" in words
    assert "Schedule reweight:" in words and "ledger" in words
    assert "noise_level: 0.7" in words


def test_nothing_is_requested(folder: Path, page: Page) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert re.findall(r"https?://|url\(|@import|fetch\(|XMLHttp", text) == []
    for _, attributes in page.found:
        for name in ("src", "href"):
            assert (attributes.get(name) or "data:").startswith("data:")


def test_accessible(page: Page) -> None:
    assert page.all("html")[0]["lang"] == "en"
    assert all(image["alt"] for image in page.all("img"))
    assert all(svg["aria-label"] and svg["role"] == "img" for svg in page.all("svg"))
    assert all(b.get("aria-label") or b.get("data-column") for b in page.all("button"))
    assert page.all("input")[0]["aria-label"]
    ids = [a["id"] for _, a in page.found if a.get("id")]
    assert len(ids) == len(set(ids))


def test_light_dark_narrow_and_print(folder: Path) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    for rule in ("prefers-color-scheme: dark", "max-width: 560px", "@media print"):
        assert rule in text
    used = set(re.findall(r"var\((--\w+)\)", text))
    light, dark = text.split("prefers-color-scheme: dark")[:2]
    for name in used:
        assert f"{name}:" in light and f"{name}:" in dark


def test_slider_goes_through_all_evaluations(page: Page) -> None:
    data = json.loads(next(s for s in page.scripts if s.startswith("{")))
    assert [state["update"] for state in data["states"]] == [0, 4, 8, 12]
    assert len(data["sources"]) == 16 and {len(s) for s in data["sources"]} == {4}
    assert page.all("input")[0]["max"] == "3"
    assert len(page.all("img")) == 32  # without a script: the first and the last evaluation


def test_headline(page: Page) -> None:
    words = " ".join("".join(page.text).split())
    assert "held-out exact0% → 100%" in words
    assert re.search(r"held-out reward−6\.\d+ → −0\.\d+", words)


def test_prompts_are_escaped(tmp_path: Path) -> None:
    bad = ['<script>alert("1")</script>', "</script><img src=x onerror=alert(2)>", "a & 'b'"]
    folder = synthetic_run(tmp_path, updates=2, every=1, prompts=bad)
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(
        config.replace("recipe: embedded", "recipe: '<b>&'", 1).replace("reweight", "'<i>'")
    )
    page = Page(write_page(folder).read_text(encoding="utf-8"))
    assert len(page.all("script")) == 2 and len(page.all("img")) == 6
    assert not [a for _, a in page.found if "onerror" in a]
    assert set(bad) <= set(page.text) and "<b>&" in page.text


@pytest.mark.parametrize("updates", [0, 1, 2, 700])
def test_any_number_of_updates(updates: int) -> None:
    page = Page(render(run_of(updates)))
    assert "NaN" not in " ".join(page.text)
    points = [len((p["points"] or "").split()) for p in page.all("polyline")]
    assert max(points, default=0) <= 400 and len(page.all("rect")) <= 60 * 8
    for svg in page.all("svg"):
        assert svg["data-tips"] is not None and json.loads(svg["data-tips"])


def test_many_evaluations_are_thinned(tmp_path: Path) -> None:
    folder = synthetic_run(tmp_path, updates=60, every=1, prompts=heldout(2), finish=False)
    page = Page(render(read_run(folder)))
    data = json.loads(next(s for s in page.scripts if s.startswith("{")))
    shown = [state["update"] for state in data["states"]]
    assert len(shown) == 24 and shown[0] == 0 and shown[-1] == 60


def test_long_list_of_prompts_is_cut() -> None:
    rows = [{"prompt": f"p{i}", "reward": 0.0, "exact": None} for i in range(205)]
    line = {"update": 0, "reward": 0.0, "exact": None, "per_prompt": rows}
    page = Page(render(Run(Path("none"), {}, [], [line], None)))
    words = " ".join(page.text)
    assert "The first 200 of 205, at update 0;" in words
    assert "p199" in words and "p200" not in words


def test_nothing_but_nulls() -> None:
    """What a run of rewards that are never finite leaves behind."""
    kept = {"update", "schedule", "selected_steps", "time", "memory", "rewards"}
    lines = []
    for n in (1, 2, 3):
        line = {k: v if k in kept else None for k, v in metrics(n, 3).items()}
        line["time"] = dict.fromkeys(line["time"])
        lines.append({**line, "rewards": {"ocr": None}})
    rows = [{"prompt": "a", "reward": None, "exact": None}]
    evaluations = [
        {"update": n, "reward": None, "exact": None, "grid": None, "per_prompt": rows}
        for n in (0, 3)
    ]
    page = Page(render(Run(Path("none"), {"recipe": None}, lines, evaluations, {})))
    words = " ".join(page.text)
    assert "None" not in words and "nan" not in words and page.all("polyline") == []


def test_page_is_replaced_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_page(folder)
    assert path == folder / "report.html"
    before, names = path.read_bytes(), sorted(p.name for p in folder.iterdir())

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("leangrpo.runfolder.os.replace", refuse)
        with pytest.raises(LeanError, match=r"report\.html cannot be written: No space"):
            write_page(folder)
    assert path.read_bytes() == before
    write_page(folder)
    assert path.read_bytes() == before
    assert sorted(p.name for p in folder.iterdir()) == names


def test_missing_numbers_leave_gaps() -> None:
    gaps = [metrics(n, 5) for n in range(1, 6)]
    gaps[2] = {**gaps[2], "reward_mean": None, "reward_std": None, "grad_norm": None}
    gaps[3] = {**gaps[3], "excluded": 7, "zero_variance_groups": 2, "optimizer_stepped": False}
    words = " ".join(Page(render(run_of(5, metrics=gaps))).text)
    for remark in ("7 pictures", "2 groups", "1 of 5 updates", "gradient norms were not finite"):
        assert remark in words


def test_a_lost_or_foreign_picture_is_left_out(tmp_path: Path) -> None:
    folder = synthetic_run(tmp_path, updates=2, every=1, prompts=heldout(2))
    (folder / "samples" / "000001.png").write_bytes(b"no picture")
    (folder / "samples" / "000002.png").unlink()
    page = Page(render(read_run(folder)))
    assert len(page.all("img")) == 2 and page.all("input") == []


@pytest.mark.parametrize("text", [None, "{", "[]", '{"width": 96, "height": 96, "factor": 0}'])
def test_sheet_that_does_not_say_where_its_pictures_lie(tmp_path: Path, text: str | None) -> None:
    info = PngImagePlugin.PngInfo()
    if text is not None:
        info.add_text("leangrpo:grid", text)
    Image.new("RGB", (40, 20)).save(tmp_path / "a.png", pnginfo=info)
    assert len(cut_out(tmp_path / "a.png")) == 1


def test_large_pictures_are_made_small(tmp_path: Path) -> None:
    folder = synthetic_run(tmp_path, updates=1, every=1, prompts=heldout(2), size=300)
    page = Page(write_page(folder).read_text(encoding="utf-8"))
    assert all((image["src"] or "").startswith("data:image/webp") for image in page.all("img"))


def test_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(LeanError, match="is not a run"):
        write_page(tmp_path)


def test_config_of_no_recipe(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(config().replace("recipe: embedded", "recipe: null"))
    assert tmp_path.name in " ".join(Page(render(read_run(tmp_path))).text)


# -- numbers and axes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.00"),
        (-0.0, "0.00"),
        (-6.1881, "−6.19"),
        (0.1234, "0.123"),
        (1234.5, "1,234"),
        (0.00001234, "1.23e−5"),
        (None, "–"),
        (float("nan"), "–"),
    ],
)
def test_number(value: float | None, text: str) -> None:
    assert charts.number(value) == text


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-7.3, 0.2), (1e-6, 3e-6), (0, 12345), (5, 5.1)])
def test_ticks_span_the_values(low: float, high: float) -> None:
    ticks = charts.ticks(low, high)
    assert 3 <= len(ticks) <= 9
    assert ticks[0] <= low + 1e-9 * abs(low) and ticks[-1] >= high - 1e-9 * abs(high)
    texts = charts.tick_texts(ticks)
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize(("num", "most"), [(1, 5), (5, 5), (7, 3), (1000, 60)])
def test_bins_take_each_once(num: int, most: int) -> None:
    found = charts.bins(num, most)
    assert [i for run in found for i in run] == list(range(num)) and len(found) <= most


@pytest.mark.parametrize("values", [[2.0], [2.0, 2.0], [0.0, 0.0], [None, None], [1e-12, 1e12]])
def test_flat_lines_have_an_axis(values: list[float | None]) -> None:
    series = charts.Series("a", "--blue", list(range(len(values))), values)
    drawn = charts.line_chart([series], label="a")
    assert "nan" not in drawn and (drawn != "") == any(v is not None for v in values)
