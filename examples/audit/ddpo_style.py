"""A trainer in the style of DDPO: Stable Diffusion 1, DDIM, every step, everything shuffled.

    leangrpo audit run examples/audit/ddpo_style.py
    python examples/audit/ddpo_style.py --adopted        # the same gradients by retain

Samples are shuffled, and the steps of each sample too, so that a training batch mixes steps.
"""

import argparse
from collections.abc import Iterator

import torch
from diffusers import DDIMScheduler
from models import embeddings, gaussian, reward, sd

from leangrpo import Retain, Transition, group_advantages

STEPS, BATCH, BATCHES, GUIDANCE = 8, 4, 2, 5.0


class Trainer:
    """The model, its sampler, and what both loops have in common."""

    def __init__(self, size: str = "small") -> None:
        self.unet, self.size = sd(size), sd(size).config.sample_size
        self.words = embeddings(self.unet)["encoder_hidden_states"]
        options = {"beta_start": 0.00085, "beta_end": 0.012, "steps_offset": 1}
        self.scheduler = DDIMScheduler(clip_sample=False, **options)
        self.scheduler.set_timesteps(STEPS)
        self.optimizer = torch.optim.AdamW(self.unet.parameters(), lr=1e-4)

    def step(
        self, x: torch.Tensor, t: torch.Tensor, prompts: torch.Tensor, following=None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The next latents (drawn, unless given) and their log-probability; t (B,)."""
        words = torch.cat([self.words[-1:].expand(len(x), -1, -1), self.words[prompts]])
        both = self.unet(torch.cat([x] * 2), torch.cat([t] * 2), encoder_hidden_states=words)
        plain, conditional = both.sample.chunk(2)
        noise = plain + GUIDANCE * (conditional - plain)
        alpha = self.scheduler.alphas_cumprod[t].view(-1, 1, 1, 1)
        before = self.scheduler.alphas_cumprod[(t - 1000 // STEPS).clamp(0)].view(-1, 1, 1, 1)
        std = ((1 - before) / (1 - alpha) * (1 - alpha / before)).sqrt()
        clean = (x - (1 - alpha).sqrt() * noise) / alpha.sqrt()
        mean = before.sqrt() * clean + (1 - before - std**2).sqrt() * noise
        if following is None:
            following = (mean + std * torch.randn_like(x)).detach()
        return following, gaussian(following, mean, std)

    def rollout(self, prompts: torch.Tensor, on_step=None) -> dict[str, torch.Tensor]:
        """Sample a batch: latents (B, T + 1, ...), times and log-probabilities (B, T)."""
        xs, log_probs = [torch.randn(len(prompts), 4, self.size, self.size)], []
        for i, t in enumerate(self.scheduler.timesteps):
            following, log_prob = self.step(xs[-1], t.expand(len(prompts)), prompts)
            if on_step is not None:
                on_step(i, log_prob)
            xs.append(following)
            log_probs.append(log_prob.detach())
        times = self.scheduler.timesteps.expand(len(prompts), -1)
        return {"x": torch.stack(xs, 1), "t": times, "old": torch.stack(log_probs, 1)}

    def native(self, epochs: int = 1) -> None:
        """Sample without gradients, then evaluate every transition again with them."""
        drawn = torch.randint(0, len(self.words) - 1, (BATCHES, BATCH))
        with torch.no_grad():
            parts = [self.rollout(prompts) | {"prompts": prompts} for prompts in drawn]
        samples = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        advantages = group_advantages(reward(samples["x"][:, -1])[None])[0]
        num = BATCH * BATCHES
        for _ in range(epochs):
            order = torch.randperm(num)
            steps = torch.stack([torch.randperm(STEPS) for _ in range(num)])
            for rows in order.split(BATCH):
                for j in range(STEPS):
                    at = (rows, steps[rows, j])
                    x, following = samples["x"][at], samples["x"][rows, at[1] + 1]
                    _, log_prob = self.step(
                        x, samples["t"][at], samples["prompts"][rows], following
                    )
                    ratio = (log_prob - samples["old"][at]).exp()
                    clipped = ratio.clamp(1 - 1e-4, 1 + 1e-4)
                    a = advantages[rows]
                    (torch.maximum(-a * ratio, -a * clipped).sum() / (num * STEPS)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def adopted(self) -> None:
        """Keep the rollout's graphs until the rewards are known."""
        schedule = Retain(self.unet)
        schedule.begin(num_samples=BATCH * BATCHES, num_steps=STEPS)
        drawn = torch.randint(0, len(self.words) - 1, (BATCHES, BATCH))
        parts = []
        for n, prompts in enumerate(drawn):
            keys = tuple(range(n * BATCH, (n + 1) * BATCH))
            take = lambda i, lp, keys=keys: schedule.transition(Transition(keys, i, lp))  # noqa: E731
            parts.append(self.rollout(prompts, take))
        last = torch.cat([part["x"][:, -1] for part in parts])
        advantages = group_advantages(reward(last)[None])[0]
        schedule.advantages(dict(enumerate(advantages.tolist())))
        schedule.finish()
        self.optimizer.step()
        self.optimizer.zero_grad()


def main(
    updates: int = 3, *, adopted: bool = False, size: str = "small", epochs: int = 1
) -> Iterator[Trainer]:
    """Train; yields after every update."""
    torch.manual_seed(2)
    trainer = Trainer(size)
    for _ in range(updates):
        trainer.adopted() if adopted else trainer.native(epochs)
        yield trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--adopted", action="store_true")
    parser.add_argument("--size", choices=["small", "large"], default="small")
    parser.add_argument("--epochs", type=int, default=1)
    for number, _ in enumerate(main(**vars(parser.parse_args()))):
        print(f"update {number + 1}")
