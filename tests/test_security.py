"""Nothing is executed that a user has not named: what the package calls, and what it never does."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import yaml

import leangrpo
from leangrpo.config import _Loader

PACKAGE = Path(leangrpo.__file__).parent
FILES = sorted(PACKAGE.glob("*.py"))

UNSAFE_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "marshal",
    "shelve",
    "dill",
    "joblib",
    "cloudpickle",
}
RUNS_CODE = {"eval", "exec", "compile", "__import__"}
IMPORTS = {
    ("config.py", "import_module"),  # module:function, which a user has written
    ("verify.py", "import_module"),  # the same, of a schedule
    ("twin.py", "import_module"),  # below diffusers and transformers only
    ("__init__.py", "import_module"),  # the package's own
}
UNPICKLES = {("processes.py", "recv")}
"""What a reward's process is given by the trainer that has started it; never the other way."""


def findings(text: str, name: str = "x.py") -> list[str]:
    """What in a module's source could run code that comes from a file or a network."""
    found = []
    for node in ast.walk(ast.parse(text)):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        found += [f"imports {m}" for m in modules if m.split(".")[0] in UNSAFE_MODULES]
        if not isinstance(node, ast.Call):
            continue
        function, last = ast.unparse(node.func), ast.unparse(node.func).rpartition(".")[2]
        options = {k.arg: ast.unparse(k.value) for k in node.keywords}
        if function in RUNS_CODE or function in ("os.system", "os.popen"):
            found.append(f"calls {function}")
        if function == "torch.load" and options.get("weights_only") != "True":
            found.append("torch.load without weights_only=True")
        if last in ("load", "load_all", "full_load", "unsafe_load") and function.startswith(
            "yaml."
        ):
            found.append(f"{function}: yaml.safe_load, or a safe loader")
        if options.get("allow_pickle") == "True" or options.get("shell") == "True":
            found.append(f"{function} with {options}")
        if options.get("trust_remote_code") == "True":
            found.append(f"{function} trusts remote code")
        if last == "import_module" and (name, last) not in IMPORTS:
            found.append("imports a module by its name")
        if last == "recv" and (name, last) not in UNPICKLES:
            found.append("unpickles what a pipe holds")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_nothing_here_runs_what_it_reads(path: Path) -> None:
    assert findings(path.read_text(encoding="utf-8"), path.name) == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "from pickle import loads", "eval(x)", "exec(x)", "torch.load(f)",
        "torch.load(f, weights_only=False)", "yaml.load(f, Loader=L)", "yaml.unsafe_load(f)",
        "np.load(f, allow_pickle=True)", "os.system(x)", "run(x, shell=True)", "connection.recv()",
        "P.from_pretrained(x, trust_remote_code=True)", "importlib.import_module(x)",
    ],
)  # fmt: skip
def test_what_would_be_found(line: str) -> None:
    assert findings(line)


def test_the_settings_loader_is_a_safe_one() -> None:
    assert issubclass(_Loader, yaml.SafeLoader)
    for tag in ("python/object/apply:os.system", "python/name:os.system", "python/module:os"):
        loader = _Loader(f"x: !!{tag} [true]")
        node = loader.get_single_node()
        with pytest.raises(yaml.YAMLError, match="could not determine a constructor"):
            loader.construct_document(node)
