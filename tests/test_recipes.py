"""Every recipe parses, says what it is, and can run once its user's files are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import yaml

from leangrpo.checks import check
from leangrpo.config import described, load_config, recipe_names, recipe_text, to_yaml
from leangrpo.cookbook import layer_of
from leangrpo.errors import LeanError
from leangrpo.loading import attention_targets

OWN_PROMPTS = ["flux1-dev-ocr", "sd35m-ocr"]
PUBLISHED = yaml.safe_load((Path(__file__).parent / "published.yaml").read_text(encoding="utf-8"))
FILES = [(kind, name) for kind in ("models", "algorithms", "pairs") for name in recipe_names(kind)]
COMBINED = [f"{m}+{a}" for m in recipe_names("models") for a in recipe_names("algorithms")]
COMBINED += [f"embedded+{a}" for a in recipe_names("algorithms")]


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


# -- published defaults ----------------------------------------------------------------------------


def value(config: Any, path: str) -> Any:
    for part in path.split("."):
        config = getattr(config, part)
    return list(config) if isinstance(config, tuple) else config


def number(text: Any) -> Any:
    """YAML 1.1 reads 1e-4 as text."""
    try:
        return float(text) if isinstance(text, str) else text
    except ValueError:
        return text


@pytest.mark.parametrize("entry", PUBLISHED, ids=lambda e: e["recipe"])
def test_published_defaults(entry: dict[str, Any]) -> None:
    config = load_config(entry["recipe"])
    assert entry["source"]
    expected = {path: number(v) for path, v in entry["published"].items()}
    assert {path: value(config, path) for path in expected} == expected
    for path, note in entry.get("differs", {}).items():
        assert value(config, path) == number(note["ours"]) != number(note["published"]), path
        assert note["why"]


def test_every_algorithm_has_its_published_defaults() -> None:
    covered = {entry["recipe"].split("+")[-1] for entry in PUBLISHED}
    assert covered == set(recipe_names("algorithms"))


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
    assert (config.rollout.micro_batch, config.objective.kl) == (12, 0.0)  # of the pair
    assert load_config("sd35-medium+flow-grpo").objective.kl == 0.04
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: flow-grpo\nupdates: 7\nselection: {rule: window, size: 2}\n")
    config = load_config(mine, ["optimizer.lr=1"])
    assert (config.recipe, config.updates, config.selection.size) == ("mine", 7, 2)
    assert config.objective.kl_form == "flow_grpo"
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


@pytest.mark.parametrize(("kind", "name"), FILES)
def test_a_recipe_file(kind: str, name: str) -> None:
    layer = layer_of(kind, name)
    comment = layer.text.split("description:")[0]
    assert all(line.startswith("#") for line in comment.splitlines())
    assert max(map(len, layer.text.splitlines())) <= 100
    assert described(kind, name)
    if kind == "models":
        assert "# Hardware: " in comment
    if kind != "pairs" or not name.startswith("embedded"):
        assert "# Source: " in comment


@pytest.mark.parametrize("name", COMBINED)
def test_every_combination_can_be_checked(name: str) -> None:
    """Of sigmas for a sampler that has none a combination is told; else all go together."""
    config = load_config(name)
    if config.kernel.name == "ddim" and config.sampling.sigmas != "pipeline":
        with pytest.raises(LeanError, match=r"ddim steps through timesteps and has no sigmas"):
            check(config, files=False)
    else:
        check(config, files=False)
    assert config.recipe == name


def test_a_model_has_an_algorithm_of_its_own() -> None:
    """DDIM models are trained with DDPO by their name alone, flow models with FlowGRPO."""
    assert load_config("sd15").advantage.baseline == "history"
    assert load_config("sd15").kernel.name == "ddim"
    assert load_config("flux1-dev").kernel.noise_level == 0.9
    assert load_config("cogvideox").kernel.name == "ddim"


# -- LoRA targets ----------------------------------------------------------------------------------

NETWORKS = {
    "sd15": ("UNet2DConditionModel", {}),
    "sdxl": ("UNet2DConditionModel", {}),
    "sd35-medium": ("SD3Transformer2DModel", {"num_layers": 2}),
    "sd35-large": ("SD3Transformer2DModel", {"num_layers": 2}),
    "flux1-dev": ("FluxTransformer2DModel", {"num_layers": 1, "num_single_layers": 1}),
    "flux1-kontext": ("FluxTransformer2DModel", {"num_layers": 1, "num_single_layers": 1}),
    "flux2-dev": ("Flux2Transformer2DModel", {"num_layers": 1, "num_single_layers": 1}),
    "wan21-1.3b": ("WanTransformer3DModel", {"num_layers": 1}),
    "wan21-14b": ("WanTransformer3DModel", {"num_layers": 1}),
    "wan22-ti2v-5b": ("WanTransformer3DModel", {"num_layers": 1}),
    "wan22-a14b": ("WanTransformer3DModel", {"num_layers": 1}),
    "qwen-image": ("QwenImageTransformer2DModel", {"num_layers": 1}),
    "qwen-image-edit": ("QwenImageTransformer2DModel", {"num_layers": 1}),
    "z-image": ("ZImageTransformer2DModel", {"n_layers": 1, "n_refiner_layers": 1}),
    "ltx-video": ("LTXVideoTransformer3DModel", {"num_layers": 1}),
    "sana": ("SanaTransformer2DModel", {"num_layers": 1}),
    "hunyuan-video": (
        "HunyuanVideoTransformer3DModel",
        {"num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1},
    ),
    "cogvideox": ("CogVideoXTransformer3DModel", {"num_layers": 1}),
}


@pytest.mark.parametrize("name", recipe_names("models"))
def test_the_targets_are_layers_of_the_model(name: str) -> None:
    """On the class's own widths, without memory for weights."""
    kind, options = NETWORKS[name]
    with torch.device("meta"):
        network = getattr(diffusers, kind)(**options)
    linear = [n for n, m in network.named_modules() if isinstance(m, torch.nn.Linear)]
    targets = load_config(name).model.lora.targets or attention_targets(network)
    assert len(targets) >= 4
    for target in targets:
        assert any(n == target or n.endswith(f".{target}") for n in linear), target
