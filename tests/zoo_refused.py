"""Tiny pipelines that are no policy, and say so (see `zoo`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import diffusers as d
from transformers import CLIPTextModel
from zoo_image import SIZE, dit, hunyuan_image, sana, unet
from zoo_parts import WIDTH, clip, clip_tokenizer, picture, pipeline, vae
from zoo_video import ace_step, cosmos


@dataclass(frozen=True)
class Refused:
    """A pipeline, how it is called, and what its error must say."""

    pipeline: str
    build: Callable[[], Any]
    sampling: Mapping[str, Any]
    says: str
    kernel: tuple[str, float] | None = None


def lcm() -> Any:
    return pipeline(
        d.LatentConsistencyModelPipeline,
        vae=vae(),
        text_encoder=clip(CLIPTextModel),
        tokenizer=clip_tokenizer(),
        unet=unet(time_cond_proj_dim=8),
        scheduler=d.LCMScheduler(),
        requires_safety_checker=False,
    )


def hunyuan_momentum() -> Any:
    return hunyuan_image(
        lambda: d.AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=2)
    )


def consistency() -> Any:
    net = d.UNet2DModel(
        sample_size=8, block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return pipeline(
        d.ConsistencyModelPipeline, unet=net, scheduler=d.CMStochasticIterativeScheduler()
    )


def stable_audio() -> Any:
    net = d.StableAudioDiTModel(
        sample_size=4, in_channels=3, out_channels=3, num_layers=1, attention_head_dim=4,
        num_attention_heads=2, num_key_value_attention_heads=2, cross_attention_dim=4,
        time_proj_dim=8, global_states_input_dim=8, cross_attention_input_dim=4,
    )  # fmt: skip
    small = d.AutoencoderOobleck(
        encoder_hidden_size=6, downsampling_ratios=[1, 2], decoder_channels=3,
        decoder_input_channels=3, audio_channels=2, channel_multiples=[2, 4], sampling_rate=4,
    )  # fmt: skip
    from diffusers.pipelines.stable_audio import StableAudioProjectionModel

    projection = StableAudioProjectionModel(
        text_encoder_dim=4, conditioning_dim=4, min_value=0, max_value=32
    )
    return pipeline(
        d.StableAudioPipeline, transformer=net, vae=small, projection_model=projection,
        scheduler=d.EDMEulerScheduler(sigma_min=0.3, sigma_max=500, sigma_data=1.0),
    )  # fmt: skip


def amused() -> Any:
    net = d.UVit2DModel(
        hidden_size=8, use_bias=False, hidden_dropout=0.0, cond_embed_dim=8,
        micro_cond_encode_dim=2, micro_cond_embed_dim=10, encoder_hidden_size=8, vocab_size=32,
        codebook_size=32, in_channels=8, block_out_channels=8, num_res_blocks=1, downsample=True,
        upsample=True, block_num_heads=1, num_hidden_layers=1, num_attention_heads=1,
        attention_dropout=0.0, intermediate_size=8, layer_norm_eps=1e-6, ln_elementwise_affine=True,
    )  # fmt: skip
    return pipeline(
        d.AmusedPipeline, transformer=net, scheduler=d.AmusedScheduler(mask_token_id=31)
    )


def cascade() -> Any:
    from diffusers.models import StableCascadeUNet

    net = StableCascadeUNet(
        conditioning_dim=WIDTH, block_out_channels=(8, 8), num_attention_heads=(2, 2),
        down_num_layers_per_block=(1, 1), up_num_layers_per_block=(1, 1), switch_level=(False,),
        clip_image_in_channels=WIDTH, clip_text_in_channels=WIDTH,
        clip_text_pooled_in_channels=WIDTH, dropout=(0.1, 0.1), in_channels=4, out_channels=4,
    )  # fmt: skip
    return pipeline(d.StableCascadePriorPipeline, prior=net, scheduler=d.DDPMWuerstchenScheduler())


def video_diffusion() -> Any:
    net = d.UNetSpatioTemporalConditionModel(
        block_out_channels=(32, 32), layers_per_block=1, sample_size=8, in_channels=8,
        out_channels=4, cross_attention_dim=8, num_attention_heads=2,
        projection_class_embeddings_input_dim=24, addition_time_embed_dim=8,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
    )  # fmt: skip
    return pipeline(
        d.StableVideoDiffusionPipeline,
        unet=net,
        scheduler=d.EulerDiscreteScheduler(
            timestep_type="continuous", prediction_type="v_prediction", use_karras_sigmas=True,
            sigma_min=0.002, sigma_max=700.0,
        ),
    )  # fmt: skip


def sprint() -> Any:
    return sana(d.SanaSprintPipeline, d.SCMScheduler(), guidance_embeds=True)


REFUSED: dict[str, Refused] = {
    "LatentConsistencyModel": Refused(
        "LatentConsistencyModelPipeline", lcm, {"call": SIZE}, "consistency models"
    ),
    "ConsistencyModel": Refused("ConsistencyModelPipeline", consistency, {}, "EDM|neither"),
    "SanaSprint": Refused("SanaSprintPipeline", sprint, {"call": SIZE}, "consistency models"),
    "StableAudio": Refused("StableAudioPipeline", stable_audio, {}, "EDM"),
    "Amused": Refused("AmusedPipeline", amused, {}, "neither"),
    "StableCascadePrior": Refused("StableCascadePriorPipeline", cascade, {}, "neither"),
    "StableVideoDiffusion": Refused(
        "StableVideoDiffusionPipeline", video_diffusion, {}, "continuous timesteps"
    ),
    "Cosmos2TextToImage": Refused(
        "Cosmos2TextToImagePipeline",
        lambda: cosmos(d.Cosmos2TextToImagePipeline, 4),
        {"call": SIZE},
        "sigmas go up to 80",
    ),
    "Cosmos2VideoToWorld": Refused(
        "Cosmos2VideoToWorldPipeline",
        lambda: cosmos(d.Cosmos2VideoToWorldPipeline, 5),
        {"call": {**SIZE, "num_frames": 5, "image": picture()}},
        "sigmas go up to 80",
    ),
    "CosmosTextToWorld": Refused(
        "CosmosTextToWorldPipeline",
        lambda: cosmos(
            d.CosmosTextToWorldPipeline,
            4,
            vae=None,
            scheduler=d.EDMEulerScheduler(final_sigmas_type="sigma_min"),
        ),
        {"call": {**SIZE, "num_frames": 5}},
        "EDM",
    ),
    "DiT (with guidance)": Refused(
        "DiTPipeline", dit, {"guidance": 4.0, "call": {"class_labels": [1]}}, "twice in one batch"
    ),
    "HunyuanImage (its own guider)": Refused(
        "HunyuanImagePipeline", hunyuan_momentum, {"guidance": 4.0, "call": SIZE}, "momentum"
    ),
    "AceStep (with guidance)": Refused(
        "AceStepPipeline",
        ace_step,
        {"guidance": 4.0, "call": {"lyrics": "la", "audio_duration": 4.0}},
        "momentum",
    ),
}
