"""`leangrpo score`: any reward on pictures that are there already."""

from __future__ import annotations

import csv
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from pydantic import ValidationError

from .catalogue import WITHOUT_PROMPT
from .cli_options import JsonFile, check_writable, progress, write_json
from .complaints import complaints
from .config import read_text
from .errors import LeanError, problem
from .launch import only_alone
from .settings import Reward

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
BATCH = 16
"""Pictures of one size that are held, and given to the rewards, at a time."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A file to be scored; `prompt` is None where none was found."""

    file: Path
    size: tuple[int, int]
    prompt: str | None
    metadata: dict[str, Any]


def score(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="PNG, JPEG and WebP pictures.")],
    reward: Annotated[
        list[str],
        typer.Option(
            "--reward",
            "-r",
            metavar="NAME[=WEIGHT]",
            help="A reward; may be repeated. With settings: '{name: pickscore, model: FOLDER}'.",
        ),
    ],
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A prompt a line (.txt, in the order of the names), or .jsonl or .csv with "
            "file_name and prompt.",
            show_default=False,
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Score pictures already made.

    A picture's prompt is that of --prompts, else of NAME.txt beside it, of FOLDER/metadata.jsonl,
    or of the PNG's own text. Example: leangrpo score samples -r ocr -r jpeg_compressibility=0.002
    """
    only_alone("score")
    check_writable(json_file)
    rewards = [reward_of("--reward", text) for text in reward]
    names = [r.name for r, _ in rewards]
    for name in names:
        if names.count(name) > 1:
            raise problem("--reward", name, "it is given twice")
    from .reward_checks import check_reward

    wrong = [str(p) for r, _ in rewards for p in check_reward(f"--reward {r.name}", r)]
    if wrong:
        raise LeanError("\n".join(wrong))
    pictures, skipped = find(folder, prompts)
    if not all(name in WITHOUT_PROMPT for name in names):
        for one in [p for p in pictures if p.prompt is None]:
            skipped[one.file] = "it has no prompt"
        pictures = [p for p in pictures if p.prompt is not None]
    if not pictures:
        why = "".join(f"\n  {file.name}: {text}" for file, text in skipped.items())
        remedy = "Give prompts with --prompts FILE." if "it has no prompt" in why else ""
        raise LeanError(f"{folder} has no picture that can be scored. {remedy}".rstrip() + why)
    rows, seconds = score_pictures(pictures, rewards, skipped)
    if not rows:
        raise LeanError(f"None of the pictures in {folder} can be read.")
    means = {n: _mean([row["scores"][n] for row in rows]) for n in names}
    _print(rows, means, _mean([row["total"] for row in rows]))
    for file, text in skipped.items():
        progress(f"skipped {file.name}: {text}")
    result = {
        "folder": str(folder),
        "means": means,
        "images": rows,
        "skipped": [{"file": f.name, "why": why} for f, why in skipped.items()],
        "reward_seconds": seconds,
    }
    write_json(json_file, _without_nan(result))


def reward_of(option: str, text: str) -> tuple[Reward, float]:
    """A reward and its weight, from `NAME`, `NAME=WEIGHT` or a YAML mapping of its settings.

    Raises LeanError naming `option`.
    """
    given: Any = {"name": text}
    if text.lstrip().startswith("{"):
        try:
            given = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise problem(option, text, "it is no YAML mapping") from error
    elif "://" not in text and "=" in text:
        name, _, weight = text.rpartition("=")
        try:
            given = {"name": name, "weight": float(weight)}
        except ValueError:
            rule = "it must be NAME or NAME=WEIGHT, the weight a number"
            raise problem(option, text, rule) from None
    try:
        reward = Reward.model_validate(given)
    except ValidationError as error:
        said = "\n".join(f"{option}: {line}" for line in complaints(error))
        raise LeanError(said) from error
    return reward, reward.weight


def find(folder: Path, prompts: Path | None) -> tuple[list[Picture], dict[Path, str]]:
    """The pictures of a folder in the order of their names, and what is wrong with the others."""
    if not folder.is_dir():
        raise problem("FOLDER", str(folder), "it is no folder")
    files = sorted(f for f in folder.iterdir() if f.suffix.lower() in SUFFIXES and f.is_file())
    if not files:
        raise problem("FOLDER", str(folder), f"it has no {', '.join(SUFFIXES)} file")
    listed = _listed(prompts, files)
    beside = folder / "metadata.jsonl"
    if prompts is None and beside.is_file():
        listed = _rows(beside)
    found, wrong = [], {}
    for file in files:
        about = dict(listed.get(file.name, {}))
        prompt = about.pop("prompt", None)
        sidecar = file.with_suffix(".txt")
        try:
            size, text = _header(file)
        except Exception as error:  # a damaged file may raise anything
            wrong[file] = (
                f"it cannot be read: {' '.join(str(error).split()) or type(error).__name__}"
            )
            continue
        if prompt is None and prompts is None and sidecar.is_file():
            prompt = read_text("prompt", sidecar).strip()
        if prompt is None and prompts is None:
            prompt = text
        found.append(Picture(file, size, prompt, about))
    return found, wrong


def _header(file: Path) -> tuple[tuple[int, int], str | None]:
    """A picture's size as it is shown, and the prompt in a PNG's text."""
    from PIL import Image, ImageOps

    with Image.open(file, formats=("PNG", "JPEG", "WEBP")) as opened:
        size = ImageOps.exif_transpose(opened).size if opened.getexif() else opened.size
        text = opened.info.get("prompt") or opened.info.get("parameters")
    if not isinstance(text, str) or not text.strip():
        return size, None
    # A common form goes on with the negative prompt and the sampler's settings.
    return size, text.split("\nNegative prompt:")[0].split("\nSteps:")[0].strip()


def _listed(prompts: Path | None, files: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """The rows of a file of prompts, by the name of the picture."""
    if prompts is None:
        return {}
    if prompts.suffix in (".jsonl", ".csv"):
        return _rows(prompts)
    lines = read_text("--prompts", prompts).splitlines()
    while lines and not lines[-1].strip():
        lines.pop()
    if len(lines) != len(files):
        rule = f"it has {len(lines)} lines, and there are {len(files)} pictures"
        raise problem("--prompts", str(prompts), rule, "Or give a .jsonl file with file_name.")
    return {file.name: {"prompt": line} for file, line in zip(files, lines, strict=True)}


def _rows(file: Path) -> dict[str, dict[str, Any]]:
    text = read_text("--prompts", file)
    try:
        if file.suffix == ".csv":
            rows: list[Any] = list(csv.DictReader(text.splitlines()))
        else:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError, csv.Error) as error:
        raise problem("--prompts", str(file), "a line of it is no JSON object") from error
    found = {}
    for n, row in enumerate(rows, 1):
        if not isinstance(row, dict) or not isinstance(row.get("file_name"), str):
            raise problem("--prompts", str(file), f"entry {n} has no file_name")
        if not isinstance(row.get("prompt", ""), str):
            raise problem("--prompts", str(file), f"the prompt of entry {n} is no text")
        rest = {key: value for key, value in row.items() if key != "file_name"}
        found[Path(row["file_name"]).name] = rest
    return found


def score_pictures(
    pictures: Sequence[Picture], rewards: Sequence[tuple[Reward, float]], skipped: dict[Path, str]
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Rows of file, prompt, scores and total in the order of `pictures`; seconds of each reward.

    What cannot be decoded is added to `skipped`.
    """
    import numpy as np
    import torch

    from .scoring import Scorer

    references = {r.reference or "image" for r, _ in rewards if r.name == "similarity"}
    rows: dict[Path, dict[str, Any]] = {}
    seconds = dict.fromkeys((r.name for r, _ in rewards), 0.0)
    with Scorer(rewards, on_bad="exclude") as scorer:
        for batch in _batches(pictures, whole=scorer.groupwise):
            kept, decoded = [], []
            for one in batch:
                try:
                    decoded.append(np.asarray(_decoded(one.file)))
                except Exception as error:  # a damaged file may raise anything
                    skipped[one.file] = f"it cannot be read: {' '.join(str(error).split())}"
                else:
                    kept.append(one)
            if not kept:
                continue
            images = torch.from_numpy(np.stack(decoded)).permute(0, 3, 1, 2).float() / 255
            about = [_opened(one, references) for one in kept]
            scores = scorer(images, [one.prompt or "" for one in kept], about)
            for name, value in scores.latency.items():
                seconds[name] += value
            for i, one in enumerate(kept):
                rows[one.file] = {
                    "file": one.file.name,
                    "prompt": one.prompt,
                    "scores": {name: float(s[i]) for name, s in scores.each.items()},
                    "total": float(scores.total[i]),
                }
    return [rows[p.file] for p in pictures if p.file in rows], seconds


def _batches(pictures: Sequence[Picture], *, whole: bool) -> Iterator[list[Picture]]:
    """Pictures of one size; `whole`: all those of one prompt together."""
    groups: dict[Any, list[Picture]] = defaultdict(list)
    for one in pictures:
        groups[one.prompt if whole else one.size].append(one)
    for some in groups.values():
        if whole and len({one.size for one in some}) > 1:
            rule = "its pictures have different sizes, and are to be compared"
            raise problem("prompt", some[0].prompt, rule)
        num = len(some) if whole else BATCH
        yield from (some[i : i + num] for i in range(0, len(some), num))


def _decoded(file: Path) -> Image:
    from PIL import Image, ImageOps

    with Image.open(file, formats=("PNG", "JPEG", "WEBP")) as opened:
        return ImageOps.exif_transpose(opened).convert("RGB")


def _opened(one: Picture, references: set[str]) -> dict[str, Any]:
    """Metadata with pictures to compare with, which a file names by a path from the folder."""
    about = dict(one.metadata)
    for key in references & about.keys():
        file = one.file.parent / str(about[key])
        try:
            about[key] = _decoded(file)
        except Exception as error:  # a damaged file may raise anything
            raise problem(key, str(file), f"of {one.file.name}: it cannot be read") from error
    return about


def _mean(values: Sequence[float]) -> float:
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else math.nan


def _print(rows: Sequence[dict[str, Any]], means: dict[str, float], total: float) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    several = len(means) > 1
    table = Table(show_footer=True)
    table.add_column("picture", footer=f"mean of {len(rows)}", overflow="fold")
    table.add_column("prompt", max_width=40, no_wrap=True)
    for name, mean in means.items():
        table.add_column(name, justify="right", footer=f"{mean:.4f}", overflow="fold")
    if several:
        table.add_column("total", justify="right", footer=f"{total:.4f}")
    for row in rows:
        cells = [f"{value:.4f}" for value in row["scores"].values()]
        cells += [f"{row['total']:.4f}"] if several else []
        table.add_row(Text(row["file"]), Text(row["prompt"] or ""), *cells)
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, 60 + 26 * len(means)))
    console.print(table)


def _without_nan(tree: Any) -> Any:
    """The same with None for NaN, which JSON does not have."""
    if isinstance(tree, dict):
        return {key: _without_nan(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_without_nan(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree
