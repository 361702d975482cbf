"""What one call of a network costs, counted on the meta device: no weights, no arithmetic.

Counted are floating-point operations, bytes read and written, and the bytes that autograd keeps
for the backward. A network of any size takes seconds and no memory to speak of.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Work:
    """Operations of a pass, alike ones together: `(flops, bytes, itemsize)` to how many.

    `flops` are 2 for a multiplication with its addition, of matrix products, convolutions and
    attention, by `torch.utils.flop_counter`; everything else counts by the bytes it reads and
    writes, as eager mode does, one kernel an operation.
    """

    operations: Mapping[tuple[int, int, int], int]

    @property
    def flops(self) -> int:
        """Floating-point operations."""
        return sum(flops * n for (flops, _, _), n in self.operations.items())

    @property
    def traffic(self) -> int:
        """Bytes read and written."""
        return sum(size * n for (_, size, _), n in self.operations.items())

    def seconds(self, flops: Callable[[int], float], bandwidth: float) -> float:
        """The roofline's time: each operation takes its arithmetic's or its traffic's, the longer.

        `flops` gives operations a second for numbers of so many bytes, `bandwidth` bytes a second.
        Source: Williams, Waterman and Patterson, "Roofline" (2009).
        """
        return sum(
            max(work / flops(width), size / bandwidth) * n
            for (work, size, width), n in self.operations.items()
        )

    def times(self, factor: int) -> Work:
        """So many of it."""
        return Work({key: n * factor for key, n in self.operations.items()})

    def __sub__(self, other: Work) -> Work:
        rest = Counter(self.operations)
        rest.subtract(other.operations)
        return Work({key: n for key, n in rest.items() if n})

    def __add__(self, other: Work) -> Work:
        return Work(Counter(self.operations) + Counter(other.operations))


@dataclass(frozen=True, slots=True)
class Count:
    """The costs of one call, or of the calls of one step together; sizes in bytes.

    `kept` is what autograd holds between forward and backward, each storage once and without
    weights; `kept_checkpointed` with activation checkpointing (None: the network does not support
    it), `unit` what its largest checkpointed unit holds while it is recomputed. `forward_peak` and
    `backward_peak` are alive on top: during a forward without gradients, and during a backward on
    top of what is kept, each weight's gradient taken away as soon as it is there.
    """

    forward: Work
    backward: Work
    recompute: Work
    kept: int
    kept_checkpointed: int | None
    unit: int
    forward_peak: int
    backward_peak: int

    def times(self, calls: int) -> Count:
        """`calls` alike calls, all kept for one backward."""
        if calls == 1:
            return self
        kept = self.kept_checkpointed
        return Count(
            self.forward.times(calls),
            self.backward.times(calls),
            self.recompute.times(calls),
            self.kept * calls,
            None if kept is None else kept * calls,
            self.unit,
            self.forward_peak,
            self.backward_peak,
        )


def count(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Count:
    """One call of a network on the meta device, and the backward to its trained parameters.

    Attention counts as a fused kernel that keeps q, k, v, the output and a logsumexp per row, and
    no matrix of scores (FlashAttention, arXiv 2205.14135); its backward forms them again.
    """
    meter, units = _Meter(), _Units(module)
    hooks = [
        p.register_post_accumulate_grad_hook(_forget)  # type: ignore[no-untyped-call]
        for p in module.parameters()
        if p.requires_grad
    ]
    try:
        with _FusedAttention(), meter:
            with torch.no_grad():
                module(*args, **kwargs)
            forward_peak = meter.take().peak
            with units.watching(meter), torch.autograd.graph.saved_tensors_hooks(units.pack, _same):
                output = first_tensor(module(*args, **kwargs))
            forward = meter.take()
            output.sum().backward()  # type: ignore[no-untyped-call]
            backward = meter.take()
    finally:
        for hook in hooks:
            hook.remove()
    return Count(
        forward=Work(forward.operations),
        backward=Work(backward.operations),
        recompute=Work(units.operations),
        kept=_nbytes({**units.outside, **units.inside}),
        kept_checkpointed=_nbytes({**units.outside, **units.given}) if units.number else None,
        unit=units.largest,
        forward_peak=forward_peak,
        backward_peak=backward.peak,
    )


def peak_of(call: Callable[[], Any]) -> tuple[Work, int]:
    """The work of a call without gradients on the meta device, and the most that is alive in it."""
    meter = _Meter()
    with torch.no_grad(), _FusedAttention(), meter:
        call()
    reading = meter.take()
    return Work(reading.operations), reading.peak


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point weights as `from_pretrained` does: some stay float32 in 16 bits."""
    exact = getattr(module, "_keep_in_fp32_modules", None) or ()
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_floating_point():
            kept = dtype.itemsize < 4 and any(part in name.split(".") for part in exact)
            tensor.data = tensor.data.to(torch.float32 if kept else dtype)


def weight_bytes(module: nn.Module, *, trained: bool | None = None) -> int:
    """Bytes of a network's parameters: all, or those that are trained, or those that are not."""
    return sum(
        p.numel() * p.element_size()
        for p in module.parameters()
        if trained is None or p.requires_grad == trained
    )


def first_tensor(output: Any) -> Tensor:
    """What a denoiser or decoder returns, out of its tuple or output class."""
    found: Tensor = next(leaf for leaf in leaves(output) if isinstance(leaf, Tensor))
    return found


def leaves(value: Any) -> list[Any]:
    """The leaves of lists, tuples and dictionaries, diffusers' output classes among them."""
    if isinstance(value, Mapping):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _forget(parameter: Tensor) -> None:
    parameter.grad = None


def _nbytes(storages: Mapping[int, Any]) -> int:
    return sum(storage.nbytes() for storage in storages.values())


@dataclass(frozen=True, slots=True)
class _Reading:
    operations: dict[tuple[int, int, int], int]
    peak: int


class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up operations, and watches the bytes of the storages made inside that are alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: Counter[tuple[int, int, int]] = Counter()
        self._live = self._start = self._peak = 0
        self._known: set[int] = set()

    def take(self) -> _Reading:
        """What happened since the last `take`; the peak is on top of what was alive then."""
        reading = _Reading(dict(self.operations), self._peak - self._start)
        self.operations = Counter()
        self._start = self._peak = self._live
        return reading

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        output = func(*args, **given)
        inputs = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        before = {id(tensor.untyped_storage()) for tensor in inputs}
        fresh = [t for t in outputs if id(t.untyped_storage()) not in before]
        for tensor in fresh:
            self._track(tensor)
        written = fresh or (outputs if func._schema.is_mutable else [])
        if written:
            formula = flop_registry.get(func._overloadpacket)
            flops = int(formula(*args, **given, out_val=output)) if formula else 0
            moved = sum(_moved(tensor) for tensor in (*inputs, *written))
            self.operations[(flops, moved, written[0].element_size())] += 1
        return output

    def _track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self._live += size
        self._peak = max(self._peak, self._live)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._live -= size


def _moved(tensor: Tensor) -> int:
    """Bytes an operation reads or writes of it: an expanded one is read from its cache."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


class _Units:
    """What autograd saves, inside and outside the units that checkpointing would recompute.

    The network's own checkpointing function is replaced by one that runs a unit plainly and
    watches it, so that one forward tells the bytes kept with and without checkpointing.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.number, self.largest = module, 0, 0
        self.outside: dict[int, Any] = {}
        self.given: dict[int, Any] = {}
        self.inside: dict[int, Any] = {}
        self.operations: Counter[tuple[int, int, int]] = Counter()
        weights = [*module.parameters(), *module.buffers()]
        self._weights = {id(w.untyped_storage()): w.untyped_storage() for w in weights}
        self._current: dict[int, Any] | None = None
        self._meter: _Meter | None = None

    def pack(self, tensor: Tensor) -> Tensor:
        """Saved for the backward."""
        self._note(tensor, self.outside if self._current is None else self._current)
        return tensor

    def _note(self, tensor: Tensor, where: dict[int, Any]) -> None:
        storage = tensor.untyped_storage()
        if id(storage) not in self._weights:
            where[id(storage)] = storage

    @contextmanager
    def watching(self, meter: _Meter) -> Iterator[None]:
        """Units are told apart inside, where the network knows them."""
        self._meter = meter
        supports = getattr(self.module, "_supports_gradient_checkpointing", False)
        if not supports:
            yield
            return
        before: dict[Any, tuple[Any, Any]] = {
            m: (m.gradient_checkpointing, getattr(m, "_gradient_checkpointing_func", None))
            for m in self.module.modules()
            if hasattr(m, "gradient_checkpointing")
        }
        switchable: Any = self.module
        switchable.enable_gradient_checkpointing(self._unit)
        try:
            yield
        finally:
            for module, (on, function) in before.items():
                module.gradient_checkpointing = on
                module._gradient_checkpointing_func = function

    def _unit(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._current is not None:
            return run(*args, **kwargs)
        for leaf in leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._note(leaf, self.given)  # checkpointing keeps a unit's inputs
        assert self._meter is not None
        self._current, before = {}, Counter(self._meter.operations)
        try:
            return run(*args, **kwargs)
        finally:
            held = {**self.outside, **self.given}
            own = {k: s for k, s in self._current.items() if k not in held}
            self.largest = max(self.largest, _nbytes(own))
            self.inside |= self._current
            self.number += 1
            self._current = None
            self.operations += self._meter.operations - before


class _FusedAttention(TorchFunctionMode):
    """Attention by the fused kernels' own operators, which the meta device would not choose."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is not F.scaled_dot_product_attention:
            return func(*args, **given)
        names = ("query", "key", "value", "attn_mask")
        given |= dict(zip(names, args, strict=False))
        query, key, value = given["query"], given["key"], given["value"]
        if key.shape[1] != query.shape[1]:  # grouped heads: the kernels read each several times
            groups = query.shape[1] // key.shape[1]
            key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
        mask = given.get("attn_mask")
        if mask is None:
            aten = torch.ops.aten._scaled_dot_product_flash_attention
            return aten(query, key, value)[0]
        if mask.dtype == torch.bool:
            mask = mask.to(query.dtype)
        shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        aten = torch.ops.aten._scaled_dot_product_efficient_attention
        return aten(query, key, value, mask.expand(shape), True)[0]
