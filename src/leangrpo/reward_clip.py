"""Rewards that are a CLIP and little more: PickScore, HPSv2.1, CLIPScore, aesthetic, similarity.

Any transformers CLIPModel will do, from a folder or the hub; pictures are resized (bicubic, short
side), cropped and normalised as its own `preprocessor_config.json` says.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from .errors import RewardError
from .reward_models import ModelReward, option, per_sample
from .settings import Reward as Settings
from .weights import fill, model, open_clip_to_transformers, pretrained, read_weights


class Clip:
    """A CLIPModel with its preprocessing; `tokenizer` where texts are to be embedded."""

    def __init__(self, setting: str, source: str, tokenizer: str | None = None) -> None:
        from transformers import AutoTokenizer, CLIPModel
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        self.network: Any = model(setting, source, CLIPModel)
        self._prepare = pretrained(setting, source, CLIPImageProcessorPil)
        self._tokenize = (
            None if tokenizer is None else pretrained("rewards.tokenizer", tokenizer, AutoTokenizer)
        )

    def images(self, pictures: list[Image.Image]) -> Tensor:
        """Unit embeddings `(B, D)` of pictures."""
        pixels = self._prepare(images=pictures, return_tensors="pt")["pixel_values"]
        at = self.network.visual_projection.weight
        found = self.network.vision_model(pixels.to(at.device, at.dtype)).pooler_output
        return F.normalize(self.network.visual_projection(found), dim=-1)

    def texts(self, texts: list[str]) -> Tensor:
        """Unit embeddings `(B, D)` of texts, cut off at the model's length (77 tokens)."""
        assert self._tokenize is not None
        longest = self.network.config.text_config.max_position_embeddings
        tokens = self._tokenize(
            texts, padding=True, truncation=True, max_length=longest, return_tensors="pt"
        )
        at = self.network.text_projection.weight.device
        found = self.network.text_model(
            input_ids=tokens["input_ids"].to(at), attention_mask=tokens["attention_mask"].to(at)
        ).pooler_output
        return F.normalize(self.network.text_projection(found), dim=-1)

    def cosines(self, pictures: list[Image.Image], texts: list[str]) -> Tensor:
        """Cosine of each picture and its text, `(B,)` float32."""
        return (self.images(pictures).float() * self.texts(texts).float()).sum(-1)

    @property
    def scale(self) -> Tensor:
        """What the model multiplies cosines by, exp(logit_scale)."""
        scale: Tensor = self.network.logit_scale.float().exp()
        return scale


def pickscore(settings: Settings) -> ModelReward:
    """exp(logit_scale) * cos / 26 (flow_grpo, `pickscore_scorer.py`)."""
    source = option(settings, "model")
    tokenizer = settings.tokenizer or (source if settings.model else option(settings, "tokenizer"))
    clip = Clip("rewards.model", source, tokenizer)
    return ModelReward(
        settings, [clip.network], lambda x, p, m: clip.scale * clip.cosines(x, p) / 26
    )


def clipscore(settings: Settings) -> ModelReward:
    """exp(logit_scale) * cos / 30 (flow_grpo, `clip_scorer.py`)."""
    source = option(settings, "model")
    clip = Clip("rewards.model", source, settings.tokenizer or source)
    return ModelReward(
        settings, [clip.network], lambda x, p, m: clip.scale * clip.cosines(x, p) / 30
    )


def hpsv2(settings: Settings) -> ModelReward:
    """cos of picture and prompt, without a scale (tgxs002/HPSv2, `img_score.py`, version 2.1).

    `weights` is in open_clip's layout, as published, or in transformers'; a `model` that has been
    fine-tuned itself needs none.
    """
    source = option(settings, "model")
    clip = Clip("rewards.model", source, settings.tokenizer or source)
    if settings.model is None or settings.weights is not None:
        file = option(settings, "weights")
        weights = read_weights("rewards.weights", file)
        if "visual.proj" in weights:
            weights = open_clip_to_transformers(weights)
        weights = {name: tensor.float() for name, tensor in weights.items()}
        fill("rewards.weights", file, clip.network, weights)
    return ModelReward(settings, [clip.network], lambda x, p, m: clip.cosines(x, p))


class AestheticHead(nn.Module):
    """The LAION predictor's head: five linear layers, no activation between them.

    `(B, D)` unit embeddings to `(B,)`. Source: christophschuhmann/improved-aesthetic-predictor;
    ddpo-pytorch, `aesthetic_scorer.py`. The places of its dropouts are kept in the names.
    """

    def __init__(self, width: int = 768) -> None:
        super().__init__()
        sizes = {0: (width, 1024), 2: (1024, 128), 4: (128, 64), 6: (64, 16), 7: (16, 1)}
        places = (nn.Linear(*sizes[i]) if i in sizes else nn.Identity() for i in range(8))
        self.layers = nn.Sequential(*places)

    def forward(self, embeddings: Tensor) -> Tensor:
        """Scores `(B,)`; a rating of 1 to 10 was learned."""
        scores: Tensor = self.layers(embeddings)
        return scores.squeeze(-1)


def aesthetic(settings: Settings) -> ModelReward:
    """The head on the unit embedding of CLIP ViT-L/14 (ddpo-pytorch; published in float32)."""
    clip = Clip("rewards.model", option(settings, "model"))
    head = AestheticHead(clip.network.config.projection_dim)
    file = option(settings, "weights")
    fill("rewards.weights", file, head, read_weights("rewards.weights", file))
    return ModelReward(settings, [clip.network, head], lambda x, p, m: head(clip.images(x)))


def similarity(settings: Settings) -> ModelReward:
    """Cosine of the picture's and a reference's embeddings (flow_grpo, `image_similarity`).

    The reference is the picture that the pipeline is called with as `reference` (`image`), or that
    the metadata holds under that name.
    """
    clip = Clip("rewards.model", option(settings, "model"))
    key = option(settings, "reference")

    def score(pictures: list[Image.Image], prompts: list[str], metadata: list[Any]) -> Tensor:
        merged = [{**about, **about.get("images", {})} for about in metadata]
        references = per_sample("reward `similarity`", merged, key)
        for found in references:
            if not isinstance(found, Image.Image):
                raise RewardError(f"metadata[{key!r}] is a {type(found).__name__}, and no picture.")
        theirs = clip.images([found.convert("RGB") for found in references])
        return torch.sum(clip.images(pictures).float() * theirs.float(), -1)

    return ModelReward(settings, [clip.network], score)
