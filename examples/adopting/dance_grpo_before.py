"""A loop in the style of DanceGRPO: flat, sample by sample, some steps of each in its own order.

    python examples/adopting/dance_grpo_before.py

dance_grpo_after.py is the same loop without the second run.
"""

from collections.abc import Iterator

import torch
from toy import PROMPTS, embeddings, reward, transformer

STEPS, TRAINED, GROUP, ETA, CLIP = 8, 5, 4, 0.3, 1e-4


def dance_step(model, words, sigmas, x, i, generator=None, following=None):
    """The next latents (drawn, unless given) and their log-probability (1,)."""
    sigma, dt = sigmas[i], sigmas[i + 1] - sigmas[i]
    v = model(x, timestep=(sigma * 1000).expand(1), **words)[0]
    score = -(x - (1 - sigma) * (x - sigma * v)) / sigma**2
    mean, std = x + v * dt - ETA**2 / 2 * score * dt, ETA * (-dt).sqrt()
    if following is None:
        following = (mean + std * torch.randn(x.shape, generator=generator, dtype=x.dtype)).detach()
    log_prob = -((following - mean) ** 2 / (2 * std**2)).mean(dim=(1, 2, 3))
    return following, log_prob


def train(
    updates: int = 2, dtype: torch.dtype = torch.float32, size: str = "small"
) -> Iterator[torch.nn.Module]:
    """Yields the model with the gradient of each update in .grad, before it is clipped."""
    model, words = transformer(size, lora=True).to(dtype).eval(), embeddings(dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    generator, order = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)
    linear = torch.linspace(1, 0, STEPS + 1, dtype=dtype)
    sigmas, latent = 3 * linear / (1 + 2 * linear), model.config.sample_size
    for _ in range(updates):
        prompt = int(torch.randint(0, PROMPTS, (), generator=generator))
        chosen = {name: value[prompt : prompt + 1] for name, value in words.items()}
        start = torch.randn(1, 4, latent, latent, generator=generator, dtype=dtype)
        samples = []
        for _ in range(GROUP):
            xs, log_probs = [start], []
            for i in range(STEPS):
                with torch.no_grad():
                    x, log_prob = dance_step(model, chosen, sigmas, xs[-1], i, generator)
                xs.append(x)
                log_probs.append(log_prob)
            samples.append((xs, log_probs))
        rewards = reward(torch.cat([xs[-1] for xs, _ in samples]))
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)

        for n, (xs, old) in enumerate(samples):
            for i in torch.randperm(STEPS, generator=order)[:TRAINED].tolist():
                _, log_prob = dance_step(model, chosen, sigmas, xs[i], i, following=xs[i + 1])
                ratio = (log_prob - old[i]).exp()
                clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
                loss = torch.maximum(-advantages[n] * ratio, -advantages[n] * clipped)
                (loss.sum() / (GROUP * TRAINED)).backward()

        yield model
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    for number, model in enumerate(train()):
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in model.parameters() if p.grad is not None]
        )
        print(f"update {number + 1}: gradient norm {norm:.6f}")
