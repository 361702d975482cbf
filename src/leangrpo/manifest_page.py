"""The manifest as Markdown: permanent links, and counts that are computed from the rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_args
from urllib.parse import quote

from .manifest import PLACES, UNREAD, WITHOUT, Place, Row, Verdict, counts

BAR = r"\|"  # a bar inside a cell

HEAD = """\
# Public implementations

Written by `leangrpo audit manifest --render`; do not edit it by hand. Which class a method is in
is the finding of LeanGRPO, arXiv [2609.03528](https://arxiv.org/abs/2609.03528), appendix G, of
24 August 2026. Where a row has links, both ends were read for this project: `rollout` is where
transitions are sampled, `update` where the trained network is evaluated with gradients, `backend`
where network and optimizer are prepared for both. A link with a name in place of lines leads to a
file that was read without counting its lines; the name is found in it. Lines were counted in the
text, not in a checkout, so that a first `--check` may find some off. Rows without links say so.

Recomputing is redundant only for the first optimizer step after a rollout: later steps train other
weights, and need the current ones' log-probability. Notes say where a repository takes several,
and where what was read does not look like its class.

To correct a row, edit `src/leangrpo/audit_manifest.yaml`, clone the repository at the row's commit
and run

```bash
leangrpo audit manifest --check checkouts
leangrpo audit manifest --render --out docs/manifest.md
```

The first compares every path, line range and anchor (a name that must stand within the lines) with
`checkouts/OWNER/NAME`, `checkouts/OWNER__NAME` or `checkouts/NAME`. It ends with 1 if one is wrong,
and with 2 if there is no checkout at all.
"""


def render(rows: Sequence[Row]) -> str:
    """The whole page, the same for the same rows."""
    return "\n".join(_page(rows))


def summary(rows: Sequence[Row]) -> str:
    """The counts in a sentence, as in the paper's appendix G."""
    n = counts(rows)
    again, together = n["recompute"], n[get_args(Verdict)[0]]
    return (
        f"{again} of {n['methods']} evaluate each trained transition again, {together} of {again} "
        f"in the process that sampled it; {n[WITHOUT]} do not recompute; "
        f"{n['unverified']} unverified."
    )


def link(row: Row, place: Place) -> str:
    """The permanent address of a place on GitHub."""
    address = f"https://github.com/{row.repository}/blob/{row.commit}/{quote(place.path)}"
    return address + (f"#L{place.lines[0]}-L{place.lines[1]}" if place.lines else "")


def _page(rows: Sequence[Row]) -> Iterator[str]:
    n = counts(rows)
    yield HEAD
    yield f"{summary(rows)} {n['read']} were read for this project."
    yield ""
    yield "| class | methods |"
    yield "|---|---|"
    for verdict in get_args(Verdict):
        yield f"| {verdict} | {n[verdict]} |"
    yield f"| all | {n['methods']} |"
    for verdict in get_args(Verdict):
        of_class = [row for row in rows if row.verdict == verdict]
        if of_class:
            yield from _section(verdict, of_class)
    yield ""


def _section(verdict: str, rows: Sequence[Row]) -> Iterator[str]:
    yield ""
    yield f"## {verdict[0].upper()}{verdict[1:]}"
    yield ""
    yield f"| method | repository | {' | '.join(PLACES)} | notes |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        cells = [row.method, _repository(row)]
        recorded = dict(row.places())
        cells += [_place(row, recorded[name]) if name in recorded else "" for name in PLACES]
        cells.append(row.notes if row.read else UNREAD)
        yield f"| {' | '.join(' '.join(cell.split()).replace('|', BAR) for cell in cells)} |"


def _repository(row: Row) -> str:
    if row.repository is None:
        return ""
    address = f"https://github.com/{row.repository}"
    if row.commit is None:
        return f"[{row.repository}]({address})"
    return f"[{row.repository}]({address}/tree/{row.commit}) at `{row.commit[:7]}`"


def _place(row: Row, place: Place) -> str:
    name = place.path.rsplit("/", 1)[-1]
    where = f"{place.lines[0]}-{place.lines[1]}" if place.lines else f"`{place.anchor}`"
    return f"[{name}, {where}]({link(row, place)})"
