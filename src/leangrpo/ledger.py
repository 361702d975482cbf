"""Where gradients wait: one per trajectory until its advantage is known, then one sum.

All selected steps of trajectory i share A_i, so the sum over its steps is all that has to be kept
(paper eq. 7): memory is one gradient per waiting trajectory, independent of the number of steps.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from .gradients import Gradient
from .samples import Samples, num_bytes

Batch = tuple[tuple[Hashable, ...], Samples]
"""Trajectories that were sampled together, and the gradient of each."""


class Ledger:
    """Provisional gradients by trajectory, and this rank's advantage-weighted sum of them.

    A correction is made when it is needed (`settle`, `part`): the last group's bucket by bucket,
    while the bucket before is being reduced. The sum is kept in float32 for parameters of 16
    bits, in the parameter's dtype otherwise: adding many small corrections is the one place where
    16 bits would lose them. Waiting gradients are kept in `dtype` (None: as backward made them)
    and, with `host`, in the host's memory; the trajectory being sampled stays where it is.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        dtype: torch.dtype | None = None,
        host: bool = False,
    ) -> None:
        self.parameters, self.dtype, self.host = parameters, dtype, host
        self.total: Gradient = [None] * len(parameters)
        self.waiting: dict[Hashable, Gradient] = {}
        self.batches: dict[tuple[Hashable, ...], Samples] = {}
        self.peak_bytes = 0
        self._last: Hashable = None
        self._due: list[tuple[Gradient, float]] = []
        self._due_samples: list[tuple[Samples, Tensor]] = []

    def reopen(self, key: Hashable) -> Gradient:
        """Take a trajectory's gradient back, for backward to go on with."""
        return self.waiting.pop(key, None) or [None] * len(self.parameters)

    def hold(self, key: Hashable, gradient: Gradient) -> None:
        """Keep a trajectory's gradient until its advantage is known."""
        self._turn_to(key)
        self.waiting[key] = gradient

    def join(self, key: Hashable, gradient: Gradient) -> None:
        """Add to what a trajectory has; takes the tensors over."""
        kept = self.reopen(key)
        for i, g in enumerate(gradient):
            before = kept[i]
            kept[i] = g if before is None else before if g is None else before.add_(g)
        self.hold(key, kept)

    def batch(self, keys: tuple[Hashable, ...]) -> Samples:
        """The gradients of trajectories that are sampled together, for a step to be added to."""
        self._turn_to(keys)
        return self.batches.setdefault(keys, Samples(len(keys)))

    def measure(self, beside: int = 0) -> None:
        """Note how much is held now; called when most is, before gradients are folded.

        `beside`: bytes of gradients that somebody else holds.
        """
        self.peak_bytes = max(self.peak_bytes, self.num_bytes + beside)

    def fold(self, key: Hashable, coefficient: float) -> None:
        """total += coefficient * gradient of the trajectory, when next needed."""
        gradient = self.waiting.pop(key)
        if coefficient != 0.0:
            self._due.append((gradient, coefficient))

    def fold_batches(self, known: Mapping[Hashable, float], scale: float) -> None:
        """total += sum of scale * known[key] * gradient over the batches that are all known."""
        for keys, samples in self.take_batches(known):
            c = torch.tensor([known[key] * scale for key in keys], dtype=torch.float64)
            if c.any():
                self._due_samples.append((samples, c))

    def take_batches(self, known: Container[Hashable]) -> list[Batch]:
        """The batches of which all trajectories are `known`, which the ledger forgets."""
        every = [keys for keys in self.batches if all(key in known for key in keys)]
        return [(keys, self.batches.pop(keys)) for keys in every]

    def add(self, gradient: Gradient, coefficient: float = 1.0) -> None:
        """total += coefficient * gradient, when next needed; takes the tensors over."""
        self._due.append((gradient, coefficient))

    def add_scaled(self, gradient: Gradient, coefficient: float) -> None:
        """total += coefficient * gradient, now; the tensors stay their owner's."""
        for i, g in enumerate(gradient):
            if g is not None:
                self._sum(i).add_(g, alpha=coefficient)

    def add_samples(self, samples: Samples, coefficients: Tensor) -> None:
        """total += sum_b c_b * gradient of sample b, now; the samples stay their owner's."""
        samples.fold(coefficients, self._sum)

    def settle(self, indices: Sequence[int] | None = None) -> None:
        """Make the corrections that are due, of all parameters or of those at `indices`."""
        some = range(len(self.parameters)) if indices is None else indices
        for gradient, coefficient in self._due:
            old: list[Tensor] = []
            new: list[Tensor] = []
            for i in some:
                g, gradient[i] = gradient[i], None
                if g is None:
                    continue
                total = self.total[i]
                if total is None:
                    self.total[i] = g.to(
                        self.parameters[i].device, sum_dtype(self.parameters[i])
                    ).mul_(coefficient)
                else:
                    old.append(total)
                    new.append(g.to(total.device))
            if old:
                torch._foreach_add_(old, new, alpha=coefficient)
        for samples, c in self._due_samples:
            samples.fold(c, self._sum, indices, keep=False)
        if indices is None:
            self._due.clear()
            self._due_samples.clear()

    def part(self, indices: Sequence[int]) -> Gradient:
        """The corrected sums at `indices`, which the ledger forgets."""
        self.settle(indices)
        taken = [self.total[i] for i in indices]
        for i in indices:
            self.total[i] = None
        return taken

    def reached(self) -> list[bool]:
        """Where the sum has, or will have, a gradient."""
        found = [total is not None for total in self.total]
        for gradient, _ in self._due:
            found = [was or g is not None for was, g in zip(found, gradient, strict=True)]
        for samples, _ in self._due_samples:
            for i in (i for layer in samples.kept for i in layer.at):
                found[i] = True
        return found

    def _sum(self, i: int) -> Tensor:
        """The sum of parameter `i`, zero to begin with."""
        total = self.total[i]
        if total is None:
            p = self.parameters[i]
            total = self.total[i] = torch.zeros(p.shape, dtype=sum_dtype(p), device=p.device)
        return total

    def _turn_to(self, key: Hashable) -> None:
        """The trajectory, or the batch of them, that was sampled before has to wait now."""
        last, self._last = self._last, key
        if last != key and last in self.waiting:
            self.waiting[last] = [None if g is None else self._stow(g) for g in self.waiting[last]]
        for keys, samples in self.batches.items():
            if last != key and last == keys:
                samples.stow(self._stow)

    def _stow(self, g: Tensor) -> Tensor:
        if g.is_floating_point():
            g = g.to(self.dtype or g.dtype)
        if self.host and g.device.type != "cpu":
            pinned = torch.empty(g.shape, dtype=g.dtype, pin_memory=True)
            return pinned.copy_(g)
        return g

    @property
    def num_bytes(self) -> int:
        """Bytes of all gradients held now."""
        lists = [self.total, *self.waiting.values(), *(g for g, _ in self._due)]
        kept = [g for one in lists for g in one if g is not None]
        batches = [*self.batches.values(), *(samples for samples, _ in self._due_samples)]
        return num_bytes([*kept, *(t for samples in batches for t in samples.tensors())])


def sum_bytes(parameters: Iterable[Tensor]) -> int:
    """Bytes of one gradient of all parameters, in the dtypes they are added up in."""
    return sum(p.numel() * sum_dtype(p).itemsize for p in parameters)


def sum_dtype(parameter: Tensor) -> torch.dtype:
    """In which gradients of a parameter are added up: at least float32."""
    return torch.float32 if parameter.dtype.itemsize < 4 else parameter.dtype
