"""The running mean of the weights."""

from __future__ import annotations

import tiny
import torch

from leangrpo.ema import Ema
from leangrpo.loading import make_trainable
from leangrpo.policy import Policy, Sampling


def policy() -> Policy:
    pipe = tiny.tiny_sd3()
    make_trainable(pipe, "lora", rank=2, alpha=4)
    return Policy(pipe, Sampling(2, guidance=1.0, call=dict(tiny.CALL["sd3"])))


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def test_the_decay_is_flow_grpos() -> None:
    """min(decay, (1 + n)/(10 + n)), one step every `every` updates."""
    p = policy()
    ema = Ema(p, 0.3, every=2)
    expected = flat(p.parameters).clone()
    for update in range(1, 7):
        with torch.no_grad():
            for q in p.parameters:
                q.add_(0.1 * update)
        ema.step(update)
        if update % 2 == 0:
            n = update // 2
            decay = min(0.3, (1 + n) / (10 + n))
            expected = decay * expected + (1 - decay) * flat(p.parameters)
    torch.testing.assert_close(flat(ema.mean), expected, rtol=1e-6, atol=1e-7)


def test_a_swap_is_undone_bitwise_and_seen_by_the_guard() -> None:
    p = policy()
    ema = Ema(p, 0.9)
    with torch.no_grad():
        for q in p.parameters:
            q.add_(1.0)
    names = [name for name, _ in p.named_parameters()]
    before, version = flat(p.parameters), p.version
    with ema.in_place():
        assert torch.equal(flat(p.parameters), flat(ema.mean))
    assert torch.equal(flat(p.parameters), before)
    assert [name for name, _ in p.named_parameters()] == names
    assert p.version > version
