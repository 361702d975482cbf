"""The loop of dance_grpo_after.py on several ranks: each samples its share of the group.

    torchrun --nproc-per-node 2 examples/adopting/dance_grpo_ranks.py
    torchrun --nproc-per-node 2 examples/adopting/dance_grpo_ranks.py --fsdp

Whole copies of the weights, or FSDP2's shards. No DistributedDataParallel and no gradient that is
averaged on the way: what a rank has is corrected by its advantages first, and added up once.
"""

import argparse

import torch
import torch.distributed as dist
from dance_grpo_before import GROUP, STEPS, TRAINED, dance_step
from torch.distributed.fsdp import fully_shard
from toy import embeddings, reward, transformer

from leangrpo import Reweight, Transition
from leangrpo.gradients import Replicated, Sharded
from leangrpo.guard import Guard


def train(*, fsdp: bool = False, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """One update; returns the model with the gradient of the whole group in .grad."""
    model, words = transformer(lora=True).to(dtype).eval(), embeddings(dtype)
    if fsdp:
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
        for block in model.transformer_blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
    guard = Guard(model)  # after sharding: it remembers the parameters
    gradients = Sharded(guard, [model], mesh) if fsdp else Replicated(guard, None)
    schedule = Reweight(guard, gradients=gradients)
    linear = torch.linspace(1, 0, STEPS + 1, dtype=dtype)
    sigmas, latent = 3 * linear / (1 + 2 * linear), model.config.sample_size
    chosen = {name: value[:1] for name, value in words.items()}
    start = torch.randn(1, 4, latent, latent, generator=_seeded(0), dtype=dtype)

    mine = range(dist.get_rank(), GROUP, dist.get_world_size())
    schedule.begin(num_samples=GROUP, num_steps=TRAINED)  # of all ranks together
    rewards = torch.zeros(GROUP, dtype=dtype)
    for n in mine:
        x, generator = start, _seeded(n + 1)  # a generation's noise does not depend on its rank
        for i in range(STEPS):
            with torch.set_grad_enabled(i < TRAINED):
                x, log_prob = dance_step(model, chosen, sigmas, x, i, generator)
            if i < TRAINED:
                schedule.transition(Transition((n,), i, log_prob))
        rewards[n] = reward(x)
    dist.all_reduce(rewards)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
    schedule.advantages({n: float(advantages[n]) for n in mine})
    schedule.finish()  # the correction, then the one reduction
    return model


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fsdp", action="store_true")
    dist.init_process_group("gloo")
    gradient = [p.grad for p in train(**vars(parser.parse_args())).parameters()]
    whole = [getattr(g, "full_tensor", lambda g=g: g)() for g in gradient if g is not None]
    if dist.get_rank() == 0:
        print(f"gradient norm {torch.nn.utils.get_total_norm(whole):.15f}")
    dist.destroy_process_group()
