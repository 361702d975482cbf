"""DPOK's value baseline: what a step is expected to earn, learned while the policy trains.

The advantage of a step is A = r - V(z_t, text, t): the reward of its picture minus the value of
where it started (DPOK, arXiv 2305.16381; google-research, `dpok/train_online_pg.py`).
V is asked when the step is sampled, with the weights it has then, and learns from the update
afterwards: a baseline that has not seen the reward leaves the expected gradient as it is.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .data import SampleKey, Transition
from .errors import LeanError
from .noise import generator
from .parallel import World
from .pipeline import embedding

if TYPE_CHECKING:
    from . import settings
    from .policy import Policy

WEIGHTS, ORDER, BATCH = -3, -4, -5
"""What a keyed draw is for: the first weights, the buffer's order, a batch of learning."""

GRID, FRAME_GRID, LENGTH = 8, 4, 64
"""Cells a side of an image and of a frame, and cells along a row of tokens."""

PREFIX = "value."


def pooled(latents: Tensor) -> Tensor:
    """The features of latents that V sees, `(B, ...)` to `(B, K)` float32: averages over cells.

    Images `(C, H, W)` over a grid of at most 8 x 8, every frame of a video `(C, F, H, W)` of at
    most 4 x 4, tokens or sound (two axes) along the longer one into at most 64. DPOK gives its
    network the whole latent of Stable Diffusion (16,384 numbers); one of Wan has 2 million, and
    its first layer would be larger than many a denoiser. Raises LeanError for other shapes.
    """
    x = latents.detach().float()
    if x.ndim == 3:
        x = x.transpose(1, 2) if x.shape[1] >= x.shape[2] else x
        return F.adaptive_avg_pool1d(x, min(LENGTH, x.shape[2])).flatten(1)
    if x.ndim in (4, 5):
        side = GRID if x.ndim == 4 else FRAME_GRID
        frames = x.flatten(1, -3)
        cells = min(side, x.shape[-2]), min(side, x.shape[-1])
        return F.adaptive_avg_pool2d(frames, cells).flatten(1)
    raise LeanError(
        f"A value network needs latents of 2 to 4 axes (tokens, image, video), and these have the "
        f"shape {tuple(x.shape[1:])}. Choose another advantage.baseline."
    )


class Network(nn.Module):
    """V: three layers of ReLU whose outputs are scaled by a gate of the step, and a linear one.

    The layers are those of DPOK's `ValueMulti` (`dpok/reward_model.py`). Here the gates start at
    1, not uniform in [0, 1), and the last layer at 0: an untrained V is the baseline 0.
    """

    def __init__(self, num_inputs: int, width: int, num_steps: int, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(int(generator(seed, WEIGHTS).integers(2**63)))
        sizes = [num_inputs, width, width]
        self.weights = nn.ParameterList(
            nn.init.xavier_normal_(torch.empty(width, size), generator=draw) for size in sizes
        )
        self.biases = nn.ParameterList(torch.zeros(width) for _ in sizes)
        self.gates = nn.ParameterList(torch.ones(num_steps, width) for _ in sizes)
        self.last = nn.Parameter(torch.zeros(1, width))
        self.last_bias = nn.Parameter(torch.zeros(1))

    def forward(self, features: Tensor, text: Tensor, steps: Tensor) -> Tensor:
        """`(N, K)`, `(N, D)` and `(N,)` int64 to `(N,)`."""
        x = torch.cat([features, text], dim=1)
        # as a product: the backward of a look-up may add in another order on every run
        chosen = F.one_hot(steps, len(self.gates[0])).to(x.dtype)
        for weight, bias, gate in zip(self.weights, self.biases, self.gates, strict=True):
            x = F.relu(chosen @ gate * F.linear(x, weight, bias))
        return F.linear(x, self.last, self.last_bias).squeeze(1)


class Value:
    """V with its optimizer and the newest transitions it learns from.

    Everything drawn depends on `(seed, round)`, where a round is a `learn`. The buffer is in
    float32 on the CPU: `buffer` x (K + D + 2) numbers, 33 MB for FLUX with 1000 transitions.
    """

    def __init__(
        self,
        shape: Sequence[int],
        text_width: int,
        num_steps: int,
        *,
        width: int = 256,
        lr: float = 1e-4,
        steps: int = 5,
        batch: int = 256,
        buffer: int = 1000,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """`shape`: that of a latent without B; `num_steps`: T of the sampler.

        AdamW has torch's other defaults, weight decay 0.01 with them, as in DPOK. Raises
        LeanError for a shape that `pooled` does not know.
        """
        num_features = pooled(torch.zeros(1, *shape)).shape[1]
        self.shape, self.text_width = tuple(shape), text_width
        self.steps, self.batch, self.capacity, self.seed = steps, batch, buffer, seed
        self.network = Network(num_features + text_width, width, num_steps, seed).to(device)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=lr)
        self.round = 0
        self.buffer = {
            "features": torch.zeros(0, num_features),
            "text": torch.zeros(0, text_width),
            "steps": torch.zeros(0, dtype=torch.int64),
            "rewards": torch.zeros(0),
        }

    @torch.no_grad()
    def baseline(self, features: Tensor, text: Tensor, step: int) -> Tensor:
        """V of B samples at a step, `(B,)` float64 without a graph, on the device of `features`.

        `features` `(B, K)` are `pooled` latents, `text` `(B, D)` is `pipeline.embedding`.
        """
        device = self.network.last.device
        steps = torch.full((len(features),), step, device=device)
        value: Tensor = self.network(features.to(device), text.to(device), steps)
        return value.to(features.device, torch.float64)

    def remember(self, features: Tensor, text: Tensor, steps: Tensor, rewards: Tensor) -> None:
        """Take in transitions `(N, K)`, `(N, D)`, `(N,)`, `(N,)`; the oldest are forgotten.

        They come in a keyed order, so that of more than the buffer holds a fair draw is kept.
        Those without a finite reward are left out.
        """
        order = torch.from_numpy(generator(self.seed, ORDER, self.round).permutation(len(rewards)))
        rows = order[torch.isfinite(rewards.cpu())[order]]
        new = {"features": features, "text": text, "steps": steps, "rewards": rewards}
        for name, old in self.buffer.items():
            added = new[name].detach().cpu()[rows].to(old.dtype)
            self.buffer[name] = torch.cat([old, added])[-self.capacity :].clone()

    def learn(self) -> float | None:
        """A round of `steps` AdamW steps on the squared error; returns the mean loss.

        Each is on `batch` transitions drawn without replacement, or on all while there are fewer.
        (DPOK adds up the gradients of 5 such batches and makes a single AdamW step of them.)
        With nothing in the buffer there is nothing to learn: None.
        """
        losses = []
        held = len(self.buffer["rewards"])
        for i in range(self.steps if held else 0):
            draw = generator(self.seed, BATCH, self.round, i)
            rows = torch.from_numpy(draw.choice(held, min(self.batch, held), replace=False))
            device = self.network.last.device
            batch = {name: values[rows].to(device) for name, values in self.buffer.items()}
            with torch.enable_grad():
                value = self.network(batch["features"], batch["text"], batch["steps"])
                loss = F.mse_loss(value, batch["rewards"])
                loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
        self.round += 1
        return float(torch.stack(losses).mean()) if losses else None

    def state_dict(self) -> dict[str, Tensor]:
        """Weights, AdamW's state, buffer and round, as named tensors on the CPU."""
        state = {"round": torch.tensor(self.round)}
        for name, parameter in self.network.named_parameters():
            state[f"network.{name}"] = parameter.detach()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                state[f"{key}.{name}"] = value
        state |= {f"buffer.{name}": values for name, values in self.buffer.items()}
        return {name: value.cpu().clone() for name, value in state.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from `state_dict`, bitwise. Raises LeanError when it is of another network."""
        own = {f"network.{name}": p.detach() for name, p in self.network.named_parameters()}
        own |= {f"buffer.{name}": values for name, values in self.buffer.items()}
        for name, value in own.items():
            found = state.get(name)
            first = 1 if name.startswith("buffer.") else 0  # it grows
            if found is None or found.shape[first:] != value.shape[first:]:
                shape = None if found is None else tuple(found.shape)
                raise LeanError(
                    f"The checkpoint's value network does not fit: {name} is {shape} there and "
                    f"{tuple(value.shape)} here. Resume with the settings it was made with."
                )
        moments: dict[int, dict[str, Tensor]] = {}
        for i, (name, parameter) in enumerate(self.network.named_parameters()):
            parameter.detach().copy_(state[f"network.{name}"])
            for key in ("step", "exp_avg", "exp_avg_sq"):
                if f"{key}.{name}" in state:
                    moments.setdefault(i, {})[key] = state[f"{key}.{name}"].clone()
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self.buffer = {name: state[f"buffer.{name}"].clone() for name in self.buffer}
        self.round = int(state["round"])


class Critic:
    """V in a loop: gives each transition its baseline, and learns when the rewards are known.

    With several ranks all of them learn from everybody's transitions, in the same order, and so
    keep the same network without exchanging it.
    """

    def __init__(self, value: Value, pipe: Any, world: World | None = None) -> None:
        self.value, self.pipe, self.world = value, pipe, world or World()
        self._waiting: list[tuple[tuple[Hashable, ...], int, Tensor, Tensor]] = []

    @classmethod
    def of(
        cls, policy: Policy, c: settings.Value, *, seed: int, world: World, device: torch.device
    ) -> Critic:
        """For a policy that has just been made, as the settings say.

        Raises LeanError when the pipeline's latents or texts are none that V can read.
        """
        plan = policy.plan()
        text_width = embedding(policy.pipe, [""]).shape[1]  # the plan has encoded it
        value = Value(
            plan.shape, text_width, len(plan.std), seed=seed, device=device, **c.model_dump()
        )
        return cls(value, policy.pipe, world)

    def attach(self, t: Transition) -> None:
        """Set `t.baseline`, while the pipeline samples `t.prompts`; keep what V is to learn from.

        Raises LeanError for a transition without latents.
        """
        if t.latents is None:
            raise LeanError(f"Step {t.step} holds no latents, and so it has no value.")
        features, text = pooled(t.latents), embedding(self.pipe, t.prompts)
        t.baseline = self.value.baseline(features, text, t.step)
        if t.weight:
            self._waiting.append((t.keys, t.step, features, text))

    def forget(self) -> None:
        """Drop what was kept of an update that is to be repeated."""
        self._waiting = []

    def after(self, rewards: Tensor) -> float | None:
        """Learn from the update that was sampled; a collective of all ranks.

        `rewards` `(P, M)` are those the advantages are made of, where this rank knows its own.
        Returns the mean loss, None when no reward was finite.
        """
        where: list[tuple[int, int, int]] = []
        for keys, step, _, _ in self._waiting:
            for key in keys:
                assert isinstance(key, SampleKey)
                where.append((key.prompt, key.generation, step))
        own = None
        if where:
            at = torch.tensor(where)
            features = torch.cat([features for _, _, features, _ in self._waiting]).cpu()
            text = torch.cat([text for _, _, _, text in self._waiting]).cpu()
            own = where, features, text, at[:, 2], rewards[at[:, 0], at[:, 1]]
        self._waiting = []
        found = [one for one in self.world.share_all(own) if one is not None]
        if found:
            everyone = [place for one in found for place in one[0]]
            order = sorted(range(len(everyone)), key=everyone.__getitem__)
            columns = [torch.cat([one[k] for one in found])[order] for k in range(1, 5)]
            self.value.remember(*columns)
        return self.value.learn()

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint's `extra` has to hold."""
        return {f"{PREFIX}{name}": value for name, value in self.value.state_dict().items()}

    def load_state_dict(self, extra: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's `extra`. Raises LeanError when it has no value network."""
        state = {
            name.removeprefix(PREFIX): value
            for name, value in extra.items()
            if name.startswith(PREFIX)
        }
        if not state:
            raise LeanError(
                "The checkpoint holds no value network: it was written with another "
                "advantage.baseline. Resume it so."
            )
        self.value.load_state_dict(state)
