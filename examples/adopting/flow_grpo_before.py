"""A loop in the style of FlowGRPO: sample, then run the network again on every trained step.

    python examples/adopting/flow_grpo_before.py

flow_grpo_after.py is the same loop without the second run.
"""

import math
from collections.abc import Iterator

import torch
from toy import PROMPTS, embeddings, reward, transformer

STEPS, TRAINED, GROUP, GROUPS, BATCH, NOISE, CLIP = 6, 5, 4, 2, 4, 0.7, 1e-4


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


def train(
    updates: int = 2, dtype: torch.dtype = torch.float32, size: str = "small"
) -> Iterator[torch.nn.Module]:
    """Yields the model with the gradient of each update in .grad, before it is clipped."""
    model, words = transformer(size).to(dtype).eval(), embeddings(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(0)
    linear = torch.linspace(1, 1 / STEPS, STEPS, dtype=dtype)
    sigmas = torch.cat([3 * linear / (1 + 2 * linear), torch.zeros(1, dtype=dtype)])
    latent, num = model.config.sample_size, GROUP * GROUPS
    for _ in range(updates):
        drawn = torch.randint(0, PROMPTS, (GROUPS,), generator=generator).repeat_interleave(GROUP)
        samples = []
        for prompts in drawn.split(BATCH):
            x = torch.randn(BATCH, 4, latent, latent, generator=generator, dtype=dtype)
            xs, log_probs = [x], []
            for i in range(STEPS):
                with torch.no_grad():
                    x, log_prob = sde_step(model, words, sigmas, x, i, prompts, generator)
                xs.append(x)
                log_probs.append(log_prob)
            samples.append((torch.stack(xs, 1), torch.stack(log_probs, 1)))
        xs, old = (torch.cat(parts) for parts in zip(*samples, strict=True))
        rewards = reward(xs[:, -1]).view(GROUPS, GROUP)
        deviations = rewards - rewards.mean(1, keepdim=True)
        advantages = (deviations / (rewards.std(1, keepdim=True) + 1e-4)).flatten()

        for rows in torch.randperm(num).split(BATCH):
            for i in range(TRAINED):
                x, following = xs[rows, i], xs[rows, i + 1]
                _, log_prob = sde_step(model, words, sigmas, x, i, drawn[rows], following=following)
                ratio = (log_prob - old[rows, i]).exp()
                clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
                loss = torch.maximum(-advantages[rows] * ratio, -advantages[rows] * clipped)
                (loss.sum() / (num * TRAINED)).backward()

        yield model
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    for number, model in enumerate(train()):
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        print(f"update {number + 1}: gradient norm {norm:.6f}")
