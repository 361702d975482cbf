"""The record of a run: what is on disk, what survives a kill, what a terminal sees."""

from __future__ import annotations

import base64
import io
import json
import math
import os
import re
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from rich.console import Console
from synthetic_run import config, evaluation, metrics, pictures, synthetic_run

from leangrpo.console import LiveView, print_safely
from leangrpo.errors import LeanError
from leangrpo.pictures import cut_out, save_grid, to_picture
from leangrpo.report import RunRecord, read_run

SUMMARY = {"schedule": "reweight", "seed": 0, "updates": 3, "seconds": 9.0, "stopped": "finished"}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard would draw."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its protobuf
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        board = EventAccumulator(str(folder / "tensorboard"))
        board.Reload()
    return {tag: [(e.step, e.value) for e in board.Scalars(tag)] for tag in board.Tags()["scalars"]}


def age_board(folder: Path) -> None:
    """Put TensorBoard's files a second back.

    Their names are `events.out.tfevents.<second>.<host>.<pid>.<counter>` and are read in the order
    of text, so of two writers in one second the tenth would come before the ninth.
    """
    for path in (folder / "tensorboard").iterdir():
        second, rest = path.name.removeprefix("events.out.tfevents.").split(".", 1)
        path.rename(path.with_name(f"events.out.tfevents.{int(second) - 1:010d}.{rest}"))


def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = synthetic_run(tmp_path / "run", updates=3, every=3)
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml",
        "metrics.jsonl",
        "evaluations.jsonl",
        "samples",
        "tensorboard",
        "summary.json",
        "report.html",
        ".lock",
        "log.txt",
    }
    assert lines(folder / "metrics.jsonl") == [metrics(n, 3) for n in (1, 2, 3)]  # floats exactly
    run = read_run(folder)
    assert [line["update"] for line in run.evaluations] == [0, 3]
    assert [line["grid"] for line in run.evaluations] == [
        "samples/000000.png",
        "samples/000003.png",
    ]
    summary = json.loads((folder / "summary.json").read_text())
    assert run.summary == summary
    assert summary["recipe"] == "embedded" and summary["images"] == 3 * 96
    assert summary["heldout_exact_before"] == run.evaluations[0]["exact"]
    assert summary["heldout_reward_after"] == run.evaluations[1]["reward"]
    assert summary["reward_first"] == run.metrics[0]["reward_mean"]
    drawn = scalars(folder)
    assert [step for step, _ in drawn["reward/mean"]] == [1, 2, 3]
    assert [step for step, _ in drawn["heldout/exact"]] == [0, 3]
    wanted = {"reward/std", "train/loss", "train/grad_norm", "heldout/reward", "time/rollout"}
    assert wanted <= drawn.keys() and "train/kl" not in drawn
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 2 and "3 updates (reweight)" in out[0] and "report.html" in out[1]


def test_a_run_without_anything(tmp_path: Path) -> None:
    record = RunRecord.create(tmp_path / "a" / "run", config(), quiet=True)
    summary = record.finish({**SUMMARY, "updates": 0, "stopped": "interrupted"})
    assert summary["heldout_reward_before"] is None and summary["images"] == 0


def test_plain_lines_where_there_is_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = RunRecord.create(tmp_path, config(updates=40))
    record.metrics(metrics(7))
    record.evaluation(evaluation(7), pictures(7), ["a"] * 16, [0.0] * 16)
    record.close()
    update, heldout = capsys.readouterr().out.splitlines()
    pattern = r"update  7/40  reward +-\d.* ± .*  advantage .*  grad .* images/s  \[.* s\]  3 min"
    assert re.match(pattern, update) and "backward 1." in update
    assert heldout.startswith("held-out at update 7: reward -") and heldout.endswith("% exact")
    assert (tmp_path / "log.txt").read_text().splitlines() == [update, heldout]


def test_non_finite_numbers_become_null(tmp_path: Path) -> None:
    record = RunRecord.create(tmp_path, config(), quiet=True)
    broken = metrics(1, rewards={"a": math.nan}, grad_norm=math.inf)
    record.metrics({**broken, "reward_mean": None, "reward_std": None})
    line = evaluation(1)
    line["per_prompt"][0]["reward"] = -math.inf
    record.evaluation(line, pictures(1), ["a"] * 16, [math.nan] * 16)
    record.finish({**SUMMARY, "seconds": 1.0})
    run = read_run(tmp_path)
    assert run.metrics[0]["rewards"] == {"a": None} and run.metrics[0]["grad_norm"] is None
    assert run.evaluations[0]["per_prompt"][0]["reward"] is None
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_resume_drops_what_comes_again(tmp_path: Path) -> None:
    synthetic_run(tmp_path, updates=4, every=2, finish=False)
    age_board(tmp_path)
    whole = {
        name: (tmp_path / name).read_bytes() for name in ("metrics.jsonl", "evaluations.jsonl")
    }
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"update": 5, "reward_me')  # a kill while writing
    record = RunRecord.resume(tmp_path, 2, config(updates=4, seed=1), quiet=True)
    assert [line["update"] for line in read_run(tmp_path).metrics] == [1, 2]
    assert [line["update"] for line in read_run(tmp_path).evaluations] == [0, 2]
    assert sorted(p.name for p in (tmp_path / "samples").iterdir()) == ["000000.png", "000002.png"]
    for update in (3, 4):
        record.metrics(metrics(update, 4))
    rows = evaluation(4, 4, [f"the number {n}" for n in range(64)])
    record.evaluation(rows, pictures(4, 4), ["a"] * 16, [0.0] * 16)
    record.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole["metrics.jsonl"]
    assert read_run(tmp_path).config["seed"] == 1
    drawn = scalars(tmp_path)
    assert [step for step, _ in drawn["reward/mean"]] == [1, 2, 3, 4]
    assert [step for step, _ in drawn["heldout/reward"]] == [0, 2, 4]


def test_resume_before_the_first_checkpoint_starts_over(tmp_path: Path) -> None:
    synthetic_run(tmp_path, updates=2, every=1, finish=True)
    RunRecord.resume(tmp_path, -1, config(), quiet=True).close()
    run = read_run(tmp_path)
    assert run.metrics == [] and run.evaluations == [] and run.summary is None
    assert list((tmp_path / "samples").iterdir()) == []


def test_a_half_written_last_line_is_left_out(tmp_path: Path) -> None:
    synthetic_run(tmp_path, updates=3, every=0, finish=False)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    assert [line["update"] for line in read_run(tmp_path).metrics] == [1, 2]


@pytest.mark.parametrize("text", [None, "a: [", "just text", ""])
def test_what_is_no_run_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(LeanError, match="is not a run: i"):
        read_run(tmp_path)


def test_a_half_written_summary_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(config())
    (tmp_path / "summary.json").write_text('{"recipe": "em')
    assert read_run(tmp_path).summary is None


def test_a_disk_that_refuses_is_said_plainly(tmp_path: Path) -> None:
    record = RunRecord.create(tmp_path / "run", config(), quiet=True)
    (tmp_path / "run" / "metrics.jsonl").mkdir()
    with pytest.raises(LeanError, match=r"metrics\.jsonl cannot be written: .*--resume"):
        record.metrics(metrics(1))
    record.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(LeanError, match="cannot be written"):
        RunRecord.create(tmp_path / "file" / "run", config())


def test_a_page_that_fails_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("leangrpo.page.render", lambda run: 1 / 0)
    record = RunRecord.create(tmp_path, config(), quiet=True)
    assert record.finish(SUMMARY)["updates"] == 3
    assert "warning: report.html could not be written" in capsys.readouterr().out


def test_failed_says_what_is_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = RunRecord.create(tmp_path, config(), quiet=True)
    record.metrics(metrics(1))
    record.failed(RuntimeError("x"), 1)
    assert f"leangrpo train {tmp_path} --resume" in capsys.readouterr().out
    assert (tmp_path / "report.html").is_file()


# -- pictures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "enlarged"),
    [((3, 3, 32, 32), 96), ((1, 1, 8, 8), 96), ((9, 3, 100, 140), 100), ((2, 5, 3, 16, 16), 96)],
)
def test_grid_holds_every_picture(tmp_path: Path, shape: tuple[int, ...], enlarged: int) -> None:
    images = torch.rand(shape)
    record = RunRecord.create(tmp_path, config(), quiet=True)
    prompts = ["a very long prompt " * 9 + "\n日本"] * len(images)
    record.evaluation(evaluation(2), images, prompts, [0.5] * len(images))
    record.close()
    path = tmp_path / "samples" / "000002.png"
    with Image.open(path) as sheet:
        columns, rows = min(8, len(images)), math.ceil(len(images) / 8)
        assert sheet.width >= columns * enlarged and sheet.height >= rows * enlarged
    assert len(cut_out(path)) == len(images)
    frame = images[0, 2] if len(shape) == 5 else images[0]
    if shape[-1] <= 32:  # stored as they are
        own = Image.open(io.BytesIO(base64.b64decode(cut_out(path)[0].split(",")[1])))
        assert own.tobytes() == to_picture(frame).tobytes()


def test_no_pictures_no_grid(tmp_path: Path) -> None:
    record = RunRecord.create(tmp_path, config(), quiet=True)
    record.evaluation(evaluation(0), torch.zeros(0, 3, 8, 8), [], [])
    record.close()
    assert read_run(tmp_path).evaluations[0]["grid"] is None


def test_a_broken_pixel_is_seen() -> None:
    image = torch.zeros(3, 2, 2, dtype=torch.bfloat16)
    image[0, 0, 1] = math.nan
    assert to_picture(image).getpixel((1, 0)) == (255, 0, 255)
    assert to_picture(image).getpixel((0, 0)) == (0, 0, 0)


def test_grid_is_the_same_every_time(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        save_grid(pictures(3), ["p"] * 16, [0.0] * 16, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


# -- terminals -------------------------------------------------------------------------------------


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


class Ascii(io.StringIO):
    def write(self, text: str) -> int:
        text.encode("ascii")
        return super().write(text)


def test_a_closed_output_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Gone())
    record = RunRecord.create(tmp_path, config())
    record.metrics(metrics(1))
    record.metrics(metrics(2))
    record.finish(SUMMARY)
    assert len(lines(tmp_path / "metrics.jsonl")) == 2


@pytest.mark.parametrize("stdout", [None, "closed"])
def test_no_output_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stdout: object) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", None if stdout is None else closed)
    record = RunRecord.create(tmp_path, config())
    record.metrics(metrics(1))
    record.close()


def test_an_output_without_our_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Ascii())
    print_safely("1 ± 2")
    assert sys.stdout.getvalue() == "1 ? 2\n"  # type: ignore[attr-defined]


def test_a_reader_that_leaves_a_real_pipe(tmp_path: Path) -> None:
    code = (
        "from synthetic_run import config, metrics\n"
        "from leangrpo.report import RunRecord\n"
        f"record = RunRecord.create({str(tmp_path)!r}, config())\n"
        "for n in range(1, 6): record.metrics(metrics(n))\n"
        f"record.finish({SUMMARY!r})\n"
    )
    read, write = os.pipe()
    os.close(read)
    run = subprocess.run(
        [sys.executable, "-c", code],
        stdout=write,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        timeout=60,
    )
    os.close(write)
    assert (run.returncode, run.stderr) == (0, b"")
    assert len(lines(tmp_path / "metrics.jsonl")) == 5 and (tmp_path / "summary.json").is_file()


def test_live_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Console(file=io.StringIO(), force_terminal=True, width=120, highlight=False)
    record = RunRecord.create(tmp_path, config(updates=40), quiet=True)
    record.quiet, record._live = False, LiveView(40, seen)
    record.metrics(metrics(1))
    record.metrics(metrics(2))
    record.finish(SUMMARY)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.file.getvalue())  # type: ignore[attr-defined]
    assert Counter(re.findall(r"update +(\d)/40", text)) == {"1": 1, "2": 1}
    assert "2/40" in text and "min" in text


def test_live_view_of_a_closed_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Gone())
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    view = LiveView(3)
    view.show("update 1/3  …  1 s left", 1)
    view.show("held-out")
    view.close()


def test_a_folder_is_one_processs(tmp_path: Path) -> None:
    record = RunRecord.create(tmp_path / "run", "updates: 2", quiet=True)
    with pytest.raises(LeanError, match="another process is training in it"):
        RunRecord.resume(tmp_path / "run", 0, "updates: 2", quiet=True)
    record.close()
    RunRecord.resume(tmp_path / "run", 0, "updates: 2", quiet=True).close()
    with pytest.raises(LeanError, match="already holds a run"):
        RunRecord.create(tmp_path / "run", "updates: 2", quiet=True)
