"""Activation checkpointing of what is trained, switched on and off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from .errors import LeanError
from .policy import Policy


@contextmanager
def checkpointed(policy: Policy, on: bool) -> Iterator[None]:
    """Inside, activation checkpointing is on or off; as it was afterwards."""
    before = {name: is_checkpointed(module) for name, module in policy.trained().items()}
    set_checkpointing(policy, on)
    try:
        yield
    finally:
        for name, module in policy.trained().items():
            if is_checkpointed(module) != before[name]:
                _switch(module, before[name])


def set_checkpointing(policy: Policy, on: bool) -> None:
    """Activation checkpointing of what is trained. Raises LeanError where there is none."""
    for module in policy.trained().values():
        if is_checkpointed(module) != on:
            _switch(module, on)


def is_checkpointed(module: nn.Module) -> bool:
    """Whether a denoiser recomputes activations."""
    return bool(getattr(module, "is_gradient_checkpointing", False))


def _switch(module: Any, on: bool) -> None:
    if not hasattr(module, "enable_gradient_checkpointing"):
        raise LeanError(f"{type(module).__name__} does not support activation checkpointing")
    try:
        (module.enable_gradient_checkpointing if on else module.disable_gradient_checkpointing)()
    except ValueError as error:  # diffusers: this class of model has no support
        raise LeanError(f"{type(module).__name__} does not support activation checkpointing") from (
            error
        )
