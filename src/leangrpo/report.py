"""What a run leaves behind while it goes: lines, pictures, TensorBoard, a live view, a summary.

`metrics.jsonl` is the source of truth; everything else can be made from it again.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from . import __version__
from .errors import LeanError

METRICS, EVALUATIONS, SUMMARY, CONFIG = (
    "metrics.jsonl",
    "evaluations.jsonl",
    "summary.json",
    "config.yaml",
)


@dataclass(frozen=True, slots=True)
class Run:
    """A run folder, read: its settings, its lines, and its summary once it has ended."""

    folder: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    summary: dict[str, Any] | None


def read_run(folder: str | Path) -> Run:
    """Read a run folder, also one that is being written; raises LeanError when it is none."""
    folder = Path(folder)
    try:
        config = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise LeanError(f"{folder} is not a run: its config.yaml cannot be read.") from error
    summary = folder / SUMMARY
    return Run(
        folder,
        config,
        read_lines(folder / METRICS),
        read_lines(folder / EVALUATIONS),
        json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else None,
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file; a half-written last one, as a kill leaves it, is left out."""
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            break
        if isinstance(line, dict):
            lines.append(line)
    return lines


class RunRecord:
    """Writes a run folder and shows progress. A closed terminal never ends a run."""

    def __init__(self, folder: Path, *, quiet: bool, updates: int, purge: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.folder = folder
        self.quiet = quiet
        self.updates = updates
        self._seconds: list[float] = []
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)
        self._live = _Live() if sys.stdout.isatty() and not quiet else None

    @classmethod
    def create(cls, folder: str | Path, config: str, *, quiet: bool = False) -> RunRecord:
        """Open a new folder with the resolved settings, a YAML text, in it."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text(config, encoding="utf-8")
        updates = int(yaml.safe_load(config).get("updates", 0))
        return cls(folder, quiet=quiet, updates=updates, purge=None)

    @classmethod
    def resume(
        cls, folder: str | Path, update: int, config: str, *, quiet: bool = False
    ) -> RunRecord:
        """Go on in a folder: lines of later updates than `update` are dropped, here and in
        TensorBoard, as they will be written again."""
        folder = Path(folder)
        for name in (METRICS, EVALUATIONS):
            kept = [line for line in read_lines(folder / name) if line["update"] <= update]
            _replace(folder / name, "".join(f"{json.dumps(line)}\n" for line in kept))
        (folder / SUMMARY).unlink(missing_ok=True)
        _replace(folder / CONFIG, config)
        updates = int(yaml.safe_load(config).get("updates", 0))
        return cls(folder, quiet=quiet, updates=updates, purge=update + 1)

    def metrics(self, line: Mapping[str, Any]) -> None:
        """Append the line of an update and show it."""
        self._append(METRICS, line)
        n = line["update"]
        scalars = {
            "reward/mean": line["reward_mean"],
            "reward/std": line["reward_std"],
            "train/advantage_std": line["advantage_std"],
            "train/grad_norm": line["grad_norm"],
            "train/loss": line["loss"],
            **{f"time/{k}": v for k, v in line["time"].items()},
            **{f"reward/{k}": v for k, v in line["rewards"].items()},
        }
        self._scalars(scalars, n)
        self._seconds.append(line["time"]["total"])
        self._say(self._text(line), transient=True)

    def evaluation(
        self,
        line: dict[str, Any],
        images: Tensor,
        prompts: Sequence[str],
        scores: Sequence[float],
    ) -> None:
        """Append the line of an evaluation and save its grid of pictures.

        `images` is `(N, C, H, W)`, or `(N, F, C, H, W)`, of which the middle frame is shown.
        """
        if len(images):
            frames = images[:, images.shape[1] // 2] if images.dim() == 5 else images
            path = self.folder / "samples" / f"{line['update']:06d}.png"
            path.parent.mkdir(exist_ok=True)
            save_grid(frames, prompts, scores, path)
            line = {**line, "grid": str(path.relative_to(self.folder))}
        self._append(EVALUATIONS, line)
        scalars = {"heldout/reward": line["reward"], "heldout/exact": line["exact"]}
        self._scalars(scalars, line["update"])
        exact = "" if line["exact"] is None else f", {line['exact']:.1%} exact"
        self._say(f"held-out at update {line['update']}: reward {line['reward']:.3f}{exact}")

    def finish(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Write summary.json and report.html, print the result; returns the whole summary."""
        from .page import write_page

        run = read_run(self.folder)
        first, last = (run.evaluations[0], run.evaluations[-1]) if run.evaluations else ({}, {})
        whole = {
            "leangrpo": __version__,
            "recipe": run.config.get("recipe"),
            **summary,
            "images": sum(line["images"] for line in run.metrics),
            "heldout_reward_before": first.get("reward"),
            "heldout_reward_after": last.get("reward"),
            "heldout_exact_before": first.get("exact"),
            "heldout_exact_after": last.get("exact"),
            "reward_first": run.metrics[0]["reward_mean"] if run.metrics else None,
            "reward_last": run.metrics[-1]["reward_mean"] if run.metrics else None,
            "run": str(self.folder),
        }
        _replace(self.folder / SUMMARY, json.dumps(_finite(whole), indent=2) + "\n")
        page = write_page(self.folder)
        self.close()
        print_safely(_result(whole))
        print_safely(f"report: {page}")
        if whole.get("stopped") == "interrupted":
            print_safely(f"go on with: leangrpo train {self.folder} --resume")
        return whole

    def failed(self, error: BaseException, update: int) -> None:
        """Close what is open and say what is saved; the error itself is the caller's to print."""
        self.close()
        if update > 0 and not isinstance(error, KeyboardInterrupt | SystemExit):
            print_safely(
                f"{update} updates are saved in {self.folder}; once the cause is mended, go on "
                f"with: leangrpo train {self.folder} --resume"
            )

    def close(self) -> None:
        """Flush TensorBoard and leave the terminal as it was."""
        self._board.close()
        if self._live is not None:
            self._live.close()

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(_finite(line)) + "\n")
            file.flush()

    def _scalars(self, scalars: Mapping[str, float | None], step: int) -> None:
        for name, value in scalars.items():
            if value is not None:
                self._board.add_scalar(name, value, step)

    def _text(self, line: Mapping[str, Any]) -> str:
        recent = sorted(self._seconds[-9:])
        left = (self.updates - line["update"]) * recent[len(recent) // 2]
        mean, std = line["reward_mean"], line["reward_std"]
        reward = "no finite reward" if mean is None else f"reward {mean:7.3f} ± {std:.3f}"
        stages = " ".join(
            f"{name} {seconds:.1f}"
            for name, seconds in line["time"].items()
            if name not in ("total", "images_per_s", "other") and seconds >= 0.05
        )
        return (
            f"update {line['update']:>{len(str(self.updates))}}/{self.updates}  {reward}  "
            f"advantage {line['advantage_std']:.2f}  grad {line['grad_norm']:.3f}  "
            f"{line['time']['images_per_s']:.1f} images/s  [{stages} s]  {_duration(left)} left"
        )

    def _say(self, text: str, *, transient: bool = False) -> None:
        if self.quiet:
            return
        if self._live is not None and transient:
            self._live.show(text)
        elif self._live is not None:
            self._live.print(text)
        else:
            print_safely(text)


class _Live:
    """The last updates and a status line that stays at the bottom of a terminal."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False)
        self._status = self._console.status("sampling the first group")
        self._status.start()

    def show(self, text: str) -> None:
        self.print(text)
        self._status.update(text.rsplit("  ", 1)[-1])

    def print(self, text: str) -> None:
        self._console.print(text, markup=False)

    def close(self) -> None:
        self._status.stop()


def save_grid(
    images: Tensor, prompts: Sequence[str], scores: Sequence[float], path: Path, columns: int = 8
) -> None:
    """Write pictures `(N, C, H, W)` in [0, 1] as one PNG, prompt and score under each.

    Small pictures are enlarged, pixel by pixel, to 96 at least.
    """
    from PIL import Image, ImageDraw, ImageFont

    num, _, height, width = images.shape
    factor = max(1, math.ceil(96 / min(height, width)))
    cell = (width * factor + 8, height * factor + 34)
    columns = min(columns, num)
    rows = math.ceil(num / columns)
    sheet = Image.new("RGB", (columns * cell[0], rows * cell[1]), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(10)
    for i, (image, prompt, score) in enumerate(zip(images, prompts, scores, strict=True)):
        x, y = (i % columns) * cell[0] + 4, (i // columns) * cell[1] + 2
        sheet.paste(to_picture(image).resize((width * factor, height * factor), 0), (x, y))
        fits = int(width * factor / 5.2)
        short = prompt if len(prompt) <= fits else prompt[: fits - 1] + "…"
        draw.text((x, y + height * factor + 2), f"{short}\n{score:.2f}", fill="black", font=font)
    sheet.save(path)


def to_picture(image: Tensor) -> Any:
    """A PIL picture of `(C, H, W)` in [0, 1]; non-finite pixels become magenta, not black."""
    from PIL import Image

    rgb = image.expand(3, -1, -1) if image.shape[0] == 1 else image[:3]
    bad = ~rgb.isfinite().all(dim=0)
    pixels = (rgb.nan_to_num().clamp(0, 1) * 255).round().byte().movedim(0, -1).numpy().copy()
    pixels[bad.numpy()] = (255, 0, 255)
    return Image.fromarray(pixels)


def print_safely(text: str) -> None:
    """Print; a terminal that went away is no reason to lose a run."""
    try:
        print(text, flush=True)
    except (BrokenPipeError, ValueError):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def _result(s: Mapping[str, Any]) -> str:
    parts = [f"{s['updates']} updates ({s['schedule']}) in {_duration(s['seconds'])}"]
    if s["heldout_reward_before"] is not None:
        parts.append(
            f"held-out reward {s['heldout_reward_before']:.3f} -> {s['heldout_reward_after']:.3f}"
        )
    if s["heldout_exact_before"] is not None:
        parts.append(
            f"held-out exact {s['heldout_exact_before']:.1%} -> {s['heldout_exact_after']:.1%}"
        )
    return "; ".join(parts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def _replace(path: Path, text: str) -> None:
    """Write a file so that a kill leaves the old one or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
