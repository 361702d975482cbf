"""The zoo: a tiny pipeline of every kind that is tried, and the table of all there are.

    PYTHONPATH=src:tests python tests/zoo.py --table

prints the table of docs/pipelines.md. Everything is made here, from a seed; nothing is downloaded.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
import zoo_image
import zoo_refused
import zoo_video
from torch import nn
from zoo_parts import Specimen

from leangrpo.errors import LeanError
from leangrpo.policy import Policy, Sampling

SPECIMENS: Mapping[str, Specimen] = zoo_image.SPECIMENS | zoo_video.SPECIMENS
REFUSED: Mapping[str, zoo_refused.Refused] = zoo_refused.REFUSED
STEPS = 4

FAST = (
    "StableDiffusion",
    "StableDiffusionImg2Img",
    "FluxKontext",
    "QwenImage",
    "Mochi",
    "Wan (two denoisers)",
    "LTX2ImageToVideo",
)
"""Traits of an interface: cumulated alphas, a start of its own that leaves out steps, a picture
beside the prompt, guidance by a second call, sigmas upwards, two denoisers, two latents. The others
(latents in lists, written in place, frames in rows) take longer, and are in the slow tests."""


def kernel_of(pipe: Any) -> tuple[str, float]:
    """The kernel of the pipeline's family, and a noise level for it."""
    scheduler = pipe.scheduler
    flow = hasattr(scheduler, "scale_noise") or scheduler.config.get("use_flow_sigmas")
    return ("flow_sde", 0.7) if flow else ("ddim", 1.0)


def sampling_of(specimen: Specimen, guided: bool) -> Sampling:
    """How a specimen is called, with its guidance or without."""
    options: dict[str, Any] = dict(specimen.guided or {}) if guided else {"guidance": 1.0}
    call = {**specimen.call, **options.pop("call", {})}
    return Sampling(STEPS, call=call, **options)


def policy_of(specimen: Specimen, *, guided: bool = False, pipe: Any = None) -> Policy:
    """A policy over a fresh pipeline, always of the same weights."""
    if pipe is None:
        torch.manual_seed(0)
        pipe = specimen.build()
    kernel, level = kernel_of(pipe)
    return Policy(pipe, sampling_of(specimen, guided), kernel=kernel, noise_level=level, seed=5)


@dataclass(frozen=True)
class Row:
    """What the table says of one pipeline class."""

    name: str
    status: str
    details: tuple[str, ...]


def family(pipe: Any) -> str:
    return "flow" if kernel_of(pipe)[0] == "flow_sde" else "DDIM"


def describe(name: str) -> Row:
    """The table's row of a specimen, from running one step of it, guided where it can be."""
    specimen = SPECIMENS[name]
    torch.manual_seed(0)
    pipe = specimen.build()
    scheduler = type(pipe.scheduler).__name__.removesuffix("Scheduler")
    guided = specimen.guided is not None
    policy = policy_of(specimen, guided=guided, pipe=pipe)
    calls: list[int] = []
    for module in policy.denoisers:
        module.register_forward_pre_hook(
            lambda _, args, kwargs: calls.append(_rows(args, kwargs)), with_kwargs=True
        )
    from leangrpo.data import SampleKey

    policy.sample(["a"], [SampleKey(0, 0, 0)], decode=False)
    plan = policy.plan()
    steps = STEPS - plan.begin
    per_step = len(calls) // steps
    frames = 1 if not calls else min(calls)
    style = "none"
    if guided and per_step > 1:
        style = f"{per_step} calls a step"
    elif guided and frames > 1:
        style = f"a batch of {frames}"
    elif guided:
        style = "an argument"
    if getattr(pipe, "guider", None) is not None and guided:
        style += ", by a guider"
    start = "its own" if not plan.direct else "`latents`"
    networks = sorted({type(m).__name__ for m in policy.denoisers})
    latents = "" if plan.voices == 1 else f", {plan.voices} latents"
    return Row(
        type(pipe).__name__, "works",
        (family(pipe), scheduler, ", ".join(networks), style, start + latents),
    )  # fmt: skip


def _rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    first = args[0] if args else next(iter(kwargs.values()))
    return len(first)


def classes() -> list[str]:
    """All pipeline classes that diffusers exports."""
    return sorted(name for name in dir(diffusers) if name.endswith("Pipeline"))


def not_tried(name: str, tried: Mapping[str, str]) -> str:
    """Why a class is in neither list: what it lacks by its interface, or its tried relatives."""
    kind = getattr(diffusers, name)
    if "Modular" in name:
        return "modular: blocks put together at run time instead of one call"
    if name.startswith("Onnx") or "Onnx" in name:
        return "runs in ONNX, which has no gradients"
    if "dummy" in kind.__module__:
        return "needs a package beside diffusers"
    if "deprecated" in kind.__module__:
        return "deprecated in diffusers"
    call = inspect.getsource(kind.__call__) if "__call__" in vars(kind) else ""
    if "scheduler.step" not in call:
        return "has no loop over `scheduler.step`: it calls other pipelines, or a network once"
    package = kind.__module__.rsplit(".", 1)[0]
    if relatives := [other for other, where in tried.items() if where == package]:
        return "a relative of " + ", ".join(sorted(relatives)[:2])
    return "not tried"


def table() -> str:
    """The tables of docs/pipelines.md."""
    rows = {name: describe(name) for name in SPECIMENS}
    lines = [
        "| pipeline | family | scheduler | denoiser | guidance | starts from |",
        "|---|---|---|---|---|---|",
    ]
    for name in sorted(rows):
        note = "".join(re.findall(r" \(.*\)", name))
        lines.append(f"| {rows[name].name}{note} | " + " | ".join(rows[name].details) + " |")
    lines += ["", "| refused | with what to do |", "|---|---|"]
    lines += [f"| {name} | {reason(name)} |" for name in sorted(REFUSED)]
    done = {row.name for row in rows.values()}
    done |= {refused.pipeline for refused in REFUSED.values()}
    tried = {n: getattr(diffusers, n).__module__.rsplit(".", 1)[0] for n in sorted(done)}
    groups: dict[str, list[str]] = {}
    for name in classes():
        if name not in done and name != "DiffusionPipeline":
            groups.setdefault(not_tried(name, tried), []).append(name.removesuffix("Pipeline"))
    lines += ["", "| not tried, because | pipelines |", "|---|---|"]
    lines += [f"| {why} | {', '.join(groups[why])} |" for why in sorted(groups)]
    return "\n".join(lines)


def reason(name: str) -> str:
    """What the package says when it refuses a specimen."""
    refused = REFUSED[name]
    torch.manual_seed(0)
    pipe = refused.build()
    kernel, level = kernel_of(pipe)
    kernel, level = refused.kernel or (kernel, level)
    try:
        Policy(pipe, Sampling(STEPS, **refused.sampling), kernel=kernel, noise_level=level)
    except LeanError as error:
        return " ".join(str(error).split())
    raise AssertionError(f"{name} is not refused")


def parameters(pipe: Any) -> int:
    """How many numbers a pipeline's denoisers have."""
    from leangrpo.components import denoisers

    some: Callable[[nn.Module], int] = lambda m: sum(p.numel() for p in m.parameters())  # noqa: E731
    return sum(some(m) for m in denoisers(pipe).values())


if __name__ == "__main__":
    if sys.argv[1:] != ["--table"]:
        raise SystemExit(__doc__)
    import warnings

    warnings.simplefilter("ignore")
    diffusers.utils.logging.set_verbosity_error()
    print(table())
