"""From a recipe or a file and some overrides to checked settings, or to one line per mistake.

Imports neither torch nor diffusers: a mistake is reported before anything slow happens.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from .complaints import complaints, did_you_mean, setting_paths, unknown_setting
from .errors import LeanError, problem
from .settings import Config, Reward, describe_settings

__all__ = [
    "Config",
    "check",
    "config_hash",
    "describe_settings",
    "load_config",
    "load_object",
    "read_prompts",
    "recipe_names",
    "recipe_text",
    "to_yaml",
]

PACKAGE = Path(__file__).parent
EMBEDDED = PACKAGE / "embedded"
RECIPES = PACKAGE / "recipes"
DEFAULT_RECIPE = "embedded"

# Names only; `rewards` has the functions, and a test holds the two together.
REWARDS = ("ocr", "ocr_log_prob", "ocr_exact", "jpeg_compressibility", "jpeg_incompressibility")

# Arguments of a pipeline's call that follow from other settings or that the trainer itself needs.
RESERVED_CALL = {
    "prompt": "prompts.train",
    "num_inference_steps": "sampling.steps",
    "guidance_scale": "sampling.guidance",
    "height": "sampling.height",
    "width": "sampling.width",
    "num_frames": "sampling.num_frames",
    "negative_prompt": "sampling.negative_prompt",
    "sigmas": "sampling.sigmas",
    "generator": "seed",
    "num_images_per_prompt": "rollout.generations",
    "num_videos_per_prompt": "rollout.generations",
    "latents": None,
    "output_type": None,
    "return_dict": None,
    "callback_on_step_end": None,
    "timesteps": None,
}

# Half the spacing of float32 just above 1 is 6e-8: a narrower range would clip rounding.
MIN_CLIP_RANGE = 1e-7


# -- loading ---------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice and reads 1e-4 as a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark
                )
            if isinstance(key.value, str):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


# YAML 1.1 wants a dot and a sign in the exponent, and would read 1e-4 as text.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def recipe_text(name: str) -> str:
    """A recipe's YAML, comments included.

    Raises LeanError for a name that is no recipe, naming the nearest one.
    """
    if name not in recipe_names():
        remedy = did_you_mean(name, recipe_names()) or f"Recipes: {', '.join(recipe_names())}."
        raise problem("recipe", name, "it is neither a recipe nor a YAML file", remedy)
    return (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")


def load_config(source: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read settings from a recipe's name or a YAML file (None: the embedded recipe).

    `overrides` are `key.path=value` with the value in YAML; `rewards.0.weight=2` reaches into a
    list. What a file leaves out keeps its default. Raises LeanError with one line per mistake.
    """
    text, name, where = _read_source(DEFAULT_RECIPE if source is None else source)
    given = _parse_yaml(text, where)
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise LeanError(f"{where} holds no mapping of settings. Write lines like `updates: 40`.")
    tree = _merge(Config(recipe=name).model_dump(mode="json"), given)
    if any(o.partition("=")[0].strip() == "selection.rule" for o in overrides):
        # another rule: what the recipe says of its own would only contradict it
        tree["selection"] |= {"steps": None, "size": None, "range": None}
    mistakes = []
    for override in overrides:
        try:
            _apply(tree, override)
        except LeanError as error:
            mistakes.append(str(error))
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        mistakes += complaints(error)
    if mistakes:
        raise LeanError("\n".join(mistakes))
    return config


def _read_source(source: str | Path) -> tuple[str, str, str]:
    """The text of a source, the recipe's name that follows from it, and what to call it."""
    path = Path(source).expanduser()
    if str(source) not in recipe_names() and (
        isinstance(source, Path) or path.suffix in (".yaml", ".yml") or _is_file(path)
    ):
        return _read_text("config", path), path.stem, str(path)
    return recipe_text(str(source)), str(source), f"recipe {source}"


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long, or with a null byte
        return False


def _read_text(setting: str, path: Path) -> str:
    """A UTF-8 text file, or a LeanError in the words of `setting`."""
    remedy = f"Relative paths start from {Path.cwd()}."
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise problem(setting, str(path), "there is no such file", remedy) from None
    except IsADirectoryError:
        raise problem(setting, str(path), "it is a folder, not a text file") from None
    except UnicodeDecodeError as error:
        rule = f"it is not UTF-8 text (byte {error.start})"
        raise problem(setting, str(path), rule, "Save it as UTF-8.") from None
    except (OSError, ValueError) as error:
        raise problem(setting, str(path), f"it cannot be read: {error}") from None


def _parse_yaml(text: str, where: str) -> Any:
    """YAML's value; a mistake is named with its line."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise LeanError(f"{where}{place} is not valid YAML: {error.problem}.") from None
    except (yaml.YAMLError, ValueError, RecursionError, AttributeError, TypeError) as error:
        line = " ".join(str(error).split())
        raise LeanError(f"{where} is not valid YAML: {line or type(error).__name__}.") from None


def _merge(base: dict[Any, Any], over: dict[Any, Any]) -> dict[Any, Any]:
    """`base` with the values of `over`, branch by branch."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if not isinstance(old, dict):
            merged[key] = value
        elif value is not None:  # a branch with nothing under it (`run:`) keeps its defaults
            merged[key] = _merge(old, value) if isinstance(value, dict) else value
    return merged


def _apply(tree: dict[Any, Any], override: str) -> None:
    """Set one `key.path=value` in the raw tree. Unknown last parts are left to validation."""
    path, equals, text = override.partition("=")
    path = path.strip()
    if not equals or not path:
        raise problem("override", override, "it must be setting=value", "Example: updates=3.")
    value = _parse_yaml(text, f"the value given for {path}")
    node: Any = tree
    parts = path.split(".")
    for depth, part in enumerate(parts):
        above, last = ".".join(parts[:depth]), depth == len(parts) - 1
        if isinstance(node, list):
            if part not in map(str, range(len(node) + 1)):
                rule = f"the list has {len(node)} entries, numbered from 0"
                raise problem(above, node, rule, f"`{part}` is none of them, nor the next one.")
            if int(part) == len(node):
                node.append({})
            key: Any = int(part)
        elif isinstance(node, dict):
            if not last and part not in node:
                if above != "sampling.call":
                    raise unknown_setting(path, value)
                node[part] = {}
            key = part
        elif above in setting_paths():
            rule = "it has no settings of its own"
            raise problem(above, node, rule, f"Set it as a whole: {above}=VALUE.")
        else:
            raise unknown_setting(path, value)
        if last:
            node[key] = value
        else:
            node = node[key]


# -- what else the trainer needs -------------------------------------------------------------------


def read_prompts(source: str | Path, *, heldout: bool = False) -> list[str]:
    """The prompts of a UTF-8 text file, one a line; blank lines and `#` lines are skipped.

    `embedded` means the package's own prompts, for training or held out. Raises LeanError if the
    file is missing, cannot be decoded, or holds no prompt.
    """
    split = "heldout" if heldout else "train"
    path = EMBEDDED / f"prompts_{split}.txt" if source == "embedded" else Path(source).expanduser()
    lines = [line.strip() for line in _read_text(f"prompts.{split}", path).splitlines()]
    prompts = [line for line in lines if line and not line.startswith("#")]
    if not prompts:
        raise problem(f"prompts.{split}", str(path), "it holds no prompt", "Write one a line.")
    return prompts


def load_object(setting: str, target: str) -> Any:
    """What `module:name` stands for, the working folder included in the search.

    Raises LeanError in the words of `setting` if it cannot be imported or called.
    """
    module, _, name = target.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # a user's module may raise anything while it is imported
        rule = f"it cannot be imported: {type(error).__name__}: {' '.join(str(error).split())}"
        remedy = f"Modules are searched in {os.getcwd()} and the installed packages."
        raise problem(setting, target, rule, remedy) from error
    if not callable(found):
        raise problem(setting, target, f"it is not callable but {type(found).__name__}")
    return found


def to_yaml(config: Config) -> str:
    """All settings as YAML that `load_config` reads back to an equal Config."""
    tree = config.model_dump()
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, default_flow_style=None)


def config_hash(config: Config) -> str:
    """Sha256 of the settings that determine the numbers.

    Left out: `run`, `checkpoint`, `updates`, `recipe`, `description`, and what changes rounding at
    most: `schedule` and `parallel`.
    """
    left_out = {"run", "checkpoint", "updates", "recipe", "description", "schedule", "parallel"}
    tree = config.model_dump(mode="json", exclude=left_out)
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


# -- rules between settings, and with the file system ----------------------------------------------


def check(config: Config, *, resume: bool = False) -> None:
    """Refuse settings that cannot work together or with this machine's files.

    Raises one LeanError with a line per problem; loads no model.
    """
    groups = (
        _check_steps,
        _check_kernel,
        _check_rollout,
        _check_parallel,
        _check_model,
        _check_rewards,
    )
    problems = [p for group in groups for p in group(config)]
    problems += _check_files(config, resume)
    if problems:
        raise LeanError("\n".join(map(str, problems)))


def _check_steps(config: Config) -> Iterator[LeanError]:
    selection, steps = config.selection, config.sampling.steps
    candidates = steps if selection.last else steps - 1
    if selection.rule == "list":
        listed = selection.steps or ()
        if not listed:
            yield problem("selection.steps", None, "rule list needs at least one step")
        for step in sorted({s for s in listed if not 0 <= s < steps}):
            rule = f"step {step} is outside 0..{steps - 1}"
            yield problem("selection.steps", list(listed), rule, f"sampling.steps is {steps}.")
        for step in sorted({s for s in listed if listed.count(s) > 1}):
            yield problem("selection.steps", list(listed), f"step {step} is listed twice")
    elif selection.steps is not None:
        rule = f"only rule list reads it, and selection.rule is {selection.rule}"
        yield problem("selection.steps", list(selection.steps), rule, "Set one or the other.")
    elif candidates < 1:
        rule = "no step is left to train, because the last one is no candidate"
        yield problem("sampling.steps", steps, rule, "Take more, or set selection.last=true.")
    if selection.rule == "window":
        lo, hi = selection.range or (0, candidates)
        if not 0 <= lo < hi <= candidates:
            rule = f"it must be [lo, hi) inside the candidate steps [0, {candidates})"
            yield problem("selection.range", [lo, hi], rule)
        elif selection.size is None:
            yield problem("selection.size", None, f"rule window needs one in 1..{hi - lo}")
        elif selection.size > hi - lo:
            rule = f"the window lies in [{lo}, {hi}), so it has at most {hi - lo} steps"
            yield problem("selection.size", selection.size, rule)
    else:
        for name in ("size", "range"):
            if (value := getattr(selection, name)) is not None:
                rule = f"only rule window reads it, and selection.rule is {selection.rule}"
                yield problem(f"selection.{name}", value, rule, "Set one or the other.")
    sigmas = config.sampling.sigmas
    if not isinstance(sigmas, str):
        if len(sigmas) != steps:
            rule = f"{len(sigmas)} numbers for {steps} steps"
            yield problem("sampling.sigmas", list(sigmas), rule, "Give one a step.")
        if any(a <= b for a, b in pairwise(sigmas)):
            yield problem("sampling.sigmas", list(sigmas), "each must be below the one before")
    for name in sorted(set(config.sampling.call) & set(RESERVED_CALL)):
        home = RESERVED_CALL[name]
        remedy = f"Use {home}." if home else "Remove it."
        rule = "the trainer passes this argument itself"
        yield problem(f"sampling.call.{name}", config.sampling.call[name], rule, remedy)


def _check_kernel(config: Config) -> Iterator[LeanError]:
    name, level = config.kernel.name, config.kernel.noise_level
    if name == "flow_sde_wan":
        if level is not None:
            rule = "flow_sde_wan takes its noise from the sigmas"
            yield problem("kernel.noise_level", level, rule, "Set it to null.")
    elif level is None or level <= 0:
        rule = "it must be above 0, because a step without noise has no log-probability"
        yield problem("kernel.noise_level", level, rule)
    elif name in ("flow_cps", "ddim") and level > 1:
        rule = f"{name} has all its noise at 1"
        yield problem("kernel.noise_level", level, rule, "Take a value in (0, 1].")
    if name == "ddim" and config.sampling.sigmas != "pipeline":
        rule = "ddim steps through timesteps and has no sigmas"
        yield problem("sampling.sigmas", config.sampling.sigmas, rule, "Set it to pipeline.")


def _check_rollout(config: Config) -> Iterator[LeanError]:
    num, micro = config.rollout.generations, config.rollout.micro_batch
    if num < 2:
        rule = "a group of one has no baseline to be compared with"
        yield problem("rollout.generations", num, rule, "Take 2 or more.")
    if config.schedule == "reweight" and micro != 1 and config.model.activation_checkpointing:
        rule = "schedule reweight cannot split the gradient of a checkpointed block by sample"
        remedy = "Set it to 1, or model.activation_checkpointing to false, or use retain."
        yield problem("rollout.micro_batch", micro, rule, remedy)
    if num >= 2 and num % micro:
        below, above = num - num % micro, num + micro - num % micro
        near = f"{below} or {above}" if below else f"{above}"
        rule = f"it must be a multiple of rollout.micro_batch, which is {micro}"
        remedy = f"Nearest: {near} generations, or a micro-batch of {_nearest_divisor(num, micro)}."
        yield problem("rollout.generations", num, rule, remedy)
    if config.objective.clip_range < MIN_CLIP_RANGE:
        rule = f"below {MIN_CLIP_RANGE:g} float32 rounding of the ratio alone would be clipped"
        yield problem("objective.clip_range", config.objective.clip_range, rule)


def _check_parallel(config: Config) -> Iterator[LeanError]:
    p = config.parallel
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    shard = p.shard or (ranks // p.replicate if p.replicate else local)
    replicate = p.replicate or max(1, ranks // shard)
    if shard * replicate != ranks:
        rule = f"shard x replicate is {shard} x {replicate}, and there are {ranks} ranks"
        yield problem("parallel.shard", p.shard, rule, "Leave one of the two null.")
    if p.sync == "step" and config.schedule == "reweight":
        rule = "schedule reweight must multiply by the advantage before ranks are added up"
        yield problem("parallel.sync", p.sync, rule, "Set it to update or group.")
    if p.ledger_dtype and config.schedule != "reweight":
        rule = f"only reweight has a ledger, and schedule is {config.schedule}"
        yield problem("parallel.ledger_dtype", p.ledger_dtype, rule, "Set it to null.")


def _nearest_divisor(num: int, near: int) -> int:
    return min((d for d in range(1, num + 1) if num % d == 0), key=lambda d: abs(d - near))


def _check_model(config: Config) -> Iterator[LeanError]:
    lora = config.model.lora
    if config.model.train == "lora" and lora.targets == ():
        yield problem("model.lora.targets", [], "it names no layer", "null finds them.")
    pipeline = config.model.pipeline
    if pipeline == "embedded":
        return
    folder = Path(pipeline).expanduser()
    index = folder / "model_index.json"
    if not folder.exists():
        if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", pipeline):
            rule = "there is no such folder, and it has not the form of a hub id"
            yield problem("model.pipeline", pipeline, rule)
    elif not index.is_file():
        rule = "the folder has no model_index.json, so it is no diffusers pipeline"
        yield problem("model.pipeline", pipeline, rule, "Save one with save_pretrained.")
    else:
        try:
            entry = json.loads(_read_text("model.pipeline", index)).get("scheduler")
        except (LeanError, ValueError, AttributeError):
            yield problem("model.pipeline", pipeline, "its model_index.json cannot be read")
            return
        if not entry or entry[0] is None:
            rule = "its model_index.json lists no scheduler, so there is no step to train"
            yield problem("model.pipeline", pipeline, rule)


def _check_rewards(config: Config) -> Iterator[LeanError]:
    lists = {"rewards": config.rewards, "evaluation.rewards": config.evaluation.rewards}
    for where, rewards in lists.items():
        for n, reward in enumerate(rewards):
            yield from _check_reward(f"{where}.{n}.name", reward)
            if reward.name in (r.name for r in rewards[:n]):
                yield problem(f"{where}.{n}.name", reward.name, "it is listed twice")
    if all(reward.weight == 0 for reward in config.rewards):
        yield problem("rewards", [r.name for r in config.rewards], "every weight is 0")


def _check_reward(setting: str, reward: Reward) -> Iterator[LeanError]:
    if ":" in reward.name:
        try:
            load_object(setting, reward.name)
        except LeanError as error:
            yield error
    elif reward.name not in REWARDS:
        remedy = did_you_mean(reward.name, REWARDS) or f"Names: {', '.join(REWARDS)}."
        yield problem(setting, reward.name, "no reward has this name", remedy)


def _check_files(config: Config, resume: bool) -> Iterator[LeanError]:
    for source, heldout in ((config.prompts.train, False), (config.prompts.heldout, True)):
        if source is None:
            continue
        try:
            num_prompts = len(read_prompts(source, heldout=heldout))
        except LeanError as error:
            yield error
            continue
        wanted = config.evaluation.prompts or 0
        if heldout and wanted > num_prompts:
            rule = f"prompts.heldout has only {num_prompts}"
            yield problem("evaluation.prompts", wanted, rule, "null takes all of them.")
    folder = Path(config.run.dir or "runs").expanduser()
    if folder.exists() and not folder.is_dir():
        yield problem("run.dir", str(folder), "it is a file, and a folder is needed")
        return
    above = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        yield problem("run.dir", str(folder), f"{above} cannot be written to")
    elif config.run.dir is not None and not resume and _holds_run(folder):
        remedy = "Resume it, or name another folder."
        yield problem("run.dir", str(folder), "it already holds a run", remedy)


def _holds_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("config.yaml", "metrics.jsonl"))


def settings_table() -> str:
    """The settings as the Markdown table of docs/configuration.md."""
    lines = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for name, kind, default, description in describe_settings():
        meaning = description.replace("|", "\\|")
        lines.append(f"| `{name}` | {kind} | `{default}` | {meaning} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(settings_table())
