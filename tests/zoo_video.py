"""Tiny video and audio pipelines (see `zoo`)."""

from __future__ import annotations

import sys
from typing import Any

import diffusers as d
import torch
from torch import Tensor
from transformers import CLIPTextModel, CLIPVisionConfig, CLIPVisionModel
from zoo_image import CFG, SIZE, unet
from zoo_parts import (
    LENGTH,
    NO_LORA,
    TEXT_OF_LAST,
    WIDTH,
    Box,
    Specimen,
    clip,
    clip_tokenizer,
    ddim,
    dynamic_flow,
    flow,
    mask,
    masked,
    pair,
    paired_masks,
    picture,
    pipeline,
    text_after_last,
    vae,
    wan_vae,
    words,
)

VIDEO = {**SIZE, "num_frames": 5}
FRAMES = [picture(seed=i) for i in range(5)]


def wan_net(kind: type[Any] = d.WanTransformer3DModel, channels: int = 4, **options: Any) -> Any:
    return kind(
        **{
            "patch_size": (1, 2, 2),
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": channels,
            "out_channels": 4,
            "text_dim": WIDTH,
            "freq_dim": 16,
            "ffn_dim": 32,
            "num_layers": 2,
            "rope_max_seq_len": 16,
        }
        | options
    )


def wan(kind: type[Any], net: Any = None, scheduler: Any = None, **more: Any) -> Any:
    def encode(texts: list[str], negative: list[str] | None, _: Any) -> Any:
        # beside a picture the networks take for granted that a text has 512 tokens
        length = 512 if net is not None and net.config.get("image_dim") else LENGTH
        return words(texts, length), None if negative is None else words(negative, length)

    return pipeline(
        kind,
        encode,
        transformer=net or wan_net(),
        vae=wan_vae(),
        scheduler=scheduler or flow(shift=5.0),
        **more,
    )


def two_denoisers(**more: Any) -> Any:
    """Wan 2.2: one network for the noisy steps, one for the others; 2 and 2 of 4 steps."""
    return wan(
        d.WanPipeline,
        scheduler=flow(shift=1.0),
        transformer_2=wan_net(),
        boundary_ratio=0.6,
        **more,
    )


def clip_vision() -> CLIPVisionModel:
    config = CLIPVisionConfig(
        hidden_size=8, projection_dim=8, num_hidden_layers=2, num_attention_heads=2, image_size=16,
        intermediate_size=16, patch_size=8,
    )  # fmt: skip
    return CLIPVisionModel(config)


def clip_image_processor() -> Any:
    from transformers import CLIPImageProcessor

    return CLIPImageProcessor(crop_size=16, size=16)


def ltx_vae() -> Any:
    return d.AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False,) * 5,
        upsample_residual=(False,) * 4,
        upsample_factor=(1, 1, 1, 1),
        timestep_conditioning=False,
        patch_size=1,
        patch_size_t=1,
    )


def ltx(kind: type[Any], scheduler: Any = None) -> Any:
    net = d.LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        num_layers=1,
        caption_channels=WIDTH,
    )
    return pipeline(
        kind, masked, transformer=net, vae=ltx_vae(), scheduler=scheduler or dynamic_flow()
    )


def ltx2(kind: type[Any]) -> Any:
    from diffusers.pipelines.ltx2 import LTX2TextConnectors
    from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder

    def encode(texts: list[str], negative: list[str] | None, _: Any) -> Any:
        def embed(some: list[str]) -> Tensor:
            return words(some, 8, WIDTH * 2)

        m = torch.ones(len(texts), 8, dtype=torch.long)
        return (embed(texts), m, *((None, None) if negative is None else (embed(negative), m)))

    net = d.LTX2VideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=8,
        num_layers=1,
        caption_channels=WIDTH,
        rope_double_precision=False,
    )
    video = d.AutoencoderKLLTX2Video(
        latent_channels=4,
        block_out_channels=(8,),
        decoder_block_out_channels=(8,),
        layers_per_block=(1,),
        decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False),
        downsample_type=("spatial",),
        upsample_residual=(False,),
        upsample_factor=(1,),
        patch_size=1,
        patch_size_t=1,
    )
    video.use_framewise_encoding = video.use_framewise_decoding = False
    audio = d.AutoencoderKLLTX2Audio(
        base_channels=4,
        ch_mult=(1,),
        num_res_blocks=1,
        latent_channels=2,
        mel_bins=8,
    )
    connectors = LTX2TextConnectors(
        caption_channels=WIDTH,
        text_proj_in_factor=2,
        video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=8,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=None,
        audio_connector_num_attention_heads=2,
        audio_connector_attention_head_dim=8,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=None,
        connector_rope_base_seq_len=32,
        rope_double_precision=False,
    )
    vocoder = LTX2Vocoder(
        in_channels=16,
        hidden_channels=8,
        upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3, 5]],
    )
    return pipeline(
        kind, encode, transformer=net, vae=video, audio_vae=audio, connectors=connectors,
        vocoder=vocoder, scheduler=dynamic_flow(),
    )  # fmt: skip


def cogvideo(kind: type[Any], channels: int = 4, scheduler: Any = None) -> Any:
    net = d.CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=channels,
        out_channels=4,
        time_embed_dim=4,
        text_embed_dim=WIDTH,
        num_layers=1,
        sample_width=8,
        sample_height=8,
        sample_frames=9,
        patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=LENGTH,
    )
    small = d.AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(4, 4, 4, 4),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        temporal_compression_ratio=4,
    )
    options = {
        "prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "snr_shift_scale": 3.0,
        "timestep_spacing": "trailing", "set_alpha_to_one": True,
    }  # fmt: skip
    schedule = (scheduler or d.CogVideoXDDIMScheduler)(**options)
    return pipeline(kind, pair, transformer=net, vae=small, scheduler=schedule)


def mochi() -> Any:
    net = d.MochiTransformer3DModel(
        patch_size=2,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=12,
        text_embed_dim=WIDTH,
        time_embed_dim=4,
        max_sequence_length=LENGTH,
    )
    return pipeline(
        d.MochiPipeline,
        masked,
        transformer=net,
        scheduler=d.FlowMatchEulerDiscreteScheduler(shift=1.0, invert_sigmas=True),
    )


def hunyuan_vae() -> Any:
    return d.AutoencoderKLHunyuanVideo(
        latent_channels=4,
        block_out_channels=(4, 4, 4, 4),
        down_block_types=("HunyuanVideoDownBlock3D",) * 4,
        up_block_types=("HunyuanVideoUpBlock3D",) * 4,
        layers_per_block=1,
        norm_num_groups=2,
        mid_block_add_attention=False,
    )


def hunyuan(kind: type[Any], channels: int = 4, **options: Any) -> Any:
    def encode(texts: list[str], _: Any, __: Any) -> Any:
        return words(texts), words(texts, 1)[:, 0], mask(len(texts))

    net = d.HunyuanVideoTransformer3DModel(
        in_channels=channels,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=10,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=1,
        patch_size_t=1,
        text_embed_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        rope_axes_dim=(2, 4, 4),
        **({"guidance_embeds": True} | options),
    )
    return pipeline(kind, encode, transformer=net, vae=hunyuan_vae(), scheduler=flow(shift=7.0))


def hunyuan15() -> Any:
    def encode(texts: list[str], _: Any, __: Any) -> Any:
        m = mask(len(texts))
        return words(texts), m, words(texts, salt=1), m

    net = d.HunyuanVideo15Transformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=1,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=WIDTH,
        text_embed_2_dim=WIDTH,
        image_embed_dim=12,
        rope_axes_dim=(2, 2, 4),
        target_size=16,
        task_type="t2v",
    )
    small = d.AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(16, 16), layers_per_block=1,
        spatial_compression_ratio=4, temporal_compression_ratio=2,
        downsample_match_channel=False, upsample_match_channel=False,
    )  # fmt: skip
    return pipeline(
        d.HunyuanVideo15Pipeline, encode, transformer=net, vae=small, scheduler=flow(shift=7.0),
        guider=d.ClassifierFreeGuidance(guidance_scale=6.0),
    )  # fmt: skip


def kandinsky5(kind: type[Any], small: Any = None, cond: bool = False) -> Any:
    def encode(texts: list[str], _: Any, __: Any) -> Any:
        ends = torch.arange(len(texts) + 1, dtype=torch.int32) * LENGTH
        return words(texts), words(texts, 1)[:, 0], ends

    net = d.Kandinsky5Transformer3DModel(
        in_visual_dim=4,
        in_text_dim=WIDTH,
        in_text_dim2=WIDTH,
        time_dim=16,
        out_visual_dim=4,
        patch_size=(1, 2, 2),
        model_dim=24,
        ff_dim=32,
        num_text_blocks=1,
        num_visual_blocks=1,
        axes_dims=(4, 4, 4),
        visual_cond=cond,
    )
    return pipeline(
        kind, encode, transformer=net, vae=small or hunyuan_vae(), scheduler=flow(shift=5.0)
    )


def nearest(image: Tensor, size: Any, **_: Any) -> Tensor:
    return torch.nn.functional.interpolate(image, size)


def cosmos(kind: type[Any], channels: int, **more: Any) -> Any:
    class Checker:
        """Lets everything pass; the real one is another download."""

        def check_text_safety(self, _: str) -> bool:
            return True

        def check_video_safety(self, video: Any) -> Any:
            return video

        def to(self, *_: Any) -> None: ...

    module = sys.modules[d.CosmosTransformer3DModel.__module__]
    if not hasattr(module, "transforms"):  # torchvision, of which it needs one function
        interpolation = Box(NEAREST="nearest")
        module.transforms = Box(
            functional=Box(resize=nearest, InterpolationMode=interpolation),
            InterpolationMode=interpolation,
        )

    net = d.CosmosTransformer3DModel(
        in_channels=channels,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        mlp_ratio=2.0,
        text_embed_dim=WIDTH,
        adaln_lora_dim=4,
        max_size=(4, 8, 8),
        patch_size=(1, 2, 2),
        rope_scale=(2.0, 1.0, 1.0),
        concat_padding_mask=True,
        extra_pos_embed_type=None,
    )
    return pipeline(
        kind, pair, transformer=net, vae=more.pop("vae", wan_vae()), safety_checker=Checker(),
        scheduler=more.pop("scheduler", None) or flow(use_karras_sigmas=True), **more,
    )  # fmt: skip


def allegro() -> Any:
    net = d.AllegroTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        cross_attention_dim=24,
        sample_width=8,
        sample_height=8,
        sample_frames=8,
        caption_channels=WIDTH,
    )
    small = d.AutoencoderKLAllegro(
        down_block_types=("AllegroDownBlock3D",) * 4,
        up_block_types=("AllegroUpBlock3D",) * 4,
        block_out_channels=(4, 4, 4, 4),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
    )
    return pipeline(d.AllegroPipeline, masked, transformer=net, vae=small, scheduler=ddim())


def latte() -> Any:
    net = d.LatteTransformer3DModel(
        sample_size=8,
        num_layers=1,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=3,
        caption_channels=WIDTH,
        in_channels=4,
        cross_attention_dim=24,
        out_channels=8,
        attention_bias=True,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        norm_eps=1e-6,
        video_length=2,
    )
    return pipeline(d.LattePipeline, pair, transformer=net, vae=vae(), scheduler=ddim())


def easy_animate(kind: type[Any], channels: int = 4) -> Any:
    net = d.EasyAnimateTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=channels,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=WIDTH,
        num_layers=1,
        mmdit_layers=1,
        sample_width=16,
        sample_height=16,
        patch_size=2,
    )
    small = d.AutoencoderKLMagvit(
        down_block_types=["SpatialDownBlock3D", *["SpatialTemporalDownBlock3D"] * 3],
        up_block_types=["SpatialUpBlock3D", *["SpatialTemporalUpBlock3D"] * 3],
        block_out_channels=[8, 8, 8, 8],
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        spatial_group_norm=False,
    )
    return pipeline(kind, paired_masks, transformer=net, vae=small, scheduler=flow())


def animate_diff() -> Any:
    net = unet()
    adapter = d.MotionAdapter(
        block_out_channels=(8, 8), motion_layers_per_block=1, motion_norm_num_groups=2,
        motion_num_attention_heads=2,
    )  # fmt: skip
    return pipeline(
        d.AnimateDiffPipeline,
        vae=vae(),
        text_encoder=clip(CLIPTextModel),
        tokenizer=clip_tokenizer(),
        unet=net,
        motion_adapter=adapter,
        scheduler=ddim(beta_schedule="linear"),
    )


def text_to_video() -> Any:
    net = d.UNet3DConditionModel(
        block_out_channels=(8, 8),
        layers_per_block=1,
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        cross_attention_dim=WIDTH,
        attention_head_dim=4,
        norm_num_groups=2,
    )
    return pipeline(
        d.TextToVideoSDPipeline,
        vae=vae(),
        text_encoder=clip(CLIPTextModel),
        tokenizer=clip_tokenizer(),
        unet=net,
        scheduler=ddim(),
    )


def sana_video(kind: type[Any]) -> Any:
    net = d.SanaVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=12,
        cross_attention_dim=24,
        caption_channels=WIDTH,
        mlp_ratio=2.5,
        sample_size=8,
        patch_size=(1, 2, 2),
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    return pipeline(kind, masked, transformer=net, vae=wan_vae(), scheduler=flow())


def ace_step() -> Any:
    from diffusers.pipelines.ace_step import AceStepConditionEncoder

    def encode(texts: list[str], _: Any, given: Any) -> Any:
        m = mask(len(texts))
        return words(texts), m, words(texts, salt=1), m

    net = d.AceStepTransformer1DModel(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        in_channels=24,
        audio_acoustic_hidden_dim=8,
        patch_size=2,
        rope_theta=10000.0,
        sliding_window=16,
    )
    encoder = AceStepConditionEncoder(
        hidden_size=16, intermediate_size=32, text_hidden_dim=WIDTH, timbre_hidden_dim=8,
        num_lyric_encoder_hidden_layers=1, num_timbre_encoder_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, sliding_window=16,
    )  # fmt: skip
    small = d.AutoencoderOobleck(
        encoder_hidden_size=6, downsampling_ratios=[1, 2], decoder_channels=3,
        decoder_input_channels=8, audio_channels=2, channel_multiples=[2, 4], sampling_rate=4,
    )  # fmt: skip
    return pipeline(
        d.AceStepPipeline, encode, transformer=net, condition_encoder=encoder, vae=small,
        scheduler=d.FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, shift=1.0),
    )  # fmt: skip


def audio_ldm2() -> Any:
    from transformers import SpeechT5HifiGan, SpeechT5HifiGanConfig

    def encode(texts: list[str], negative: list[str] | None, _: Any) -> Any:
        some = [*(negative or []), *texts]
        return words(some), mask(len(some)), words(some, 4, salt=1)

    net = d.AudioLDM2UNet2DConditionModel(
        block_out_channels=(8, 8),
        layers_per_block=1,
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=((None, WIDTH, WIDTH), (None, WIDTH, WIDTH)),
        attention_head_dim=4,
        norm_num_groups=2,
    )
    vocoder = SpeechT5HifiGan(
        SpeechT5HifiGanConfig(
            model_in_dim=8, sampling_rate=16000, upsample_initial_channel=8, upsample_rates=[2, 2],
            upsample_kernel_sizes=[4, 4], resblock_kernel_sizes=[3, 7],
            resblock_dilation_sizes=[[1, 3, 5], [1, 3, 5]], normalize_before=False,
        )
    )  # fmt: skip
    return pipeline(
        d.AudioLDM2Pipeline, encode, unet=net, vae=vae(channels=1), vocoder=vocoder,
        scheduler=ddim(), text_encoder_2=Box(config=Box(model_type="t5")),
    )  # fmt: skip


def longcat_audio() -> Any:
    def encode(texts: list[str], _: Any, __: Any) -> Any:
        return words(texts), torch.full((len(texts),), LENGTH)

    net = d.LongCatAudioDiTTransformer(
        dit_dim=16, dit_depth=2, dit_heads=2, dit_text_dim=WIDTH, latent_dim=8,
    )  # fmt: skip
    small = d.LongCatAudioDiTVae(
        in_channels=1, channels=8, c_mults=[1, 2], strides=[2], latent_dim=8, encoder_latent_dim=16,
        downsampling_ratio=2, sample_rate=2000,
    )  # fmt: skip
    return pipeline(
        d.LongCatAudioDiTPipeline, encode, transformer=net, vae=small,
        scheduler=d.FlowMatchEulerDiscreteScheduler(shift=1.0),
    )  # fmt: skip


CLIP = {"image": picture()}
ONE = "with 2 prompts at once"  # one picture or video for two prompts

SPECIMENS: dict[str, Specimen] = {
    "Wan": Specimen(lambda: wan(d.WanPipeline), VIDEO, CFG),
    "Wan (UniPC)": Specimen(
        lambda: wan(
            d.WanPipeline,
            scheduler=d.UniPCMultistepScheduler(
                use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=5.0
            ),
        ),
        VIDEO,
        CFG,
    ),
    "Wan (two denoisers)": Specimen(two_denoisers, VIDEO, CFG),
    "WanImageToVideo": Specimen(
        lambda: wan(
            d.WanImageToVideoPipeline,
            wan_net(channels=12, image_dim=8, added_kv_proj_dim=24),
            image_encoder=clip_vision(),
            image_processor=clip_image_processor(),
        ),
        {**VIDEO, **CLIP},
        CFG,
    ),
    "WanVideoToVideo": Specimen(
        lambda: wan(d.WanVideoToVideoPipeline), {**SIZE, "video": FRAMES, "strength": 0.6}, CFG
    ),
    "WanVACE": Specimen(
        lambda: wan(
            d.WanVACEPipeline,
            wan_net(d.WanVACETransformer3DModel, vace_layers=[0], vace_in_channels=24),
        ),
        {**VIDEO, "video": FRAMES},
        CFG,
        alone=ONE,
    ),
    "LTX": Specimen(lambda: ltx(d.LTXPipeline), {"height": 32, "width": 32, "num_frames": 9}, CFG),
    "LTXImageToVideo": Specimen(
        lambda: ltx(d.LTXImageToVideoPipeline),
        {"height": 32, "width": 32, "num_frames": 9, "image": picture(32)},
        CFG,
        alone=ONE,
    ),
    "LTXCondition": Specimen(
        lambda: ltx(d.LTXConditionPipeline, flow()),
        {"height": 32, "width": 32, "num_frames": 9},
        CFG,
    ),
    "LTX2": Specimen(
        lambda: ltx2(d.LTX2Pipeline), {"height": 32, "width": 32, "num_frames": 5}, CFG
    ),
    "LTX2ImageToVideo": Specimen(
        lambda: ltx2(d.LTX2ImageToVideoPipeline),
        {"height": 32, "width": 32, "num_frames": 5, "image": picture(32), "image_crf": 0},
        CFG,
        alone=ONE,
    ),
    "CogVideoX": Specimen(lambda: cogvideo(d.CogVideoXPipeline), VIDEO, CFG),
    "CogVideoX (DPM)": Specimen(
        lambda: cogvideo(d.CogVideoXPipeline, scheduler=d.CogVideoXDPMScheduler), VIDEO, CFG
    ),
    "CogVideoXImageToVideo": Specimen(
        lambda: cogvideo(d.CogVideoXImageToVideoPipeline, 8), {**VIDEO, **CLIP}, CFG, alone=ONE
    ),
    "CogVideoXVideoToVideo": Specimen(
        lambda: cogvideo(d.CogVideoXVideoToVideoPipeline),
        {**SIZE, "video": FRAMES, "strength": 0.8},
        CFG,
        alone=ONE,
    ),
    "Mochi": Specimen(
        mochi,
        {"height": 32, "width": 32, "num_frames": 7},
        CFG,
        **TEXT_OF_LAST,
        single="its rotary frequencies are computed in float32",
    ),
    "HunyuanVideo": Specimen(
        lambda: hunyuan(d.HunyuanVideoPipeline),
        VIDEO,
        {"guidance": 6.0, "negative_prompt": "grey", "call": {"true_cfg_scale": 2.0}},
    ),
    "HunyuanVideoImageToVideo": Specimen(
        lambda: hunyuan(d.HunyuanVideoImageToVideoPipeline, image_condition_type="token_replace"),
        {**VIDEO, **CLIP},
        {"guidance": 6.0, "negative_prompt": "grey", "call": {"true_cfg_scale": 2.0}},
        alone=ONE,
    ),
    "HunyuanSkyreelsImageToVideo": Specimen(
        lambda: hunyuan(d.HunyuanSkyreelsImageToVideoPipeline, 8), {**VIDEO, **CLIP}, CFG, alone=ONE
    ),
    "HunyuanVideo15": Specimen(
        hunyuan15,
        VIDEO,
        CFG,
        unreached=(*text_after_last(0)["unreached"], r"transformer\.image_embedder\..*"),
        because=text_after_last(0)["because"] + "; there is no picture to embed",
        alone_guided=ONE,
    ),
    "Kandinsky5T2V": Specimen(
        lambda: kandinsky5(d.Kandinsky5T2VPipeline),
        VIDEO | {"height": 32, "width": 32},
        CFG,
        bound=4e-3,
        single="its rotary embedding rounds queries and keys to bfloat16",
    ),
    "Kandinsky5I2V": Specimen(
        lambda: kandinsky5(d.Kandinsky5I2VPipeline, cond=True),
        {**VIDEO, "height": 32, "width": 32, "image": picture(32)},
        CFG,
        bound=4e-3,
        single="its rotary embedding rounds queries and keys to bfloat16",
    ),
    "Allegro": Specimen(
        allegro,
        VIDEO,
        CFG,
        alone=NO_LORA,
    ),
    "Latte": Specimen(
        latte,
        {**SIZE, "video_length": 2},
        CFG,
        alone=NO_LORA,
    ),
    "EasyAnimate": Specimen(
        lambda: easy_animate(d.EasyAnimatePipeline),
        {"height": 32, "width": 32, "num_frames": 5},
        CFG,
        **text_after_last(0),
        alone=NO_LORA,
    ),
    "SkyReelsV2": Specimen(
        lambda: wan(
            d.SkyReelsV2Pipeline,
            wan_net(d.SkyReelsV2Transformer3DModel),
            d.UniPCMultistepScheduler(
                use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=8.0
            ),
        ),
        VIDEO,
        CFG,
    ),
    "SkyReelsV2DiffusionForcing": Specimen(
        lambda: wan(
            d.SkyReelsV2DiffusionForcingPipeline,
            wan_net(d.SkyReelsV2Transformer3DModel),
            d.UniPCMultistepScheduler(
                use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=8.0
            ),
        ),
        {**VIDEO, "base_num_frames": 5},
        CFG,
    ),
    "SkyReelsV2ImageToVideo": Specimen(
        lambda: wan(
            d.SkyReelsV2ImageToVideoPipeline,
            wan_net(d.SkyReelsV2Transformer3DModel, channels=12, image_dim=8, added_kv_proj_dim=24),
            image_encoder=clip_vision(),
            image_processor=clip_image_processor(),
        ),
        {**VIDEO, **CLIP},
        CFG,
    ),
    "ChronoEdit": Specimen(
        lambda: wan(
            d.ChronoEditPipeline,
            wan_net(d.ChronoEditTransformer3DModel, channels=12, image_dim=8, added_kv_proj_dim=24),
            image_encoder=clip_vision(),
            image_processor=clip_image_processor(),
        ),
        {**VIDEO, **CLIP},
        CFG,
    ),
    "LucyEdit": Specimen(
        lambda: wan(d.LucyEditPipeline, wan_net(channels=8)),
        {**VIDEO, "video": FRAMES},
        CFG,
        alone=ONE,
    ),
    "SanaVideo": Specimen(
        lambda: sana_video(d.SanaVideoPipeline),
        {"height": 32, "width": 32, "frames": 5, "use_resolution_binning": False},
        CFG,
    ),
    "SanaImageToVideo": Specimen(
        lambda: sana_video(d.SanaImageToVideoPipeline),
        {
            "height": 32,
            "width": 32,
            "frames": 5,
            "use_resolution_binning": False,
            "image": picture(32),
        },
        CFG,
    ),
    "AnimateDiff": Specimen(
        animate_diff,
        {**SIZE, "num_frames": 2},
        CFG,
        alone="cannot be split by sample",
    ),
    "TextToVideoSD": Specimen(
        text_to_video, {**SIZE, "num_frames": 2}, CFG, alone="takes no adapters"
    ),
    "AceStep": Specimen(
        ace_step,
        {"lyrics": "la la", "audio_duration": 4.0},
        single="its rotary embedding is computed in float32",
    ),
    "AudioLDM2": Specimen(
        audio_ldm2,
        {"audio_length_in_s": 0.004},
        CFG,
        alone=NO_LORA,
    ),
    "LongCatAudioDiT": Specimen(
        longcat_audio,
        {"audio_duration_s": 0.016},
        CFG,
        unreached=(r"transformer\.latent_embed\.proj\.0\.weight",),
        because="there is no sound to go on from: its input is zero",
        alone=NO_LORA,
    ),
}
