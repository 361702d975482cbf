"""Train a pipeline with the library alone: no trainer, no config, one loop.

    python examples/minimal.py [SCHEDULE] [UPDATES]

The embedded pipeline learns to save ink: the reward is how white the picture is.
"""

import sys

import torch

import leangrpo as lean

PROMPTS = ["the number 47 in blue", "the number 12 in red"]
GENERATIONS, SELECTED = 6, [1, 3, 5]


def whiteness(images: torch.Tensor) -> torch.Tensor:
    """A reward: images (B, C, H, W) in [0, 1] -> scores (B,)."""
    return images.mean(dim=(1, 2, 3))


def main(name: str = "reweight", updates: int = 8) -> list[float]:
    """Train and return the mean reward of every update."""
    pipe = lean.load_pipeline("embedded")
    lean.make_trainable(pipe, "full")
    sampling = lean.Sampling(steps=10, guidance=1.0)
    policy = lean.Policy(pipe, sampling, kernel="flow_sde", noise_level=0.7)
    schedule = {
        "native": lambda: lean.Native(policy, replay=policy.replay),
        "retain": lambda: lean.Retain(policy),
        "reweight": lambda: lean.Reweight(policy),
    }[name]()
    optimizer = torch.optim.AdamW(policy.parameters, lr=1e-4)
    history = []
    for update in range(updates):
        schedule.begin(len(PROMPTS) * GENERATIONS, len(SELECTED))
        rewards = torch.zeros(len(PROMPTS), GENERATIONS)
        for p, prompt in enumerate(PROMPTS):
            keys = [lean.SampleKey(update, p, g) for g in range(GENERATIONS)]
            for g, key in enumerate(keys):
                options = {"selected": SELECTED, "grad": schedule.needs_graph}
                rollout = policy.sample(
                    [prompt], [key], **options, on_transition=schedule.transition
                )
                rewards[p, g] = whiteness(rollout.images)
            advantages = lean.group_advantages(rewards[p : p + 1])[0]
            schedule.advantages(dict(zip(keys, advantages.tolist(), strict=True)))
        schedule.finish()
        torch.nn.utils.clip_grad_norm_(policy.parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        history.append(float(rewards.mean()))
        print(f"update {update + 1}: reward {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
