"""From settings to a pipeline with trainable parameters: the real `from_pretrained` path."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .components import chosen, denoisers
from .config import EMBEDDED_PIPELINES
from .errors import LeanError, problem


def embedded_folder(name: str = "embedded") -> Path:
    """The folder of a pipeline shipped inside the package: `embedded` or `embedded-ddim`."""
    return EMBEDDED_PIPELINES[name]


def load_pipeline(
    source: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    revision: str | None = None,
    variant: str | None = None,
) -> Any:
    """A diffusers pipeline, embedded, from a folder or a hub id, in `dtype` on `device`.

    `source` is `embedded` (flow matching), `embedded-ddim` (noise prediction), a path or an id.
    The VAE stays float32: a picture decoded in 16 bits differs visibly from the model's own, and
    a reward would learn to like that. Raises LeanError with the loader's own reason.
    """
    from diffusers import DiffusionPipeline
    from diffusers.utils import logging
    from transformers.utils import logging as transformers_logging

    logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    folder = str(EMBEDDED_PIPELINES.get(source, source))
    vae_dtype = torch.promote_types(dtype, torch.float32)
    try:
        index = DiffusionPipeline.load_config(folder, revision=revision)
        # a component the index leaves empty (SD3 without T5) has to be passed as None
        empty = {name: None for name, value in index.items() if value == [None, None]}
        pipe = DiffusionPipeline.from_pretrained(
            folder,
            **empty,
            dtype={"default": dtype, "vae": vae_dtype},
            revision=revision,
            variant=variant,
        )
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise problem(
            "model.pipeline",
            source,
            f"diffusers cannot load it ({type(error).__name__}: {reason})",
            "Give `embedded`, `embedded-ddim`, a folder in diffusers format, or a hub id you have "
            "access to.",
        ) from error
    if getattr(pipe, "scheduler", None) is None:
        raise problem(
            "model.pipeline", source, "this pipeline has no scheduler", "Add one to its folder."
        )
    pipe.to(device)
    for component in pipe.components.values():
        if isinstance(component, nn.Module):
            if dtype is torch.float64:  # what a model wants in float32 at least is left behind
                nn.Module.to(component, dtype)
            _align(component)
    return pipe


def place(pipe: Any, device: str | torch.device, *, offload: bool = False) -> None:
    """Put a pipeline on a device; with `offload`, all but the denoisers only while they work.

    Sharded denoisers are on their device already. The policy sends the others back to the host
    when prompts are encoded and pictures are decoded.
    """
    kept = denoisers(pipe)
    for name, component in pipe.components.items():
        if not isinstance(component, nn.Module):
            continue
        if offload and name not in kept:
            from accelerate import cpu_offload_with_hook

            cpu_offload_with_hook(component, device)
        else:
            component.to(device)


def _align(module: nn.Module) -> None:
    """Move weights that lie in a mapped file to memory of their own.

    In the file they start at any byte, and matrix kernels round differently by alignment: the same
    weights, gathered from shards, would give other pictures in the last bit.
    """
    for parameter in module.parameters():
        if parameter.device.type == "cpu" and parameter.data_ptr() % 64:
            parameter.data = parameter.data.clone()


def make_trainable(
    pipe: Any,
    train: str = "full",
    *,
    rank: int = 32,
    alpha: float = 64,
    targets: Sequence[str] | None = None,
    seed: int = 0,
    activation_checkpointing: bool = False,
    only: Sequence[str] | None = None,
) -> None:
    """Choose what is trained: every denoiser parameter ("full") or a fresh LoRA ("lora").

    LoRA weights are float32 at least, also on a 16-bit model: updates of 1e-5 would vanish in
    them otherwise. `targets` are suffixes of module names; None takes the linear layers inside
    the model's attention modules. The initial LoRA is drawn from `seed`. `only` names the
    denoisers that are trained, None takes all; the others stay frozen.
    """
    trained = chosen(pipe, only)
    for name, component in pipe.components.items():
        if isinstance(component, nn.Module):
            component.requires_grad_(train == "full" and name in trained)
    for module in trained.values():
        if train == "lora":
            _add_lora(module, rank, alpha, targets, seed)
        if activation_checkpointing:
            if not hasattr(module, "enable_gradient_checkpointing"):
                raise problem(
                    "model.activation_checkpointing",
                    True,
                    f"{type(module).__name__} does not support it",
                    "Set it to false.",
                )
            checkpointed: Any = module
            checkpointed.enable_gradient_checkpointing()


def copy_denoisers(pipe: Any, only: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """Frozen copies of the trained denoisers, to be the reference policy of full fine-tuning."""
    return {name: deepcopy(m).requires_grad_(False) for name, m in chosen(pipe, only).items()}


def attention_targets(module: nn.Module) -> list[str]:
    """Name suffixes of the linear layers inside a model's attention modules, as LoRA targets."""
    found = set()
    for name, part in module.named_modules():
        if "Attention" not in type(part).__name__ or not name:
            continue
        own = name.rsplit(".", 1)[-1]
        for inner, layer in part.named_modules():
            if isinstance(layer, nn.Linear):
                found.add(f"{own}.{inner}")
    # a suffix that is a container elsewhere (Flux 2's to_out) is spelled out in full
    names = dict(module.named_modules())
    whole = {s: [n for n in names if f".{n}".endswith(f".{s}")] for s in found}
    for suffix, places in whole.items():
        if not all(isinstance(names[n], nn.Linear) for n in places):
            found.remove(suffix)
            found |= {n for n in places if isinstance(names[n], nn.Linear)}
    return sorted(found)


def _add_lora(
    module: nn.Module,
    rank: int,
    alpha: float,
    targets: Sequence[str] | None,
    seed: int,
) -> None:
    from peft import LoraConfig

    names = list(targets) if targets else attention_targets(module)
    if not names:
        raise LeanError(
            f"{type(module).__name__} has no attention module with linear layers to put a LoRA on. "
            "Name the layers in `model.lora.targets`."
        )
    if not hasattr(module, "add_adapter"):
        rule = f"a {type(module).__name__} takes no adapters"
        raise problem("model.train", "lora", rule, "Use full.")
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=names)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            module.add_adapter(config)  # type: ignore[operator]
        except ValueError as error:
            raise problem(
                "model.lora.targets", names, str(error), "Name suffixes of linear layers."
            ) from error
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" in name and parameter.dtype.itemsize < 4:
            parameter.data = parameter.data.float()
