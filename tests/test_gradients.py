"""Where backward leaves gradients; the sources with ranks are tested in test_parallel."""

from __future__ import annotations

import torch
from torch import nn

from leangrpo.gradients import BUCKET_BYTES, Local, _buckets, _owned
from leangrpo.guard import Guard


def local() -> tuple[nn.Module, Local]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, Local(Guard(model))


def test_what_was_there_is_added_to() -> None:
    model, source = local()
    model.weight.grad = torch.ones_like(model.weight)
    source.begin()
    assert model.weight.grad is None
    own = [torch.full_like(model.weight, 2.0), None]
    source.reduce(lambda indices: [own[i] for i in indices], [True, False])
    source.finish()
    assert torch.equal(model.weight.grad, torch.full_like(model.weight, 3.0))
    assert model.bias.grad is None


def test_an_idle_backward_leaves_no_trace() -> None:
    """Not even where its gradient is not finite, as times zero it would be NaN."""
    model, source = local()
    source.begin()
    x = torch.ones(1, 3)
    source.before(idle=False)
    model(x).sum().backward()
    source.after()
    kept = model.weight.grad.clone()
    source.before(idle=True)
    model(torch.full((1, 3), torch.inf)).sum().backward()
    source.after()
    assert torch.equal(model.weight.grad, kept)


def test_buckets_hold_what_is_reached_in_reverse_and_one_dtype_each() -> None:
    sizes = [1, BUCKET_BYTES // 4, 2, 3]
    parameters = [nn.Parameter(torch.empty(n, device="meta")) for n in sizes]
    parameters.append(nn.Parameter(torch.empty(4, device="meta", dtype=torch.bfloat16)))
    assert list(_buckets(parameters, [True] * 5)) == [[4], [3, 2], [1], [0]]
    assert list(_buckets(parameters, [True, False, True, False, False])) == [[2, 0]]
    assert list(_buckets(parameters, [False] * 5)) == []


def test_each_parameter_belongs_to_the_nearest_unit_above_it() -> None:
    root = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
    inner = root[1]
    owned = _owned(root, [root, inner, inner[1]])
    assert [m for m, _ in owned[root]] == [root[0]] * 2
    assert [m for m, _ in owned[inner]] == [inner[0]] * 2
    assert [(m, n) for m, n in owned[inner[1]]] == [(inner[1], "weight"), (inner[1], "bias")]
