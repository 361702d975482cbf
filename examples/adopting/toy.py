"""What the loops of this folder train and are rewarded for: random, small, the real classes."""

import torch
from diffusers import SD3Transformer2DModel
from peft import LoraConfig

PROMPTS = 8


def transformer(size: str = "small", *, lora: bool = False) -> SD3Transformer2DModel:
    """A Stable Diffusion 3 transformer over latents (4, 8, 8), or (4, 32, 32) to measure with."""
    torch.manual_seed(0)
    layers, heads, width, latent = {"small": (2, 2, 32, 8), "large": (4, 6, 64, 32)}[size]
    model = SD3Transformer2DModel(
        sample_size=latent,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=layers,
        attention_head_dim=width,
        num_attention_heads=heads,
        joint_attention_dim=16,
        caption_projection_dim=width * heads,
        pooled_projection_dim=16,
        pos_embed_max_size=16,
    )
    if lora:
        model.requires_grad_(False)
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        model.add_adapter(LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    return model


def embeddings(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What the prompts say to the transformer, by its argument."""
    generator = torch.Generator().manual_seed(1)
    return {
        "encoder_hidden_states": torch.randn(PROMPTS, 16, 16, generator=generator).to(dtype),
        "pooled_projections": torch.randn(PROMPTS, 16, generator=generator).to(dtype),
    }


def reward(latents: torch.Tensor) -> torch.Tensor:
    """How near the latents' means are to one: (B, C, H, W) -> (B,)."""
    return -((latents.mean(dim=(1, 2, 3)) - 1) ** 2)
