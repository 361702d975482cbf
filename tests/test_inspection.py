"""`leangrpo check`: what it finds, what it tries, and what it says when that fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import zoo
from typer.testing import CliRunner

from leangrpo.cli import app
from leangrpo.errors import LeanError
from leangrpo.schedules import Retain

SMALL = ["sampling.height=16", "sampling.width=16"]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    build = {"sd3": tiny.tiny_sd3, "flux": tiny.tiny_flux, "sd": tiny.tiny_sd}
    for name, make in build.items():
        tiny.save(make(), root / name)
    bare = root / "bare"
    tiny.save(tiny.tiny_sd3(), bare)
    for weights in bare.rglob("*.safetensors"):
        weights.unlink()
    return {name: root / name for name in (*build, "bare")}


def run(*words: str | Path, tmp_path: Path) -> tuple[int, dict[str, Any], str]:
    file = tmp_path / "report.json"
    ended = CliRunner().invoke(app, ["check", *map(str, words), *SMALL, "--json", str(file)])
    if isinstance(ended.exception, LeanError):
        raise ended.exception
    report = json.loads(file.read_text(encoding="utf-8"))
    return ended.exit_code, report, ended.output


@pytest.mark.parametrize(
    ("name", "kernel", "denoiser", "guidance"),
    [
        ("sd3", "flow_sde", "transformer", ["guidance_scale"]),
        (
            "flux",
            "flow_sde",
            "transformer",
            ["guidance_scale", "true_cfg_scale", "embedded in transformer"],
        ),
        ("sd", "ddim", "unet", ["guidance_scale"]),
    ],
)
def test_what_is_found(
    name: str,
    kernel: str,
    denoiser: str,
    guidance: list[str],
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    code, report, text = run(folders[name], tmp_path=tmp_path)
    assert (code, report["trainable"], report["kernel"]) == (0, True, kernel)
    assert list(report["denoisers"]) == [denoiser]
    assert "attn" in report["denoisers"][denoiser]["lora_targets"][0]
    assert report["guidance"] == guidance
    assert report["retain_bitwise"] is True
    assert 0 < report["reweight_rel_l2"] < report["bound"] == 5e-6
    assert report["denoiser_calls"] == {"native": 12, "retain": 8, "reweight": 8}
    assert report["without_gradient"] == []
    assert len(report["table"]) == 5
    assert "can be trained: the three schedules give the same gradient" in text


def test_a_twin_needs_no_weights(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(LeanError, match="diffusers cannot load it"):
        run(folders["bare"], tmp_path=tmp_path)
    code, report, text = run(folders["bare"], "--tiny", tmp_path=tmp_path)
    assert (code, report["twin"], report["trainable"]) == (0, True, True)
    assert "a random twin" in text


def test_float64_and_adapters(folders: dict[str, Path], tmp_path: Path) -> None:
    words = folders["sd3"], "model.dtype=float64", "model.train=lora"
    code, report, _ = run(*words, tmp_path=tmp_path)
    assert code == 0
    assert report["reweight_rel_l2"] < report["bound"] == 1e-12
    assert report["trained"] < report["denoisers"]["transformer"]["parameters"]


def test_a_recipe_is_checked_with_its_settings(folders: dict[str, Path], tmp_path: Path) -> None:
    words = "embedded", f"model.pipeline={folders['sd3']}", "sampling.call={}", "sampling.steps=5"
    code, report, _ = run(*words, tmp_path=tmp_path)
    assert code == 0
    assert len(report["noise"]) == 5


def test_the_wrong_kernel_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    code, report, text = run(folders["sd3"], "kernel.name=ddim", tmp_path=tmp_path)
    assert (code, report["trainable"]) == (1, False)
    assert "needs one of: flow_sde" in report["refused"]
    assert "cannot be trained: `kernel.name` is 'ddim'" in text


def test_schedules_that_do_not_agree_are_seen(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = Retain._seed
    wrong = lambda self, t, c: seed(self, t, c) * (1 + 1e-4 * (t.step > 0))  # noqa: E731
    monkeypatch.setattr(Retain, "_seed", wrong)
    code, report, text = run(folders["sd3"], tmp_path=tmp_path)
    assert (code, report["trainable"], report["retain_bitwise"]) == (1, False, False)
    assert report["retain_rel_l2"] > 5e-6
    assert "cannot be trained: the schedules do not agree" in text


def test_a_pipeline_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LeanError, match="there is no such folder"):
        run("./no/such/folder", tmp_path=tmp_path)
    assert torch.is_grad_enabled()


def test_a_pipeline_that_wants_a_picture_gets_one(tmp_path: Path) -> None:
    zoo.SPECIMENS["FluxKontext"].build().save_pretrained(tmp_path / "kontext")
    own = ["sampling.call={max_sequence_length: 8, _auto_resize: false, max_area: 256}"]
    code, report, text = run(tmp_path / "kontext", *own, tmp_path=tmp_path)
    assert (code, report["trainable"], report["media"]) == (0, True, ["image"])
    assert "takes          image" in text


def test_one_of_two_denoisers(tmp_path: Path) -> None:
    """Steps that the frozen one serves have no noise and are not tried."""
    tiny.save(tiny.tiny_wan22(), tmp_path / "wan")
    own = ["model.denoisers=[transformer_2]", "sampling.num_frames=5", "sampling.steps=5"]
    code, report, _ = run(tmp_path / "wan", *own, tmp_path=tmp_path)
    assert code == 0
    assert list(report["denoisers"]) == ["transformer", "transformer_2"]
    assert report["noise"][0] == 0.0 < report["noise"][-1]
    assert report["selected"][0] > 0
