"""The witness against the tests' oracle, which shares neither kernel nor policy with it."""

from __future__ import annotations

import pytest
import test_exactness
import tiny
import torch

from leangrpo.config import bare_config
from leangrpo.oracle import float64_throughout, oracle_gradient
from leangrpo.parallel import World
from leangrpo.setup import make_policy
from leangrpo.witness import Witness


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_is_the_oracles_gradient(name, tmp_path) -> None:
    """Both sum the same terms in float64: 1e-12 (see test_exactness for the bound)."""
    tiny.save(tiny.tiny_sd3() if name == "sd3" else tiny.tiny_flux(), tmp_path)
    kernel = test_exactness.KERNEL[name]
    level = test_exactness.LEVEL[kernel]
    overrides = [
        f"sampling={{steps: 4, guidance: 1.0, height: 16, width: 16, "
        f"call: {{max_sequence_length: {tiny.T5_LENGTH}}}}}",
        f"kernel={{name: {kernel}, noise_level: {level}}}",
    ]
    config = bare_config(str(tmp_path), overrides)
    policy = make_policy(config, torch.device("cpu"))
    keys = [test_exactness.SampleKey(0, 0, g) for g in range(2)]
    transitions = list(
        policy.sample(["a red cube"] * 2, keys, selected=[0, 2], decode=False).transitions
    )
    transitions[0].weight = 0.5
    advantages = dict(zip(keys, (0.7, -1.9), strict=True))
    witness = Witness(config, policy, World())
    mine = witness.gradient(transitions, advantages, 1 / 4)
    again = [torch.zeros_like(g) for g in mine]
    for *_, coefficient, _, gradient in witness.columns(transitions, advantages, 1 / 4):
        for total, part in zip(again, gradient, strict=True):
            total += coefficient * part
    pipe = {"sd3": tiny.tiny_sd3, "flux": tiny.tiny_flux}[name]().to(torch.float64)
    with float64_throughout():
        expected = oracle_gradient(
            pipe, transitions, advantages, kernel=kernel, noise_level=level, on_policy=True,
            call=test_exactness.call_of(name, False) | {"num_inference_steps": 4},
        )  # fmt: skip
    wanted = torch.cat([g.flatten() for g in expected.values()])
    for found in (mine, again):
        gap = torch.cat([g.flatten() for g in found]) - wanted
        assert float(gap.norm() / wanted.norm()) < 1e-12
