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
    for g, e in zip(ledger.part(range(2)), expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-15, atol=1e-15)
    assert ledger.part(range(2)) == [None, None]


def test_parameters_that_backward_does_not_reach_keep_no_gradient() -> None:
    ps = parameters()
    ledger = Ledger(ps)
    ledger.hold("a", [None, torch.ones(4)])
    ledger.hold("b", [None, torch.ones(4)])
    ledger.fold("a", 1.0)
    ledger.fold("b", 2.0)
    assert ledger.reached() == [False, True]
    nothing, total = ledger.part([0, 1])
    assert nothing is None and total is not None
    assert torch.equal(total, torch.full((4,), 3.0))


def test_bucket_by_bucket_is_all_at_once() -> None:
    ps = parameters()
    whole, parts = Ledger(ps), Ledger(ps)
    for ledger in (whole, parts):
        torch.manual_seed(1)
        for key in range(3):
            ledger.hold(key, [torch.randn_like(p) for p in ps])
            ledger.fold(key, 0.5 - key)
    expected = whole.part([0, 1])
    found = [*parts.part([1]), *parts.part([0])]
    for e, f in zip(expected, reversed(found), strict=True):
        assert e is not None and f is not None and torch.equal(e, f)


def test_sixteen_bit_gradients_are_summed_in_float32() -> None:
    """256 + 1 is 256 in bfloat16: a sum of many small gradients would stop growing."""
    p = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    ledger = Ledger([p])
    for i in range(257):
        ledger.hold(i, [torch.ones(1, dtype=torch.bfloat16)])
        ledger.fold(i, 1.0)
    (total,) = ledger.part([0])
    assert total is not None and total.dtype == torch.float32 and float(total) == 257


def test_a_narrow_ledger_keeps_all_but_the_open_trajectory_narrow() -> None:
    (p, _) = ps = parameters()
    ledger = Ledger(ps, dtype=torch.bfloat16)
    third = torch.full_like(p, 1 / 3)
    ledger.hold("a", [third.clone(), None])
    assert ledger.reopen("a")[0].dtype == torch.float32
    ledger.hold("a", [third.clone(), None])
    ledger.hold("b", [third.clone(), None])
    assert ledger.waiting["a"][0].dtype == torch.bfloat16
    ledger.fold("a", 1.0)
    total = ledger.part([0])[0]
    assert total.dtype == torch.float32
    assert torch.equal(total, third.bfloat16().float())


def test_bytes_are_counted() -> None:
    ps = parameters()
    ledger = Ledger(ps)
    ledger.hold("a", [torch.ones_like(p) for p in ps])
    ledger.measure()
    assert ledger.num_bytes == ledger.peak_bytes == 4 * (6 + 4)
    ledger.fold("a", 1.0)
    ledger.part([0, 1])
    assert ledger.num_bytes == 0
