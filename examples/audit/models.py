"""Random denoisers and prompts for the trainers of this folder: only what they cost is real.

`small` takes milliseconds a call, which is for tests; `large` some tens, which is to measure with;
`30M` has as many parameters.
"""

import torch
from diffusers import SD3Transformer2DModel, UNet2DConditionModel

PROMPTS = 8


def sd(size: str = "small") -> UNet2DConditionModel:
    """A Stable Diffusion 1 UNet: latents (4, 8, 8), large (4, 32, 32)."""
    torch.manual_seed(0)
    width, latent = {"small": (8, 8), "large": (64, 32)}[size]
    return UNet2DConditionModel(
        sample_size=latent,
        in_channels=4,
        out_channels=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(width, width),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=16,
        attention_head_dim=4,
    )


def sd3(size: str = "small") -> SD3Transformer2DModel:
    """A Stable Diffusion 3 transformer: latents (4, 8, 8), otherwise (4, 32, 32)."""
    torch.manual_seed(0)
    sizes = {"small": (2, 2, 32, 8), "large": (2, 4, 32, 32), "30M": (6, 6, 64, 32)}
    layers, heads, width, latent = sizes[size]
    return SD3Transformer2DModel(
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
        qk_norm="rms_norm",
    )


def embeddings(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What `PROMPTS` prompts and the empty one (the last) say to a denoiser, by its argument."""
    generator = torch.Generator().manual_seed(1)
    words = {"encoder_hidden_states": torch.randn(PROMPTS + 1, 16, 16, generator=generator)}
    if isinstance(model, SD3Transformer2DModel):
        words["pooled_projections"] = torch.randn(PROMPTS + 1, 16, generator=generator)
    return words


def gaussian(x: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """The log-density of (B, C, H, W) up to a constant, mean over the elements: (B,)."""
    return -((x - mean) ** 2 / (2 * std**2)).mean(dim=(1, 2, 3))


def reward(latents: torch.Tensor) -> torch.Tensor:
    """How near the latents' means are to one: (B,)."""
    return -((latents.mean(dim=(1, 2, 3)) - 1) ** 2)
