"""Why a gradient is corrected before ranks are added up, and that reweight cannot do otherwise.

Source: paper, sec. 4.3.2 and appendix C. J has one column for each trajectory, the sum of its
steps' gradients; wanted is J A. Whoever adds up first has J 1, and no factor makes J A of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from test_schedules import S, Toy, point
from torch import Tensor

from leangrpo.data import Transition
from leangrpo.errors import LeanError
from leangrpo.gradients import Local
from leangrpo.guard import Guard
from leangrpo.reweight import Reweight
from leangrpo.schedules import Native, Retain

RANKS = 2


class Early(Local):
    """Adds the other rank's provisional gradient after every backward: what must not be done."""

    def __init__(self, guard: Guard, others: Iterator[list[Tensor]]) -> None:
        super().__init__(guard)
        self.others = others

    def after(self) -> None:
        super().after()
        for parameter, g in zip(self.parameters, next(self.others), strict=True):
            assert parameter.grad is not None
            parameter.grad += g


def of_step(model: Toy, key: int, step: int) -> list[Tensor]:
    score = model.score(point(key, step, torch.float64)).sum()
    return list(torch.autograd.grad(score, list(model.parameters())))


def per_trajectory(model: Toy) -> Tensor:
    """J `(parameters, RANKS)`."""
    return torch.stack(
        [
            sum(torch.cat([g.flatten() for g in of_step(model, key, step)]) for step in range(S))
            for key in range(RANKS)
        ],
        dim=1,
    )


def reweight(model: Toy, key: int, advantage: float, gradients: Local | None) -> Tensor:
    """A rank's reweight update over its one trajectory."""
    schedule = Reweight(model, gradients=gradients)
    schedule.begin(RANKS, S)
    for step in range(S):
        score = model.score(point(key, step, torch.float64))
        schedule.transition(Transition((key,), step, score))
    schedule.advantages({key: advantage})
    schedule.finish()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return gradient


def native(model: Toy, advantages: list[float]) -> Tensor:
    schedule = Native(
        model, replay=lambda t: Transition(t.keys, t.step, model.score(t.latents), weight=t.weight)
    )
    schedule.begin(RANKS, S)
    for key in range(RANKS):
        for step in range(S):
            x = point(key, step, torch.float64)
            schedule.transition(Transition((key,), step, model.score(x), latents=x))
    schedule.advantages(dict(enumerate(advantages)))
    schedule.finish()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return gradient


@pytest.mark.parametrize("advantages", [[1.3, -0.4], [1.0, -1.0], [0.7, 0.7]])
def test_adding_up_first_is_off_by_the_predicted_amount(advantages) -> None:
    """Correct: -J A / (N S). Added up first, each rank has A_r J 1, and together s J 1, s = sum A:
    off by |J (A - s 1)| / (N S), which for a normalised group is the whole gradient."""
    model = Toy()
    j, a = per_trajectory(model), torch.tensor(advantages, dtype=torch.float64)
    wanted = native(model, advantages)
    torch.testing.assert_close(wanted, -(j @ a) / (RANKS * S), rtol=1e-12, atol=1e-15)

    late = sum(reweight(model, key, advantages[key], None) for key in range(RANKS))
    assert float((late - wanted).norm() / wanted.norm()) < 1e-13

    early = torch.zeros_like(wanted)
    for key in range(RANKS):
        others = iter([of_step(model, 1 - key, step) for step in range(S)])
        early += reweight(model, key, advantages[key], Early(Guard(model), others))
    predicted = float((j @ (a - a.sum())).norm()) / (RANKS * S)
    assert float((early - wanted).norm()) == pytest.approx(predicted, rel=1e-12)
    assert predicted > 0.1 * float(wanted.norm())
    if a.sum() == 0:
        assert predicted == pytest.approx(float(wanted.norm()), rel=1e-12)
        assert float(early.norm()) < 1e-15


def test_no_factor_mends_it() -> None:
    """The nearest c J 1 to J A stays sqrt(A'KA - (1'KA)^2 / 1'K1) away, K = J'J."""
    j = per_trajectory(Toy())
    a = torch.tensor([1.0, -1.0], dtype=torch.float64)
    one, k = torch.ones(RANKS, dtype=torch.float64), j.T @ j
    best = (one @ k @ a) / (one @ k @ one)
    left = float((a @ k @ a - (one @ k @ a) ** 2 / (one @ k @ one)).sqrt())
    assert float((best * (j @ one) - j @ a).norm()) == pytest.approx(left, rel=1e-10)
    factors = torch.linspace(-3, 3, 601, dtype=torch.float64)
    distances = (factors[:, None] * (j @ one) - j @ a).norm(dim=1)
    assert float(distances.min()) >= left * (1 - 1e-12) > 0.1 * float((j @ a).norm())


def test_where_all_advantages_are_equal_the_order_does_not_matter() -> None:
    j = per_trajectory(Toy())
    one = torch.ones(RANKS, dtype=torch.float64)
    torch.testing.assert_close(j @ (0.7 * one), 0.7 * (j @ one))


def test_reweight_refuses_to_synchronise_at_every_step() -> None:
    model = Toy()
    gradients = Local(Guard(model))
    gradients.sync = "step"
    with pytest.raises(LeanError, match=r"cannot synchronise at every step.*parallel.sync=update"):
        Reweight(model, gradients=gradients)
    Retain(model, gradients=gradients)  # its gradients are corrected before they are formed
