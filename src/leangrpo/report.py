"""What a run leaves behind while it goes: lines, pictures, TensorBoard, a live view, a summary.

`metrics.jsonl` is the source of truth; everything else can be made from it again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from . import __version__
from .console import LiveView, is_terminal, print_safely
from .errors import LeanError, problem
from .launch import is_started, resume_command
from .pictures import save_grid, side_by_side
from .runfolder import (
    CONFIG,
    EVALUATIONS,
    LOG,
    METRICS,
    PLAN,
    SUMMARY,
    Run,
    append_line,
    lock,
    read_lines,
    read_run,
    replace_file,
    unwritable,
)

__all__ = ["Run", "RunRecord", "read_lines", "read_run", "save_grid"]


class RunRecord:
    """Writes a run folder and shows progress. A closed terminal never ends a run."""

    def __init__(
        self, folder: Path, *, quiet: bool, updates: int, purge: int | None, held: Any = None
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.folder = folder
        self.quiet = quiet
        self._held = held
        self.updates = updates
        self._seconds: list[float] = []
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)
        self._live = LiveView(updates) if is_terminal() and not quiet else None

    @classmethod
    def create(cls, folder: str | Path, config: str, *, quiet: bool = False) -> RunRecord:
        """Open a new folder with the resolved settings, a YAML text, in it."""
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(folder, error) from error
        held = lock(folder)
        if (folder / CONFIG).exists():  # another run was faster
            held.close()
            remedy = "Resume it, or name another folder."
            raise problem("run.dir", str(folder), "it already holds a run", remedy)
        replace_file(folder / CONFIG, config)
        return cls(folder, quiet=quiet, updates=_updates(config), purge=None, held=held)

    @classmethod
    def resume(
        cls, folder: str | Path, update: int, config: str, *, quiet: bool = False
    ) -> RunRecord:
        """Go on in a folder: lines of later updates than `update` are dropped, here and in
        TensorBoard, as they will be written again. With -1, all of them are."""
        folder = Path(folder)
        held = lock(folder)
        for name in (METRICS, EVALUATIONS):
            kept = [line for line in read_lines(folder / name) if _is_of(line, update)]
            replace_file(folder / name, "".join(f"{json.dumps(line)}\n" for line in kept))
        for grid in (folder / "samples").glob("*.png"):
            if grid.stem.isdigit() and int(grid.stem) > update:
                grid.unlink()
        (folder / SUMMARY).unlink(missing_ok=True)
        replace_file(folder / CONFIG, config)
        record = cls(folder, quiet=quiet, updates=_updates(config), purge=update + 1, held=held)
        record._say(f"going on after update {max(update, 0)}")
        return record

    def metrics(self, line: Mapping[str, Any]) -> None:
        """Append the line of an update and show it."""
        append_line(self.folder / METRICS, json.dumps(_finite(line)))
        scalars = {
            "reward/mean": line["reward_mean"],
            "reward/std": line["reward_std"],
            **{f"reward/{k}": v for k, v in line["rewards"].items()},
            "train/advantage_std": line["advantage_std"],
            "train/grad_norm": line["grad_norm"],
            "train/loss": line["loss"],
            "train/kl": line.get("kl"),
            **{f"time/{k}": v for k, v in line["time"].items()},
        }
        self._scalars(scalars, line["update"])
        self._seconds.append(line["time"]["total"])
        self._say(self._text(line), update=line["update"])

    def evaluation(
        self,
        line: Mapping[str, Any],
        images: Tensor,
        prompts: Sequence[str],
        scores: Sequence[float],
    ) -> None:
        """Append the line of an evaluation and save its grid of pictures.

        `images` is `(N, C, H, W)`, or `(N, F, C, H, W)`, of which the middle frame is shown;
        `prompts` and `scores` are those of these N.
        """
        update, grid = line["update"], None
        if len(images):
            frames = images[:, images.shape[1] // 2] if images.dim() == 5 else images
            grid = f"samples/{update:06d}.png"
            save_grid(frames, prompts, scores, self.folder / grid)
            self._board.add_image("heldout", side_by_side(frames), update)
        append_line(self.folder / EVALUATIONS, json.dumps(_finite({**line, "grid": grid})))
        self._scalars({"heldout/reward": line["reward"], "heldout/exact": line["exact"]}, update)
        exact = "" if line["exact"] is None else f", {line['exact']:.1%} exact"
        self._say(f"held-out at update {update}: reward {line['reward']:.3f}{exact}")

    def finish(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Write summary.json and report.html, print the result; returns the whole summary."""
        run = read_run(self.folder)
        first, last = (run.evaluations[0], run.evaluations[-1]) if run.evaluations else ({}, {})
        whole: dict[str, Any] = _finite(
            {
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
        )
        replace_file(self.folder / SUMMARY, json.dumps(whole, indent=2) + "\n")
        page = self._page()
        self.close()
        self._say(_result(whole), always=True)
        if page:
            self._say(f"report: {page}", always=True)
        if whole.get("stopped") == "interrupted":
            self._say(f"go on with: {resume_command(self.folder)}", always=True)
        return whole

    def failed(self, error: BaseException, update: int) -> None:
        """Close what is open and say what is saved; the error itself is the caller's to print."""
        append_line(self.folder / LOG, f"failed: {type(error).__name__}: {error}")
        self.close()
        if update > 0 and not isinstance(error, KeyboardInterrupt | SystemExit):
            self._page()
            if not is_started():
                print_safely(
                    f"{update} updates are saved in {self.folder}; once the cause is mended, go on "
                    f"with: {resume_command(self.folder)}"
                )

    def close(self) -> None:
        """Flush TensorBoard and leave the terminal as it was."""
        self._board.close()
        if self._held is not None:
            self._held.close()
        if self._live is not None:
            self._live.close()
            self._live = None

    def _page(self) -> Path | None:
        """The HTML page. It can be made again, so no fault in it may cost a run its result."""
        from .page import write_page

        try:
            return write_page(self.folder)
        except Exception as error:
            print_safely(f"warning: report.html could not be written: {error!r}")
            return None

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

    def plan(self, text: str) -> None:
        """Say what an update will do."""
        self._say(f"plan: {text}")

    def settings(self, config: str) -> None:
        """What the run goes on with, from now on."""
        replace_file(self.folder / CONFIG, config)

    def choice(self, text: str, table: Mapping[str, Any]) -> None:
        """Say which schedule was chosen and from what; the whole table goes to plan.json."""
        replace_file(self.folder / PLAN, f"{json.dumps(table, indent=1)}\n")
        self._say(text)

    def note(self, text: str) -> None:
        """Say something a user should know, in the log and on the terminal."""
        self._say(f"note: {text}")

    def _say(self, text: str, *, update: int | None = None, always: bool = False) -> None:
        """Into log.txt, and onto the terminal unless quiet."""
        append_line(self.folder / LOG, text)
        if self.quiet and not always:
            return
        if self._live is not None:
            self._live.show(text, update)
        else:
            print_safely(text)


class Onlooker:
    """What a rank has that writes no run folder: a record of nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def metrics(self, line: Mapping[str, Any]) -> None:
        """Nothing."""

    def plan(self, text: str) -> None:
        """Nothing."""

    def settings(self, config: str) -> None:
        """Nothing."""

    def choice(self, text: str, table: Mapping[str, Any]) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def finish(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """The summary as it is."""
        return dict(summary)

    def failed(self, error: BaseException, update: int) -> None:
        """Nothing."""


def _is_of(line: Mapping[str, Any], update: int) -> bool:
    """Whether a line is one of a run's, and of this update or one before."""
    found = line.get("update")
    return isinstance(found, int) and found <= update


def _updates(config: str) -> int:
    """How many updates a run's settings ask for."""
    tree = yaml.safe_load(config)
    if not isinstance(tree, dict):
        raise LeanError("A run's settings must be a YAML mapping.")
    return int(tree.get("updates", 0))


def _result(s: Mapping[str, Any]) -> str:
    parts = [f"{s['updates']} updates ({s['schedule']}) in {_duration(s['seconds'])}"]
    if s["heldout_reward_before"] is not None and s["heldout_reward_after"] is not None:
        parts.append(
            f"held-out reward {s['heldout_reward_before']:.3f} -> {s['heldout_reward_after']:.3f}"
        )
    if s["heldout_exact_before"] is not None and s["heldout_exact_after"] is not None:
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
