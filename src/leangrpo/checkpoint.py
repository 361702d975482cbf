"""Checkpoints that survive a kill at any moment and resume bitwise.

A checkpoint is a folder: the weights as diffusers or PEFT load them (`transformer/`, or
`pytorch_lora_weights.safetensors`), `optimizer.safetensors`, and `state.json` with the position
and a checksum of every file. It is written under another name, flushed to the disk and renamed,
so that a folder with the right name is complete. No pickle is written or read.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .errors import LeanError
from .policy import Policy

FORMAT = 1
LORA_FILE = "pytorch_lora_weights.safetensors"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete, verified checkpoint: its folder and what `state.json` says."""

    folder: Path
    state: Mapping[str, Any]

    @property
    def update(self) -> int:
        """Optimizer updates done when it was written."""
        return int(self.state["update"])


def save(
    root: Path,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write `root/<update>` atomically and drop all but the newest `keep`; returns the folder.

    Raises LeanError, leaving the older checkpoints alone, when the disk refuses or when what was
    written does not read back equal to the weights.
    """
    folder = root / f"{state['update']:06d}"
    partial = root / f".{folder.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_weights(policy, partial)
        save_file(_flatten(policy, optimizer), partial / "optimizer.safetensors")
        files = {str(p.relative_to(partial)): _sha256(p) for p in _files(partial)}
        text = json.dumps({"format": FORMAT, **state, "files": files}, indent=1)
        (partial / "state.json").write_text(text, encoding="utf-8")
        for path in _files(partial):
            _flush(path)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        _flush(root)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise LeanError(
            f"Checkpoint {folder} could not be written ({error}). The run goes on from the newest "
            "complete checkpoint with --resume; free some space or choose another run.dir."
        ) from error
    for old in sorted(p for p in root.glob("[0-9]*") if p.is_dir())[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def newest(root: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint whose files match their checksums, and complaints about newer ones."""
    complaints: list[str] = []
    for folder in sorted((p for p in root.glob("[0-9]*") if p.is_dir()), reverse=True):
        try:
            return open_checkpoint(folder), complaints
        except LeanError as error:
            complaints.append(str(error))
    return None, complaints


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read and verify a checkpoint folder; raises LeanError that names the damaged file."""
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        files = dict(state["files"])
        version, _ = int(state["format"]), int(state["update"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LeanError(
            f"{folder} is no checkpoint: state.json cannot be read ({error})."
        ) from error
    if version > FORMAT:
        raise LeanError(f"{folder} has format {version}; this version reads up to {FORMAT}.")
    for name, digest in files.items():
        path = folder / name
        if not path.is_file() or _sha256(path) != digest:
            raise LeanError(f"{folder} is damaged: {name} is missing or was changed.")
    return Checkpoint(folder, state)


def restore(checkpoint: Checkpoint, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Load weights and optimizer state, bitwise as they were saved."""
    load_weights(policy, checkpoint.folder)
    _unflatten(policy, optimizer, load_file(checkpoint.folder / "optimizer.safetensors"))


def save_weights(policy: Policy, folder: Path) -> None:
    """Write the trained weights the way diffusers and PEFT load them, and read them back.

    Full fine-tuning: a model folder per denoiser, for `from_pretrained`. LoRA: a file for
    `pipe.load_lora_weights`, rank and alpha in its metadata; a second denoiser's in a subfolder
    of its name. Raises LeanError when what is read back differs.
    """
    for i, (name, module) in enumerate(zip(policy.names, policy.denoisers, strict=True)):
        if not is_lora(module):
            module.save_pretrained(folder / name)
            written = _read_folder(folder / name)
            expected = module.state_dict()
        else:
            from diffusers.training_utils import _collate_lora_metadata
            from peft import get_peft_model_state_dict

            expected = get_peft_model_state_dict(module)
            kind = name.removesuffix("_2")
            metadata = _collate_lora_metadata({kind: module})
            target = folder if i == 0 else folder / name
            policy.pipe.save_lora_weights(target, **{f"{kind}_lora_layers": expected}, **metadata)
            written = _strip(load_file(target / LORA_FILE), kind)
        for key, value in expected.items():
            if key not in written or not torch.equal(written[key], value.detach().cpu()):
                raise LeanError(f"{name}.{key} does not read back from {folder} as it was written.")


def load_weights(policy: Policy, folder: Path) -> None:
    """Load what `save_weights` wrote; raises LeanError for missing or foreign names."""
    for i, (name, module) in enumerate(zip(policy.names, policy.denoisers, strict=True)):
        if is_lora(module):
            from peft import get_peft_model_state_dict, set_peft_model_state_dict

            target = folder if i == 0 else folder / name
            weights = _strip(load_file(target / LORA_FILE), name.removesuffix("_2"))
            _same_names(weights, get_peft_model_state_dict(module), target / LORA_FILE)
            set_peft_model_state_dict(module, weights)
        else:
            weights = _read_folder(folder / name)
            _same_names(weights, module.state_dict(), folder / name)
            module.load_state_dict(weights)
    policy.guard.bump(f"checkpoint {folder.name} loaded")


def weights_sha256(policy: Policy) -> str:
    """A fingerprint of all trainable parameters, names and bytes."""
    digest = hashlib.sha256()
    for name, parameter in policy.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def is_lora(module: nn.Module) -> bool:
    """Whether a denoiser carries adapters (and so only those are trained)."""
    return bool(getattr(module, "peft_config", None))


def _flatten(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Optimizer state as named tensors: `exp_avg:transformer.proj_out.weight`."""
    return {
        f"{key}:{name}": value.detach().cpu().contiguous()
        for name, parameter in policy.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _unflatten(
    policy: Policy, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    names = [name for name, _ in policy.named_parameters()]
    states: dict[int, dict[str, Tensor]] = {}
    for full, tensor in tensors.items():
        key, name = full.split(":", 1)
        if name not in names:
            raise LeanError(
                f"The optimizer state in the checkpoint is for {name}, not trained here."
            )
        states.setdefault(names.index(name), {})[key] = tensor
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": states, "param_groups": groups})


def _same_names(found: Mapping[str, Any], wanted: Mapping[str, Any], where: Path) -> None:
    missing, foreign = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing or foreign:
        first = f"lacks {missing[0]}" if missing else f"has an unknown {foreign[0]}"
        raise LeanError(
            f"{where} does not fit this model: it {first} "
            f"({len(missing)} missing, {len(foreign)} unknown in all)."
        )


def _read_folder(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= load_file(path)
    return weights


def _strip(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{prefix}."): value for key, value in weights.items()}


def _files(folder: Path) -> Iterator[Path]:
    return (p for p in sorted(folder.rglob("*")) if p.is_file())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
