"""What one call of a network leaves behind, so that another call on the same rows is recognised.

Nothing is read from the device while the program runs, and no random number is drawn: a call leaves
a small tensor there, and `audit` reads all of them at once, at the optimizer step.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

_TIMES = "timestep timesteps timestep_ratio t r time times sigma sigmas noise_labels c_noise"
TIMES = frozenset(_TIMES.split())
"""Names that the time of a step has among the arguments of a denoiser."""
LATENT, CONDITION = 64, 16
"""Elements of a row that are kept of the latent, and of each conditioning tensor."""
CONDITIONS = 3
"""Conditioning tensors that are looked at."""
WIDTH = LATENT + 1 + CONDITION * CONDITIONS
PROBED, PROBES = 8, 4
"""Weights that are looked at in every call, and elements of each."""
DEPTH = 40
"""Frames above a call in which a checkpointed function is looked for."""

Weights = tuple[Tensor, Tensor, tuple[str, ...]]
"""Of a call: probes, the norms of all weights when they last seemed to change, active adapters."""


@dataclass(slots=True)
class Span:
    """The seconds between two moments, on the accelerator's own clock where there is one."""

    begun: float = 0.0
    ended: float = 0.0
    events: tuple[Any, Any] | None = None

    @classmethod
    def begin(cls, device: torch.device) -> Span:
        """Start the clock; on CUDA an event in the stream, which does not wait."""
        span = cls(time.perf_counter())
        if device.type == "cuda":
            event: Any = torch.cuda.Event
            first, second = event(enable_timing=True), event(enable_timing=True)
            first.record()
            span.events = first, second
        return span

    def end(self) -> Span:
        """Stop it."""
        if self.events:
            self.events[1].record()
        self.ended = time.perf_counter()
        return self

    def seconds(self) -> float:
        """How long it was; on CUDA this waits for the second event."""
        if self.events is None:
            return self.ended - self.begun
        self.events[1].synchronize()
        return float(self.events[0].elapsed_time(self.events[1])) / 1000


@dataclass(slots=True)
class Call:
    """One call of a network that takes a time: what went in, and in which state.

    `rows` `(B, WIDTH)` float32, on the network's device: sampled elements of the latent, the time,
    and sampled elements of the conditioning. `size`: elements of one row's latent. `drawn`: random
    numbers the program had drawn before. `owner`: the same of networks that share weights. `grad`:
    whether it left a graph.
    """

    module: int
    owner: int
    rows: Tensor
    size: int
    dtype: str
    weights: Weights
    autocast: str
    compiled: bool
    dropout: bool
    drawn: int
    span: Span
    grad: bool = False


@dataclass(slots=True)
class Backward:
    """A backward, with what was computed again inside it (activation checkpointing)."""

    span: Span
    again: list[Span] = field(default_factory=list)


@lru_cache(maxsize=256)
def signature(kind: Any) -> inspect.Signature:
    """The arguments of a class's `forward`, without self."""
    whole = inspect.signature(kind.forward)
    return whole.replace(parameters=list(whole.parameters.values())[1:])


@lru_cache(maxsize=4096)
def takes_time(kind: Any) -> bool:
    """Whether a class's `forward` has an argument for the time of a step."""
    try:
        return not TIMES.isdisjoint(signature(kind).parameters)
    except (TypeError, ValueError):
        return False


def unwrapped(module: Any) -> tuple[nn.Module, bool]:
    """A network behind torch.compile's module, and whether it runs compiled."""
    compiled = False
    while type(module).__name__ == "OptimizedModule":
        module, compiled = module._orig_mod, True
    return module, compiled or module._compiled_call_impl is not None


def in_backward() -> bool:
    """Whether autograd's engine is what called us."""
    return bool(torch._C._current_graph_task_id() != -1)


def in_checkpointed() -> bool:
    """Whether a caller is the forward of reentrant checkpointing, which hides that grad is on."""
    frame: Any = sys._getframe(1)
    for _ in range(DEPTH):
        if frame is None:
            return False
        if frame.f_code is CheckpointFunction.forward.__code__:
            return True
        frame = frame.f_back
    return False


class Recorder:
    """Makes `Call`s of one network; remembers which of its parts have to be looked at."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        kind: Any = type(module)
        self._forward = signature(kind)
        self._places: dict[tuple[int, int, torch.device], Tensor] = {}
        self.stale = True
        self._versions, self._norms = -1, torch.zeros(0)
        self._ever: dict[int, nn.Parameter] = {}
        self.refresh()

    def refresh(self) -> None:
        """Look anew which weights are trained and which layers drop out or carry adapters.

        What was trained once stays so: adapters take turns in requiring gradients.
        """
        self.parameters = list(self.module.parameters())
        self._ever |= {id(p): p for p in self.parameters if p.requires_grad}
        self.weights = list(self._ever.values()) or self.parameters
        step = max(1, len(self.weights) // PROBED)
        self._probed = self.weights[::step][:PROBED]
        self._inside = {id(m) for m in self.module.modules()}
        self._dropouts = [m for m in self.module.modules() if getattr(m, "p", 0) and _drops(m)]
        adapted = (m for m in self.module.modules() if hasattr(m, "active_adapters"))
        self._adapted: Any = next((m for m in adapted if hasattr(m, "lora_A")), None)
        self.device = self.weights[0].device if self.weights else torch.device("cpu")

    def owns(self, ids: set[int]) -> bool:
        """Whether one of the parameters with these ids is the network's."""
        return any(id(p) in ids for p in self.parameters)

    def contains(self, module: nn.Module) -> bool:
        """Whether a module is a part of the network."""
        return id(module) in self._inside

    def gradient_bytes(self) -> int:
        """Of the gradients of what is trained."""
        return sum(p.numel() * p.element_size() for p in self.parameters if p.requires_grad)

    def record(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, compiled: bool, drawn: int
    ) -> Call | None:
        """The call that is about to be made, its clock started; None where no latent goes in."""
        try:
            given = self._forward.bind_partial(*args, **kwargs).arguments
        except TypeError:
            return None  # the call is about to fail for the same reason
        inputs = dict(_flat(given))
        names = list(inputs)
        found = next((n for n in names if _is_latent(n, inputs[n])), None)
        if found is None:
            return None
        latent = inputs.pop(found)
        times = next((v for n, v in inputs.items() if n in TIMES), 0.0)
        batch = len(latent)
        rows = [latent] if isinstance(latent, Tensor) else list(latent)
        with torch.no_grad(), torch.autocast(rows[0].device.type, enabled=False):
            parts = [self._sampled(latent, batch, LATENT), _times(times, batch, rows[0].device)]
            for name, value in inputs.items():
                if len(parts) == 2 + CONDITIONS:
                    break
                plain = isinstance(value, Tensor) and value.ndim > 1 and name not in TIMES
                if plain and len(value) == batch:
                    parts.append(self._sampled(value, batch, CONDITION))
            made = torch.cat(parts, dim=1)
            made = nn.functional.pad(made, (0, WIDTH - made.shape[1]))
            weights = self._state()
        kind = rows[0].device.type
        autocast = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "off"
        return Call(
            id(self.module),
            id(self.parameters[0]) if self.parameters else id(self.module),
            made,
            rows[0].numel() // (batch if isinstance(latent, Tensor) else 1),
            str(rows[0].dtype).removeprefix("torch."),
            weights,
            autocast.removeprefix("torch."),
            compiled,
            any(m.training for m in self._dropouts),
            drawn,
            Span.begin(rows[0].device),
        )

    def _sampled(self, value: Any, batch: int, count: int) -> Tensor:
        """Elements at even distances of each row: `(B, count)` float32, zeros where it has less."""
        if not isinstance(value, Tensor):
            return torch.cat([self._sampled(one[None], 1, count) for one in value])
        flat = value.detach().reshape(batch, -1)
        places = self._even(flat.shape[1], count, flat.device)
        found = flat.index_select(1, places).float()
        return nn.functional.pad(found, (0, count - found.shape[1]))

    def _even(self, size: int, count: int, device: torch.device) -> Tensor:
        key = (size, count, device)
        if key not in self._places:
            taken = min(size, count)
            at = [(2 * i + 1) * size // (2 * taken) for i in range(taken)]
            self._places[key] = torch.tensor(at, device=device)
        return self._places[key]

    def _state(self) -> Weights:
        """Which weights these are. `.data` writes leave no version behind: probes see those."""
        versions = sum(p._version for p in self.weights)
        if self.stale or versions != self._versions:
            local = [w for p in self.weights if (w := _local(p)).numel()]
            norms = torch._foreach_norm(local) if local else []
            self._norms = torch.stack([n.float() for n in norms]) if local else torch.zeros(0)
            self.stale, self._versions = False, versions
        probes: list[Tensor] = []
        for parameter in self._probed:
            flat = _local(parameter).flatten()
            probes.append(flat.index_select(0, self._even(len(flat), PROBES, flat.device)).float())
        adapted = self._adapted
        active: tuple[str, ...] = ()
        if adapted is not None:
            active = () if adapted.disable_adapters else tuple(adapted.active_adapters)
        return torch.cat(probes) if probes else torch.zeros(0), self._norms, active


def _local(parameter: Tensor) -> Tensor:
    """A parameter's own storage; of a sharded one this rank's part."""
    inner = getattr(parameter, "_local_tensor", parameter)
    return inner.detach()


def _drops(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd)


def _is_latent(name: str, value: Any) -> bool:
    if name in TIMES:
        return False
    if isinstance(value, list):  # some take a picture each, not a batch
        return bool(value) and all(isinstance(v, Tensor) for v in value)
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1


def _flat(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Arguments by name, those in dictionaries too."""
    for name, value in given.items():
        if isinstance(value, Mapping):
            yield from _flat({f"{name}.{inner}": v for inner, v in value.items()})
        elif name == "args" and isinstance(value, tuple):
            yield from ((f"args.{i}", v) for i, v in enumerate(value))
        else:
            yield name, value


def _times(value: Any, batch: int, device: torch.device) -> Tensor:
    """The time of each row, `(B, 1)` float32; of a network that takes one per token the largest."""
    if not isinstance(value, Tensor):
        number = float(value) if isinstance(value, (int, float)) else 0.0
        return torch.full((batch, 1), number, device=device)
    times = value.detach().to(device, torch.float32, non_blocking=True)
    if times.numel() in (1, batch):
        return times.reshape(-1, 1).expand(batch, 1)
    return times.reshape(batch, -1).amax(1, keepdim=True)
