"""The real loading path, on folders in diffusers format."""

from __future__ import annotations

import json
import shutil

import pytest
import tiny
import torch

from leangrpo.data import SampleKey
from leangrpo.errors import LeanError
from leangrpo.loading import embedded_folder, load_pipeline, make_trainable, place
from leangrpo.policy import Policy, Sampling


def test_a_folder_loads_in_the_wanted_dtype(tmp_path) -> None:
    folder = tiny.save(tiny.tiny_sd3(), tmp_path / "sd3")
    pipe = load_pipeline(str(folder), dtype=torch.bfloat16)
    assert next(pipe.transformer.parameters()).dtype == torch.bfloat16
    assert next(pipe.vae.parameters()).dtype == torch.float32


def test_the_embedded_pipeline_does_without_a_third_encoder() -> None:
    pipe = load_pipeline("embedded")
    assert pipe.text_encoder_3 is None
    assert next(pipe.transformer.parameters()).dtype == torch.float32


def test_mistakes_are_explained(tmp_path) -> None:
    with pytest.raises(LeanError, match=r"`model\.pipeline` is '.*nowhere'.*cannot load it"):
        load_pipeline(str(tmp_path / "nowhere"))
    broken = tmp_path / "broken"
    shutil.copytree(embedded_folder(), broken)
    index = json.loads((broken / "model_index.json").read_text())
    index["scheduler"] = [None, None]
    (broken / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(LeanError, match=r"model\.pipeline.*scheduler"):
        load_pipeline(str(broken))


def test_full_training_leaves_everything_else_frozen() -> None:
    pipe = tiny.tiny_sd3()
    make_trainable(pipe, "full")
    assert all(p.requires_grad for p in pipe.transformer.parameters())
    assert not any(p.requires_grad for p in pipe.vae.parameters())
    assert not any(p.requires_grad for p in pipe.text_encoder.parameters())


def test_a_lora_is_float32_seeded_and_alone() -> None:
    def lora(seed: int) -> dict[str, torch.Tensor]:
        pipe = tiny.tiny_sd3().to(torch.bfloat16)
        torch.manual_seed(99)
        make_trainable(pipe, "lora", rank=2, alpha=4, seed=seed)
        assert torch.initial_seed() == 99, "the global generator is left alone"
        return {n: p for n, p in pipe.transformer.named_parameters() if p.requires_grad}

    one, same, other = lora(0), lora(0), lora(1)
    assert all("lora_" in n and p.dtype == torch.float32 for n, p in one.items())
    assert all(torch.equal(p, same[n]) for n, p in one.items())
    assert any(not torch.equal(p, other[n]) for n, p in one.items())


def test_targets_of_ones_own() -> None:
    pipe = tiny.tiny_sd3()
    make_trainable(pipe, "lora", rank=2, targets=["to_q"])
    names = [n for n, p in pipe.transformer.named_parameters() if p.requires_grad]
    assert names
    assert all("to_q.lora_" in n for n in names)
    with pytest.raises(LeanError, match=r"model\.lora\.targets"):
        make_trainable(tiny.tiny_sd3(), "lora", targets=["no_such_layer"])


def test_offloaded_components_come_for_their_work_and_go_again() -> None:
    """The pictures are the same; the encoders work once a prompt, the decoder once a picture."""
    images, moves = [], []
    for offloaded in (False, True):
        pipe = load_pipeline("embedded")
        place(pipe, "cpu", offload=offloaded)
        policy = Policy(pipe, Sampling(2, guidance=1.0, call={"max_sequence_length": 0}))
        for name, part in pipe.components.items():
            assert hasattr(part, "_hf_hook") == (
                offloaded and isinstance(part, torch.nn.Module) and name != "transformer"
            )
        if offloaded:
            to = pipe.vae.to
            pipe.vae.to = lambda device, to=to: (moves.append(device), to(device))[1]
        keys = [SampleKey(0, 0, g) for g in range(2)]
        images.append(policy.sample(["the number 47 in blue"] * 2, keys).images)
    assert torch.equal(*images)
    assert "cpu" in moves
