"""What is checked at a denoiser's call."""

from __future__ import annotations

import pytest
import tiny
import torch

from leangrpo.data import SampleKey
from leangrpo.errors import LeanError
from leangrpo.pipeline import Sampling
from leangrpo.policy import Policy
from leangrpo.reweight import Reweight

KEYS = [SampleKey(0, 0, g) for g in range(3)]


def sample(policy: Policy) -> None:
    schedule = Reweight(policy)
    schedule.begin(3, 1)
    policy.sample(
        ["a cat"] * 3,
        KEYS,
        selected=[1],
        grad=True,
        capture=schedule.capture,
        on_transition=schedule.transition,
        decode=False,
    )


def test_rows_of_a_sample_beside_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where guidance repeats each sample in place, its gradients would go to other samples."""
    call = {"height": 16, "width": 16, "max_sequence_length": 16}
    policy = Policy(tiny.tiny_sd3(), Sampling(steps=3, guidance=4.0, call=call))
    sample(policy)  # as the pipeline does it

    cat = torch.cat

    def repeat(tensors: list[torch.Tensor], *args: int, **kwargs: int) -> torch.Tensor:
        if len(tensors) == 2 and tensors[0] is tensors[1]:
            return tensors[0].repeat_interleave(2, 0)
        return cat(tensors, *args, **kwargs)

    policy.detach()
    policy = Policy(tiny.tiny_sd3(), Sampling(steps=3, guidance=4.0, call=call))
    monkeypatch.setattr(torch, "cat", repeat)
    with pytest.raises(LeanError, match="beside each other"):
        sample(policy)
