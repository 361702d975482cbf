"""The table of `conformance.py`: some of its rows here, all of them with the slow tests."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import conformance
import pytest
from conformance import ALGORITHMS, MODELS, NOISE_PREDICTING, Row, evaluations, expected_calls

from leangrpo.config import load_config
from leangrpo.cookbook import recipe_names
from leangrpo.reweight import Reweight
from leangrpo.schedules import Retain

QUICK = [
    ("flow-grpo-fast-branch", "wan"),
    ("dance-grpo-best-of", "wan22"),
    ("mix-grpo-flash", "flux"),
    ("ddpo", "sd"),
    ("ddpo-on-policy", "sd3"),
]
"""Prefixes, best of n, two denoisers, fewer steps, running statistics; the last one cannot be."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return conformance.make_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    ("algorithm", "model"),
    [
        pytest.param(*pair, marks=[] if pair in QUICK else [pytest.mark.slow])
        for pair in itertools.product(ALGORITHMS, MODELS)
    ],
)
def test_row(algorithm: str, model: str, models: Path, tmp_path: Path) -> None:
    r = conformance.row(algorithm, model, models, tmp_path)
    assert r.failures == []
    is_ddim = algorithm in ("ddpo", "ddpo-on-policy", "dpok")
    assert (r.refused is None) == (is_ddim == (model in NOISE_PREDICTING))


@pytest.mark.slow
def test_a_gradient_that_is_off_fails_its_row(models: Path, tmp_path: Path) -> None:
    """One part in 10^9 in one schedule: the row is not blind to it."""
    exact = Reweight.advantages

    def off(self: Reweight, advantages: Mapping[Any, float]) -> None:
        first = next(iter(advantages), None)
        exact(self, {k: a * (1 + 1e-9 * (k == first)) for k, a in advantages.items()})

    with mock.patch.object(Reweight, "advantages", off):
        r = conformance.row("mix-grpo", "flux", models, tmp_path / "reweight")
    assert [f.partition(" ")[0] for f in r.failures] == ["reweight"]
    assert 1e-11 < (r.reweight or 0) < 1e-8

    twice = Retain._differentiate

    def again(self: Retain, t: Any) -> None:
        t.weight *= 1 + 1e-6
        twice(self, t)

    with mock.patch.object(Retain, "_differentiate", again):
        r = conformance.row("mix-grpo", "flux", models, tmp_path / "retain")
    assert r.failures == ["retain is not native bitwise"]


def test_expected_calls() -> None:
    """By hand: 2 prompts of 3 samples, 5 steps, a window of 2 that begins at step 2."""
    base = ["sampling.steps=5", "rollout={prompts: 2, generations: 3, micro_batch: 1}"]

    def calls(schedule: str, *more: str, per_step: int = 1) -> int:
        config = load_config("embedded", [*base, *more])
        return expected_calls(config, schedule, lambda p, m: (2, 3), per_step)

    assert calls("retain") == calls("reweight") == 6 * 5
    assert calls("native") == 6 * 5 + 6 * 2
    assert calls("native", per_step=2) == 2 * (6 * 5 + 6 * 2)
    shared = "rollout={prompts: 2, generations: 3, initial_noise: group, share_prefix: true}"
    assert calls("retain", shared) == 2 * (2 + 3 * 3)
    assert calls("native", "advantage.best_of=2") == 6 * 5 + 2 * 2 * 2
    assert calls("retain", "objective.kl=0.1") == 6 * 5 + 6 * 2
    parts = "rollout={prompts: 2, generations: 3, parts: 2, epochs: 2}"
    assert calls("retain", parts) == 6 * 5 + 3 * 3 * 2
    assert calls("native", parts) == 6 * 5 + 4 * 3 * 2


def test_every_algorithm_is_in_the_table() -> None:
    assert set(ALGORITHMS) == set(recipe_names("algorithms"))


@pytest.mark.parametrize(
    ("flash", "start", "expected"),
    [
        ("{ratio: null}", 4, 25),
        ("{ratio: 0.4}", 0, 11),  # MixGRPO-Flash: 4 + 7
        ("{ratio: 0.4}", 17, 22),
        ("{ratio: 0.2}", 0, 7),  # Flash*: 4 + 3
        ("{ratio: 0.4, where: around}", 10, 4 + 4 + 3),
    ],
)
def test_evaluations_of_a_trajectory(flash: str, start: int, expected: int) -> None:
    """25 steps and a window of 4, as published."""
    config = load_config("embedded", ["sampling.steps=25", f"sampling.flash={flash}"])
    total, before = evaluations(config, range(start, start + 4))
    assert total == expected
    assert before == (4 if "around" in flash else start)


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Its exit code is that of its rows, and the file has them."""
    good, bad = Row("ddpo", "sd", retain=True), Row("ddpo", "sdxl", failures=["a reason"])
    no = Row("ddpo", "flux", refused="`kernel.name` is 'ddim': not here.")
    file = tmp_path / "rows.json"
    for rows, code in (([good, no], 0), ([good, bad], 1)):
        with mock.patch.object(conformance, "row", side_effect=rows):
            names = ",".join(r.model for r in rows)
            arguments = ["--algorithms", "ddpo", "--models", names, "--json", str(file)]
            assert conformance.main(arguments) == code
        assert [r["model"] for r in json.loads(file.read_text())] == names.split(",")
    out = capsys.readouterr().out
    assert "refused: ddpo on flux: not here." in out
    assert "1 pairs ran, 1 were refused, 0 failed." in out
    assert "FAILED: ddpo on sdxl: a reason" in out
    with pytest.raises(SystemExit):
        conformance.main(["--models", "sd4"])
    assert "there is no model 'sd4'; there are sd," in capsys.readouterr().err
