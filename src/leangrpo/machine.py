"""What measurements were taken on and with: named wherever they are kept."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from . import __version__


def machine() -> dict[str, Any]:
    """The processor's name where Linux tells it, cores, threads, and the versions that matter."""
    import diffusers

    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "leangrpo": __version__,
    }
