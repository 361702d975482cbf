"""What is exported gives in plain diffusers, bit by bit, the pictures that `sample` gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from leangrpo import checkpoint, export
from leangrpo.cli import main
from leangrpo.config import Config, load_config
from leangrpo.data import SampleKey
from leangrpo.errors import LeanError
from leangrpo.export import export_run
from leangrpo.inference import evaluate_run, sample_run
from leangrpo.loading import embedded_folder
from leangrpo.noise import INITIAL, normal
from leangrpo.parallel import leave
from leangrpo.policy import Policy
from leangrpo.report import read_run
from leangrpo.train import train

PROMPT = "the number 47 in blue"
TRAIN = {"full": "model.train=full", "lora": "model={train: lora, lora: {rank: 4, alpha: 16}}"}
NONE = {"embedded": {"text_encoder_3": None, "tokenizer_3": None}, "sd3": {}}
"""What diffusers wants to be told about a pipeline without T5."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a run of one update, made when it is first asked for."""
    root = tmp_path_factory.mktemp("runs")
    tiny.save(tiny.tiny_sd3(), root / "sd3")
    (root / "prompts.txt").write_text("a cat\na dog\n", encoding="utf-8")

    @cache
    def make(pipeline: str, kind: str, *more: str) -> Path:
        folder = root / f"run-{len(list(root.iterdir()))}"
        sampling = "{steps: 3, height: 16, width: 16, call: {max_sequence_length: 16}}"
        own = [f"sampling={sampling}", f"model.pipeline={root / 'sd3'}"]
        config = load_config(
            "embedded",
            [
                *(own if pipeline == "sd3" else ["sampling.steps=4"]),
                TRAIN[kind],
                "selection={rule: fraction, fraction: 1.0, steps: null}",
                f"prompts={{train: {root / 'prompts.txt'}, heldout: null}}",
                "rollout={prompts: 1, generations: 2, micro_batch: 1}",
                "rewards=[{name: 'test_train:brightness'}]",
                "optimizer.lr=1e-2",
                "updates=1",
                "ema.decay=0.5",
                *more,
                f"run.dir={folder}",
            ],
        )
        train(config, quiet=True)
        return folder

    return make


def of(run: Path) -> Config:
    return load_config(run / "config.yaml", [])


def sampled(
    run: Path, out: Path, monkeypatch: pytest.MonkeyPatch, ema: bool | None
) -> tuple[Tensor, list[Path]]:
    """The pictures `sample` makes, as numbers and as files."""
    seen: list[Tensor] = []
    sample = Policy.sample

    def look(self: Policy, *args: Any, **options: Any) -> Any:
        rollout = sample(self, *args, **options)
        assert rollout.images is not None
        seen.append(rollout.images)
        return rollout

    monkeypatch.setattr(Policy, "sample", look)
    files = sample_run(of(run), run, [PROMPT], out, num=2, seed=3, update=None, ema=ema)
    monkeypatch.undo()
    return torch.cat(seen), files


def plain(pipe: Any, config: Config, shape: tuple[int, ...]) -> Tensor:
    """The same pictures by the pipeline itself, from the same noise."""
    pipe.set_progress_bar_config(disable=True)
    s, pictures = config.sampling, []
    for n in range(2):
        noise = normal(3, [SampleKey(-3, 0, n)], INITIAL, shape, like=torch.empty(0))
        size = {"height": s.height, "width": s.width, **s.call}
        images = pipe(
            prompt=[PROMPT],
            num_inference_steps=s.steps,
            guidance_scale=s.guidance,
            latents=noise,
            output_type="pt",
            **size,
        )
        pictures.append(images[0])
    return torch.cat(pictures)


def assert_same_pictures(
    run: Path, out: Path, monkeypatch: pytest.MonkeyPatch, ema: bool | None = None
) -> Tensor:
    """Export, load with diffusers alone, and compare; returns the pictures."""
    config = of(run)
    result = export_run(config, run, out, ema=ema)
    source = config.model.pipeline
    base = str(embedded_folder()) if source == "embedded" else source
    none = NONE["embedded" if source == "embedded" else "sd3"]
    if result["kind"] == "lora":
        pipe = DiffusionPipeline.from_pretrained(base, **none)
        pipe.load_lora_weights(str(out))
        # Where weights begin in the original's file, and so their last bit, is not ours to say.
        pipe.transformer = deepcopy(pipe.transformer)
    else:
        pipe = DiffusionPipeline.from_pretrained(str(out), **none)
        index = json.loads((out / "model_index.json").read_text())
        original = json.loads((Path(base) / "model_index.json").read_text())
        assert {k: v for k, v in index.items() if k[0] != "_"} == {
            k: v for k, v in original.items() if k[0] != "_"
        }
    ours, files = sampled(run, out.with_name("pictures"), monkeypatch, ema)
    channels = pipe.transformer.config.in_channels
    size = ours.shape[-1] // pipe.vae_scale_factor
    theirs = plain(pipe, config, (channels, size, size))
    assert torch.equal(ours, theirs)
    for file, picture in zip(files, theirs, strict=True):
        with Image.open(file) as image:
            pixels = (picture * 255).round().to(torch.uint8).movedim(0, -1).numpy()
            assert np.array_equal(np.asarray(image), pixels)
    return theirs


@pytest.mark.parametrize("kind", TRAIN)
@pytest.mark.parametrize("pipeline", ["sd3", "embedded"])
def test_plain_diffusers_gives_the_same_pictures(
    pipeline: str,
    kind: str,
    run: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = run(pipeline, kind)
    mean = assert_same_pictures(folder, tmp_path / "mean", monkeypatch)
    own = assert_same_pictures(folder, tmp_path / "own", monkeypatch, ema=False)
    assert not torch.equal(mean, own)


def test_the_lines_that_load_it(run: Callable[..., Path], tmp_path: Path) -> None:
    """What the command prints is all that has to be typed."""
    folder = run("embedded", "full")
    out = tmp_path / "it's"
    out.mkdir()  # empty, so it can be taken
    result = export_run(of(folder), folder, out, update=1)
    assert (result["kind"], result["update"], result["ema"]) == ("full", 1, True)
    (line,) = result["load"]
    pipe = eval(line, {"DiffusionPipeline": DiffusionPipeline})
    assert type(pipe).__name__ == "StableDiffusion3Pipeline"
    assert [p.name for p in tmp_path.iterdir()] == [out.name]


def test_the_command(
    run: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, out = run("sd3", "lora"), tmp_path / "out"
    words = ["export", folder, out, "--update", 1, "--no-ema", "--json", tmp_path / "result.json"]
    capsys.readouterr()  # what the run has said
    monkeypatch.setattr("sys.argv", ["leangrpo", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (None, 0)
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        f"{out}: LoRA of update 1; diffusers loads it with",
        f"  pipe.load_lora_weights('{out}')",
    ]
    assert said.err == "update 1: the weights, not their running mean\n"
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["out"], result["ema"]) == (str(out), False)
    assert [p.name for p in out.iterdir()] == [checkpoint.LORA_FILE]


@pytest.mark.parametrize("name", ["full", "full/below", "file"])
def test_nothing_is_overwritten(
    name: str, run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "full" / "below").mkdir(parents=True)
    (tmp_path / "full" / "below" / "mine").touch()
    (tmp_path / "file").touch()
    monkeypatch.setattr(export, "load_run", lambda *_: pytest.fail("a model was loaded"))
    folder = run("sd3", "lora")
    with pytest.raises(LeanError, match=rf"{name} is not empty. Export into a new folder"):
        export_run(of(folder), folder, tmp_path / name)
    assert (tmp_path / "full" / "below" / "mine").exists()


def test_what_is_loaded_otherwise_is_not_announced(
    run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run("sd3", "full")
    load = export.load_pipeline

    def other(*args: Any, **options: Any) -> Any:
        pipe = load(*args, **options)
        next(pipe.vae.parameters()).data += 1
        return pipe

    monkeypatch.setattr(export, "load_pipeline", other)
    with pytest.raises(LeanError, match=r"vae\..* is not what was exported when diffusers loads"):
        export_run(of(folder), folder, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_master_weights_are_exported_in_the_dtype_of_the_model(
    run: Callable[..., Path], tmp_path: Path
) -> None:
    """They lie in `state/`, as one rank with master weights is a sharded one too."""
    try:
        folder = run("sd3", "full", "model={dtype: bfloat16, master_dtype: float32}")
    finally:
        leave()
    state = folder / "checkpoints" / "000001" / "state"
    written = load_file(next(state.glob("*.safetensors")))
    result = export_run(of(folder), folder, tmp_path / "out", ema=False)
    assert result["load"][0].endswith(", dtype=torch.bfloat16)")
    exported = load_file(tmp_path / "out" / "transformer" / "diffusion_pytorch_model.safetensors")
    for name, value in exported.items():
        if (key := f"model:transformer.{name}") in written:
            assert written[key].dtype == torch.float32
            assert torch.equal(value, written[key].bfloat16()), name
    assert sampled(folder, tmp_path / "pictures", pytest.MonkeyPatch(), None)[0].std() > 0


def test_a_run_without_a_running_mean(
    run: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run("sd3", "lora", "ema.decay=0")
    with pytest.raises(LeanError, match=r"no running mean: it was made with ema.decay=0"):
        export_run(of(folder), folder, tmp_path / "out", ema=True)
    capsys.readouterr()
    result = export_run(of(folder), folder, tmp_path / "out")
    assert result["ema"] is False
    assert capsys.readouterr().err == ""


def test_evaluate_scores_the_running_mean_as_training_does(
    run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = of(run("sd3", "lora")).prompts.train
    folder = run("sd3", "lora", f"prompts.heldout={prompts}", "evaluation.rewards=[]")
    line = read_run(folder).evaluations[-1]
    capsys.readouterr()
    assert evaluate_run(of(folder), folder, None)["reward"] == line["reward"]
    assert evaluate_run(of(folder), folder, None, ema=False)["reward"] != line["reward"]
    assert capsys.readouterr().err.splitlines() == [
        "update 1: the running mean of the weights",
        "update 1: the weights, not their running mean",
    ]
