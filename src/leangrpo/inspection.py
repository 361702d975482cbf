"""What `leangrpo check` says of a pipeline: what was found in it, and whether it can be trained."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from .components import denoisers
from .config import Config
from .console import for_tables
from .data import SampleKey, Transition
from .errors import LeanError
from .loading import attention_targets, load_pipeline
from .oracle import float64_throughout
from .parallel import blocks
from .pipeline import Sampling
from .policy import Policy
from .reweight import Reweight
from .schedules import Native, Retain, Schedule
from .setup import choose_trained, make_sampling, pick_device
from .twin import make_twin

PROMPT = "a red cube"
BOUNDS = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 0.1, torch.float16: 0.1}
"""Relative L2 between reweight's and native's gradient: rounding (docs/schedules.md)."""

SMALL = {"height": 256, "width": 256, "num_frames": 9}
"""What a twin is called with where the settings do not say."""


def inspect_pipeline(config: Config, *, tiny: bool = False, kernel_given: bool = True) -> Any:
    """Load the pipeline of a config, or its twin, say what is in it and try one group.

    Returns the report as a dictionary, with `trainable` true when the three schedules agree, and
    prints it. Without `kernel_given` the kernel is the one of the scheduler's family. Raises
    LeanError when the pipeline cannot be loaded; that it cannot be trained is part of the report.
    """
    from diffusers.utils import logging

    logging.set_verbosity_error()
    device = pick_device(config.run.device)
    report: dict[str, Any] = {}
    for options in TWINS if tiny else ({},):
        began = time.perf_counter()
        pipe = _load(config, tiny, options)
        report = {
            "pipeline": config.model.pipeline,
            "class": type(pipe).__name__,
            "twin": tiny,
            "seconds_loading": time.perf_counter() - began,
            "scheduler": type(getattr(pipe, "scheduler", None)).__name__,
            "denoisers": {name: _describe(module) for name, module in denoisers(pipe).items()},
            **_interface(pipe),
            "trainable": False,
        }
        try:
            choose_trained(config, pipe)
            if config.model.train == "lora":
                _move_adapters(pipe)
            pipe.to(device)
            policy, kernel = _policy(config, pipe, _sampling(config, pipe, tiny), kernel_given)
            report |= {"kernel": kernel} | _plan(policy)
        except LeanError as error:
            report["refused"] = str(error)
            break
        except (ValueError, TypeError, RuntimeError, LookupError, AttributeError) as error:
            # the pipeline's own complaint: of its inputs, or of a twin made too small
            report["refused"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            continue
        report |= _try(policy, getattr(torch, config.model.dtype))
        break
    _print(report)
    return report


TWINS: tuple[dict[str, bool], ...] = (
    {},
    {"narrow": False},
    {"narrow": False, "shorten_encoders": False},
)
"""Twins to try, the smallest first: not every network's widths follow from its heads."""


def _load(config: Config, tiny: bool, options: dict[str, bool]) -> Any:
    m, dtype = config.model, getattr(torch, config.model.dtype)
    if tiny:
        return make_twin(m.pipeline, dtype=dtype, revision=m.revision, **options)
    return load_pipeline(m.pipeline, dtype=dtype, revision=m.revision, variant=m.variant)


def _describe(module: nn.Module) -> dict[str, Any]:
    repeated: dict[str, int] = {}
    for block in blocks(module):
        name = type(block).__name__
        repeated[name] = repeated.get(name, 0) + 1
    return {
        "class": type(module).__name__,
        "parameters": sum(p.numel() for p in module.parameters()),
        "blocks": repeated,
        "lora_targets": attention_targets(module),
    }


def _interface(pipe: Any) -> dict[str, Any]:
    """Which kind of guidance the call takes, and which pictures or videos."""
    takes = inspect.signature(type(pipe).__call__).parameters
    guidance = [n for n in ("guidance_scale", "true_cfg_scale", "guidance_scale_2") if n in takes]
    if getattr(pipe, "guider", None) is not None:
        guidance.append(f"guider {type(pipe.guider).__name__}")
    embedded = [
        name
        for name, module in denoisers(pipe).items()
        if getattr(module.config, "guidance_embeds", False)
    ]
    if embedded:
        guidance.append(f"embedded in {', '.join(embedded)}")
    media = [n for n in ("image", "video", "mask_image", "control_image") if n in takes]
    return {"guidance": guidance, "media": media}


def _sampling(config: Config, pipe: Any, tiny: bool) -> Sampling:
    """The settings', small for a twin."""
    takes = inspect.signature(type(pipe).__call__).parameters
    given = make_sampling(config)
    if not tiny:
        return given
    small = {k: v for k, v in SMALL.items() if k in takes and getattr(given, k) is None}
    return replace(given, **small)  # type: ignore[arg-type]


def _pictures(pipe: Any, sampling: Sampling) -> dict[str, Any]:
    """A picture where the call takes one and the settings have none."""
    takes = inspect.signature(type(pipe).__call__).parameters
    if "image" not in takes or "image" in sampling.call:
        return {}
    from PIL import Image

    size = (sampling.width or 512, sampling.height or 512)
    return {"image": Image.linear_gradient("L").resize(size).convert("RGB")}


def _policy(
    config: Config, pipe: Any, sampling: Sampling, kernel_given: bool
) -> tuple[Policy, str]:
    """The policy, with the kernel asked for or the one that fits the scheduler."""
    k = config.kernel
    options: dict[str, Any] = {"reduce": k.reduce, "seed": config.seed}
    options["inputs"] = _pictures(pipe, sampling)
    if kernel_given:
        policy = Policy(pipe, sampling, kernel=k.name, noise_level=k.noise_level, **options)
        return policy, k.name
    ddim = hasattr(pipe.scheduler, "alphas_cumprod") and not pipe.scheduler.config.get(
        "use_flow_sigmas"
    )
    name, level = ("ddim", 1.0) if ddim else ("flow_sde", 0.7)
    return Policy(pipe, sampling, kernel=name, noise_level=level, **options), name


def _plan(policy: Policy) -> dict[str, Any]:
    plan = policy.plan()
    return {
        "latent": list(plan.shape),
        "table": [round(v, 4) for v in plan.table.tolist()],
        "timesteps": [round(v, 3) for v in plan.timesteps.double().tolist()],
        "noise": [round(v, 4) for v in plan.std.tolist()],
    }


def _try(policy: Policy, dtype: torch.dtype) -> dict[str, Any]:
    """One group of two under each schedule, the same samples each time."""
    std = policy.plan().std.tolist()
    possible = [i for i in range(len(std)) if std[i] > 0]
    selected = sorted({possible[0], possible[len(possible) // 2]})
    makers: dict[str, Callable[[], Schedule]] = {
        "native": lambda: Native(policy, replay=policy.replay),
        "retain": lambda: Retain(policy),
        "reweight": lambda: Reweight(policy),
    }
    gradients: dict[str, dict[str, Tensor]] = {}
    seconds, calls, errors = {}, {}, 0.0
    for name, make in makers.items():
        seen: list[tuple[str, int]] = []
        policy.on_call = lambda n, i, seen=seen: seen.append((n, i))
        began = time.perf_counter()
        with float64_throughout() if dtype == torch.float64 else nullcontext():
            statistics = _update(policy, make(), selected)
        seconds[name], calls[name] = time.perf_counter() - began, len(seen)
        errors = max(errors, statistics.ratio_error)
        gradients[name] = {
            key: p.grad.detach().clone()
            for key, p in policy.named_parameters()
            if p.grad is not None
        }
        for parameter in policy.parameters:
            parameter.grad = None
    policy.on_call = None
    native = gradients["native"]
    silent = [key for key, _ in policy.named_parameters() if key not in native]
    bitwise = all(torch.equal(g, native[key]) for key, g in gradients["retain"].items())
    apart = {name: _distance(gradients[name], native) for name in ("retain", "reweight")}
    bound = BOUNDS[dtype]
    sound = bool(native) and all(torch.isfinite(g).all() for g in native.values())
    return {
        "selected": selected,
        "trained": sum(p.numel() for p in policy.parameters),
        "without_gradient": silent,
        "ratio_error": errors,
        "retain_bitwise": bitwise,
        "retain_rel_l2": apart["retain"],
        "reweight_rel_l2": apart["reweight"],
        "bound": bound,
        "denoiser_calls": calls,
        "seconds": seconds,
        "trainable": sound and max(apart.values()) <= bound,
    }


def _update(policy: Policy, schedule: Schedule, selected: list[int]) -> Any:
    schedule.begin(2, len(selected))
    keys = [SampleKey(0, 0, g) for g in range(2)]
    for key in keys:

        def take(transition: Transition) -> None:
            schedule.transition(transition)

        policy.sample(
            [PROMPT],
            [key],
            selected=selected,
            grad=schedule.needs_graph,
            decode=False,
            on_transition=take,
        )
    schedule.advantages({keys[0]: 1.0, keys[1]: -0.5})
    return schedule.finish()


def _distance(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """Relative L2 of two gradients; infinite where one has a parameter the other has not."""
    if some.keys() != others.keys() or not others:
        return float("inf")
    square = sum(float((g.double() - others[k].double()).square().sum()) for k, g in some.items())
    return float((square / sum(float(g.double().square().sum()) for g in others.values())) ** 0.5)


def _move_adapters(pipe: Any) -> None:
    """A fresh LoRA has a factor of zeros, behind which half of it has no gradient."""
    for module in denoisers(pipe).values():
        for name, parameter in module.named_parameters():
            if "lora_B" in name:
                generator = torch.Generator().manual_seed(0)
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.data.copy_(0.01 * noise)


def _print(report: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    twin = ", a random twin of two layers of each kind" if report["twin"] else ""
    table.add_row("pipeline", f"{report['class']} ({report['pipeline']}{twin})")
    for name, found in report["denoisers"].items():
        kinds = ", ".join(f"{n} x {kind}" for kind, n in found["blocks"].items()) or "none found"
        table.add_row(name, f"{found['class']}, {found['parameters'] / 1e6:.1f}M; blocks: {kinds}")
        targets = ", ".join(found["lora_targets"]) or "none found; name them in model.lora.targets"
        table.add_row("", f"LoRA on: {targets}")
    table.add_row("scheduler", report["scheduler"])
    table.add_row("guidance", ", ".join(report["guidance"]) or "none")
    if report["media"]:
        table.add_row("takes", ", ".join(report["media"]))
    if "latent" in report:
        levels = " ".join(f"{v:g}" for v in report["table"])
        table.add_row("latent", " x ".join(map(str, report["latent"])))
        table.add_row("levels", levels)
        table.add_row(
            "noise", " ".join(f"{v:g}" for v in report["noise"]) + f" ({report['kernel']})"
        )
    if "selected" in report:
        silent = report["without_gradient"]
        calls = ", ".join(f"{name} {n}" for name, n in report["denoiser_calls"].items())
        table.add_row("trained", f"{report['trained'] / 1e6:.2f}M parameters")
        if silent:
            some = ", ".join(silent[:4]) + (" ..." if len(silent) > 4 else "")
            table.add_row("", f"{len(silent)} tensors are not reached by the gradient: {some}")
        retain = "bitwise native" if report["retain_bitwise"] else f"{report['retain_rel_l2']:.1e}"
        table.add_row("retain", retain)
        table.add_row(
            "reweight", f"{report['reweight_rel_l2']:.1e} from native (bound {report['bound']:g})"
        )
        table.add_row(
            "network calls", f"{calls}, for 2 generations, {len(report['selected'])} steps"
        )
    console = for_tables()
    console.print(table)
    if "refused" in report:
        console.print(f"cannot be trained: {report['refused']}", markup=False)
    elif report["trainable"]:
        console.print("can be trained: the three schedules give the same gradient")
    else:
        console.print("cannot be trained: the schedules do not agree")
