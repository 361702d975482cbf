"""Gradients of a batch in factors are those of its samples one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from leangrpo.capture import Capture
from leangrpo.errors import LeanError
from leangrpo.ledger import Ledger

B = 3
COEFFICIENTS = torch.tensor([0.7, -1.9, 1.2], dtype=torch.float64)


def network(kind: str) -> nn.Module:
    torch.manual_seed(0)
    layers: dict[str, nn.Module] = {
        "linear": nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4, bias=False)),
        "conv": nn.Sequential(
            nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.SiLU(), nn.Conv2d(3, 2, 2, dilation=2)
        ),
    }
    return layers[kind].double()


def inputs(kind: str, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = (rows, 6, 5) if kind == "linear" else (rows, 2, 9, 9)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def score(y: torch.Tensor) -> torch.Tensor:
    """A number for each of B samples; rows k and k + B belong together, as with guidance."""
    rows = y.square().flatten(1).mean(1)
    return rows.view(-1, B).sum(0)


@pytest.mark.parametrize("rows", [B, 2 * B])
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_factors_are_the_samples_gradients(kind, rows) -> None:
    model, x = network(kind), inputs(kind, rows)
    parameters = list(model.parameters())
    expected = [
        sum(c * torch.autograd.grad(score(model(x))[b], p)[0] for b, c in enumerate(COEFFICIENTS))
        for p in parameters
    ]
    capture, ledger = Capture([model], parameters), Ledger(parameters)
    for _ in range(2):  # two steps of the same batch
        with capture(rows):
            scores = score(model(x))
        scores.backward(torch.ones(B, dtype=torch.float64))
        ledger.hold_batch(tuple(range(B)), capture.take([p.grad for p in capture.parameters]))
    assert all(p.grad is None for p in parameters)
    assert ledger.num_bytes > 0
    ledger.fold_batches(dict(enumerate(COEFFICIENTS.tolist())), 0.5)
    for g, e in zip(ledger.part(range(len(parameters))), expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-12, atol=1e-14)
    assert ledger.num_bytes == 0


def test_batches_wait_for_all_their_advantages() -> None:
    model, x = network("linear"), inputs("linear", B)
    parameters = list(model.parameters())
    capture, ledger = Capture([model], parameters), Ledger(parameters)
    with capture(B):
        score(model(x)).sum().backward()
    ledger.hold_batch((0, 1, 2), capture.take([p.grad for p in capture.parameters]))
    ledger.fold_batches({0: 1.0, 1: 1.0}, 1.0)
    assert len(ledger.batches) == 1
    ledger.fold_batches({0: 0.0, 1: 0.0, 2: 0.0}, 1.0)
    assert (len(ledger.batches), ledger.num_bytes) == (0, 0)


def test_the_layers_are_given_back() -> None:
    model, x = network("linear"), inputs("linear", B)
    capture = Capture([model], list(model.parameters()))
    before = model(x)
    with capture(B), torch.no_grad():
        inside = model(x)
    assert torch.equal(before, inside)
    assert all("forward" not in layer.__dict__ for layer in model)
    model(x).sum().backward()
    assert model[0].weight.grad is not None


def test_frozen_layers_are_left_alone() -> None:
    model = network("linear")
    model[0].requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    capture = Capture([model], trained)
    with capture(B):
        score(model(inputs("linear", B))).sum().backward()
    assert [f.weight for f in capture.take([p.grad for p in capture.parameters])] == [0]


def test_mixed_samples_are_an_error() -> None:
    model = network("linear")
    capture = Capture([model], list(model.parameters()))
    with capture(B), pytest.raises(LeanError, match=r"called with 6 rows in a batch of 3"):
        model(inputs("linear", 2 * B))


def test_another_kind_of_parameter_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4)).double()
    capture = Capture([model], list(model.parameters()))
    with capture(B):
        score(model(inputs("linear", B))).sum().backward()
    with pytest.raises(LeanError, match=r"shape \(4,\).*cannot be split"):
        capture.take([p.grad for p in capture.parameters])
