"""The settings tree in words: a row per setting, for the help, the complaints and the docs."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel

from .settings import Config


class Row(NamedTuple):
    """One setting, for the help and the docs."""

    name: str
    type: str
    default: str
    description: str


def describe_settings() -> list[Row]:
    """Every setting as a row, in the tree's order; a list's entries stand under `.N`."""
    return list(_rows(Config, ""))


def _rows(model: type[BaseModel], prefix: str) -> Iterator[Row]:
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        inner = field.annotation
        if branch(inner):
            yield from _rows(inner, f"{path}.")  # type: ignore[arg-type]
            continue
        default = "(required)" if field.is_required() else yaml_text(field.default)
        yield Row(path, _type_text(inner), default, field.description or "")
        entry = entry_type(inner)
        if branch(entry):
            yield from _rows(entry, f"{path}.N.")  # type: ignore[arg-type]


def branch(annotation: object) -> bool:
    """Whether an annotation is a branch of the tree rather than a value."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def entry_type(annotation: object) -> object:
    """What `tuple[X, ...]` holds, else None."""
    args = get_args(annotation)
    return args[0] if get_origin(annotation) is tuple and args[-1] is Ellipsis else None


def yaml_text(value: object) -> str:
    """A default the way it is written in YAML's flow style."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple):
        return f"[{', '.join(map(yaml_text, value))}]"
    if isinstance(value, BaseModel):
        inside = ", ".join(f"{k}: {yaml_text(v)}" for k, v in value)
        return f"{{{inside}}}"
    return '""' if value == "" else str(value)


def _type_text(annotation: object) -> str:
    """An annotation in a user's words."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_text(args[0])
    if origin is Literal:
        return ", ".join(map(str, args))
    if origin in (Union, types.UnionType):
        return " or ".join(_type_text(a) for a in args)
    if origin is tuple:
        if args[-1] is Ellipsis:
            return f"list of {_type_text(args[0])}"
        return f"{len(args)} x {_type_text(args[0])}"
    if branch(annotation):
        return "mappings"
    words: dict[object, str] = {
        int: "integer",
        float: "number",
        str: "text",
        bool: "true, false",
        dict: "mapping",
    }
    return words.get(origin or annotation, "null")
