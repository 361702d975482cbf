"""Native, retain and reweight: when a gradient is formed, and nothing else.

All three see the same events (a selected transition; the advantages of finished trajectories) and
leave the same gradient in the parameters' `.grad`,

    G = - 1/(N S) sum_i sum_t w_t (A_i - V_it) grad log p_t(i)  (+ beta/(N S) sum_it grad KL_t(i)),

with N trajectories and S selected steps in the update (paper eq. 5), w the transition's weight and
V its baseline (1 and 0 unless an algorithm says otherwise). They know no policy, no reward and no
rank, so that anybody's loop can use them:

    schedule = Retain(model)                      # or Reweight(model), Native(model, replay=...)
    schedule.begin(num_samples=N, num_steps=S)
    ...  schedule.transition(Transition(keys, step, log_prob))      # as each step is sampled
    schedule.advantages({key: A, ...})            # when the rewards of the group are known
    schedule.finish()                             # gradients are in .grad
    optimizer.step()
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .advantages import clipped_surrogate, surrogate_coefficient
from .capture import Capture
from .data import Transition
from .errors import LeanError, NonFiniteError
from .gradients import Gradients, Local
from .guard import Guard
from .offload import Offload
from .stopwatch import Stopwatch

Target = Guard | nn.Module | Iterable[nn.Module] | Any
"""What a schedule trains: a policy, a module or several, or a guard over them."""


@dataclass(slots=True)
class Statistics:
    """What an update did. `excluded` trajectories had log-probabilities that are not finite, and no
    part in the gradient. `loss` is the value of the clipped surrogate (plus KL); on-policy that
    is minus the mean advantage, so only its gradient says something."""

    loss: float = 0.0
    kl: float | None = None
    num_backwards: int = 0
    num_replays: int = 0
    num_skipped: int = 0
    excluded: int = 0
    ratio_error: float = 0.0
    ledger_bytes: int = 0


class Schedule(Protocol):
    """The one contract: a loop that speaks it runs under every schedule.

    `streams` says that the schedule wants each reward as soon as it is known.
    `needs_graph` says whether selected steps must be sampled with gradients; a `capture` is to be
    on while a batch of several samples is sampled, and `sampling()` open around it. `begin` opens
    an update over `num_samples` trajectories of `num_steps` selected steps each; `transition` takes
    a selected step as it was sampled; `rewards` takes what finished trajectories were rewarded
    with, and `centre` the same less the mean of their group; `advantages` takes their advantages,
    each once; `finish` closes the update with the gradient in `.grad`. A transition of weight 0 is
    idle: its backward runs, where others wait for it, and counts for nothing.

    With several ranks each gives its own trajectories and takes the advantages of those; begin,
    advantages and finish are called equally often on all of them, and the counts are global.
    """

    name: str
    needs_graph: bool
    streams: bool

    @property
    def capture(self) -> Capture | None: ...

    def sampling(self) -> AbstractContextManager[Any]: ...

    def begin(self, num_samples: int, num_steps: int) -> None: ...

    def transition(self, transition: Transition) -> None: ...

    def rewards(self, rewards: Mapping[Hashable, Sequence[float]]) -> None: ...

    def centre(self, deviations: Mapping[Hashable, Sequence[float]]) -> None: ...

    def advantages(self, advantages: Mapping[Hashable, float]) -> None: ...

    def finish(self) -> Statistics: ...


class Common:
    """Bookkeeping the three share: normaliser, advantages seen so far, statistics."""

    name: str
    needs_graph: bool
    streams = False
    splits = False
    """Whether the samples of a forward have gradients of their own."""
    capture: Capture | None = None

    def __init__(
        self,
        target: Target,
        *,
        kl: float = 0.0,
        gradients: Gradients | None = None,
        watch: Stopwatch | None = None,
    ) -> None:
        self.guard = Guard.of(target)
        self.gradients: Gradients = gradients or Local(self.guard)
        self.kl_coefficient = kl
        self.watch = watch or Stopwatch()
        self._open = False

    def sampling(self) -> AbstractContextManager[Any]:
        """What is open while the policy samples."""
        return nullcontext()

    def begin(self, num_samples: int, num_steps: int) -> None:
        """Open an update; see `Schedule`. Raises LeanError for counts below 1."""
        if num_samples < 1 or num_steps < 1:
            raise LeanError(
                f"An update of {num_samples} trajectories with {num_steps} selected steps has no "
                "gradient: both must be at least 1."
            )
        self.guard.mark(self.name, needs_graph=self.needs_graph)
        self.gradients.begin()
        self._scale = 1.0 / (num_samples * num_steps)
        self._kl_sum = 0.0
        self._known: dict[Hashable, float] = {}
        self._finite: list[tuple[tuple[Hashable, ...], bool, Tensor]] = []
        self.statistics = Statistics()
        self._open = True

    def rewards(self, rewards: Mapping[Hashable, Sequence[float]]) -> None:
        """What finished trajectories were rewarded with; most schedules wait for advantages."""

    def centre(self, deviations: Mapping[Hashable, Sequence[float]]) -> None:
        """The rewards of a group that is complete, less their mean."""

    def _require_open(self, event: str) -> None:
        if not self._open:
            raise LeanError(f"schedule {self.name!r}: begin() comes before {event}().")

    def _note(self, t: Transition) -> None:
        """Remember whether a step is finite, without waiting for the device to know."""
        if t.weight:
            always = t.baseline is not None or bool(self.kl_coefficient)
            self._finite.append((t.keys, always, t.log_prob.detach().isfinite()))

    def _refuse_poisoned(self) -> None:
        """Raise NonFiniteError where what is not finite has had a part in the gradient.

        With an advantage of 0 it has none, unless there is a KL or a baseline, or the schedule
        cannot tell it apart from others of its forward.
        """
        if not self._finite:
            return
        flags = iter(torch.cat([finite for *_, finite in self._finite]).tolist())
        bad: set[Hashable] = set()
        poisoned: set[Hashable] = set()
        for keys, always, _ in self._finite:
            here = {key for key in keys if not next(flags)}
            bad |= here
            mates = keys if here and not self.splits else here
            if any(always or self._known.get(key, 0.0) for key in mates):
                poisoned |= here
        self._finite = []
        self.statistics.excluded = len(bad)
        if poisoned:
            raise NonFiniteError(
                f"schedule {self.name!r}: the log-probabilities of {len(poisoned)} trajectories "
                f"are not finite, and the gradient is lost ({', '.join(map(str, [*poisoned][:3]))}"
                "). Sample the update again without them; alone in a forward, or under reweight "
                "and streaming, an advantage of 0 is enough.",
                poisoned,
            )

    def _learn(self, advantages: Mapping[Hashable, float]) -> None:
        self._require_open("advantages")
        for key, advantage in advantages.items():
            if key in self._known:
                raise LeanError(f"schedule {self.name!r}: {key} got its advantage twice.")
            if not abs(advantage) < float("inf"):
                raise LeanError(f"schedule {self.name!r}: the advantage of {key} is {advantage}.")
            self._known[key] = float(advantage)

    def _advantages_of(self, t: Transition) -> Tensor:
        """What each sample's log-probability is weighted with: A, less the step's baseline."""
        known = [self._known.get(key, 0.0) for key in t.keys]
        advantages = torch.tensor(known, dtype=torch.float64)
        return advantages if t.baseline is None else advantages - t.baseline.to(advantages)

    def _seed(self, t: Transition, coefficient: Tensor) -> Tensor:
        """A backward's seed `(B,)`: coefficients where the log-probabilities are."""
        return (coefficient * (t.weight * self._scale)).to(t.log_prob)

    def _close(self) -> Statistics:
        self._open = False
        self._refuse_poisoned()
        if self.kl_coefficient:
            self.statistics.kl = self._kl_sum * self._scale
            self.statistics.loss += self.kl_coefficient * self.statistics.kl
        return self.statistics

    def _kl_seed(self, t: Transition) -> Tensor | None:
        """d loss / d KL of each sample `(B,)`: beta/(N S), whatever the advantage."""
        if not self.kl_coefficient:
            return None
        if t.weight == 0.0 and t.kl is not None:
            return torch.zeros_like(t.kl)
        if t.kl is None:
            raise LeanError(
                f"schedule {self.name!r} has a KL coefficient of {self.kl_coefficient}, but step "
                f"{t.step} came without a KL: attach it (Policy.with_kl) or set kl to 0."
            )
        self._kl_sum += float(t.kl.detach().sum())
        return torch.full_like(t.kl, self.kl_coefficient * self._scale)

    def _backward(self, t: Transition, seed: Tensor) -> None:
        """One backward of a step: `seed` `(B,)` for its log-probabilities, the KL beside it."""
        kl_seed = self._kl_seed(t)
        with self.watch.stage("backward"):
            self.gradients.before(idle=self._is_flat(t))
            if kl_seed is None or t.kl is None:
                torch.autograd.backward([t.log_prob], [seed])
            else:
                torch.autograd.backward([t.log_prob, t.kl], [seed, kl_seed])
        with self.watch.stage(self._sync_stage if self.gradients.sync == "step" else "backward"):
            self.gradients.after()
        self.statistics.num_backwards += 1

    @property
    def _sync_stage(self) -> str:
        """In one process nothing travels, and what is left of a reduction is the correction."""
        return "backward" if self.gradients.alone else "sync"

    def _is_flat(self, t: Transition) -> bool:
        """Whether a transition has no gradient: idle, or all its advantages are zero."""
        if t.weight == 0.0:
            return True
        return not self.kl_coefficient and not self._advantages_of(t).any()


class _Deferred(Common):
    """A schedule that waits with backward until the advantages are known."""

    def begin(self, num_samples: int, num_steps: int) -> None:
        super().begin(num_samples, num_steps)
        self._pending: list[Transition] = []

    def advantages(self, advantages: Mapping[Hashable, float]) -> None:
        """Differentiate, in the order of sampling, every step whose samples are all known."""
        self._learn(advantages)
        ready: list[Transition] = []
        later: list[Transition] = []
        for t in self._pending:
            known = t.weight == 0.0 or all(key in self._known for key in t.keys)
            (ready if known else later).append(t)
        self._pending = later
        if ready and self.needs_graph:
            self.guard.check(self.name)
        ready.reverse()
        while ready:  # popping lets a graph go as soon as it has been used
            t = ready.pop()
            if self.gradients.skippable and self._is_flat(t):
                self.statistics.num_skipped += 1  # no gradient, so no backward
                continue
            self._differentiate(t)
        if self.gradients.sync == "group":
            self._synchronise()

    def _synchronise(self) -> None:
        """Add the ranks' gradients since the last time."""
        with self.watch.stage(self._sync_stage):
            taken = self.gradients.take()
            reached = [g is not None for g in taken]
            self.gradients.reduce(lambda indices: [taken[i] for i in indices], reached)

    def finish(self) -> Statistics:
        """Close the update. Raises LeanError when trajectories still wait for their advantage."""
        self._require_open("finish")
        if self._pending:
            raise LeanError(
                f"schedule {self.name!r}: {len(self._pending)} sampled steps never got an "
                "advantage. Call advantages() for every trajectory before finish()."
            )
        if self.gradients.sync == "update":
            self._synchronise()
        self.gradients.finish()
        return self._close()

    def _differentiate(self, t: Transition) -> None:
        raise NotImplementedError


class Native(_Deferred):
    """What every other trainer does: sample without gradients, run the model again to train.

    `replay` evaluates a transition again with gradients under the current weights. This is the
    reference the other schedules are compared with, and the only one that allows the weights to
    have moved since the rollout: the ratio rho = exp(log p - log p_old) is then not 1, and is
    clipped to 1 +- `clip_range` (paper eq. 2).
    """

    name = "native"
    needs_graph = False

    def __init__(
        self,
        target: Target,
        *,
        replay: Callable[[Transition], Transition],
        clip_range: float = 1e-4,
        ratio: str = "clip",
        kl: float = 0.0,
        gradients: Gradients | None = None,
        watch: Stopwatch | None = None,
    ) -> None:
        """`ratio`: "clip" (paper eq. 2), "clamp" (DPOK), or "guard" (GRPO-Guard; see `_guarded`),
        whose transitions have s/h as their weight, so that all schedules agree at ratio 1."""
        super().__init__(target, kl=kl, gradients=gradients, watch=watch)
        self.replay = replay
        self.clip_range = clip_range
        self.ratio = ratio

    def transition(self, transition: Transition) -> None:
        """Remember a step sampled without gradients; its graph, if it has one, is dropped."""
        self._require_open("transition")
        self._note(transition)
        self._pending.append(transition.without_graph())

    def _differentiate(self, t: Transition) -> None:
        with self.watch.stage("recompute"):
            new = self.replay(t)
        new.weight, new.baseline = t.weight, t.baseline
        self.statistics.num_replays += 1
        if t.weight == 0.0:  # it runs for others, and what it says may be anything
            self._backward(new, torch.zeros_like(new.log_prob))
            return
        ratio_error = (new.log_prob.detach() - t.log_prob).expm1().abs().max()
        self.statistics.ratio_error = max(self.statistics.ratio_error, float(ratio_error))
        tempered, form = 1.0, self.ratio
        if form == "guard":
            new.log_prob, tempered, form = *_guarded(new, t), "clip"
        now, before = (tempered * p.detach().double() for p in (new.log_prob, t.log_prob))
        advantages = self._advantages_of(t).to(now.device)
        some = now, before, advantages, self.clip_range, form
        for value in clipped_surrogate(*some).tolist():
            self.statistics.loss += value * (t.weight * self._scale) / tempered
        self._backward(new, self._seed(t, surrogate_coefficient(*some)))


def _guarded(new: Transition, old: Transition) -> tuple[Tensor, float]:
    """GRPO-Guard's normalised log-probability l + b `(B,)`, and the s its difference is scaled by.

    The ratio is exp(s·(l - l_old + b)), b = mean((μ - μ_old)²) / (2 s²) the mean of l_old - l over
    the noise, and the loss is divided by h. With the weight s/h the gradient at ratio 1 is that of
    the plain ratio. Source: yifan123/flow_grpo, train_sd3_GRPO_Guard; its b is one number for a
    batch, ours (as Flow-Factory's and verl-omni's) one for each sample.
    """
    if new.mean is None or old.mean is None or old.std is None:
        raise LeanError(
            f"Step {old.step} came without its mean and std, which objective.ratio=guard needs."
        )
    s = float(old.std)
    moved = (new.mean - old.mean).square().flatten(1).mean(1, dtype=torch.float64)
    return new.log_prob + moved / (2 * s * s), s


class Retain(_Deferred):
    """Keep the rollout's graphs until the advantage is known (paper eq. 6).

    Bitwise the native gradient on deterministic kernels: the same graphs, differentiated in the
    same order with the same seeds. Memory grows with the selected steps and the group, unless
    `activations` says how many bytes of them may wait on the device (`offload`, sampled inside
    `sampling()`).
    """

    name = "retain"
    needs_graph = True

    def __init__(
        self,
        target: Target,
        *,
        activations: int | None = None,
        kl: float = 0.0,
        gradients: Gradients | None = None,
        watch: Stopwatch | None = None,
    ) -> None:
        """`activations`: bytes that may wait on the device, None for all (`Offload`)."""
        super().__init__(target, kl=kl, gradients=gradients, watch=watch)
        self.offload = None if activations is None else Offload(self.guard.modules, activations)

    def sampling(self) -> AbstractContextManager[Any]:
        """What autograd saves meanwhile is kept within the budget, where there is one."""
        return nullcontext() if self.offload is None else self.offload

    def begin(self, num_samples: int, num_steps: int) -> None:
        """Open an update; see `Schedule`."""
        super().begin(num_samples, num_steps)
        if self.offload is not None:
            self.offload.begin()

    def transition(self, transition: Transition) -> None:
        """Keep a step with its graph. Raises StaleGraphError when the graph cannot be used."""
        self._require_open("transition")
        self.guard.accept(transition, self.name)
        self._note(transition)
        self._pending.append(transition)
        if self.offload is not None:
            self.offload.cut()

    def _differentiate(self, t: Transition) -> None:
        advantages = self._advantages_of(t)
        for value in advantages.tolist():
            self.statistics.loss += -value * (t.weight * self._scale)
        self._backward(t, self._seed(t, -advantages))
