"""Policy-gradient training of diffusers pipelines without recomputing the rollout."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .advantages import group_advantages
    from .checks import check
    from .config import Config, load_config, recipe_names
    from .data import SampleKey, Transition
    from .datasets import Example, read_examples
    from .errors import LeanError
    from .loading import load_pipeline, make_trainable
    from .pipeline import Sampling
    from .policy import Policy
    from .reweight import Reweight
    from .schedules import Native, Retain

__version__ = "0.1.0"

# Where each public name lives. They are imported on first use, so that `import leangrpo` and the
# command line's help load neither torch nor diffusers.
_HOMES = {
    "Config": "config",
    "Example": "datasets",
    "LeanError": "errors",
    "Native": "schedules",
    "Policy": "policy",
    "Retain": "schedules",
    "Reweight": "reweight",
    "SampleKey": "data",
    "Sampling": "pipeline",
    "Transition": "data",
    "check": "checks",
    "group_advantages": "advantages",
    "load_config": "config",
    "load_pipeline": "loading",
    "make_trainable": "loading",
    "read_examples": "datasets",
    "recipe_names": "config",
}

__all__ = [
    "Config",
    "Example",
    "LeanError",
    "Native",
    "Policy",
    "Retain",
    "Reweight",
    "SampleKey",
    "Sampling",
    "Transition",
    "__version__",
    "check",
    "group_advantages",
    "load_config",
    "load_pipeline",
    "make_trainable",
    "read_examples",
    "recipe_names",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module (PEP 562)."""
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
