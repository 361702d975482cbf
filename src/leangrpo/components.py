"""Which networks of a pipeline are the policy: found by their interface."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .errors import problem

WELL_KNOWN = ("transformer", "transformer_2", "unet")
"""Where diffusers usually keeps the network that is called once per step; these come first."""

_TIME = frozenset({"timestep", "timesteps", "t", "r", "timestep_ratio", "sigma"})


def denoisers(pipe: Any) -> dict[str, nn.Module]:
    """The networks of a pipeline that predict a step, by component name.

    A denoiser is a component whose `forward` takes the time of the step. ControlNets take it too,
    and a `conditioning_scale`: they condition a denoiser and stay as they are. The prior of a
    pipeline that has a `prior_scheduler` belongs to another loop.
    """
    components: dict[str, Any] = pipe.components
    other_loops = [n.removesuffix("_scheduler") for n in components if n.endswith("_scheduler")]
    found: dict[str, nn.Module] = {}
    names = [*WELL_KNOWN, *(n for n in components if n not in WELL_KNOWN)]
    for name in names:
        module = getattr(pipe, name, None)
        elsewhere = any(name == loop or name.startswith(f"{loop}_") for loop in other_loops)
        if isinstance(module, nn.Module) and not elsewhere:
            takes = inspect.signature(module.forward).parameters
            if name in WELL_KNOWN or (_TIME & takes.keys() and "conditioning_scale" not in takes):
                found[name] = module
    return found


def chosen(pipe: Any, names: Sequence[str] | None) -> dict[str, nn.Module]:
    """The denoisers of those names, all of them for None.

    Raises LeanError that names the ones there are.
    """
    there = denoisers(pipe)
    for name in names or ():
        if name not in there:
            raise problem(
                "model.denoisers",
                list(names or ()),
                f"{type(pipe).__name__} has no denoiser {name!r}; it has "
                + (", ".join(there) or "none"),
            )
    return {n: m for n, m in there.items() if names is None or n in names}


def main_dtype(module: nn.Module) -> torch.dtype:
    """The dtype most of a network's own weights have (adapters and a few norms may differ)."""
    counts: dict[torch.dtype, int] = {}
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point() and "lora_" not in name:
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return max(counts, key=lambda dtype: counts[dtype])


class StandIn(nn.Module):
    """A denoiser in a pipeline that is brought back to one of its steps.

    While `skip()` holds it returns zeros in the shape the network would return, which only the
    network itself knows: it is asked once for every set of input shapes (`shapes` remembers).
    Otherwise it is the network. What the pipeline reads from it are the network's attributes.
    """

    def __init__(self, module: nn.Module, skip: Callable[[], bool], shapes: dict[Any, Any]) -> None:
        super().__init__()
        self.__dict__["network"] = module  # not a child: its names and hooks stay its own
        self.__dict__["skip"], self.__dict__["shapes"] = skip, shapes

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["network"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = (id(self.network), _shapes(args), _shapes(kwargs))
        if self.skip() and key in self.shapes:
            return _map(self.shapes[key], lambda made: made())
        output = self.network(*args, **kwargs)
        self.shapes.setdefault(key, _map(output, _zeros))
        return output


def _zeros(value: Any) -> Callable[[], Any]:
    if not isinstance(value, torch.Tensor):
        return lambda: value
    shape, dtype, device = value.shape, value.dtype, value.device
    return lambda: torch.zeros(shape, dtype=dtype, device=device)


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """`change` on every leaf of tuples, lists and diffusers' outputs (which are dicts)."""
    if isinstance(value, dict):
        return type(value)(**{k: _map(v, change) for k, v in value.items()})
    if isinstance(value, (tuple, list)):
        return type(value)(_map(v, change) for v in value)
    return change(value)


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return tuple((k, _shapes(v)) for k, v in sorted(value.items()))
    if isinstance(value, (tuple, list)):
        return tuple(_shapes(v) for v in value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else None
