"""Which checkpoint a run goes on from, and whether its settings are those it was made with.

Also of a run that an older version has begun: settings that did not exist then have to have their
default values, and its `config.yaml` is kept without them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import yaml

from . import checkpoint
from .config import (
    FREE,
    Config,
    config_hash,
    differences,
    load_config,
    parse_yaml,
    read_text,
)
from .errors import LeanError, problem
from .launch import resume_command
from .parallel import World
from .runfolder import CONFIG
from .settings import Reward

_RUN = dict.fromkeys(("run", "checkpoint", "updates", "recipe", "description"), True)
_RANKS = _RUN | dict.fromkeys(("schedule", "parallel"), True)
_REWARDS = _RANKS | dict.fromkeys(("memory", "scoring"), True)
FREE_BEFORE: tuple[dict[str, Any], ...] = (_RUN, _RANKS, _REWARDS | {"rollout": {"ahead"}})
"""What earlier versions left out of the hash of the settings; `config.FREE` is this one's."""


def found_by_the_first(world: World, config: Config, folder: Path) -> checkpoint.Checkpoint | None:
    """What the first rank finds on its disk, or the mistake it finds there, on every rank."""
    outcome: Any = None
    if world.is_main:
        try:
            outcome = find_checkpoint(config, folder)
        except LeanError as error:
            outcome = error
    outcome = world.share(outcome)
    if isinstance(outcome, LeanError):
        raise outcome
    return outcome  # type: ignore[no-any-return]


def find_checkpoint(config: Config, folder: Path) -> checkpoint.Checkpoint | None:
    """The newest sound checkpoint of a run, None if it has none yet.

    Raises LeanError when the settings that determine the numbers are not those it was made with.
    """
    if not (folder / CONFIG).is_file():
        raise problem(
            "run.dir", str(folder), "there is no run to resume", "Leave out --resume to start one."
        )
    found, complaints = checkpoint.newest(folder / "checkpoints")
    if complaints and found is None:
        raise LeanError(
            f"None of the checkpoints in {folder} can be read, and starting over would lose its "
            f"record. The newest: {complaints[0]} Move {folder} away to start a new run."
        )
    for complaint in complaints:
        print(f"warning: {complaint} Using an older one.", flush=True)
    if found and found.update > config.updates:
        rule = f"{found.update} updates are done already"
        raise problem("updates", config.updates, rule, "Ask for as many or more.")
    if found and found.state.get("config") != config_hash(config):
        changed = differences(config, load_config(folder / CONFIG))
        if changed or found.state.get("config") not in [*hashes_before(folder)]:
            raise LeanError(
                f"The run in {folder} was made with other settings "
                f"({'; '.join(changed[:4]) or 'its config.yaml was changed'}): going on would not "
                f"be the same run. Resume it with its own: {resume_command(folder)}"
            )
    return found


def hashes_before(folder: Path) -> set[str]:
    """What versions with fewer settings than this one made of a run's `config.yaml`."""
    tree = _stored(folder)
    texts = [json.dumps(_without(tree, free), sort_keys=True) for free in (*FREE_BEFORE, FREE)]
    return {hashlib.sha256(text.encode()).hexdigest() for text in texts}


def _without(tree: dict[Any, Any], free: dict[str, Any]) -> dict[Any, Any]:
    """Settings without those that may change: whole branches, or some of a branch."""
    found = {}
    for name, value in tree.items():
        some = free.get(name, set())
        if some is True:
            continue
        branch = isinstance(value, dict)
        found[name] = {k: v for k, v in value.items() if k not in some} if branch else value
    return found


def in_its_terms(text: str, folder: Path) -> str:
    """A run's settings, a YAML text, without those that its own `config.yaml` does not know.

    Only those with their default values go, so that it means the same; the hash that an older
    version has put into the checkpoints can then still be found.
    """
    tree, was, usual = yaml.safe_load(text), _stored(folder), Config().model_dump(mode="json")
    kept = _known(tree, was, usual)
    return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True, default_flow_style=None)


def _stored(folder: Path) -> dict[Any, Any]:
    tree = parse_yaml(read_text("config", folder / CONFIG), str(folder / CONFIG))
    return tree if isinstance(tree, dict) else {}


def _known(tree: Any, was: Any, usual: Any) -> Any:
    """A tree without what `was` has not and is as `usual`; a list of mappings is one of rewards."""
    if isinstance(tree, list) and isinstance(was, list) and len(tree) == len(was):
        entry = Reward(name="any").model_dump(mode="json")
        return [_known(value, before, entry) for value, before in zip(tree, was, strict=True)]
    if not isinstance(tree, dict) or not isinstance(was, dict):
        return tree
    found = {name: value for name, value in was.items() if name not in tree}  # retired since
    for name, value in tree.items():
        default = usual.get(name) if isinstance(usual, dict) else None
        if name in was:
            found[name] = _known(value, was[name], default)
        elif value != default:
            found[name] = value
    return found
