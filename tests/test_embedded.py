"""The pipeline folder that ships in the package."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

diffusers = pytest.importorskip("diffusers")

FOLDER = Path(__file__).resolve().parents[1] / "src" / "leangrpo" / "embedded"
COLOURS = ("red", "green", "blue", "orange", "purple", "black", "brown", "teal")


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
