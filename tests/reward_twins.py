"""Tiny random models of the classes that reward models have, saved as their folders are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor

import leangrpo

TOKENIZER = Path(leangrpo.__file__).parent / "embedded" / "pipeline" / "tokenizer"
PROMPTS = ["the number 47 in blue", "the number 80 in red", "the number 13 in green"]


def pictures(num: int = 3, height: int = 40, width: int = 52) -> Tensor:
    """Random smooth pictures in 8 bits, `(num, 3, H, W)` in [0, 1]."""
    coarse = torch.rand(num, 3, 5, 6, generator=torch.Generator().manual_seed(1))
    fine = torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear")
    return (fine * 255).round() / 255


def clip_folder(folder: Path, seed: int = 0, size: int = 28) -> Path:
    """A CLIPModel with its tokenizer and preprocessing."""
    from transformers import AutoTokenizer, CLIPConfig, CLIPModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    text: dict[str, Any] = {
        **{"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48},
        **{"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 12},
        **{"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id},
        **{"pad_token_id": tokenizer.pad_token_id, "hidden_act": "gelu"},
    }
    vision = {
        **{"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 3, "image_size": size, "patch_size": 14, "hidden_act": "gelu"},
    }
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)
    network = CLIPModel(config)
    for parameter in network.parameters():  # its own start is so small that all cosines are alike
        torch.nn.init.normal_(parameter, std=0.3)
    network.logit_scale.data.fill_(3.0)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    crop = {"height": size, "width": size}
    CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size=crop).save_pretrained(folder)
    return folder


def word_tokenizer(folder: Path, words: str, *, ends: bool = False) -> Path:
    """A tokenizer of whole words; `ends`: [CLS] before and [SEP] after, as BERT's."""
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocab = {word: i for i, word in enumerate(dict.fromkeys([*special, *words.split()]))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if ends:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]"
    )
    if not ends:
        marks = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
        made.add_special_tokens({"additional_special_tokens": [*marks, "<|image_pad|>"]})
    made.save_pretrained(folder)
    return folder


def yolos_folder(folder: Path, seed: int = 0) -> Path:
    """A YolosForObjectDetection of three classes."""
    from transformers import YolosConfig, YolosForObjectDetection
    from transformers.models.detr.image_processing_pil_detr import DetrImageProcessorPil

    torch.manual_seed(seed)
    config = YolosConfig(
        **{"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
        **{"intermediate_size": 32, "image_size": [32, 32], "patch_size": 16},
        num_detection_tokens=6,
        id2label={0: "dog", 1: "mouse", 2: "bench"},
        label2id={"dog": 0, "mouse": 1, "bench": 2},
    )
    network = YolosForObjectDetection(config)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    network.save_pretrained(folder)
    size = {"height": 32, "width": 32}
    DetrImageProcessorPil(size=size, do_pad=False).save_pretrained(folder)
    return folder


def open_clip_layout(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Random tensors of open_clip's names and shapes, of the sizes of a CLIPModel's weights."""
    torch.manual_seed(7)
    vision, text, embed = 48, 32, 24

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape) * 0.3

    found = {
        "visual.class_embedding": normal(vision),
        "visual.conv1.weight": normal(vision, 3, 14, 14) / 8,
        "visual.positional_embedding": normal(5, vision),
        "visual.proj": normal(vision, embed),
        "token_embedding.weight": normal(
            len(weights["text_model.embeddings.token_embedding.weight"]), text
        ),
        "positional_embedding": normal(12, text),
        "text_projection": normal(text, embed),
        "logit_scale": torch.tensor(2.0),
    }
    for name, width in (("visual.ln_pre", vision), ("visual.ln_post", vision), ("ln_final", text)):
        found |= {f"{name}.weight": 1 + normal(width), f"{name}.bias": normal(width)}
    for tower, width, inner in (("visual.", vision, 64), ("", text, 48)):
        for n in range(2):
            block = f"{tower}transformer.resblocks.{n}."
            shapes = {
                **{"attn.in_proj_weight": (3 * width, width), "attn.in_proj_bias": (3 * width,)},
                **{"attn.out_proj.weight": (width, width), "attn.out_proj.bias": (width,)},
                **{"mlp.c_fc.weight": (inner, width), "mlp.c_fc.bias": (inner,)},
                **{"mlp.c_proj.weight": (width, inner), "mlp.c_proj.bias": (width,)},
                **{"ln_1.weight": (width,), "ln_1.bias": (width,)},
                **{"ln_2.weight": (width,), "ln_2.bias": (width,)},
            }
            found |= {block + key: normal(*shape) for key, shape in shapes.items()}
    return found
