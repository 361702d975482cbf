"""Which checkpoints are whole: found, opened and verified, whatever has happened to their files.

Nothing in a checkpoint is executed, and no file outside its folder is read. A checksum tells damage
from a sound file; it is no signature: who can write the folder can write the checksums too, and
what they can do with it is to give the run other numbers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException

from .errors import LeanError
from .memory import is_out_of_memory

FORMAT = 4
EXTRA = "extra/tensors.safetensors"
LONGEST = 1 << 30
"""Bytes of a `state.json`: far more than any run's."""
REFUSALS = (OSError, SafetensorError, CheckpointException)
"""What a full disk raises, by whose hands it is written."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete, verified checkpoint: its folder and what `state.json` says."""

    folder: Path
    state: Mapping[str, Any]

    @property
    def update(self) -> int:
        """Optimizer updates done when it was written."""
        return int(self.state["update"])

    @property
    def extra(self) -> dict[str, Any]:
        """What `Checkpoints.save` was given as `extra`; empty for nothing, and before format 3."""
        path = self.folder / EXTRA
        with readable(self.folder):
            return {**self.state.get("extra", {}), **(load_file(path) if path.is_file() else {})}


def folders(root: Path) -> list[Path]:
    """The checkpoints below `root`, complete or damaged, the oldest first."""
    found = (p for p in root.glob("*") if p.name.isdecimal() and p.is_dir())
    return sorted(found, key=lambda p: int(p.name))


def newest(root: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint whose files match their checksums, and complaints about newer ones."""
    complaints: list[str] = []
    for folder in reversed(folders(root)):
        try:
            return open_checkpoint(folder), complaints
        except LeanError as error:
            complaints.append(str(error))
    return None, complaints


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read and verify a checkpoint folder; raises LeanError that names the damaged file."""
    path = folder / "state.json"
    try:
        if path.is_symlink() or not path.is_file():
            raise ValueError("it is no file")
        if path.stat().st_size > LONGEST:
            raise ValueError(f"it is longer than {LONGEST} bytes")
        state = json.loads(path.read_text(encoding="utf-8"))
        files = dict(state["files"])
        version, update = int(state["format"]), int(state["update"])
        signed = version >= 4 or "checksum" in state
        sound = not signed or checksum(state) == state["checksum"]
        if update < 0:
            raise ValueError(f"update is {update}")
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise LeanError(
            f"{folder} is no checkpoint: state.json cannot be read ({error!s:.200})."
        ) from error
    if version > FORMAT:
        raise LeanError(f"{folder} has format {version}; this version reads up to {FORMAT}.")
    if not sound:
        raise LeanError(f"{folder} is damaged: state.json was changed.")
    for name, digest in files.items():
        if not _is_inside(name) or not _matches(folder / name, digest):
            raise LeanError(f"{folder} is damaged: {name} is missing or was changed.")
    for path in folder.rglob("*.safetensors"):  # would be read, and nobody has vouched for it
        if str(path.relative_to(folder)) not in files:
            raise LeanError(f"{folder} is damaged: {path.name} does not belong to it.")
    return Checkpoint(folder, state)


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    """Say in one line what a file says that is no checkpoint's, whoever reads it."""
    try:
        yield
    except LeanError:
        raise
    except (*REFUSALS, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        said = " ".join(str(error).split()[-40:])
        raise LeanError(
            f"{folder} cannot be read, or is of another model ({type(error).__name__}: {said}). "
            "Move it away to go on from the one before."
        ) from error


def _is_inside(name: str) -> bool:
    """Whether a file's name leads nowhere else than below its folder."""
    path = PurePath(name)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in name


def _matches(path: Path, digest: object) -> bool:
    try:
        return not path.is_symlink() and path.is_file() and sha256(path) == digest
    except OSError:
        return False


def checksum(state: Mapping[str, Any]) -> str:
    """Of all that `state.json` says, apart from this."""
    rest = {k: v for k, v in state.items() if k != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def sha256(path: Path) -> str:
    """Of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
