"""Noise belongs to the sample."""

import subprocess
import sys

import numpy as np
import torch

from leangrpo.data import SampleKey
from leangrpo.noise import INITIAL, generator, normal

KEYS = [SampleKey(3, p, g) for p in range(2) for g in range(4)]


def test_a_row_depends_on_its_key_only() -> None:
    like = torch.empty(0)
    batch = normal(7, KEYS, 2, (5, 3), like)
    alone = [normal(7, [key], 2, (5, 3), like)[0] for key in KEYS]
    reverse = normal(7, KEYS[::-1], 2, (5, 3), like).flip(0)
    assert torch.equal(batch, torch.stack(alone))
    assert torch.equal(batch, reverse)


def test_every_part_of_the_key_counts() -> None:
    like = torch.empty(0)
    one = normal(0, [SampleKey(0, 0, 0)], 0, (64,), like)
    others = [
        normal(1, [SampleKey(0, 0, 0)], 0, (64,), like),
        normal(0, [SampleKey(1, 0, 0)], 0, (64,), like),
        normal(0, [SampleKey(0, 1, 0)], 0, (64,), like),
        normal(0, [SampleKey(0, 0, 1)], 0, (64,), like),
        normal(0, [SampleKey(0, 0, 0)], 1, (64,), like),
        normal(0, [SampleKey(0, 0, 0)], INITIAL, (64,), like),
    ]
    assert all(not torch.equal(one, other) for other in others)


def test_it_is_normal() -> None:
    """Mean and variance within five standard errors of 200,000 draws."""
    draws = torch.cat(
        [normal(0, [SampleKey(u, 0, 0)], 0, (1000,), torch.empty(0)) for u in range(200)]
    )
    n = draws.numel()
    assert abs(float(draws.mean())) < 5 / n**0.5
    assert abs(float(draws.var()) - 1) < 5 * (2 / n) ** 0.5


def test_other_dtypes_get_the_same_draw() -> None:
    key = [SampleKey(0, 0, 0)]
    single = normal(0, key, 0, (8,), torch.empty(0))
    assert torch.equal(
        normal(0, key, 0, (8,), torch.empty(0, dtype=torch.float64)), single.double()
    )
    half = normal(0, key, 0, (8,), torch.empty(0, dtype=torch.bfloat16))
    assert torch.equal(half, single.bfloat16())


def test_another_process_draws_the_same() -> None:
    """Python's `hash` differs between processes; these keys do not go through it."""
    code = "from leangrpo.noise import generator; print(generator(5, 1, 2, 3, 4).random_raw())"
    code = code.replace("generator(5, 1, 2, 3, 4)", "generator(5, 1, 2, 3, 4).bit_generator")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(out.stdout) == generator(5, 1, 2, 3, 4).bit_generator.random_raw()


def test_no_collision_where_a_32_bit_seed_has_many() -> None:
    """200,000 keys: a 32-bit seed would collide about five times."""
    first = np.array([generator(0, u, 0, 0, 0).bit_generator.random_raw() for u in range(200_000)])
    assert len(np.unique(first)) == len(first)
