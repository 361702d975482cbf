"""Mistakes in settings in a user's words: pydantic's complaints, and names that do not exist."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches

from pydantic import ValidationError

from .describe import describe_settings
from .errors import LeanError, problem

_WORDS = {
    "int_type": "it must be a whole number",
    "int_parsing": "it must be a whole number",
    "int_from_float": "it must be a whole number",
    "float_type": "it must be a number",
    "float_parsing": "it must be a number",
    "bool_type": "it must be true or false",
    "bool_parsing": "it must be true or false",
    "string_type": "it must be text",
    "string_too_short": "it must not be empty",
    "tuple_type": "it must be a list",
    "too_short": "it must have at least {min_length} entries",
    "too_long": "it must have {max_length} entries",
    "dict_type": "it must be a mapping",
    "model_type": "it must be a mapping of settings",
    "model_attributes_type": "it must be a mapping of settings",
    "finite_number": "it must be finite",
    "greater_than": "it must be greater than {gt}",
    "greater_than_equal": "it must be at least {ge}",
    "less_than": "it must be less than {lt}",
    "less_than_equal": "it must be at most {le}",
    "missing": "it must be given",
    "invalid_key": "a setting's name must be text",
}


class _Verbatim(str):
    """Text whose repr is itself, to stand in `problem` for a long value."""

    __repr__ = str.__str__


def complaints(error: ValidationError) -> Iterator[str]:
    """One line for each mistake pydantic found."""
    for item in error.errors(include_url=False):
        kind, value, context = item["type"], item["input"], item.get("ctx", {})
        *parents, last = item["loc"]
        # Pydantic puts the branch of a union into the location; it has brackets, settings do not.
        path = ".".join([*(str(p) for p in parents if "[" not in str(p)), str(last)])
        if kind == "extra_forbidden":
            yield str(unknown_setting(path, value))
        elif kind == "literal_error":
            allowed = _choices(path)
            remedy = did_you_mean(str(value), allowed)
            yield str(problem(path, _short(value), f"it must be {_or(allowed)}", remedy))
        elif kind == "value_error":
            yield str(problem(path, _short(value), f"it {context['error']}"))
        else:
            shown = None if kind == "missing" else _short(value)
            rule = _WORDS.get(kind, item["msg"]).format(**context)
            yield str(problem(path, shown, rule))


def _short(value: object) -> object:
    text = repr(value)
    return value if len(text) <= 80 else _Verbatim(f"{text[:77]}...")


def _or(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The remedy that names the nearest of `names`, or nothing."""
    close = get_close_matches(name, list(names), n=1)
    return f"Did you mean `{close[0]}`?" if close else ""


def _choices(path: str) -> list[str]:
    """The literal values of a setting, read from the row that documents it."""
    rows = {row.name: row.type for row in describe_settings()}
    return rows[re.sub(r"\.\d+", ".N", path)].split(", ")


def setting_paths() -> list[str]:
    """Every valid dotted path, branches included, with N for the entries of a list."""
    rows = [row.name for row in describe_settings()]
    heads = {".".join(row.split(".")[:n]) for row in rows for n in range(1, row.count(".") + 1)}
    return [*rows, *sorted(head for head in heads if not head.endswith(".N"))]


def unknown_setting(path: str, value: object) -> LeanError:
    """The complaint about a name no setting has, with the nearest one that exists."""
    numbers = re.findall(r"(?<=\.)\d+(?=\.|$)", path)
    given = re.sub(r"(?<=\.)\d+(?=\.|$)", "N", path)
    leaf = given.rpartition(".")[2]
    paths = setting_paths()
    same_leaf = [p for p in paths if p.rpartition(".")[2] == leaf]
    # a leaf alone is nearest to the shortest path; the tree has what is set most often first
    near = same_leaf[:1] if given == leaf else get_close_matches(given, same_leaf, n=1, cutoff=0.0)
    near = near or get_close_matches(given, paths, n=1, cutoff=0.7)
    if not near and (leaves := get_close_matches(leaf, [p.rpartition(".")[2] for p in paths], n=1)):
        near = [p for p in paths if p.rpartition(".")[2] == leaves[0]]
    remedy = "All of them are listed in docs/configuration.md."
    if near:
        found = near[0]
        for number in numbers:
            found = found.replace(".N", f".{number}", 1)
        remedy = f"Did you mean `{found.replace('.N', '.0')}`?"
    return problem(path, _short(value), "no setting has this name", remedy)
