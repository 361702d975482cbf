"""The same updates of a critic on any number of ranks.

    torchrun --nproc-per-node 2 tests/value_ranks.py OUT.pt

Rank 0 writes the critic's state on every rank, and the losses; see test_value.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from leangrpo.data import SampleKey, Transition
from leangrpo.noise import normal
from leangrpo.parallel import World, join, leave
from leangrpo.pipeline import remember_prompts
from leangrpo.value import Critic, Value

SHAPE, WIDTH, STEPS = (2, 8, 8), 3, 4
SIZES = [(3, 4), (1, 3), (2, 4)]
"""Prompts and generations of each update; the second has too few for a fourth rank."""


def fake_pipe() -> Any:
    """Embeds a prompt as (its length, 1, 0), in two tokens."""

    def encode_prompt(prompt: list[str]) -> tuple[None, torch.Tensor]:
        rows = [[float(len(p)), 1.0, 0.0] for p in prompt]
        return None, torch.tensor(rows)[:, None].repeat(1, 2, 1)

    pipe = SimpleNamespace(encode_prompt=encode_prompt, components={})
    remember_prompts(pipe)
    return pipe


def transition(
    pipe: Any, update: int, prompt: int, generations: list[int], step: int
) -> Transition:
    keys = tuple(SampleKey(update, prompt, g) for g in generations)
    prompts = tuple("a" * (prompt + 1) for _ in keys)
    pipe.encode_prompt(prompt=list(prompts))
    latents = normal(7, keys, step, SHAPE, like=torch.zeros(()))
    return Transition(keys, step, torch.zeros(len(keys)), prompts, latents)


def run(world: World) -> tuple[dict[str, torch.Tensor], list[float | None]]:
    """Three updates, each rank its own samples; what it does not own it has wrong rewards of."""
    pipe = fake_pipe()
    critic = Critic(Value(SHAPE, WIDTH, STEPS, lr=1e-2, batch=16, buffer=30), pipe, world)
    losses = []
    for update, (prompts, generations) in enumerate(SIZES):
        rewards = torch.full((prompts, generations), 99.0, dtype=torch.float64)
        for place in range(prompts * generations):
            p, g = divmod(place, generations)
            if place % world.size != world.rank:
                continue
            for step in (1, 3):
                critic.attach(transition(pipe, update, p, [g], step))
            rewards[p, g] = torch.nan if (update, place) == (0, 5) else p + g / 3
        idle = transition(pipe, update, 0, [0], 1)  # it is on every rank and counts nowhere
        idle.weight = 0.0
        critic.attach(idle)
        losses.append(critic.after(rewards))
    return critic.state_dict(), losses


def main(out: Path) -> None:
    world = join(1, None, timeout_s=60, master=False)
    everyone = world.share_all(run(world))
    if world.is_main:
        torch.save(everyone, out)
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
