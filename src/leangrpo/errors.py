"""Errors that tell a user what is wrong and what to do about it."""

from __future__ import annotations

from collections.abc import Collection, Hashable


class LeanError(ValueError):
    """Something the user can mend; the command line prints its text and exits with 2."""


class StaleGraphError(LeanError):
    """A gradient of one policy version was about to be used on another."""


class NonFiniteError(LeanError):
    """An update holds NaN or infinity; `keys` are the trajectories it came from, where known."""

    def __init__(self, text: str, keys: Collection[Hashable] = ()) -> None:
        super().__init__(text)
        self.keys = frozenset(keys)


class RewardError(LeanError):
    """A reward raised, or returned something that is no list of finite scores."""


class UnavailableError(RewardError):
    """A reward gave no answer, and another try may: it hung, it died, a connection failed."""


def problem(setting: str, value: object, allowed: str, remedy: str = "") -> LeanError:
    """Build the one form all complaints about a setting have.

    `setting` is the dotted name, `value` what was given, `allowed` the rule it breaks, and
    `remedy` what to do instead.
    """
    text = f"`{setting}` is {value!r}: {allowed.rstrip('.')}."
    return LeanError(f"{text} {remedy}".strip())
