"""Gradients of a batch, one for each of its samples, without a backward for each.

A batch has one backward but as many advantages as samples, so the sum that autograd forms over the
batch comes too early. For a linear layer y = x W^T the gradient of sample b is g_b^T x_b, with x
its input and g the gradient of its output: keeping the two factors instead of their product
postpones the sum until the advantages are known, and then costs one matrix product. (Opacus has
the same rules for layers: opacus/grad_sample/linear.py and conv.py.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import LeanError


class Factors(NamedTuple):
    """The gradient of a layer in factors: weight number `weight` of the ledger, `(out, ...)`, gets
    sum_rows g^T x, bias number `bias` sum_rows g. `x` is `(n B, L, in)`, `g` `(n B, L, out)`;
    row k belongs to sample k mod B, as guidance stacks whole batches. -1 is "not trained"."""

    weight: int
    bias: int
    x: Tensor
    g: Tensor


class Capture:
    """While it is on, linear and 2D convolution layers leave `Factors` instead of gradients.

    `rows` is the batch the network is called with (`with capture(rows): network(...)`; the policy
    sets it for every call). A layer that is called with another leading size mixes samples, which
    is an error rather than a guess. Only the layers' `forward` is exchanged, and given back.
    """

    def __init__(self, modules: Iterable[nn.Module], parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.rows = 0
        self.taken: list[Factors] = []
        index = {id(p): i for i, p in enumerate(parameters)}
        self._layers: list[tuple[nn.Module, Callable[[Tensor], Tensor]]] = []
        for layer in (m for module in modules for m in module.modules()):
            if isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and _plain(layer)):
                at = index.get(id(layer.weight), -1), index.get(id(layer.bias), -1)
                if at != (-1, -1):
                    self._layers.append((layer, partial(self._forward, layer, at)))

    def __call__(self, rows: int) -> Capture:
        """Set the batch the network is about to be called with."""
        self.rows = rows
        return self

    def __enter__(self) -> Capture:
        for layer, forward in self._layers:
            layer.forward = forward
        return self

    def __exit__(self, *_: object) -> None:
        for layer, _forward in self._layers:
            del layer.forward

    def take(self, summed: Sequence[Tensor | None]) -> list[Factors]:
        """The factors since the last call; `summed` is what autograd left beside them.

        Raises LeanError when a parameter got a plain gradient, that is, a sum over the batch.
        """
        for parameter, gradient in zip(self.parameters, summed, strict=True):
            if gradient is not None:
                raise LeanError(
                    f"A parameter of shape {tuple(parameter.shape)} is used outside linear and 2D "
                    "convolution layers (or in a checkpointed block): its gradient cannot be split "
                    "by sample. Use rollout.micro_batch=1, or schedule 'retain' or 'native'."
                )
        taken, self.taken = self.taken, []
        return taken

    def _forward(self, layer: Any, at: tuple[int, int], x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return type(layer).forward(layer, x)  # type: ignore[no-any-return]
        if len(x) != self.rows:
            raise LeanError(
                f"A layer with a weight of shape {tuple(layer.weight.shape)} is called with "
                f"{len(x)} rows in a batch of {self.rows}: its gradient cannot be split by sample. "
                "Use rollout.micro_batch=1, or schedule 'retain' or 'native'."
            )
        weight = layer.weight.detach()  # autograd forms no sum over the batch for it
        bias = None if layer.bias is None else layer.bias.detach()
        if not x.requires_grad:  # the first layer: the output must have a gradient all the same
            x = x.detach().requires_grad_()
        if isinstance(layer, nn.Linear):
            y, rows = F.linear(x, weight, bias), _rows_of_linear
        else:
            y, rows = layer._conv_forward(x, weight, bias), _rows_of_conv2d
        watch: Any = y.register_hook
        watch(partial(self._keep, rows, layer, at, x.detach()))
        return y

    def _keep(self, rows: Any, layer: Any, at: tuple[int, int], x: Tensor, g: Tensor) -> None:
        self.taken.append(Factors(*at, *rows(layer, x, g.detach())))


def _plain(layer: nn.Conv2d) -> bool:
    """Whether a convolution is a product of patches: not grouped, padded with zeros only."""
    return (
        layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    )


def _rows_of_linear(layer: Any, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return x.reshape(len(x), -1, x.shape[-1]), g.reshape(len(g), -1, g.shape[-1])


def _rows_of_conv2d(layer: Any, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """A convolution is a linear layer on patches: x `(n B, L, in k k)`, g `(n B, L, out)`."""
    patches = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    return patches.transpose(1, 2), g.flatten(2).transpose(1, 2)


def fold(
    some: Sequence[tuple[Factors, Tensor]], weight: Tensor | None, bias: Tensor | None
) -> None:
    """weight += sum c_b (g_b^T x_b), bias += sum c_b g_b, in place, over several steps of a layer.

    `some` are the layer's factors and the coefficients `(B,)` of their samples; `weight` is seen
    as `(out, in)`. One product over all rows, the smaller of its two sides scaled.
    """
    xs, gs, cs = [], [], []
    for factors, coefficients in some:
        n, length = factors.g.shape[:2]
        c = coefficients.to(factors.g.device, factors.g.dtype).repeat(n // len(coefficients))
        xs.append(factors.x.flatten(0, 1))
        gs.append(factors.g.flatten(0, 1))
        cs.append(c.repeat_interleave(length))
    x, g, c = torch.cat(xs), torch.cat(gs), torch.cat(cs)
    if bias is not None:
        bias.add_(g.T @ c)
    if weight is None:
        return
    if x.shape[1] < g.shape[1]:
        x.mul_(c[:, None])
    else:
        g.mul_(c[:, None])
    flat = weight.view(len(weight), -1)
    if flat.dtype == g.dtype:
        flat.addmm_(g.T, x)
    else:
        flat.add_(g.T @ x)
