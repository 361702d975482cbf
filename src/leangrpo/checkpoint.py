"""Checkpoints that survive a kill at any moment and resume bitwise.

A checkpoint is a folder: the weights as diffusers or PEFT load them (`transformer/`, or
`pytorch_lora_weights.safetensors`), `state/` with what else a run needs, each rank's part in a file
of its own (torch.distributed.checkpoint over safetensors), and `state.json` with the position and
a checksum of every file. What else a run remembers, by names of its own, is in `extra/` and under
`extra` in `state.json`. It is written under another name, flushed to the disk and renamed, so
that a folder with the right name is complete. No pickle is written or read.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor

from .ema import Ema
from .errors import LeanError
from .parallel import World, scatter_like, whole
from .policy import Policy
from .sound import (
    EXTRA,
    FORMAT,
    REFUSALS,
    Checkpoint,
    checksum,
    folders,
    newest,
    open_checkpoint,
    readable,
    sha256,
)

__all__ = [
    "EXTRA",
    "FORMAT",
    "REFUSALS",
    "Checkpoint",
    "Checkpoints",
    "folders",
    "load_weights",
    "newest",
    "open_checkpoint",
    "restore",
    "save_weights",
    "weights_sha256",
]

STATE = "state"
OURS = ("model", "ema")
LORA_FILE = "pytorch_lora_weights.safetensors"
BEFORE = "optimizer.safetensors"
"""Where format 1 had what is in `state/`."""


class Checkpoints:
    """Writes a run's checkpoints: in the background where there are several ranks.

    `keep` complete ones are kept. A checkpoint is published, by renaming it, when all of its files
    are on the disk; until then the one before it is the newest.
    """

    def __init__(self, root: Path, keep: int, world: World | None = None) -> None:
        self.root, self.keep, self.world = root, keep, world or World()
        self._group: Any = None
        self._pending: tuple[Any, Path, Mapping[str, Any]] | None = None
        if self.world.is_main:
            for left in root.glob(".*.partial"):  # by a kill
                shutil.rmtree(left, ignore_errors=True)
        if self.world.size > 1:  # of its own: the background must not meet the loop's collectives
            self._group = dist.new_group(backend="gloo")

    def save(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, Any],
        ema: Ema | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write `root/<update>`; returns the folder it will have.

        `extra`, the same on all ranks, holds tensors and what JSON can write; `Checkpoint.extra`
        has it again. It is taken as it is now, also where the rest is written in the background.
        Raises LeanError, leaving the older checkpoints alone, when the disk refuses or when what
        was written does not read back equal to the weights.
        """
        self.wait()
        folder = self.root / f"{state['update']:06d}"
        partial = self.root / f".{folder.name}.partial"
        try:
            if self.world.is_main:
                shutil.rmtree(partial, ignore_errors=True)
                (partial / STATE).mkdir(parents=True, exist_ok=True)  # other ranks make it too
            save_weights(policy, partial, self.world)
            state = self._save_extra(partial, state, extra or {})
            tensors = _flatten(policy, optimizer, ema)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # on one process torch says that it is one
                if self.world.size == 1:
                    dcp_save(tensors, storage_writer=_writer(partial / STATE), no_dist=True)
                    self._publish(partial, folder, state)
                else:
                    future = async_save(
                        tensors,
                        storage_writer=_writer(partial / STATE),
                        process_group=self._group,
                    )
                    self._pending = (future, folder, state)
        except REFUSALS as error:
            raise self._refused(partial, folder, error) from error
        return folder

    def _save_extra(
        self, partial: Path, state: Mapping[str, Any], extra: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Write the tensors; the state with the rest, apart from the run's own that goes on."""
        tensors = {k: v.detach().contiguous() for k, v in extra.items() if isinstance(v, Tensor)}
        if tensors and self.world.is_main:
            (partial / EXTRA).parent.mkdir()
            save_file(tensors, partial / EXTRA)
        rest = {k: v for k, v in extra.items() if k not in tensors}
        return {**state, "extra": json.loads(json.dumps(rest))} if rest else state

    @property
    def published(self) -> int:
        """The newest update on the disk, 0 without any."""
        return max((int(p.name) for p in folders(self.root)), default=0)

    def poll(self) -> None:
        """Publish what the background has finished."""
        if self._pending is not None and self._pending[0].done():
            self.wait()

    def wait(self) -> None:
        """Wait for the background, and publish. Raises LeanError when the disk refused."""
        if self._pending is None:
            return
        (future, folder, state), self._pending = self._pending, None
        partial = self.root / f".{folder.name}.partial"
        try:
            future.result()
            if self.world.is_main:
                self._publish(partial, folder, state)
        except REFUSALS as error:
            raise self._refused(partial, folder, error) from error

    def _publish(self, partial: Path, folder: Path, state: Mapping[str, Any]) -> None:
        files = {str(p.relative_to(partial)): sha256(p) for p in _files(partial)}
        whole = {"format": FORMAT, **state, "files": files}
        text = json.dumps({**whole, "checksum": checksum(whole)}, indent=1)
        (partial / "state.json").write_text(text, encoding="utf-8")
        for path in _files(partial):
            _flush(path)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        _flush(self.root)
        # Newer ones are damaged: the run has gone on from one before them.
        up_to_this = [p for p in folders(self.root) if int(p.name) <= int(folder.name)]
        kept = up_to_this[-self.keep :]
        for path in folders(self.root):
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def _refused(self, partial: Path, folder: Path, error: BaseException) -> LeanError:
        shutil.rmtree(partial, ignore_errors=True)
        return LeanError(
            f"Checkpoint {folder} could not be written ({_reason(error)}). The run goes on from "
            "the newest complete one with --resume; free some space or choose another run.dir."
        )


def _reason(error: BaseException) -> str:
    """In one line; torch's own has the traceback of every rank."""
    if isinstance(error, CheckpointException):
        some = dict(error.failures)
        rank = min(some, default=None)
        if rank is not None:
            return f"rank {rank}: {' '.join(str(some[rank][0]).split())}"
    return " ".join(str(error).split())


def restore(
    checkpoint: Checkpoint,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    ema: Ema | None = None,
) -> None:
    """Load weights, optimizer state and running mean, bitwise as they were saved.

    Whatever number of ranks wrote them: each reads the parts it holds. Raises LeanError for what
    cannot be read or does not fit.
    """
    with readable(checkpoint.folder):
        _restore(checkpoint, policy, optimizer, ema)


def _restore(
    checkpoint: Checkpoint, policy: Policy, optimizer: torch.optim.Optimizer, ema: Ema | None
) -> None:
    load_weights(policy, checkpoint.folder)
    names = _names(checkpoint.folder)
    states: dict[int, dict[str, Tensor]] = {}
    wanted: dict[str, Tensor] = {}
    for i, (name, parameter) in enumerate(policy.named_parameters()):
        for key in (full.split(":", 1)[0] for full in names if full.endswith(f":{name}")):
            if key in OURS:
                continue
            like = torch.zeros(()) if key == "step" else torch.zeros_like(parameter.detach())
            states.setdefault(i, {})[key] = wanted[f"{key}:{name}"] = like
    known = {name for name, _ in policy.named_parameters()}
    for full in names:
        if (name := full.split(":", 1)[1]) not in known:
            raise LeanError(
                f"The optimizer state in the checkpoint is for {name}, not trained here."
            )
    if ema is not None:
        means = _means(policy, ema)
        if missing := sorted(set(means) - set(names)):
            raise LeanError(
                f"{checkpoint.folder} holds no running mean ({missing[0]} is missing): it was "
                "written with ema.decay=0. Resume it so."
            )
        wanted |= means
    _read(checkpoint.folder, wanted)
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": states, "param_groups": groups})


def save_weights(policy: Policy, folder: Path, world: World | None = None) -> None:
    """Write the trained weights the way diffusers and PEFT load them, and read them back.

    Full fine-tuning: a model folder per trained denoiser, for `from_pretrained`; not of sharded
    weights, which are in `state/` in parts until `export` joins them. LoRA: a file for
    `pipe.load_lora_weights`, rank and alpha in its metadata; a second denoiser's in a subfolder
    of its name. Called on all ranks, written by the first. Raises LeanError when what is read
    back differs.
    """
    main = world is None or world.is_main
    for name, module in policy.trained().items():
        if not is_lora(module):
            if _is_sharded(module) or not main:
                continue
            module.save_pretrained(folder / name)  # type: ignore[operator]
            written = _read_folder(folder / name)
            expected = module.state_dict()
        else:
            from diffusers.training_utils import _collate_lora_metadata
            from peft import get_peft_model_state_dict

            expected = {k: whole(v) for k, v in get_peft_model_state_dict(module).items()}
            if not main:
                continue
            kind = name.removesuffix("_2")
            metadata = _collate_lora_metadata({kind: module})
            target = folder if name == policy.names[0] else folder / name
            policy.pipe.save_lora_weights(target, **{f"{kind}_lora_layers": expected}, **metadata)
            written = _strip(load_file(target / LORA_FILE), kind)
        for key, value in expected.items():
            if key not in written or not torch.equal(written[key], value.detach().cpu()):
                raise LeanError(f"{name}.{key} does not read back from {folder} as it was written.")


def load_weights(policy: Policy, folder: Path, *, ema: bool = False) -> None:
    """Load the weights of a checkpoint, or their running mean, whoever wrote them.

    Raises LeanError for missing or foreign names, what cannot be read, or when there is no running
    mean.
    """
    with readable(folder):
        _load_weights(policy, folder, ema)


def _load_weights(policy: Policy, folder: Path, ema: bool) -> None:
    for name, module in policy.trained().items():
        if is_lora(module):
            from peft import get_peft_model_state_dict, set_peft_model_state_dict

            target = folder if name == policy.names[0] else folder / name
            weights = _strip(load_file(target / LORA_FILE), name.removesuffix("_2"))
            own = get_peft_model_state_dict(module)
            _same_names(weights, own, target / LORA_FILE)
            if _is_sharded(module):
                for key, value in own.items():
                    value.detach().copy_(scatter_like(weights[key], value))
            else:
                set_peft_model_state_dict(module, weights)
        elif (folder / name).is_dir():
            weights = _read_folder(folder / name)
            own = module.state_dict()
            _same_names(weights, own, folder / name)
            for key, value in own.items():
                value.detach().copy_(scatter_like(weights[key], value))
    parts = {f"model:{name}": p.detach() for name, p in policy.named_parameters()}
    if stored := _names(folder, kind="model"):
        _same_names(dict.fromkeys(stored), parts, folder / STATE)
        _read(folder, parts)
    if ema:
        means = {f"ema:{name}": _as_mean(p) for name, p in policy.named_parameters()}
        _same_names(dict.fromkeys(_names(folder, kind="ema")), means, folder / STATE)
        _read(folder, means)
        for (_, p), mean in zip(policy.named_parameters(), means.values(), strict=True):
            p.detach().copy_(mean)
    policy.guard.bump(f"checkpoint {folder.name} loaded")


def weights_sha256(policy: Policy) -> str:
    """A fingerprint of all trainable parameters, names and bytes; called on all ranks."""
    digest = hashlib.sha256()
    for name, parameter in policy.named_parameters():
        digest.update(name.encode())
        full = whole(parameter.detach()).cpu().contiguous()
        digest.update(full.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def is_lora(module: nn.Module) -> bool:
    """Whether a denoiser carries adapters (and so only those are trained)."""
    return bool(getattr(module, "peft_config", None))


def _flatten(
    policy: Policy, optimizer: torch.optim.Optimizer, ema: Ema | None
) -> dict[str, Tensor]:
    """What has no file of its own, as named tensors: `exp_avg:transformer.proj_out.weight`,
    `ema:...`, and of sharded weights that are fully trained `model:...`."""
    tensors = {
        f"{key}:{name}": value.detach()
        for name, parameter in policy.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    if ema is not None:
        tensors |= _means(policy, ema)
    if any(_is_sharded(m) and not is_lora(m) for m in policy.denoisers):
        tensors |= {f"model:{name}": p.detach() for name, p in policy.named_parameters()}
    return tensors


def _means(policy: Policy, ema: Ema) -> dict[str, Tensor]:
    """The running mean under its names, sharded as the parameters are."""
    found = {}
    for (name, p), mean in zip(policy.named_parameters(), ema.mean, strict=True):
        found[f"ema:{name}"] = mean
        if isinstance(p, DTensor):
            found[f"ema:{name}"] = DTensor.from_local(
                mean, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
            )
    return found


def _as_mean(parameter: Tensor) -> Tensor:
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return torch.zeros_like(parameter.detach(), dtype=dtype)


def _names(folder: Path, kind: str | None = None) -> list[str]:
    """Names of the tensors in `state/`, all or of one kind."""
    found: set[str] = set()
    for path in (*sorted((folder / STATE).glob("*.safetensors")), folder / BEFORE):
        if not path.is_file():
            continue
        with safe_open(path, framework="pt") as file:
            found |= set(file.keys())
    return sorted(n for n in found if kind is None or n.startswith(f"{kind}:"))


def _read(folder: Path, into: dict[str, Tensor]) -> None:
    """Read named tensors in place, each rank its own parts."""
    if not into:
        return
    if (folder / BEFORE).is_file():
        found = load_file(folder / BEFORE)
        for name, tensor in into.items():
            tensor.copy_(found[name])
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on one process torch says that it is one
        reader = HuggingFaceStorageReader(path=str(folder / STATE))
        dcp_load(into, storage_reader=reader, no_dist=not dist.is_initialized())


def _writer(folder: Path) -> Any:
    return HuggingFaceStorageWriter(path=str(folder), save_distributed=True)


def _is_sharded(module: nn.Module) -> bool:
    return any(isinstance(p, DTensor) for p in module.parameters())


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


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
