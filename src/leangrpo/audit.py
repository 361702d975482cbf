"""Watch any PyTorch program and find the evaluations that its rollout has already paid for.

    from leangrpo.audit import watch

    with watch() as audit:
        train()
    print(audit.report.classified, audit.report.speedup)

Nothing of the program is changed: `nn.Module.__call__`, `torch.autograd.backward` and a few
functions that draw noise are wrapped while it runs, and `torch.optim`'s own hook says when the
weights move. Inside compiled regions all of that is invisible to the compiler.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from .audit_calls import (
    DEPTH,
    Backward,
    Call,
    Recorder,
    Span,
    in_backward,
    in_checkpointed,
    takes_time,
    unwrapped,
)
from .audit_match import Again, Matcher, Read, differences, kind_of
from .audit_report import Network, Report, Step, Tally

NOISE = ((torch, "randn"), (torch, "randn_like"), (torch, "normal"), (torch, "from_numpy"))
"""Where a sampler's noise comes from, besides `Tensor.normal_`."""


@contextmanager
def watch(
    module: nn.Module | None = None,
    *,
    name: str | None = None,
    on_step: Callable[[Report], None] | None = None,
) -> Iterator[Audit]:
    """Audit what runs inside; the yielded object's `report` grows with every optimizer step.

    The denoiser is `module`, or what has this class name or variable `name`; without either the
    outermost networks whose `forward` takes a time and whose weights an optimizer steps. Only one
    audit at a time: raises RuntimeError inside another one.
    """
    audit = Audit(module, name, on_step)
    with audit:
        yield audit


class Audit:
    """The watcher; see `watch`."""

    active: Audit | None = None

    def __init__(
        self,
        module: nn.Module | None = None,
        name: str | None = None,
        on_step: Callable[[Report], None] | None = None,
    ) -> None:
        self.report = Report()
        self._module = None if module is None else _core(module)
        self._name, self._on_step = name, on_step
        self._named: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
        self._recorders: dict[int, Recorder] = {}
        self._trained: set[int] = set()
        self._owned = False
        self._events: list[Call | Backward] = []
        self._matcher = Matcher()
        self._local = threading.local()
        self._backward: Backward | None = None
        self._drawn = 0
        self._begun: float | None = None
        self._own = 0.0
        self._kinds: dict[type, bool] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Audit:
        if Audit.active is not None:
            raise RuntimeError("another audit is running: there can be one at a time")
        Audit.active = self
        handle = register_optimizer_step_post_hook(self._stepped)
        self._stack.callback(handle.remove)
        self._replace(nn.Module, "__call__", self._calling(nn.Module.__call__))
        self._replace(torch.autograd, "backward", self._backwarding(torch.autograd.backward))
        for home, name in NOISE:
            self._replace(home, name, self._drawing(getattr(home, name)))
        self._replace(torch.Tensor, "normal_", self._drawing(torch.Tensor.normal_))
        return self

    def __exit__(self, *_: object) -> None:
        Audit.active = None
        self._stack.close()
        self.finish()

    def _replace(self, home: Any, name: str, new: Any) -> None:
        own, old = vars(home).get(name), getattr(home, name)
        setattr(home, name, new)
        if own is None:  # inherited, as Tensor.normal_ is
            self._stack.callback(delattr, home, name)
        else:
            self._stack.callback(setattr, home, name, old)

    # -- what takes the place of torch's own ------------------------------------------------------

    def _calling(self, original: Any) -> Any:
        kinds = self._kinds

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(module, *args, **kwargs)
            if kinds.get(type(module), True):
                return self._called(original, module, args, kwargs)
            if self._backward is not None and in_backward():
                return self._again(original, module, args, kwargs)
            return original(module, *args, **kwargs)

        return __call__

    def _backwarding(self, original: Any) -> Any:
        def backward(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._backward is not None or not self._recorders:
                return original(*args, **kwargs)
            device = next(iter(self._recorders.values())).device
            self._backward = event = Backward(Span.begin(device))
            try:
                return original(*args, **kwargs)
            finally:
                self._backward = None
                event.span.end()
                self._events.append(event)

        return backward

    def _drawing(self, original: Any) -> Any:
        def drawing(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if not torch.compiler.is_compiling():
                self._drawn += result.numel()
            return result

        drawing.__name__ = getattr(original, "__name__", "drawing")
        builtins: Any = torch.jit._builtins
        operation = builtins._find_builtin(original)
        if operation is not None:  # for programs that script what they call
            builtins._register_builtin(drawing, operation)
        return drawing

    def _called(self, original: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A call of what may be the denoiser."""
        core, compiled = unwrapped(module)
        if not self._wanted(module, core) or getattr(self._local, "inside", False):
            return original(module, *args, **kwargs)
        if in_backward():
            return self._again(original, module, args, kwargs)
        call = self._record(core, args, kwargs, compiled)
        self._local.inside = True
        try:
            output = original(module, *args, **kwargs)
        finally:
            self._local.inside = False
        if call is not None:
            call.span.end()
            hidden = not torch.is_grad_enabled() and in_checkpointed()
            call.grad = hidden or _requires_grad(output)
            self._events.append(call)
        return output

    def _again(self, original: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A call inside a backward: what activation checkpointing computes again."""
        local, event = self._local, self._backward
        watched = any(r.contains(module) for r in self._recorders.values())
        if event is None or not watched or getattr(local, "again", False):
            return original(module, *args, **kwargs)
        local.again = True
        span = Span.begin(next(iter(self._recorders.values())).device)
        try:
            return original(module, *args, **kwargs)
        finally:
            local.again = False
            event.again.append(span.end())

    def _wanted(self, module: nn.Module, core: nn.Module) -> bool:
        if self._module is not None:
            return core is self._module
        kind = type(core)
        if self._name is None:
            wanted = _timed(core)
            if core is module:
                self._kinds[kind] = wanted
            return wanted
        if self._name in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}"):
            return True
        if core not in self._named:
            self._named[core] = _is_called(core, self._name)
        return self._named[core]

    def _record(self, core: nn.Module, args: Any, kwargs: Any, compiled: bool) -> Call | None:
        start = time.perf_counter()
        if self._begun is None:
            self._begun, self._own = start, 0.0
        try:
            recorder = self._recorders.get(id(core))
            if recorder is None:
                recorder = self._recorders[id(core)] = Recorder(core)
            call = recorder.record(args, kwargs, compiled=compiled, drawn=self._drawn)
        except Exception as error:  # whatever it is, the program must go on as it would have
            reason = f"{type(error).__name__}: {error}"
            self.report.failures[reason] = self.report.failures.get(reason, 0) + 1
            call = None
        self._took(start)
        return call

    def _took(self, start: float) -> None:
        seconds = time.perf_counter() - start
        self._own += seconds
        self.report.own_seconds += seconds

    # -- what is made of it -----------------------------------------------------------------------

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        start = time.perf_counter()
        ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for recorder in self._recorders.values():
            recorder.stale = True
        owners = {key for key, r in self._recorders.items() if r.owns(ids)}
        graded = {e.module for e in self._events if isinstance(e, Call) and e.grad}
        self._owned = self._owned or bool(owners)
        # An optimizer of other tensors, such as master weights, counts while none owns a network.
        trained = owners or (set() if self._owned else graded)
        if trained and graded:
            self._trained |= trained
            self._flush(start, stepped=True)
            self.report.own_seconds += time.perf_counter() - start  # between two steps: of neither
        else:
            self._took(start)

    def finish(self) -> Report:
        """Count what came after the last optimizer step too; returns the report."""
        if self._events:
            self._flush(time.perf_counter(), stepped=False)
        if self.report.ended == "running":
            self.report.ended = "finished"
        kinds = {f"{type(r.module).__name__}" for r in self._recorders.values()}
        self.report.candidates = sorted(kinds)
        return self.report

    def _flush(self, now: float, *, stepped: bool) -> None:
        if not self._trained:
            graded = {e.module for e in self._events if isinstance(e, Call) and e.grad}
            self._trained = graded or set(self._recorders)
        events, self._events = self._events, []
        seconds = now - self._begun - self._own if self._begun is not None else 0.0
        try:
            reads = self._read(events)
            kinds, rows, trajectories = self._matcher.sort(reads)
        except Exception as error:
            reason = f"a step: {type(error).__name__}: {error}"
            self.report.failures[reason] = self.report.failures.get(reason, 0) + 1
            kinds, rows, trajectories = {}, [], 0
        for event in events:
            if isinstance(event, Backward):
                for kind, spans in (("backward", [event.span]), ("recomputed", event.again)):
                    for span in spans:
                        kinds.setdefault(kind, Tally())
                        kinds[kind] += Tally(1, 0, span.seconds())
        self._note(rows)
        number = len(self.report.steps) + 1
        self.report.steps.append(Step(number, seconds, kinds, trajectories, stepped))
        for recorder in self._recorders.values():
            recorder.refresh()
        self.report.networks = [_about(self._recorders[key]) for key in sorted(self._trained)]
        if self._on_step is not None:
            self._on_step(self.report)
        self._begun, self._own = time.perf_counter(), 0.0

    def _read(self, events: list[Call | Backward]) -> list[Read]:
        """The calls of what is trained, and of networks of the same class, read at once."""
        kinds = {type(self._recorders[key].module) for key in self._trained}
        calls: list[tuple[Call, int]] = []
        cut = 0
        for event in events:
            if isinstance(event, Backward):
                cut += 1
            elif type(self._recorders[event.module].module) in kinds:
                calls.append((event, cut))
        if not calls:
            return []
        whole = torch.cat([call.rows for call, _ in calls]).cpu().numpy()
        norms = {id(call.weights[1]): call.weights[1] for call, _ in calls}
        values = {key: norm.cpu().numpy().tobytes() for key, norm in norms.items()}
        reads, at = [], 0
        for (call, before), probe in zip(calls, _probes([c for c, _ in calls]), strict=True):
            rows = whole[at : at + len(call.rows)]
            at += len(rows)
            _, norm, adapters = call.weights
            state = (call.owner, probe, values[id(norm)], adapters)
            call.rows = call.rows[:0]  # give the device's memory back
            call.weights = (call.rows, call.rows, ())
            reads.append(Read(call, rows, state, call.span.seconds(), before))
        return reads

    def _note(self, rows: list[Again]) -> None:
        found = self.report.differences
        for again in rows:
            if kind_of(again) != "redundant":
                continue
            for name, value in differences(again).items():
                number, example = found.get(name, (0, ""))
                if name == "rounding":
                    most = max(value, float(example.split()[-1]) if example else 0.0)
                    value = f"up to a relative L2 of {most:.2e}"
                found[name] = (number + 1, str(value))


def _probes(calls: list[Call]) -> list[bytes]:
    """The weights' probes, those of one network in one copy from the device."""
    found: dict[int, bytes] = {}
    sizes = {(len(c.weights[0]), c.weights[0].device) for c in calls}
    for size in sizes:
        some = [c for c in calls if (len(c.weights[0]), c.weights[0].device) == size]
        together = torch.stack([c.weights[0] for c in some]).cpu().numpy()
        found |= {id(c): row.tobytes() for c, row in zip(some, together, strict=True)}
    return [found[id(c)] for c in calls]


def _about(recorder: Recorder) -> Network:
    parameters = list(recorder.module.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    return Network(
        type(recorder.module).__name__,
        sum(p.numel() for p in parameters),
        trained,
        recorder.gradient_bytes(),
    )


def _core(module: nn.Module) -> nn.Module:
    """What a wrapper of torch's (compile, DDP) calls; with the wrapper watched, it is."""
    module, _ = unwrapped(module)
    inner = getattr(module, "module", None)
    return _core(inner) if isinstance(inner, nn.Module) and not _timed(module) else module


def _timed(module: nn.Module) -> bool:
    kind: Any = type(module)
    return takes_time(kind)


def _is_called(module: nn.Module, name: str) -> bool:
    """Whether a caller knows a network as a variable or an attribute of this name."""
    frame: Any = sys._getframe(3)
    for _ in range(DEPTH):
        if frame is None:
            return False
        variables = frame.f_locals
        if variables.get(name) is module or frame.f_globals.get(name) is module:
            return True
        for value in list(variables.values()):
            if name in (inside := getattr(value, "__dict__", None) or {}):
                return inside[name] is module
            if isinstance(value, nn.Module) and value._modules.get(name) is module:
                return True
        frame = frame.f_back
    return False


def _requires_grad(output: Any) -> bool:
    """Whether a network's output, or something in it, has a graph."""
    if isinstance(output, torch.Tensor):
        return output.requires_grad
    if isinstance(output, dict):
        output = list(output.values())
    return isinstance(output, (list, tuple)) and any(_requires_grad(one) for one in output)
