"""A pipeline's networks at full size without weights, and what one denoising step asks of them.

From configuration files where there are some (the embedded pipeline, a folder, a hub id whose files
are in reach), else from the facts in `architectures.yaml`. Networks lie on the meta device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from .complaints import did_you_mean
from .components import chosen, denoisers, main_dtype
from .config import EMBEDDED_PIPELINES, Config
from .counting import META, cast, first_tensor, leaves
from .errors import LeanError, problem
from .pipeline import arguments
from .setup import choose_trained, make_sampling
from .twin import make_component

FACTS = Path(__file__).with_name("architectures.yaml")

PROMPT = "a red cube"


@dataclass(frozen=True, slots=True)
class Sketch:
    """What `sketch` finds: the `denoisers` by name (meta device, dtype and trained weights as the
    settings say), the `args` and `kwargs` of a call for one sample and how many `calls` a step
    makes, `other_bytes` of text encoders and the like and `vae_bytes`; `decode` runs the decoder
    of one sample on the meta device. `source` says where the facts are from.
    """

    source: str
    denoisers: dict[str, nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    calls: int
    latent: tuple[int, ...]
    other_parameters: int
    other_bytes: int
    vae_bytes: int
    decode: Callable[[], Any] | None

    @property
    def tokens(self) -> str:
        """The shapes of the network's inputs, as people read them."""
        named: dict[Any, Any] = {**dict(enumerate(self.args)), **self.kwargs}
        shapes = [
            f"{name if isinstance(name, str) else 'input'} {'x'.join(map(str, v.shape))}"
            for name, v in named.items()
            if isinstance(v, Tensor) and v.dim() > 2
        ]
        return ", ".join(shapes)


def sketch(config: Config) -> Sketch:
    """The networks of a config's pipeline, its trained weights chosen, and one call's inputs.

    Raises LeanError where neither configuration files nor facts about it can be had.
    """
    from diffusers.utils import logging

    logging.set_verbosity_error()
    source = config.model.pipeline
    known = facts()["models"]
    if source in EMBEDDED_PIPELINES or Path(source).is_dir():
        return _from_files(config)
    if source in known:
        return _from_facts(config, known[source])
    try:
        return _from_files(config)
    except LeanError as error:
        raise problem(
            "model.pipeline",
            source,
            f"its configuration cannot be had here ({' '.join(str(error).split())[:200]})",
            did_you_mean(source, known)
            or "Give the folder of a pipeline whose *.json files are there (weights are not read: "
            "`hf download OWNER/NAME --include '*.json' '*.txt' '*.model'`), or one of "
            + ", ".join(known)
            + ".",
        ) from error


@cache
def facts() -> dict[str, Any]:
    """The published facts that come along, `architectures.yaml`."""
    loaded: dict[str, Any] = yaml.safe_load(FACTS.read_text(encoding="utf-8"))
    return loaded


def _from_facts(config: Config, known: Mapping[str, Any]) -> Sketch:
    m, s = config.model, config.sampling
    dtype = getattr(torch, m.dtype)
    names = ["unet"] if known["class"].startswith("UNet") else ["transformer"]
    names += [f"{names[0]}_{i}" for i in range(2, known.get("denoisers", 1) + 1)]
    with META:
        made = {name: _network(known["class"], known["config"]) for name in names}
        vae = _network(known["vae"]["class"], known["vae"]["config"])
    for module in made.values():
        cast(module, dtype)
    _choose(config, made)
    guided = s.guidance > 1 and known["guidance"] != "embedded"
    words = _words(config, known, batch=2 if guided and known["guidance"] == "batch" else 1)
    kwargs = {name: _input(name, v, words, dtype) for name, v in known["inputs"].items()}
    kwargs["return_dict"] = False
    latent = _input("latent", known["vae"]["latent"], words | {"batch": 1}, torch.float32)
    encoders = sum(known["encoders"])
    return Sketch(
        source=f"published facts ({FACTS.name})",
        denoisers=made,
        args=(),
        kwargs=kwargs,
        calls=2 if guided and known["guidance"] == "calls" else 1,
        latent=tuple(latent.shape),
        other_parameters=encoders,
        other_bytes=encoders * dtype.itemsize,
        vae_bytes=sum(p.numel() for p in vae.parameters()) * max(4, dtype.itemsize),
        decode=lambda: vae.decode(latent),
    )


def _network(name: str, config: Mapping[str, Any]) -> Any:
    import diffusers

    return getattr(diffusers, name)(**config)


def _choose(config: Config, made: Mapping[str, nn.Module]) -> None:
    """Make trainable what the settings say; adapters are made on the meta device too."""
    plain = config.model_copy(
        update={"model": config.model.model_copy(update={"activation_checkpointing": False})}
    )
    with META:
        choose_trained(plain, SimpleNamespace(components=dict(made), **made))


def _words(config: Config, known: Mapping[str, Any], batch: int) -> dict[str, int]:
    """What the shapes in the facts are made of."""
    s, size, factors = config.sampling, known["size"], known["factors"]
    height = (s.height or size["height"]) // factors["space"]
    width = (s.width or size["width"]) // factors["space"]
    frames = ((s.num_frames or size.get("frames", 1)) - 1) // factors.get("time", 1) + 1
    length = s.call.get("max_sequence_length", known["text"]["length"])
    return {
        "batch": batch,
        "height": height,
        "width": width,
        "frames": frames,
        "packed": height * width // 4,
        "text": int(length) + known["text"].get("more", 0),
    }


def _input(name: str, value: Any, words: Mapping[str, int], dtype: torch.dtype) -> Any:
    """`(batch, text, 4096)` as a tensor of that shape; times and scales are float32."""
    if isinstance(value, Mapping):
        return {key: _input(key, inner, words, dtype) for key, inner in value.items()}
    parts = re.findall(r"\w+", value)
    shape = [int(p) if p.isdigit() else words[p] for p in parts]
    exact = len(shape) == 1 or name == "latent"
    return torch.empty(shape, device=META, dtype=torch.float32 if exact else dtype)


def _from_files(config: Config) -> Sketch:
    """Call the pipeline itself, with text encoders of two layers and a denoiser that only says
    with what it was called, up to the end of its first step."""
    import diffusers

    m = config.model
    folder = str(EMBEDDED_PIPELINES.get(m.pipeline, m.pipeline))
    dtype = getattr(torch, m.dtype)
    try:
        index = dict(diffusers.DiffusionPipeline.load_config(folder, revision=m.revision))
        full, made = _components(index, folder, m.revision)
        pipe = getattr(diffusers, index["_class_name"])(**made)
        found = {name: full[name] for name in denoisers(pipe)}
        for module in found.values():
            cast(module, dtype)
        recorded, latent = _first_step(config, pipe, found)
    except (OSError, AttributeError, KeyError, ValueError, TypeError, ImportError) as error:
        if isinstance(error, LeanError):
            raise
        reason = " ".join(str(error).split())[:300]
        rule = f"it cannot be called from its configuration ({type(error).__name__}: {reason})"
        raise problem("model.pipeline", m.pipeline, rule) from error
    _choose(config, found)
    args, kwargs = _as_computed(recorded[0], main_dtype(next(iter(found.values()))))
    others = {n: c for n, c in full.items() if n not in found and n != "vae"}
    num = sum(p.numel() for c in others.values() for p in c.parameters())
    vae = full.get("vae")
    size = max(4, dtype.itemsize)
    return Sketch(
        source=f"the configuration files of {m.pipeline}",
        denoisers={name: found[name] for name in chosen(pipe, None)},
        args=args,
        kwargs=kwargs,
        calls=len(recorded),
        latent=latent,
        other_parameters=num,
        other_bytes=num * dtype.itemsize,
        vae_bytes=0 if vae is None else sum(p.numel() for p in vae.parameters()) * size,
        decode=_decoder(vae, latent),
    )


def _components(
    index: Mapping[str, Any], folder: str, revision: str | None
) -> tuple[dict[str, nn.Module], dict[str, Any]]:
    """All networks at full size on the meta device; and what the pipeline is made of: of these
    the denoisers, the other networks shortened and on the CPU, and everything else as saved."""
    full: dict[str, nn.Module] = {}
    made: dict[str, Any] = {}
    for name, entry in index.items():
        if name.startswith("_"):
            continue
        if not isinstance(entry, (list, tuple)):
            made[name] = entry
            continue
        if entry[0] is None or name == "safety_checker":
            made[name] = None
            continue
        where = {"subfolder": name, "revision": revision}
        with META:
            one = make_component(
                entry, folder, where, narrow=False, shorten=False, shorten_encoders=False
            )
        if not isinstance(one, nn.Module):
            made[name] = make_component(entry, folder, where)
            continue
        full[name] = one
        alone = SimpleNamespace(components={name: one}, **{name: one})
        made[name] = one if denoisers(alone) else make_component(entry, folder, where, narrow=False)
    return full, made


class _Done(Exception):
    """The first step is over."""


def _first_step(
    config: Config, pipe: Any, found: Mapping[str, nn.Module]
) -> tuple[list[tuple[Any, Any]], tuple[int, ...]]:
    """The calls of the first step, on the meta device, and the shape of a sample's latent."""
    recorded: list[tuple[Any, Any]] = []
    latent: list[tuple[int, ...]] = []

    def step(*args: Any, **kwargs: Any) -> Any:
        given = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        latent.append(tuple(max(given, key=lambda t: t.numel()).shape))
        raise _Done

    sampling = make_sampling(config)
    plain = type(sampling)(
        **{
            n: getattr(sampling, n)
            for n in ("steps", "guidance", "height", "width", "num_frames", "negative_prompt")
        },
        call=sampling.call,
    )
    for module in found.values():
        _answer_zeros(module, recorded)
    pipe.scheduler.step = step
    pipe.set_progress_bar_config(disable=True)
    try:
        pipe(**arguments(pipe, plain, [PROMPT], {"output_type": "latent", "return_dict": False}))
    except _Done:
        pass
    finally:
        for module in found.values():
            del module.__dict__["forward"]
            module.__class__ = type(module).__mro__[1]
    if not recorded or not latent:
        raise problem(
            "model.pipeline", config.model.pipeline, "its loop does not go through the scheduler"
        )
    return recorded, latent[0]


def _answer_zeros(module: nn.Module, recorded: list[tuple[Any, Any]]) -> None:
    """The pipeline sees a network on the CPU, which notes what it is called with."""
    kind, run = type(module), module.forward
    on_cpu = property(lambda self: torch.device("cpu"))
    names = {"device": on_cpu, "__module__": kind.__module__}
    module.__class__ = type(kind.__name__, (kind,), names)

    def forward(*args: Any, **kwargs: Any) -> Any:
        on_meta = _map((args, kwargs), lambda t: t.to(META))
        recorded.append(on_meta)
        inputs, options = _as_computed(on_meta, main_dtype(module))
        with torch.no_grad():
            output = run(*inputs, **options)
        return _map(output, lambda t: torch.zeros(t.shape, dtype=t.dtype))

    module.__dict__["forward"] = forward


def _as_computed(call: tuple[Any, Any], dtype: torch.dtype) -> tuple[tuple[Any, ...], Any]:
    """Inputs as the policy passes them on: in the network's dtype, but for times and scales."""

    def change(t: Tensor) -> Tensor:
        return t.to(dtype) if t.is_floating_point() and t.dim() > 1 else t

    args, kwargs = _map(call, change)
    return args, kwargs


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`change` on the tensors in tuples, lists and dictionaries, diffusers' outputs among them."""
    if isinstance(value, dict):
        return type(value)(**{k: _map(v, change) for k, v in value.items()})
    if isinstance(value, (tuple, list)):
        return type(value)(_map(v, change) for v in value)
    return change(value) if isinstance(value, Tensor) else value


def _decoder(vae: Any, latent: tuple[int, ...]) -> Callable[[], Any] | None:
    """The decoder of one sample, where the latent is what the VAE decodes (not packed)."""
    channels = getattr(getattr(vae, "config", None), "latent_channels", None)
    if vae is None or not hasattr(vae, "decode") or len(latent) < 4 or latent[1] != channels:
        return None
    code = torch.empty((1, *latent[1:]), device=META)
    return lambda: first_tensor(vae.decode(code))
