"""The loop of dance_grpo_before.py without the second forward.

    python examples/adopting/dance_grpo_after.py

Its gradient is that of the loop before, which the tests compare.
"""

from collections.abc import Iterator

import torch
from toy import PROMPTS, embeddings, reward, transformer

from leangrpo import Retain, Reweight, Transition

STEPS, TRAINED, GROUP, ETA = 8, 5, 4, 0.3


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
    updates: int = 2,
    dtype: torch.dtype = torch.float32,
    size: str = "small",
    schedule_type=Reweight,
) -> Iterator[torch.nn.Module]:
    """Yields the model with the gradient of each update in .grad, before it is clipped."""
    model, words = transformer(size, lora=True).to(dtype).eval(), embeddings(dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    generator, order = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)
    linear = torch.linspace(1, 0, STEPS + 1, dtype=dtype)
    sigmas, latent = 3 * linear / (1 + 2 * linear), model.config.sample_size
    schedule = schedule_type(model)
    for _ in range(updates):
        prompt = int(torch.randint(0, PROMPTS, (), generator=generator))
        chosen = {name: value[prompt : prompt + 1] for name, value in words.items()}
        start = torch.randn(1, 4, latent, latent, generator=generator, dtype=dtype)
        samples = []
        schedule.begin(num_samples=GROUP, num_steps=TRAINED)
        for n in range(GROUP):
            x, chosen_steps = start, torch.randperm(STEPS, generator=order)[:TRAINED].tolist()
            for i in range(STEPS):
                with torch.set_grad_enabled(i in chosen_steps):
                    x, log_prob = dance_step(model, chosen, sigmas, x, i, generator)
                if i in chosen_steps:
                    schedule.transition(Transition((n,), i, log_prob))
            samples.append(x)
        rewards = reward(torch.cat(samples))
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)

        schedule.advantages(dict(enumerate(advantages.tolist())))
        schedule.finish()

        yield model
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    for schedule_type in (Retain, Reweight):
        for number, model in enumerate(train(schedule_type=schedule_type)):
            norm = torch.nn.utils.get_total_norm(
                [p.grad for p in model.parameters() if p.grad is not None]
            )
            print(f"{schedule_type.__name__}, update {number + 1}: gradient norm {norm:.6f}")
