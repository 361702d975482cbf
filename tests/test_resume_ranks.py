"""A run of two sharded ranks goes on, on any number of ranks, from whatever a kill leaves."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file
from test_export import TRAIN, assert_same_pictures
from torch import Tensor
from train_ranks import AGAIN, CASES, launch, settings, two_ranks

from leangrpo import checkpoint
from leangrpo.config import load_config
from leangrpo.ema import Ema
from leangrpo.oracle import float64_throughout
from leangrpo.report import read_run
from leangrpo.setup import make_policy
from leangrpo.train import train

BOUND = {"full64": 1e-12, "full": 5e-6, "lora": 5e-6}
"""Relative L2 that another number of ranks, which sums gradients in another order, may differ."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_ranks(tmp_path_factory.getbasetemp())


def state(run: Path, update: int = 3) -> dict[str, Tensor]:
    """All that a checkpoint holds, whole, read by one process."""
    config = load_config(run / "config.yaml", [])
    policy = make_policy(config, torch.device("cpu"))
    optimizer = torch.optim.AdamW(policy.parameters, fused=True)
    ema = Ema(policy, 0.9)
    found = checkpoint.open_checkpoint(run / "checkpoints" / f"{update:06d}")
    checkpoint.restore(found, policy, optimizer, ema)
    tensors = {}
    for (name, parameter), mean in zip(policy.named_parameters(), ema.mean, strict=True):
        tensors |= {f"model:{name}": parameter.detach(), f"ema:{name}": mean}
        tensors |= {f"{k}:{name}": v for k, v in optimizer.state[parameter].items()}
    return tensors


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def distance(one: dict[str, Tensor], other: dict[str, Tensor], kind: str) -> float:
    assert one.keys() == other.keys()
    a, b = (
        torch.cat([v.flatten().double() for k, v in s.items() if k.startswith(f"{kind}:")])
        for s in (one, other)
    )
    return float((a - b).norm() / b.norm())


def lines(run: Path) -> list[dict[str, Any]]:
    return [{**line, "time": 0, "memory": 0, "reward_seconds": 0} for line in read_run(run).metrics]


def sha(run: Path) -> str:
    summary = read_run(run).summary
    assert summary is not None
    return str(summary["weights_sha256"])


@pytest.mark.parametrize("case", AGAIN)
def test_two_ranks_go_on_bitwise(case: str, root: Path) -> None:
    """Weights, optimizer, running mean metrics; the checkpoint was written meanwhile."""
    whole, again = root / f"{case}-whole", root / f"{case}-again"
    assert [line["update"] for line in lines(again)] == [1, 2, 3]
    assert lines(whole) == lines(again)
    assert sha(whole) == sha(again)
    found = state(whole)
    assert {k.partition(":")[0] for k in found} == {"model", "ema", "exp_avg", "exp_avg_sq", "step"}
    assert same(found, state(again))
    assert not same(found, state(whole, 1))


def test_what_is_written_in_the_background_is_what_a_stop_writes(root: Path) -> None:
    assert same(state(root / "full-whole", 1), state(root / "full-stopped", 1))


def assert_goes_on(case: str, name: str, root: Path) -> None:
    whole, other = root / f"{case}-whole", root / f"{case}-{name}"
    assert [line["update"] for line in lines(other)] == [1, 2, 3]
    assert lines(whole)[0] == lines(other)[0]
    for mine, theirs in zip(lines(whole), lines(other), strict=True):
        assert theirs["reward_mean"] == pytest.approx(mine["reward_mean"], rel=1e-5)
    one, two = state(whole), state(other)
    for kind in ("model", "ema", "exp_avg", "exp_avg_sq"):
        assert distance(two, one, kind) < BOUND[case], kind
    # of that, most is what it started from
    start = state(whole, 1)
    moved = [{k: v - start[k] for k, v in s.items()} for s in (two, one)]
    assert distance(moved[0], moved[1], "model") < 100 * BOUND[case]


@pytest.mark.parametrize("case", CASES)
def test_one_rank_goes_on(case: str, root: Path) -> None:
    config = load_config("embedded", settings(root, f"{case}-1"))
    with float64_throughout() if case == "full64" else nullcontext():
        train(config, resume=True, quiet=True)
    assert_goes_on(case, "1", root)


def test_two_ranks_go_on_with_another_schedule_and_layout(root: Path) -> None:
    assert_goes_on("full64", "other", root)
    assert [line["schedule"] for line in lines(root / "full64-other")] == [
        "reweight",
        "retain",
        "retain",
    ]


@pytest.mark.slow
def test_four_ranks_go_on(root: Path) -> None:
    jobs = [{"train": settings(root, f"{case}-4"), "resume": True} for case in CASES]
    launch(4, jobs, root)
    for case in CASES:
        assert_goes_on(case, "4", root)


def test_a_kill_while_a_checkpoint_is_published(root: Path) -> None:
    """What is there under the last name is complete, also when only one is kept."""
    folder = root / "full-killed" / "checkpoints"
    assert (folder / ".000002.partial").is_dir()
    assert [p.name for p in checkpoint.folders(folder)] == ["000001"]
    found, complaints = checkpoint.newest(folder)
    assert found is not None
    assert (found.update, complaints) == (1, [])
    assert same(state(root / "full-killed", 1), state(root / "full-whole", 1))


def test_the_adapter_of_two_ranks_is_whole(root: Path) -> None:
    run = root / "lora-whole"
    file = run / "checkpoints" / "000003" / checkpoint.LORA_FILE
    policy = make_policy(load_config(run / "config.yaml", []), torch.device("cpu"))
    own = get_peft_model_state_dict(policy.denoisers[0])
    written = load_file(file)
    assert {k: v.shape for k, v in written.items()} == {
        f"transformer.{k}": v.shape for k, v in own.items()
    }
    assert all(".lora_A." in k or ".lora_B." in k for k in written), "no buffers"
    adapter = sum(p.numel() * p.element_size() for p in policy.parameters)
    assert adapter == sum(v.numel() * v.element_size() for v in written.values())
    assert file.stat().st_size < 2 * adapter


@pytest.mark.parametrize("ema", [True, False])
@pytest.mark.parametrize("kind", TRAIN)
def test_the_checkpoint_of_two_ranks(
    kind: str,
    ema: bool,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its weights are in halves, which one process joins."""
    folder = root / f"{kind}-whole"
    state = folder / "checkpoints" / "000003" / "state"
    assert len(list(state.glob("*.safetensors"))) == 2
    assert_same_pictures(folder, tmp_path / "out", monkeypatch, ema)
