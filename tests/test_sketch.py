"""Networks without weights: from configuration files as the pipeline calls them, and from facts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from torch import Tensor

from leangrpo import sketch as module
from leangrpo.config import bare_config, load_config
from leangrpo.counting import META
from leangrpo.errors import LeanError
from leangrpo.loading import load_pipeline
from leangrpo.sketch import FACTS, facts, sketch

BUILD = {"sd3": tiny.tiny_sd3, "flux": tiny.tiny_flux, "wan": tiny.tiny_wan, "sd": tiny.tiny_sd}


def bare(name: str, folder: Path) -> Path:
    """A tiny pipeline's folder without a weight."""
    tiny.save(BUILD[name](), folder)
    for weights in folder.rglob("*.safetensors"):
        weights.unlink()
    return folder


def shapes(args: Any, kwargs: Any) -> dict[str, tuple[int, ...]]:
    named = {**dict(enumerate(args)), **kwargs}
    return {str(k): tuple(v.shape) for k, v in named.items() if isinstance(v, Tensor)}


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("name", BUILD)
def test_as_the_pipeline_itself_calls_it(name: str, guidance: float, tmp_path: Path) -> None:
    """The shapes of the first step's calls, against the real pipeline's; no weight is there."""
    folder = bare(name, tmp_path / "bare")
    settings = [
        f"sampling.{k}={v}" for k, v in tiny.CALL[name].items() if k != "max_sequence_length"
    ]
    settings += ["sampling.steps=2", f"sampling.guidance={guidance}"]
    if "max_sequence_length" in tiny.CALL[name]:
        settings.append(f"sampling.call={{max_sequence_length: {tiny.T5_LENGTH}}}")
    found = sketch(bare_config(str(folder), settings))

    pipe = BUILD[name]()
    calls: list[Any] = []
    real = tiny.denoiser(pipe)
    real.register_forward_pre_hook(
        lambda m, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    with torch.no_grad():
        pipe(
            "a red cube",
            num_inference_steps=1,
            guidance_scale=guidance,
            output_type="latent",
            **tiny.CALL[name],
        )
    assert shapes(found.args, found.kwargs) == shapes(*calls[0])
    assert found.calls == len(calls)
    (network,) = found.denoisers.values()
    assert {n: p.shape for n, p in network.named_parameters()} == {
        n: p.shape for n, p in real.named_parameters()
    }
    assert all(p.device == META for p in network.parameters())
    assert type(network) is type(real)
    assert "forward" not in vars(network)
    others = [
        pipe.components[n]
        for n in ("text_encoder", "text_encoder_2", "text_encoder_3")
        if pipe.components.get(n) is not None
    ]
    assert found.other_parameters == sum(p.numel() for c in others for p in c.parameters())
    assert found.vae_bytes == 4 * sum(p.numel() for p in pipe.vae.parameters())


def test_the_embedded_pipeline() -> None:
    config = load_config("embedded-lora")
    found = sketch(config)
    pipe = load_pipeline("embedded")
    (network,) = found.denoisers.values()
    trained = [p for p in network.parameters() if p.requires_grad]
    assert all("lora_" in n for n, p in network.named_parameters() if p.requires_grad)
    assert sum(p.numel() for p in network.parameters()) == sum(
        p.numel() for p in pipe.transformer.parameters()
    ) + sum(p.numel() for p in trained)
    assert found.decode is not None
    pixels = pipe.transformer.config.sample_size * pipe.vae_scale_factor
    assert config.sampling.height is None, "the pipeline's own"
    assert found.decode().shape[-2:] == (pixels, pixels)


@pytest.mark.parametrize("name", facts()["models"])
def test_parameters_are_the_published_ones(name: str) -> None:
    known = facts()["models"][name]
    with META:
        network = module._network(known["class"], known["config"])
    total = sum(p.numel() for p in network.parameters())
    assert total == pytest.approx(known["parameters"], rel=0.006), (
        "published with two or three digits"
    )


def test_encoders_have_so_many_parameters() -> None:
    """transformers' classes with the published sizes."""
    import transformers as tr

    clip = {"num_attention_heads": 12, "num_hidden_layers": 12, "intermediate_size": 3072}
    clip |= {"hidden_size": 768, "projection_dim": 768}
    big = {"num_attention_heads": 20, "num_hidden_layers": 32, "intermediate_size": 5120}
    big |= {"hidden_size": 1280, "projection_dim": 1280}
    t5 = {"d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_heads": 64, "num_layers": 24}
    t5 |= {"feed_forward_proj": "gated-gelu"}
    with META:
        made = {
            "clip-l": tr.CLIPTextModel(tr.CLIPTextConfig(**clip)),
            "clip-l-projected": tr.CLIPTextModelWithProjection(tr.CLIPTextConfig(**clip)),
            "clip-g": tr.CLIPTextModelWithProjection(tr.CLIPTextConfig(**big)),
            "t5-xxl": tr.T5EncoderModel(tr.T5Config(**t5, vocab_size=32128)),
            "umt5-xxl": tr.UMT5EncoderModel(tr.UMT5Config(**t5, vocab_size=256384)),
        }
    counts = {name: sum(p.numel() for p in m.parameters()) for name, m in made.items()}
    assert counts == facts()["encoders"]


@pytest.mark.parametrize(
    ("recipe", "shape", "calls", "latent"),
    [
        ("flux1-dev", {"hidden_states": (1, 1024, 64), "encoder_hidden_states": (1, 512, 4096)}, 1,
         (1, 16, 64, 64)),
        ("sd35-medium", {"hidden_states": (2, 16, 64, 64), "encoder_hidden_states": (2, 333, 4096)},
         1, (1, 16, 64, 64)),
        ("wan21-1.3b", {"hidden_states": (1, 16, 9, 30, 52)}, 2, (1, 16, 9, 30, 52)),
        ("sd15", {"sample": (2, 4, 64, 64)}, 1, (1, 4, 64, 64)),
        ("cogvideox", {"hidden_states": (2, 5, 16, 60, 90)}, 1, (1, 16, 5, 60, 90)),
    ],
)  # fmt: skip
def test_shapes_from_facts(recipe: str, shape: Any, calls: int, latent: Any) -> None:
    """By the pipelines' arithmetic: 8 pixels a latent element, 2 x 2 of them a token in FLUX,
    4 frames a latent one after the first, T5 after CLIP's 77 tokens in SD3."""
    found = sketch(load_config(recipe))
    assert shapes((), found.kwargs).items() >= shape.items()
    assert (found.calls, found.latent) == (calls, latent)


@pytest.mark.parametrize("name", ["flux", "sd3", "wan"])
def test_facts_agree_with_the_pipelines(name: str, tmp_path: Path) -> None:
    """A tiny pipeline with the published VAE is called by its own code with the shapes that the
    facts say (their network is wider: the last dimension is the tiny one's own)."""
    recipe = {"flux": "flux1-dev", "sd3": "sd35-medium", "wan": "wan21-1.3b"}[name]
    small = ["sampling.height=64", "sampling.width=64"]  # as far as its positions go
    config = load_config(recipe, small)
    known = facts()["models"][config.model.pipeline]
    folder = bare(name, tmp_path / "bare")
    import diffusers

    kind = getattr(diffusers, known["vae"]["class"])
    shutil.rmtree(folder / "vae")
    with META:
        kind(**known["vae"]["config"]).save_config(folder / "vae")
    own = load_config(recipe, [*small, f"model.pipeline={folder}", "model.train=full"])
    files, published = sketch(own), sketch(config)
    key = "hidden_states"
    assert (
        files.kwargs[key].shape[2 if name != "flux" else 1 : 5 if name != "flux" else 2]
        == (published.kwargs[key].shape[2 if name != "flux" else 1 : 5 if name != "flux" else 2])
    )
    assert files.kwargs[key].shape[0] == published.kwargs[key].shape[0]
    assert files.calls == published.calls


def test_every_anchor_of_the_facts_is_used() -> None:
    text = FACTS.read_text(encoding="utf-8")
    assert set(yaml.safe_load(text)) == {"vaes", "encoders", "models"}


def test_a_model_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_from_files", _unreachable)
    with pytest.raises(LeanError, match=r"hf download.*FLUX\.1-dev"):
        sketch(load_config("embedded", ["model.pipeline=nobody/nothing"]))
    with pytest.raises(LeanError, match="SDXL|stable-diffusion-3.5-medium"):
        sketch(load_config("embedded", ["model.pipeline=stabilityai/stable-diffusion-3.5-mediun"]))


def _unreachable(config: Any) -> Any:
    raise LeanError("no such file")
