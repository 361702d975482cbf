"""The pipeline folders that ship in the package."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from leangrpo.data import SampleKey
from leangrpo.loading import embedded_folder, load_pipeline
from leangrpo.policy import Policy, Sampling
from leangrpo.rewards import ocr_exact

diffusers = pytest.importorskip("diffusers")

FOLDER = Path(__file__).resolve().parents[1] / "src" / "leangrpo" / "embedded"
COLOURS = ("red", "green", "blue", "orange", "purple", "black", "brown", "teal")


STEPS = 10


@pytest.fixture(scope="module")
def ddim() -> Any:
    """The pipeline that predicts noise, in float32, as the package loads it."""
    loaded = load_pipeline("embedded-ddim")
    loaded.set_progress_bar_config(disable=True)
    return loaded


@pytest.fixture(scope="module")
def pipe() -> Any:
    """The pipeline in float32; it has no third text encoder."""
    loaded = diffusers.StableDiffusion3Pipeline.from_pretrained(
        str(FOLDER / "pipeline"),
        text_encoder_3=None,
        tokenizer_3=None,
        local_files_only=True,
        dtype=torch.float32,
    )
    loaded.set_progress_bar_config(disable=True)
    return loaded


def read_prompts(name: str) -> list[str]:
    return (FOLDER / f"prompts_{name}.txt").read_text(encoding="utf-8").splitlines()


def test_size_and_files() -> None:
    files = [p for p in (FOLDER / "pipeline").rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) <= 12 * 2**20
    assert {"model_index.json", "README.md"} <= {p.name for p in files}
    assert not [p for p in files if p.suffix in {".bin", ".pt", ".pkl"}]


def test_the_ddim_folder_is_small() -> None:
    files = [p for p in (FOLDER / "ddim").rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) <= 3 * 2**20
    assert {"model_index.json", "README.md"} <= {p.name for p in files}
    assert not [p for p in files if p.suffix in {".bin", ".pt", ".pkl"}]


def test_prompts_are_disjoint_and_complete() -> None:
    train, held_out = read_prompts("train"), read_prompts("heldout")
    every = {f"the number {n} in {c}" for n in range(10, 100) for c in COLOURS}
    assert len(train) + len(held_out) == len(every)
    assert set(train) | set(held_out) == every
    assert len(held_out) == 144
    for colour in COLOURS:  # the same share of every colour is held out
        assert sum(p.endswith(colour) for p in held_out) == 18


def test_digits_are_tokens_of_their_own(pipe: Any) -> None:
    for tokenizer in (pipe.tokenizer, pipe.tokenizer_2):
        for prompt in read_prompts("train") + read_prompts("heldout"):
            first, second = re.findall(r"\d", prompt)
            tokens = [t.removesuffix("</w>") for t in tokenizer.tokenize(prompt)]
            assert tokens == ["the", "number", first, second, "in", prompt.split()[-1]]
        assert tokenizer.model_max_length == 8


def test_weights_are_float32_and_finite(pipe: Any) -> None:
    for part in (pipe.transformer, pipe.vae, pipe.text_encoder, pipe.text_encoder_2):
        assert all(p.dtype == torch.float32 and p.isfinite().all() for p in part.parameters())


@pytest.mark.parametrize("options", [{}, {"guidance_scale": 1.0, "max_sequence_length": 0}])
def test_a_prompt_gives_an_image(pipe: Any, options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    call = {"num_inference_steps": 4, "generator": generator, "output_type": "pt", **options}
    images = pipe(prompt="the number 47 in blue", **call).images
    assert images.shape == (1, 3, 32, 32)
    background = images[0, :, 0, :].mean()
    assert background > 0.8
    assert images.min() < 0.6


def test_the_ddim_pipeline_has_stable_diffusions_scheduler(ddim: Any) -> None:
    assert type(ddim) is diffusers.StableDiffusionPipeline
    config = ddim.scheduler.config
    assert type(ddim.scheduler) is diffusers.DDIMScheduler
    assert (config.beta_start, config.beta_end) == (0.00085, 0.012)
    assert (config.beta_schedule, config.prediction_type) == ("scaled_linear", "epsilon")
    assert (config.num_train_timesteps, config.steps_offset) == (1000, 1)
    assert not config.set_alpha_to_one and not config.clip_sample
    ddim.scheduler.set_timesteps(STEPS)
    assert ddim.scheduler.timesteps.tolist() == list(range(901, 0, -100))


def test_the_ddim_weights_are_float32_and_finite(ddim: Any) -> None:
    for part in (ddim.unet, ddim.vae, ddim.text_encoder):
        assert all(p.dtype == torch.float32 and p.isfinite().all() for p in part.parameters())
    assert 8e5 < sum(p.numel() for p in ddim.unet.parameters()) < 1.6e6


def test_both_pipelines_have_one_autoencoder(pipe: Any, ddim: Any) -> None:
    """Of the shift, which StableDiffusionPipeline does not add, the copy knows nothing."""
    pairs = zip(pipe.vae.parameters(), ddim.vae.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert ddim.vae.config.shift_factor is None
    assert ddim.vae.config.scaling_factor == pipe.vae.config.scaling_factor


def test_both_pipelines_have_one_tokenizer(pipe: Any, ddim: Any) -> None:
    for prompt in read_prompts("train") + read_prompts("heldout"):
        assert ddim.tokenizer(prompt).input_ids == pipe.tokenizer(prompt).input_ids


def test_the_ddim_pictures_are_read_as_often_as_the_readme_says() -> None:
    """Of 96 held-out prompts a share p is exact, 36 % with eta 0 and 56 % with eta 1.

    A binomial of 96 trials has a standard deviation of at most 5.1 %, so that 3.5 of them are 18 %.
    The same noise gives the same pictures on any machine but for rounding, which moves few.
    """
    pytest.importorskip("onnxruntime")
    pytest.importorskip("rapidocr")
    pipe = load_pipeline("embedded-ddim")
    policy = Policy(pipe, Sampling(STEPS, guidance=1.0), kernel="ddim", noise_level=1.0)
    prompts = read_prompts("heldout")[::3] * 2
    keys = [SampleKey(0, i, 0) for i in range(len(prompts))]
    assert len(prompts) == 96
    for noisy, expected in (((), 0.36), (range(STEPS), 0.556)):
        rollout = policy.sample(prompts, keys, selected=noisy, noisy=noisy)
        exact = ocr_exact(rollout.images, prompts, [{}] * len(prompts))
        share = float(torch.as_tensor(exact).mean())
        assert abs(share - expected) < 0.18, (len(noisy), share)


def test_the_folders_have_names() -> None:
    assert embedded_folder() == FOLDER / "pipeline"
    assert embedded_folder("embedded-ddim") == FOLDER / "ddim"
