"""The examples do what they say, and stay as short as they are meant to be."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from leangrpo import Native, Retain, Reweight

EXAMPLES = Path(__file__).parents[1] / "examples"
MAX_LINES = 60


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda f: f.stem)
def test_short_and_without_the_trainer(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module)
        elif isinstance(node, ast.Import):
            imported |= {name.name for name in node.names}
    assert "leangrpo" in imported
    assert not {m for m in imported if m and m.startswith("leangrpo.")}, "the public names do"


@pytest.mark.slow
def test_minimal() -> None:
    example = load("minimal")
    example.GENERATIONS = 3
    found = {name: example.main(name, 2) for name in ("native", "retain", "reweight")}
    assert len({history[0] for history in found.values()}) == 1, "the same pictures to begin with"
    for history in found.values():
        assert history == pytest.approx(found["native"], rel=1e-4)
        assert history[1] != history[0]


def test_foreign_loop() -> None:
    """A trainer that knows no pipeline gets the same run from each schedule, and it learns."""
    example = load("foreign_loop")
    histories: list[list[float]] = [example.train(s) for s in (Native, Retain, Reweight)]
    for history in histories:
        assert history == pytest.approx(histories[0], rel=1e-3, abs=1e-3)
        assert history[-1] > history[0] + 0.5


def test_command_lines(capsys: Any) -> None:
    """What each file's first lines tell to type is a file of that name."""
    for file in EXAMPLES.glob("*.py"):
        assert f"python examples/{file.name}" in file.read_text(encoding="utf-8")
