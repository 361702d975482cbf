"""The recipes that come along: whole runs, and models and algorithms that combine into one.

    leangrpo train embedded                     a whole run
    leangrpo train mixgrpo                      an algorithm, on the embedded pipeline
    leangrpo train flux1-dev+mixgrpo            a model and an algorithm
    leangrpo train sd35-medium                  a model, with FlowGRPO or what it names itself

A model says what is loaded and how it is called, an algorithm everything else; where both speak,
the algorithm counts, and last what was published for this pair of them (`pairs/`). A file of your
own begins with `extends: flux1-dev+mixgrpo` and changes the rest.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from .complaints import did_you_mean
from .errors import LeanError, problem

FOLDER = Path(__file__).parent / "recipes"
KINDS = {"runs": "", "models": "models", "algorithms": "algorithms", "pairs": "pairs"}
DEFAULT_RUN = "embedded"
DEFAULT_ALGORITHM = "flow-grpo"


class Layer(NamedTuple):
    """One file of a recipe: its YAML, and what to call it when it is wrong."""

    text: str
    where: str


def recipe_names(kind: str = "runs") -> list[str]:
    """The recipes of a kind: runs, models, algorithms, or pairs (`model+algorithm`)."""
    return sorted(path.stem for path in (FOLDER / KINDS[kind]).glob("*.yaml"))


def is_recipe(name: str) -> bool:
    """Whether `name` is a run, a model, an algorithm or `model+algorithm`."""
    model, plus, algorithm = name.partition("+")
    if plus:
        return model in _models() and algorithm in recipe_names("algorithms")
    return name in [*recipe_names(), *recipe_names("models"), *recipe_names("algorithms")]


def layers(name: str) -> list[Layer]:
    """The files of a recipe, each to be merged over the ones before.

    Raises LeanError for a name that is no recipe, naming the nearest one.
    """
    if not is_recipe(name):
        raise _unknown(name)
    if name in recipe_names():
        return [layer_of("runs", name)]
    if name in recipe_names("models"):
        own = re.search(r"^algorithm: ([\w.-]+)", layer_of("models", name).text, re.MULTILINE)
        name = f"{name}+{own[1] if own else DEFAULT_ALGORITHM}"
    if "+" not in name:
        name = f"{DEFAULT_RUN}+{name}"
    model, _, algorithm = name.partition("+")
    found = [layer_of("runs" if model == DEFAULT_RUN else "models", model)]
    found.append(layer_of("algorithms", algorithm))
    if name in recipe_names("pairs"):
        found.append(layer_of("pairs", name))
    return found


def recipe_text(name: str) -> str:
    """A run's YAML, comments included, or the files a combined recipe is made of, one by one.

    Raises LeanError for a name that is no recipe, naming the nearest one.
    """
    some = layers(name)
    if len(some) == 1:
        return some[0].text
    return "\n".join(f"# ---- {layer.where} ----\n{layer.text}" for layer in some)


def layer_of(kind: str, name: str) -> Layer:
    """One recipe file."""
    path = FOLDER / KINDS[kind] / f"{name}.yaml"
    what = {"runs": "recipe", "models": "model", "algorithms": "algorithm", "pairs": "pair"}[kind]
    return Layer(path.read_text(encoding="utf-8"), f"{what} {name}")


def _models() -> list[str]:
    """What an algorithm can be combined with: the models, and the embedded run."""
    return [DEFAULT_RUN, *recipe_names("models")]


def _unknown(name: str) -> LeanError:
    runs, models, algorithms = recipe_names(), _models(), recipe_names("algorithms")
    model, plus, algorithm = name.partition("+")
    if plus and model in models:
        remedy = did_you_mean(algorithm, algorithms) or f"Algorithms: {', '.join(algorithms)}."
        return problem("recipe", name, f"there is no algorithm {algorithm!r}", remedy)
    if plus:
        remedy = did_you_mean(model, models) or f"Models: {', '.join(models)}."
        return problem("recipe", name, f"there is no model {model!r} among the recipes", remedy)
    remedy = did_you_mean(name, [*runs, *models, *algorithms])
    remedy = remedy or f"Recipes: {', '.join(runs)}; `leangrpo recipes` lists the others."
    return problem("recipe", name, "it is neither a recipe nor a YAML file", remedy)
