"""ImageReward and HPSv3 on random weights of the published layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from reward_twins import PROMPTS, pictures, word_tokenizer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, BlipTextConfig
from transformers.models.blip.modeling_blip_text import BlipTextModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from leangrpo.errors import LeanError
from leangrpo.reward_models import as_pictures
from leangrpo.reward_vision import PIXELS
from leangrpo.rewards import load_reward
from leangrpo.settings import Reward

WORDS = "the number 47 80 13 in blue red green system user assistant You are a helpful . how good"


def vit_weights(width: int, layers: int, patch: int, places: int) -> dict[str, Tensor]:
    """Random tensors of the names that timm's and BLIP's VisionTransformer has."""
    shapes: dict[str, tuple[int, ...]] = {
        **{"cls_token": (1, 1, width), "pos_embed": (1, places + 1, width)},
        **{"patch_embed.proj.weight": (width, 3, patch, patch), "patch_embed.proj.bias": (width,)},
        **{"norm.weight": (width,), "norm.bias": (width,)},
    }
    for n in range(layers):
        for name, out, into in (
            *(("attn.qkv", 3 * width, width), ("attn.proj", width, width)),
            *(("mlp.fc1", 2 * width, width), ("mlp.fc2", width, 2 * width)),
        ):
            shapes |= {f"blocks.{n}.{name}.weight": (out, into), f"blocks.{n}.{name}.bias": (out,)}
        for name in ("norm1", "norm2"):
            shapes |= {f"blocks.{n}.{name}.{k}": (width,) for k in ("weight", "bias")}
    return {name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}


def vit(w: dict[str, Tensor], pixels: Tensor, layers: int, patch: int, heads: int) -> Tensor:
    """BLIP's VisionTransformer, written down from its description (layer norms of eps 1e-6)."""
    width = w["norm.weight"].shape[0]

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (width,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-6)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    x = F.conv2d(pixels, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride=patch)
    x = torch.cat([w["cls_token"].expand(len(x), -1, -1), x.flatten(2).transpose(1, 2)], 1)
    x = x + w["pos_embed"]
    for n in range(layers):
        qkv = linear(norm(x, f"blocks.{n}.norm1"), f"blocks.{n}.attn.qkv")
        q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + linear(seen, f"blocks.{n}.attn.proj")
        inner = F.gelu(linear(norm(x, f"blocks.{n}.norm2"), f"blocks.{n}.mlp.fc1"))
        x = x + linear(inner, f"blocks.{n}.mlp.fc2")
    return norm(x, "norm")


def test_imagereward(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokenizer = word_tokenizer(tmp_path / "bert", WORDS, ends=True)
    image = vit_weights(128, 2, 14, 4)
    text = BlipTextModel(
        BlipTextConfig(
            **{"vocab_size": 40, "hidden_size": 64, "encoder_hidden_size": 128},
            **{"intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 1},
            **{"max_position_embeddings": 40, "layer_norm_eps": 1e-12},
        ),
        add_pooling_layer=False,
    ).eval()
    for parameter in text.parameters():
        nn.init.normal_(parameter, std=0.2)
    layers = [nn.Linear(64, 1024), nn.Linear(1024, 128), nn.Linear(128, 64)]
    head = nn.Sequential(*layers, nn.Linear(64, 16), nn.Linear(16, 1))
    names = ("0", "2", "4", "6", "7")
    published = {f"blip.visual_encoder.{k}": v for k, v in image.items()}
    published |= {f"blip.text_encoder.{k}": v for k, v in text.state_dict().items()}
    published |= {
        f"mlp.layers.{place}.{k}": v
        for place, layer in zip(names, head, strict=True)
        for k, v in layer.state_dict().items()
    }
    published["blip.text_encoder.embeddings.position_ids"] = torch.arange(40)[None]
    published["blip.vision_proj.weight"] = torch.zeros(3, 3)  # of another loss
    torch.save(published, tmp_path / "ImageReward.pt")

    settings = Reward(
        name="imagereward", weights=str(tmp_path / "ImageReward.pt"), tokenizer=str(tokenizer)
    )
    images = pictures()
    mine = load_reward(settings)(images, PROMPTS, [{}] * 3)

    prepare = CLIPImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
    )
    pixels = prepare(images=as_pictures(images), return_tensors="pt")["pixel_values"]
    tokens = AutoTokenizer.from_pretrained(tokenizer)(
        PROMPTS, padding="max_length", max_length=35, return_tensors="pt"
    )
    with torch.no_grad():
        seen = vit(image, pixels, 2, 14, 2)
        read = text(
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
            encoder_hidden_states=seen,
        ).last_hidden_state[:, 0]
        expected = (head(read)[:, 0] - 0.16717362830052426) / 1.0333394966054072
    assert expected.std() > 1e-3
    # Two float32 evaluations, whose attention is summed in another order.
    torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-4)
    torch.save({"a": torch.ones(1)}, tmp_path / "other.pt")
    with pytest.raises(LeanError, match="so it is no ImageReward"):
        load_reward(Reward(name="imagereward", weights=str(tmp_path / "other.pt")))


def qwen(tmp_path: Path):
    """A Qwen2-VL with a reward head: its folder, its file under the published names, the model."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    torch.manual_seed(0)
    folder = word_tokenizer(tmp_path / "qwen", WORDS)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    named = {
        "image_token_id": "<|image_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    config = Qwen2VLConfig(
        text_config={
            **{"vocab_size": len(tokenizer) + 1, "hidden_size": 32, "intermediate_size": 48},
            **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
            **{
                "bos_token_id": None,
                "eos_token_id": None,
                "max_position_embeddings": 1024,
                "tie_word_embeddings": False,
            },
            "rope_parameters": {
                **{"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
            },
        },
        vision_config={
            **{"embed_dim": 32, "hidden_size": 32, "depth": 1, "num_heads": 2},
            **{"patch_size": 14, "mlp_ratio": 2},
        },
        **{key: tokenizer.convert_tokens_to_ids(token) for key, token in named.items()},
    )
    model = Qwen2VLForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    head = nn.Sequential(
        *(nn.Linear(32, 1024), nn.ReLU(), nn.Dropout(0.05)),
        *(nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2)),
    ).eval()
    weights = {f"rm_head.{k}": v for k, v in head.state_dict().items()}
    for name, tensor in model.state_dict().items():
        name = name.replace("model.visual.", "visual.")  # as transformers wrote them before 4.52
        weights[name.replace("model.language_model.", "model.")] = tensor.contiguous().clone()
    save_file(weights, tmp_path / "HPSv3.safetensors")
    config.save_pretrained(folder)
    Qwen2VLImageProcessorPil().save_pretrained(folder)
    return folder, model, head


def test_hpsv3(tmp_path: Path) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    folder, model, head = qwen(tmp_path)
    template = tmp_path / "instruction.txt"
    template.write_text("how good {prompt} <|Reward|>", encoding="utf-8")
    settings = Reward(
        name="hpsv3",
        model=str(folder),
        weights=str(tmp_path / "HPSv3.safetensors"),
        template=str(template),
        batch_size=2,
    )
    images, prompts = pictures(3), ["the number 47 in blue", "red", "the 13"]
    mine = load_reward(settings)(images, prompts, [{}] * 3)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|Reward|>"]})
    reward = tokenizer.convert_tokens_to_ids("<|Reward|>")
    prepare = Qwen2VLImageProcessorPil(min_pixels=PIXELS, max_pixels=PIXELS)
    expected = []
    for picture, prompt in zip(as_pictures(images), prompts, strict=True):
        seen = prepare(images=[picture], return_tensors="pt")
        count = int(seen["image_grid_thw"].prod()) // 4
        assert 256 <= count < 300  # as near above 256 as multiples of 28 allow
        text = (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
            f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>how good {prompt} <|Reward|>"
            "<|im_end|>\n<|im_start|>assistant\n"
        )
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        assert int((ids == model.config.image_token_id).sum()) == count
        with torch.no_grad():
            hidden = model(
                input_ids=ids,
                mm_token_type_ids=(ids == model.config.image_token_id).int(),
                output_hidden_states=True,
                **seen,
            ).hidden_states[-1]
            expected.append(head(hidden[0, ids[0] == reward])[0, 0])
    assert torch.stack(expected).std() > 1e-5
    torch.testing.assert_close(mine, torch.stack(expected), rtol=1e-4, atol=1e-5)
