"""The rule of every kind of layer gives each sample its own gradient, kept in whichever form."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from diffusers.models.normalization import FP32LayerNorm
from torch import Tensor, nn

from leangrpo.samples import Layer, Samples, num_bytes, rule_of

B = 3
COEFFICIENTS = torch.tensor([0.7, -1.9, 1.2], dtype=torch.float64)

KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 7), (6, 5)),
    "linear on vectors": (lambda: nn.Linear(5, 7), (5,)),
    "linear without bias": (lambda: nn.Linear(5, 7, bias=False), (2, 3, 5)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1), (2, 9)),
    "conv2d": (lambda: nn.Conv2d(2, 3, 3, dilation=2, bias=False), (2, 7, 6)),
    "conv2d in groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), (4, 5, 5)),
    "conv2d, same size": (lambda: nn.Conv2d(2, 3, (2, 3), padding="same"), (2, 5, 5)),
    "conv2d, circular": (
        lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
        (2, 5, 5),
    ),
    "conv3d": (lambda: nn.Conv3d(2, 3, (1, 2, 2), stride=(1, 2, 2)), (2, 3, 4, 4)),
    "layer norm": (lambda: nn.LayerNorm(5), (6, 5)),
    "layer norm of planes": (lambda: nn.LayerNorm((4, 5)), (2, 4, 5)),
    "layer norm in float32": (lambda: FP32LayerNorm(5), (6, 5)),
    "rms norm": (lambda: nn.RMSNorm(5), (6, 5)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, 3, 3)),
    "embedding": (lambda: nn.Embedding(4, 5, padding_idx=1), (6,)),
}


def layer_of(kind: str) -> tuple[nn.Module, Layer]:
    torch.manual_seed(0)
    make, _ = KINDS[kind]
    module = make().double()
    for p in module.parameters():
        nn.init.normal_(p)
    names = tuple(n for n, _ in module.named_parameters())
    return module, Layer(module, names, tuple(range(len(names))), rule_of(module))


def inputs(kind: str, rows: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    _, shape = KINDS[kind]
    if kind == "embedding":
        return torch.randint(4, (rows, *shape), generator=generator)
    return torch.randn(rows, *shape, generator=generator, dtype=torch.float64)


def call(module: nn.Module, x: Tensor, g: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
    """A gradient for the output, and what autograd makes of it for each sample alone."""
    if g is None:
        y = module(x)
        g = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=y.dtype)
    each = []
    for b in range(B):
        y = module(x[b::B])
        each.append(torch.autograd.grad(y, list(module.parameters()), g[b::B]))
    return g, [torch.stack(parts) for parts in zip(*each, strict=True)]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("form", ["factors", "formed", "as it is smaller"])
@pytest.mark.parametrize("rows", [B, 2 * B])
@pytest.mark.parametrize("kind", KINDS)
def test_each_sample_has_its_own_gradient(kind: str, rows: int, form: str, monkeypatch) -> None:
    """Folded over two steps: sum over samples of c_b g_b, to some 1e2 roundings of float64.

    FP32LayerNorm computes in float32 whatever comes in, and autograd's side of it too.
    """
    module, layer = layer_of(kind)
    limit = {"factors": 10**9, "formed": 0}
    if form in limit:
        monkeypatch.setattr(Samples, "_formed_bytes", lambda *_: limit[form])
    samples = Samples(B)
    expected = [torch.zeros_like(p) for p in module.parameters()]
    for step in range(2):
        x = inputs(kind, rows, step)
        g, each = call(module, x)
        samples.add(layer, x, g)
        for total, one in zip(expected, each, strict=True):
            total += torch.einsum("b,b...->...", COEFFICIENTS, one)
    (kept,) = samples.kept.values()
    if form != "as it is smaller":
        assert bool(kept.formed) == (form == "formed")
    found = [torch.zeros_like(p) for p in module.parameters()]
    samples.fold(COEFFICIENTS, found.__getitem__)
    tolerance = 1e-5 if "float32" in kind else 1e-12
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, rtol=tolerance, atol=tolerance)
        assert f.any()


def test_what_is_kept_does_not_grow_with_the_steps() -> None:
    """Three rows of 5 and 7 numbers against three products of 5 x 7: the third step forms them."""
    module, layer = layer_of("linear on vectors")
    samples, sizes = Samples(B), []
    for step in range(6):
        x = inputs("linear on vectors", B, step)
        samples.add(layer, x, call(module, x)[0])
        sizes.append(num_bytes(samples.tensors()))
    factors, gradient = 8 * B * (5 + 7), 8 * B * (5 * 7 + 7)
    assert sizes == [factors, 2 * factors, 3 * factors, gradient, gradient, gradient]
    assert 3 * factors <= gradient < 4 * factors


def test_steps_are_joined_in_either_form() -> None:
    """What was kept apart, as a step with a baseline is, and what was added at once."""
    module, layer = layer_of("linear on vectors")
    for lengths in ((1, 1), (1, 4), (4, 1), (4, 4)):
        apart, whole = [Samples(B), Samples(B)], Samples(B)
        for samples, length in zip(apart, lengths, strict=True):
            for step in range(length):
                x = inputs("linear on vectors", B, step)
                g, _ = call(module, x)
                samples.add(layer, x, g)
                whole.add(layer, x, g)
        apart[0].join(apart[1])
        found = []
        for samples in (apart[0], whole):
            sums = [torch.zeros_like(p) for p in module.parameters()]
            samples.fold(COEFFICIENTS, sums.__getitem__)
            found.append(sums)
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_only_the_layers_that_are_asked_for_are_folded() -> None:
    module, layer = layer_of("linear")
    x = inputs("linear", B, 0)
    samples = Samples(B)
    samples.add(layer, x, call(module, x)[0])
    samples.fold(COEFFICIENTS, lambda i: pytest.fail(f"{i} was asked for"), [5], keep=False)
    assert [*samples.kept] == [layer]
    sums = [torch.zeros_like(p) for p in module.parameters()]
    samples.fold(COEFFICIENTS, sums.__getitem__, [1], keep=False)
    assert not samples.kept
    assert all(total.any() for total in sums)


def test_sixteen_bits_round_no_worse_than_one_sample_at_a_time() -> None:
    """64 steps in bfloat16, against float64: what autograd accumulates in `.grad` is the measure.

    The factors of a single step are multiplied in float32 and are better than that.
    """
    torch.manual_seed(0)
    module = nn.Linear(16, 16).bfloat16()
    layer = Layer(module, ("weight", "bias"), (0, 1), rule_of(module))
    samples, exact = Samples(B), [torch.zeros(16, 16).double(), torch.zeros(16).double()]
    usual = [[torch.zeros_like(p) for p in module.parameters()] for _ in range(B)]
    for _ in range(64):
        x, g = torch.randn(B, 4, 16).bfloat16(), torch.randn(B, 4, 16).bfloat16()
        samples.add(layer, x, g)
        for b, c in enumerate(COEFFICIENTS.tolist()):
            exact[0] += c * g[b].double().T @ x[b].double()
            exact[1] += c * g[b].double().sum(0)
            for total, one in zip(
                usual[b],
                torch.autograd.grad(module(x[b]), list(module.parameters()), g[b]),
                strict=True,
            ):
                total += one
    found = [torch.zeros(16, 16), torch.zeros(16)]
    samples.fold(COEFFICIENTS, found.__getitem__)
    for i, (mine, true) in enumerate(zip(found, exact, strict=True)):
        theirs = sum(c * usual[b][i].double() for b, c in enumerate(COEFFICIENTS.tolist()))
        assert 0 < float((mine - true).norm()) <= 1.1 * float((theirs - true).norm())


def test_memory_is_counted_once_however_many_look_at_it() -> None:
    x = torch.zeros(10)
    assert num_bytes([x, x[:2], x.view(2, 5)]) == 40
    assert num_bytes([x, torch.zeros(3)]) == 52


class _Causal(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.pad(x, (2, 0)))


def test_a_layer_with_a_forward_of_its_own_has_no_rule() -> None:
    assert rule_of(_Causal(2, 3, 3)) is None
    assert rule_of(nn.Embedding(3, 2, max_norm=1.0)) is None
    assert rule_of(nn.ConvTranspose2d(2, 3, 3)) is None
    assert rule_of(nn.Conv2d(2, 3, 3)) is not None
