"""Gradients of a batch, one for each of its samples, without a backward for each.

A batch has one backward but as many advantages as samples, so the sum that autograd forms over the
batch comes too early. For a linear layer y = x W^T the gradient of sample b is g_b^T x_b, with x
its input and g the gradient of its output: keeping the two factors instead of their product
postpones the sum until the advantages are known, and then costs one matrix product. (Opacus has
the same rules for layers: opacus/grad_sample/linear.py and conv.py.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch.nn.grad
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .errors import LeanError


class Factors(NamedTuple):
    """The gradient of a layer in factors: weight `(out, ...)` number `weight` of the ledger gets
    sum_rows g^T x, bias number `bias` sum_rows g. `x` is `(n B, L, in)`, `g` `(n B, L, out)`;
    row k belongs to sample k mod B, as guidance stacks whole batches. -1 is "not trained"."""

    weight: int
    bias: int
    x: Tensor
    g: Tensor


class Capture(TorchFunctionMode):
    """While it is on, linear and 2D convolution layers leave `Factors` instead of gradients.

    `rows` is the batch the network is called with (`with capture(rows): network(...)`; the policy
    sets it for every call). A layer that is called with another leading size mixes samples, which
    is an error rather than a guess.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.parameters = parameters
        self.index = {id(p): i for i, p in enumerate(parameters)}
        self.rows = 0
        self.taken: list[Factors] = []

    def __call__(self, rows: int) -> Capture:
        """Set the batch the network is about to be called with."""
        self.rows = rows
        return self

    def take(self) -> list[Factors]:
        """The factors since the last call.

        Raises LeanError when a parameter got a plain gradient, that is, a sum over the batch.
        """
        for parameter in self.parameters:
            if parameter.grad is not None:
                raise LeanError(
                    f"A parameter of shape {tuple(parameter.shape)} is used outside linear and 2D "
                    "convolution layers (or in a checkpointed block): its gradient cannot be split "
                    "by sample. Use rollout.micro_batch=1, or schedule 'retain' or 'native'."
                )
        taken, self.taken = self.taken, []
        return taken

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (F.linear, F.conv2d) and torch.is_grad_enabled():
            names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
            given = dict(zip(names, args, strict=False)) | kwargs
            weight, bias = given["weight"], given.get("bias")
            at = self.index.get(id(weight), -1), self.index.get(id(bias), -1)
            if at != (-1, -1):
                if len(given["input"]) != self.rows:
                    raise LeanError(
                        f"A layer of shape {tuple(weight.shape)} is called with "
                        f"{len(given['input'])} rows in a batch of {self.rows}: its "
                        "gradient cannot be split by sample. Use rollout.micro_batch=1 or retain."
                    )
                keep: Callable[[Tensor, Tensor], None] = lambda x, g: self.taken.append(  # noqa: E731
                    Factors(*at, x.detach(), g.detach())
                )
                rest = {k: v for k, v in given.items() if k not in names[:3]}
                layer: Any = _Linear if func is F.linear else _Conv2d
                return layer.apply(given["input"], weight, bias, keep, rest)
        return func(*args, **kwargs)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, keep: Any, _: Any) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.keep = keep
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (g,) = gradients
        x, weight = ctx.saved_tensors
        rows = len(x)
        ctx.keep(x.reshape(rows, -1, x.shape[-1]), g.reshape(rows, -1, g.shape[-1]))
        return g @ weight if ctx.needs_input_grad[0] else None, None, None, None, None


class _Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, keep: Any, rest: Any
    ) -> Any:
        if rest.get("groups", 1) != 1 or isinstance(rest.get("padding", 0), str):
            raise LeanError(
                "A grouped convolution's gradient cannot be split by sample here. "
                "Use rollout.micro_batch=1, or schedule 'retain' or 'native'."
            )
        ctx.save_for_backward(x, weight)
        ctx.keep, ctx.rest = keep, rest
        return F.conv2d(x, weight, bias, **rest)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (g,) = gradients
        x, weight = ctx.saved_tensors
        rest = {k: v for k, v in ctx.rest.items() if k != "groups"}
        patches = F.unfold(x, weight.shape[2:], **rest).transpose(1, 2)  # (n B, L, in k k)
        ctx.keep(patches, g.flatten(2).transpose(1, 2))
        back = None
        if ctx.needs_input_grad[0]:
            of_input: Any = torch.nn.grad.conv2d_input
            back = of_input(x.shape, weight, g, **rest)
        return back, None, None, None, None


def fold(factors: Factors, coefficients: Tensor) -> tuple[Tensor, Tensor]:
    """sum_b c_b (g_b^T x_b) as `(out, in)` and sum_b c_b g_b as `(out,)`; c is `(B,)`."""
    scale = coefficients.to(factors.g.dtype).repeat(len(factors.g) // len(coefficients))
    g = factors.g * scale[:, None, None]
    rows = g.flatten(0, 1)
    return rows.T @ factors.x.flatten(0, 1), rows.sum(0)
