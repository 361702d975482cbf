"""Settings of rewards that cannot work, refused before anything is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from leangrpo.catalogue import CATALOGUE, OPTIONS
from leangrpo.checks import check
from leangrpo.config import load_config
from leangrpo.errors import LeanError
from leangrpo.reward_checks import check_reward
from leangrpo.settings import Reward


def complaints(**settings: object) -> list[str]:
    return [str(p) for p in check_reward("rewards.0", Reward(**settings))]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [n for n, e in CATALOGUE.items() if not e.needs])
def test_names_alone_are_enough(name: str) -> None:
    assert complaints(name=name) == []


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"name": "pickscor"}, "Did you mean `pickscore`?"),
        ({"name": "ocr", "model": "a/b"}, "`rewards.0.model` is 'a/b': reward `ocr` does not read"),
        ({"name": "ocr", "offload": True}, "reward `ocr` does not read it"),
        ({"name": "m:f", "dtype": "float16"}, "m"),
        ({"name": "judge", "model": "x"}, "`rewards.0.url` is None: reward `judge` needs it"),
        ({"name": "judge", "url": "ftp://a", "model": "x"}, "asked by http or https"),
        ({"name": "hpsv3"}, "`rewards.0.template` is None: reward `hpsv3` needs it"),
        ({"name": "hpsv3", "template": "none.txt"}, "there is no such file"),
        ({"name": "pickscore", "model": "a/b/c"}, "it has not the form of a hub id"),
        ({"name": "pickscore", "model": "."}, "the folder has no JSON file"),
        ({"name": "aesthetic", "weights": "none.pth"}, "form owner/repository/file"),
        ({"name": "aesthetic", "weights": "../a/b.pth"}, "form owner/repository/file"),
        ({"name": "ocr", "groupwise": True}, "sees one picture at a time"),
        ({"name": "geneval", "url": "http://a", "clip": "a/b"}, "does not read it"),
        (
            {"name": "judge", "url": "http://a", "model": "m", "pattern": "("},
            "it is no pattern",
        ),
        (
            {"name": "judge", "url": "http://a", "model": "m", "pattern": "x"},
            "it needs a group",
        ),
    ],
)
def test_refused(settings, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = complaints(**settings)
    assert any(text in line for line in found), found


def test_instructions_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("hello", encoding="utf-8")
    found = complaints(name="hpsv3", template=str(file))
    assert "does not hold {prompt}" in found[0] and "must hold <|Reward|> once" in found[1]
    file.write_text("{prompt} <|Reward|>", encoding="utf-8")
    assert complaints(name="hpsv3", template=str(file)) == []


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["rewards=[{name: ocr, evaluate_only: true}]"], "nothing is left to train on"),
        (
            ["rewards=[{name: ocr, weight: 0}, {name: ocr_exact, evaluate_only: true}]"],
            "every weight is 0",
        ),
        (["evaluation.rewards=[{name: preference, url: 'http://a', model: m}]"], "has one"),
        (
            ["rewards=[{name: preference, url: 'http://a', model: m}]", "schedule=streaming"],
            "needs a whole group, and streaming cannot wait for it",
        ),
        (["rewards=[{name: ocr, normalise: [0, 0]}]"], "it must be greater than 0"),
        (["rewards=[{name: ocr, batch_size: 0}]"], "it must be at least 1"),
        (["rewards=[{name: ocr, device: tpu}]"], "must be auto, cpu, cuda or cuda:N"),
        (["advantage.rewards=gdpo", "schedule=streaming"], "cannot normalise a sum again"),
        (
            ["advantage={rewards: gdpo, baseline: value, std: none, clip: null}"],
            "advantage.baseline=value has one reward",
        ),
    ],
)
def test_runs_that_cannot_work(words: list[str], text: str) -> None:
    with pytest.raises(LeanError) as caught:
        check(load_config("embedded", words))
    assert text in str(caught.value)


def test_groups_stay_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = ["rewards=[{name: preference, url: 'http://a', model: m}]"]
    with pytest.raises(LeanError, match=r"Set parallel\.layout=classic"):
        check(load_config("embedded", words))
    check(load_config("embedded", [*words, "parallel.layout=classic"]))


def test_the_catalogue_names_settings() -> None:
    assert set(OPTIONS) < set(Reward.model_fields)
    for entry in CATALOGUE.values():
        assert {*entry.reads, *entry.needs, *entry.defaults} <= set(OPTIONS)


def test_checking_loads_nothing_heavy() -> None:
    code = (
        "import sys; from leangrpo.reward_checks import check_reward;"
        "from leangrpo.settings import Reward;"
        "list(check_reward('a', Reward(name='pickscore')));"
        "print(*(m for m in ('torch', 'transformers') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
