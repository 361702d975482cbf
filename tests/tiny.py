"""Tiny pipelines of real diffusers classes, randomly initialised, that take prompts.

Every parameter of a denoiser is random and away from zero, so that every one gets a gradient.
Weights depend on the seed only; nothing is read from the network. Each builder returns a pipeline
in float32 and eval mode, without a progress bar; `CALL` holds the arguments for small outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
    UMT5Config,
    UMT5EncoderModel,
)

CLIP_LENGTH = 16
T5_LENGTH = 16
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"

CALL: dict[str, dict[str, Any]] = {
    "sd3": {"height": 16, "width": 16, "max_sequence_length": T5_LENGTH},
    "flux": {"height": 16, "width": 16, "max_sequence_length": T5_LENGTH},
    "wan": {"height": 16, "width": 16, "num_frames": 5, "max_sequence_length": T5_LENGTH},
    "wan22": {"height": 16, "width": 16, "num_frames": 5, "max_sequence_length": T5_LENGTH},
    "sd": {"height": 16, "width": 16},
    "sdxl": {"height": 16, "width": 16},
}
"""Keyword arguments of each pipeline's call besides prompt, steps and guidance."""


def tiny_sd3(seed: int = 0, *, shift: float = 3.0) -> Any:
    """StableDiffusion3Pipeline: two CLIP encoders and a T5; latents (4, 8, 8)."""
    torch.manual_seed(seed)
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=16,
        pooled_projection_dim=32,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
    )
    pipe = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
        vae=_vae(),
        text_encoder=_clip(CLIPTextModelWithProjection),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=_clip(CLIPTextModelWithProjection),
        tokenizer_2=_clip_tokenizer(),
        text_encoder_3=_t5(T5EncoderModel, T5Config, width=32),
        tokenizer_3=_t5_tokenizer(),
    )
    return _finish(pipe)


def tiny_flux(seed: int = 0) -> Any:
    """FluxPipeline: CLIP and T5 encoders, embedded guidance; packed latents (16, 16)."""
    torch.manual_seed(seed)
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        guidance_embeds=True,
        axes_dims_rope=(2, 2, 4),
    )
    scheduler = FlowMatchEulerDiscreteScheduler(
        shift=3.0, use_dynamic_shifting=True, base_image_seq_len=256, max_image_seq_len=4096
    )
    pipe = FluxPipeline(
        transformer=transformer,
        scheduler=scheduler,
        vae=_vae(),
        text_encoder=_clip(CLIPTextModel),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=_t5(T5EncoderModel, T5Config),
        tokenizer_2=_t5_tokenizer(),
    )
    return _finish(pipe)


def tiny_wan(seed: int = 0, *, unipc: bool = False, second: bool = False) -> Any:
    """WanPipeline, text to video: a UMT5 encoder; latents (4, 2, 4, 4) for 5 frames.

    `unipc` gives it the multistep scheduler Wan is published with, on flow sigmas; `second` a
    network of its own for timesteps below 900, as Wan 2.2 has it.
    """
    torch.manual_seed(seed)
    transformer = _wan_transformer()
    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=[0.1, -0.2, 0.0, 0.3],
        latents_std=[1.0, 0.8, 1.2, 1.0],
        scale_factor_temporal=4,
        scale_factor_spatial=4,
    )
    scheduler = (
        UniPCMultistepScheduler(
            use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=5.0
        )
        if unipc
        else FlowMatchEulerDiscreteScheduler(shift=5.0)
    )
    pipe = WanPipeline(
        tokenizer=_t5_tokenizer(),
        text_encoder=_t5(UMT5EncoderModel, UMT5Config),
        vae=vae,
        scheduler=scheduler,
        transformer=transformer,
        transformer_2=WanTransformer3DModel.from_config(transformer.config) if second else None,
        boundary_ratio=0.9 if second else None,
    )
    if second:
        _away_from_zero(pipe.transformer_2)
    return _finish(pipe)


def tiny_wan22(seed: int = 0) -> Any:
    """`tiny_wan` with two denoisers: the second takes over below a noise level of 0.875."""
    pipe = tiny_wan(seed)
    torch.manual_seed(seed + 1)
    second = _wan_transformer()
    _away_from_zero(second)
    pipe.register_modules(transformer_2=second.eval())
    pipe.register_to_config(boundary_ratio=0.875)
    return pipe


def _wan_transformer() -> WanTransformer3DModel:
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=16,
    )


def tiny_sd(seed: int = 0, *, prediction_type: str = "epsilon") -> Any:
    """StableDiffusionPipeline with DDIM and no safety checker; latents (4, 8, 8)."""
    torch.manual_seed(seed)
    unet = UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
        block_out_channels=(8,),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=16,
        attention_head_dim=2,
    )
    scheduler = _ddim(prediction_type)
    pipe = StableDiffusionPipeline(
        vae=_vae(),
        text_encoder=_clip(CLIPTextModel),
        tokenizer=_clip_tokenizer(),
        unet=unet,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    return _finish(pipe)


def tiny_sdxl(seed: int = 0) -> Any:
    """StableDiffusionXLPipeline with DDIM: two CLIP encoders; latents (4, 8, 8)."""
    torch.manual_seed(seed)
    unet = UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=32,
        attention_head_dim=2,
        addition_embed_type="text_time",
        addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=16 + 6 * 4,
    )
    pipe = StableDiffusionXLPipeline(
        vae=_vae(),
        text_encoder=_clip(CLIPTextModel),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=_clip(CLIPTextModelWithProjection),
        tokenizer_2=_clip_tokenizer(),
        unet=unet,
        scheduler=_ddim("epsilon"),
    )
    return _finish(pipe)


def _ddim(prediction_type: str) -> DDIMScheduler:
    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
        prediction_type=prediction_type,
    )


BUILDERS: dict[str, Callable[..., Any]] = {
    "sd3": tiny_sd3,
    "flux": tiny_flux,
    "wan": tiny_wan,
    "wan22": tiny_wan22,
    "sd": tiny_sd,
    "sdxl": tiny_sdxl,
}
"""The builders by the names of `CALL`."""

UNREACHED: dict[str, tuple[str, ...]] = {
    "sd3": (
        "transformer_blocks.1.attn.add_q_proj.weight",
        "transformer_blocks.1.attn.add_q_proj.bias",
        "transformer_blocks.1.attn.norm_added_q.weight",
    ),
    "flux": (),
    "wan": (),
    "sd": (),
}
"""Parameters whose gradient is exactly zero: SD3's last block drops what the text attends to."""


def save(pipe: Any, folder: Path) -> Path:
    """Write a pipeline in diffusers format; returns the folder."""
    pipe.save_pretrained(folder)
    return folder


def denoiser(pipe: Any) -> nn.Module:
    """The network that is called once per step."""
    return pipe.unet if hasattr(pipe, "unet") else pipe.transformer  # type: ignore[no-any-return]


def _finish(pipe: Any) -> Any:
    _away_from_zero(denoiser(pipe))
    for component in pipe.components.values():
        if isinstance(component, nn.Module):
            component.eval().requires_grad_(False)
    denoiser(pipe).requires_grad_(True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _away_from_zero(module: nn.Module) -> None:
    """Small normals on top of what diffusers initialises with zeros or ones."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)


def _vae() -> AutoencoderKL:
    """16 x 16 pixels to and from (4, 8, 8)."""
    return AutoencoderKL(
        block_out_channels=(4, 8),
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        sample_size=16,
        scaling_factor=1.5,
        shift_factor=0.05,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )


def _clip(kind: type[Any]) -> Any:
    vocabulary = _clip_vocabulary()
    config = CLIPTextConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=32,
        projection_dim=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CLIP_LENGTH,
        bos_token_id=vocabulary["<|startoftext|>"],
        eos_token_id=vocabulary["<|endoftext|>"],
        pad_token_id=vocabulary["<|endoftext|>"],
    )
    return kind(config)


def _clip_vocabulary() -> dict[str, int]:
    """Single letters, inside a word and at its end: CLIP's BPE without merges."""
    tokens = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS)]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    return {token: number for number, token in enumerate(tokens)}


def _clip_tokenizer() -> CLIPTokenizer:
    return CLIPTokenizer(vocab=_clip_vocabulary(), merges=[], model_max_length=CLIP_LENGTH)


def _t5_vocabulary() -> list[tuple[str, float]]:
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    return [*special, ("▁", -2.0), *((letter, -3.0) for letter in LETTERS)]


def _t5(kind: type[Any], config: type[Any], width: int = 16) -> Any:
    return kind(
        config(
            vocab_size=len(_t5_vocabulary()),
            d_model=width,
            d_kv=8,
            d_ff=32,
            num_layers=1,
            num_heads=2,
            relative_attention_num_buckets=8,
            dropout_rate=0.0,
        )
    )


def _t5_tokenizer() -> T5TokenizerFast:
    return T5TokenizerFast(vocab=_t5_vocabulary(), extra_ids=0, model_max_length=T5_LENGTH)
