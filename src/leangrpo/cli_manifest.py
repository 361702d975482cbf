"""`leangrpo audit manifest`: the classification of public implementations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .cli_options import JsonFile, check_writable, write_json
from .errors import LeanError, problem
from .launch import only_alone


def manifest(
    check: Annotated[
        Path | None,
        typer.Option(
            "--check",
            metavar="DIR",
            help="Compare paths and lines with git checkouts: DIR/OWNER/NAME, DIR/OWNER__NAME or "
            "DIR/NAME. Exit code 1 if one is wrong.",
            show_default=False,
        ),
    ] = None,
    render: Annotated[
        bool, typer.Option("--render", help="Write it as Markdown with permanent links.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Of --render; default: the terminal.", show_default=False
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A manifest of your own. Default: the one that comes along.",
            show_default=False,
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """List public implementations by whether they evaluate sampled transitions again.

    Examples: leangrpo audit manifest; leangrpo audit manifest --check checkouts;
    leangrpo audit manifest --render --out manifest.md
    """
    only_alone("audit manifest")
    check_writable(json_file)
    if check is not None and render:
        raise problem("--check", str(check), "it cannot be given with --render", "Run one of them.")
    if out is not None and not render:
        raise problem("--out", str(out), "it is of --render", "Add --render.")
    from .manifest import FILE, counts, load_rows
    from .manifest_page import render as page
    from .manifest_page import summary

    rows = load_rows(file or FILE)
    result: dict[str, Any] = {"counts": counts(rows)}
    faults = 0
    if check is not None:
        faults = _check(rows, check, result)
    elif render:
        _write(page(rows), out)
    else:
        width = max(len(row.method) for row in rows)
        for row in rows:
            print(
                f"{row.method:{width}s}  {row.verdict:30s}  {'read' if row.read else ''}".rstrip()
            )
        print(summary(rows))
    result["rows"] = [row.model_dump(mode="json", by_alias=True) for row in rows]
    write_json(json_file, result)
    if faults:
        raise typer.Exit(1)


def _check(rows: Any, folder: Path, result: dict[str, Any]) -> int:
    from .manifest import check

    findings = check(rows, folder)
    for finding in findings:
        print(f"{finding.method}: {finding.kind}: {finding.text}")
    faults = sum(finding.is_fault for finding in findings)
    recorded = sum(row.read for row in rows)
    checked = recorded - (len(findings) - faults)
    print(f"{checked} of {recorded} read methods checked, {faults} faults")
    result["findings"] = [
        {"method": finding.method, "kind": finding.kind, "text": finding.text}
        for finding in findings
    ]
    result.update(checked=checked, faults=faults)
    return faults


def _write(text: str, out: Path | None) -> None:
    if out is None:
        print(text, end="")
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LeanError(f"--out {out}: cannot be written: {error.strerror}.") from error
    print(out)
