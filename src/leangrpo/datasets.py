"""What a run is trained on: prompts, what rewards should know of them, and pictures they go with.

Imports neither torch nor diffusers, and the libraries of a format only where it is read.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from .config import EMBEDDED, read_text
from .errors import LeanError, problem
from .settings_model import Prompts

if TYPE_CHECKING:
    from PIL.Image import Image

Picture: TypeAlias = Path | bytes
"""A picture's file, or what such a file holds."""

_Rows: TypeAlias = Iterator[tuple[str, dict[str, Any]]]
"""Where each row stands ("line 3"), and its columns."""


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt, what a reward is told of it, and pictures by the pipeline's argument."""

    prompt: str
    metadata: dict[str, Any] = field(default_factory=dict)
    images: dict[str, Picture] = field(default_factory=dict)

    def open_images(self) -> dict[str, Image]:
        """The pictures as RGB, upright by their EXIF; raises LeanError for one that is none."""
        return {name: _open(name, picture) for name, picture in self.images.items()}

    def about(self, images: dict[str, Image]) -> dict[str, Any]:
        """A new dictionary for a reward: the metadata and, where there are any, `images`."""
        return {**self.metadata, "images": images} if images else dict(self.metadata)

    @property
    def name(self) -> str:
        """The prompt and the digests of its pictures: what the pipeline is called with."""
        if not self.images:
            return self.prompt
        return json.dumps([self.prompt, _identities(self.images)], ensure_ascii=False)


def read_examples(source: Prompts | str | Path, *, heldout: bool = False) -> list[Example]:
    """The examples of a run's settings or of a source, to train on or held out.

    A source is `embedded` (the package's own prompts), `hf:owner/name:config:split`, or a file:
    .jsonl, .csv, .tsv, .parquet, or any other as text with a prompt a line, blank lines and `#`
    lines skipped. No example is in both halves of a source that is split. Raises LeanError naming
    the line where a prompt or a picture is missing, or the file cannot be read.
    """
    if not isinstance(source, Prompts):
        source = Prompts(train=str(source), heldout=str(source))
    own = source.heldout
    if own is None and heldout:
        return []
    if isinstance(own, str) and heldout:
        return _read("prompts.heldout", own, source, heldout=True)
    examples = _read("prompts.train", source.train, source, heldout=False)
    return examples if own is None or isinstance(own, str) else split(examples, own)[heldout]


def split(examples: Sequence[Example], heldout: int | float) -> tuple[list[Example], list[Example]]:
    """Those to train on, in their order, and those held out, whatever the order they came in.

    `heldout` is a number, or a share in (0, 1), of what the pipeline can be called with: prompts
    with their pictures. Those with the smallest hashes are held out, with all their copies, in the
    order of the hashes. Raises LeanError when nothing would be left to train on.
    """
    hashes = [hashlib.sha256(f"held out: {e.name}".encode()).hexdigest() for e in examples]
    ranked = sorted(set(hashes))
    num = heldout if isinstance(heldout, int) else max(1, round(heldout * len(ranked)))
    if num >= len(ranked):
        rule = f"prompts.train has {len(ranked)} different examples, and none would be left"
        raise problem("prompts.heldout", heldout, rule, "Hold fewer out.")
    chosen = set(ranked[:num])
    pairs = list(zip(hashes, examples, strict=True))
    held = [(h, digest([e]), e) for h, e in pairs if h in chosen]
    held.sort(key=lambda triple: triple[:2])
    return [e for h, e in pairs if h not in chosen], [e for _, _, e in held]


def digest(examples: Iterable[Example]) -> str:
    """Sha256 of examples in their order: prompts, metadata, and the pictures' names and sizes."""
    sha = hashlib.sha256()
    for example in examples:
        row = [example.prompt, example.metadata, _identities(example.images)]
        sha.update(json.dumps(row, sort_keys=True, default=repr).encode() + b"\n")
    return sha.hexdigest()


def _identities(images: dict[str, Picture]) -> dict[str, list[Any]]:
    """A file's name and size (so that a folder may be moved), or the digest of its bytes."""
    return {
        name: [p.name, p.stat().st_size] if isinstance(p, Path) else [hashlib.sha256(p).hexdigest()]
        for name, p in sorted(images.items())
    }


def _open(name: str, picture: Picture) -> Image:
    from PIL import Image, ImageOps

    try:
        with Image.open(picture if isinstance(picture, Path) else io.BytesIO(picture)) as file:
            return ImageOps.exif_transpose(file).convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:  # what PIL raises for files that are none
        where = str(picture) if isinstance(picture, Path) else f"{len(picture)} bytes"
        rule = f"it is no picture that can be read: {error}"
        raise problem(f"prompts.images.{name}", where, rule) from None


# -- rows ------------------------------------------------------------------------------------------


def _read(setting: str, source: str, prompts: Prompts, *, heldout: bool) -> list[Example]:
    """All examples of a source, or a LeanError in the words of `setting`."""
    folder = Path()
    if source == "embedded":
        rows = _text(setting, EMBEDDED / f"prompts_{'heldout' if heldout else 'train'}.txt")
    elif source.startswith("hf:"):
        rows = _hub(setting, source)
    else:
        path = Path(source).expanduser()
        folder, kind = path.parent, path.suffix.lower()
        if kind == ".json":
            rule = "JSON Lines are read, an object a line"
            raise problem(setting, source, rule, "Write such a file and name it .jsonl.")
        rows = READERS.get(kind, _text)(setting, path)
    examples = [_example(setting, source, place, row, prompts, folder) for place, row in rows]
    if not examples:
        raise problem(setting, source, "it holds no prompt", "Write one a line.")
    return examples


def _example(
    setting: str, source: str, place: str, row: dict[str, Any], prompts: Prompts, folder: Path
) -> Example:
    """A row as an example; what is neither the prompt nor a picture is metadata."""
    used = {"prompts.column": prompts.column}
    used |= {f"prompts.images.{name}": column for name, column in prompts.images.items()}
    for which, column in used.items():
        if column not in row:
            rule = f"{place} has no {column!r}, which {which} names; it has {', '.join(row)}"
            raise problem(setting, source, rule)
    prompt = row[prompts.column]
    if not isinstance(prompt, str) or not prompt.strip():
        what = "is empty" if prompt is None or isinstance(prompt, str) else f"is {prompt!r}"
        raise problem(
            setting, source, f"{place}: its {prompts.column!r} {what}, and text is needed"
        )
    images = {}
    for name, column in prompts.images.items():
        images[name] = _picture(row[column], folder)
        if images[name] is None:
            rule = f"{place}: its {column!r} is {row[column]!r}, and a picture's file is needed"
            raise problem(setting, source, rule)
        if isinstance(images[name], Path) and not images[name].is_file():
            raise problem(setting, source, f"{place}: there is no picture {str(images[name])!r}")
    metadata = {key: value for key, value in row.items() if key not in used.values()}
    if images and "images" in metadata:
        rule = f"{place} has a column 'images', and rewards find the pictures there"
        raise problem(setting, source, rule, "Rename it.")
    return Example(prompt, metadata, images)


def _picture(value: object, folder: Path) -> Any:
    """A path, bytes, or both as the `datasets` library keeps them; None where there is neither."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str) and value.strip():
        return folder / Path(value).expanduser()
    return value if isinstance(value, bytes) and value else None


def _text(setting: str, path: Path) -> _Rows:
    for number, line in enumerate(read_text(setting, path).split("\n"), 1):
        prompt = line.strip()
        if prompt and not prompt.startswith("#"):
            yield f"line {number}", {"prompt": prompt}


def _jsonl(setting: str, path: Path) -> _Rows:
    # Not splitlines: JSON's strings may hold what it takes for the end of a line.
    for number, line in enumerate(read_text(setting, path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            rule = f"line {number}, column {error.colno} is not valid JSON: {error.msg}"
            raise problem(setting, str(path), rule) from None
        except (ValueError, RecursionError) as error:  # numbers too long, brackets too deep
            raise problem(setting, str(path), f"line {number} cannot be read: {error}") from None
        if not isinstance(row, dict):
            rule = f"line {number} is no JSON object"
            raise problem(setting, str(path), rule, 'Write lines like {"prompt": "a cat"}.')
        yield f"line {number}", row


def _csv(setting: str, path: Path) -> _Rows:
    text = io.StringIO(read_text(setting, path), newline="")
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    reader = csv.DictReader(text, delimiter=delimiter, strict=True)
    try:
        header = list(reader.fieldnames or [])
        if twice := sorted({name for name in header if header.count(name) > 1}):
            raise problem(setting, str(path), f"line 1 names the column {twice[0]!r} twice")
        for row in reader:
            if None in row or None in row.values():
                num = sum(value is not None for key, value in row.items() if key is not None)
                num += len(row.get(None) or [])
                rule = (
                    f"line {reader.reader.line_num} has {num} fields, and the header {len(header)}"
                )
                raise problem(setting, str(path), rule)
            yield f"line {reader.reader.line_num}", dict(row)
    except csv.Error as error:
        rule = f"line {reader.reader.line_num} cannot be read: {error}"
        raise problem(setting, str(path), rule) from None


def _parquet(setting: str, path: Path) -> _Rows:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        rule = "reading Parquet needs pyarrow, which is not installed"
        raise problem(setting, str(path), rule, "Run: pip install 'leangrpo[data]'.") from None
    if not path.is_file():
        read_text(setting, path)  # says why
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        rule = f"it cannot be read as Parquet after row {number}: {' '.join(str(error).split())}"
        raise problem(setting, str(path), rule) from None


def _hub(setting: str, source: str) -> _Rows:
    """`hf:name`, `hf:name:split` or `hf:name:config:split`; the split is `train` if none is given.

    A split may be a slice (`train[:100]`), whose colon separates nothing.
    """
    name, *rest = re.split(r":(?![^\[]*\])", source.removeprefix("hf:"))
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) or len(rest) > 2 or not all(rest):
        rule = "it must be hf:owner/name, hf:owner/name:split or hf:owner/name:config:split"
        raise problem(setting, source, rule)
    try:
        import datasets
    except ImportError:
        rule = "reading it needs the datasets library, which is not installed"
        raise problem(setting, source, rule, "Run: pip install 'leangrpo[data]'.") from None
    config, part = [*[None] * (2 - len(rest)), *rest][-2:] if rest else (None, "train")
    try:
        table = datasets.load_dataset(name, config, split=part)
        for column, feature in table.features.items():
            if isinstance(feature, datasets.Image):  # as a file: decoded when it is sampled
                table = table.cast_column(column, datasets.Image(decode=False))
        for number, row in enumerate(table, 1):
            yield f"row {number}", dict(row)
    except LeanError:
        raise
    except Exception as error:  # a library, the network and another's script
        rule = f"it cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())}"
        raise problem(setting, source, rule) from error


READERS = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
}
