"""The loop of flow_grpo_before.py without the second forward.

    python examples/adopting/flow_grpo_after.py

Its gradient is that of the loop before, which the tests compare.
"""

import math
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from toy import PROMPTS, embeddings, reward, transformer

from leangrpo import Retain, Reweight, Transition

STEPS, TRAINED, GROUP, GROUPS, BATCH, NOISE = 6, 5, 4, 2, 4, 0.7


def sde_step(model, words, sigmas, x, i, prompts, generator=None, following=None):
    """The next latents (drawn, unless given) and their log-probability (B,)."""
    sigma, dt = sigmas[i], sigmas[i + 1] - sigmas[i]
    chosen = {name: value[prompts] for name, value in words.items()}
    v = model(x, timestep=(sigma * 1000).expand(len(x)), **chosen)[0]
    g = NOISE * (sigma / (1 - (sigmas[1] if sigma == 1 else sigma))).sqrt()
    mean = x * (1 + g**2 * dt / (2 * sigma)) + v * dt * (1 + g**2 * (1 - sigma) / (2 * sigma))
    std = g * math.sqrt(-dt)
    if following is None:
        following = (mean + std * torch.randn(x.shape, generator=generator, dtype=x.dtype)).detach()
    log_prob = -((following - mean) ** 2 / (2 * std**2)).mean(dim=(1, 2, 3))
    return following, log_prob


def capture(schedule, rows: int):
    """Reweight needs the gradient of each sample of a batch; with BATCH = 1 leave this out."""
    return schedule.capture(rows) if schedule.capture is not None else nullcontext()


def train(
    updates: int = 2, dtype: torch.dtype = torch.float32, size: str = "small", schedule_type=Retain
) -> Iterator[torch.nn.Module]:
    """Yields the model with the gradient of each update in .grad, before it is clipped."""
    model, words = transformer(size).to(dtype).eval(), embeddings(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(0)
    linear = torch.linspace(1, 1 / STEPS, STEPS, dtype=dtype)
    sigmas = torch.cat([3 * linear / (1 + 2 * linear), torch.zeros(1, dtype=dtype)])
    latent, num = model.config.sample_size, GROUP * GROUPS
    schedule = schedule_type(model)
    for _ in range(updates):
        drawn = torch.randint(0, PROMPTS, (GROUPS,), generator=generator).repeat_interleave(GROUP)
        samples = []
        schedule.begin(num_samples=num, num_steps=TRAINED)
        for n, prompts in enumerate(drawn.split(BATCH)):
            x = torch.randn(BATCH, 4, latent, latent, generator=generator, dtype=dtype)
            keys = tuple(range(n * BATCH, (n + 1) * BATCH))
            for i in range(STEPS):
                with torch.set_grad_enabled(i < TRAINED), capture(schedule, BATCH):
                    x, log_prob = sde_step(model, words, sigmas, x, i, prompts, generator)
                if i < TRAINED:
                    schedule.transition(Transition(keys, i, log_prob))
            samples.append(x)
        rewards = reward(torch.cat(samples)).view(GROUPS, GROUP)
        deviations = rewards - rewards.mean(1, keepdim=True)
        advantages = (deviations / (rewards.std(1, keepdim=True) + 1e-4)).flatten()

        schedule.advantages(dict(enumerate(advantages.tolist())))
        schedule.finish()

        yield model
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    for schedule_type in (Retain, Reweight):
        for number, model in enumerate(train(schedule_type=schedule_type)):
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
            print(f"{schedule_type.__name__}, update {number + 1}: gradient norm {norm:.6f}")
