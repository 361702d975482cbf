"""Rewards on other vision-language models: ImageReward (BLIP) and HPSv3 (Qwen2-VL)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from .errors import problem
from .reward_clip import AestheticHead
from .reward_models import ModelReward, option
from .settings import Reward as Settings
from .weights import fill, pretrained, read_weights

MEAN, STD = 0.16717362830052426, 1.0333394966054072
"""ImageReward's published normalisation (THUDM/ImageReward, `ImageReward.py`)."""

TEXT_LENGTH = 35
"""Tokens of a prompt that ImageReward reads."""


class ImageRewardNet(nn.Module):
    """BLIP's image encoder, its text encoder across it, and a linear head on the first token.

    Sizes are those of the weights: heads of 64, as in BLIP large (ViT-L/16) and BERT base.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        from transformers import BlipTextConfig, BlipVisionConfig
        from transformers.models.blip.modeling_blip import BlipVisionModel
        from transformers.models.blip.modeling_blip_text import BlipTextModel

        super().__init__()
        patch = weights["vision.embeddings.patch_embedding.weight"]
        places = weights["vision.embeddings.position_embedding"].shape[1] - 1
        words = weights["text.embeddings.word_embeddings.weight"]
        width, inner = patch.shape[0], "text.encoder.layer.0.intermediate.dense.weight"
        self.size = int(places**0.5) * patch.shape[-1]
        self.vision = BlipVisionModel(
            BlipVisionConfig(
                hidden_size=width,
                intermediate_size=weights["vision.encoder.layers.0.mlp.fc1.weight"].shape[0],
                num_hidden_layers=_layers(weights, "vision.encoder.layers."),
                num_attention_heads=width // 64,
                image_size=self.size,
                patch_size=patch.shape[-1],
                layer_norm_eps=1e-6,
            )
        )
        self.text = BlipTextModel(
            BlipTextConfig(
                vocab_size=words.shape[0],
                hidden_size=words.shape[1],
                encoder_hidden_size=width,
                intermediate_size=weights[inner].shape[0],
                num_hidden_layers=_layers(weights, "text.encoder.layer."),
                num_attention_heads=words.shape[1] // 64,
                max_position_embeddings=weights["text.embeddings.position_embeddings.weight"].shape[
                    0
                ],
                layer_norm_eps=1e-12,
            ),
            add_pooling_layer=False,
        )
        self.mlp = AestheticHead(words.shape[1])

    def forward(self, pixels: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """Normalised scores `(B,)` of `(B, 3, S, S)` pictures and `(B, L)` tokens."""
        seen = self.vision(pixels).last_hidden_state
        read = self.text(input_ids=tokens, attention_mask=mask, encoder_hidden_states=seen)
        score: Tensor = self.mlp(read.last_hidden_state[:, 0]).float()
        return (score - MEAN) / STD


def _layers(weights: Mapping[str, Tensor], prefix: str) -> int:
    found = [re.match(re.escape(prefix) + r"(\d+)\.", name) for name in weights]
    return max((int(one[1]) for one in found if one), default=-1) + 1


def blip_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """ImageReward's weights (salesforce/BLIP: `vit.py`, `med.py`) under `ImageRewardNet`'s names.

    The projections of BLIP's contrastive loss, and constants, are left out.
    """
    rules = (
        (r"^blip\.visual_encoder\.blocks\.(\d+)\.", r"vision.encoder.layers.\1."),
        (r"^blip\.visual_encoder\.patch_embed\.proj\.", "vision.embeddings.patch_embedding."),
        (r"^blip\.visual_encoder\.cls_token$", "vision.embeddings.class_embedding"),
        (r"^blip\.visual_encoder\.pos_embed$", "vision.embeddings.position_embedding"),
        (r"^blip\.visual_encoder\.norm\.", "vision.post_layernorm."),
        (r"^blip\.text_encoder\.", "text."),
        (r"^(vision\.encoder\.layers\.\d+)\.norm([12])\.", r"\1.layer_norm\2."),
        (r"^(vision\.encoder\.layers\.\d+)\.attn\.qkv\.", r"\1.self_attn.qkv."),
        (r"^(vision\.encoder\.layers\.\d+)\.attn\.proj\.", r"\1.self_attn.projection."),
    )
    found = {}
    for name, tensor in weights.items():
        for pattern, place in rules:
            name = re.sub(pattern, place, name)
        if not name.startswith("blip.") and not name.endswith("position_ids"):
            found[name] = tensor.float()
    return found


def imagereward(settings: Settings) -> ModelReward:
    """(mlp(BLIP's first text token) - 0.1672) / 1.0333 (THUDM/ImageReward, version 1.0)."""
    from transformers import AutoTokenizer
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    file = option(settings, "weights")
    weights = blip_names(read_weights("rewards.weights", file))
    try:
        network = ImageRewardNet(weights)
    except KeyError as error:
        rule = f"it has no {error.args[0]}, so it is no ImageReward"
        raise problem("rewards.weights", file, rule) from None
    fill("rewards.weights", file, network, weights)
    tokenize = pretrained("rewards.tokenizer", option(settings, "tokenizer"), AutoTokenizer)
    size = network.size
    prepare = CLIPImageProcessorPil(
        size={"shortest_edge": size}, crop_size={"height": size, "width": size}
    )

    def score(pictures: list[Image.Image], prompts: list[str], metadata: list[Any]) -> Tensor:
        tokens = tokenize(
            prompts,
            padding="max_length",
            truncation=True,
            max_length=TEXT_LENGTH,
            return_tensors="pt",
        )
        pixels = prepare(images=pictures, return_tensors="pt")["pixel_values"]
        at = network.mlp.layers[0].weight
        where = at.device
        found: Tensor = network(
            pixels.to(where, at.dtype),
            tokens["input_ids"].to(where),
            tokens["attention_mask"].to(where),
        )
        return found

    return ModelReward(settings, [network], score)


REWARD_TOKEN = "<|Reward|>"
"""The token whose hidden state HPSv3's head reads."""

PIXELS = 256 * 28 * 28
"""Pixels that HPSv3 resizes a picture to, as nearly as its shape and multiples of 28 allow."""


class Hpsv3Net(nn.Module):
    """Qwen2-VL without its word head, and HPSv3's: hidden to 1024 to 16 to (mean, log-variance).

    Source: MizzenAI/HPSv3, `qwen2vl_trainer.py`, head `ranknet` (dropout acts in training only).
    """

    def __init__(self, config: Any) -> None:
        from transformers import Qwen2VLModel

        super().__init__()
        self.model = Qwen2VLModel(config)
        width = config.text_config.hidden_size
        self.rm_head = nn.Sequential(
            *(nn.Linear(width, 1024), nn.ReLU(), nn.Identity()),
            *(nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2)),
        )

    def forward(self, token: int, **inputs: Tensor) -> Tensor:
        """The mean `(B,)` at each sequence's one reward token."""
        hidden = self.model(**inputs).last_hidden_state
        at = inputs["input_ids"] == token
        found: Tensor = self.rm_head(hidden[at])
        return found[:, 0]


def hpsv3_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """HPSv3's weights under today's Qwen2VLModel names; the word head is left out."""
    found = {}
    for name, tensor in weights.items():
        name = re.sub(r"^visual\.", "model.visual.", name)
        name = re.sub(r"^model\.(?!visual\.|language_model\.)", "model.language_model.", name)
        if not name.startswith("lm_head."):
            found[name] = tensor
    return found


def hpsv3(settings: Settings) -> ModelReward:
    """The head's mean, raw (MizzenAI/HPSv3, `inference.py`: the first of its two outputs).

    `template` is the file with the instruction the weights were trained with, in which `{prompt}`
    stands for the prompt and `<|Reward|>` occurs once.
    """
    from transformers import AutoConfig, AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    source, file = option(settings, "model"), option(settings, "weights")
    template = Path(option(settings, "template")).expanduser().read_text(encoding="utf-8")
    config = pretrained("rewards.model", source, AutoConfig)
    tokenize = pretrained("rewards.model", source, AutoTokenizer, padding_side="right")
    prepare = pretrained(
        "rewards.model", source, Qwen2VLImageProcessorPil, min_pixels=PIXELS, max_pixels=PIXELS
    )
    tokenize.add_special_tokens({"additional_special_tokens": [REWARD_TOKEN]})
    token = int(tokenize.convert_tokens_to_ids(REWARD_TOKEN))
    weights = hpsv3_names(read_weights("rewards.weights", file))
    words = "model.language_model.embed_tokens.weight"
    if words in weights:
        config.text_config.vocab_size = weights[words].shape[0]
    with torch.device("meta"):
        network = Hpsv3Net(config)
    fill("rewards.weights", file, network, weights)
    _restore_buffers(network, config)
    merge = config.vision_config.spatial_merge_size**2
    image = tokenize.convert_ids_to_tokens(config.image_token_id)

    def score(pictures: list[Image.Image], prompts: list[str], metadata: list[Any]) -> Tensor:
        seen = prepare(images=pictures, return_tensors="pt")
        counts = (seen["image_grid_thw"].prod(-1) // merge).tolist()
        texts = [
            _chat(template.replace("{prompt}", prompt), image, count)
            for prompt, count in zip(prompts, counts, strict=True)
        ]
        tokens = tokenize(texts, padding=True, return_tensors="pt")
        at = network.rm_head[0].weight
        ids = tokens["input_ids"].to(at.device)
        found: Tensor = network(
            token,
            input_ids=ids,
            attention_mask=tokens["attention_mask"].to(at.device),
            mm_token_type_ids=(ids == config.image_token_id).int(),
            pixel_values=seen["pixel_values"].to(at.device, at.dtype),
            image_grid_thw=seen["image_grid_thw"].to(at.device),
        )
        return found

    return ModelReward(settings, [network], score)


def _chat(text: str, image: str, count: int) -> str:
    """Qwen2-VL's chat form of one picture and one instruction, with the answer begun."""
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    picture = f"<|vision_start|>{image * count}<|vision_end|>"
    return f"{system}<|im_start|>user\n{picture}{text}<|im_end|>\n<|im_start|>assistant\n"


def _restore_buffers(network: Hpsv3Net, config: Any) -> None:
    """Recompute what no file has: the rotary frequencies, which were made on the meta device."""
    for name, module in network.named_modules():
        if any(b.is_meta for b in module.buffers(recurse=False)):
            vision = name.startswith("model.visual.")
            fresh = type(module)(config.vision_config if vision else config.text_config)
            for key, value in fresh.named_buffers(recurse=False):
                module.register_buffer(key, value, persistent=False)
