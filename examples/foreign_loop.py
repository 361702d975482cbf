"""The schedules in somebody else's trainer: they take bare log-probabilities and know no pipeline.

    python examples/foreign_loop.py

A small network proposes the mean of a Gaussian walk in the plane; the reward is how near the walk
ends to a target. The trainer's own loop is kept; three lines of a schedule take the place of
"sample without gradients, then run the model again on every step".
"""

import torch
from torch import nn

from leangrpo import Native, Retain, Reweight, Transition, group_advantages

STEPS, GROUP, STD = 6, 16, 0.3
TARGET = torch.tensor([1.0, -1.0])


def log_prob(model: nn.Module, x: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """log N(following; x + model(x), STD^2), mean over the elements: x (B, 2) -> (B,)."""
    return -((following - x - model(x)) ** 2 / (2 * STD**2)).mean(dim=1)


def train(schedule_class: type, updates: int = 30, seed: int = 0) -> list[float]:
    """Train with one schedule and return the mean reward of every update."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    replay = lambda t: Transition(t.keys, t.step, log_prob(model, t.latents, t.next_latents))  # noqa: E731
    extra = {"replay": replay} if schedule_class is Native else {}
    schedule = schedule_class(model, **extra)
    history = []
    for _ in range(updates):
        schedule.begin(num_samples=GROUP, num_steps=STEPS)
        rewards = torch.zeros(GROUP)
        for sample in range(GROUP):
            x = torch.zeros(1, 2)
            for step in range(STEPS):
                with torch.set_grad_enabled(schedule.needs_graph):
                    mean = x + model(x)
                following = (mean + STD * torch.randn_like(x)).detach()
                score = -((following - mean) ** 2 / (2 * STD**2)).mean(dim=1)
                schedule.transition(
                    Transition((sample,), step, score, latents=x, next_latents=following)
                )
                x = following
            rewards[sample] = -(x - TARGET).square().sum()
        advantages = group_advantages(rewards[None])[0]
        schedule.advantages(dict(enumerate(advantages.tolist())))
        schedule.finish()
        optimizer.step()
        optimizer.zero_grad()
        history.append(float(rewards.mean()))
    return history


if __name__ == "__main__":
    for schedule in (Native, Retain, Reweight):
        history = train(schedule)
        print(f"{schedule.name:8s}  reward {history[0]:7.3f} -> {history[-1]:7.3f}")
