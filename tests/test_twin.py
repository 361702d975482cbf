"""A pipeline's small random twin, from a folder without a single weight."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from diffusers import FluxTransformer2DModel, SD3Transformer2DModel

from leangrpo.errors import LeanError
from leangrpo.twin import make_twin

BUILD = {"sd3": tiny.tiny_sd3, "flux": tiny.tiny_flux, "wan": tiny.tiny_wan, "sd": tiny.tiny_sd}


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a tiny pipeline with all its weights deleted, settings changed as asked."""
    root = tmp_path_factory.mktemp("bare")

    def make(name: str, **changes: dict[str, Any]) -> Path:
        folder = root / f"{name}-{len(list(root.iterdir()))}"
        tiny.save(BUILD[name](), folder)
        for weights in folder.rglob("*.safetensors"):
            weights.unlink()
        for component, values in changes.items():
            file = folder / component / "config.json"
            config = json.loads(file.read_text(encoding="utf-8")) | values
            file.write_text(json.dumps(config), encoding="utf-8")
        return folder

    return make


@pytest.mark.parametrize("name", BUILD)
def test_no_weight_is_read(name: str, bare: Any) -> None:
    pipe = make_twin(str(bare(name)), seed=3)
    assert type(pipe) is type(BUILD[name]())
    again = make_twin(str(bare(name)), seed=3)
    network = "unet" if name == "sd" else "transformer"
    one, other = (dict(getattr(p, network).named_parameters()) for p in (pipe, again))
    assert all(torch.equal(p, other[key]) for key, p in one.items())
    assert all(p.any() for p in one.values() if p.dim() > 1), "nothing is hidden behind zeros"


@pytest.mark.slow
def test_two_layers_and_two_heads(bare: Any) -> None:
    """The configuration of FLUX.1 itself: 19 and 38 layers, 24 heads of 128."""
    real = dict(FluxTransformer2DModel.load_config(bare("flux") / "transformer"))
    real |= {"num_layers": 19, "num_single_layers": 38, "num_attention_heads": 24}
    real |= {"attention_head_dim": 128, "axes_dims_rope": [16, 56, 56]}
    encoder = {"num_layers": 24}
    folder = bare("flux", transformer=real, text_encoder_2=encoder)
    pipe = make_twin(str(folder))
    config = pipe.transformer.config
    assert (config.num_layers, config.num_single_layers) == (2, 2)
    assert pipe.transformer.inner_dim == 2 * 128
    assert pipe.text_encoder_2.config.num_layers == 2
    wide = make_twin(str(folder), narrow=False, shorten_encoders=False)
    assert wide.transformer.inner_dim == 24 * 128
    assert wide.text_encoder_2.config.num_layers == 24


def test_what_is_as_wide_as_the_heads_follows(bare: Any) -> None:
    """SD3.5 medium: the captions are projected to 24 x 64, and some layers are named by number."""
    real = dict(SD3Transformer2DModel.load_config(bare("sd3") / "transformer"))
    real |= {"num_layers": 24, "num_attention_heads": 24, "attention_head_dim": 64}
    real |= {"caption_projection_dim": 1536, "dual_attention_layers": list(range(13))}
    pipe = make_twin(str(bare("sd3", transformer=real)))
    config = pipe.transformer.config
    assert (config.num_layers, config.caption_projection_dim) == (2, 128)
    assert list(config.dual_attention_layers) == [0, 1]


def test_dtype(bare: Any) -> None:
    pipe = make_twin(str(bare("sd3")), dtype=torch.float64)
    assert pipe.transformer.dtype == torch.float64


def test_what_cannot_be_read_is_named(bare: Any, tmp_path: Path) -> None:
    folder = bare("sd3")
    shutil.rmtree(folder / "transformer")
    with pytest.raises(LeanError, match="no twin can be made of it"):
        make_twin(str(folder))
    with pytest.raises(LeanError, match="`model.pipeline` is "):
        make_twin(str(tmp_path / "nothing"))
