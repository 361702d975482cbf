"""Compressed samplers: the grid, the levels that stay, the solver's formulas and its order."""

from __future__ import annotations

import inspect
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)
from torch import Tensor

from leangrpo.errors import LeanError
from leangrpo.kernels import make_kernel
from leangrpo.solver import Flash, Solver, compress, num_steps, window
from leangrpo.stochastic import make_stochastic
from leangrpo.tape import Tape

LINEAR = np.linspace(1, 0, 26)[:-1].tolist()
"""MixGRPO's levels before the shift, T = 25."""


@pytest.mark.parametrize(
    ("ratio", "start", "post", "evaluations"),
    [(0.4, 0, 7, 11), (0.4, 17, 1, 22), (0.2, 0, 3, 7), (0.2, 12, 1, 17), (1.0, 3, 18, 25)],
)
def test_steps_after_the_window_are_mixgrpos(ratio, start, post, evaluations) -> None:
    """8 points are 7 steps: 4 + 7 evaluations instead of 25, and 22 when the window is at 17."""
    flash, stop = Flash(ratio), start + 4
    short = compress(LINEAR, start, stop, flash)
    assert short.offset == 0
    assert short.sigmas[: stop + 1] == LINEAR[: stop + 1]
    steps = -np.diff([*short.sigmas[stop:], 0.0])
    assert len(steps) == post
    assert steps == pytest.approx([LINEAR[stop] / post] * post)
    assert len(short.sigmas) == num_steps(25, start, stop, flash) == evaluations
    assert num_steps(25, start, stop, None) == 25


def test_a_short_rest_still_ends_at_zero() -> None:
    """One point, as published, would leave the last level above 0: two steps never become none."""
    for ratio in (0.01, 0.4):
        short = compress(LINEAR, 19, 23, Flash(ratio))
        assert short.sigmas == LINEAR[:24]  # and after the last one comes 0
    assert compress(LINEAR, 21, 25, Flash(0.01)).sigmas == LINEAR


def test_around_saves_steps_before_as_well() -> None:
    short = compress(LINEAR, 10, 14, Flash(0.4, where="around"))
    assert short.offset == 6
    assert short.sigmas[:5] == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6])
    assert short.sigmas[4:9] == LINEAR[10:15]
    assert short.origin == [0, None, None, None, 10, 11, 12, 13, 14, None, None]
    assert compress(LINEAR, 1, 4, Flash(0.1, where="around")).offset == 0
    assert compress(LINEAR, 0, 4, Flash(0.4, where="around")) == compress(LINEAR, 0, 4, Flash(0.4))


def test_every_window_of_every_ratio() -> None:
    """Falling levels, the window where `offset` says, as many as `num_steps` says, T at most."""
    uneven = (np.linspace(1, 0.003, 12) ** 1.5).tolist()
    for where in ("after", "around"):
        for ratio in (0.05, 0.2, 0.4, 0.7, 1.0):
            flash = Flash(ratio, where=where)
            for start in range(12):
                for stop in range(start + 1, 13):
                    short = compress(uneven, start, stop, flash)
                    assert all(np.diff([*short.sigmas, 0.0]) < 0)
                    assert len(short.sigmas) == num_steps(12, start, stop, flash) <= 12
                    at = start - short.offset
                    assert short.sigmas[at : at + stop - start] == uneven[start:stop]
                    kept = [(s, o) for s, o in zip(short.sigmas, short.origin, strict=True)]
                    assert all(o is None or s == uneven[o] for s, o in kept)
                    assert ratio < 1 or short.sigmas == uneven


def test_mistakes_are_explained() -> None:
    for options in ({"ratio": 0.0}, {"ratio": 1.5}, {"order": 4}, {"kind": "ab"}, {"where": "in"}):
        (name,) = options
        with pytest.raises(LeanError, match=rf"sampling\.flash\.{name}"):
            Flash(**{"ratio": 0.4, **options})
    with pytest.raises(LeanError, match="steps 0 to 24"):
        compress(LINEAR, 3, 26, Flash(0.4))
    assert window([3, 2, 4], Flash(0.4)) == (2, 5)
    assert window([], Flash(0.4)) is None
    assert window([0, 2], None) is None
    with pytest.raises(LeanError, match="contiguous"):
        window([0, 2], Flash(0.4))


SCHEDULERS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "shift": (FlowMatchEulerDiscreteScheduler, {"shift": 3.0}, {}),
    "mu": (FlowMatchEulerDiscreteScheduler, {"use_dynamic_shifting": True}, {"mu": 0.63}),
    "terminal": (FlowMatchEulerDiscreteScheduler, {"shift": 3.0, "shift_terminal": 0.02}, {}),
    "unipc": (
        UniPCMultistepScheduler,
        {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 5.0},
        {},
    ),
}


def shifted(name: str, level: float) -> float:
    """The shift of `SCHEDULERS[name]`, by its formula."""
    if name == "mu":
        return math.exp(0.63) / (math.exp(0.63) + 1 / level - 1)
    shift = 5.0 if name == "unipc" else 3.0
    return shift * level / (1 + (shift - 1) * level)


def twin(name: str, rule: Any = "pipeline") -> Any:
    kind, config, _ = SCHEDULERS[name]
    return make_stochastic(kind(**config), make_kernel("flow_sde", noise_level=0.7), rule)


@pytest.mark.parametrize("where", ["after", "around"])
@pytest.mark.parametrize("rule", ["pipeline", "linear", tuple(LINEAR)])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_levels_that_stay_are_bitwise_the_full_ones(name, rule, where) -> None:
    """Through float32 arguments they would not be: the scheduler rounds what it is given."""
    scheduler, options = twin(name, rule), SCHEDULERS[name][2]
    scheduler.set_timesteps(25, **options)
    sigmas, timesteps = scheduler.sigmas.clone(), scheduler.timesteps.clone()
    flash = Flash(0.4, where=where)
    scheduler.tape = Tape(flash=flash, window=(10, 14))
    scheduler.set_timesteps(25, **options)
    assert torch.equal(scheduler.table, sigmas)
    assert torch.equal(scheduler.full_timesteps, timesteps)
    short = compress(LINEAR, 10, 14, flash)
    assert (scheduler.cursor, scheduler.num_steps) == (short.offset, 14 + 3)
    assert scheduler.num_inference_steps == len(scheduler.timesteps) == len(short.sigmas)
    assert len(scheduler.sigmas) == len(short.sigmas) + 1
    kept = [(i, o) for i, o in enumerate(short.origin) if o is not None]
    assert len(kept) == (6 if where == "around" else 15)
    for i, o in kept:
        assert scheduler.sigmas[i] == sigmas[o]
        assert scheduler.timesteps[i] == timesteps[o]
    assert scheduler.sigmas[-1] == 0
    assert (scheduler.sigmas[1:] < scheduler.sigmas[:-1]).all()
    assert (scheduler.timesteps[1:] < scheduler.timesteps[:-1]).all()
    if rule != "pipeline" and name != "terminal":
        new = [i for i, o in enumerate(short.origin) if o is None]
        wanted = [shifted(name, short.sigmas[i]) for i in new]
        assert scheduler.sigmas[new].tolist() == pytest.approx(wanted, abs=1e-6)
        # UniPC truncates to whole timesteps.
        times = scheduler.timesteps[new].double().tolist()
        slack = 1 if name == "unipc" else 1e-3
        assert times == pytest.approx([1000 * w for w in wanted], abs=slack)


def test_a_span_is_told_in_the_steps_of_the_full_sampler() -> None:
    """Segments of one trajectory: up to the window, its steps one by one, the rest."""
    scheduler = twin("shift")
    flash = Flash(0.4, where="around")
    scheduler.tape = Tape(flash=flash, window=(10, 14))
    scheduler.set_timesteps(25)
    whole = scheduler.timesteps
    pieces = []
    for span, cursor in (((0, 10), 6), ((10, 11), 10), ((11, 14), 11), ((14, 25), 14)):
        scheduler.tape = Tape(flash=flash, window=(10, 14), span=span)
        scheduler.set_timesteps(25)
        assert scheduler.cursor == cursor
        pieces.append(scheduler.timesteps)
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers'
def test_schedulers_that_cannot_are_refused() -> None:
    def refuse(scheduler: Any, kernel: str, match: str, **arguments: Any) -> None:
        one = make_stochastic(scheduler, make_kernel(kernel, noise_level=0.7), "pipeline")
        one.tape = Tape(flash=Flash(0.4), window=(0, 2))
        with pytest.raises(LeanError, match=rf"`sampling\.flash\.ratio` is 0\.4: {match}"):
            one.set_timesteps(**{"num_inference_steps": 10, **arguments})

    euler = FlowMatchEulerDiscreteScheduler
    refuse(euler(use_karras_sigmas=True), "flow_sde", "this FlowMatchEulerDiscreteScheduler moves")
    refuse(euler(use_exponential_sigmas=True), "flow_sde", "this FlowMatchEuler")
    refuse(
        euler(), "flow_sde", "the pipeline passes timesteps",
        timesteps=np.linspace(1000, 100, 10), sigmas=np.linspace(1, 0.1, 10),
    )  # fmt: skip
    dpm = DPMSolverMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction")
    assert "sigmas" not in inspect.signature(dpm.set_timesteps).parameters
    refuse(dpm, "flow_sde", "a DPMSolverMultistepScheduler takes no levels")
    refuse(DDIMScheduler(), "ddim", "it needs a kernel of flow matching")


def written_out(
    kind: str, order: int, table: list[float], x: Tensor, m: list[Tensor], second: float = 1.0
) -> Tensor:
    """DPM-Solver++ from level -2 to level -1 of `table`; m[0] is the newest x̂₀."""
    t, *s = table[::-1]
    lam = [math.log((1 - a) / a) for a in (t, *s)]
    h = lam[0] - lam[1]
    decay = math.exp(-h) - 1
    result = t / s[0] * x - (1 - t) * decay * m[0]
    if order == 1:
        return result
    r0 = (lam[1] - lam[2]) / h
    d0 = (m[0] - m[1]) / r0
    if order == 2:
        factor = -0.5 * decay if kind == "midpoint" else decay / h + 1
        return result + (1 - t) * factor * d0
    r1 = (lam[2] - lam[3]) / h
    d1 = (m[1] - m[2]) / r1
    slope, curve = d0 + r0 / (r0 + r1) * (d0 - d1), second * (d0 - d1) / (r0 + r1)
    result = result + (1 - t) * (decay / h + 1) * slope
    return result - (1 - t) * ((decay + h) / h**2 - 0.5) * curve


def solver_on(table: list[float], order: int, kind: str = "midpoint", first: int = 1) -> Solver:
    """A solver of every step from `first` on."""
    levels = torch.tensor(table, dtype=torch.float64)
    return Solver(levels, (0, first), 0, Flash(0.4, order, kind), [])


@pytest.mark.parametrize("kind", ["midpoint", "heun"])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_the_updates_are_the_formulas(order, kind) -> None:
    """Every step of an uneven table: the order grows with the history and falls at the end."""
    table = [0.97, 0.91, 0.72, 0.55, 0.41, 0.2, 0.08, 0.0]
    solver = solver_on(table, order, kind, first=0)
    generator = torch.Generator().manual_seed(0)
    x, v = torch.randn(2, 7, 3, 4, generator=generator, dtype=torch.float64)
    data: list[Tensor] = []
    for i in range(7):
        v = v.roll(1, 0) * 0.9
        data.insert(0, x - table[i] * v)
        solver.note(x, v, i)
        after = solver.step(x, i)
        if i == 6:
            assert torch.equal(after, data[0])
            break
        used = min(order, i + 1, 2 if i == 5 else 3)
        wanted = written_out(kind, used, table[max(0, i - 2) : i + 2], x, data)
        torch.testing.assert_close(after, wanted, rtol=1e-12, atol=1e-12)
        x = after
    assert len(solver.history) == order


def test_from_pure_noise_on_all_is_finite() -> None:
    """σ = 1 has λ = -∞: the first step and what remembers it must not become NaN."""
    for order in (1, 2, 3):
        solver = solver_on([1.0, 0.9, 0.7, 0.4, 0.2, 0.0], order, first=0)
        x = torch.ones(1, 1, dtype=torch.float64)
        for i in range(5):
            solver.note(x, x, i)
            x = solver.step(x, i)
            assert torch.isfinite(x).all()
        if order == 1:
            continue
        early = solver_on([1.0, 0.9, 0.7, 0.0], order, first=0)
        x0 = torch.full((1, 1), 0.5, dtype=torch.float64)
        for i in range(2):
            early.note(x0, x0, i)
        assert torch.equal(early.step(x0, 1), solver_on_one(x0))


def solver_on_one(x: Tensor) -> Tensor:
    """The first-order step from 0.9 to 0.7: against λ = -∞ no slope is left."""
    one = solver_on([0.9, 0.7, 0.0], 1, first=0)
    one.note(x, x, 0)
    return one.step(x, 0)


C, M = 0.4, 1.3


def gaussian(sigma: float, z: Tensor) -> tuple[Tensor, Tensor]:
    """Data N(M, C²): the exact flow's x at `sigma` that started as z at 1, and its velocity."""
    std = math.sqrt((1 - sigma) ** 2 * C**2 + sigma**2)
    x = (1 - sigma) * M + std * z
    data = M + (1 - sigma) * C**2 / std**2 * (x - (1 - sigma) * M)
    return x, (x - data) / sigma


def error(order: int, kind: str, num: int) -> float:
    """At 0.1, from 0.9, `num` steps equal in λ; the two steps before the window's end are exact."""
    ends = [math.log((1 - s) / s) for s in (0.9, 0.1)]
    table = [1 / (1 + math.exp(lam)) for lam in np.linspace(*ends, num + 1)]
    table += [table[-1] / 3**k for k in range(1, 15)]  # the order falls at the end: far from here
    solver = solver_on([*table, 0.0], order, kind, first=2)
    z = torch.tensor([[1.7]], dtype=torch.float64)
    for i in range(2):
        solver.note(*gaussian(table[i], z), i)
    x, _ = gaussian(table[2], z)
    for i in range(2, num):
        s = table[i]
        std2 = (1 - s) ** 2 * C**2 + s**2
        data = M + (1 - s) * C**2 / std2 * (x - (1 - s) * M)
        solver.note(x, (x - data) / s, i)
        x = solver.step(x, i)
    return float((x - gaussian(table[num], z)[0]).abs())


@pytest.mark.parametrize(
    ("order", "kind", "rate"),
    [(1, "midpoint", 1), (2, "midpoint", 2), (2, "heun", 2), (3, "midpoint", 2)],
)
def test_the_order_of_convergence(order, kind, rate) -> None:
    """Half the step leaves 2^-rate of the error: exact velocities of Gaussian data, float64.

    Predictions from before the solver's first step count, or that step alone would cost an order.
    The published third order is of the second: see `test_the_published_third_order`.
    """
    errors = [error(order, kind, num) for num in (40, 80, 160)]
    rates = [math.log2(a / b) for a, b in pairwise(errors)]
    assert rates == pytest.approx([rate, rate], abs=0.3)


def test_the_second_order_is_worth_it_with_few_steps() -> None:
    assert error(2, "midpoint", 10) < error(1, "midpoint", 10) / 5
    assert error(2, "heun", 10) < error(1, "heun", 10) / 5


def test_the_published_third_order() -> None:
    """A prediction quadratic in λ is integrated exactly with 2·D2, and not with D2.

    With x̂₀ = λ² the integral has a closed form: x_t/σ_t - x_s/σ_s is that of e^λ·λ²,
    which is e^λ(λ² - 2λ + 2) at its ends.
    """
    table = [0.8, 0.7, 0.55, 0.3]
    lam = [math.log((1 - s) / s) for s in table]
    m = [torch.tensor(v**2, dtype=torch.float64) for v in lam[2::-1]]
    ends = [math.exp(v) * (v**2 - 2 * v + 2) for v in lam[2:]]
    exact = 0.3 * (ends[1] - ends[0])
    x = torch.zeros((), dtype=torch.float64)
    with_d2 = float(written_out("heun", 3, table, x, m))
    without = float(written_out("heun", 3, table, x, m, second=0.0))
    assert without + 2 * (with_d2 - without) == pytest.approx(exact, abs=1e-14)
    assert abs(with_d2 - exact) > 1e-2


@pytest.mark.parametrize("order", [1, 2, 3])
def test_a_constant_prediction_is_integrated_exactly(order) -> None:
    """One data point c: x = (1-σ)c + σn on any grid."""
    table = [1.0, 0.8, 0.5, 0.31, 0.1, 0.0]
    solver = solver_on(table, order, "heun", first=0)
    c, n = torch.tensor([[0.3], [-2.0]], dtype=torch.float64), torch.ones(2, 1).double()
    x = n
    for i, (s, t) in enumerate(pairwise(table)):
        solver.note(x, (x - c) / s, i)
        x = solver.step(x, i)
        torch.testing.assert_close(x, (1 - t) * c + t * n, rtol=1e-13, atol=1e-13)


def test_the_solver_leaves_the_dtype_and_the_graph_alone() -> None:
    solver = solver_on([0.9, 0.5, 0.2, 0.0], 2, first=0)
    x = torch.randn(2, 3)
    v = torch.randn(2, 3, requires_grad=True)
    solver.note(x, v, 0)
    following = solver.step(x, 0)
    assert following.dtype == torch.float32
    assert not following.requires_grad
    assert not solver.history[0].requires_grad
