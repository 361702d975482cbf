"""What a pipeline's call needs to be the policy: its arguments, and two methods wrapped."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .errors import LeanError, problem

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
    pipe.encode_prompt = _note_latest(encode_prompt)


def _note_latest(encode_prompt: Any, capacity: int = 4) -> Any:
    """Keep the latest outputs by their prompts, as `latest`: a call encodes a prompt list, and
    maybe a negative one after it."""
    signature = inspect.signature(encode_prompt)
    latest: dict[tuple[str, ...], Any] = {}

    def noted(*args: Any, **kwargs: Any) -> Any:
        output = encode_prompt(*args, **kwargs)
        prompts = signature.bind_partial(*args, **kwargs).arguments.get("prompt")
        if prompts is not None:
            key = (prompts,) if isinstance(prompts, str) else tuple(prompts)
            latest.pop(key, None)
            latest[key] = output
            while len(latest) > capacity:
                latest.pop(next(iter(latest)))
        return output

    noted.__signature__ = signature  # type: ignore[attr-defined]
    noted.latest = latest  # type: ignore[attr-defined]
    return noted


def embedding(pipe: Any, prompts: Sequence[str]) -> Tensor:
    """A feature of each prompt, `(B, D)` float32: the mean over tokens of its text embedding.

    That is the first floating output of the pipeline's own `encode_prompt` for this list of
    prompts, which it must have been called with lately (`remember_prompts` keeps it): `(B, L, D)`,
    `(B, D)` or a list of B `(L, D)`. Raises LeanError when there is none.
    """
    latest = getattr(getattr(pipe, "encode_prompt", None), "latest", None)
    if latest is None:
        raise LeanError(
            f"{type(pipe).__name__} has no encode_prompt, so there is no text embedding for a "
            "value network. Choose another advantage.baseline."
        )
    if tuple(prompts) not in latest:
        raise LeanError(
            f"{type(pipe).__name__} has not encoded the prompts {list(prompts)} lately: it was "
            "called with embeddings, or changes the prompts before it encodes them."
        )
    found = _first_floating(latest[tuple(prompts)])
    if isinstance(found, list):
        found = torch.stack([_mean_over_tokens(one[None])[0] for one in found])
    if found is None or found.ndim < 2 or len(found) != len(prompts):
        shape = None if found is None else tuple(found.shape)
        raise LeanError(
            f"{type(pipe).__name__}.encode_prompt gave {shape} for {len(prompts)} prompts: one "
            "embedding (L, D) or (D) for each is needed for a value network."
        )
    return _mean_over_tokens(found)


def _is_text(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 2


def _mean_over_tokens(tensor: Tensor) -> Tensor:
    wide = tensor.detach().float()
    return wide.flatten(1, -2).mean(dim=1) if wide.ndim > 2 else wide


def _first_floating(output: Any) -> Tensor | list[Tensor] | None:
    """The first floating tensor, or list of such of a prompt each, in nested outputs."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    if not isinstance(output, (list, tuple)):
        return None
    if isinstance(output, list) and output and all(_is_text(one) for one in output):
        return output
    for inner in output:
        if (found := _first_floating(inner)) is not None:
            return found
    return None


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
