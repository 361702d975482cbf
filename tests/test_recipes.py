"""Every recipe parses, says what it is, and can run once its user's files are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from leangrpo.checks import check
from leangrpo.config import load_config, recipe_names, recipe_text, to_yaml
from leangrpo.errors import LeanError

OWN_PROMPTS = ["flux1-dev-ocr", "sd35m-ocr"]


@pytest.mark.parametrize("name", recipe_names())
def test_recipe(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = recipe_text(name)
    comment = text.split("description:")[0]
    assert all(line.startswith("#") for line in comment.splitlines())
    assert "# Source: " in comment
    assert "# Hardware: " in comment
    config = load_config(name)
    assert config.recipe == name
    assert config.description
    if name in OWN_PROMPTS:
        (tmp_path / config.prompts.train).write_text('a sign that says "hello"\n', encoding="utf-8")
    check(config)


@pytest.mark.parametrize("name", OWN_PROMPTS)
def test_placeholder_prompts_are_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LeanError) as caught:
        check(load_config(name))
    assert str(caught.value) == (
        "`prompts.train` is 'ocr_train.txt': there is no such file. "
        f"Relative paths start from {tmp_path}."
    )


def test_names() -> None:
    assert recipe_names() == ["embedded", "embedded-lora", *OWN_PROMPTS]


def test_the_lora_recipe_differs_only_where_it_says() -> None:
    lines = [set(to_yaml(load_config(name)).splitlines()) for name in recipe_names()[:2]]
    changed = {line.split(":")[0].strip() for line in lines[0] ^ lines[1]}
    assert changed == {"recipe", "description", "train", "lr"}
