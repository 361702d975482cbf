"""The manifest of public trainers: its rows, their comparison with checkouts, the page."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from leangrpo.cli import app
from leangrpo.errors import LeanError
from leangrpo.manifest import UNREAD, counts, load_rows
from leangrpo.manifest_page import link, render

ROOT = Path(__file__).resolve().parents[1]
Tree = dict[str, Any]

# Twelve lines: the rollout is on 2-4, the update on 7-9.
CODE = """\
import model
def sample(x):
    with no_grad():
        return step(model(x))

# training
def update(x):
    loss = log_prob(model(x))
    loss.backward()


main()
"""


@dataclass(frozen=True)
class Ended:
    """How `leangrpo audit manifest` ended."""

    code: int
    out: str
    error: str


def run(*words: object) -> Ended:
    result = CliRunner().invoke(app, ["audit", "manifest", *map(str, words)])
    if result.exception and not isinstance(result.exception, SystemExit):
        assert isinstance(result.exception, LeanError), result.exception
        return Ended(2, result.output, str(result.exception))
    return Ended(result.exit_code, result.output, "")


def git(folder: Path, *words: str) -> str:
    names = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *names, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path, code: str = CODE) -> str:
    """Write the trainer and commit it, in a new repository if there is none."""
    (folder / "train").mkdir(parents=True, exist_ok=True)
    (folder / "train/loop.py").write_text(code)
    if not (folder / ".git").exists():
        git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "a trainer")
    return git(folder, "rev-parse", "HEAD")


def row(commit: str = "a" * 40, **changes: Any) -> Tree:
    place = {"path": "train/loop.py"}
    return {
        "method": "Example",
        "repository": "owner/name",
        "commit": commit,
        "class": "recomputes, colocated",
        "read": True,
        "rollout": {**place, "lines": [2, 4], "anchor": "def sample"},
        "update": {**place, "lines": [7, 9], "anchor": "log_prob("},
        "backend": {**place, "anchor": "main()"},
        **changes,
    }


def unread(method: str = "Unread") -> Tree:
    return {"method": method, "class": "no target recomputation", "read": False, "notes": UNREAD}


def write(folder: Path, *rows: Tree) -> Path:
    file = folder / "manifest.yaml"
    file.write_text(yaml.safe_dump({"rows": list(rows)}))
    return file


@pytest.mark.parametrize("layout", ["owner/name", "owner__name", "name"])
def test_a_checkout_that_agrees(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, row(commit(tmp_path / "all" / layout)), unread())
    # As inside a git hook; what is checked is the checkout nonetheless.
    monkeypatch.setenv("GIT_DIR", str(ROOT / ".git"))
    ended = run("--check", tmp_path / "all", "--file", file, "--json", tmp_path / "out.json")
    assert (ended.code, ended.out) == (0, "1 of 1 read methods checked, 0 faults\n")
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["checked"], result["faults"], result["findings"]) == (1, 0, [])
    assert result["rows"][0]["update"]["lines"] == [7, 9]


def beyond_the_end(checkout: Path, tree: Tree) -> None:
    tree["update"]["lines"] = [7, 13]


def shifted(checkout: Path, tree: Tree) -> None:
    tree["commit"] = commit(checkout, "# a\n# licence\n# head\n" + CODE)
    tree["rollout"]["lines"] = [5, 7]


def anchor_gone(checkout: Path, tree: Tree) -> None:
    tree["backend"]["anchor"] = "accelerator"


def file_gone(checkout: Path, tree: Tree) -> None:
    for name in ("rollout", "backend"):
        tree[name]["path"] = "other.py"
    (checkout / "other.py").write_text(CODE)
    (checkout / "train/loop.py").unlink()


def another_commit(checkout: Path, tree: Tree) -> None:
    commit(checkout, CODE + "more\n")


def no_commit_yet(checkout: Path, tree: Tree) -> None:
    subprocess.run(["rm", "-rf", str(checkout / ".git")], check=True)
    git(checkout, "init", "--quiet")


def plain_folder(checkout: Path, tree: Tree) -> None:
    """The folder's files belong to a repository further up, whose HEAD is not the checkout's."""
    subprocess.run(["rm", "-rf", str(checkout / ".git")], check=True)
    tree["commit"] = commit(checkout.parent)


@pytest.mark.parametrize(
    ("breaks", "kind", "said"),
    [
        (beyond_the_end, "wrong line range", "train/loop.py lines 7-13: the file has 12 lines"),
        (shifted, "wrong line range", "lines 7-9: 'log_prob(' is not there, it is on line 11"),
        (anchor_gone, "wrong line range", "lines 1-12: 'accelerator' is not there, nor in the"),
        (file_gone, "missing file", "update: "),
        (another_commit, "commit mismatch", "its lines were not compared"),
        (no_commit_yet, "not a git checkout", "owner/name"),
        (plain_folder, "not a git checkout", "owner/name"),
    ],
)
def test_a_fault_is_caught(
    breaks: Callable[[Path, Tree], None], kind: str, said: str, tmp_path: Path
) -> None:
    checkout = tmp_path / "all/owner/name"
    tree = row(commit(checkout))
    breaks(checkout, tree)
    file = write(tmp_path, tree)
    ended = run("--check", tmp_path / "all", "--file", file, "--json", tmp_path / "out.json")
    assert ended.code == 1
    assert f"Example: {kind}: " in ended.out and said in ended.out
    assert ended.out.endswith("1 of 1 read methods checked, 1 faults\n")
    (finding,) = json.loads((tmp_path / "out.json").read_text())["findings"]
    assert finding["kind"] == kind


def test_a_missing_checkout_is_told_and_no_fault(tmp_path: Path) -> None:
    here = row(commit(tmp_path / "all/owner/name"))
    file = write(tmp_path, here, row(method="Elsewhere", repository="owner/other"))
    ended = run("--check", tmp_path / "all", "--file", file)
    assert ended.code == 0
    assert "Elsewhere: not checked: no checkout of owner/other" in ended.out
    assert "1 of 2 read methods checked, 0 faults" in ended.out


@pytest.mark.parametrize("folder", ["empty", "absent"])
def test_nothing_to_check_is_no_success(folder: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    ended = run("--check", tmp_path / folder)
    assert ended.code == 2 and "`--check` is" in ended.error


PLACE = {"path": "a.py", "lines": [1, 2], "anchor": "f"}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row(), row(method="EXAMPLE")], "`Example` has 2 rows"),
        ([row(commit="abc1234")], "Example: `commit` is 'abc1234': must be all 40"),
        ([row(commit=int("1" * 40))], "`commit` is 1111"),
        ([row(update={**PLACE, "lines": [9, 7]})], "`update.lines` is [9, 7]: must be [first, las"),
        ([row(update={**PLACE, "lines": [0, 7]})], "`update.lines` is [0, 7]: must be [first, las"),
        ([row(update={**PLACE, "lines": [7]})], "`update.lines.1`"),
        ([row(update={**PLACE, "path": "../a.py"})], "`update.path` is '../a.py': must be a path"),
        ([row(update={**PLACE, "anchor": " "})], "`update.anchor` is ' ': must be text"),
        ([row(repository="owner")], "`repository` is 'owner': must be owner/name"),
        ([{**row(), "class": "recomputes"}], "`class` is 'recomputes'"),
        ([row(commt="x")], "`commt` is 'x'"),
        ([row(update=None)], "Example: has read: true and must name update"),
        ([row(commit=None, repository=None)], "must name repository and commit"),
        ([row(notes=UNREAD)], "its notes must not say"),
        ([{**unread(), "update": PLACE}], "Unread: has read: false and must not name"),
        ([{**unread(), "notes": "somewhere"}], "its notes must be exactly"),
        ([unread(), {}], "row 2: `method`"),
        ([], "`rows` is []"),
    ],
)
def test_mistakes_in_rows(rows: list[Tree], said: str, tmp_path: Path) -> None:
    file = write(tmp_path, *rows)
    ended = run("--file", file)
    assert ended.code == 2
    assert str(file) in ended.error and said in ended.error


@pytest.mark.parametrize("text", ["rows: [", "", "- a", "rows: 3", "\x00"])
def test_a_file_that_is_no_manifest(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    ended = run("--file", tmp_path / "a.yaml")
    assert ended.code == 2 and "a.yaml" in ended.error


@pytest.mark.parametrize(
    "words", [("--out", "a.md"), ("--check", ".", "--render"), ("--file", "no.yaml")]
)
def test_options_that_do_not_fit(words: tuple[str, ...]) -> None:
    assert run(*words).code == 2


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    ended = run("--render", "--out", tmp_path / "absent/page.md")
    assert ended.code == 2 and "--out" in ended.error


def test_the_papers_counts() -> None:
    page = run("--render").out
    assert "23 of 32 evaluate each trained transition again, 22 of 23 in the process" in page
    assert "9 do not recompute; 0 unverified." in page
    assert "| recomputes, separate processes | 1 |" in page
    assert "23 of 32" in run().out


def test_counts_are_of_the_rows() -> None:
    rows = load_rows()
    without = [row for row in rows if row.method not in ("DDPO", "SRPO", "B2-DiffuRL")]
    assert "21 of 29 evaluate each trained transition again, 21 of 21 in the" in render(without)
    assert counts(without)["no target recomputation"] == 8
    assert "separate processes" not in [row.verdict for row in without]


def test_the_page_is_the_renderings() -> None:
    page = (ROOT / "docs/manifest.md").read_text(encoding="utf-8")
    assert page == render(load_rows()), (
        "run leangrpo audit manifest --render --out docs/manifest.md"
    )


def test_links_are_permanent() -> None:
    rows = load_rows()
    page = render(rows)
    (ddpo,) = [row for row in rows if row.method == "DDPO"]
    assert ddpo.update is not None and ddpo.commit is not None
    address = link(ddpo, ddpo.update)
    assert address.startswith(f"https://github.com/kvablack/ddpo-pytorch/blob/{ddpo.commit}/")
    assert address.endswith("#L487-L577")
    for row in rows:
        assert all(link(row, place) in page for _, place in row.places())
        assert row.read or row.notes == UNREAD


def test_cells_keep_their_columns(tmp_path: Path) -> None:
    rows = load_rows(write(tmp_path, row(notes="one | two\nthree")))
    (line,) = [line for line in render(rows).splitlines() if line.startswith("| Example")]
    assert r"one \| two three" in line
    assert line.replace(r"\|", "").count("|") == 7
