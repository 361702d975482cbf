"""The loops of examples/adopting: before and after leave one gradient, and the page shows them."""

from __future__ import annotations

import difflib
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from leangrpo import LeanError, Retain, Reweight

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "adopting"
BOUND = {torch.float64: 1e-12, torch.float32: 5e-6}
"""Of relative L2: the two orders of a sum over 8 samples and 5 steps differ by some roundings."""


def load(name: str) -> Any:
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location(f"adopting_{name}", FOLDER / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(FOLDER))
        sys.modules.pop("toy", None)


def gradients(steps: Any) -> list[Tensor]:
    """The gradient of every update, then the weights, each as one vector in float64."""
    found: list[Tensor] = []
    for model in steps:
        trained = [p for p in model.parameters() if p.requires_grad]
        assert all(p.grad is not None for p in trained)
        found.append(torch.cat([p.grad.flatten().double() for p in trained]))
    found.append(torch.cat([p.detach().flatten().double() for p in trained]))
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("schedule", [Retain, Reweight], ids=["retain", "reweight"])
@pytest.mark.parametrize("style", ["flow_grpo", "dance_grpo"])
def test_same_gradients(style: str, schedule: type, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    before = gradients(load(f"{style}_before").train(2, dtype))
    after = gradients(load(f"{style}_after").train(2, dtype, schedule_type=schedule))
    assert len(before) == 3
    for native, lean in zip(before, after, strict=True):
        assert native.norm() > 0
        assert float((lean - native).norm() / native.norm()) <= BOUND[dtype]


def test_without_the_rows_a_batch_is_refused() -> None:
    """What forgets `capture` gets an error, and no gradient of mixed samples."""
    module = load("flow_grpo_after")
    module.capture = lambda schedule, rows: module.nullcontext()
    with pytest.raises(LeanError, match="not sampled inside its `capture`"):
        next(module.train(1, schedule_type=Reweight))


def shown(style: str) -> str:
    """The lines that change, as docs/adopting.md shows them."""
    texts = [
        (FOLDER / f"{style}_{when}.py").read_text(encoding="utf-8").splitlines()
        for when in ("before", "after")
    ]
    start = [lines.index("def train(") for lines in texts]
    stop = [lines.index('if __name__ == "__main__":') for lines in texts]
    bodies = [lines[a:b] for lines, a, b in zip(texts, start, stop, strict=True)]
    diff = difflib.unified_diff(*bodies, n=2, lineterm="")
    return "\n".join(line for line in diff if not line.startswith(("---", "+++", "@@")))


@pytest.mark.parametrize("style", ["flow_grpo", "dance_grpo"])
def test_page_shows_the_files(style: str) -> None:
    page = (ROOT / "docs" / "adopting.md").read_text(encoding="utf-8")
    assert f"```diff\n{shown(style)}\n```" in page


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--fsdp"]], ids=["copies", "fsdp"])
def test_ranks_have_the_gradient_of_one_process(options: list[str]) -> None:
    """Two ranks and one print the same norm: of the sum, corrected before it is reduced."""
    printed = []
    for ranks, some in ((1, []), (2, options)):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        command += [str(FOLDER / "dance_grpo_ranks.py"), *some]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        printed.append(float(done.stdout.split()[-1]))
    assert printed[0] > 0
    assert printed[1] == pytest.approx(printed[0], rel=1e-12)
