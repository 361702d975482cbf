"""From a recipe or a file and some overrides to settings, or to one line per mistake.

Imports neither torch nor diffusers: a mistake is reported before anything slow happens.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from .complaints import complaints, setting_paths, unknown_setting
from .cookbook import DEFAULT_RUN, Layer, is_recipe, layer_of, layers, recipe_names, recipe_text
from .describe import describe_settings
from .errors import LeanError, problem
from .settings import Config

__all__ = [
    "Config",
    "config_hash",
    "describe_settings",
    "load_config",
    "load_object",
    "recipe_names",
    "recipe_text",
    "to_yaml",
]

PACKAGE = Path(__file__).parent
EMBEDDED = PACKAGE / "embedded"
# What `model.pipeline` calls the pipelines inside the package, and their folders.
EMBEDDED_PIPELINES = {"embedded": EMBEDDED / "pipeline", "embedded-ddim": EMBEDDED / "ddim"}


# With another rule, what was said of the one before would only contradict it.
OF_A_RULE = {"steps": None, "size": None, "range": None}


MOST, MOST_NODES, DEEPEST = 1 << 20, 100_000, 40
"""Characters, entries and levels of settings: far more than any."""

RETIRED: dict[tuple[str, ...], object] = {("model", "lora", "dropout"): 0.0}
"""Settings that runs of older versions have, and the value with which they mean nothing."""

OF_A_RECIPE = ("extends", "algorithm")
"""What `cookbook` reads in a recipe; no settings."""


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice and reads 1e-4 as a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark
                )
            if isinstance(key.value, str):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


# YAML 1.1 wants a dot and a sign in the exponent, and would read 1e-4 as text.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def load_config(source: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read settings from a recipe's name or a YAML file (None: the embedded recipe).

    A recipe may be `model+algorithm` (`cookbook`), and a file begin with `extends: RECIPE`.
    `overrides` are `key.path=value` with the value in YAML; `rewards.0.weight=2` reaches into a
    list. What a file leaves out keeps its default. Raises LeanError with one line per mistake.
    """
    name, some = _read_source(DEFAULT_RUN if source is None else source)
    tree = Config(recipe=name).model_dump(mode="json")
    for layer in some:
        given = _mapping(layer)
        for path, harmless in RETIRED.items():
            _retire(given, path, harmless)
        selection = given.get("selection")
        if isinstance(selection, dict) and "rule" in selection:
            tree["selection"] |= OF_A_RULE
        tree = _merge(tree, {k: v for k, v in given.items() if k not in OF_A_RECIPE})
    return _finished(tree, overrides)


def _retire(tree: Any, path: tuple[str, ...], harmless: object) -> None:
    """Drop a setting where it has this value."""
    *above, name = path
    for part in above:
        tree = tree.get(part) if isinstance(tree, dict) else None
    if isinstance(tree, dict) and name in tree and tree[name] == harmless:
        del tree[name]


def bare_config(pipeline: str, overrides: Sequence[str] = ()) -> Config:
    """The defaults with a pipeline and a few steps, for looking at it; `load_config` otherwise."""
    tree = Config(recipe="check").model_dump(mode="json")
    tree["model"]["pipeline"] = pipeline
    tree["sampling"]["steps"] = 4
    return _finished(tree, overrides)


def _finished(tree: dict[str, Any], overrides: Sequence[str]) -> Config:
    """The tree with its overrides, checked; raises LeanError with one line per mistake."""
    if any(o.partition("=")[0].strip() == "selection.rule" for o in overrides):
        tree["selection"] |= OF_A_RULE
    mistakes = []
    for override in overrides:
        try:
            _apply(tree, override)
        except LeanError as error:
            mistakes.append(str(error))
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        mistakes += complaints(error)
    if mistakes:
        raise LeanError("\n".join(mistakes))
    return config


def described(kind: str, name: str) -> str:
    """What a recipe file says it is, in its `description`."""
    return str(_mapping(layer_of(kind, name)).get("description", ""))


def _read_source(source: str | Path) -> tuple[str, list[Layer]]:
    """The name of a source and its layers, each to be merged over the ones before."""
    path = Path(source).expanduser()
    if (isinstance(source, str) and is_recipe(source)) or not (
        isinstance(source, Path) or path.suffix in (".yaml", ".yml") or _is_file(path)
    ):
        return str(source), layers(str(source))
    own = Layer(read_text("config", path), str(path))
    base = _mapping(own).get("extends")
    if base is None:
        return path.stem, [own]
    if not isinstance(base, str):
        rule = "it must be the name of one recipe, such as flux1-dev+mixgrpo"
        raise problem("extends", base, rule)
    return path.stem, [*layers(base), own]


def _mapping(layer: Layer) -> dict[str, Any]:
    given = parse_yaml(layer.text, layer.where)
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise LeanError(
            f"{layer.where} holds no mapping of settings. Write lines like `updates: 40`."
        )
    return given


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long, or with a null byte
        return False


def read_text(setting: str, path: Path) -> str:
    """A UTF-8 text file, or a LeanError in the words of `setting`."""
    remedy = f"Relative paths start from {Path.cwd()}."
    try:
        if path.is_char_device() or path.is_block_device():
            raise problem(setting, str(path), "it is a device, not a text file")
        return path.read_text(encoding="utf-8-sig")
    except LeanError:
        raise
    except FileNotFoundError:
        raise problem(setting, str(path), "there is no such file", remedy) from None
    except IsADirectoryError:
        raise problem(setting, str(path), "it is a folder, not a text file") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        rule = f"it is not UTF-8 text (line {line}, byte {error.start})"
        raise problem(setting, str(path), rule, "Save it as UTF-8.") from None
    except (OSError, ValueError) as error:
        raise problem(setting, str(path), f"it cannot be read: {error}") from None


def parse_yaml(text: str, where: str) -> Any:
    """YAML's value; a LeanError names a mistake with its line, and `where` it was found.

    What is too long, too deep or, written out without its aliases, too large is refused before
    anything is made of it.
    """
    try:
        if len(text) > MOST:
            raise yaml.YAMLError(f"it is longer than {MOST} characters")
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _measure(node, {})
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise LeanError(f"{where}{place} is not valid YAML: {error.problem}.") from None
    except (yaml.YAMLError, ValueError, RecursionError, AttributeError, TypeError) as error:
        line = " ".join(str(error).split())
        raise LeanError(f"{where} is not valid YAML: {line or type(error).__name__}.") from None


def _measure(node: yaml.Node, sizes: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """How many nodes there are with every alias written out, and how deep they go."""
    if id(node) not in sizes:
        sizes[id(node)] = MOST, MOST  # inside itself
        below: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            below = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            below = node.value
        found = [_measure(part, sizes) for part in below]
        num, depth = 1 + sum(n for n, _ in found), 1 + max((d for _, d in found), default=0)
        if num >= MOST_NODES or depth > DEEPEST:
            what = f"{MOST_NODES} entries" if num >= MOST_NODES else f"{DEEPEST} levels"
            raise yaml.YAMLError(f"it has more than {what}, or aliases inside themselves")
        sizes[id(node)] = num, depth
    return sizes[id(node)]


def _merge(base: dict[Any, Any], over: dict[Any, Any]) -> dict[Any, Any]:
    """`base` with the values of `over`, branch by branch."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if not isinstance(old, dict):
            merged[key] = value
        elif value is not None:  # a branch with nothing under it (`run:`) keeps its defaults
            merged[key] = _merge(old, value) if isinstance(value, dict) else value
    return merged


def _apply(tree: dict[Any, Any], override: str) -> None:
    """Set one `key.path=value` in the raw tree. Unknown last parts are left to validation."""
    path, equals, text = override.partition("=")
    path = path.strip()
    if not equals or not path:
        raise problem("override", override, "it must be setting=value", "Example: updates=3.")
    value = parse_yaml(text, f"the value given for {path}")
    node: Any = tree
    parts = path.split(".")
    for depth, part in enumerate(parts):
        above, last = ".".join(parts[:depth]), depth == len(parts) - 1
        if isinstance(node, list):
            if part not in map(str, range(len(node) + 1)):
                rule = f"the list has {len(node)} entries, numbered from 0"
                raise problem(above, node, rule, f"`{part}` is none of them, nor the next one.")
            if int(part) == len(node):
                node.append({})
            key: Any = int(part)
        elif isinstance(node, dict):
            if not last and part not in node:
                if above not in ("sampling.call", "prompts.images"):
                    raise unknown_setting(path, value)
                node[part] = {}
            key = part
        elif above in setting_paths():
            rule = "it has no settings of its own"
            raise problem(above, node, rule, f"Set it as a whole: {above}=VALUE.")
        else:
            raise unknown_setting(path, value)
        if last:
            node[key] = value
        else:
            node = node[key]


# -- what else the trainer needs -------------------------------------------------------------------


def load_object(setting: str, target: str) -> Any:
    """What `module:name` stands for, the working folder included in the search.

    Raises LeanError in the words of `setting` if it cannot be imported or called.
    """
    module, _, name = target.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # a user's module may raise anything while it is imported
        rule = f"it cannot be imported: {type(error).__name__}: {' '.join(str(error).split())}"
        remedy = f"Modules are searched in {os.getcwd()} and the installed packages."
        raise problem(setting, target, rule, remedy) from error
    if not callable(found):
        raise problem(setting, target, f"it is not callable but {type(found).__name__}")
    return found


def to_yaml(config: Config) -> str:
    """All settings as YAML that `load_config` reads back to an equal Config."""
    tree = config.model_dump()
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, default_flow_style=None)


FREE: dict[str, Any] = {
    branch: True
    for branch in (
        *("run", "checkpoint", "updates", "recipe", "description"),
        *("schedule", "parallel", "memory", "scoring"),
    )
} | {"rollout": {"ahead", "micro_batch"}, "model": {"activation_checkpointing"}}
"""Branches of the settings that may change when a run is resumed."""


def differences(config: Config, other: Config) -> list[str]:
    """In words, where two runs' settings determine other numbers: "`seed` is 4 and was 0"."""
    one, two = (c.model_dump(mode="json", exclude=FREE) for c in (config, other))

    def walk(path: str, a: Any, b: Any) -> list[str]:
        if isinstance(a, dict) and isinstance(b, dict):
            names = dict.fromkeys([*a, *b])
            return [w for n in names for w in walk(f"{path}{n}.", a.get(n), b.get(n))]
        return [] if a == b else [f"`{path[:-1]}` is {a!r} and was {b!r}"]

    return walk("", one, two)


def config_hash(config: Config) -> str:
    """Sha256 of the settings that determine the numbers.

    Left out: `run`, `checkpoint`, `updates`, `recipe`, `description`, and what changes rounding at
    most: `schedule`, `parallel`, `memory`, `scoring`, `rollout.ahead`, `rollout.micro_batch` and
    `model.activation_checkpointing`.
    """
    tree = config.model_dump(mode="json", exclude=FREE)
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def settings_table() -> str:
    """The settings as the Markdown table of docs/configuration.md."""
    lines = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for name, kind, default, description in describe_settings():
        meaning = description.replace("|", "\\|")
        lines.append(f"| `{name}` | {kind} | `{default}` | {meaning} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(settings_table())
