"""Run somebody's program under an audit: as Python would, and with a report whatever happens."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from .audit import watch
from .audit_report import Report
from .audit_table import print_report
from .errors import LeanError
from .launch import rank_of_several

EVERY_S = 5.0
"""Seconds between two writings of the report while the program runs: what a kill leaves."""
REDUNDANT = 3
"""Exit code where `fail_above` is exceeded."""


def run_audited(
    script: str,
    arguments: Sequence[str],
    *,
    is_module: bool = False,
    name: str | None = None,
    json_file: Path | None = None,
    fail_above: float | None = None,
) -> int:
    """Run a script or a module, report, and return the exit code: the program's own if not 0.

    The report goes to standard error and, as JSON, to `json_file`, on several ranks with `.rankN`
    before its ending, where only rank 0 prints. It is there too when the program fails, is
    interrupted or terminated; killed outright, `json_file` has what was seen up to `EVERY_S`
    seconds before.
    """
    rank = rank_of_several()
    if json_file is not None and rank is not None:
        json_file = json_file.with_name(f"{json_file.stem}.rank{rank}{json_file.suffix}")
    latest = time.monotonic()

    def on_step(report: Report) -> None:
        nonlocal latest
        if json_file is not None and time.monotonic() - latest > EVERY_S:
            _write(json_file, report)
            latest = time.monotonic()

    def deliver() -> None:
        if json_file is not None:
            _write(json_file, audit.report)
        if rank in (None, 0):
            print_report(audit.report)

    with watch(name=name, on_step=on_step) as audit, _last_words(audit, deliver):
        audit.report.rank = rank
        code = _run(script, arguments, is_module)
    audit.report.ended = {0: "finished"}.get(code, f"ended with exit code {code}")
    deliver()
    share = audit.report.redundant_share
    if code == 0 and fail_above is not None and share > fail_above:
        if rank in (None, 0):
            print(f"redundant: {share:.1%}, above --fail-above {fail_above:.1%}", file=sys.stderr)
        return REDUNDANT
    return code


def _run(script: str, arguments: Sequence[str], is_module: bool) -> int:
    """Run it in this process; what it raises is printed as Python would, from its own frames on."""
    before = sys.argv, list(sys.path)
    sys.argv = [script, *arguments]
    try:
        if is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(script).resolve().parent))
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, int) or end.code is None:
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next and _is_ours(trace.tb_frame.f_code.co_filename):
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        return 1
    finally:
        sys.argv, sys.path[:] = before
        _flush()
    return 0


def _is_ours(file: str) -> bool:
    return file == __file__ or file.startswith("<frozen") or Path(file).name == "runpy.py"


@contextmanager
def _last_words(audit: Any, deliver: Any) -> Iterator[None]:
    """Report before `os._exit` and at SIGTERM too, in the process that was started."""
    owner, real = os.getpid(), os._exit

    def leave(code: int) -> NoReturn:
        if os.getpid() == owner:
            os._exit = real
            audit.finish()
            audit.report.ended = f"ended with exit code {code} by os._exit"
            _flush()
            deliver()
            _flush()
        real(code)

    def terminate(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    os._exit = leave  # type: ignore[assignment]
    before = signal.getsignal(signal.SIGTERM)
    if before is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        os._exit = real
        if before is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, before)


def check_script(script: str, is_module: bool) -> None:
    """Raise LeanError where there is nothing to run."""
    if is_module:
        from importlib.util import find_spec

        sys.path.insert(0, os.getcwd())
        try:
            found = find_spec(script)
        except (ImportError, ValueError):
            found = None
        finally:
            sys.path.pop(0)
        if found is None:
            raise LeanError(f"-m {script}: there is no such module. Name one that Python can run.")
    elif not os.path.exists(script):
        raise LeanError(f"{script}: there is no such file. Give a Python script, or -m MODULE.")


def _write(file: Path, report: Report) -> None:
    """Replace the file at once, so that a kill leaves the old or the new one."""
    aside = file.with_name(f"{file.name}.part")
    try:
        aside.write_text(json.dumps(report.as_dict(), indent=1) + "\n", encoding="utf-8")
        os.replace(aside, file)
    except OSError as error:
        print(f"--json {file}: cannot be written: {error.strerror}", file=sys.stderr)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue
