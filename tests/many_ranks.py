"""First updates on several ranks, one process start for many of them.

    torchrun --nproc-per-node 2 tests/many_ranks.py OUT CASES.json

`CASES.json` maps a name to the settings of a run. Rank 0 writes OUT/<name>.pt with the gradient the
optimizer got, the weights after it, the line of metrics, and every sample's latents and reward.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from leangrpo.config import load_config
from leangrpo.oracle import float64_throughout
from leangrpo.parallel import leave, whole
from leangrpo.setup import set_up
from leangrpo.train import one_update


def brightness(images: torch.Tensor, prompts: list[str], metadata: list[Any]) -> torch.Tensor:
    """Mean brightness, weighted so that no two pixels count the same."""
    flat = images.flatten(1).double()
    return (flat * torch.linspace(0, 1, flat.shape[1], dtype=torch.float64)).mean(dim=1)


def flat(dark: torch.Tensor, prompts: list[str], metadata: list[Any]) -> list[float]:
    """The same for all pictures of prompts with an "a" in them, else brightness."""
    scores = brightness(dark, prompts, metadata).tolist()
    return [0.0 if "dog" in p else s for p, s in zip(prompts, scores, strict=True)]


def contrast(images: torch.Tensor, prompts: list[str], metadata: list[Any]) -> torch.Tensor:
    return images.flatten(1).double().std(dim=1)


def run(overrides: list[str], updates: int = 1) -> dict[str, Any]:
    with ExitStack() as stack:
        if "model.dtype=float64" in overrides:
            stack.enter_context(float64_throughout())
        s = set_up(load_config("embedded", overrides), quiet=True)
        samples: dict[Any, torch.Tensor] = {}
        gradients: list[torch.Tensor] = []
        sample = s.policy.sample

        def watched(prompts: Any, keys: Any, **options: Any) -> Any:
            rollout = sample(prompts, keys, **options)
            if options.get("decode", True):
                samples.update(zip(keys, rollout.latents.clone(), strict=True))
            return rollout

        def look(optimizer: Any, args: Any, kwargs: Any) -> None:
            if not gradients:
                gradients.extend(whole(p.grad).flatten().double() for p in s.policy.parameters)

        s.policy.sample = watched  # type: ignore[method-assign]
        hook = s.optimizer.register_step_pre_hook(look)
        with torch.no_grad():  # away from the start, where LoRA's B is 0
            for i, p in enumerate(s.policy.parameters):
                full = whole(p)
                noise = torch.randn(full.shape, generator=torch.Generator().manual_seed(i))
                from leangrpo.parallel import scatter_like

                p.add_(scatter_like(0.02 * noise.to(full), p))
            if s.critic is not None:  # in float64 like its features, and not 0 everywhere
                network = s.critic.value.network.double()
                network.last += 0.1 * torch.linspace(-1, 1, network.last.numel())
        with s.scorer, s.judge:
            lines = [one_update(s, u) for u in range(updates)]
        hook.remove()
        close = getattr(s.record, "close", None)
        if close:
            close()
        weights = torch.cat([whole(p.detach()).flatten().double() for p in s.policy.parameters])
        parts = s.world.gather(samples)
    every = {k: v for part in parts for k, v in part.items()}
    assert len(every) == sum(len(p) for p in parts), "a sample was made twice"
    return {
        "gradient": torch.cat(gradients) if gradients else torch.empty(0),
        "weights": weights,
        "lines": lines,
        "samples": {
            tuple(vars_of(k)): v for k, v in sorted(every.items(), key=lambda i: str(i[0]))
        },
    }


def vars_of(key: Any) -> list[int]:
    return [key.update, key.prompt, key.generation]


def main(out: Path, cases: dict[str, Any]) -> None:
    torch.use_deterministic_algorithms(False)
    for name, overrides in cases.items():
        result = run([*overrides, f"run.dir={out / ('run-' + name)}"])
        if not dist.is_initialized() or dist.get_rank() == 0:
            torch.save(result, out / f"{name}.pt")
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")))
