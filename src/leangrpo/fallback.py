"""When memory runs out after all: the next schedule that fits, and the same update again.

An update that fails before its optimizer step has changed nothing: noise belongs to samples, so it
is sampled again to the same pictures.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from .config import to_yaml
from .costs import Option
from .errors import LeanError
from .launch import resume_command
from .memory import is_out_of_memory
from .setup import Setup, apply, make_layout, make_schedule

T = TypeVar("T")


def until_it_fits(run: Callable[[Setup, int], T], s: Setup, update: int) -> T:
    """Run an update (0-based); where its memory runs out, again with the next option that fits.

    Raises LeanError where the run cannot go on by itself: it was not `schedule: auto` that chose,
    several ranks would have to agree, nothing smaller is left, or the optimizer had begun its step.
    """
    while True:
        try:
            return run(s, update)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            said = str(error)
        _fall_back(s, update, said)  # here, where the error no longer holds what filled the memory


def _fall_back(s: Setup, update: int, said: str) -> None:
    cause = f"Update {update + 1} ran out of memory ({said.splitlines()[0][:200]})"
    if s.choice is None:
        raise LeanError(
            f"{cause}. Nothing saved is lost. schedule=auto finds what fits; else lower "
            "rollout.micro_batch, set model.activation_checkpointing=true, or take reweight or "
            f"streaming. Then: {resume_command(s.record.folder)}"
        )
    left = s.choice.alternatives()
    if not left:
        raise LeanError(
            f"{cause} with {s.choice.chosen.option.name}, and nothing smaller is left to go on "
            "with. Train adapters, a smaller model or picture, or use more ranks."
        )
    following = left[0].option
    if s.world.size > 1 or not s.whole:
        raise LeanError(
            f"{cause} with {s.choice.chosen.option.name}. Nothing saved is lost. Go on with what "
            f"needs less: {resume_command(s.record.folder)} {overrides(following)}"
        )
    before = s.choice.chosen.option.name
    reason = f"as {before} ran out of memory in update {update + 1}"
    s.choice = replace(s.choice, chosen=left[0], reason=reason)
    gradients = s.gradients
    gradients.take()
    s.optimizer.zero_grad(set_to_none=True)
    if s.critic is not None:
        s.critic.forget()
    s.config = apply(s.choice, s.config, s.policy, gradients)
    s.layout = make_layout(s.config, s.world)
    s.schedule = make_schedule(s.config, s.policy, s.watch, gradients)
    gc.collect()
    if s.device.type == "cuda":
        torch.cuda.empty_cache()
    s.record.settings(to_yaml(s.config))
    s.record.choice(f"note: {cause}; it is repeated with {following.name}", s.choice.as_dict())


def overrides(option: Option) -> str:
    """An option as it is typed."""
    return " ".join(f"{name}={json.dumps(value)}" for name, value in option.settings.items())
