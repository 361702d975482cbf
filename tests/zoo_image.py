"""Tiny text-to-image and image-to-image pipelines (see `zoo`)."""

from __future__ import annotations

from typing import Any

import diffusers as d
import tiny
import torch
from diffusers.pipelines.omnigen import pipeline_omnigen, processor_omnigen
from transformers import CLIPTextModel, CLIPTextModelWithProjection
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
    mask_picture,
    masked,
    one_masked,
    pair,
    picture,
    pipeline,
    text_after_last,
    vae,
    wan_vae,
    words,
)

SIZE = {"height": 16, "width": 16}
OF_TORCHVISION = ("Compose", "Lambda", "ToTensor", "Normalize")
LARGE = {"height": 32, "width": 32}


def unet(**options: Any) -> d.UNet2DConditionModel:
    return d.UNet2DConditionModel(
        **{
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "block_out_channels": (8, 8),
            "layers_per_block": 1,
            "norm_num_groups": 4,
            "cross_attention_dim": WIDTH,
            "attention_head_dim": 2,
        }
        | options
    )


def sd(kind: type[Any], net: Any = None, scheduler: Any = None, **more: Any) -> Any:
    return pipeline(
        kind,
        vae=vae(),
        text_encoder=clip(CLIPTextModel),
        tokenizer=clip_tokenizer(),
        unet=net or unet(),
        scheduler=scheduler or ddim(),
        requires_safety_checker=False,
        **more,
    )


def controlnet(net: Any) -> Any:
    return d.ControlNetModel.from_unet(
        net, conditioning_channels=3, conditioning_embedding_out_channels=(4, 4)
    )


def sdxl(kind: type[Any], **more: Any) -> Any:
    net = unet(
        addition_embed_type="text_time",
        addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=6 * 4 + 16,
        transformer_layers_per_block=1,
        cross_attention_dim=32,
    )
    return pipeline(
        kind,
        vae=vae(),
        text_encoder=clip(CLIPTextModel),
        tokenizer=clip_tokenizer(),
        text_encoder_2=clip(CLIPTextModelWithProjection),
        tokenizer_2=clip_tokenizer(),
        unet=net,
        scheduler=more.pop("scheduler", None) or d.EulerDiscreteScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1,
            timestep_spacing="leading",
        ),
        **more,
    )  # fmt: skip


def sd3_net(channels: int) -> d.SD3Transformer2DModel:
    config = dict(tiny.tiny_sd3().transformer.config)
    return d.SD3Transformer2DModel.from_config(config, in_channels=channels, out_channels=channels)


def sd3(kind: type[Any], **more: Any) -> Any:
    parts = tiny.tiny_sd3().components
    del parts["image_encoder"], parts["feature_extractor"]
    return pipeline(kind, **(parts | more))


def flux_net(channels: int = 16, **options: Any) -> d.FluxTransformer2DModel:
    return d.FluxTransformer2DModel(
        patch_size=1,
        in_channels=channels,
        out_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        guidance_embeds=True,
        axes_dims_rope=(2, 2, 4),
        **options,
    )


def flux(kind: type[Any], channels: int = 16, **more: Any) -> Any:
    parts = tiny.tiny_flux().components
    del parts["image_encoder"], parts["feature_extractor"]
    return pipeline(kind, **(parts | {"transformer": flux_net(channels)} | more))


def flux_controlnet() -> Any:
    return d.FluxControlNetModel(
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


def flux2(kind: type[Any], guidance: bool, **more: Any) -> Any:
    def encode(texts: list[str], _: Any, __: Any) -> Any:
        ids = torch.zeros(len(texts), LENGTH, 4)
        ids[..., 3] = torch.arange(LENGTH)
        return words(texts), ids

    net = d.Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance,
    )
    small = d.AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(4, 4),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=2,
        sample_size=16,
        mid_block_add_attention=False,
    )
    return pipeline(kind, encode, transformer=net, vae=small, scheduler=dynamic_flow(), **more)


def chroma(kind: type[Any]) -> Any:
    def encode(texts: list[str], negative: list[str] | None, _: Any) -> Any:
        ids, m = torch.zeros(LENGTH, 3), mask(len(texts), dtype=torch.float32)
        away = (None, None, None) if negative is None else (words(negative), ids, m)
        return (words(texts), ids, m, *away)

    net = d.ChromaTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(4, 4, 8),
        approximator_num_channels=64,
        approximator_hidden_dim=32,
        approximator_layers=1,
    )
    return pipeline(kind, encode, transformer=net, vae=vae(), scheduler=flow())


def qwen(kind: type[Any], net: dict[str, Any] | None = None, **more: Any) -> Any:
    transformer = d.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(8, 4, 4),
        **(net or {}),
    )
    small = wan_vae(d.AutoencoderKLQwenImage)
    return pipeline(
        kind, one_masked, transformer=transformer, vae=small, scheduler=dynamic_flow(), **more
    )


def z_image_net() -> d.ZImageTransformer2DModel:
    net = d.ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=WIDTH,
        axes_dims=[8, 4, 4],
        axes_lens=[256, 32, 32],
    )
    for name in ("x_pad_token", "cap_pad_token"):
        torch.nn.init.normal_(getattr(net, name))
    return net


def z_image(kind: type[Any], **more: Any) -> Any:
    def encode(texts: list[str], negative: list[str] | None, _: Any) -> Any:
        return list(words(texts)), list(words(negative)) if negative else []

    return pipeline(
        kind, encode, transformer=z_image_net(), vae=vae(), scheduler=dynamic_flow(), **more
    )


def dc_ae() -> d.AutoencoderDC:
    return d.AutoencoderDC(
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=[1, 1],
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.4,
    )


def sana(kind: type[Any], scheduler: Any = None, **options: Any) -> Any:
    net = d.SanaTransformer2DModel(
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_attention_heads=2,
        attention_head_dim=4,
        num_cross_attention_heads=2,
        cross_attention_head_dim=4,
        cross_attention_dim=8,
        caption_channels=WIDTH,
        sample_size=8,
        **options,
    )
    made = scheduler or flow()
    answer = one_masked if "Sprint" in kind.__name__ else masked
    return pipeline(kind, answer, transformer=net, vae=dc_ae(), scheduler=made)


def sana_flow_dpm() -> Any:
    return d.DPMSolverMultistepScheduler(
        use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0
    )


def pixart(kind: type[Any]) -> Any:
    net = d.PixArtTransformer2DModel(
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_channels=WIDTH,
        in_channels=4,
        cross_attention_dim=16,
        out_channels=8,
        use_additional_conditions=False,
    )
    schedule = d.DPMSolverMultistepScheduler(timestep_spacing="leading", steps_offset=1)
    return pipeline(kind, masked, transformer=net, vae=vae(), scheduler=schedule)


def hunyuan_dit(kind: type[Any]) -> Any:
    def encode(texts: list[str], negative: list[str] | None, given: Any) -> Any:
        length = 4 if given["text_encoder_index"] == 0 else LENGTH
        away = words(negative, length) if negative else None
        m = mask(len(texts), length)
        return words(texts, length), away, m, m

    net = d.HunyuanDiT2DModel(
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=3,
        in_channels=4,
        cross_attention_dim=WIDTH,
        cross_attention_dim_t5=WIDTH,
        pooled_projection_dim=8,
        hidden_size=24,
        activation_fn="gelu-approximate",
        text_len=4,
        text_len_t5=LENGTH,
    )
    schedule = d.DDPMScheduler(
        beta_start=0.00085, beta_end=0.03, beta_schedule="scaled_linear",
        prediction_type="v_prediction", steps_offset=1, timestep_spacing="leading",
        clip_sample=False,
    )  # fmt: skip
    return pipeline(
        kind, encode, transformer=net, vae=vae(), scheduler=schedule, requires_safety_checker=False
    )


def cogview3() -> Any:
    net = d.CogView3PlusTransformer2DModel(
        patch_size=2,
        in_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        out_channels=4,
        text_embed_dim=WIDTH,
        time_embed_dim=8,
        condition_dim=2,
        pos_embed_max_size=8,
        sample_size=8,
    )
    schedule = d.CogVideoXDDIMScheduler(
        snr_shift_scale=4.0, prediction_type="v_prediction", rescale_betas_zero_snr=True,
        set_alpha_to_one=True, timestep_spacing="trailing",
    )  # fmt: skip
    return pipeline(d.CogView3PlusPipeline, pair, transformer=net, vae=vae(), scheduler=schedule)


def cogview4(kind: type[Any], channels: int = 4) -> Any:
    net = d.CogView4Transformer2DModel(
        patch_size=2,
        in_channels=channels,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        out_channels=4,
        text_embed_dim=WIDTH,
        time_embed_dim=8,
        condition_dim=4,
        rope_axes_dim=(4, 4),
    )
    schedule = flow(
        use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear"
    )
    return pipeline(kind, pair, transformer=net, vae=vae(), scheduler=schedule)


def lumina() -> Any:
    net = d.LuminaNextDiT2DModel(
        sample_size=32,
        patch_size=2,
        in_channels=4,
        hidden_size=16,
        num_layers=2,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=16,
        cross_attention_dim=WIDTH,
        learn_sigma=True,
        scaling_factor=1.0,
    )
    return pipeline(d.LuminaPipeline, masked, transformer=net, vae=vae(), scheduler=flow(shift=1.0))


def lumina2() -> Any:
    net = d.Lumina2Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        hidden_size=16,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=2,
        axes_dim_rope=(4, 2, 2),
        axes_lens=(64, 16, 16),
        cap_feat_dim=WIDTH,
    )
    return pipeline(d.Lumina2Pipeline, masked, transformer=net, vae=vae(), scheduler=dynamic_flow())


def aura_flow() -> Any:
    net = d.AuraFlowTransformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_projection_dim=16,
        joint_attention_dim=WIDTH,
        pos_embed_max_size=64,
    )
    return pipeline(
        d.AuraFlowPipeline, masked, transformer=net, vae=vae(), scheduler=flow(shift=1.73)
    )


def omnigen() -> Any:
    class Tokenizer:
        """Token ids of bytes, as much of a tokenizer as the pipeline's processor asks for."""

        model_max_length = 64

        def __call__(self, text: str) -> Any:
            return Box(input_ids=[1, *(byte % 61 + 2 for byte in text.encode()[-8:])])

    module, processor = pipeline_omnigen, processor_omnigen
    if not hasattr(module, "OmniGenMultiModalProcessor"):  # torchvision, for input pictures only
        processor.transforms = Box(**dict.fromkeys(OF_TORCHVISION, lambda *_, **__: None))
        module.OmniGenMultiModalProcessor = processor.OmniGenMultiModalProcessor
    net = d.OmniGenTransformer2DModel(
        in_channels=4,
        patch_size=2,
        hidden_size=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=32,
        num_layers=1,
        pad_token_id=0,
        vocab_size=64,
        max_position_embeddings=256,
        rope_scaling={"long_factor": [1.0] * 4, "short_factor": [1.0] * 4},
        pos_embed_max_size=8,
    )
    schedule = flow(shift=1.0, invert_sigmas=True, num_train_timesteps=1)
    return pipeline(
        d.OmniGenPipeline,
        transformer=net,
        vae=vae(blocks=4),
        tokenizer=Tokenizer(),
        scheduler=schedule,
    )


def hidream() -> Any:
    def encode(texts: list[str], negative: list[str] | None, _: Any) -> Any:
        def three(some: list[str] | None) -> Any:
            if some is None:
                return None, None, None
            llama = torch.stack([words(some, salt=i) for i in (1, 2)])
            return words(some), llama, words(some, 1)[:, 0]

        (a, b, c), (x, y, z) = three(texts), three(negative)
        return a, x, b, y, c, z

    net = d.HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_channels=[WIDTH, WIDTH],
        text_emb_dim=WIDTH,
        num_routed_experts=4,
        num_activated_experts=2,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(32, 32),
        llama_layers=(0, 1),
        force_inference_output=True,
    )
    return pipeline(d.HiDreamImagePipeline, encode, transformer=net, vae=vae(), scheduler=flow())


def bria() -> Any:
    def encode(texts: list[str], negative: list[str] | None, _: Any) -> Any:
        return words(texts), words(negative or texts), torch.zeros(LENGTH, 3)

    net = d.BriaTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        axes_dims_rope=[2, 2, 4],
    )
    return pipeline(d.BriaPipeline, encode, transformer=net, vae=vae(), scheduler=dynamic_flow())


def bria_fibo() -> Any:
    def encode(texts: list[str], negative: list[str] | None, _: Any) -> Any:
        m, ids = mask(len(texts)), torch.zeros(LENGTH, 3)
        layers = [words(texts, salt=i, width=8) for i in range(2)]
        away = [words(negative or texts, salt=i, width=8) for i in range(2)]
        return words(texts), words(negative or texts), ids, m, m, layers, away

    net = d.BriaFiboTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        text_encoder_dim=8,
        axes_dims_rope=[2, 2, 4],
    )
    return pipeline(
        d.BriaFiboPipeline,
        encode,
        transformer=net,
        vae=wan_vae(latent=16),
        scheduler=dynamic_flow(),
    )


def ovis() -> Any:
    def encode(texts: list[str], negative: list[str] | None, _: Any) -> Any:
        ids = torch.zeros(LENGTH, 3)
        return words(texts), words(negative or texts), ids, ids

    net = d.OvisImageTransformer2DModel(
        in_channels=16,
        out_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(2, 2, 4),
    )
    return pipeline(
        d.OvisImagePipeline, encode, transformer=net, vae=vae(), scheduler=dynamic_flow()
    )


def longcat(kind: type[Any]) -> Any:
    def encode(texts: list[str], _: Any, __: Any) -> Any:
        return words(texts), torch.zeros(LENGTH, 3)

    net = d.LongCatImageTransformer2DModel(
        in_channels=64,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        axes_dims_rope=[2, 2, 4],
    )
    return pipeline(kind, encode, transformer=net, vae=vae(latent=16), scheduler=dynamic_flow())


def prx() -> Any:
    def encode(texts: list[str], negative: list[str] | None, _: Any) -> Any:
        m = mask(len(texts), dtype=torch.bool)
        return words(texts), m, None if negative is None else words(negative), m

    net = d.PRXTransformer2DModel(
        in_channels=4,
        patch_size=2,
        context_in_dim=WIDTH,
        hidden_size=16,
        mlp_ratio=2.0,
        num_heads=2,
        depth=2,
        axes_dim=[4, 4],
    )
    return pipeline(d.PRXPipeline, encode, transformer=net, vae=vae(), scheduler=flow())


def kandinsky22(kind: type[Any]) -> Any:
    net = unet(
        in_channels=4,
        out_channels=8,
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        addition_embed_type="image",
        encoder_hid_dim_type="image_proj",
        encoder_hid_dim=WIDTH,
        resnet_time_scale_shift="scale_shift",
        class_embed_type=None,
    )
    movq = d.VQModel(
        block_out_channels=(4, 4),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        num_vq_embeddings=12,
        norm_num_groups=2,
        vq_embed_dim=4,
    )
    return pipeline(kind, unet=net, movq=movq, scheduler=ddim(clip_sample=False))


def dit() -> Any:
    net = d.DiTTransformer2DModel(
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=2,
        in_channels=4,
        out_channels=8,
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_zero",
        activation_fn="gelu-approximate",
    )
    return pipeline(d.DiTPipeline, transformer=net, vae=vae(), scheduler=ddim())


def krea2() -> Any:
    def encode(texts: list[str], _: Any, __: Any) -> Any:
        layers = torch.stack([words(texts, salt=i) for i in range(2)], dim=2)
        return layers, mask(len(texts), dtype=torch.bool)

    net = d.Krea2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        timestep_embed_dim=16,
        text_hidden_dim=WIDTH,
        num_text_layers=2,
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=32,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 2, 2),
    )
    small = wan_vae(d.AutoencoderKLQwenImage)
    return pipeline(
        d.Krea2Pipeline, encode, transformer=net, vae=small, scheduler=dynamic_flow(),
        text_encoder_select_layers=(0, 1),
    )  # fmt: skip


def ernie() -> Any:
    def encode(texts: list[str], _: Any, __: Any) -> Any:
        return list(words(texts))

    net = d.ErnieImageTransformer2DModel(
        hidden_size=16,
        num_attention_heads=2,
        num_layers=1,
        ffn_hidden_size=32,
        in_channels=16,
        out_channels=16,
        text_in_dim=WIDTH,
        rope_axes_dim=(4, 2, 2),
    )
    small = flux2(d.Flux2Pipeline, True).vae
    return pipeline(d.ErnieImagePipeline, encode, transformer=net, vae=small, scheduler=flow())


def hunyuan_image(guider: Any = None) -> Any:
    """Its own guider carries a momentum from its third step on; the plain one does not."""

    def encode(texts: list[str], _: Any, __: Any) -> Any:
        m = mask(len(texts))
        return words(texts), m, words(texts, salt=1), m

    net = d.HunyuanImageTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=(1, 1),
        guidance_embeds=False,
        text_embed_dim=WIDTH,
        text_embed_2_dim=WIDTH,
        rope_axes_dim=(4, 4),
    )
    small = d.AutoencoderKLHunyuanImage(
        in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(32, 32),
        layers_per_block=1, spatial_compression_ratio=2, sample_size=16, scaling_factor=0.5,
        downsample_match_channel=False, upsample_match_channel=False,
    )  # fmt: skip
    guider = guider or d.ClassifierFreeGuidance
    guiders = {name: guider() for name in ("guider", "ocr_guider")}
    return pipeline(
        d.HunyuanImagePipeline, encode, transformer=net, vae=small, scheduler=flow(), **guiders
    )


KANDINSKY = {"image_embeds": words(["a"], 1)[:, 0], "negative_image_embeds": words([""], 1)[:, 0]}
PAINT = {"image": picture(), "mask_image": mask_picture()}
FLUX = {**SIZE, "max_sequence_length": tiny.T5_LENGTH}
FLUX_GUIDED = {"guidance": 3.5, "negative_prompt": "grey", "call": {"true_cfg_scale": 2.0}}
CFG = {"guidance": 4.0}
TIME = "its time embedding is computed in float32"
DECODES = "it decodes inside the call, with a VAE in float32"
CONTROLS = "its ControlNet computes in float32 beside a network in float64"
ASSERTS = "the pipeline asserts that its latents are float32"

SPECIMENS: dict[str, Specimen] = {
    "StableDiffusion": Specimen(lambda: sd(d.StableDiffusionPipeline), SIZE, CFG),
    "StableDiffusion (v)": Specimen(
        lambda: sd(d.StableDiffusionPipeline, scheduler=ddim("v_prediction")), SIZE, CFG
    ),
    "StableDiffusionImg2Img": Specimen(
        lambda: sd(d.StableDiffusionImg2ImgPipeline), {"image": picture(), "strength": 0.8}, CFG
    ),
    "StableDiffusionInpaint": Specimen(
        lambda: sd(d.StableDiffusionInpaintPipeline), {**SIZE, **PAINT, "strength": 0.8}, CFG
    ),
    "StableDiffusionControlNet": Specimen(
        lambda: sd(d.StableDiffusionControlNetPipeline, net := unet(), controlnet=controlnet(net)),
        {"image": picture()},
        CFG,
        single=CONTROLS,
    ),
    "StableDiffusionInstructPix2Pix": Specimen(
        lambda: sd(d.StableDiffusionInstructPix2PixPipeline, unet(in_channels=8)),
        {"image": picture()},
        CFG,
    ),
    "StableDiffusionXL": Specimen(lambda: sdxl(d.StableDiffusionXLPipeline), SIZE, CFG),
    "StableDiffusionXLImg2Img": Specimen(
        lambda: sdxl(d.StableDiffusionXLImg2ImgPipeline), {"image": picture(), "strength": 0.8}, CFG
    ),
    "StableDiffusionXLInpaint": Specimen(
        lambda: sdxl(d.StableDiffusionXLInpaintPipeline), {**SIZE, **PAINT, "strength": 0.8}, CFG
    ),
    "StableDiffusion3": Specimen(
        lambda: sd3(d.StableDiffusion3Pipeline), FLUX, CFG, **TEXT_OF_LAST
    ),
    "StableDiffusion3Img2Img": Specimen(
        lambda: sd3(d.StableDiffusion3Img2ImgPipeline),
        {**FLUX, "image": picture(), "strength": 0.8},
        CFG,
        **TEXT_OF_LAST,
    ),
    "StableDiffusion3Inpaint": Specimen(
        lambda: sd3(d.StableDiffusion3InpaintPipeline, transformer=sd3_net(16), vae=vae(latent=16)),
        {**FLUX, **PAINT, "strength": 0.6},
        CFG,
        **TEXT_OF_LAST,
    ),
    "StableDiffusion3ControlNet": Specimen(
        lambda: sd3(
            d.StableDiffusion3ControlNetPipeline,
            controlnet=d.SD3ControlNetModel.from_transformer(
                tiny.tiny_sd3().transformer,
                num_layers=1,
                num_extra_conditioning_channels=0,
                load_weights_from_transformer=False,
            ),
        ),
        {**FLUX, "control_image": picture()},
        CFG,
        **TEXT_OF_LAST,
        single=CONTROLS,
    ),
    "Flux": Specimen(lambda: flux(d.FluxPipeline), FLUX, FLUX_GUIDED),
    "FluxImg2Img": Specimen(
        lambda: flux(d.FluxImg2ImgPipeline),
        {**FLUX, "image": picture(), "strength": 0.8},
        FLUX_GUIDED,
    ),
    "FluxInpaint": Specimen(
        lambda: flux(d.FluxInpaintPipeline), {**FLUX, **PAINT, "strength": 0.8}, FLUX_GUIDED
    ),
    "FluxKontext": Specimen(
        lambda: flux(d.FluxKontextPipeline),
        {**FLUX, "image": picture(), "_auto_resize": False, "max_area": 256},
        FLUX_GUIDED,
    ),
    "FluxFill": Specimen(lambda: flux(d.FluxFillPipeline, 48), {**FLUX, **PAINT}),
    "FluxControl": Specimen(
        lambda: flux(d.FluxControlPipeline, 32), {**FLUX, "control_image": picture()}
    ),
    "FluxControlNet": Specimen(
        lambda: flux(d.FluxControlNetPipeline, controlnet=flux_controlnet()),
        {**FLUX, "control_image": picture()},
        FLUX_GUIDED,
        single=CONTROLS,
    ),
    "Flux2": Specimen(lambda: flux2(d.Flux2Pipeline, True), SIZE),
    "Flux2 (edit)": Specimen(lambda: flux2(d.Flux2Pipeline, True), {**SIZE, "image": picture(64)}),
    "Flux2Klein": Specimen(lambda: flux2(d.Flux2KleinPipeline, False), SIZE, CFG),
    "Chroma": Specimen(lambda: chroma(d.ChromaPipeline), SIZE, CFG),
    "ChromaImg2Img": Specimen(
        lambda: chroma(d.ChromaImg2ImgPipeline), {**SIZE, "image": picture(), "strength": 0.8}, CFG
    ),
    "QwenImage": Specimen(
        lambda: qwen(d.QwenImagePipeline),
        SIZE,
        {"negative_prompt": "grey", "call": {"true_cfg_scale": 2.0}},
        **text_after_last(1),
    ),
    "QwenImageImg2Img": Specimen(
        lambda: qwen(d.QwenImageImg2ImgPipeline),
        {**SIZE, "image": picture(), "strength": 0.8},
        {"negative_prompt": "grey", "call": {"true_cfg_scale": 2.0}},
        **text_after_last(1),
    ),
    "QwenImageInpaint": Specimen(
        lambda: qwen(d.QwenImageInpaintPipeline),
        {**SIZE, **PAINT, "strength": 0.8},
        {"negative_prompt": "grey", "call": {"true_cfg_scale": 2.0}},
        **text_after_last(1),
    ),
    "ZImage": Specimen(
        lambda: z_image(d.ZImagePipeline),
        SIZE,
        CFG,
        single="the pipeline asserts that its latents are float32",
    ),
    "ZImageImg2Img": Specimen(
        lambda: z_image(d.ZImageImg2ImgPipeline),
        {**SIZE, "image": picture(), "strength": 0.8},
        CFG,
        single="the pipeline asserts that its latents are float32",
    ),
    "Sana": Specimen(lambda: sana(d.SanaPipeline), {**LARGE, "use_resolution_binning": False}, CFG),
    "Sana (DPM-Solver)": Specimen(
        lambda: sana(d.SanaPipeline, sana_flow_dpm()),
        {**LARGE, "use_resolution_binning": False},
        CFG,
    ),
    "PixArtAlpha": Specimen(
        lambda: pixart(d.PixArtAlphaPipeline),
        {**SIZE, "use_resolution_binning": False},
        CFG,
        alone=NO_LORA,
    ),
    "PixArtSigma": Specimen(
        lambda: pixart(d.PixArtSigmaPipeline),
        {**SIZE, "use_resolution_binning": False},
        CFG,
        alone=NO_LORA,
    ),
    "HunyuanDiT": Specimen(
        lambda: hunyuan_dit(d.HunyuanDiTPipeline),
        {**SIZE, "use_resolution_binning": False},
        CFG,
        alone=NO_LORA,
        single=TIME,
    ),
    "CogView3Plus": Specimen(
        cogview3,
        SIZE,
        CFG,
        alone=NO_LORA,
    ),
    "CogView4": Specimen(lambda: cogview4(d.CogView4Pipeline), SIZE, CFG),
    "CogView4Control": Specimen(
        lambda: cogview4(d.CogView4ControlPipeline, 8), {**SIZE, "control_image": picture()}, CFG
    ),
    "Lumina": Specimen(
        lumina,
        {"height": 64, "width": 64},
        CFG,
        unreached=(r"transformer\.pad_token",),
        because="diffusers never reads it",
        alone=NO_LORA,
    ),
    "Lumina2": Specimen(lumina2, {"height": 64, "width": 64}, CFG),
    "AuraFlow": Specimen(aura_flow, SIZE, CFG),
    "OmniGen": Specimen(
        omnigen,
        {"height": 64, "width": 64},
        CFG,
        unreached=(r"transformer\.patch_embedding\.input_image_proj\..*",),
        because="there is no picture to start from",
        alone=NO_LORA,
    ),
    "HiDreamImage": Specimen(
        hidream,
        SIZE,
        CFG,
        unreached=(
            r"transformer\.(double|single)_stream_blocks\.0\.block\.ff_i\.(experts|gate)\..*",
        ),
        because="diffusers runs the routed experts under no_grad unless in training mode",
    ),
    "Bria": Specimen(bria, SIZE, CFG),
    "BriaFibo": Specimen(bria_fibo, {"height": 32, "width": 32, "do_patching": False}, CFG),
    "OvisImage": Specimen(ovis, SIZE, CFG),
    "LongCatImage": Specimen(
        lambda: longcat(d.LongCatImagePipeline), {**SIZE, "enable_prompt_rewrite": False}, CFG
    ),
    "PRX": Specimen(
        prx,
        {**SIZE, "use_resolution_binning": False},
        CFG,
        alone=NO_LORA,
    ),
    "KandinskyV22": Specimen(
        lambda: kandinsky22(d.KandinskyV22Pipeline),
        {**SIZE, **KANDINSKY},
        CFG,
        alone="with 2 prompts at once",
    ),
    "KandinskyV22Img2Img": Specimen(
        lambda: kandinsky22(d.KandinskyV22Img2ImgPipeline),
        {**SIZE, **KANDINSKY, "image": picture(), "strength": 0.8},
        CFG,
        alone="1 latents of 2 prompts",
        single=DECODES,
    ),
    "DiT": Specimen(
        dit,
        {"class_labels": [1]},
        single=DECODES,
        alone=NO_LORA,
    ),
    "Krea2": Specimen(
        krea2,
        SIZE,
        CFG,
        alone="cannot be split by sample",
    ),
    "ErnieImage": Specimen(ernie, SIZE, CFG),
    "HunyuanImage": Specimen(
        hunyuan_image,
        SIZE,
        CFG,
        alone="cannot be split by sample",
    ),
}
