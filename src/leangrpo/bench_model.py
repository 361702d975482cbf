"""Random Stable Diffusion 3 pipelines to measure with, in the sizes that are asked for."""

from __future__ import annotations

from pathlib import Path

import torch

from .loading import load_pipeline

HEAD = 64
"""Width of an attention head."""


def make_bench_model(folder: Path, layers: int = 6, heads: int = 6, *, seed: int = 0) -> int:
    """Write a pipeline in diffusers format; returns how many parameters its transformer has.

    So many joint blocks with so many heads of 64; the default has 30.8 million parameters. Text
    encoders and tokenizers are the embedded pipeline's; latents `(B, 4, H/2, W/2)` in patches of 2,
    64 x 64 pixels at most, from a VAE of two stages. All but the text encoders is random: it draws
    noise, and only its times and bytes mean something.
    """
    from diffusers import AutoencoderKL, SD3Transformer2DModel
    from diffusers.utils import logging

    logging.set_verbosity_error()  # that the empty third text encoder cannot be saved
    pipe = load_pipeline("embedded")
    text = pipe.transformer.config
    torch.manual_seed(seed)
    transformer = SD3Transformer2DModel(
        sample_size=32,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=layers,
        attention_head_dim=HEAD,
        num_attention_heads=heads,
        joint_attention_dim=text.joint_attention_dim,
        caption_projection_dim=HEAD * heads,
        pooled_projection_dim=text.pooled_projection_dim,
        pos_embed_max_size=32,
        qk_norm="rms_norm",
    )
    with torch.no_grad():  # away from diffusers' zeros, behind which no gradient passes
        for parameter in transformer.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)
    vae = AutoencoderKL(
        block_out_channels=(4, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=2,
        sample_size=64,
        scaling_factor=1.0,
        shift_factor=0.0,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )
    pipe.register_modules(transformer=transformer, vae=vae)
    pipe.save_pretrained(folder)
    return sum(p.numel() for p in transformer.parameters())
