"""Where gradients wait: one per trajectory until its advantage is known, then one sum.

All selected steps of trajectory i share A_i, so the sum over its steps is all that has to be kept
(paper eq. 7): memory is one gradient per waiting trajectory, independent of the number of steps.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from .capture import Factors, fold

Gradient = list[Tensor | None]
"""A gradient in the order of the ledger's parameters; None where backward did not reach."""


class Ledger:
    """Provisional gradients by trajectory, and their advantage-weighted sum.

    The sum is kept in float32 for parameters of 16 bits, in the parameter's dtype otherwise:
    adding many small corrections is the one place where 16 bits would lose them.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.total: Gradient = [None] * len(parameters)
        self.waiting: dict[Hashable, Gradient] = {}
        self.batches: list[tuple[tuple[Hashable, ...], list[Factors]]] = []
        self.peak_bytes = 0
        self._factor_bytes = 0

    def take(self) -> Gradient:
        """Move what backward left in the parameters' `.grad` out of them."""
        taken: Gradient = [p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return taken

    def put(self, gradient: Gradient) -> None:
        """Let backward accumulate on top of `gradient`."""
        for parameter, g in zip(self.parameters, gradient, strict=True):
            parameter.grad = g

    def hold(self, key: Hashable, gradient: Gradient) -> None:
        """Keep a trajectory's gradient until its advantage is known."""
        self.waiting[key] = gradient
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)

    def fold(self, key: Hashable, coefficient: float) -> None:
        """total += coefficient * gradient of the trajectory, whose memory is given back."""
        gradient = self.waiting.pop(key)
        if coefficient != 0.0:
            self.add(gradient, coefficient)

    def add(self, gradient: Gradient, coefficient: float = 1.0) -> None:
        """total += coefficient * gradient; takes the tensors over."""
        old: list[Tensor] = []
        new: list[Tensor] = []
        for i, g in enumerate(gradient):
            if g is None:
                continue
            total = self.total[i]
            if total is not None:
                old.append(total)
                new.append(g)
                continue
            dtype = torch.float32 if g.dtype.itemsize < 4 else g.dtype
            self.total[i] = g.to(dtype).mul_(coefficient)
        if old:
            torch._foreach_add_(old, new, alpha=coefficient)

    def hold_batch(self, keys: tuple[Hashable, ...], factors: list[Factors]) -> None:
        """Keep a step of a batch of trajectories, its gradients in factors."""
        self.batches.append((keys, factors))
        self._factor_bytes += _num_bytes(factors)
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)

    def fold_batches(self, known: Mapping[Hashable, float], scale: float) -> None:
        """total += sum of scale * known[key] * gradient over the batches that are all known."""
        ready, later = [], []
        for keys, factors in self.batches:
            if all(key in known for key in keys):
                c = torch.tensor([known[key] * scale for key in keys], dtype=torch.float64)
                ready += [(one, c) for one in factors] if c.any() else []
            else:
                later.append((keys, factors))
        self.batches = later
        self._factor_bytes = sum(_num_bytes(factors) for _, factors in later)
        self.add_factors(ready)

    def add_factors(self, some: Iterable[tuple[Factors, Tensor]]) -> None:
        """total += sum_b c_b * gradient of sample b, for factors with their `(B,)` coefficients."""
        layers: dict[tuple[int, int], list[tuple[Factors, Tensor]]] = {}
        for factors, c in some:
            layers.setdefault((factors.weight, factors.bias), []).append((factors, c))
        for (weight, bias), of_layer in layers.items():
            fold(of_layer, *(self._sum(i) if i >= 0 else None for i in (weight, bias)))

    def _sum(self, i: int) -> Tensor:
        """The sum of parameter `i`, zero to begin with."""
        total = self.total[i]
        if total is None:
            like = self.parameters[i]
            dtype = torch.float32 if like.dtype.itemsize < 4 else like.dtype
            total = self.total[i] = torch.zeros_like(like, dtype=dtype, requires_grad=False)
        return total

    def write(self) -> None:
        """Put the sum into the parameters' `.grad` and forget it."""
        for i, parameter in enumerate(self.parameters):
            total = self.total[i]
            parameter.grad = None if total is None else total.to(parameter.dtype)
            self.total[i] = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all gradients held now."""
        lists = [self.total, *self.waiting.values()]
        kept = (g for one in lists for g in one if g is not None)
        return self._factor_bytes + sum(g.numel() * g.element_size() for g in kept)


def _num_bytes(factors: Iterable[Factors]) -> int:
    return sum(t.numel() * t.element_size() for f in factors for t in (f.x, f.g))
