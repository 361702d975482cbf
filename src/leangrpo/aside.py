"""A run's setup to measure with: all that training has, and nothing of it stays on the disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from .config import Config
from .report import Onlooker, RunRecord
from .setup import Setup, set_up


@contextmanager
def set_up_aside(config: Config) -> Iterator[Setup]:
    """`set_up` in a folder that is thrown away, with a record that writes nothing; its rewards are
    open inside. Raises LeanError as `set_up` does."""
    with TemporaryDirectory(prefix="leangrpo-") as folder:
        run = config.run.model_copy(update={"dir": str(Path(folder) / "run")})
        s = set_up(config.model_copy(update={"run": run}), quiet=True)
        if isinstance(s.record, RunRecord):
            s.record.close()
    with s.scorer, s.judge:
        yield replace(s, record=Onlooker(Path(folder)))
