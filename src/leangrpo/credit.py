"""From an update's rewards to advantages, the way the settings say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .advantages import (
    History,
    best_of,
    gdpo,
    group_advantages,
    subtract_kl,
    weigh_each,
    without_missing,
)
from .policy import Policy
from .scoreboard import Scoreboard
from .settings import Config


class Credit:
    """Who gets which advantage; remembers what outlives an update (`History`).

    `whole` says that a group's advantages need the rewards of all the update's groups.
    """

    def __init__(self, config: Config) -> None:
        self.c, self.kl_in_reward = config.advantage, config.objective.kl_in_reward
        self.weights = {r.name: r.weight for r in config.trained}
        self.whole = self.c.std == "global" or self.c.baseline in ("global", "history")
        self.whole |= self.c.rewards == "gdpo"
        self.history = History(self.c.history, self.c.min_history)

    @property
    def centres(self) -> bool:
        """Whether all groups' deviations from their own means are divided by one number."""
        return self.c.baseline == "prompt" and self.c.std == "global"

    def rewards(self, table: Scoreboard, prompt: int, generation: int) -> list[float]:
        """What a sample's advantage is made of: its reward, or each of them."""
        return [float(row[generation]) for row in self._made_of(table, prompt)]

    def centred(self, table: Scoreboard, prompt: int, generation: int) -> list[float]:
        """The same less the group's means, once the group is complete."""
        rows = self._made_of(table, prompt)
        return [float(_without_mean(row)[generation]) for row in rows]

    def _made_of(self, table: Scoreboard, prompt: int) -> list[Tensor]:
        """Rows `(M,)` that advantages are an affine function of; see `advantages`."""
        if self.c.rewards == "sum":
            rewards, kl = table.rewards[prompt], table.kl[prompt]
            return [subtract_kl(rewards, kl, self.kl_in_reward)]
        return without_missing([table.each[name][prompt] for name in self.weights])

    @property
    def remembers(self) -> bool:
        """Whether advantages depend on earlier updates' rewards."""
        return self.c.baseline == "history"

    def advantages(
        self,
        rewards: Tensor,
        each: Mapping[str, Tensor],
        kl: Tensor,
        prompts: Sequence[str],
    ) -> Tensor:
        """Advantages `(P, M)` float64 of some groups, all of the update's if `whole`.

        `rewards` `(P, M)` are the weighted sums of `each`, `kl` `(P, M)` the divergences from the
        reference over a trajectory. With `best_of` the generations left out get 0.
        """
        options: dict[str, Any] = {"ddof": self.c.ddof, "epsilon": self.c.epsilon}
        options["clip"] = self.c.clip
        rewards = subtract_kl(rewards, kl, self.kl_in_reward)
        if self.c.baseline == "history":
            advantages = self.history.update(prompts, rewards, **options)
        else:
            options |= {"baseline": self.c.baseline, "std": self.c.std}
            if self.c.rewards in ("each", "gdpo"):
                weigh = weigh_each if self.c.rewards == "each" else gdpo
                advantages = weigh(
                    [each[name] for name in self.weights], list(self.weights.values()), **options
                )
            else:
                advantages = group_advantages(rewards, **options)
        return advantages if self.c.best_of is None else best_of(advantages, self.c.best_of)

    @property
    def kept(self) -> int | None:
        """Generations of a prompt that are trained on; None = all."""
        return self.c.best_of


def _without_mean(row: Tensor) -> Tensor:
    return group_advantages(row[None], std="none", clip=None)[0]


def step_weights(config: Config, policy: Policy) -> list[float]:
    """The weight `(T,)` of each step's loss: the settings', times s/h under GRPO-Guard.

    At ratio 1 the loss of GRPO-Guard has the gradient -A·(g/√h)·∇l, and g/√h = s/h (yifan123/
    flow_grpo, train_sd3_GRPO_Guard; the ratio's own form is in `schedules`).
    """
    plan = policy.plan()
    weights = list(config.objective.step_weights or [1.0] * len(plan.std))
    if config.objective.ratio == "guard":
        h = (plan.table[:-1] - plan.table[1:]).double()
        weights = [w * float(s) / float(d) for w, s, d in zip(weights, plan.std, h, strict=True)]
    return weights
