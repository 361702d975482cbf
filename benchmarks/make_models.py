"""Write a pipeline in diffusers format whose denoiser has a published model's shape, and no weights
of it: all numbers are drawn.

    python benchmarks/make_models.py flux1-dev FOLDER            # all of it, 24 GB
    python benchmarks/make_models.py flux1-dev FOLDER --short    # true widths, a few layers
    python benchmarks/make_models.py flux1-dev FOLDER --tiny     # for a machine without a GPU

The denoiser is drawn in bfloat16 on the GPU, where there is one. Text encoders have the widths and
lengths that it is called with, and one layer; the VAE has the right channels and factors, and is
narrow. Prompts are tokenized by letter and padded to the true length, so that the denoiser does the
same work as in the real pipeline. It draws noise: only times, memory and gradients mean something.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
import yaml
from torch import nn

from leangrpo.sketch import facts
from leangrpo.twin import HEADS

WORKLOADS = Path(__file__).with_name("gpu_check.yaml")
BFLOAT16 = 2
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
CLIP_L, CLIP_G, T5 = 768, 1280, 4096
"""Widths of the text encoders; SD3 joins the CLIPs' 768 + 1280 to its 2048."""
CLIP_LENGTH = 77
T5_LENGTH = 512
CHANNELS = 8
"""Of the VAEs, at every resolution."""


@cache
def workloads() -> dict[str, Any]:
    """`gpu_check.yaml`."""
    loaded: dict[str, Any] = yaml.safe_load(WORKLOADS.read_text(encoding="utf-8"))
    return loaded


def denoiser_config(name: str, size: str = "true") -> tuple[str, dict[str, Any]]:
    """Class and configuration of a model's denoiser; `size` is true, short or tiny."""
    model = workloads()["models"][name]
    known = facts()["models"][model["id"]]
    config = dict(known["config"])
    if size != "true":
        config |= model["short"]
    if size == "tiny":
        config |= model["tiny"]
    return known["class"], config


def num_bytes(name: str, size: str = "true") -> int:
    """What a model takes on a disk, its small parts left out: bfloat16, counted without memory."""
    kind, config = denoiser_config(name, size)
    with torch.device("meta"):
        module = getattr(diffusers, kind)(**config)
    tensors = [*module.parameters(), *module.buffers()]
    return BFLOAT16 * sum(int(t.numel()) for t in tensors)


def make_denoiser(name: str, size: str, device: torch.device) -> nn.Module:
    """The denoiser in bfloat16 on a device, every number drawn there by its classes' own rules."""
    kind, config = denoiser_config(name, size)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        torch.manual_seed(0)
        with device:
            module: nn.Module = getattr(diffusers, kind)(**config)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():  # away from zeros, behind which no gradient passes
        for parameter in module.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)
    return module


def write(name: str, folder: Path, size: str, device: torch.device) -> int:
    """Write the pipeline of a model; returns the number of the denoiser's parameters."""
    kind = workloads()["models"][name]["kind"]
    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()  # that some parts of Wan are better in float32
        library.utils.logging.disable_progress_bar()
    denoiser = make_denoiser(name, size, device)
    pipe = {"sd3": _sd3, "flux": _flux, "wan": _wan}[kind](denoiser)
    for component in pipe.components.values():
        if isinstance(component, nn.Module):
            component.to(torch.bfloat16)
    pipe.save_pretrained(folder, max_shard_size="2GB")
    return sum(p.numel() for p in denoiser.parameters())


def _sd3(transformer: nn.Module) -> Any:
    clip = transformers.CLIPTextModelWithProjection
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_vae(scaling=1.5305, shift=0.0609),
        text_encoder=_clip(clip, CLIP_L),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=_clip(clip, CLIP_G),
        tokenizer_2=_clip_tokenizer(),
        text_encoder_3=_t5(transformers.T5EncoderModel, transformers.T5Config),
        tokenizer_3=_t5_tokenizer(),
    )


def _flux(transformer: nn.Module) -> Any:
    return diffusers.FluxPipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            shift=3.0, use_dynamic_shifting=True, base_image_seq_len=256, max_image_seq_len=4096
        ),
        vae=_vae(scaling=0.3611, shift=0.1159),
        text_encoder=_clip(transformers.CLIPTextModel, CLIP_L),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=_t5(transformers.T5EncoderModel, transformers.T5Config),
        tokenizer_2=_t5_tokenizer(),
    )


def _wan(transformer: nn.Module) -> Any:
    return diffusers.WanPipeline(
        transformer=transformer,
        scheduler=diffusers.UniPCMultistepScheduler(
            use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0
        ),
        vae=diffusers.AutoencoderKLWan(base_dim=CHANNELS, num_res_blocks=1),
        text_encoder=_t5(transformers.UMT5EncoderModel, transformers.UMT5Config),
        tokenizer=_t5_tokenizer(),
    )


def _vae(*, scaling: float, shift: float) -> Any:
    """Pictures to and from 16 channels of an eighth of their size."""
    levels = 4
    return diffusers.AutoencoderKL(
        block_out_channels=(CHANNELS,) * levels,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        latent_channels=16,
        layers_per_block=1,
        norm_num_groups=2,
        scaling_factor=scaling,
        shift_factor=shift,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )


def _clip(kind: Any, width: int) -> Any:
    vocabulary = _clip_vocabulary()
    config = transformers.CLIPTextConfig(
        vocab_size=len(vocabulary),
        hidden_size=width,
        intermediate_size=width,
        projection_dim=width,
        num_hidden_layers=2,  # SD3 reads the last but one
        num_attention_heads=width // 64,
        max_position_embeddings=CLIP_LENGTH,
        bos_token_id=vocabulary["<|startoftext|>"],
        eos_token_id=vocabulary["<|endoftext|>"],
        pad_token_id=vocabulary["<|endoftext|>"],
    )
    return kind(config)


def _clip_vocabulary() -> Mapping[str, int]:
    """Letters, inside a word and at its end: byte-pair encoding without merges."""
    tokens = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS)]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    return {token: number for number, token in enumerate(tokens)}


def _clip_tokenizer() -> Any:
    vocabulary = dict(_clip_vocabulary())
    return transformers.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=CLIP_LENGTH)


def _t5_vocabulary() -> list[tuple[str, float]]:
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    return [*special, ("▁", -2.0), *((letter, -3.0) for letter in LETTERS)]


def _t5(kind: Any, config: Any) -> Any:
    size = len(_t5_vocabulary())
    options = {"d_model": T5, "d_kv": 64, "d_ff": 64, "num_layers": 1, "num_heads": HEADS}
    return kind(config(vocab_size=size, dropout_rate=0.0, **options))


def _t5_tokenizer() -> Any:
    vocabulary = _t5_vocabulary()
    return transformers.T5TokenizerFast(vocab=vocabulary, extra_ids=0, model_max_length=T5_LENGTH)


def main() -> None:
    """Write one model; on a mistake or where memory ends, leave no half of it behind."""
    parser = argparse.ArgumentParser(description=" ".join((__doc__ or "").split("\n\n")[0].split()))
    parser.add_argument("model", choices=list(workloads()["models"]))
    parser.add_argument("folder", type=Path)
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--short", dest="size", action="store_const", const="short")
    sizes.add_argument("--tiny", dest="size", action="store_const", const="tiny")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        number = write(args.model, args.folder, args.size or "true", device)
    except BaseException:
        shutil.rmtree(args.folder, ignore_errors=True)
        raise
    print(f"{args.folder}: {number / 1e6:.1f}M parameters")


if __name__ == "__main__":
    main()
