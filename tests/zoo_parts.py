"""What the tiny pipelines of the zoo are put together from: stand-ins for texts, and VAEs.

Real text encoders cannot exist without their files, and what a policy needs of them is that a
prompt gives an embedding: `pipeline` answers `encode_prompt` itself, with numbers drawn from the
prompt's letters. `tests/tiny.py` has pipelines with real tokenizers and encoders.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import tiny
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
)
from PIL import Image
from torch import Tensor, nn

WIDTH, LENGTH = 16, 6
"""Of the embeddings of a prompt."""


@dataclass(frozen=True)
class Specimen:
    """A pipeline of the zoo: how it is built and called, and what of it has no gradient.

    `call` are arguments of its `__call__`; `guided` further ones with which it guides itself (None
    where it cannot). `unreached` are patterns of parameters whose gradient is none or zero,
    `because` says why. `single` says why it does not run in float64, `alone` what the error says
    when it is given a batch (`alone_guided`: only with its guidance). `bound` is for a network
    that rounds to bfloat16 inside: 2 ** -8.
    """

    build: Callable[[], Any]
    call: Mapping[str, Any] = field(default_factory=dict)
    guided: Mapping[str, Any] | None = None
    unreached: tuple[str, ...] = ()
    because: str = ""
    single: str = ""
    alone: str = ""
    alone_guided: str = ""
    bound: float = 0.0


NO_LORA = "takes no adapters"  # and without adapters no layer can be told apart by sample

TEXT_OF_LAST = {
    "unreached": (r"transformer\.transformer_blocks\.1\.attn1?\.(add_q_proj|norm_added_q)\..*",),
    "because": "the last block does not use what the text attends to",
}


def text_after_last(last: int) -> dict[str, Any]:
    """For networks that compute what their last block makes of the text, and drop it."""
    block = rf"transformer\.transformer_blocks\.{last}\."
    return {
        "unreached": (
            block + r"attn1?\.(add_q_proj|norm_added_q|to_add_out)\..*",
            block + r"(txt_mlp|txt_ff|ff_context)\..*",
        ),
        "because": "what the last block makes of the text is not used",
    }


def words(texts: Sequence[str], length: int = LENGTH, width: int = WIDTH, salt: int = 0) -> Tensor:
    """Embeddings `(B, length, width)` that depend on the letters only."""
    rows = []
    for text in texts:
        generator = torch.Generator().manual_seed(zlib.crc32(text.encode()) + salt)
        rows.append(torch.randn(length, width, generator=generator))
    return torch.stack(rows)


def mask(rows: int, length: int = LENGTH, dtype: torch.dtype = torch.long) -> Tensor:
    """An attention mask `(B, length)` whose last place is padding."""
    made = torch.ones(rows, length, dtype=dtype)
    made[:, -1] = 0
    return made


Answer = Callable[[list[str], list[str] | None, Mapping[str, Any]], Any]


def pair(texts: list[str], negative: list[str] | None, _: Mapping[str, Any]) -> Any:
    """(embeddings, negative ones)."""
    return words(texts), None if negative is None else words(negative)


def masked(texts: list[str], negative: list[str] | None, _: Mapping[str, Any]) -> Any:
    """(embeddings, mask, negative embeddings, negative mask)."""
    away = (None, None) if negative is None else (words(negative), mask(len(negative)))
    return (words(texts), mask(len(texts)), *away)


def paired_masks(texts: list[str], negative: list[str] | None, given: Mapping[str, Any]) -> Any:
    """(embeddings, negative embeddings, mask, negative mask)."""
    a, m, b, n = masked(texts, negative, given)
    return a, b, m, n


def one_masked(texts: list[str], _: list[str] | None, __: Mapping[str, Any]) -> Any:
    """(embeddings, mask); guidance asks a second time."""
    return words(texts), mask(len(texts))


def pipeline(kind: type[Any], encode: Answer | None = None, **components: Any) -> Any:
    """A pipeline of that class; components that are not named are None.

    `encode` answers `encode_prompt` with the prompts, the negative ones (None without guidance)
    and the other arguments.
    """
    if encode is not None:
        original = inspect.signature(kind.encode_prompt)

        def encode_prompt(self: Any, *args: Any, **kwargs: Any) -> Any:
            bound = original.bind(self, *args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            texts = given["prompt"] or ""
            texts = [texts] if isinstance(texts, str) else list(texts)
            negative = given.get("negative_prompt")
            negative = [negative or ""] * len(texts) if not isinstance(negative, list) else negative
            guided = given.get("do_classifier_free_guidance", True)
            return encode(texts, negative if guided else None, given)

        encode_prompt.__signature__ = original  # type: ignore[attr-defined]
        kind = type(kind.__name__, (kind,), {"encode_prompt": encode_prompt})
    takes = inspect.signature(kind.__init__).parameters
    missing = {
        name: None
        for name, parameter in takes.items()
        if name != "self" and parameter.default is inspect.Parameter.empty
    }
    pipe = kind(**(missing | components))
    finish(pipe)
    return pipe


def finish(pipe: Any) -> None:
    """Denoisers away from zero and trainable, all else frozen, everything in eval mode."""
    from leangrpo.components import denoisers

    found = denoisers(pipe)
    for module in found.values():
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    for name, component in pipe.components.items():
        if isinstance(component, nn.Module):
            component.eval().requires_grad_(name in found)
    pipe.set_progress_bar_config(disable=True)


def flow(**options: Any) -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(**({"shift": 3.0} | options))


def dynamic_flow() -> FlowMatchEulerDiscreteScheduler:
    return flow(use_dynamic_shifting=True, base_image_seq_len=256, max_image_seq_len=4096)


def ddim(prediction_type: str = "epsilon", **options: Any) -> DDIMScheduler:
    return DDIMScheduler(
        **{
            "beta_start": 0.00085,
            "beta_end": 0.012,
            "beta_schedule": "scaled_linear",
            "clip_sample": False,
            "set_alpha_to_one": False,
            "steps_offset": 1,
            "prediction_type": prediction_type,
        }
        | options
    )


def vae(channels: int = 3, latent: int = 4, blocks: int = 2) -> AutoencoderKL:
    """2 ** (blocks - 1) times smaller, with `latent` channels."""
    return AutoencoderKL(
        in_channels=channels,
        out_channels=channels,
        block_out_channels=(4,) * blocks,
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        latent_channels=latent,
        layers_per_block=1,
        norm_num_groups=2,
        sample_size=16,
        scaling_factor=1.5,
        shift_factor=0.05,
        mid_block_add_attention=False,
    )


def wan_vae(kind: type[Any] = AutoencoderKLWan, latent: int = 4) -> Any:
    """4 times smaller in space and time."""
    options = {} if kind is AutoencoderKLQwenImage else {
        "scale_factor_temporal": 4, "scale_factor_spatial": 4
    }  # fmt: skip
    return kind(
        base_dim=4,
        z_dim=latent,
        dim_mult=[1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=[0.1] * latent,
        latents_std=[0.9] * latent,
        **options,
    )


def picture(size: int = 16, seed: int = 0) -> Image.Image:
    """An RGB picture of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 255, (size, size, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def mask_picture(size: int = 16) -> Image.Image:
    """White where it is to be painted: the right half."""
    pixels = np.zeros((size, size), dtype=np.uint8)
    pixels[:, size // 2 :] = 255
    return Image.fromarray(pixels)


class Box(SimpleNamespace):
    """A component that is only asked for its attributes."""


clip, clip_tokenizer = tiny._clip, tiny._clip_tokenizer
