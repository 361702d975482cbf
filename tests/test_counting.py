"""Operations and bytes counted on the meta device, against analytic values and real runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from leangrpo.counting import META, Work, cast, count, peak_of, weight_bytes

B, WIDTH, INNER = 3, 8, 32


class Mlp(nn.Module):
    """x, W1, ReLU, W2: every saved tensor is known."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, INNER, bias=False)
        self.second = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x)))


def test_a_network_counted_by_hand() -> None:
    with META:
        module, x = Mlp(), torch.empty(B, WIDTH)
    found = count(module, (x,), {})
    product = 2 * B * WIDTH * INNER
    assert found.forward.flops == 2 * product
    assert found.backward.flops == 3 * product, "x needs no gradient: dW1, dW2 and one dx"
    assert found.kept == 4 * (B * WIDTH + B * INNER), "x, and ReLU's output once for its two users"
    assert found.kept_checkpointed is None
    assert found.recompute.flops == 0
    # ReLU reads and writes its B x INNER numbers; a product reads x and W and writes y
    assert found.forward.traffic == 4 * (
        2 * (B * WIDTH + WIDTH * INNER + B * INNER) + 2 * B * INNER
    )
    assert found.forward_peak == 4 * 2 * B * INNER, "the first product and ReLU's output"


def test_frozen_weights_need_no_product_of_theirs() -> None:
    with META:
        module, x = Mlp(), torch.empty(B, WIDTH)
    module.first.requires_grad_(False)
    found = count(module, (x,), {})
    assert found.backward.flops == 2 * B * WIDTH * INNER, "only dW2"
    assert found.kept == 4 * B * INNER
    assert weight_bytes(module, trained=True) == weight_bytes(module, trained=False) == 4 * 256


class Attention(nn.Module):
    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.qkv, self.masked = nn.Linear(16, 48, bias=False), masked

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        mask = torch.zeros(x.shape[1], device=x.device).bool() if self.masked else None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def test_attention_is_fused() -> None:
    """2 products forward and 5 backward of 2 L² d a head; kept grows with L, not with L²."""
    heads, size = 2, 8
    found = {}
    for length in (64, 128):
        with META:
            module, x = Attention(False), torch.empty(1, length, 16)
        found[length] = count(module, (x,), {})
        project, product = 2 * length * 16 * 48, 2 * length**2 * size * heads
        assert found[length].forward.flops == project + 2 * product
        assert found[length].backward.flops == project + 5 * product
    x_qkv_out_lse = 4 * 64 * (16 + 48 + 16 + heads)
    assert found[64].kept == pytest.approx(x_qkv_out_lse, abs=64), "and the state of its dropout"
    assert found[128].kept == pytest.approx(2 * x_qkv_out_lse, abs=64)


def test_attention_with_a_mask_is_fused_too() -> None:
    kept = []
    for length in (128, 256):
        with META:
            module, x = Attention(True), torch.empty(1, length, 16)
        kept.append(count(module, (x,), {}).kept)
    assert kept[1] < 2.1 * kept[0]


CALLS: dict[str, Callable[[], Any]] = {
    "sd3": tiny.tiny_sd3,
    "flux": tiny.tiny_flux,
    "wan": tiny.tiny_wan,
    "sd": tiny.tiny_sd,
}


def called(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A tiny denoiser, and what its own pipeline calls it with."""
    pipe = CALLS[name]()
    module, calls = tiny.denoiser(pipe), []
    hook = module.register_forward_pre_hook(
        lambda m, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    with torch.no_grad():
        pipe("a b", num_inference_steps=1, output_type="latent", **tiny.CALL[name])
    hook.remove()
    return module, *calls[0]


def _forward_flops(q: Any, k: Any, v: Any, *args: Any, out_shape: Any = None, **kw: Any) -> int:
    return sdpa_flop_count(q, k, v)


def _backward_flops(g: Any, q: Any, k: Any, v: Any, *args: Any, **kw: Any) -> int:
    return sdpa_backward_flop_count(g, q, k, v)


ON_CPU = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _forward_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward_flops,
}
"""The CPU's attention, of which torch's counter has no formula, by those of the other kernels."""


def really_kept(
    module: Any, args: Any, kwargs: Any, *, checkpointing: bool = False
) -> tuple[int, int, int]:
    """Bytes autograd keeps on the CPU, by address, and operations forward and backward."""
    weights = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    saved: dict[int, Any] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage
        return t

    def unit(run: Any, *given: Any) -> Any:
        for tensor in (t for some in given if isinstance(some, tuple) for t in some):
            pack(tensor)  # in a tuple: checkpointing holds it, but saves it past the hooks
        return checkpoint(run, *given, use_reentrant=False)

    if checkpointing:
        module.enable_gradient_checkpointing(unit)
    flops = []
    with FlopCounterMode(display=False, custom_mapping=ON_CPU) as counter:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            output = module(*args, **kwargs)[0]
        flops.append(counter.get_total_flops())
        kept = sum(s.nbytes() for s in saved.values())
        output.sum().backward()
        flops.append(counter.get_total_flops() - flops[0])
    return kept, *flops


def to_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(META)
    if isinstance(value, dict):
        return {k: to_meta(v) for k, v in value.items()}
    return tuple(map(to_meta, value)) if isinstance(value, (tuple, list)) else value


@pytest.mark.parametrize("name", CALLS)
def test_as_a_real_run(name: str) -> None:
    """The same network on the CPU: operations equal; bytes to 2% of its kernels' own choices
    (what attention and norms keep besides their inputs and outputs)."""
    module, args, kwargs = called(name)
    kept, forward, backward = really_kept(module, args, kwargs)
    module.to(META)
    found = count(module, to_meta(args), to_meta(kwargs))
    assert found.forward.flops == forward
    assert found.backward.flops == backward
    assert found.kept == pytest.approx(kept, rel=0.02)


@pytest.mark.parametrize("name", CALLS)
def test_checkpointing_as_a_real_run(name: str) -> None:
    """One forward that only watches the units says what torch's own checkpointing keeps."""
    module, args, kwargs = called(name)
    plain = really_kept(module, args, kwargs)
    module.zero_grad()
    kept, _, backward = really_kept(module, args, kwargs, checkpointing=True)
    module.disable_gradient_checkpointing()
    module.to(META)
    found = count(module, to_meta(args), to_meta(kwargs))
    assert found.kept_checkpointed is not None
    assert found.kept_checkpointed < found.kept
    assert found.kept_checkpointed == pytest.approx(kept, rel=0.02)
    # torch stops recomputing a unit at the last tensor that is needed; we count all of it
    recomputed = backward - plain[2]
    assert recomputed <= found.recompute.flops <= plain[1]
    assert 0 < found.unit < found.kept
    assert not any(getattr(m, "gradient_checkpointing", False) for m in module.modules())


def test_casting_keeps_what_from_pretrained_keeps() -> None:
    module = tiny.tiny_wan().transformer
    cast(module, torch.bfloat16)
    dtypes = {name: p.dtype for name, p in module.named_parameters()}
    assert dtypes["blocks.0.scale_shift_table"] == torch.float32
    assert dtypes["blocks.0.attn1.to_q.weight"] == torch.bfloat16


def test_the_roofline() -> None:
    work = Work({(100, 10, 4): 2, (0, 50, 2): 3})
    assert work.flops == 200
    assert work.traffic == 170
    # at 10 operations and 5 bytes a second: max(10, 2) twice, then max(0, 10) three times
    assert work.seconds(lambda width: 10.0, 5.0) == 2 * 10 + 3 * 10
    assert work.seconds(lambda width: 10.0 if width == 4 else 1.0, 1.0) == 2 * 10 + 3 * 50
    assert work.times(2).flops == 400


def test_calls_of_a_step_add_up() -> None:
    with META:
        module, x = Mlp(), torch.empty(B, WIDTH)
    one = count(module, (x,), {})
    two = one.times(2)
    assert (two.kept, two.forward.flops) == (2 * one.kept, 2 * one.forward.flops)
    assert two.forward_peak == one.forward_peak, "one after the other"


def test_peak_of_a_decoder() -> None:
    with META:
        module, x = Mlp(), torch.empty(B, WIDTH)
    work, peak = peak_of(lambda: module(x))
    assert (work.flops, peak) == (4 * B * WIDTH * INNER, 4 * 2 * B * INNER)
