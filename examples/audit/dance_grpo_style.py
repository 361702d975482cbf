"""A trainer in the style of DanceGRPO: a flat loop over one group that starts from one noise.

    leangrpo audit run examples/audit/dance_grpo_style.py
    python examples/audit/dance_grpo_style.py --adopted  # the same gradients by reweight

Samples are made and trained one by one, some steps of each in an order of its own. `--together`
samples the group in one batch, and evaluates it again sample by sample all the same.
"""

import argparse
from collections.abc import Iterator

import torch
from models import PROMPTS, embeddings, gaussian, reward, sd3

from leangrpo import Reweight, Transition, group_advantages

STEPS, TRAINED, GROUP, ETA = 8, 5, 4, 0.3


class Trainer:
    """The model, its sampler, and what both loops have in common."""

    def __init__(self, size: str = "small") -> None:
        self.transformer = sd3(size)
        self.size = self.transformer.config.sample_size
        self.words = embeddings(self.transformer)
        linear = torch.linspace(1, 0, STEPS + 1)
        self.sigmas = 3 * linear / (1 + 2 * linear)
        self.optimizer = torch.optim.AdamW(self.transformer.parameters(), lr=1e-4)

    def step(self, x: torch.Tensor, i: int, prompt: int, following=None) -> tuple:
        """The next latents (drawn, unless given) and their log-probability."""
        sigma, dt = self.sigmas[i], self.sigmas[i + 1] - self.sigmas[i]
        words = {name: v[[prompt] * len(x)] for name, v in self.words.items()}
        t = torch.full((len(x),), float(sigma) * 1000)
        v = self.transformer(x, timestep=t, **words)[0]
        score = -(x - (1 - sigma) * (x - sigma * v)) / sigma**2
        mean, std = x + v * dt - ETA**2 / 2 * score * dt, ETA * (-dt).sqrt()
        if following is None:
            following = (mean + std * torch.randn_like(x)).detach()
        return following, gaussian(following, mean, std)

    def rollout(self, x: torch.Tensor, prompt: int, on_step=None, trained=()) -> tuple:
        """Sample: latents (B, T + 1, ...) and log-probabilities (B, T)."""
        xs, log_probs = [x], []
        for i in range(STEPS):
            with torch.set_grad_enabled(i in trained):
                following, log_prob = self.step(xs[-1], i, prompt)
            if i in trained:
                on_step(i, log_prob)
            xs.append(following)
            log_probs.append(log_prob.detach())
        return torch.stack(xs, 1), torch.stack(log_probs, 1)

    def native(self, *, together: bool = False) -> None:
        """Sample without gradients, then evaluate some transitions again with them."""
        prompt = int(torch.randint(0, PROMPTS, ()))
        start = torch.randn(1, 4, self.size, self.size).expand(GROUP, -1, -1, -1)
        with torch.no_grad():
            parts = [self.rollout(x, prompt) for x in start.split(GROUP if together else 1)]
        xs, old = (torch.cat(values) for values in zip(*parts, strict=True))
        advantages = group_advantages(reward(xs[:, -1])[None])[0]
        for n in range(GROUP):
            for i in torch.randperm(STEPS)[:TRAINED].tolist():
                _, log_prob = self.step(xs[n : n + 1, i], i, prompt, xs[n : n + 1, i + 1])
                ratio = (log_prob - old[n, i]).exp()
                a, clipped = float(advantages[n]), ratio.clamp(1 - 1e-4, 1 + 1e-4)
                (torch.maximum(-a * ratio, -a * clipped).sum() / (GROUP * TRAINED)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def adopted(self) -> None:
        """Backward while sampling; the gradients wait for the rewards."""
        prompt = int(torch.randint(0, PROMPTS, ()))
        start = torch.randn(1, 4, self.size, self.size)
        schedule = Reweight(self.transformer)
        schedule.begin(num_samples=GROUP, num_steps=TRAINED)
        last = []
        for n in range(GROUP):
            take = lambda i, lp, n=n: schedule.transition(Transition((n,), i, lp))  # noqa: E731
            trained = torch.randperm(STEPS)[:TRAINED].tolist()
            last.append(self.rollout(start, prompt, take, trained)[0][:, -1])
        advantages = group_advantages(reward(torch.cat(last))[None])[0]
        schedule.advantages(dict(enumerate(advantages.tolist())))
        schedule.finish()
        self.optimizer.step()
        self.optimizer.zero_grad()


def main(
    updates: int = 3, *, adopted: bool = False, size: str = "small", together: bool = False
) -> Iterator[Trainer]:
    """Train; yields after every update."""
    torch.manual_seed(2)
    trainer = Trainer(size)
    for _ in range(updates):
        trainer.adopted() if adopted else trainer.native(together=together)
        yield trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--adopted", action="store_true")
    parser.add_argument("--size", choices=["small", "large", "30M"], default="small")
    parser.add_argument("--together", action="store_true")
    for number, _ in enumerate(main(**vars(parser.parse_args()))):
        print(f"update {number + 1}")
