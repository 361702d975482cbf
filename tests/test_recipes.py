"""Every recipe parses, says what it is, and can run once its user's files are there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import yaml
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)
from diffusers.pipelines.flux.pipeline_flux import calculate_shift

from leangrpo.checks import check
from leangrpo.config import described, load_config, recipe_names, recipe_text, to_yaml
from leangrpo.cookbook import layer_of
from leangrpo.errors import LeanError
from leangrpo.kernels import make_kernel
from leangrpo.loading import attention_targets
from leangrpo.stochastic import make_stochastic

OWN_PROMPTS = ["flux1-dev-ocr", "sd35m-ocr"]
DOCS = Path(__file__).resolve().parents[1] / "docs"


def read_published() -> list[dict[str, Any]]:
    """The table's recipes, each with what it shares with others (`like`) under its own."""
    table = yaml.safe_load((Path(__file__).parent / "published.yaml").read_text(encoding="utf-8"))
    for entry in table["recipes"]:
        shared = [table["common"][name] for name in entry.pop("like", ())]
        entry["published"] = {k: v for d in [*shared, entry["published"]] for k, v in d.items()}
    return list(table["recipes"])


PUBLISHED = read_published()
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
    assert recipe_names() == ["embedded", "embedded-ddpo", "embedded-lora", *OWN_PROMPTS]


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
    config, differs = load_config(entry["recipe"]), entry.get("differs", {})
    assert entry["source"]
    published = {path: number(v) for path, v in entry["published"].items()}
    for path, note in differs.items():
        assert number(note["published"]) == published.pop(path, number(note["published"])), path
        assert value(config, path) == number(note["ours"]) != number(note["published"]), path
        assert note["why"]
    assert {path: value(config, path) for path in published} == published


def test_every_recipe_has_its_published_defaults() -> None:
    """Every algorithm, and every pair that claims to be one (those of no source say so)."""
    names = {entry["recipe"] for entry in PUBLISHED}
    assert len(names) == len(PUBLISHED)
    assert {name.split("+")[-1] for name in names} == set(recipe_names("algorithms"))
    pairs = {n for n in recipe_names("pairs") if not n.startswith("embedded+")}
    unpublished = {n for n in pairs if "no published recipe" in layer_of("pairs", n).text}
    assert unpublished == {"cogvideox+dance-grpo", "sdxl+dance-grpo"}
    assert pairs - unpublished <= names


# What the table must say of an algorithm, on the model it was published for.
SETTINGS = {
    "kernel.name",
    "kernel.noise_level",
    "sampling.steps",
    "sampling.guidance",
    "selection.rule",
    "selection.last",
    "rollout.parts",
    "rollout.generations",
    "advantage.baseline",
    "advantage.clip",
    "objective.ratio",
    "objective.clip_range",
    "objective.kl",
    "optimizer.lr",
    "optimizer.betas",
    "optimizer.weight_decay",
    "optimizer.max_grad_norm",
    "ema.decay",
    "model.train",
}


@pytest.mark.parametrize("algorithm", recipe_names("algorithms"))
def test_the_table_says_all_of_an_algorithm(algorithm: str) -> None:
    """Of DDPO and DPOK all but what a history or a value network does without."""
    said = [
        {*entry["published"], *entry.get("differs", {})}
        for entry in PUBLISHED
        if entry["recipe"].endswith(f"+{algorithm}")
    ]
    assert any(one >= SETTINGS for one in said), [sorted(SETTINGS - one) for one in said]


@pytest.mark.parametrize("name", recipe_names("algorithms"))
def test_an_algorithm_does_not_speak_of_the_model(name: str) -> None:
    """FLUX at another guidance than its own, or Wan at another size, would be no recipe at all."""
    given = yaml.safe_load(layer_of("algorithms", name).text)
    assert not {"model", "prompts", "rewards"} & set(given)
    assert set(given["sampling"]) <= {"steps", "sigmas", "flash"}


def short(x: float) -> str:
    """3e-4 for 0.0003, as recipes write it."""
    return f"{x:g}" if x == 0 or x >= 1e-3 else f"{x:.0e}".replace("e-0", "e-")


def defaults_row(entry: dict[str, Any]) -> str:
    """A recipe's line in docs/algorithms.md; what differs from its source has a star."""
    c, differs = load_config(entry["recipe"]), entry.get("differs", {})

    def star(text: object, *paths: str) -> str:
        return f"{text}*" if differs.keys() & set(paths) else f"{text}"

    s, a, o = c.selection, c.advantage, c.objective
    share = "all" if s.fraction == 1 else f"{100 * s.fraction:g} %"
    trained = f"{s.size} in {list(s.range)}" if s.range else share + (", last too" * s.last)
    level = "" if c.kernel.noise_level is None else f" {c.kernel.noise_level:g}"
    flash = c.sampling.flash.ratio
    cells = [
        f"`{entry['recipe']}`",
        f"`{c.kernel.name}`{level}",
        f"{c.sampling.steps}" + ("" if flash is None else f", flash {flash:g}"),
        star(trained, "selection.outside", "selection.per"),
        star(f"{c.rollout.prompts} x {c.rollout.generations}", "rollout.prompts"),
        f"{a.baseline}, {a.std}, {a.ddof}, {short(a.epsilon)}",
        f"{o.ratio} {short(o.clip_range)}",
        star(f"{short(o.kl)} {o.kl_form}" if o.kl else "0", "objective.kl"),
        short(c.optimizer.lr),
        star(f"{c.optimizer.max_grad_norm:g}", "optimizer.max_grad_norm"),
        star(c.rollout.parts, "rollout.parts"),
        entry["source"].replace("|", "/"),
    ]
    return f"| {' | '.join(cells)} |"


def test_the_docs_have_the_published_defaults() -> None:
    """`PYTHONPATH=src:tests python tests/test_recipes.py` prints the table."""
    rows = [defaults_row(entry) for entry in PUBLISHED if "+" in entry["recipe"]]
    text = (DOCS / "algorithms.md").read_text(encoding="utf-8")
    found = [line for line in text.splitlines() if re.match(r"\| `[\w.-]+\+", line)]
    assert found == rows


def test_the_docs_have_every_model() -> None:
    text = (DOCS / "models.md").read_text(encoding="utf-8")
    found = [line.split(" | ")[:2] for line in text.splitlines() if line.startswith("| `")]
    models = {name: load_config(name).model.pipeline for name in recipe_names("models")}
    assert found == [[f"| `{name}`", f"`{models[name]}`"] for name in sorted(models)]


# -- noise levels ----------------------------------------------------------------------------------

# As on the hub, in what shifts the levels. FLUX's pipeline shifts by the number of latents.
WAN = UniPCMultistepScheduler(
    use_flow_sigmas=True, flow_shift=3.0, prediction_type="flow_prediction"
)
SANA = DPMSolverMultistepScheduler(
    use_flow_sigmas=True, flow_shift=3.0, prediction_type="flow_prediction"
)
FLUX = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
SD3 = FlowMatchEulerDiscreteScheduler(shift=3.0)
HUNYUAN = FlowMatchEulerDiscreteScheduler(shift=7.0)


@pytest.mark.parametrize(
    ("name", "scheduler", "shift"),
    [
        ("flux1-dev+dance-grpo", FLUX, 3),
        ("flux1-dev+mix-grpo", FLUX, 3),
        ("flux1-dev+mix-grpo-flash", FLUX, 3),
        ("flux1-dev+mix-grpo-flash-star", FLUX, 3),
        ("wan21-1.3b+dance-grpo", WAN, 3),
        ("sd35-medium+dance-grpo", SD3, 3),
        ("sana+dance-grpo", SANA, 3),
        ("hunyuan-video+dance-grpo-best-of", HUNYUAN, 5),
    ],
)
def test_levels_are_dancegrpos(name: str, scheduler: Any, shift: float) -> None:
    """shift·t / (1 + (shift - 1)·t) of linspace(1, 0, T+1) (DanceGRPO, train_grpo_flux).

    Lists are rounded to 5e-7, which the scheduler's own shift (7 at most) multiplies; UniPC starts
    1e-6 below 1.
    """
    config = load_config(name)
    num, sigmas = config.sampling.steps, config.sampling.sigmas
    twin = make_stochastic(scheduler, make_kernel("dance_sde", noise_level=0.3), sigmas)
    if scheduler is FLUX:
        assert config.sampling.height == config.sampling.width == 720
        mu = calculate_shift((720 // 16) ** 2)
        twin.set_timesteps(sigmas=torch.linspace(1, 1 / num, num).tolist(), mu=mu)
    else:
        twin.set_timesteps(num)
    t = torch.linspace(1, 0, num + 1, dtype=torch.float64)
    wanted = shift * t / (1 + (shift - 1) * t)
    assert (twin.table - wanted).abs().max() <= 7 * 5e-7 + 1e-6
    if scheduler is WAN:  # DanceGRPO's int(1000·σ), but for the first one's 1000
        assert twin.timesteps[1:].tolist() == [int(1000 * s) for s in wanted[1:-1]]


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
    lines = [set(to_yaml(load_config(name)).splitlines()) for name in ("embedded", "embedded-lora")]
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


@pytest.mark.parametrize("name", ["ddpo", "ddpo-on-policy"])
def test_ddpo_by_its_name_alone_trains_the_pipeline_it_fits(name: str) -> None:
    config = load_config(name)
    assert (config.model.pipeline, config.kernel.name) == ("embedded-ddim", "ddim")
    assert config.sampling.call["max_sequence_length"] is None  # of the other pipeline's call
    assert config.advantage.baseline == "history"
    assert config.advantage.min_history <= config.rollout.generations


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
    "flux2-klein": ("Flux2Transformer2DModel", {"num_layers": 1, "num_single_layers": 1}),
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


if __name__ == "__main__":
    print("\n".join(defaults_row(entry) for entry in PUBLISHED if "+" in entry["recipe"]))
