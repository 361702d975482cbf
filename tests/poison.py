"""Models whose numbers go wrong for some trajectories, the way overflow in 16 bits looks."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from leangrpo.policy import Policy

KINDS = ("latents", "log_prob", "images", "gradient")


class _Backward(torch.autograd.Function):
    """As it is; the gradient of some rows is NaN."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bad: Tensor) -> Any:
        ctx.save_for_backward(bad)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (bad,) = ctx.saved_tensors
        return gradients[0] * bad.view(-1, *[1] * (gradients[0].ndim - 1)), None


def poison(
    policy: Policy, where: Collection[tuple[int, int]], kind: str, *, step: int = 1, update: int = 0
) -> None:
    """From now on the trajectories `where` (prompt, generation) of an update go wrong at a step.

    `latents`: what the network is given is NaN, and so is all that follows; `log_prob`: only the
    log-probability; `images`: only the picture; `gradient`: only the backward. Without guidance.
    """

    def bad() -> Tensor:
        tape = policy._tape
        hit = [
            k.update == update and (k.prompt, k.generation) in where and tape.cursor == step
            for k in tape.keys
        ]
        return torch.tensor([float("nan") if h else 1.0 for h in hit])

    def before(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        x = kwargs["hidden_states"]
        factor = bad().to(x.dtype)
        if not policy._tape.keys or len(factor) != len(x) or factor.isfinite().all():
            return None
        return args, {**kwargs, "hidden_states": x * factor.view(-1, *[1] * (x.ndim - 1))}

    def after(module: Any, args: Any, output: Any) -> Any:
        y = output[0]
        factor = bad().to(y.dtype)
        if len(factor) != len(y) or not y.requires_grad or factor.isfinite().all():
            return None
        marked: Any = _Backward.apply
        return (marked(y, factor), *output[1:])

    if kind == "latents":
        policy.denoisers[0].register_forward_pre_hook(before, with_kwargs=True)
    elif kind == "gradient":
        policy.denoisers[0].register_forward_hook(after)
    elif kind == "log_prob":
        score = policy.kernel.log_prob

        def log_prob(*args: Any, **kwargs: Any) -> Tensor:
            found = score(*args, **kwargs)
            return found * bad().to(found) if len(policy._tape.keys) == len(found) else found

        object.__setattr__(policy.kernel, "log_prob", log_prob)
    elif kind == "images":
        sample = policy.sample

        def spoiled(prompts: Any, keys: Any, **options: Any) -> Any:
            rollout = sample(prompts, keys, **options)
            for row, k in enumerate(keys):
                wrong = k.update == update and (k.prompt, k.generation) in where
                if wrong and rollout.images is not None:
                    rollout.images[row, 0, 0, 0] = torch.nan
            return rollout

        policy.sample = spoiled  # type: ignore[method-assign]
