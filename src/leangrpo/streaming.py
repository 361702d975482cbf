"""Streaming: reweight with a constant number of gradients, whatever the size of the group.

Reweight holds a gradient G_m of every generation until all rewards of the group are known. But an
advantage that is normalised in its group is affine in the reward, A_m = alpha r_m + beta, with
alpha and beta the same for the whole group. So with any c that is known beforehand

    sum_m A_m G_m = alpha sum_m (r_m - c) G_m + (alpha c + beta) sum_m G_m,

and two sums will do, into which each G_m is folded as soon as its own reward is known. (The paper,
appendix C, shows that one sum is not enough.) Rewards that are normalised one by one have an alpha
and a sum each. c is the mean of the rewards so far on this rank, taken as distances from the first
one: those of rewards of 1000 +- 0.01 are exact in float64.

alpha and beta are read off the advantages themselves, which are given as to any other schedule;
advantages that are not affine (clipped, or the best of n) are refused.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from .errors import LeanError
from .gradients import Gradient
from .ledger import Batch, sum_dtype
from .reweight import Reweight
from .samples import num_bytes

NOT_AFFINE = 1e-9
"""Largest residual of an affine fit to advantages in float64, relative to the largest of them.

Rounding leaves about 1e-15 for one reward; the fit to several is as good as the rounding of the
largest term, and 1e-9 lies far above that and far below what a clip or a selection leaves.
"""


class Sums:
    """The sums of a group: `plain` of its gradients, `weighted` by its rewards, one for each.

    `origin` are the rewards of the first that came, `members` all distances from them, `mean` the
    mean of these: c is moved along with it, so that the sum that has to be subtracted in the end
    stays small. Kept as the ledger's own sum: in float32 for parameters of 16 bits.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.plain: Gradient = [None] * len(parameters)
        self.weighted: list[Gradient] = []
        self.origin: Tensor | None = None
        self.mean = torch.zeros(0, dtype=torch.float64)
        self.members: dict[Hashable, Tensor] = {}

    def fold(self, key: Hashable, rewards: Tensor, gradient: Gradient) -> None:
        """Add a trajectory's gradient, `rewards` `(k,)` being its own; takes the tensors over."""
        self._enlist({key: rewards})
        own = (self.members[key] - self.mean).tolist()
        for i, parameter in enumerate(self.parameters):
            g, gradient[i] = gradient[i], None
            if g is None:
                continue
            for total, c in zip(self.weighted, own, strict=True):
                if c != 0.0:
                    _add(total, i, g, c, parameter)
            _add(self.plain, i, g, 1.0, parameter, owned=True)

    def fold_batch(self, rewards: Mapping[Hashable, Tensor], batches: Iterable[Batch]) -> None:
        """Add the gradients of trajectories that were sampled together.

        Those without `rewards` are left out.
        """
        self._enlist(rewards)
        for keys, samples in batches:
            c = [self._coefficients(key) for key in keys]
            for number, total in enumerate([self.plain, *self.weighted]):
                samples.fold(torch.stack(c)[:, number], partial(self._sum, total))

    def _coefficients(self, key: Hashable) -> Tensor:
        """A trajectory's share in the plain and the weighted sums, `(1 + k,)`; 0 if left out."""
        if key not in self.members:
            return torch.zeros(1 + len(self.mean), dtype=torch.float64)
        return torch.cat([torch.ones(1, dtype=torch.float64), self.members[key] - self.mean])

    def _enlist(self, rewards: Mapping[Hashable, Tensor]) -> None:
        """Note rewards, and move the mean that the weighted sums refer to along with them."""
        for key, values in rewards.items():
            if self.origin is None:
                self.origin, self.mean = values, torch.zeros_like(values)
                self.weighted = [[None] * len(self.parameters) for _ in values]
            self.members[key] = values - self.origin
        if not self.members:
            return
        before, self.mean = self.mean, torch.stack(list(self.members.values())).mean(0)
        for total, shift in zip(self.weighted, (before - self.mean).tolist(), strict=True):
            for i, parameter in enumerate(self.parameters):
                so_far = self.plain[i]
                if so_far is not None and shift != 0.0:
                    _add(total, i, so_far, shift, parameter)

    def _sum(self, total: Gradient, i: int) -> Tensor:
        """The sum of parameter `i`, zero to begin with."""
        found = total[i]
        if found is None:
            p = self.parameters[i]
            found = total[i] = torch.zeros(p.shape, dtype=sum_dtype(p), device=p.device)
        return found

    @property
    def num_bytes(self) -> int:
        """Bytes of the sums."""
        lists = self.plain, *self.weighted
        return sum(g.numel() * g.element_size() for one in lists for g in one if g is not None)


class Streaming(Reweight):
    """Reweight in two sums a group (paper eq. 7, regrouped as the module says): at most three
    gradients, and a fourth for the groups that are done. A batch of B that is sampled together
    holds its B gradients beside the sums.

    `rewards` takes a trajectory's reward as soon as it is known, `centre` the deviations from the
    group's mean where the advantages of an update come all at the end, and `advantages` the same
    numbers as for any schedule. A gradient whose reward has not come yet waits as in reweight.
    """

    name = "streaming"
    streams = True

    def begin(self, num_samples: int, num_steps: int) -> None:
        """Open an update; gradients already in `.grad` are kept and added to."""
        super().begin(num_samples, num_steps)
        self._group = Sums(self.guard.parameters)
        self._centred = Sums(self.guard.parameters)
        self._left_out: set[Hashable] = set()

    def rewards(self, rewards: Mapping[Hashable, Sequence[float]]) -> None:
        """Fold the gradients of finished trajectories, given what each was rewarded with.

        A trajectory with a reward that is not finite is left out: its advantage has to be 0.
        """
        self._require_open("rewards")
        self._measure()
        known = {k: torch.tensor([*values], dtype=torch.float64) for k, values in rewards.items()}
        for key, values in known.items():
            if key not in self._steps:
                raise LeanError(f"schedule 'streaming': {key} has a reward but no steps.")
            if not values.isfinite().all():
                self._left_out.add(key)
        finite = {key: values for key, values in known.items() if key not in self._left_out}
        with self.watch.stage("backward"):
            if batches := self._ledger.take_batches(known):
                self._group.fold_batch(finite, batches)
                self._measure(num_bytes(t for _, samples in batches for t in samples.tensors()))
            for key, values in known.items():
                gradient = self._ledger.waiting.pop(key, None)
                if gradient is not None and key in finite:
                    self._group.fold(key, values, gradient)
                    self._measure()

    def centre(self, deviations: Mapping[Hashable, Sequence[float]]) -> None:
        """A group is complete: merge it with those before, given its rewards less their means.

        The advantages that come at the end are then a linear function of these, the same one for
        all groups (a deviation of the whole update). Three sums become one for each reward.
        """
        self._require_open("centre")
        group, self._group = self._group, Sums(self.guard.parameters)
        known = {k: torch.tensor([*deviations[k]], dtype=torch.float64) for k in group.members}
        if not known:
            return
        first = next(iter(known.values()))  # that of the one whose distance is 0
        _check_fit({k: d - first for k, d in known.items()}, group.members)
        if not self._centred.weighted:
            self._centred.weighted = [[None] * len(self.guard.parameters) for _ in first]
        self._centred.members |= known
        with self.watch.stage("backward"):
            for total, own, mean in zip(
                self._centred.weighted, group.weighted, (first + group.mean).tolist(), strict=True
            ):
                for i, parameter in enumerate(self.guard.parameters):
                    for part, c in ((own[i], 1.0), (group.plain[i], mean)):
                        if part is not None and c != 0.0:
                            _add(total, i, part, c, parameter, owned=part is own[i])

    def advantages(self, advantages: Mapping[Hashable, float]) -> None:
        """Multiply the sums by what makes these advantages of the rewards.

        Raises LeanError when no affine function does.
        """
        self._learn(advantages)
        self.guard.check(self.name)
        self._measure()
        for key, advantage in advantages.items():
            if key not in self._steps:
                raise LeanError(f"schedule {self.name!r}: {key} has an advantage but no steps.")
            known = key in self._group.members or key in self._centred.members
            if not known and not (key in self._left_out and advantage == 0.0):
                raise LeanError(
                    f"schedule 'streaming': {key} got the advantage {advantage}, but "
                    + ("its reward was not finite." if key in self._left_out else "no reward.")
                )
            for weight in self._steps[key]:
                self.statistics.loss += -advantage * (weight * self._scale)
        if self._group.members:
            slopes, offset = _affine(advantages, self._group.members, constant=True)
            offset += sum(a * b for a, b in zip(slopes, self._group.mean.tolist(), strict=True))
            self._due(self._group.plain, offset)
            for total, slope in zip(self._group.weighted, slopes, strict=True):
                self._due(total, slope)
            self._group = Sums(self.guard.parameters)
        if self._centred.members:
            slopes, _ = _affine(advantages, self._centred.members, constant=False)
            for total, slope in zip(self._centred.weighted, slopes, strict=True):
                self._due(total, slope)
            self._centred = Sums(self.guard.parameters)
        if self.gradients.sync == "group":
            self._synchronise()

    def _due(self, gradient: Gradient, coefficient: float) -> None:
        if coefficient != 0.0:
            self._ledger.add(gradient, -coefficient * self._scale)

    def _measure(self, beside: int = 0) -> None:
        sums = self._group.num_bytes + self._centred.num_bytes
        self._ledger.measure(beside=sums + beside)


def _add(
    total: Gradient,
    i: int,
    g: Tensor,
    c: float,
    parameter: nn.Parameter,
    *,
    owned: bool = False,
) -> None:
    """total[i] += c g, in place; with `owned`, g itself may become the sum."""
    before = total[i]
    if before is not None:
        before.add_(g.to(before.device, before.dtype), alpha=c)
        return
    made = g.to(parameter.device, sum_dtype(parameter))
    total[i] = made.mul_(c) if owned or made is not g else g.mul(c)


def _affine(
    advantages: Mapping[Hashable, float], members: Mapping[Hashable, Tensor], *, constant: bool
) -> tuple[list[float], float]:
    """The slopes and the constant that make `advantages` of the rewards of `members`.

    With `constant` the first member, whose rewards are the origin, has the constant as its
    advantage; without there is none. One reward: the slope is that of the member farthest from the
    origin. Several: least squares. Either way the fit is checked on every member.
    """
    missing = [key for key in members if key not in advantages]
    if missing:
        raise LeanError(
            f"schedule 'streaming': {missing[0]} is in a group whose advantages came without its "
            "own. Give those of a whole group in one call."
        )
    x = torch.stack(list(members.values()))
    a = torch.tensor([advantages[key] for key in members], dtype=torch.float64)
    offset = a[0].clone() if constant else torch.zeros((), dtype=torch.float64)
    rest = a - offset
    if x.shape[1] == 1:
        far = int(x.abs().argmax())
        slopes = (rest[far] / x[far]) if x[far, 0] != 0 else torch.zeros(1, dtype=torch.float64)
    else:
        size = x.abs().amax(0)
        size = torch.where(size > 0, size, 1.0)
        slopes = torch.linalg.lstsq(x / size, rest[:, None], driver="gelsd").solution[:, 0] / size
    left = (rest - x @ slopes).abs().max()
    if not left <= NOT_AFFINE * a.abs().max():
        raise LeanError(
            "schedule 'streaming': the advantages are no affine function of the rewards (they are "
            f"off by {float(left):.3g}): a clip has bound, or generations were left out. Use "
            "schedule 'reweight', or advantage.clip=null."
        )
    return slopes.tolist(), float(offset)


def _check_fit(centred: Mapping[Hashable, Tensor], distances: Mapping[Hashable, Tensor]) -> None:
    """Raise LeanError unless deviations differ from each other as the rewards do."""
    a, x = torch.stack(list(centred.values())), torch.stack(list(distances.values()))
    if a.shape != x.shape or not (a - x).abs().max() <= NOT_AFFINE * x.abs().max():
        raise LeanError(
            "schedule 'streaming': the deviations given to centre() are not the rewards less a "
            "mean of their group."
        )
