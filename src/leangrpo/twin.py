"""A small random twin of a pipeline, made from its configuration files alone: no weights are read.

It has the real classes, tokenizers and scheduler, and two layers of each kind with two attention
heads, so that what is found in it (denoisers, blocks, LoRA targets, guidance, the table of noise
levels) is what is found in the model, and a gradient can be checked on a laptop.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .config import EMBEDDED_PIPELINES
from .errors import problem

DEPTH = 2
"""Layers kept of each kind."""

HEADS = 2
"""Attention heads kept of a denoiser."""

_DEPTHS = re.compile(r"^(depth|n_layers|num(_\w+)?_(layers|blocks)|num_hidden_layers)$")


def make_twin(
    source: str,
    *,
    dtype: torch.dtype = torch.float32,
    revision: str | None = None,
    seed: int = 0,
    narrow: bool = True,
    shorten_encoders: bool = True,
) -> Any:
    """The twin of a pipeline: embedded, a folder or a hub id; weights depend on `seed` only.

    `narrow` off keeps the denoisers' attention heads, where a width does not follow from them;
    `shorten_encoders` off keeps the text encoders' depth, for pipelines that read a layer by its
    number: `inspection` tries one after the other. Raises LeanError when a configuration cannot be
    read or a class does not exist.
    """
    import diffusers

    folder = str(EMBEDDED_PIPELINES.get(source, source))
    try:
        index = dict(diffusers.DiffusionPipeline.load_config(folder, revision=revision))
        kind = getattr(diffusers, index["_class_name"])
        made: dict[str, Any] = {}
        torch.manual_seed(seed)
        for name, entry in index.items():
            if name.startswith("_"):
                continue
            if not isinstance(entry, (list, tuple)):
                made[name] = entry  # a setting of the pipeline, such as boundary_ratio
            elif entry[0] is None or name == "safety_checker":
                made[name] = None
            else:
                where = {"subfolder": name, "revision": revision}
                options = {"narrow": narrow, "shorten_encoders": shorten_encoders}
                made[name] = make_component(entry, folder, where, **options)
        pipe = kind(**made)
    except (OSError, AttributeError, KeyError, ValueError, TypeError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        rule = f"no twin can be made of it ({type(error).__name__}: {reason})"
        raise problem("model.pipeline", source, rule) from error
    for component in pipe.components.values():
        if isinstance(component, nn.Module):
            _randomise(component)
            component.eval()
            if dtype != torch.float32:
                component.to(dtype)
    return pipe


def make_component(
    entry: Any,
    folder: str,
    where: dict[str, Any],
    *,
    narrow: bool = True,
    shorten: bool = True,
    shorten_encoders: bool = True,
) -> Any:
    """One component: a network from its configuration, anything else as it is saved.

    `entry` is its library and class in model_index.json. Without `shorten` a diffusers network
    keeps its layers; the rest is as in `make_twin`.
    """
    library, name = entry
    own = library.split(".")[0] in ("diffusers", "transformers")
    module = library if own else f"diffusers.pipelines.{library}"
    kind: Any = getattr(importlib.import_module(module), name)
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        local = Path(folder) / where["subfolder"]  # not every tokenizer takes a subfolder
        if local.is_dir():
            return kind.from_pretrained(local)
        return kind.from_pretrained(folder, **where)
    network: Any = kind
    if hasattr(network, "load_config"):
        config = dict(network.load_config(folder, **where))
        if narrow:
            config = _narrowed(config)
        if shorten:
            config = {k: _shortened(k, v) for k, v in config.items()}
        return network.from_config(config)
    config = network.config_class.from_pretrained(folder, **where)
    if shorten_encoders:
        _shorten(config)
    return network._from_config(config)


def _shortened(key: str, value: Any) -> Any:
    """A setting of a diffusers network, with fewer layers."""
    if "per_block" in key:
        return _ones(value)
    if _DEPTHS.match(key) and isinstance(value, int) and not isinstance(value, bool):
        return min(value, DEPTH)
    if key.endswith("_layers") and isinstance(value, (list, tuple)):
        return [i for i in value if not isinstance(i, int) or i < DEPTH]  # layers by number
    return value


def _narrowed(config: dict[str, Any]) -> dict[str, Any]:
    """A transformer with fewer heads; whatever is as wide as all of them together follows."""
    heads, size = config.get("num_attention_heads"), config.get("attention_head_dim")
    if not (isinstance(heads, int) and isinstance(size, int)) or heads <= HEADS:
        return config
    changed = {k: HEADS * size if v == heads * size else v for k, v in config.items()}
    changed |= {k: HEADS for k in config if k in ("num_attention_heads", "num_key_value_heads")}
    return changed


def _ones(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_ones(v) for v in value)
    return min(value, 1) if isinstance(value, int) and not isinstance(value, bool) else value


def _shorten(config: Any) -> None:
    """A configuration of transformers, with fewer layers, in place, and those inside it."""
    for key, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            _shorten(value)
        elif _DEPTHS.match(key) and isinstance(value, int) and not isinstance(value, bool):
            setattr(config, key, min(value, DEPTH))
        elif key == "layer_types" and isinstance(value, list):
            setattr(config, key, value[:DEPTH])


def _randomise(module: nn.Module) -> None:
    """Matrices that start at zero become small and random: behind a zero nothing has a gradient."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1 and not parameter.any():
                nn.init.normal_(parameter, std=0.02)
