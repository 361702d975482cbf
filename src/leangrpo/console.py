"""Progress on a terminal, or plain lines where there is none; never a reason to lose a run."""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def is_terminal() -> bool:
    """Whether somebody watches standard output."""
    try:
        return sys.stdout.isatty()
    except (AttributeError, OSError, ValueError):  # none at all, or closed
        return False


def print_safely(text: str) -> None:
    """Print a line. Once the reader has gone away, this and all later output is dropped."""
    try:
        print(text, flush=True)
    except UnicodeEncodeError:
        print(text.encode("ascii", "replace").decode(), flush=True)
    except (OSError, ValueError, AttributeError):
        _drop_output()


def _drop_output() -> None:
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())  # what is still buffered has to go somewhere at exit
        os.close(null)
    except (AttributeError, OSError, ValueError):
        sys.stdout = _Nowhere()


def for_tables(width: int = 120) -> Console:
    """Where a table is printed: a log file has room for whole rows, `width` columns."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=width)


class _Nowhere(io.TextIOBase):
    def write(self, text: str) -> int:
        return len(text)


class LiveView:
    """A line per update, and below them a bar that stays at the bottom of the terminal."""

    def __init__(self, updates: int, console: Any = None) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

        self._console = console or _console()
        self._progress = Progress(
            SpinnerColumn(),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            transient=True,
        )
        self._task = self._progress.add_task("sampling the first group", total=updates)
        self._guard(self._progress.start)

    def show(self, text: str, update: int | None = None) -> None:
        """Print a line; that of an update also moves the bar to it, its last part beside it."""
        if update is not None:
            text, _, left = text.rpartition("  ")
            self._progress.update(self._task, completed=update, description=left)
        self._guard(lambda: self._console.print(text, markup=False, soft_wrap=True))

    def close(self) -> None:
        """Take the bar away."""
        self._guard(self._progress.stop)

    def _guard(self, action: Any) -> None:
        try:
            action()
        except (OSError, ValueError):
            self._console.quiet = True


def _console() -> Any:
    from rich.console import Console

    class Lasting(Console):
        """rich ends the program when the reader of its output goes away; a run must go on."""

        def on_broken_pipe(self) -> None:
            self.quiet = True
            _drop_output()

    return Lasting(highlight=False)
