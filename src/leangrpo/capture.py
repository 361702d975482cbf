"""While a batch runs, layers leave the gradient of each sample instead of their sum.

No parameter that is trained takes part in the graph: layers run with it detached, and a node
behind each hands its input and the gradient of its output to `Samples`, which knows what becomes
of them. The input is saved as autograd saves tensors, so that activation checkpointing drops and
recomputes it like any other. A parameter that no layer of a known kind owns (a table of shifts, the
scale of a norm of the model's own) is expanded along the batch where it is added or multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from .errors import LeanError
from .samples import Layer, Samples, rule_of

REMEDY = "Use rollout.micro_batch=1, or schedule 'retain' or 'native'."


class Capture:
    """While it is on, what is trained leaves a gradient for each sample: `with capture(rows): ...`.

    `rows` is the batch the network is called with (the policy sets it for every call). A layer
    that is called with another leading size mixes samples, which is an error rather than a guess.
    The backward runs inside `into`, whether capture is still on or not. Only the modules' `forward`
    is exchanged, and given back.
    """

    def __init__(self, modules: Iterable[nn.Module], parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.rows: int | None = 0
        self.seen = False
        self._sink: Samples | None = None
        self._depth = 0
        self._anchor = torch.zeros((), requires_grad=True)  # a layer's input may need no gradient
        self._before: list[tuple[nn.Module, Any]] = []
        index = {id(p): i for i, p in enumerate(parameters)}
        self._names: dict[int, str] = {}
        self._owners: list[tuple[nn.Module, list[Layer]]] = []
        for root in modules:
            for path, module in root.named_modules():
                own = [(n, index.get(id(p))) for n, p in module._parameters.items()]
                trained = {n: i for n, i in own if i is not None}
                if not trained or any(module is known for known, _ in self._owners):
                    continue
                for name, i in trained.items():
                    self._names.setdefault(i, f"{path}.{name}" if path else name)
                rule = rule_of(module)
                if rule is None:
                    layers = [Layer(module, (n,), (i,), None) for n, i in trained.items()]
                else:
                    layers = [Layer(module, tuple(trained), tuple(trained.values()), rule)]
                self._owners.append((module, layers))

    def __call__(self, rows: int) -> Capture:
        """Set the batch the network is about to be called with."""
        self.rows = rows
        return self

    def __enter__(self) -> Capture:
        if self._depth == 0:
            for module, layers in self._owners:
                self._before.append((module, module.__dict__.get("forward")))
                module.__dict__["forward"] = partial(self._forward, module.forward, layers)
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            for module, before in self._before:
                del module.__dict__["forward"]
                if before is not None:  # of someone who exchanges it as well
                    module.__dict__["forward"] = before
            self._before.clear()

    @contextmanager
    def into(self, samples: Samples | None) -> Iterator[None]:
        """While one backward runs: what it leaves goes to `samples`, or nowhere.

        `seen` tells whether there was anything. Blocks that are checkpointed run again inside, and
        must find capture on.
        """
        rows, self.rows, self._sink, self.seen = self.rows, None, samples, False
        try:
            with self:
                yield
        finally:
            self.rows, self._sink = rows, None

    def hand_on(self, layer: Layer, x: Tensor | None, g: Tensor) -> None:
        """The backward of a layer has run."""
        self.seen = True
        if self._sink is not None:
            self._sink.add(layer, x, g)

    def refuse(self, summed: Sequence[Tensor | None]) -> None:
        """Raise LeanError when autograd left a gradient, which is a sum over the batch."""
        for i, gradient in enumerate(summed):
            if gradient is not None:
                raise self._problem(i, "it is used elsewhere than in the module that it is of")

    def _problem(self, i: int, why: str) -> LeanError:
        name, shape = self._names.get(i, f"number {i}"), tuple(self.parameters[i].shape)
        text = f"The gradient of `{name}`, of shape {shape}, cannot be split by sample: {why}. "
        return LeanError(text + REMEDY)

    def _forward(
        self, original: Callable[..., Any], layers: Sequence[Layer], *args: Any, **kwargs: Any
    ) -> Any:
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        (layer, *_), shadows = layers, {}
        for one in layers:
            for name in one.names:
                parameter: Any = one.module._parameters[name]
                shadows[name] = (
                    Bare.of(self, one, parameter) if one.rule is None else parameter.detach()
                )
        x: Any = args[0] if args else next(iter(kwargs.values()), None)
        if layer.rule is not None and self.rows not in (None, len(x)):
            why = f"its layer is called with {len(x)} rows in a batch of {self.rows}"
            raise self._problem(layer.at[0], why)
        layer.module.__dict__.update(shadows)
        try:
            y = original(*args, **kwargs)
        finally:
            for name in shadows:
                del layer.module.__dict__[name]
        if layer.rule is None:
            return y
        observe: Any = _Observe.apply
        return observe(y, x.detach(), self._anchor, self, layer)


class _Observe(torch.autograd.Function):
    """A layer's output as it is; backward hands on the layer's input and the output's gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, _: Tensor, capture: Capture, layer: Layer) -> Any:
        ctx.save_for_backward(x)
        ctx.capture, ctx.layer = capture, layer
        return y.detach()  # the same memory, no view: the model may go on to write into it

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,), (g,) = ctx.saved_tensors, gradients
        ctx.capture.hand_on(ctx.layer, x, g)
        return g, None, None, None, None


class _Rows(torch.autograd.Function):
    """A parameter n times over, `(n, *shape)`; backward hands on the gradient of each."""

    @staticmethod
    def forward(
        ctx: Any, parameter: Tensor, _: Tensor, n: int, capture: Capture, layer: Layer
    ) -> Any:
        ctx.capture, ctx.layer = capture, layer
        return parameter.expand(n, *parameter.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.capture.hand_on(ctx.layer, None, gradients[0])
        return None, None, None, None, None


BROADCASTING = {"add", "mul", "sub", "div", "__rsub__", "__rtruediv__"}
for _name in ("add", "mul", "sub", "truediv"):
    BROADCASTING |= {f"__{_name}__", f"__r{_name}__"}


class Bare(Tensor):
    """A trained parameter inside the forward of the module that owns it.

    Casts, views and slices of it are such tensors too. Where it meets the batch, in a sum or a
    product that broadcasts it along the first dimension, every row gets a copy of its own, the
    gradients of which are those of the samples. Any other use raises LeanError.
    """

    capture: Capture
    layer: Layer
    made: tuple[Callable[[Tensor], Any], ...]

    @staticmethod
    def of(capture: Capture, layer: Layer, parameter: Tensor) -> Bare:
        """The parameter as its module sees it."""
        return Bare._wrap(parameter.detach(), capture, layer, ())

    @staticmethod
    def _wrap(
        value: Tensor, capture: Capture, layer: Layer, made: tuple[Callable[[Tensor], Any], ...]
    ) -> Bare:
        bare = value.as_subclass(Bare)
        bare.capture, bare.layer, bare.made = capture, layer, made
        return bare

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        tensors = [a for a in (*args, *options.values()) if isinstance(a, Tensor)]
        with torch._C.DisableTorchFunctionSubclass():
            if len(tensors) == 1 and isinstance(args[0] if args else None, Bare):
                return args[0]._alone(func, args[1:], options)
            bare = next(t for t in _flat((*args, *options.values())) if isinstance(t, Bare))
            if len(tensors) != 2 or func.__name__ not in BROADCASTING:
                raise bare._problem(f"it goes into {func.__name__}")
            (other,) = (t for t in tensors if t is not bare)
            broadcast: Any = torch.broadcast_shapes
            rows = bare._rows(broadcast(bare.shape, other.shape), other)
            return func(*(rows if a is bare else a for a in args), **options)

    def _alone(self, func: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """A function of the parameter only: its size, its dtype, a cast or a view of it."""

        def again(t: Tensor) -> Any:
            return func(t, *args, **options)

        result = again(self.as_subclass(Tensor))
        if isinstance(result, Tensor):
            return Bare._wrap(result, self.capture, self.layer, (*self.made, again))
        if isinstance(result, (tuple, list)) and any(isinstance(t, Tensor) for t in result):
            return tuple(
                Bare._wrap(part, self.capture, self.layer, (*self.made, again, itemgetter(i)))
                for i, part in enumerate(result)
            )
        return result

    def _rows(self, shape: torch.Size, other: Tensor) -> Tensor:
        """For each row of a batch a copy, `(n, ...)`, that broadcasts against it to `shape`."""
        aligned = (*[1] * (len(shape) - self.ndim), *self.shape)
        n = shape[0] if shape else 0
        if isinstance(other, Bare) or self.capture.rows not in (None, n) or aligned[0] != 1:
            raise self._problem(
                f"it meets a tensor of shape {tuple(other.shape)} in a batch of {self.capture.rows}"
            )
        parameter: Any = self.layer.module._parameters[self.layer.names[0]]
        expand: Any = _Rows.apply
        rows = expand(parameter.detach(), self.capture._anchor, n, self.capture, self.layer)
        if self.made:
            copies = []
            for copy in rows.unbind():
                for function in self.made:
                    copy = function(copy)
                copies.append(copy)
            rows = torch.stack(copies)
        return rows.reshape(n, *aligned[1:])  # type: ignore[no-any-return]

    def _problem(self, why: str) -> LeanError:
        return self.capture._problem(self.layer.at[0], why)


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _flat(value)
        else:
            yield value
