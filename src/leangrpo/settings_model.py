"""The settings of the model, its prompts and its sampler; the rest, and the tree, is in `settings`.

"FlowGRPO" is yifan123/flow_grpo (`config/base.py` and `config/grpo.py`).
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _not_bool(value: object) -> object:
    """YAML's yes/no/on/off are booleans, and pydantic would read them as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


Int = Annotated[int, BeforeValidator(_not_bool)]
Float = Annotated[float, BeforeValidator(_not_bool)]


def _sigmas(value: object) -> object:
    """One sentence for a union, where pydantic has one complaint for each of its branches."""
    is_list = isinstance(value, list | tuple) and all(
        isinstance(v, int | float) and not isinstance(v, bool) and 0 < v <= 1 for v in value
    )
    if value not in ("pipeline", "linear") and not is_list:
        raise ValueError("must be `pipeline`, `linear`, or a list of numbers in (0, 1]")
    return value


def _heldout(value: object) -> object:
    """One sentence for a union, as above."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    share = isinstance(value, float) and 0 < value < 1
    count = number and isinstance(value, int) and value >= 1
    if not (share or count or value is None or (isinstance(value, str) and value)):
        raise ValueError(
            "must be a source as prompts.train is, a share of it between 0 and 1, "
            "a number of its examples, or null"
        )
    return value


def _size(value: object) -> object:
    """Bytes from a number of them or a text such as 2GiB, 512MiB or 48GB."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([kKMGT])(i)?)?B?", str(value))
    if not found or isinstance(value, bool):
        raise ValueError("must be a number of bytes, a size such as 2GiB or 512MiB, or null")
    number, prefix, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index((prefix or " ").upper()))


Size = Annotated[int, BeforeValidator(_size)]
"""Bytes, written as a number or as 2GiB."""


class Settings(BaseModel):
    """A branch of the tree: frozen, and an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )


class Lora(Settings):
    """Low-rank adapters; used when `model.train` is lora."""

    rank: Int = Field(32, ge=1, description="rank of the adapters (FlowGRPO, SD3: 32)")
    alpha: Float = Field(64.0, gt=0, description="scale is alpha / rank (FlowGRPO, SD3: 64)")
    targets: tuple[str, ...] | None = Field(
        None, description="suffixes of the layers adapted; null = the attention projections found"
    )


class Model(Settings):
    """The policy and which of its weights are trained."""

    pipeline: str = Field(
        "embedded",
        min_length=1,
        description="`embedded`, `embedded-ddim`, a folder in diffusers format, or a hub id",
    )
    revision: str | None = Field(None, description="revision of a hub id; null = its main one")
    variant: str | None = Field(None, description="variant of the weight files, such as fp16")
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = Field(
        "float32", description="of the denoisers and text encoders; latents are always float32"
    )
    master_dtype: Literal["float32", "bfloat16"] | None = Field(
        None,
        description="of the trained weights, cast to dtype for computing; null = dtype itself",
    )
    train: Literal["full", "lora"] = Field(
        "full", description="train every weight of the denoiser, or adapters on its layers"
    )
    lora: Lora = Field(Lora(), description="the adapters")
    denoisers: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="names of the denoisers that are trained (Wan 2.2: transformer, "
        "transformer_2), the others stay frozen; null = all",
    )
    offload: bool = Field(
        False, description="text encoders and VAE wait in the host's memory while they are not used"
    )
    activation_checkpointing: bool = Field(
        False, description="recompute activations inside a backward: less memory, more time"
    )

    compile: bool = Field(
        False,
        description="torch.compile the denoiser's repeated blocks: a slow start; measure the gain",
    )

    @property
    def has_master(self) -> bool:
        """Whether the weights are kept in another dtype than is computed in."""
        return self.master_dtype not in (None, self.dtype)


class Prompts(Settings):
    """Where prompts come from."""

    train: str = Field(
        "embedded",
        min_length=1,
        description="`embedded`, hf:owner/name, or a file: .jsonl, .csv, .tsv, .parquet, or text "
        "with a prompt a line",
    )
    heldout: Annotated[str | int | float | None, BeforeValidator(_heldout)] = Field(
        None,
        description="for evaluation: the same, or a share (0.05) or number (64) of prompts.train "
        "that is left out of training; null = no evaluation",
    )
    column: str = Field("prompt", min_length=1, description="the column that holds the prompt")
    images: dict[str, str] = Field(
        {},
        description="pictures the pipeline is called with: its argument to a column of files, "
        "such as {image: source}",
    )


class Flash(Settings):
    """Fewer deterministic steps outside the window of noisy ones (MixGRPO-Flash)."""

    ratio: Float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of the deterministic steps that stay; null = all, by Euler "
        "(MixGRPO-Flash: 0.4, Flash*: 0.2)",
    )
    order: Literal[1, 2, 3] = Field(2, description="of DPM-Solver++ there (MixGRPO-Flash: 2)")
    kind: Literal["midpoint", "heun"] = Field(
        "midpoint", description="of its second order (MixGRPO-Flash: midpoint)"
    )
    where: Literal["after", "around"] = Field(
        "after", description="steps after the window (MixGRPO-Flash), or those before it as well"
    )


class Sampling(Settings):
    """What the pipeline is called with."""

    steps: Int = Field(10, ge=1, description="sampling steps T (FlowGRPO, SD3: 10)")
    guidance: Float = Field(1.0, ge=0, description="the pipeline's guidance_scale; 1 = none")
    height: Int | None = Field(None, ge=1, description="pixels; null = the pipeline's default")
    width: Int | None = Field(None, ge=1, description="pixels; null = the pipeline's default")
    num_frames: Int | None = Field(None, ge=1, description="frames of a video; null = default")
    negative_prompt: str | None = Field(None, description="for guidance; null = the default")
    sigmas: Annotated[
        Literal["pipeline", "linear"] | tuple[Float, ...], BeforeValidator(_sigmas)
    ] = Field(
        "pipeline",
        description="noise levels: the pipeline's own, linspace(1, 1/T, T) before the shift, "
        "or a list of T falling numbers in (0, 1]",
    )
    call: dict[str, Any] = Field({}, description="further keyword arguments of the pipeline's call")
    flash: Flash = Field(Flash(), description="fewer deterministic steps")


class Kernel(Settings):
    """How one step draws the next latent."""

    name: Literal["flow_sde", "flow_sde_wan", "dance_sde", "flow_cps", "ddim"] = Field(
        "flow_sde", description="the Gaussian transition; see the kernels' page for formulas"
    )
    noise_level: Float | None = Field(
        0.7,
        description="noise_level of flow_sde and flow_cps, eta of dance_sde and ddim; null for "
        "flow_sde_wan (FlowGRPO: 0.7)",
    )
    reduce: Literal["mean", "sum"] = Field(
        "mean", description="log-probability over a latent's elements (all public code: mean)"
    )
