"""Gradients wait by trajectory and are summed with their advantages."""

import torch
from torch import nn

from leangrpo.ledger import Ledger


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(3, 2, dtype=dtype)), nn.Parameter(torch.randn(4, dtype=dtype))]


def test_fold_is_the_weighted_sum() -> None:
    ps = parameters(torch.float64)
    ledger = Ledger(ps)
    gradients = {key: [torch.randn_like(p) for p in ps] for key in "abc"}
    expected = [0.3 * gradients["a"][i] - 1.2 * gradients["b"][i] for i in range(2)]
    for key, gradient in gradients.items():
        ledger.hold(key, [g.clone() for g in gradient])
    for key, coefficient in {"a": 0.3, "b": -1.2, "c": 0.0}.items():
        ledger.fold(key, coefficient)
    assert ledger.waiting == {}
    ledger.write()
    for p, e in zip(ps, expected, strict=True):
        torch.testing.assert_close(p.grad, e, rtol=1e-15, atol=1e-15)


def test_parameters_that_backward_does_not_reach_keep_no_gradient() -> None:
    ps = parameters()
    ledger = Ledger(ps)
    ledger.hold("a", [None, torch.ones(4)])
    ledger.hold("b", [None, torch.ones(4)])
    ledger.fold("a", 1.0)
    ledger.fold("b", 2.0)
    ledger.write()
    assert ps[0].grad is None
    assert torch.equal(ps[1].grad, torch.full((4,), 3.0))


def test_sixteen_bit_gradients_are_summed_in_float32() -> None:
    """256 + 1 is 256 in bfloat16: a sum of many small gradients would stop growing."""
    p = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    ledger = Ledger([p])
    for i in range(257):
        ledger.hold(i, [torch.ones(1, dtype=torch.bfloat16)])
        ledger.fold(i, 1.0)
    assert ledger.total[0] is not None and float(ledger.total[0]) == 257
    ledger.write()
    assert p.grad.dtype == torch.bfloat16


def test_take_leaves_nothing_and_bytes_are_counted() -> None:
    ps = parameters()
    ledger = Ledger(ps)
    for p in ps:
        p.grad = torch.ones_like(p)
    taken = ledger.take()
    assert all(p.grad is None for p in ps)
    ledger.hold("a", taken)
    assert ledger.num_bytes == ledger.peak_bytes == 4 * (6 + 4)
    ledger.fold("a", 1.0)
    ledger.write()
    assert ledger.num_bytes == 0
