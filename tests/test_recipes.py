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


# -- combined recipes ------------------------------------------------------------------------------


def test_layers_in_order(tmp_path: Path) -> None:
    """A model under an algorithm, under a file of one's own, under the command line."""
    assert load_config("flow-grpo") == load_config("embedded+flow-grpo").model_copy(
        update={"recipe": "flow-grpo"}
    )
    config = load_config("flow-grpo")
    assert config.model.pipeline == "embedded"  # of the run it stands on
    assert config.selection.rule == "fraction"  # of the algorithm
    assert config.selection.steps is None  # which the run below had for its own rule
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: flow-grpo\nupdates: 7\nselection: {rule: window, size: 2}\n")
    config = load_config(mine, ["optimizer.lr=1"])
    assert (config.recipe, config.updates, config.selection.size) == ("mine", 7, 2)
    assert config.ema.decay == 0.9
    assert config.optimizer.lr == 1
    assert config == load_config(mine, ["optimizer.lr=1"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "extends: flow-grop",
            "`recipe` is 'flow-grop': it is neither a recipe nor a YAML",
        ),
        ("extends: [a, b]", "`extends` is ['a', 'b']: it must be the name of one recipe"),
        ("extends: nope+flow-grpo", "there is no model 'nope' among the recipes"),
        ("extends: embedded+nope", "there is no algorithm 'nope'"),
    ],
)
def test_what_cannot_be_extended(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(LeanError) as caught:
        load_config(file)
    assert message in str(caught.value)


def test_the_lora_recipe_differs_only_where_it_says() -> None:
    lines = [set(to_yaml(load_config(name)).splitlines()) for name in recipe_names()[:2]]
    changed = {line.split(":")[0].strip() for line in lines[0] ^ lines[1]}
    assert changed == {"recipe", "description", "train", "lr"}
