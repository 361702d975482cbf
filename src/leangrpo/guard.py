"""The on-policy guard: a gradient is only used on the weights it was computed at.

On-policy the ratio is 1 by construction, which is what makes a second forward redundant; if the
weights move between rollout and update, a kept graph or a provisional gradient is silently wrong.
Torch notices only the simplest case (tests/test_guard.py has the table), so the weights get a
version here, and every graph carries the version it was made at.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from .data import Transition
from .errors import LeanError, StaleGraphError


class Guard:
    """Counts the versions of a policy's weights and refuses to mix two of them.

    The version is bumped by every optimizer that steps one of the trainable parameters, by
    `load_state_dict` on a watched module and by `bump` (adapters, EMA, checkpoints). Changes that
    announce themselves nowhere (an adapter toggled, `.data` edited) are found by comparing a few
    elements of every trainable parameter and the adapters' state with those at `mark`.
    """

    def __init__(self, modules: nn.Module | Iterable[nn.Module]) -> None:
        self.modules = [modules] if isinstance(modules, nn.Module) else list(modules)
        self.version = 0
        self._reason = "nothing"
        self._marked: tuple[int, Tensor, tuple[object, ...]] | None = None
        self._locate()
        handles: list[Any] = [register_optimizer_step_post_hook(_OptimizerHook(self))]
        for module in self.modules:
            add_hook: Any = module.register_load_state_dict_post_hook
            handles.append(add_hook(_LoadHook(self)))
        weakref.finalize(self, _remove, handles)

    @classmethod
    def of(cls, target: Guard | nn.Module | Iterable[nn.Module] | Any) -> Guard:
        """The guard of a policy (anything with a `guard`), or a new one for bare modules."""
        if isinstance(target, Guard):
            return target
        guard = getattr(target, "guard", None)
        return guard if isinstance(guard, Guard) else cls(target)

    def _locate(self) -> None:
        self.parameters: list[nn.Parameter] = [
            p for module in self.modules for p in module.parameters() if p.requires_grad
        ]
        self._ids = {id(p) for p in self.parameters}

    def bump(self, reason: str) -> None:
        """The weights are about to be, or have just been, changed by `reason`."""
        self.version += 1
        self._reason = reason

    def mark(self, schedule: str, *, needs_graph: bool) -> None:
        """Remember the weights an update starts from.

        Raises LeanError when there is nothing to train or, for a schedule that reuses the
        rollout's graph, when dropout is active: a second forward would not repeat it, and the
        sampled transition is no longer the policy's.
        """
        self._locate()
        if not self.parameters:
            raise LeanError(
                "The policy has no parameter that requires a gradient: nothing to train."
            )
        if needs_graph and (name := _active_dropout(self.modules)):
            raise LeanError(
                f"`{name}` is an active dropout layer: schedule {schedule!r} samples with the "
                "gradient graph, so the samples would come from a randomly thinned network. "
                "Call .eval() on the denoiser, set its probability to 0, or use schedule 'native'."
            )
        self._marked = (self.version, *self._fingerprint())

    def accept(self, transition: Transition, schedule: str) -> None:
        """Refuse a transition whose graph cannot be reused; stamp one that has no version."""
        log_prob = transition.log_prob
        if transition.process != os.getpid():
            raise StaleGraphError(
                f"Step {transition.step} was sampled in process {transition.process}, this is "
                f"{os.getpid()}: no graph travels between processes. Use schedule 'native'."
            )
        if log_prob.is_inference():
            raise StaleGraphError(
                f"Step {transition.step} was sampled under torch.inference_mode(), which records "
                "no graph. Use torch.no_grad() (schedules enable gradients where they need them)."
            )
        if not log_prob.requires_grad:
            raise StaleGraphError(
                f"Step {transition.step} was sampled without a graph (another process or backend, "
                f"or gradients off): schedule {schedule!r} has nothing to differentiate. "
                "Sample with gradients on the selected steps, or use schedule 'native'."
            )
        if transition.version is None:
            transition.version = self.version
        if transition.version != self.version:
            self._refuse(transition.version, schedule)
        if self._marked is not None and self._marked[0] != self.version:
            self._refuse(self._marked[0], schedule)

    def check(self, schedule: str) -> None:
        """Raise StaleGraphError unless the weights are still those that `mark` saw.

        `accept` let in only graphs of the version of that moment, so that this covers them all.
        """
        assert self._marked is not None, "begin() marks the weights"
        marked, sample, adapters = self._marked
        if self.version == marked:
            now, adapters_now = self._fingerprint()
            if adapters_now != adapters:
                self.bump("an adapter was switched, merged or added")
            elif not torch.equal(now, sample):
                self.bump("the weights were edited outside the optimizer")
        if marked != self.version:
            self._refuse(marked, schedule)

    def _refuse(self, version: int, schedule: str) -> None:
        raise StaleGraphError(
            f"Gradients of policy version {version} cannot be used on version {self.version} "
            f"(last change: {self._reason}). Schedule {schedule!r} differentiates the rollout "
            "itself, so nothing may change the weights between rollout and update; finish the "
            "update first, or use schedule 'native' for the later ones."
        )

    def _fingerprint(self) -> tuple[Tensor, tuple[object, ...]]:
        """Four elements of each trainable parameter, and which adapters are on: no full pass."""
        samples = []
        for parameter in self.parameters:
            flat = parameter.detach()
            flat = getattr(flat, "to_local", lambda flat=flat: flat)().reshape(-1)
            if last := flat.numel() - 1:
                flat = flat[:: max(1, last // 3)]
            samples.append(flat.double())
        adapters = tuple(
            (name, *map(str, (getattr(m, attribute, None) for attribute in _ADAPTER_STATE)))
            for module in self.modules
            for name, m in module.named_modules()
            if hasattr(m, "disable_adapters") and hasattr(m, "merged_adapters")
        )
        return torch.cat(samples).clone(), adapters


_ADAPTER_STATE = ("active_adapters", "disable_adapters", "merged_adapters")


class _OptimizerHook:
    def __init__(self, guard: Guard) -> None:
        self.guard = weakref.ref(guard)

    def __call__(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        guard = self.guard()
        if guard is None:
            return
        if any(id(p) in guard._ids for group in optimizer.param_groups for p in group["params"]):
            guard.bump(f"{type(optimizer).__name__}.step()")


class _LoadHook:
    def __init__(self, guard: Guard) -> None:
        self.guard = weakref.ref(guard)

    def __call__(self, module: nn.Module, _: object) -> None:
        if (guard := self.guard()) is not None:
            guard.bump("load_state_dict()")


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()


def _active_dropout(modules: Iterable[nn.Module]) -> str | None:
    for module in modules:
        for name, part in module.named_modules():
            if part.training and isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
                return name or type(part).__name__
    return None
