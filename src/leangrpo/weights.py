"""Weights of reward models: from a folder or the hub, never as anything that runs code.

safetensors wherever there are any. Heads that are published as .pt or .pth only are read by
`torch.load(weights_only=True)`, which knows tensors and plain containers and refuses the rest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from .catalogue import HUB_FILE
from .errors import LeanError, problem


def weights_file(setting: str, source: str) -> Path:
    """A local file, or one of the hub as `owner/repository/file`, fetched if need be.

    Raises LeanError in the words of `setting` where there is neither.
    """
    local = Path(source).expanduser()
    if local.is_file():
        return local
    if not HUB_FILE.fullmatch(source):
        rule = "there is no such file, and it has not the form owner/repository/file"
        raise problem(setting, source, rule)
    from huggingface_hub import hf_hub_download

    owner, repository, name = source.split("/", 2)
    try:
        return Path(hf_hub_download(f"{owner}/{repository}", name))
    except Exception as error:  # the hub's client raises errors of many kinds
        raise _not_there(setting, source, error) from error


def read_weights(setting: str, source: str) -> dict[str, Tensor]:
    """The tensors of a safetensors, .pt or .pth file, a `state_dict` inside it unwrapped.

    Raises LeanError for a file that is damaged, or that holds more than tensors.
    """
    file = weights_file(setting, source)
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            found: Any = load_file(file)
        else:
            found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file may raise anything
        rule = f"it cannot be read as plain tensors: {type(error).__name__}"
        remedy = "Take a safetensors file, or one that torch.load reads with weights_only=True."
        raise problem(setting, source, rule, remedy) from error
    for key in ("state_dict", "model"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not all(isinstance(v, Tensor) for v in found.values()):
        raise problem(setting, source, "it holds no mapping of names to tensors")
    return {str(name): tensor for name, tensor in found.items()}


def fill(setting: str, source: str, module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Put weights into a module, each into its place and none left over; LeanError otherwise."""
    own = module.state_dict()
    missing, unknown = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    other = [n for n in own.keys() & weights.keys() if own[n].shape != weights[n].shape]
    for names, what in ((missing, "lacks"), (unknown, "has besides"), (sorted(other), "misshapes")):
        if names:
            rule = f"it {what} {len(names)} tensors of the model, the first of them {names[0]}"
            raise problem(setting, source, rule, "Take the weights this reward is published with.")
    module.load_state_dict(dict(weights), assign=True)


def pretrained(setting: str, source: str, kind: Any, **options: Any) -> Any:
    """`kind.from_pretrained(source)`, safetensors only; LeanError saying what went wrong."""
    try:
        return kind.from_pretrained(str(Path(source).expanduser()), **options)
    except Exception as error:  # transformers and the hub raise errors of many kinds
        raise _not_there(setting, source, error) from error


def model(setting: str, source: str, kind: Any) -> Any:
    """A transformers model in float32, its weights from safetensors only."""
    loaded = pretrained(setting, source, kind, use_safetensors=True, dtype=torch.float32)
    return loaded.eval().requires_grad_(False)


def _not_there(setting: str, source: str, error: Exception) -> LeanError:
    said = shorten(str(error), 160, placeholder=" [...]").rstrip(".")
    rule = f"it cannot be loaded: {type(error).__name__}: {said}"
    return problem(setting, source, rule, "Name a folder or a hub id that this machine can reach.")


def open_clip_to_transformers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A CLIP in open_clip's layout (`CLIP`, ViT image tower) under transformers' CLIPModel names.

    `in_proj_weight` holds queries, keys and values on top of one another, and projections are
    stored transposed. Layouts: mlfoundations/open_clip, `model.py` and `transformer.py`;
    huggingface/transformers, `modeling_clip.py`.
    """
    names = {
        "visual.class_embedding": "vision_model.embeddings.class_embedding",
        "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
        "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
        "visual.ln_pre": "vision_model.pre_layrnorm",
        "visual.ln_post": "vision_model.post_layernorm",
        "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
        "positional_embedding": "text_model.embeddings.position_embedding.weight",
        "ln_final": "text_model.final_layer_norm",
        "logit_scale": "logit_scale",
    }
    inner = {
        "ln_1": "layer_norm1",
        "ln_2": "layer_norm2",
        "mlp.c_fc": "mlp.fc1",
        "mlp.c_proj": "mlp.fc2",
        "attn.out_proj": "self_attn.out_proj",
    }
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        block = re.fullmatch(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+)", name)
        stem, _, last = name.rpartition(".")
        if name in ("visual.proj", "text_projection"):
            tower = "visual" if name == "visual.proj" else "text"
            found[f"{tower}_projection.weight"] = tensor.T.contiguous()
        elif name in names:
            found[names[name]] = tensor
        elif stem in names:
            found[f"{names[stem]}.{last}"] = tensor
        elif block:
            tower = "vision_model" if block[1] else "text_model"
            layer, rest = f"{tower}.encoder.layers.{block[2]}", block[3]
            stem, _, last = rest.rpartition(".")
            if rest.startswith("attn.in_proj_"):
                kind = rest.removeprefix("attn.in_proj_")
                for part, third in zip("qkv", tensor.chunk(3), strict=True):
                    found[f"{layer}.self_attn.{part}_proj.{kind}"] = third.contiguous()
            elif stem in inner:
                found[f"{layer}.{inner[stem]}.{last}"] = tensor
            else:
                found[name] = tensor
        elif name != "attn_mask":  # a constant that some files keep
            found[name] = tensor
    return found
