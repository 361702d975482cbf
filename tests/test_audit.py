"""The audit: what trainers compute again, counted exactly, and what it must not say."""

from __future__ import annotations

import copy
import importlib
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from leangrpo.audit import Audit, watch
from leangrpo.audit_report import Report

TRAINERS = Path(__file__).parents[1] / "examples" / "audit"
Counts = dict[str, tuple[int, int]]


@pytest.fixture(scope="module", autouse=True)
def trainers() -> Iterator[None]:
    sys.path.insert(0, str(TRAINERS))
    yield
    sys.path.remove(str(TRAINERS))


def audited(name: str, **options: Any) -> Report:
    module = importlib.import_module(name)
    with watch() as audit:
        for _ in module.main(**options):
            pass
    assert not audit.report.failures
    return audit.report


def counts(report: Report, step: int = -1) -> Counts:
    """Calls and transitions of an optimizer step, without the backwards."""
    kinds = report.steps[step].kinds
    return {k: (t.calls, t.transitions) for k, t in kinds.items() if k != "backward"}


# -- trainers in the style of the public ones ------------------------------------------------------

NATIVE: list[tuple[str, dict[str, Any], str, Counts]] = [
    ("ddpo_style", {}, "recomputes", {"sampled": (16, 64), "redundant": (16, 64)}),
    ("flow_grpo_style", {}, "recomputes", {"sampled": (16, 64), "redundant": (14, 56)}),
    ("dance_grpo_style", {}, "recomputes", {"sampled": (32, 32), "redundant": (20, 20)}),
    (
        "dance_grpo_style",
        {"together": True},
        "recomputes",
        {"sampled": (8, 32), "redundant": (20, 20)},
    ),
    (
        "diffusion_nft_style",
        {},
        "no target recomputation",
        {"sampled": (8, 32), "fresh": (3, 12), "other": (3, 12)},
    ),
]
ADOPTED: list[tuple[str, dict[str, Any], str, Counts]] = [
    ("ddpo_style", {"adopted": True}, "reuses", {"kept": (16, 64)}),
    ("flow_grpo_style", {"adopted": True}, "reuses", {"kept": (14, 56), "sampled": (2, 8)}),
    ("dance_grpo_style", {"adopted": True}, "reuses", {"kept": (20, 20), "sampled": (12, 12)}),
]


@pytest.mark.parametrize(("name", "options", "kind", "expected"), NATIVE + ADOPTED)
def test_class_and_counts(name: str, options: dict[str, Any], kind: str, expected: Counts) -> None:
    report = audited(name, updates=2, **options)
    assert report.classified == kind
    assert [counts(report, step) for step in range(len(report.steps))] == [expected] * 2
    assert report.colocated == (kind != "no target recomputation")
    if kind != "recomputes":
        assert (report.limit, report.speedup, report.redundant_share) == (1, 1, 0)
    else:
        assert 1 < report.speedup <= report.limit * (1 + 1e-9)
        together = {"batch"} if options else set()
        assert set(report.differences) == together


@pytest.mark.parametrize("name", ["ddpo_style", "flow_grpo_style"])
def test_adopting_keeps_the_gradient(name: str) -> None:
    """Sums of the same 1e3 terms in other orders and batches: the bound of `leangrpo verify`."""
    module = importlib.import_module(name)
    found = []
    for adopted in (False, True):
        (trainer,) = module.main(1, adopted=adopted)
        network = next(v for v in vars(trainer).values() if isinstance(v, nn.Module))
        state = trainer.optimizer.state
        moments = [state[p]["exp_avg"] for p in network.parameters() if p in state]
        found.append(torch.cat([m.flatten() for m in moments]).double())
    assert (found[0] - found[1]).norm() <= 5e-6 * found[0].norm()


def test_a_second_update_is_necessary() -> None:
    report = audited("flow_grpo_style", updates=2, epochs=2)
    first = {"sampled": (16, 64), "redundant": (14, 56)}
    assert [counts(report, i) for i in range(4)] == [first, {"changed": (14, 56)}] * 2
    assert any("later ones need" in text for text in report.advice())


def test_checkpointing_is_not_redundant() -> None:
    """Two blocks of each of 14 evaluations are computed again in backward; no more than that."""
    report = audited("flow_grpo_style", updates=1, checkpointing=True)
    expected = {"sampled": (16, 64), "redundant": (14, 56), "recomputed": (28, 0)}
    assert counts(report) == expected
    again, backward = report.total("recomputed"), report.total("backward")
    assert 0 < again.seconds < backward.seconds
    assert report.total("redundant").seconds < report.steps[0].seconds - backward.seconds


def test_a_rollout_in_another_process_is_separate(tmp_path: Path) -> None:
    """What a process samples is written to a file; the trainer reads it and samples nothing."""
    file = str(tmp_path / "rollout.pt")
    module = importlib.import_module("flow_grpo_style")
    with watch() as audit:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking, and this is no thread
            sampler = multiprocessing.get_context("fork").Process(
                target=list, args=(module.main(1, store=file),)
            )
            sampler.start()
            sampler.join(60)
        assert sampler.exitcode == 0
        for _ in module.main(2, stored=file):
            pass
    report = audit.report
    assert (report.classified, report.colocated) == ("separate", False)
    assert counts(report, 0) == counts(report, 1) == {"fresh": (14, 56)}


# -- a small network, to take one thing at a time --------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(80, 32), nn.Dropout(0.1), nn.Linear(32, 80))

    def forward(self, x: Tensor, t: Tensor, words: Tensor | None = None) -> Tensor:
        out: Tensor = self.layers(x + t[:, None] + (0 if words is None else words))
        return out


Evaluate = Callable[[nn.Module, Tensor, Tensor], Tensor]


def plain(net: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    out: Tensor = net(x, t)
    return out


def one_update(
    net: nn.Module,
    *,
    sample: Evaluate = plain,
    again: Evaluate = plain,
    before: Callable[[], None] = lambda: None,
    lr: float = 1e-3,
    times: tuple[float, ...] = (0.9, 0.6, 0.3),
) -> Report:
    """Sample three steps of four rows, evaluate them again with gradients, step; the report."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=lr)
    with watch() as audit:
        for _ in range(2):
            x, stored = torch.randn(4, 80), []
            with torch.no_grad():
                for t in times:
                    stored.append((x, torch.full((4,), t)))
                    v = sample(net, *stored[-1]).float()
                    x = x + 0.1 * v + 0.1 * torch.randn_like(x)
            before()
            for x, t in reversed(stored):
                again(net, x, t).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not audit.report.failures
    return audit.report


@pytest.fixture
def net() -> Net:
    return Net().eval()


REDUNDANT: Counts = {"sampled": (3, 12), "redundant": (3, 12)}
CHANGED: Counts = {"sampled": (3, 12), "changed": (3, 12)}


def test_plain_and_when_the_optimizer_moves_nothing(net: Net) -> None:
    for lr in (1e-3, 0.0):
        report = one_update(net, lr=lr)
        assert [counts(report, i) for i in range(2)] == [REDUNDANT] * 2
        assert not report.differences


def test_a_running_mean_swapped_in_through_data(net: Net) -> None:
    """`p.data.copy_` leaves no version; a swap that is taken back has changed nothing."""

    def nudge() -> None:
        for p in net.parameters():
            p.data.mul_(1.01)

    def there_and_back() -> None:
        saved = [p.detach().clone() for p in net.parameters()]
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(1.01)
            for p, s in zip(net.parameters(), saved, strict=True):
                p.copy_(s)

    assert counts(one_update(net, before=nudge)) == CHANGED
    assert counts(one_update(net, before=there_and_back)) == REDUNDANT


def test_a_state_dict_that_was_loaded(net: Net) -> None:
    other = Net().state_dict()
    assert counts(one_update(net, before=lambda: net.load_state_dict(other) and None)) != REDUNDANT


def test_rows_are_found_in_other_batches_and_orders(net: Net) -> None:
    def alone(net: nn.Module, x: Tensor, t: Tensor) -> Tensor:
        return torch.cat([net(x[i : i + 1], t[:1]) for i in torch.randperm(4).tolist()])

    report = one_update(net, again=alone)
    assert counts(report) == {"sampled": (3, 12), "redundant": (12, 12)}
    assert set(report.differences) == {"batch"}


@pytest.mark.parametrize("when", ["sample", "again"])
def test_guidance_in_two_calls(net: Net, when: str) -> None:
    """Both calls of a step are one transition, whether it is sampled or evaluated again."""

    def guided(net: nn.Module, x: Tensor, t: Tensor) -> Tensor:
        out: Tensor = net(x, t, torch.zeros(4, 80)) + net(x, t, torch.ones(4, 80))
        return out

    def once(net: nn.Module, x: Tensor, t: Tensor) -> Tensor:
        out: Tensor = net(x, t, torch.ones(4, 80))
        return out

    if when == "again":
        report = one_update(net, sample=guided, again=guided)
        assert counts(report) == {"sampled": (6, 12), "redundant": (6, 12)}
        assert not report.differences
    else:
        report = one_update(net, sample=guided, again=once)
        assert counts(report) == {"sampled": (6, 12), "redundant": (3, 12)}
        assert set(report.differences) == {"guidance", "batch"}


def test_a_reference_beside_the_gradient_is_no_sample(net: Net) -> None:
    def with_reference(net: nn.Module, x: Tensor, t: Tensor) -> Tensor:
        out = plain(net, x, t)
        with torch.no_grad():
            net(x, t)
        return out

    report = one_update(net, again=with_reference)
    assert counts(report) == REDUNDANT | {"other": (3, 12)}


def test_what_makes_reuse_inexact(net: Net) -> None:
    def rounded(net: nn.Module, x: Tensor, t: Tensor) -> Tensor:
        return plain(net, x.bfloat16().float(), t)

    def half(net: nn.Module, x: Tensor, t: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return plain(net, x, t)

    def narrow(net: nn.Module, x: Tensor, t: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return plain(net, x.bfloat16(), t)

    report = one_update(net, again=rounded)
    assert counts(report) == REDUNDANT
    assert set(report.differences) == {"rounding"}
    number, text = report.differences["rounding"]
    assert number == 24 and 0 < float(text.split()[-1]) <= 2**-8
    assert set(one_update(net, again=half).differences) == {"autocast"}
    assert set(one_update(net, again=narrow).differences) == {"autocast", "dtype", "rounding"}
    assert set(one_update(net.train()).differences) == {"dropout"}


def test_compiled_on_one_side(net: Net) -> None:
    fast = torch.compile(net, backend="eager")
    with_fast = lambda net, x, t: fast(x, t)  # noqa: E731
    report = one_update(net, again=with_fast)
    assert counts(report) == REDUNDANT
    assert set(report.differences) == {"compiled"}
    assert counts(one_update(net, sample=with_fast, again=with_fast)) == REDUNDANT
    net.compile(backend="eager")
    assert counts(one_update(net)) == REDUNDANT


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_whole_network_checkpointed(net: Net, reentrant: bool) -> None:
    def saved(net: nn.Module, x: Tensor, t: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out: Any = checkpoint(net, x, t, use_reentrant=reentrant)
        return out  # type: ignore[no-any-return]

    report = one_update(net, again=saved)
    assert counts(report) == REDUNDANT | {"recomputed": (3, 0)}


def test_a_copy_samples(net: Net) -> None:
    other = copy.deepcopy(net)
    report = one_update(net, sample=lambda _, x, t: plain(other, x, t))
    assert (report.classified, report.colocated) == ("another network", False)


def test_adapters_are_weights(net: Net) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(target_modules=["0", "2"], r=2), net)

    def without(net: nn.Module, x: Tensor, t: Tensor) -> Tensor:
        layers = [m for m in net.modules() if hasattr(m, "lora_A")]
        for layer in layers:
            layer.enable_adapters(False)  # type: ignore[operator]
        out = plain(net, x, t)
        for layer in layers:
            layer.enable_adapters(True)  # type: ignore[operator]
        return out

    assert counts(one_update(net)) == REDUNDANT
    assert counts(one_update(net, sample=without)) == CHANGED


def test_only_steps_of_the_networks_optimizer_count(net: Net) -> None:
    value = nn.Linear(3, 1)
    other = torch.optim.SGD(value.parameters(), lr=0.1)
    report = one_update(net, before=lambda: other.step())
    assert [counts(report, i) for i in range(len(report.steps))] == [REDUNDANT] * 2


def test_nothing_of_torch_stays_changed_and_no_random_number_is_drawn(net: Net) -> None:
    names = [(nn.Module, "__call__"), (torch.autograd, "backward"), (torch, "randn")]
    before = [getattr(home, name) for home, name in names]
    torch.manual_seed(0)
    audit = Audit(net)
    with pytest.raises(ZeroDivisionError), audit:
        net(torch.zeros(1, 80), torch.zeros(1)).mean().item() / 0
    assert torch.initial_seed() == 0 and torch.equal(torch.rand(3), _first_draws())
    assert [getattr(home, name) for home, name in names] == before
    assert "normal_" not in vars(torch.Tensor)
    assert audit.report.classified == "samples only"
    with watch(), pytest.raises(RuntimeError, match="one at a time"), watch():
        pass


def _first_draws() -> Tensor:
    torch.manual_seed(0)
    return torch.rand(3)


def test_named(net: Net) -> None:
    class Other(nn.Module):
        def forward(self, picture: Tensor) -> Tensor:
            return picture * 2

    chosen = Other()
    for name, number in (("Other", 1), ("chosen", 1), ("net", 1), ("nobody", 0)):
        with watch(name=name) as audit, torch.no_grad():
            chosen(torch.ones(2, 3))
            net(torch.zeros(1, 80), torch.zeros(1))
        total = audit.report.total("sampled").calls + audit.report.total("other").calls
        assert total == number, name


def test_what_cannot_be_read_does_not_stop_the_program(net: Net, monkeypatch: Any) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("no")

    monkeypatch.setattr("leangrpo.audit.Recorder.record", broken)
    with watch(net) as audit:
        assert net(torch.zeros(1, 80), torch.zeros(1)).shape == (1, 80)
    assert audit.report.failures == {"ZeroDivisionError: no": 1}


def test_the_seconds_of_a_step_hold_those_of_its_calls(net: Net) -> None:
    """The auditor's own seconds are left out of a step, once."""
    report = one_update(net)
    for step in report.steps:
        parts = [t.seconds for kind, t in step.kinds.items() if kind != "recomputed"]
        assert 0 < sum(parts) <= step.seconds
    assert 0 < report.redundant_share < 1
