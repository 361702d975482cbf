"""What a pipeline's call needs to be the policy: its arguments, and two methods wrapped."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .errors import problem

if TYPE_CHECKING:
    from .policy import Sampling


def arguments(pipe: Any, sampling: Sampling, prompts: Sequence[str]) -> dict[str, Any]:
    """Keyword arguments for the pipeline's call, each one it really has.

    Raises LeanError that names the setting and the argument the pipeline lacks.
    """
    accepted = inspect.signature(type(pipe).__call__).parameters
    wanted: dict[str, tuple[str, Any]] = {
        "guidance_scale": ("sampling.guidance", sampling.guidance),
        "height": ("sampling.height", sampling.height),
        "width": ("sampling.width", sampling.width),
        "num_frames": ("sampling.num_frames", sampling.num_frames),
        "negative_prompt": ("sampling.negative_prompt", sampling.negative_prompt),
    }
    if sampling.negative_prompt is not None:
        wanted["negative_prompt"] = (
            "sampling.negative_prompt",
            [sampling.negative_prompt] * len(prompts),
        )
    wanted |= {name: (f"sampling.call.{name}", value) for name, value in sampling.call.items()}
    arguments: dict[str, Any] = {
        "prompt": list(prompts),
        "num_inference_steps": sampling.steps,
        "return_dict": False,
    }
    for name, (setting, value) in wanted.items():
        if value is None:
            continue
        if name not in accepted:
            raise problem(
                setting,
                value,
                f"{type(pipe).__name__} takes no argument {name!r}; it takes "
                + ", ".join(sorted(set(accepted) - {"self"})),
            )
        arguments[name] = value
    return arguments


def remember_prompts(pipe: Any, capacity: int = 64) -> None:
    """Memoise `pipe.encode_prompt`, its floating outputs in float32 at least.

    A group shares its prompt and a replay must not encode again. Pipelines take the dtype of their
    latents from the embeddings, so float32 embeddings keep the latents float32 from the first
    step; the denoiser's hook casts them back without loss.
    """
    original = pipe.encode_prompt
    known: dict[Any, Any] = {}

    def encode_prompt(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(v, Tensor) for v in (*args, *kwargs.values())):
            return _widen(original(*args, **kwargs))
        key = repr((args, sorted(kwargs.items())))
        if key not in known:
            while len(known) >= capacity:
                known.pop(next(iter(known)))
            known[key] = _widen(original(*args, **kwargs))
            _send_back(pipe)
        return known[key]

    encode_prompt.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    pipe.encode_prompt = encode_prompt


def _widen(value: Any) -> Any:
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            return value
        return value.detach().to(torch.promote_types(value.dtype, torch.float32))
    if isinstance(value, (tuple, list)):
        return type(value)(_widen(v) for v in value)
    return value


def decode_in_own_dtype(pipe: Any) -> None:
    """Let `pipe.vae.decode` take float32 latents, whatever dtype the VAE has."""
    vae = getattr(pipe, "vae", None)
    if vae is None:
        return
    original = vae.decode

    def decode(z: Tensor, *args: Any, **kwargs: Any) -> Any:
        decoded = original(z.to(main_dtype(vae)), *args, **kwargs)
        _send_back(pipe)
        return decoded

    decode.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    vae.decode = decode


def _send_back(pipe: Any) -> None:
    """Give the device's memory back where components are offloaded (`loading.place`)."""
    for component in pipe.components.values():
        if hasattr(component, "_hf_hook"):
            component.to("cpu")


def main_dtype(module: nn.Module) -> torch.dtype:
    """The dtype most of a network's own weights have (adapters and a few norms may differ)."""
    counts: dict[torch.dtype, int] = {}
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point() and "lora_" not in name:
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return max(counts, key=lambda dtype: counts[dtype])
