"""One setting through several values: what the schedules gain at each of them."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from .bench import bench_variants, measure
from .bench_table import print_sweep
from .cli_options import load
from .config import Config
from .errors import LeanError, problem

POINTS = 5
"""Points of a range without a step."""
MOST = 100

FRACTION = "fraction"
"""Short for selection.fraction, with what else makes it count: rule fraction, and the last step a
candidate, so that 1 selects all."""

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER}):({_NUMBER})(?::({_NUMBER}))?")
_COMMA = re.compile(r",(?![^\[{]*[\]}])")  # not those inside a list


@dataclass(frozen=True)
class Point:
    """A value of the setting, as the settings have it, and all of them with it."""

    value: Any
    config: Config


def points(settings: Sequence[str], sweep: str) -> list[Point]:
    """The settings at every value of `KEY=V,V,...`, `KEY=A:B` or `KEY=A:B:STEP`.

    `A:B` are 5 values, evenly spaced; a step is counted from A, up to B. Raises LeanError for
    text of another form and, naming the value, for settings that are not allowed.
    """
    key, equals, text = sweep.partition("=")
    key = key.strip()
    if not equals or not key or not text.strip():
        rule = "it must be KEY=V,V,... or KEY=A:B or KEY=A:B:STEP"
        raise problem("--sweep", sweep, rule, "For example fraction=0.2:1.0.")
    found = []
    for value in values(text):
        try:
            config = load(with_value(settings, key, value))
        except LeanError as error:
            raise at(key, value, error) from error
        found.append(Point(_value(config, key), config))
    return found


def values(text: str) -> list[str]:
    """The values that `V,V,...`, `A:B` or `A:B:STEP` stands for, as they would be typed.

    >>> values("0.2:1.0")
    ['0.2', '0.4', '0.6', '0.8', '1.0']
    >>> values("4:10:4")
    ['4', '8']
    """
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        return [value.strip() for value in _COMMA.split(text)]
    a, b = Decimal(match[1]), Decimal(match[2])
    if match[3] is None:
        if a == b:
            raise problem("--sweep", text, "a range needs two ends that differ")
        return [_text(a + (b - a) * i / (POINTS - 1)) for i in range(POINTS)]
    step = Decimal(match[3])
    if not step or (b - a) / step < 0:
        raise problem("--sweep", text, f"a step of {step} never gets from {a} to {b}")
    number = int((b - a) / step) + 1
    if number > MOST:
        raise problem("--sweep", text, f"it has {number} values", f"Take at most {MOST}.")
    return [_text(a + step * i) for i in range(number)]


def with_value(settings: Sequence[str], key: str, value: str) -> list[str]:
    """Settings as they are typed, with one more; `fraction` brings what it needs with it."""
    if key != FRACTION:
        return [*settings, f"{key}={value}"]
    given = {word.partition("=")[0].strip() for word in settings if "=" in word}
    needed = {"selection.rule": "fraction", "selection.last": "true"}
    if "selection" not in given:
        needed = {name: needed[name] for name in needed if name not in given}
    more = [f"{name}={wanted}" for name, wanted in needed.items()]
    return [*settings, *more, f"selection.fraction={value}"]


def at(key: str, value: Any, error: LeanError) -> LeanError:
    """A refusal of a point, which says of which."""
    return LeanError(f"--sweep {key}={value}: {error}")


def check_points(
    text: str,
    chosen: Sequence[Point],
    names: Sequence[str] | None,
    check: Callable[[Config], None],
) -> None:
    """Raise LeanError, naming the value, where `check` refuses a point or a variant there is none.

    Nothing is loaded, so that a sweep does not end halfway for a mistake that could be seen.
    """
    for point in chosen:
        try:
            check(point.config)
            bench_variants(point.config, names)
        except LeanError as error:
            raise at(text.partition("=")[0].strip(), point.value, error) from error


def sweep(
    key: str,
    chosen: Sequence[Point],
    names: Sequence[str] | None,
    rounds: int,
    *,
    reward: bool = False,
) -> dict[str, Any]:
    """`measure` at each point, and one table: `points` are those results, each with its `value`.

    Give it what `check_points` has passed.
    """
    found = []
    for point in chosen:
        result = measure(point.config, names, rounds, reward=reward)
        found.append({"value": point.value, **result})
        gc.collect()  # a policy's hooks refer to it
    swept = {"sweep": key, "points": found}
    return print_sweep(swept) if found[0]["rank"] == 0 else swept


def _text(number: Decimal) -> str:
    return format(number, "f")


def _value(config: Config, key: str) -> Any:
    """What the settings have under a key."""
    node: Any = config.model_dump(mode="json")
    for part in ("selection.fraction" if key == FRACTION else key).split("."):
        node = node[int(part)] if isinstance(node, list) else node[part]
    return node
