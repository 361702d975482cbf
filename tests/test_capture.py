"""Gradients taken out of a batch are those of its samples one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.normalization import RMSNorm
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from leangrpo.capture import Capture
from leangrpo.errors import LeanError
from leangrpo.ledger import Ledger

B = 3
COEFFICIENTS = torch.tensor([0.7, -1.9, 1.2], dtype=torch.float64)


class Block(nn.Module):
    """Layers with rules, a norm without one, and parameters used bare, as in Wan and PixArt."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = RMSNorm(5, eps=1e-6), nn.Linear(5, 10)
        self.out = nn.Linear(5, 5)
        self.table = nn.Parameter(torch.empty(1, 2, 5))
        self.shifts = nn.Parameter(torch.empty(2, 5))
        self.gate = nn.Parameter(torch.empty(5))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale = (self.table.to(x.device) + time.unflatten(1, (2, 5))).chunk(2, dim=1)
        first, second = (self.shifts[None] + time.reshape(-1, 2, 5)).unbind(1)
        h = self.inner(self.norm(x) * (1 + scale) + shift)
        a, b = h.chunk(2, dim=-1)
        return x + self.gate * self.out(a * b.tanh()) * first[:, None] + second[:, None]


class Net(nn.Module):
    """Two blocks, checkpointed or not; the first layer's input needs no gradient."""

    def __init__(self, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.embed, self.time = nn.Linear(4, 5), nn.Linear(3, 10)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(5)
        self.checkpointing = checkpointing

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h, time = self.embed(x), self.time(t)
        h.tanh_()  # a model may write into what a layer gave it
        for block in self.blocks:
            h = (
                checkpoint(block, h, time, use_reentrant=False)
                if self.checkpointing
                else block(h, time)
            )
        return self.norm(h)


def network(**options: Any) -> Net:
    torch.manual_seed(0)
    net = Net(**options).double()
    for p in net.parameters():
        nn.init.normal_(p, std=0.5)
    return net


def inputs(rows: int, step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows, 6, 4, generator=generator, dtype=torch.float64)
    return x, torch.randn(rows, 3, generator=generator, dtype=torch.float64)


def score(y: Tensor) -> Tensor:
    """A number for each of B samples; rows k and k + B belong together, as with guidance."""
    weights = torch.arange(1, y[0].numel() + 1, dtype=y.dtype).view(y[0].shape).cos()
    return (y.square() * weights).flatten(1).mean(1).view(-1, B).sum(0)


def expected(net: Net, rows: int, steps: int = 1) -> list[Tensor]:
    """Sample after sample, by plain autograd."""
    sums = [torch.zeros_like(p) for p in net.parameters()]
    for step in range(steps):
        scores = score(net(*inputs(rows, step)))
        for b, c in enumerate(COEFFICIENTS):
            some = torch.autograd.grad(scores[b], list(net.parameters()), retain_graph=True)
            for total, g in zip(sums, some, strict=True):
                total += c * g
    return sums


def folded(ledger: Ledger, keys: tuple[int, ...]) -> list[Tensor | None]:
    ledger.fold_batches(dict(zip(keys, COEFFICIENTS.tolist(), strict=True)), 1.0)
    return ledger.part(range(len(ledger.parameters)))


KEYS = tuple(range(B))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("rows", [B, 2 * B])
def test_two_steps_of_a_batch(rows: int, checkpointing: bool, late: bool) -> None:
    """`late`: both forwards first, and both backwards after capture is off again."""
    net = network(checkpointing=checkpointing)
    parameters = list(net.parameters())
    capture, ledger = Capture([net], parameters), Ledger(parameters)
    waiting = []
    for step in range(2):
        with capture(rows):
            waiting.append(score(net(*inputs(rows, step))))
            if not late:
                with capture.into(ledger.batch(KEYS)):
                    waiting.pop().sum().backward()
    for scores in waiting:
        with capture.into(ledger.batch(KEYS)):
            scores.sum().backward()
    assert capture.seen
    assert all(p.grad is None for p in parameters)
    for g, e in zip(folded(ledger, KEYS), expected(net, rows, 2), strict=True):
        assert g is not None and g.any()
        torch.testing.assert_close(g, e, rtol=1e-12, atol=1e-13)
    assert ledger.num_bytes == 0


def test_checkpointed_blocks_are_run_again_and_save_what_they_save() -> None:
    """Capture must not hold the inputs that checkpointing drops."""
    saved = {checkpointing: _saved_and_run_again(checkpointing) for checkpointing in (False, True)}
    assert saved[True] < saved[False] / 2


def _saved_and_run_again(checkpointing: bool) -> int:
    """How many numbers a forward saves; its first block runs again only with checkpointing."""
    net = network(checkpointing=checkpointing)
    capture = Capture([net], list(net.parameters()))
    kept: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with hooks, capture(B):
        scores = score(net(*inputs(B)))
    runs: list[int] = []
    net.blocks[0].inner.register_forward_pre_hook(lambda *_: runs.append(1))
    with capture.into(None):
        scores.sum().backward()
    assert len(runs) == checkpointing
    return sum(t.numel() for t in kept)


def test_a_backward_again_for_the_sum_of_all() -> None:
    """The KL term's: one gradient, whatever the number of samples."""
    from leangrpo.samples import Samples

    net = network()
    parameters = list(net.parameters())
    capture, ledger = Capture([net], parameters), Ledger(parameters)
    with capture(B):
        scores = score(net(*inputs(B)))
    together = Samples(1)
    for samples in (ledger.batch(KEYS), together):
        with capture.into(samples):
            scores.sum().backward(retain_graph=True)
    one = Ledger(parameters)
    one.add_samples(together, torch.ones(1))
    ledger.fold_batches(dict.fromkeys(KEYS, 1.0), 1.0)
    every = range(len(parameters))
    for g, e in zip(one.part(every), ledger.part(every), strict=True):
        torch.testing.assert_close(g, e, rtol=1e-12, atol=1e-13)


def test_batches_wait_for_all_their_advantages() -> None:
    net = network()
    capture, ledger = Capture([net], list(net.parameters())), Ledger(list(net.parameters()))
    with capture(B), capture.into(ledger.batch(KEYS)):
        score(net(*inputs(B))).sum().backward()
    ledger.fold_batches({0: 1.0, 1: 1.0}, 1.0)
    assert len(ledger.batches) == 1
    ledger.fold_batches({0: 0.0, 1: 0.0, 2: 0.0}, 1.0)
    assert (len(ledger.batches), ledger.num_bytes) == (0, 0)


def test_the_layers_are_given_back() -> None:
    net = network()
    net.norm.forward = other = net.norm.forward  # someone else's exchange stays
    capture = Capture([net], list(net.parameters()))
    before = net(*inputs(B))
    with capture(B), torch.no_grad(), capture:
        inside = net(*inputs(B))
    assert torch.equal(before, inside)
    assert [m for m in net.modules() if "forward" in m.__dict__] == [net.norm]
    assert net.norm.forward is other
    with capture(B):
        assert torch.equal(net(*inputs(B)), before)  # bit for bit the same with gradients
    assert all("table" not in block.__dict__ for block in net.blocks)
    net(*inputs(B)).sum().backward()
    assert net.blocks[0].table.grad is not None


def test_frozen_parameters_are_left_alone() -> None:
    net = network()
    net.requires_grad_(False)
    net.blocks[1].inner.bias.requires_grad_(True)
    trained = [p for p in net.parameters() if p.requires_grad]
    capture, ledger = Capture([net], trained), Ledger(trained)
    with capture(B), capture.into(ledger.batch(KEYS)):
        score(net(*inputs(B))).sum().backward()
    (g,) = folded(ledger, KEYS)
    net.requires_grad_(True)
    names = [n for n, _ in net.named_parameters()]
    e = expected(net, B)[names.index("blocks.1.inner.bias")]
    torch.testing.assert_close(g, e, rtol=1e-12, atol=1e-13)


def test_mixed_samples_are_an_error() -> None:
    net = network()
    capture = Capture([net], list(net.parameters()))
    with capture(B), pytest.raises(LeanError, match=r"`embed.weight`.*6 rows in a batch of 3"):
        net(*inputs(2 * B))


class Lone(nn.Module):
    """A parameter, and what it is used for."""

    def __init__(self, use: Any, *shape: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(*shape, dtype=torch.float64))
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.w, x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("use", "shape", "why"),
    [
        (lambda w, x: x @ w, (4, 4), "it goes into matmul"),
        (lambda w, x: torch.cat([x, w]), (3, 6, 4), "it goes into cat"),
        (lambda w, x: x + w, (3, 1, 1), r"it meets a tensor of shape \(3, 6, 4\)"),
        (lambda w, x: x[0] + w, (4,), r"it meets a tensor of shape \(6, 4\) in a batch of 3"),
        (lambda w, x: nn.functional.layer_norm(x, (4,), w), (4,), "it goes into layer_norm"),
    ],
)
def test_a_use_that_mixes_samples_is_an_error(use, shape, why) -> None:
    net = nn.Sequential(nn.Identity(), Lone(use, *shape))
    capture = Capture([net], list(net.parameters()))
    with capture(B), pytest.raises(LeanError, match=rf"`1.w`, of shape .*{why}.*micro_batch=1"):
        net(inputs(B)[0])


def test_a_parameter_that_another_module_uses_is_an_error() -> None:
    """Its gradient is a sum over the batch, found when the backward has run."""
    net = nn.Module()
    net.inner = nn.Linear(4, 4).double()
    capture = Capture([net], list(net.parameters()))
    with capture(B), capture.into(None):
        nn.functional.linear(inputs(B)[0], net.inner.weight).sum().backward()
    assert not capture.seen
    with pytest.raises(LeanError, match=r"`inner.weight`, of shape \(4, 4\), cannot be split"):
        capture.refuse([p.grad for p in net.parameters()])
