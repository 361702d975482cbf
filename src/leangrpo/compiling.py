"""Compiled blocks: torch.compile of what a denoiser repeats, everything around it as it was.

Compiled is a block's `forward`, not its call: the hooks of FSDP2, of checkpointing and of the
policy stay outside, so that a block is one graph, and module names, weights and files are the same
as without. It comes last, after adapters, copies and sharding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .data import Transition
from .errors import problem
from .parallel import blocks

if TYPE_CHECKING:
    from .policy import Policy

VARIANTS = 64
"""Graphs of one class of blocks at most. A run has some six of each kind of block (with and without
gradients, of training's and evaluation's batches, of the reference), so that more is a mistake."""


def compile_blocks(policy: Policy, *, graphs_used_twice: bool, backend: str = "inductor") -> None:
    """Compile the repeated blocks of a policy's denoisers in place, on their next call.

    The policy then samples its selected steps with gradients under every schedule, as the graph
    with gradients may round otherwise than the one without: a replay is bitwise its rollout.
    `graphs_used_twice`: reweight differentiates a kept graph twice, for a KL in the loss, so its
    buffers must not be written into. `backend` is torch.compile's. Raises LeanError for a denoiser
    without such blocks, and from a block's call when it cannot be compiled.
    """
    import torch._functorch.config  # torch.compile imports it anyway, and torch alone does not

    if graphs_used_twice:
        torch._functorch.config.donated_buffer = False
    for module in policy.networks:
        found = repeated(module)
        if not found:
            rule = f"{type(module).__name__} has no repeated blocks"
            raise problem("model.compile", True, rule, "Set it to false.")
        for block in found:
            # an instance's forward: the class, and with it other models, keep theirs
            block.__dict__["forward"] = _compiled(block, backend)
    policy.compiled = True


def release_blocks(policy: Policy) -> None:
    """Give compiled blocks back as they were."""
    for module in policy.networks if policy.compiled else ():
        for block in repeated(module):
            del block.__dict__["forward"]
    policy.compiled = False


def repeated(module: nn.Module) -> list[nn.Module]:
    """The blocks to compile: those diffusers lists for regional compilation, or else the model's
    blocks as they are sharded. (diffusers' own `compile_repeated_blocks` takes only the first, and
    lists none for Stable Diffusion 3, say.)"""
    names = getattr(module, "_repeated_blocks", None) or ()
    # by the class that the model names: FSDP2 derives one of its own from it
    found = [m for m in module.modules() if {c.__name__ for c in type(m).__mro__} & {*names}]
    inside = {id(inner) for m in found for inner in m.modules() if inner is not m}
    return [m for m in found if id(m) not in inside] or blocks(module)


def require_compiler(device: torch.device) -> None:
    """Raise LeanError when this machine cannot compile for `device`: before a model is loaded."""
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            rule = "torch.compile needs a C++ compiler on a CPU, and finds none"
            remedy = "Install g++ or name one in the variable CXX, or set model.compile=false."
            raise problem("model.compile", True, rule, remedy) from error
    else:
        from torch.utils._triton import has_triton

        if not has_triton():
            rule = f"torch.compile needs Triton on {device.type}, and finds none that works here"
            remedy = "Install the triton of this torch, or set model.compile=false."
            raise problem("model.compile", True, rule, remedy)


def detached(t: Transition) -> Transition:
    """The same step without its graph."""
    names = ("log_prob", "mean", "std", "kl_std", "output")
    tensors: dict[str, Any] = {n: v.detach() for n in names if (v := getattr(t, n)) is not None}
    return replace(t, **tensors)


def _compiled(block: nn.Module, backend: str) -> Callable[..., Any]:
    """A block's forward, compiled for the shapes it meets and never quietly run without.

    `fullgraph`: a part that cannot be compiled, and one variant too many, are errors rather than a
    fall back to eager, whose numbers would be others in the middle of a run. `deterministic`: no
    kernel is chosen by timing it, so that a resumed run has the same ones.
    """
    options = {"deterministic": True} if backend == "inductor" else None
    original = block.forward
    compile_: Any = torch.compile  # its stub lacks recompile_limit
    compiled = compile_(
        original,
        fullgraph=True,
        dynamic=False,
        backend=backend,
        options=options,
        recompile_limit=VARIANTS,
    )

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        try:
            return compiled(*args, **kwargs)
        except FailOnRecompileLimitHit as error:
            rule = (
                f"{type(block).__name__} was called in more than {VARIANTS} ways (shapes, dtypes, "
                "adapters), each of which is compiled"
            )
            remedy = "Keep prompts and pictures to few shapes, or set it to false."
            raise problem("model.compile", True, rule, remedy) from error
        except TorchDynamoException as error:
            reason = " ".join(str(error).split())[:300]
            rule = f"torch cannot compile {type(block).__name__} ({type(error).__name__}: {reason})"
            raise problem("model.compile", True, rule, "Set it to false.") from error

    return forward
