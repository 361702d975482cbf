"""Weights: where they come from, what is refused, and open_clip's layout."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from reward_twins import PROMPTS, clip_folder, open_clip_layout
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, CLIPModel

from leangrpo.errors import LeanError
from leangrpo.weights import fill, open_clip_to_transformers, pretrained, read_weights


def tower(weights: dict[str, Tensor], prefix: str, x: Tensor, heads: int, mask: Tensor | None):
    """open_clip's residual attention blocks on `(B, L, D)`, written down from its description."""
    for n in range(2):
        w = {k: weights[f"{prefix}transformer.resblocks.{n}.{k}"] for k in KEYS}
        width = x.shape[-1]
        normed = F.layer_norm(x, (width,), w["ln_1.weight"], w["ln_1.bias"]).transpose(0, 1)
        seen, _ = F.multi_head_attention_forward(
            *(normed, normed, normed, width, heads, w["attn.in_proj_weight"]),
            *(w["attn.in_proj_bias"], None, None, False, 0.0),
            *(w["attn.out_proj.weight"], w["attn.out_proj.bias"]),
            attn_mask=mask,
            need_weights=False,
        )
        x = x + seen.transpose(0, 1)
        normed = F.layer_norm(x, (width,), w["ln_2.weight"], w["ln_2.bias"])
        inner = F.gelu(F.linear(normed, w["mlp.c_fc.weight"], w["mlp.c_fc.bias"]))
        x = x + F.linear(inner, w["mlp.c_proj.weight"], w["mlp.c_proj.bias"])
    return x


KEYS = (
    *("attn.in_proj_weight", "attn.in_proj_bias", "attn.out_proj.weight", "attn.out_proj.bias"),
    *("mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight", "mlp.c_proj.bias"),
    *("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias"),
)


def test_open_clip_layout_gives_the_same_embeddings(tmp_path: Path) -> None:
    folder = clip_folder(tmp_path / "clip")
    model = CLIPModel.from_pretrained(folder).eval()
    w = open_clip_layout(model.state_dict())
    fill("weights", "file", model, open_clip_to_transformers({**w, "attn_mask": torch.zeros(2)}))
    pixels = torch.randn(2, 3, 28, 28)
    with torch.no_grad():
        x = F.conv2d(pixels, w["visual.conv1.weight"], stride=14).flatten(2).transpose(1, 2)
        first = w["visual.class_embedding"].expand(2, 1, -1)
        x = torch.cat([first, x], 1) + w["visual.positional_embedding"]
        x = F.layer_norm(x, (48,), w["visual.ln_pre.weight"], w["visual.ln_pre.bias"])
        x = tower(w, "visual.", x, 3, None)[:, 0]
        x = F.layer_norm(x, (48,), w["visual.ln_post.weight"], w["visual.ln_post.bias"])
        mine = model.get_image_features(pixel_values=pixels).pooler_output
        # Two float32 evaluations of the same sums: a few hundred roundings of 6e-8.
        torch.testing.assert_close(mine, x @ w["visual.proj"], rtol=1e-4, atol=1e-4)

        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = tokenizer(PROMPTS, padding=True, return_tensors="pt")["input_ids"]
        length = ids.shape[1]
        causal = torch.full((length, length), -torch.inf).triu(1)
        y = w["token_embedding.weight"][ids] + w["positional_embedding"][:length]
        y = tower(w, "", y, 2, causal)
        y = F.layer_norm(y, (32,), w["ln_final.weight"], w["ln_final.bias"])
        ends = (ids == tokenizer.eos_token_id).int().argmax(-1)
        y = y[torch.arange(len(ids)), ends] @ w["text_projection"]
        mine = model.get_text_features(input_ids=ids).pooler_output
        torch.testing.assert_close(mine, y, rtol=1e-4, atol=1e-4)


class Evil:
    """What runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, ("echo it ran > ran.txt",)


def test_nothing_of_a_file_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Evil()}, "evil.pt")
    with pytest.raises(LeanError, match="it cannot be read as plain tensors"):
        read_weights("weights", "evil.pt")
    assert not Path("ran.txt").exists()


def test_plain_files_are_read(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.ones(2)}
    save_file(tensors, tmp_path / "a.safetensors")
    torch.save({"state_dict": tensors, "epoch": 3}, tmp_path / "a.pt")
    for name in ("a.safetensors", "a.pt"):
        found = read_weights("weights", str(tmp_path / name))
        assert found.keys() == tensors.keys() and torch.equal(found["a.weight"], torch.ones(2))
    torch.save({"a": 1}, tmp_path / "b.pt")
    (tmp_path / "c.safetensors").write_bytes(b"\x00" * 20)
    for name, text in (
        ("b.pt", "it holds no mapping of names to tensors"),
        ("c.safetensors", "it cannot be read as plain tensors"),
        ("none", "there is no such file, and it has not the form owner/repository/file"),
    ):
        with pytest.raises(LeanError, match=text):
            read_weights("weights", str(tmp_path / name))
    with pytest.raises(LeanError, match="it cannot be loaded"):
        read_weights("weights", "owner/repository/file.pt")  # there is no hub in tests


def test_every_tensor_has_its_place() -> None:
    module = nn.Linear(2, 3)
    own = {"weight": torch.ones(3, 2), "bias": torch.zeros(3)}
    fill("weights", "f", module, own)
    assert torch.equal(module.weight, torch.ones(3, 2))
    for weights, text in (
        ({"weight": own["weight"]}, "it lacks 1 tensors of the model, the first of them bias"),
        ({**own, "more": own["bias"]}, "it has besides 1 tensors"),
        ({**own, "bias": torch.zeros(4)}, "it misshapes 1 tensors"),
    ):
        with pytest.raises(LeanError, match=text):
            fill("weights", "f", module, weights)


def test_a_folder_of_pickles_is_refused(tmp_path: Path) -> None:
    folder = clip_folder(tmp_path / "clip")
    weights = CLIPModel.from_pretrained(folder).state_dict()
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(LeanError, match="model.safetensors"):
        pretrained("model", str(folder), CLIPModel, use_safetensors=True)
