"""Gradients of B samples, one for each: a rule for every kind of layer, and what is kept of them.

A batch has one backward but as many advantages as samples, so the sum that autograd forms over the
batch comes too early. For a linear layer y = x W^T the gradient of sample b is g_b^T x_b, with x
its input and g the gradient of its output. Either the product is formed for every sample at once,
and added up over the steps, or the two factors are kept: whichever is smaller. (Opacus has the
same rules for layers: opacus/grad_sample/linear.py, conv.py, embedding.py, layer_norm.py and
group_norm.py.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

Rule = Callable[[Any, Any, Tensor, int], "tuple[Tensor, Tensor]"]
"""(layer, x `(n, ...)`, g `(n, ...)`, B) -> gradients of weight `(B, *shape)` and bias `(B, out)`.

Row k belongs to sample k mod B, as guidance stacks whole batches; g is that of the output.
"""


@dataclass(eq=False, slots=True)
class Layer:
    """A module with trained parameters of its own, `names`, which are numbers `at` of the ledger.

    `rule` makes their gradients of the module's input and of the gradient of its output. Without
    one they are bare parameters, expanded along the batch where they are used (see `capture`).
    """

    module: nn.Module
    names: tuple[str, ...]
    at: tuple[int, ...]
    rule: Rule | None

    def gradients(self, x: Tensor | None, g: Tensor, num: int) -> list[Tensor]:
        """The gradient of each of `num` samples, `(num, *shape)`, in the order of `names`."""
        if self.rule is None:
            return [_samples(g, num).sum(1)]
        found = dict(zip(("weight", "bias"), self.rule(self.module, x, g, num), strict=True))
        return [found[name] for name in self.names]


@dataclass(slots=True)
class Kept:
    """What waits of a layer: `formed` gradients `(B, *shape)`, or the `factors` of its calls."""

    formed: list[Tensor] = field(default_factory=list)
    factors: list[tuple[Tensor | None, Tensor]] = field(default_factory=list)

    def tensors(self) -> list[Tensor]:
        return [*self.formed, *(t for pair in self.factors for t in pair if t is not None)]


class Samples:
    """The gradients of `num` samples, each its own, over all steps that have been added.

    What is kept of a layer is at most one gradient a sample, however many steps there are: the
    factors of its calls while all of them together are smaller, the sum of the products from then
    on. Sums are kept in the dtype of the gradients, as autograd keeps `.grad`: in 16 bits a step
    is rounded as often as it would be with one sample at a time, in a layer that is kept in
    factors once for all steps.
    """

    def __init__(self, num: int) -> None:
        self.num = num
        self.kept: dict[Layer, Kept] = {}

    def add(self, layer: Layer, x: Tensor | None, g: Tensor) -> None:
        """Take the factors of a layer's call: input x `(n, ...)` and g `(n, ...)` of its output."""
        kept = self.kept.setdefault(layer, Kept())
        if not kept.formed:
            kept.factors.append((x, g))
            if num_bytes(kept.tensors()) <= self._formed_bytes(layer, g):
                return
            waiting, kept.factors = kept.factors, []
            for factors in waiting:
                self._form(layer, kept, *factors)
        else:
            self._form(layer, kept, x, g)

    def _form(self, layer: Layer, kept: Kept, x: Tensor | None, g: Tensor) -> None:
        new = layer.gradients(x, g, self.num)
        if kept.formed:
            for before, one in zip(kept.formed, new, strict=True):
                before.add_(one.to(before.device))
        else:
            kept.formed = [one.to(g.dtype) for one in new]

    def _formed_bytes(self, layer: Layer, g: Tensor) -> int:
        numel: int = sum(getattr(layer.module, name).numel() for name in layer.names)
        return self.num * numel * g.element_size()

    def join(self, other: Samples) -> None:
        """Add the gradients of the same samples in another step; takes the tensors over."""
        for layer, theirs in other.kept.items():
            for factors in theirs.factors:
                self.add(layer, *factors)
            if theirs.formed:
                mine = self.kept.setdefault(layer, Kept())
                waiting, mine.factors = mine.factors, []
                for pair in waiting:
                    self._form(layer, mine, *pair)
                if mine.formed:
                    for before, one in zip(mine.formed, theirs.formed, strict=True):
                        before.add_(one.to(before.device))
                else:
                    mine.formed = theirs.formed

    def fold(
        self,
        coefficients: Tensor,
        total: Callable[[int], Tensor],
        among: Collection[int] | None = None,
        *,
        keep: bool = True,
    ) -> None:
        """total(i) += sum_b c_b * gradient of sample b, for `coefficients` `(B,)`.

        `total(i)` is the sum of parameter i, in its shape; `among` leaves out the layers that have
        no parameter there, and without `keep` a layer is forgotten as soon as it is added.
        Factors are multiplied in the dtype of the sum, so that 16 bits round nothing here.
        """
        wanted = None if among is None else set(among)
        for layer in [*self.kept]:
            if wanted is not None and wanted.isdisjoint(layer.at):
                continue
            kept = self.kept[layer]
            sums = [total(i) for i in layer.at]
            for target, formed in zip(sums, kept.formed, strict=False):
                for c, one in zip(coefficients.tolist(), formed, strict=True):
                    if c != 0.0:
                        target.add_(one.to(target.device), alpha=c)
            for x, g in kept.factors:
                x, g, c_rows = _taking_part(x, g, coefficients, self.num)
                device, dtype = sums[0].device, sums[0].dtype
                if x is not None:
                    x = x.to(device, dtype if x.is_floating_point() else None)
                c = c_rows.to(device, dtype)
                scaled = g.to(device, dtype) * c.view(-1, *[1] * (g.ndim - 1))
                for target, one in zip(sums, layer.gradients(x, scaled, 1), strict=True):
                    target.add_(one[0])
            if not keep:
                del self.kept[layer]

    def stow(self, put: Callable[[Tensor], Tensor]) -> None:
        """Keep everything as `put` makes it: narrower, or in another memory."""
        for kept in self.kept.values():
            kept.formed = [put(t) for t in kept.formed]
            kept.factors = [(None if x is None else put(x), put(g)) for x, g in kept.factors]

    def tensors(self) -> list[Tensor]:
        """All that is kept."""
        return [t for kept in self.kept.values() for t in kept.tensors()]


def _taking_part(
    x: Tensor | None, g: Tensor, coefficients: Tensor, num: int
) -> tuple[Tensor | None, Tensor, Tensor]:
    """The rows of samples whose coefficient is not 0: 0 times what is not finite is no 0."""
    c = coefficients.repeat(len(g) // num)
    if bool((coefficients != 0).all()):
        return x, g, c
    at = c.nonzero().flatten()
    some = at.to(g.device)
    return None if x is None else x[at.to(x.device)], g[some], c[at]


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """The memory that tensors keep alive: layers share inputs, and a view keeps all it looks at."""
    storages: dict[int, int] = {}
    for t in tensors:
        storage = t.untyped_storage()
        storages[storage.data_ptr()] = int(storage.nbytes())
    return sum(storages.values())


def rule_of(module: nn.Module) -> Rule | None:
    """The rule of a layer; None for a module of another kind, or one with a forward of its own."""
    for rule, kinds in _RULES.items():
        for kind in kinds:
            if isinstance(module, kind) and _forward_is(module, kind):
                usual = not isinstance(module, nn.Embedding) or (
                    module.max_norm is None and not module.scale_grad_by_freq
                )
                return rule if usual else None
    return None


def _forward_is(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module computes what its kind does; diffusers' FP32LayerNorm does, in float32."""
    own: Any = type(module)
    return own.forward is kind.forward or own.__name__ == "FP32LayerNorm"


def _samples(t: Tensor, num: int) -> Tensor:
    """`(n, ...)` to `(B, n/B, ...)`, the rows of each sample together."""
    return t.reshape(-1, num, *t.shape[1:]).transpose(0, 1)


def _wide(t: Tensor) -> Tensor:
    return t.float() if t.element_size() < 4 else t


def _linear(layer: nn.Linear, x: Tensor, g: Tensor, num: int) -> tuple[Tensor, Tensor]:
    rows_x, rows_g = _tokens(x, num), _tokens(g, num)
    weight = torch.bmm(rows_g.transpose(1, 2), rows_x)
    if layer.bias is None:  # most adapters, and there are many
        return weight, weight[:, :, 0]
    return weight, rows_g.sum(1, dtype=_wide(g[:0]).dtype)


def _tokens(t: Tensor, num: int) -> Tensor:
    """`(n, ..., d)` to `(B, tokens, d)`."""
    rows = t if len(t) == num else _samples(t, num)
    return rows.reshape(num, -1, t.shape[-1])


def _convolution(layer: Any, x: Tensor, g: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """One after the other: grouped by sample, the kernels for it are slow."""
    of_weight: Any = (conv1d_weight, conv2d_weight, conv3d_weight)
    padding = layer.padding
    if isinstance(padding, str) or layer.padding_mode != "zeros":
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x, padding = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode), 0
    shape, options = layer.weight.shape, (layer.stride, padding, layer.dilation, layer.groups)
    weights = [of_weight[x.ndim - 3](x[k::num], shape, g[k::num], *options) for k in range(num)]
    bias = _samples(g, num).transpose(1, 2).flatten(3).sum((2, 3), dtype=_wide(g[:0]).dtype)
    return torch.stack(weights), bias


def _norm(layer: Any, x: Tensor, g: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """y = x^ w + b with x^ the input made normal: sum g x^ and sum g."""
    least = torch.finfo(x.dtype).eps  # what torch takes where a root-mean-square norm has none
    x, g = _wide(x), _wide(g)
    if isinstance(layer, nn.GroupNorm):
        unit = F.group_norm(x, layer.num_groups, None, None, layer.eps)
        parts = (_samples(t, num).transpose(1, 2) for t in (g * unit, g))
        first, second = (t.reshape(num, layer.num_channels, -1).sum(2) for t in parts)
        return first, second
    shape = tuple(layer.normalized_shape)
    if isinstance(layer, nn.RMSNorm):
        unit = F.rms_norm(x, shape, None, least if layer.eps is None else layer.eps)
    else:
        unit = F.layer_norm(x, shape, None, None, layer.eps)
    first, second = (_samples(t, num).reshape(num, -1, *shape).sum(1) for t in (g * unit, g))
    return first, second


def _embedding(layer: nn.Embedding, x: Tensor, g: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Rows of a table: each gets the gradients of the places it was read at."""
    table = torch.zeros(num, *layer.weight.shape, dtype=_wide(g[:0]).dtype, device=g.device)
    ids = _samples(x, num).reshape(num, -1)
    rows = _samples(g, num).reshape(num, ids.shape[1], -1).to(table.dtype)
    if layer.padding_idx is not None:
        rows = rows * (ids != layer.padding_idx)[..., None]
    places = ids + torch.arange(num, device=ids.device)[:, None] * layer.num_embeddings
    table.flatten(0, 1).index_add_(0, places.flatten(), rows.flatten(0, 1))
    return table, table[:, 0, :0]


_RULES: dict[Rule, tuple[type[nn.Module], ...]] = {
    _linear: (nn.Linear,),
    _convolution: (nn.Conv1d, nn.Conv2d, nn.Conv3d),
    _norm: (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm),
    _embedding: (nn.Embedding,),
}
