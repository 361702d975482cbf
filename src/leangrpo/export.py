"""A run's weights as plain diffusers loads them: a LoRA file, or a whole pipeline."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .checkpoint import REFUSALS, is_lora, save_weights
from .config import Config
from .errors import LeanError
from .inference import load_run
from .loading import load_pipeline
from .policy import Policy


def export_run(
    config: Config, run: Path, out: Path, *, update: int | None = None, ema: bool | None = None
) -> dict[str, Any]:
    """Write a checkpoint to `out`, in one process, whatever number of ranks made it.

    Full fine-tuning: the pipeline with its own scheduler, in `model.dtype`. Returns what was
    written: `kind`, `out`, `update`, `ema`, and `load`, the lines that load it.
    Raises LeanError when `out` holds something, or when diffusers does not load from it what was
    to be exported; then nothing is left there.
    """
    target = Path(os.path.realpath(out))  # what a link leads to: a folder can be put in its place
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise LeanError(f"{out} is not empty. Export into a new folder.")
    # nothing is sampled that would repay a compilation
    model = config.model.model_copy(update={"compile": False})
    policy, at = load_run(config.model_copy(update={"model": model}), run, update, ema)
    policy.detach()
    lora = any(map(is_lora, policy.denoisers))
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        if lora:
            save_weights(policy, partial)
            load = _compare_lora(policy, partial, out)
        else:
            with _quiet():
                policy.pipe.save_pretrained(partial)
            if policy.pipe.device.type == "cpu":
                for file in sorted(partial.rglob("*.safetensors")):
                    _align(file)
            load = _compare_pipeline(policy.pipe, partial, out, config)
        partial.rename(target)
    except REFUSALS as error:
        raise LeanError(f"{out} cannot be written: {error}. Choose another folder.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {
        "kind": "lora" if lora else "full",
        "out": str(out),
        "update": at,
        "ema": config.ema.decay > 0 if ema is None else ema,
        "load": load,
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning about each component that the pipeline does without."""
    from diffusers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _align(path: Path, to: int = 64) -> None:
    """Let the tensors of a file begin at multiples of `to` bytes, those of other sizes last.

    diffusers maps the file, and on a CPU matrix kernels round differently by where weights begin:
    its pictures would not be those of `sample`, in the last bit.
    """
    partial = path.with_suffix(".partial")
    with path.open("rb") as file, partial.open("wb") as out:
        start = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(start - 8))
        spans = {n: h["data_offsets"] for n, h in header.items() if n != "__metadata__"}
        order = sorted(spans, key=lambda n: ((spans[n][1] - spans[n][0]) % to > 0, spans[n]))
        end = 0
        for name in order:
            begin, end = end, end + spans[name][1] - spans[name][0]
            header[name]["data_offsets"] = [begin, end]
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % to)
        out.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.seek(start + spans[name][0])
            out.write(file.read(spans[name][1] - spans[name][0]))
    partial.replace(path)


def _compare_lora(policy: Policy, folder: Path, out: Path) -> list[str]:
    """Load a LoRA into the pipeline it was taken out of, and compare; returns how to load it."""
    trained = policy.trained()
    expected = {name: _adapter(module) for name, module in trained.items()}
    policy.pipe.unload_lora_weights()
    lines = []
    for name, module in trained.items():
        first = name == policy.names[0]
        own = {} if first else {f"load_into_{name}": True}
        policy.pipe.load_lora_weights(folder if first else folder / name, **own)
        _compare(name, expected[name], _adapter(module))
        words = [repr(str(out if first else out / name)), *(f"{k}={v}" for k, v in own.items())]
        lines.append(f"pipe.load_lora_weights({', '.join(words)})")
    return lines


def _compare_pipeline(pipe: Any, folder: Path, out: Path, config: Config) -> list[str]:
    """Load a pipeline folder and compare all of it; returns how to load it."""
    loaded = load_pipeline(str(folder), dtype=getattr(torch, config.model.dtype))
    if type(loaded.scheduler) is not type(pipe.scheduler):
        raise LeanError(f"{folder} has the scheduler {type(loaded.scheduler).__name__}.")
    for name, module in pipe.components.items():
        other = loaded.components[name]
        if type(other) is not type(module):
            raise LeanError(f"{name} is a {type(other).__name__} when it is loaded from {folder}.")
        if isinstance(module, nn.Module):
            _compare(name, module.state_dict(), other.state_dict())
    # diffusers wants to be told of a part that this pipeline does without, as SD3 of its T5
    missing = [name for name, part in pipe.components.items() if part is None]
    words = [repr(str(out)), *(f"{n}=None" for n in missing if n not in pipe._optional_components)]
    if config.model.dtype != "float32":
        words.append(f"dtype=torch.{config.model.dtype}")
    return [f"DiffusionPipeline.from_pretrained({', '.join(words)})"]


def _adapter(module: nn.Module) -> dict[str, Tensor]:
    """A LoRA's weights, and what each of its layers scales them by."""
    from peft import get_peft_model_state_dict

    adapters: Any = module.peft_config
    (name,) = adapters
    weights = get_peft_model_state_dict(module, adapter_name=name)
    return {k: v.detach().clone() for k, v in weights.items()} | dict(_scalings(module, name))


def _scalings(module: nn.Module, adapter: str) -> Iterator[tuple[str, Tensor]]:
    for key, layer in module.named_modules():
        if scaling := getattr(layer, "scaling", None):
            yield f"{key} (alpha)", torch.tensor(scaling[adapter])


def _compare(name: str, expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    """Raise LeanError unless two sets of weights are the same, in the dtype diffusers chose."""
    for key in sorted({*expected, *found}):
        a, b = expected.get(key), found.get(key)
        if a is None or b is None or not torch.equal(a.to(b.device, b.dtype), b):
            raise LeanError(f"{name}.{key} is not what was exported when diffusers loads it.")
