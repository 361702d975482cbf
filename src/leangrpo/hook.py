"""What happens before every denoiser call: gradients on or off, the inputs' dtype, the plan."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .components import main_dtype
from .errors import LeanError
from .tape import Finished, Tape

if TYPE_CHECKING:
    from .policy import Policy


class DenoiserHook:
    """Before every denoiser call: gradients on for a selected step, inputs in the network's dtype.

    `Policy.on_call(name, step)`, where set, is told. Installed first (`prepend`), so that a sharded
    module finds gradients on when it prepares its own backward. Timesteps, guidance and position
    ids keep the precision the pipeline gave them: rounded to 16 bits they would be other numbers
    (978.26 becomes 980).
    """

    def __init__(self, policy: Policy, name: str, module: nn.Module) -> None:
        self.policy, self.name = policy, name
        self.dtype = policy.dtype or main_dtype(module)
        self.names = list(inspect.signature(module.forward).parameters)
        self.order_known = False

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        scheduler = self.policy.pipe.scheduler
        tape = getattr(scheduler, "tape", None)
        if tape is not None:
            if tape.planning:
                self._plan(tape)
            torch.set_grad_enabled(tape.grad and tape.recorded())
            if self.policy.on_call is not None:
                self.policy.on_call(self.name, tape.cursor)
        args = tuple(self._cast(n, a) for n, a in zip(self.names, args, strict=False))
        kwargs = {name: self._cast(name, value) for name, value in kwargs.items()}
        if tape is not None and tape.capture is not None:
            first = args[0] if args else kwargs.get(self.names[0], kwargs)
            tape.capture.rows = len(first)
            self._check_order(first, len(tape.keys))
        return args, kwargs

    def _check_order(self, first: Any, num: int) -> None:
        """Raise LeanError where guidance puts the rows of a sample beside each other.

        `first` `(n, ...)` is what the denoiser is called with for `num` samples. A capture takes
        row k for sample k mod `num`, as where whole batches are stacked, and would mix them up.
        """
        n = len(first)
        if self.order_known or num < 2 or n == num or n % num or not isinstance(first, Tensor):
            return
        rows = first.detach().reshape(n, -1)
        stacked, beside = rows.view(n // num, num, -1), rows.view(num, n // num, -1)
        is_stacked = bool((stacked == stacked[:1]).all())
        is_beside = bool((beside == beside[:, :1]).all())
        if is_beside and not is_stacked:
            raise LeanError(
                f"{type(self.policy.pipe).__name__} calls its denoiser with the rows of a sample "
                "beside each other, not with whole batches one after another: reweight cannot "
                "tell the samples apart. Use rollout.micro_batch=1, or schedule retain or native."
            )
        self.order_known = is_stacked != is_beside

    def _plan(self, tape: Tape) -> None:
        """One step tells all, unless some denoisers are frozen: then every step must tell whose."""
        if tape.parts:
            tape.count()
            tape.advance()
            if self.policy.all_trained():
                raise Finished
        if not tape.over:
            tape.calls.setdefault(tape.cursor, {})[self.name] = None

    def _cast(self, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            if not value.is_floating_point() or _is_exact(name):
                return value
            # a pipeline that writes into its latents must not write into what the graph needs
            return value.to(self.dtype, copy=torch.is_grad_enabled())
        if isinstance(value, list) and value and isinstance(value[0], Tensor):
            return [self._cast(name, v) for v in value]
        if isinstance(value, dict):
            return {key: self._cast(key, v) for key, v in value.items()}
        return value


def _is_exact(name: str) -> bool:
    """Whether an argument is a time, a place or a scale, by its name."""
    return (
        name in ("t", "r", "sigma", "guidance")
        or name.startswith("timestep")
        or name.endswith("ids")
        or any(word in name for word in ("rotary", "freqs", "rope"))
    )
