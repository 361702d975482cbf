"""A trainer in the style of DiffusionNFT: it learns from finished samples that are noised anew.

    leangrpo audit run examples/audit/diffusion_nft_style.py

The rollout is deterministic and made by an adapter of the past. No transition of it is evaluated
again, so that there is nothing to adopt.
"""

import argparse
from collections.abc import Iterator
from itertools import pairwise

import torch
from models import PROMPTS, embeddings, reward, sd3
from peft import LoraConfig, get_peft_model

from leangrpo import group_advantages

STEPS, TRAINED, GROUP, BETA = 8, 3, 4, 1.0


class Trainer:
    """A transformer with two adapters: the one that is trained, and its past that samples."""

    def __init__(self, size: str = "small") -> None:
        transformer = sd3(size)
        self.size, self.words = transformer.config.sample_size, embeddings(transformer)
        config = LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v"])
        self.transformer = get_peft_model(transformer, config)
        self.transformer.add_adapter("old", config)
        named = dict(self.transformer.named_parameters())
        self.trained = {n: p for n, p in named.items() if ".default." in n}
        self.old = [named[n.replace(".default.", ".old.")] for n in self.trained]
        self.optimizer = torch.optim.AdamW(self.trained.values(), lr=1e-3)

    def velocity(self, x: torch.Tensor, t: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
        """The prediction at noise levels t (B,)."""
        words = {name: v[prompts] for name, v in self.words.items()}
        return self.transformer(x, timestep=t * 1000, **words)[0]

    def update(self) -> None:
        """Sample, noise anew, and move towards what was rewarded and away from what was not."""
        prompts = torch.randint(0, PROMPTS, (1,)).expand(GROUP)
        x = torch.randn(GROUP, 4, self.size, self.size)
        sigmas = torch.linspace(1, 0, STEPS + 1)
        self.transformer.set_adapter("old")
        with torch.no_grad():
            for t, following in pairwise(sigmas):
                x = x + self.velocity(x, t.expand(GROUP), prompts) * (following - t)
        r = (group_advantages(reward(x)[None])[0].clamp(-1, 1).to(x) + 1) / 2
        for _ in range(TRAINED):
            t, noise = torch.rand(GROUP), torch.randn_like(x)
            share = t.view(-1, 1, 1, 1)
            noisy = (1 - share) * x + share * noise
            self.transformer.set_adapter("old")
            with torch.no_grad():
                old = self.velocity(noisy, t, prompts)
            self.transformer.set_adapter("default")
            new = self.velocity(noisy, t, prompts)
            loss = torch.zeros(())
            for weight, sign in ((r, 1), (1 - r, -1)):
                v = (1 - sign * BETA) * old + sign * BETA * new
                loss = loss + (weight * (v - (noise - x)).square().mean(dim=(1, 2, 3))).mean()
            (loss / TRAINED).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for past, now in zip(self.old, self.trained.values(), strict=True):
                past.lerp_(now, 0.1)


def main(updates: int = 3, *, adopted: bool = False, size: str = "small") -> Iterator[Trainer]:
    """Train; yields after every update. `adopted` is the same: nothing is evaluated twice."""
    torch.manual_seed(2)
    trainer = Trainer(size)
    for _ in range(updates):
        trainer.update()
        yield trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--adopted", action="store_true")
    parser.add_argument("--size", choices=["small", "large", "30M"], default="small")
    for number, _ in enumerate(main(**vars(parser.parse_args()))):
        print(f"update {number + 1}")
