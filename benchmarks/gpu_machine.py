"""What there is to measure on, and what it achieves in one matrix product; prints JSON.

    python benchmarks/gpu_machine.py

In a process of its own, so that nothing of it stays on the GPU.
"""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path
from typing import Any

import torch

import leangrpo

REPEATS = 10
GROUPS = Path("/sys/fs/cgroup")


def machine() -> dict[str, Any]:
    """The device, its free and whole memory and its `tflops` in bfloat16, and the versions used."""
    cuda = torch.cuda.is_available()
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0) if cuda else platform.processor() or "CPU",
        "cuda": torch.version.cuda if cuda else None,
        "count": torch.cuda.device_count() if cuda else 0,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "leangrpo": leangrpo.__version__,
        "host_free": host_free(),
    }
    if cuda:
        found["free"], found["memory"] = torch.cuda.mem_get_info(0)
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability(0)))
    found["tflops"] = tflops(torch.device("cuda" if cuda else "cpu"), 8192 if cuda else 256)
    return found


def tflops(device: torch.device, size: int) -> float:
    """Of a product of two square bfloat16 matrices: 2 size^3 operations."""
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    b = torch.randn_like(a)

    def seconds(repeats: int) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds(REPEATS)
    return float(2 * size**3 * REPEATS / seconds(REPEATS) / 1e12)


def host_free(info: Path = Path("/proc/meminfo"), groups: Path = GROUPS) -> int | None:
    """Bytes of the host's memory that can still be had, a container's limit included."""
    if not info.exists():
        return None
    lines = dict(line.split(":", 1) for line in info.read_text(encoding="utf-8").splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    limit, used = groups / "memory.max", groups / "memory.current"
    if limit.exists() and used.exists() and (most := limit.read_text().strip()).isdigit():
        free = min(free, int(most) - int(used.read_text()))
    return free


if __name__ == "__main__":
    print(json.dumps(machine()))
