"""What the documents say exists, parses and runs."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

import leangrpo
from leangrpo.cli import app
from leangrpo.config import load_config

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
IDS = [str(p.relative_to(ROOT)) for p in PAGES]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles]
            assert anchor in slugs, target


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_python_compiles_and_its_names_exist(page: Path) -> None:
    for block in blocks(page, "python"):
        tree = ast.parse(block)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "leangrpo":
                assert all(hasattr(leangrpo, a.name) for a in node.names), block
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert node.value.id != "lean" or hasattr(leangrpo, node.attr), node.attr


def test_the_readmes_loop_runs() -> None:
    (loop,) = [b for b in blocks(ROOT / "README.md", "python") if "schedule.finish()" in b]
    names: dict[str, object] = {}
    exec(compile(loop, "README.md", "exec"), names)
    policy = names["policy"]
    assert isinstance(policy, leangrpo.Policy)
    assert all(p.grad is not None for p in policy.parameters)


def command_lines() -> list[str]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for block in re.findall(r"```(?:bash|sh)\n(.*?)```", text, re.DOTALL):
            found += [line for line in block.splitlines() if "leangrpo " in line]
    return found


def test_there_are_command_lines() -> None:
    assert len(command_lines()) >= 10


@pytest.mark.parametrize("line", command_lines())
def test_command_line_parses(line: str) -> None:
    words = shlex.split(line, comments=True)
    start = next(i for i, w in enumerate(words) if w == "leangrpo")
    name, *arguments = words[start + 1 :]
    command = get_command(app).commands[name]  # type: ignore[attr-defined]
    if name in ("recipes", "audit") and arguments:
        command, arguments = command.commands[arguments[0]], arguments[1:]
    context = command.make_context(name, list(arguments))
    settings = list(context.params.get("settings") or [])
    if settings and not settings[0].endswith(".yaml") and not settings[0].startswith("runs/"):
        source = settings.pop(0) if "=" not in settings[0] else None
        load_config(source, settings)


def test_the_readmes_tree_is_the_package() -> None:
    (tree,) = [b for b in blocks(ROOT / "README.md", "text") if b.startswith("src/leangrpo/")]
    listed = {line.split()[0] for line in tree.splitlines() if line.startswith("  ")}
    package = {p.name for p in (ROOT / "src/leangrpo").glob("*.py") if not p.name.startswith("__")}
    folders = {"recipes/", "embedded/"}
    assert listed == package | folders
    for line in tree.splitlines():
        if not line.startswith(" "):
            assert (ROOT / line.split()[0]).exists(), line


def test_the_index_leads_to_every_page() -> None:
    text = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"({page.name})" in text, page.name
