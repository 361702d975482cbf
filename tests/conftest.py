"""What every test shares: one thread, no network, fixed seeds, the embedded pipeline."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

# Before anything imports torch, transformers or diffusers.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"

import leangrpo


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tests run side by side, and sums are bitwise the same only for one number of threads."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Deterministic draws for tests that do not bring a generator of their own."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def embedded() -> Path:
    """The folder of the pipeline inside the package, in diffusers format."""
    folder = Path(leangrpo.__file__).parent / "embedded" / "pipeline"
    assert (folder / "model_index.json").is_file()
    return folder
