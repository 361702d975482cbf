"""What an update knows of its samples: rewards, KL, advantages, each rank those it has met."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from .data import SampleKey
from .layout import Layout
from .parallel import World
from .scoring import Scores


class Scoreboard:
    """Rewards, KL and advantages of an update, `(P, M)` float64; filled in where a rank knows them.

    `owned` lists the (prompt, generation) pairs that are this rank's, `bad` those of its
    trajectories that turned out not to be finite.
    """

    def __init__(self, num_prompts: int, num_generations: int, names: Sequence[str]) -> None:
        shape = (num_prompts, num_generations)
        self.rewards = torch.zeros(shape, dtype=torch.float64)
        self.kl, self.advantages = torch.zeros_like(self.rewards), torch.zeros_like(self.rewards)
        self.each = {name: torch.zeros_like(self.rewards) for name in names}
        self.owned: list[tuple[int, int]] = []
        self.bad: set[SampleKey] = set()
        self.excluded, self.seconds = 0, dict.fromkeys(names, 0.0)

    def enter(self, prompt: int, generations: Sequence[int], scores: Scores) -> None:
        """Write down the scores of some generations of a prompt."""
        at = prompt, list(generations)
        self.rewards[at] = scores.total
        for name, values in scores.each.items():
            self.each[name][at] = values
        self.owned += [(prompt, g) for g in generations]
        self.excluded += scores.excluded
        for name, seconds in scores.latency.items():
            self.seconds[name] += seconds

    def leave_out(self, prompt: int, generations: Sequence[int]) -> None:
        """Write down that some generations of a prompt have no score."""
        if not generations:
            return
        at = prompt, list(generations)
        for values in (self.rewards, *self.each.values()):
            values[at] = torch.nan
        self.owned += [(prompt, g) for g in generations]
        self.excluded += len(generations)

    def advantage(self, key: Hashable) -> float:
        """A sample's advantage."""
        assert isinstance(key, SampleKey)
        return float(self.advantages[key.prompt, key.generation])

    def gather_group(
        self, world: World, layout: Layout, prompt: int, generations: Sequence[int]
    ) -> None:
        """Fill in a prompt's rewards and KL from the ranks that share it.

        `generations` are those this rank has sampled, in its order; a collective of the peers.
        """
        some = self.rewards, self.kl, *self.each.values()
        own = torch.stack([values[prompt] for values in some])[:, list(generations)]
        gathered = world.gather_group(layout, prompt % layout.prompts, own)
        for values, row in zip(some, gathered, strict=True):
            values[prompt] = row

    def gather_all(self, world: World) -> None:
        """Fill in everybody's rewards and KL; a collective of all ranks."""
        some = self.rewards, self.kl, *self.each.values()
        self.rewards, self.kl, *each = self._from_owners(world, *some)
        self.each = dict(zip(self.each, each, strict=True))

    def join(self, world: World) -> None:
        """Fill in what other ranks know, from the rank that owns each sample; a collective."""
        tensors = self.rewards, self.advantages, *self.each.values()
        self.rewards, self.advantages, *each = self._from_owners(world, *tensors)
        self.each = dict(zip(self.each, each, strict=True))
        self.excluded = int(world.sum(torch.tensor(self.excluded)))
        seconds = torch.tensor(list(self.seconds.values()), dtype=torch.float64)
        self.seconds = dict(zip(self.seconds, world.sum(seconds).tolist(), strict=True))

    def _from_owners(self, world: World, *tensors: Tensor) -> Sequence[Tensor]:
        """Each sample's entries from the one rank that owns it: a sum of what is zero elsewhere."""
        if world.size == 1:
            return tensors
        mine = torch.zeros(self.rewards.shape, dtype=torch.bool)
        for p, g in self.owned:
            mine[p, g] = True
        return world.sum(torch.stack([torch.where(mine, t, 0.0) for t in tensors])).unbind()
