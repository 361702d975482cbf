"""The package's shape: who imports whom, what an import loads, how long a module is."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import leangrpo

PACKAGE = Path(leangrpo.__file__).parent
MODULES = {path.stem: path for path in sorted(PACKAGE.glob("*.py"))}
MAX_LINES = 500

# Slow to import: an error in a setting, or --help, must not wait for them.
HEAVY = ("torch", "diffusers", "transformers", "peft", "matplotlib", "tensorboard", "onnxruntime")


def imported(path: Path) -> set[str]:
    """The package's own modules a file imports, inside functions too, but not for typing only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_typing = [
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    ]
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in for_typing:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("leangrpo.")}
        elif isinstance(node, ast.ImportFrom):
            source = f"leangrpo.{node.module or ''}" if node.level else node.module or ""
            if source.rstrip(".") == "leangrpo":
                found |= {f"leangrpo.{alias.name}" for alias in node.names}
            elif source.startswith("leangrpo."):
                found.add(source)
    return {name.split(".")[1] for name in found} & set(MODULES)


def test_no_import_circle() -> None:
    graph = {name: imported(path) for name, path in MODULES.items()}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"modules import each other: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize("module", ["", ".config", ".errors", ".cli"])
def test_light_imports(module: str) -> None:
    code = f"import sys, leangrpo{module}; print(*(m for m in {HEAVY!r} if m in sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.split() == []


def test_public_names_resolve() -> None:
    for name in leangrpo.__all__:
        assert getattr(leangrpo, name) is not None
    assert set(dir(leangrpo)) == set(leangrpo.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = leangrpo.nothing


@pytest.mark.parametrize("name", MODULES)
def test_no_module_is_long(name: str) -> None:
    num_lines = len(MODULES[name].read_text(encoding="utf-8").splitlines())
    assert num_lines <= MAX_LINES, "over the budget means two ideas in one file"


FORBIDDEN = {
    "a leftover": r"\b(TODO|FIXME|XXX)\b|\bbreakpoint\(|\bpdb\b",
    "a path of one machine": r"(?<![\w.}])/(home|root|Users|work|mnt)/",
    "pickle, which runs code when read": r"\bimport pickle\b|\bpickle\.loads?\b",
    "diffusers' word for our schedule": r"\b(native|retain|reweight) scheduler\b",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_forbidden_words(what: str) -> None:
    files = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.yaml")]
    hits = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(FORBIDDEN[what], line, re.IGNORECASE)
    ]
    assert not hits, f"{what}:\n" + "\n".join(hits)
