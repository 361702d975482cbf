"""The static manifest: which public trainers evaluate a sampled transition again, and where.

The classification is that of LeanGRPO, arXiv 2609.03528, appendix G. Paths and lines are from
reading the repositories at the commits that the rows name.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from .errors import LeanError, problem

FILE = Path(__file__).with_name("audit_manifest.yaml")
UNREAD = "class from the paper, lines not recorded"
PLACES = ("rollout", "update", "backend")

Verdict = Literal[
    "recomputes, colocated",
    "recomputes, separate processes",
    "no target recomputation",
    "unverified",
]
Fault = Literal[
    "not checked", "not a git checkout", "commit mismatch", "missing file", "wrong line range"
]
COLOCATED, SEPARATE, WITHOUT, UNVERIFIED = get_args(Verdict)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Place(_Strict):
    """A piece of code: a file of the repository and, if they were counted, its lines."""

    path: str
    lines: tuple[int, int] | None = None  # first and last, both included, from 1
    anchor: str  # text that must stand within the lines; catches a range that has shifted

    @field_validator("lines", mode="before")
    @classmethod
    def _pair(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("lines")
    @classmethod
    def _in_order(cls, value: tuple[int, int] | None) -> tuple[int, int] | None:
        if value is not None and not 1 <= value[0] <= value[1]:
            raise ValueError("must be [first, last] with 1 <= first <= last")
        return value

    @field_validator("path")
    @classmethod
    def _inside(cls, value: str) -> str:
        path = PurePosixPath(value)
        if not value or path.is_absolute() or ".." in path.parts or "\\" in value:
            raise ValueError("must be a path inside the repository, with / between its parts")
        return value

    @field_validator("anchor")
    @classmethod
    def _one_line(cls, value: str) -> str:
        if not value.strip() or "\n" in value:
            raise ValueError("must be text that stands on one line")
        return value


class Row(_Strict):
    """One audited method: its class, and where its repository samples and updates."""

    method: str = Field(min_length=1)
    repository: str | None = None  # owner/name on GitHub
    commit: str | None = None
    verdict: Verdict = Field(alias="class")
    read: bool  # whether rollout and update were read at `commit`
    rollout: Place | None = None
    update: Place | None = None
    backend: Place | None = None
    notes: str = ""

    @field_validator("repository")
    @classmethod
    def _owner_and_name(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[\w.-]*\w[\w.-]*/[\w.-]*\w[\w.-]*", value):
            raise ValueError("must be owner/name")
        return value

    @field_validator("commit")
    @classmethod
    def _all_digits(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[0-9a-f]{40}", value):
            raise ValueError("must be all 40 hexadecimal digits of a commit, in lower case")
        return value

    @model_validator(mode="after")
    def _what_was_read(self) -> Row:
        if self.read:
            needed = ("repository", "commit", "rollout", "update")
            missing = [name for name in needed if getattr(self, name) is None]
            if missing:
                raise ValueError(f"has read: true and must name {' and '.join(missing)}")
            if UNREAD in self.notes:
                raise ValueError(f"has read: true, and its notes must not say {UNREAD!r}")
        elif any(getattr(self, name) is not None for name in PLACES):
            raise ValueError("has read: false and must not name rollout, update or backend")
        elif self.notes != UNREAD:
            raise ValueError(f"has read: false, and its notes must be exactly {UNREAD!r}")
        return self

    def places(self) -> Iterator[tuple[str, Place]]:
        """What is recorded of rollout, update and backend, by name."""
        for name in PLACES:
            place = getattr(self, name)
            if place is not None:
                yield name, place


class _Manifest(_Strict):
    rows: list[Row] = Field(min_length=1)


def load_rows(file: Path = FILE) -> list[Row]:
    """The rows of a manifest, the one that comes along if no other is named.

    Raises LeanError, one line for each mistake, when the file is not a manifest.
    """
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise LeanError(f"Cannot read {file}: {error.strerror}.") from error
    except (yaml.YAMLError, ValueError) as error:
        raise LeanError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    try:
        rows = _Manifest.model_validate(tree).rows
    except ValidationError as error:
        raise LeanError("\n".join(_mistakes(error, tree, file))) from error
    names = Counter(row.method.casefold() for row in rows)
    twice = [row.method for row in rows if names[row.method.casefold()] > 1]
    if twice:
        raise LeanError(
            "\n".join(
                f"{file}: `{name}` has {names[name.casefold()]} rows. Keep one row for each method."
                for name in dict.fromkeys(twice)
            )
        )
    return rows


def _mistakes(error: ValidationError, tree: Any, file: Path) -> Iterator[str]:
    for item in error.errors(include_url=False):
        location = list(item["loc"])
        where = str(file)
        if location[:1] == ["rows"] and len(location) > 1:
            number = location[1]
            row = tree["rows"][number] if isinstance(number, int) else {}
            name = row.get("method") if isinstance(row, dict) else None
            where += f", {name or f'row {int(number) + 1}'}"
            location = location[2:]
        setting = ".".join(str(part) for part in location)
        message = item["msg"].removeprefix("Value error, ")
        value = repr(item["input"])
        shown = value if len(value) <= 60 else f"{value[:57]}..."
        yield f"{where}: `{setting}` is {shown}: {message}." if setting else f"{where}: {message}."


def counts(rows: Sequence[Row]) -> dict[str, int]:
    """How many methods there are, recompute, are of each class, and were read."""
    of_class = Counter(row.verdict for row in rows)
    return {
        "methods": len(rows),
        "recompute": of_class[COLOCATED] + of_class[SEPARATE],
        **{verdict: of_class[verdict] for verdict in get_args(Verdict)},
        "read": sum(row.read for row in rows),
    }


@dataclass(frozen=True)
class Finding:
    """What `check` found out about one method, or one of its places."""

    method: str
    kind: Fault
    text: str

    @property
    def is_fault(self) -> bool:
        """Whether the manifest and the checkout disagree; a missing checkout is no fault."""
        return self.kind != "not checked"


def check(rows: Sequence[Row], folder: Path) -> list[Finding]:
    """Compare the rows that were read with checkouts under a folder.

    The checkout of `owner/name` is `folder/owner/name`, `folder/owner__name` or `folder/name`. Its
    HEAD must be the row's commit, its files must be there, and each anchor must stand within its
    lines; what counts is the work tree. Raises LeanError where there is nothing to compare.
    """
    if not folder.is_dir():
        raise problem("--check", str(folder), "it must be a folder with checkouts")
    recorded = [row for row in rows if row.read]
    findings = [finding for row in recorded for finding in _of_row(row, folder)]
    if all(finding.kind == "not checked" for finding in findings) and len(findings) == len(
        recorded
    ):
        rule = "it has no checkout of a repository that the manifest has lines of"
        example = recorded[0].repository if recorded else "owner/name"
        raise problem("--check", str(folder), rule, f"Clone one to {folder}/{example}.")
    return findings


def _of_row(row: Row, folder: Path) -> Iterator[Finding]:
    assert row.repository is not None  # as `read` says
    owner, name = row.repository.split("/")
    candidates = (folder / owner / name, folder / f"{owner}__{name}", folder / name)
    checkout = next((path for path in candidates if path.is_dir()), None)
    if checkout is None:
        yield Finding(row.method, "not checked", f"no checkout of {row.repository}")
        return
    head = _head(checkout)
    if head is None:
        yield Finding(row.method, "not a git checkout", str(checkout))
    elif head != row.commit:
        text = f"{checkout} is at {head}, the row at {row.commit}; its lines were not compared"
        yield Finding(row.method, "commit mismatch", text)
    else:
        for what, place in row.places():
            yield from _of_place(row.method, what, place, checkout)


def _of_place(method: str, what: str, place: Place, checkout: Path) -> Iterator[Finding]:
    file = checkout / place.path
    if not file.is_file():
        yield Finding(method, "missing file", f"{what}: {file}")
        return
    # Not splitlines: git and GitHub end a line at a line feed alone.
    text = file.read_text(encoding="utf-8", errors="replace").removesuffix("\n").split("\n")
    first, last = place.lines or (1, len(text))
    shown = f"{what}: {place.path} lines {first}-{last}"
    if last > len(text):
        yield Finding(method, "wrong line range", f"{shown}: the file has {len(text)} lines")
    elif not any(place.anchor in line for line in text[first - 1 : last]):
        found = [str(number) for number, line in enumerate(text, 1) if place.anchor in line]
        elsewhere = f"it is on line {', '.join(found[:5])}" if found else "nor in the file"
        yield Finding(
            method, "wrong line range", f"{shown}: {place.anchor!r} is not there, {elsewhere}"
        )


def _head(checkout: Path) -> str | None:
    """The commit of a checkout, or None if the folder is not one or belongs to one further up."""
    # Git's own variables, set inside a hook for one, would name another repository.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    command = ["git", "-C", str(checkout), "rev-parse", "--show-toplevel", "HEAD"]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment
        )
    except FileNotFoundError as error:
        raise LeanError("--check needs `git`, which is not installed.") from error
    lines = result.stdout.splitlines()
    if result.returncode or len(lines) != 2 or Path(lines[0]).resolve() != checkout.resolve():
        return None
    return lines[1]
