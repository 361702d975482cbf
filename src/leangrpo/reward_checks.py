"""What can be wrong with one reward's settings, found before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from .catalogue import CATALOGUE, HUB_FILE, OPTIONS, REMOTE
from .complaints import did_you_mean
from .config import load_object, read_text
from .errors import LeanError, problem
from .remote import check_url, is_url
from .settings import Reward


def check_reward(where: str, reward: Reward) -> Iterator[LeanError]:
    """What is wrong with one reward's settings, in the words of the setting `where`."""
    name, entry = reward.name, CATALOGUE.get(reward.name)
    if ":" in name:
        try:
            (check_url if is_url(name) else load_object)(f"{where}.name", name)
        except LeanError as error:
            yield error
    elif entry is None:
        remedy = did_you_mean(name, CATALOGUE) or f"Names: {', '.join(CATALOGUE)}."
        yield problem(f"{where}.name", name, "no reward has this name", remedy)
        return
    elsewhere = reward.url is not None and name in REMOTE
    reads = ("url",) if elsewhere else entry.reads if entry else ()
    for option in OPTIONS:
        value = getattr(reward, option)
        if value != type(reward).model_fields[option].default and option not in reads:
            rule = f"reward `{name}` does not read it"
            yield problem(f"{where}.{option}", value, rule, "Leave it out.")
    for option in () if elsewhere or entry is None else entry.needs:
        if getattr(reward, option) is None:
            yield problem(f"{where}.{option}", None, f"reward `{name}` needs it")
    if entry is not None and reward.groupwise and not entry.groupwise and not elsewhere:
        yield problem(f"{where}.groupwise", True, f"reward `{name}` sees one picture at a time")
    yield from _check_sources(where, reward)


def _check_sources(where: str, reward: Reward) -> Iterator[LeanError]:
    """Files, folders, hub ids, URLs and patterns of a reward."""
    if reward.url is not None:
        try:
            check_url(f"{where}.url", reward.url)
        except LeanError as error:
            yield error
    names = ("tokenizer", "clip") if reward.url else ("model", "tokenizer", "clip")
    for option in names:
        source = getattr(reward, option)
        if source and not Path(source).expanduser().is_dir():
            if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", source):
                rule = "there is no such folder, and it has not the form of a hub id"
                yield problem(f"{where}.{option}", source, rule)
        elif source and not any((Path(source).expanduser()).glob("*.json")):
            rule = "the folder has no JSON file, so it holds no model"
            yield problem(f"{where}.{option}", source, rule, "Save one with save_pretrained.")
    source = reward.weights
    if source and not Path(source).expanduser().is_file() and not HUB_FILE.fullmatch(source):
        rule = "there is no such file, and it has not the form owner/repository/file"
        yield problem(f"{where}.weights", source, rule)
    if reward.template:
        try:
            text = read_text(f"{where}.template", Path(reward.template).expanduser())
        except LeanError as error:
            yield error
        else:
            if "{prompt}" not in text:
                rule = "it does not hold {prompt}, which stands for the prompt"
                yield problem(f"{where}.template", reward.template, rule)
            if reward.name == "hpsv3" and text.count("<|Reward|>") != 1:
                rule = "it must hold <|Reward|> once, where the score is read"
                yield problem(f"{where}.template", reward.template, rule)
    if reward.pattern is not None:
        try:
            groups = re.compile(reward.pattern).groups
        except re.error as error:
            yield problem(f"{where}.pattern", reward.pattern, f"it is no pattern: {error}")
        else:
            if groups < 1:
                rule = "it needs a group ( ) around the verdict"
                yield problem(f"{where}.pattern", reward.pattern, rule)
