"""Noise that belongs to the sample: counter-based normals keyed by who the sample is.

The same run draws the same noise for any batch size, order, schedule or number of processes, and
resuming it needs no generator state.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .data import SampleKey

INITIAL = -1
"""The `step` of the noise a trajectory starts from (z_T)."""


def generator(seed: int, *key: int) -> np.random.Generator:
    """A Philox generator for a tuple of integers.

    The 128-bit Philox key is the BLAKE2b digest of the integers, so that neighbouring keys share
    nothing and two keys collide with probability 2^-128 (a 32-bit seed collides after some 65,000).
    """
    packed = struct.pack(f"<{len(key) + 1}q", seed, *key)
    digest = hashlib.blake2b(packed, digest_size=16, person=b"leangrpo").digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def normal(
    seed: int, keys: Sequence[SampleKey], step: int, shape: Sequence[int], like: Tensor
) -> Tensor:
    """Standard normals `(B, *shape)` in the dtype and on the device of `like`.

    Row b depends on `(seed, keys[b], step)` only. Drawn in float32 on the CPU whatever the
    target, so that devices and dtypes agree.
    """
    rows = np.empty((len(keys), *shape), dtype=np.float32)
    for row, key in zip(rows, keys, strict=True):
        generator(seed, key.update, key.prompt, key.generation, step).standard_normal(
            dtype=np.float32, out=row
        )
    return torch.from_numpy(rows).to(like.device, like.dtype, non_blocking=True)
