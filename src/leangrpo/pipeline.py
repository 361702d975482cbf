"""What a pipeline's call needs to be the policy: how it is called, and two methods wrapped."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .components import main_dtype
from .data import SampleKey
from .errors import LeanError, problem
from .noise import INITIAL, generator
from .solver import Flash


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the pipeline is called. `call` holds further keyword arguments of its `__call__`.

    `sigmas`: "pipeline" (whatever pipeline and scheduler make of `steps`), "linear"
    (linspace(1, 1/T, T) before the shift), or T explicit floats. `flash` takes fewer steps outside
    the window of a stochastic trajectory (see `solver`); steps keep their index among all T.
    """

    steps: int
    guidance: float | None = None
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    negative_prompt: str | None = None
    sigmas: str | tuple[float, ...] = "pipeline"
    call: Mapping[str, Any] = field(default_factory=dict)
    flash: Flash | None = None


def arguments(
    pipe: Any,
    sampling: Sampling,
    prompts: Sequence[str],
    options: Mapping[str, Any] | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Keyword arguments for the pipeline's call, each one it really has.

    `options` are given where the pipeline takes them, `inputs` (pictures) whatever else is said.
    The prompts are left out where it takes none, or where their embeddings are in `sampling.call`.
    A guidance of 1 is none, whatever a pipeline calls it; one that has a guider instead gets it
    from there.
    Raises LeanError that names the setting and the argument the pipeline lacks.
    """
    accepted = inspect.signature(type(pipe).__call__).parameters
    guidance = sampling.guidance
    if guidance is not None and "guidance_scale" not in accepted:
        if "guidance_scale" in getattr(getattr(pipe, "guider", None), "config", {}):
            if pipe.guider.guidance_scale != guidance:
                pipe.guider = pipe.guider.new(guidance_scale=guidance)
            guidance = None
        elif guidance == 1:
            guidance = None
    wanted: dict[str, tuple[str, Any]] = {
        "guidance_scale": ("sampling.guidance", guidance),
        "height": ("sampling.height", sampling.height),
        "width": ("sampling.width", sampling.width),
        "num_frames": ("sampling.num_frames", sampling.num_frames),
        "negative_prompt": ("sampling.negative_prompt", sampling.negative_prompt),
    }
    if sampling.negative_prompt is not None:
        wanted["negative_prompt"] = (
            "sampling.negative_prompt",
            _one_or_list([sampling.negative_prompt] * len(prompts)),
        )
    wanted |= {name: (f"sampling.call.{name}", value) for name, value in sampling.call.items()}
    wanted |= {name: (f"prompts.images.{name}", v) for name, v in (inputs or {}).items()}
    arguments: dict[str, Any] = {}
    if "prompt" in accepted and "prompt_embeds" not in sampling.call:
        arguments["prompt"] = _one_or_list(prompts)
    steps = {"num_inference_steps": sampling.steps}
    for name, value in (steps | dict(options or {})).items():
        if name in accepted and value is not None:
            arguments[name] = value
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


def _one_or_list(texts: Sequence[str]) -> str | list[str]:
    """A single text as such: some pipelines take no list."""
    return texts[0] if len(texts) == 1 else list(texts)


def generators(seed: int, keys: Sequence[SampleKey]) -> Any:
    """A generator for each sample, for what a pipeline draws itself; alone, not in a list.

    Seeded by `(seed, key)` only, on the CPU, where diffusers draws then whatever the device.
    """
    made = []
    for key in keys:
        number = generator(seed, key.update, key.prompt, key.generation, INITIAL)
        made.append(torch.Generator().manual_seed(int(number.integers(2**63))))
    return made if len(made) > 1 else made[0]


def as_tensor(output: Any) -> Tensor:
    """A pipeline's pictures, frames or sound as float32 on the CPU: `(B, ...)`.

    Lists are stacked, pictures of PIL become `(C, H, W)` in [0, 1].
    """
    if isinstance(output, Tensor):
        # copy_ casts, and does so inside `float64_throughout` too: rewards read float32
        return torch.empty(output.shape, dtype=torch.float32).copy_(output.detach())
    if isinstance(output, (list, tuple)):
        return torch.stack([as_tensor(one) for one in output])
    if isinstance(output, np.ndarray):
        return torch.from_numpy(output).to(torch.float32)
    return torch.from_numpy(np.array(output)).movedim(-1, 0).to(torch.float32) / 255


PROMPTS = 64
"""Lists of prompts whose encodings are kept, the latest ones."""


def remember_prompts(pipe: Any, capacity: int = PROMPTS) -> None:
    """Memoise `pipe.encode_prompt`, its floating outputs in float32 at least.

    A group shares its prompt and a replay must not encode again. Pipelines take the dtype of their
    latents from the embeddings, so float32 embeddings keep the latents float32 from the first
    step; the denoiser's hook casts them back without loss.
    """
    original = getattr(pipe, "encode_prompt", None)
    if original is None:
        return
    known: dict[Any, Any] = {}

    def encode_prompt(*args: Any, **kwargs: Any) -> Any:
        if not _is_plain([*args, *kwargs.values()]):
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


def _is_plain(value: Any) -> bool:
    """Whether the `repr` says all there is to know (a picture's or a long tensor's does not)."""
    if isinstance(value, (list, tuple)):
        return all(_is_plain(v) for v in value)
    known = (str, int, float, bool, type(None), torch.device, torch.dtype)
    return isinstance(value, known)


def _widen(value: Any) -> Any:
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            return value
        return value.detach().to(torch.promote_types(value.dtype, torch.float32))
    if isinstance(value, (tuple, list)):
        return type(value)(_widen(v) for v in value)
    return value


def decode_in_own_dtype(pipe: Any) -> None:
    """Let every component that decodes take float32 latents, whatever dtype it has."""
    for component in pipe.components.values():
        if isinstance(component, nn.Module) and hasattr(component, "decode"):
            _decode_in_own_dtype(pipe, component)


def _decode_in_own_dtype(pipe: Any, vae: Any) -> None:
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
