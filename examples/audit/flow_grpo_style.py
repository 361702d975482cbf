"""A trainer in the style of FlowGRPO: Stable Diffusion 3, groups, guidance, all steps but the last.

    leangrpo audit run examples/audit/flow_grpo_style.py
    python examples/audit/flow_grpo_style.py --adopted   # the same gradients by retain

Samples are shuffled and batched anew; the steps are trained in order. `--checkpointing` recomputes
activations in backward, `--epochs 2` makes a second update on the same samples, and `--stored FILE`
trains on a rollout that another process has written with `--store FILE`.
"""

import argparse
import math
from collections.abc import Iterator

import torch
from models import PROMPTS, embeddings, gaussian, reward, sd3

from leangrpo import Retain, Transition, group_advantages

STEPS, TRAINED, GROUP, GROUPS, BATCH, GUIDANCE, NOISE = 8, 7, 4, 2, 4, 4.5, 0.7


class Trainer:
    """The model, its sampler, and what both loops have in common."""

    def __init__(self, size: str = "small", *, checkpointing: bool = False) -> None:
        self.transformer = sd3(size)
        if checkpointing:
            self.transformer.enable_gradient_checkpointing()
        self.size = self.transformer.config.sample_size
        self.words = embeddings(self.transformer)
        linear = torch.linspace(1, 1 / STEPS, STEPS)
        self.sigmas = torch.cat([3 * linear / (1 + 2 * linear), torch.zeros(1)])
        self.optimizer = torch.optim.AdamW(self.transformer.parameters(), lr=1e-4)

    def step(
        self, x: torch.Tensor, i: int, prompts: torch.Tensor, following=None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The next latents (drawn, unless given) and their log-probability."""
        sigma, dt = self.sigmas[i], self.sigmas[i + 1] - self.sigmas[i]
        empty = torch.full_like(prompts, PROMPTS)
        words = {name: value[torch.cat([empty, prompts])] for name, value in self.words.items()}
        t = (sigma * 1000).expand(2 * len(x))
        plain, conditional = self.transformer(torch.cat([x] * 2), timestep=t, **words)[0].chunk(2)
        v = plain + GUIDANCE * (conditional - plain)
        g = NOISE * (sigma / (1 - (self.sigmas[1] if sigma == 1 else sigma))).sqrt()
        mean = x * (1 + g**2 * dt / (2 * sigma))
        mean = mean + v * dt * (1 + g**2 * (1 - sigma) / (2 * sigma))
        std = g * math.sqrt(-dt)
        if following is None:
            following = (mean + std * torch.randn_like(x)).detach()
        return following, gaussian(following, mean, std)

    def rollout(self, prompts: torch.Tensor, on_step=None) -> dict[str, torch.Tensor]:
        """Sample a batch: latents (B, T + 1, ...) and log-probabilities (B, T)."""
        xs, log_probs = [torch.randn(len(prompts), 4, self.size, self.size)], []
        for i in range(STEPS):
            with torch.set_grad_enabled(on_step is not None and i < TRAINED):
                following, log_prob = self.step(xs[-1], i, prompts)
            if on_step is not None and i < TRAINED:
                on_step(i, log_prob)
            xs.append(following)
            log_probs.append(log_prob.detach())
        return {"x": torch.stack(xs, 1), "old": torch.stack(log_probs, 1), "prompts": prompts}

    def sample(self) -> dict[str, torch.Tensor]:
        """A rollout of all groups without gradients."""
        drawn = torch.randint(0, PROMPTS, (GROUPS,)).repeat_interleave(GROUP)
        with torch.no_grad():
            parts = [self.rollout(prompts) for prompts in drawn.split(BATCH)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def native(self, epochs: int = 1, samples: dict[str, torch.Tensor] | None = None) -> None:
        """Sample without gradients, then evaluate every transition again with them."""
        samples = samples or self.sample()
        num = len(samples["x"])
        advantages = group_advantages(reward(samples["x"][:, -1]).view(GROUPS, GROUP)).flatten()
        for _ in range(epochs):
            for rows in torch.randperm(num).split(BATCH):
                for i in range(TRAINED):
                    x, following = samples["x"][rows, i], samples["x"][rows, i + 1]
                    _, log_prob = self.step(x, i, samples["prompts"][rows], following)
                    ratio = (log_prob - samples["old"][rows, i]).exp()
                    clipped = ratio.clamp(1 - 1e-4, 1 + 1e-4)
                    a = advantages[rows].to(x)
                    (torch.maximum(-a * ratio, -a * clipped).sum() / (num * TRAINED)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def adopted(self) -> None:
        """Keep the rollout's graphs until the rewards of a group are known."""
        schedule = Retain(self.transformer)
        schedule.begin(num_samples=GROUP * GROUPS, num_steps=TRAINED)
        drawn = torch.randint(0, PROMPTS, (GROUPS,)).repeat_interleave(GROUP)
        for n, prompts in enumerate(drawn.split(GROUP)):
            keys = tuple(range(n * GROUP, (n + 1) * GROUP))
            take = lambda i, lp, keys=keys: schedule.transition(Transition(keys, i, lp))  # noqa: E731
            last = self.rollout(prompts, take)["x"][:, -1]
            advantages = group_advantages(reward(last)[None])[0]
            schedule.advantages(dict(zip(keys, advantages.tolist(), strict=True)))
        schedule.finish()
        self.optimizer.step()
        self.optimizer.zero_grad()


def main(
    updates: int = 3,
    *,
    adopted: bool = False,
    size: str = "small",
    epochs: int = 1,
    checkpointing: bool = False,
    store: str | None = None,
    stored: str | None = None,
) -> Iterator[Trainer]:
    """Train; yields after every update."""
    torch.manual_seed(2)
    trainer = Trainer(size, checkpointing=checkpointing)
    trainer.transformer.train()
    for _ in range(updates):
        if store:
            torch.save(trainer.sample(), store)
        elif adopted:
            trainer.adopted()
        else:
            trainer.native(epochs, torch.load(stored) if stored else None)
        yield trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--adopted", action="store_true")
    parser.add_argument("--size", choices=["small", "large", "30M"], default="small")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--store", metavar="FILE")
    parser.add_argument("--stored", metavar="FILE")
    for number, _ in enumerate(main(**vars(parser.parse_args()))):
        print(f"update {number + 1}")
