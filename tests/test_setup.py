"""What ranks under sharding refuse, because they would not run the same forwards and backwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from leangrpo.config import load_config
from leangrpo.errors import LeanError
from leangrpo.setup import _check_ranks, make_layout

PREFIX = [
    "rollout={prompts: 2, generations: 4, initial_noise: group, share_prefix: true}",
    "selection={rule: window, size: 2, outside: deterministic, per: group}",
]
SAMPLE = [
    "rollout={prompts: 2, generations: 4}",
    "selection={rule: random, fraction: 0.5, per: sample}",
]
GROUP = [
    "rollout={prompts: 2, generations: 4}",
    "selection={rule: random, fraction: 0.5, per: group}",
]
CLASSIC = "parallel.layout=classic"


def check(settings: list[str], *, shards: int = 2, denoisers: int = 1) -> None:
    world: Any = SimpleNamespace(shards=shards, size=2)
    names = ["transformer", "transformer_2"][:denoisers]
    policy: Any = SimpleNamespace(denoisers=names, names=names)
    config = load_config("embedded", settings)
    _check_ranks(config, world, make_layout(config, world), policy)


@pytest.mark.parametrize(
    ("settings", "denoisers", "message"),
    [
        (
            [*PREFIX, CLASSIC],
            1,
            "`rollout.share_prefix` is True: ranks with different prompts would run prefixes of "
            "different lengths. Set selection.per=update, or parallel.shard=1.",
        ),
        (
            SAMPLE,
            2,
            r"`selection.per` is 'sample': ranks would differentiate different denoisers "
            r"\(transformer, transformer_2\) at once. Set it to update, or parallel.shard=1.",
        ),
        ([*GROUP, CLASSIC], 2, "`selection.per` is 'group': ranks would differentiate"),
    ],
)
def test_refused(settings: list[str], denoisers: int, message: str) -> None:
    with pytest.raises(LeanError, match=message):
        check(settings, denoisers=denoisers)
    check(settings, denoisers=denoisers, shards=1)


@pytest.mark.parametrize(
    ("settings", "denoisers"),
    [
        (PREFIX, 1),  # all ranks share the prompt, and so its steps
        (PREFIX, 2),
        (GROUP, 2),
        (SAMPLE, 1),
        ([*GROUP, CLASSIC], 1),
        ([*PREFIX, CLASSIC, "selection.per=update"], 2),
    ],
)
def test_allowed(settings: list[str], denoisers: int) -> None:
    check(settings, denoisers=denoisers)
