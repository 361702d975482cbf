"""`leangrpo score`: pictures of a folder, and all that can be wrong with them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from PIL import Image, PngImagePlugin
from reward_twins import clip_folder
from test_rewards import picture
from typer.testing import CliRunner

from leangrpo.cli import app
from leangrpo.cli_score import find, reward_of
from leangrpo.errors import LeanError
from leangrpo.reward_clip import AestheticHead
from leangrpo.rewards import jpeg_compressibility, ocr

HEIGHTS = (32, 32, 32)


def save(image: torch.Tensor, file: Path, **options: object) -> None:
    pixels = (image * 255).round().byte().permute(1, 2, 0).numpy()
    Image.fromarray(pixels).save(file, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three readable pictures, each with its prompt in another place, a note and a broken file."""
    made = tmp_path / "pictures"
    made.mkdir()
    text = PngImagePlugin.PngInfo()
    text.add_text("parameters", "the number 47\nNegative prompt: none\nSteps: 3")
    save(picture("47"), made / "a.png", pnginfo=text)
    save(picture("80", "red"), made / "b.jpg", quality=95)
    (made / "b.txt").write_text("the number 80 in red\n", encoding="utf-8")
    save(picture("13"), made / "c.webp", lossless=True)
    (made / "metadata.jsonl").write_text(
        '{"file_name": "c.webp", "prompt": "what is written", "text": "31"}\n', encoding="utf-8"
    )
    (made / "d.png").write_bytes((made / "a.png").read_bytes()[:60])
    (made / "e.png").write_bytes(b"no picture")
    (made / "notes.md").write_text("none of ours", encoding="utf-8")
    return made


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["score", *words], catch_exceptions=True)
    if isinstance(done.exception, LeanError):
        return 2, str(done.exception)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output + done.stderr


def test_a_folder_with_three_rewards(folder: Path, tmp_path: Path) -> None:
    clip, head = clip_folder(tmp_path / "clip"), tmp_path / "head.pth"
    torch.save(AestheticHead(24).state_dict(), head)
    out = tmp_path / "scores.json"
    aesthetic = f"{{name: aesthetic, model: {clip}, weights: {head}, weight: 0.5}}"
    words = [str(folder), "-r", "ocr", "-r", "jpeg_compressibility=0.002", "-r", aesthetic]
    code, text = run(*words, "--json", str(out))
    assert code == 0, text
    result = json.loads(out.read_text(encoding="utf-8"))
    rows = {row["file"]: row for row in result["images"]}
    assert list(rows) == ["a.png", "b.jpg", "c.webp"]
    assert [row["prompt"] for row in rows.values()] == [
        *("the number 47", "the number 80 in red", "what is written"),
    ]
    images = torch.stack([picture("47"), picture("13")])
    expected = ocr(images, ["47", "13"], [{}, {"text": "31"}])
    assert expected == [1.0, 0.0]
    assert [rows[n]["scores"]["ocr"] for n in ("a.png", "c.webp")] == expected
    jpeg = jpeg_compressibility(images, ["", ""], [{}, {}])
    assert [rows[n]["scores"]["jpeg_compressibility"] for n in ("a.png", "c.webp")] == jpeg
    for row in rows.values():
        one = row["scores"]
        total = one["ocr"] + 0.002 * one["jpeg_compressibility"] + 0.5 * one["aesthetic"]
        assert row["total"] == pytest.approx(total, abs=1e-9)
    mean = sum(row["scores"]["ocr"] for row in rows.values()) / 3
    assert result["means"]["ocr"] == pytest.approx(mean)
    assert {s["file"] for s in result["skipped"]} == {"d.png", "e.png"}
    assert re.search(r"mean of 3 .* " + re.escape(f"{mean:.4f}"), text)
    assert "skipped e.png: it cannot be read" in text
    assert set(result["reward_seconds"]) == {"ocr", "jpeg_compressibility", "aesthetic"}


def test_prompts_from_a_file(folder: Path, tmp_path: Path) -> None:
    for name in ("d.png", "e.png"):
        (folder / name).unlink()
    lines = tmp_path / "prompts.txt"
    lines.write_text("47\n80\n13\n", encoding="utf-8")
    assert [p.prompt for p in find(folder, lines)[0]] == ["47", "80", "13"]
    table = tmp_path / "prompts.csv"
    table.write_text("file_name,prompt,text\na.png,one,47\n", encoding="utf-8")
    found = find(folder, table)[0]
    assert [p.prompt for p in found] == ["one", None, None]
    assert found[0].metadata == {"text": "47"}
    code, text = run(str(folder), "-r", "ocr", "--prompts", str(table))
    assert code == 0 and "skipped b.jpg: it has no prompt" in text
    assert run(str(folder), "-r", "jpeg_compressibility", "--prompts", str(table))[0] == 0
    lines.write_text("47\n80\n", encoding="utf-8")
    assert (
        "it has 2 lines, and there are 3 pictures"
        in run(str(folder), "-r", "ocr", "--prompts", str(lines))[1]
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-r", "ocrr"], "Did you mean `ocr`?"),
        (["-r", "ocr=x"], "it must be NAME or NAME=WEIGHT"),
        (["-r", "ocr=nan"], "it must be finite"),
        (["-r", "ocr", "-r", "ocr"], "it is given twice"),
        (["-r", "{name: ocr, colour: red}"], "colour"),
        (["-r", "{name: ocr"], "it is no YAML mapping"),
        (["-r", "{}"], "it must be given"),
        (["-r", "{name: clipscore, model: none/of/these}"], "has not the form of a hub id"),
        (["-r", "judge"], "reward `judge` needs it"),
        (["-r", "ocr", "--prompts", "none.jsonl"], "there is no such file"),
        (["-r", "ocr", "--json", "none/a.json"], "cannot be written"),
    ],
)
def test_words_that_are_refused(folder: Path, words: list[str], text: str) -> None:
    code, said = run(str(folder), *words)
    assert code == 2 and text in said


def test_folders_without_pictures(tmp_path: Path) -> None:
    assert "it is no folder" in run(str(tmp_path / "none"), "-r", "ocr")[1]
    assert "has no .png" in run(str(tmp_path), "-r", "ocr")[1]
    (tmp_path / "a.png").write_bytes(b"")
    code, said = run(str(tmp_path), "-r", "jpeg_compressibility")
    assert code == 2 and "a.png: it cannot be read" in said
    save(picture("1"), tmp_path / "b.png")
    code, said = run(str(tmp_path), "-r", "ocr")
    assert code == 2 and "b.png: it has no prompt" in said and "--prompts FILE" in said
    (tmp_path / "metadata.jsonl").write_text("[1]\n", encoding="utf-8")
    assert "entry 1 has no file_name" in run(str(tmp_path), "-r", "ocr")[1]


def test_rewards_in_words() -> None:
    assert reward_of("-r", "ocr")[1] == 1.0
    reward, weight = reward_of("-r", "jpeg_compressibility=-2e-3")
    assert (reward.name, weight) == ("jpeg_compressibility", -0.002)
    url = "http://127.0.0.1:8000/?a=3"
    assert reward_of("-r", url)[0].name == url
