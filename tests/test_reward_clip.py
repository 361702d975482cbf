"""Rewards on CLIP, against their published formulas evaluated with transformers directly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from reward_twins import PROMPTS, clip_folder, open_clip_layout, pictures
from torch import Tensor, nn
from transformers import AutoTokenizer, CLIPModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from leangrpo.errors import LeanError, RewardError
from leangrpo.reward_clip import AestheticHead
from leangrpo.reward_models import as_pictures
from leangrpo.rewards import load_reward
from leangrpo.settings import Reward
from leangrpo.weights import open_clip_to_transformers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clip_folder(tmp_path_factory.mktemp("clip"))


def embeddings(folder: Path, images: Tensor, weights: dict[str, Tensor] | None = None):
    """Image and text embeddings as transformers gives them, and exp(logit_scale)."""
    model = CLIPModel.from_pretrained(folder).eval()
    if weights:
        model.load_state_dict(weights)
    prepare = CLIPImageProcessorPil.from_pretrained(folder)
    pixels = prepare(images=as_pictures(images), return_tensors="pt")["pixel_values"]
    tokens = AutoTokenizer.from_pretrained(folder)(PROMPTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        found = model(
            pixel_values=pixels, **{k: tokens[k] for k in ("input_ids", "attention_mask")}
        )
    return found.image_embeds, found.text_embeds, float(model.logit_scale.detach().exp())


def score(settings: Reward, images: Tensor, metadata: list | None = None) -> Tensor:
    with torch.no_grad():
        return load_reward(settings)(images, PROMPTS, metadata or [{}] * len(PROMPTS))


@pytest.mark.parametrize(("name", "divisor"), [("pickscore", 26.0), ("clipscore", 30.0)])
def test_scaled_cosines(folder: Path, name: str, divisor: float) -> None:
    images = pictures()
    mine = score(Reward(name=name, model=str(folder)), images)
    image, text, scale = embeddings(folder, images)
    expected = scale * (image * text).sum(-1) / divisor
    assert expected.std() > 0.01
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


def test_hpsv2_from_open_clip_weights(folder: Path, tmp_path: Path) -> None:
    images = pictures()
    mine = score(Reward(name="hpsv2", model=str(folder)), images)
    image, text, _ = embeddings(folder, images)
    torch.testing.assert_close(mine, (image * text).sum(-1), rtol=1e-5, atol=1e-6)

    weights = open_clip_layout(CLIPModel.from_pretrained(folder).state_dict())
    torch.save({"state_dict": weights}, tmp_path / "hps.pt")
    file = str(tmp_path / "hps.pt")
    mine = score(Reward(name="hpsv2", model=str(folder), weights=file), images)
    image, text, _ = embeddings(folder, images, open_clip_to_transformers(weights))
    torch.testing.assert_close(mine, (image * text).sum(-1), rtol=1e-5, atol=1e-6)


def test_aesthetic_is_five_layers_on_the_unit_embedding(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)
    dropouts = nn.Dropout(0.2), nn.Dropout(0.2), nn.Dropout(0.1)
    published = nn.Sequential(
        *(nn.Linear(24, 1024), dropouts[0], nn.Linear(1024, 128), dropouts[1]),
        *(nn.Linear(128, 64), dropouts[2], nn.Linear(64, 16), nn.Linear(16, 1)),
    ).eval()
    weights = {f"layers.{name}": tensor for name, tensor in published.state_dict().items()}
    torch.save(weights, tmp_path / "head.pth")
    images = pictures()
    file = str(tmp_path / "head.pth")
    mine = score(Reward(name="aesthetic", model=str(folder), weights=file), images)
    image, _, _ = embeddings(folder, images)
    torch.testing.assert_close(mine, published(image)[:, 0].detach(), rtol=1e-4, atol=1e-6)
    assert set(AestheticHead().state_dict()) == set(weights)
    torch.save({k: v for k, v in weights.items() if "7" not in k}, tmp_path / "part.pth")
    with pytest.raises(LeanError, match="it lacks 2 tensors"):
        load_reward(Reward(name="aesthetic", model=str(folder), weights=str(tmp_path / "part.pth")))


def test_similarity_is_one_for_the_reference(folder: Path) -> None:
    images = pictures()
    own = as_pictures(images)
    settings = Reward(name="similarity", model=str(folder))
    same = score(settings, images, [{"images": {"image": p}} for p in own])
    torch.testing.assert_close(same, torch.ones(3), rtol=1e-5, atol=1e-6)
    other = score(settings, images, [{"image": own[0]}] * 3)
    image, _, _ = embeddings(folder, images)
    torch.testing.assert_close(other, image @ image[0], rtol=1e-5, atol=1e-6)
    with pytest.raises(RewardError, match=r"needs metadata\['image'\]"):
        score(settings, images)
    with pytest.raises(RewardError, match="is a str, and no picture"):
        score(settings, images, [{"image": "a.png"}] * 3)
    grey = Image.new("L", (30, 20), 128)
    assert score(settings, images, [{"image": grey}] * 3).shape == (3,)


def test_batches_videos_offload_and_dtype(folder: Path) -> None:
    images = pictures()
    whole = score(Reward(name="clipscore", model=str(folder)), images)
    for options in ({"batch_size": 2}, {"offload": True}, {"device": "cpu"}):
        mine = score(Reward(name="clipscore", model=str(folder), **options), images)
        torch.testing.assert_close(mine, whole, rtol=1e-5, atol=1e-6)
    video = score(
        Reward(name="clipscore", model=str(folder)), images[:, None].expand(-1, 2, -1, -1, -1)
    )
    torch.testing.assert_close(video, whole, rtol=1e-5, atol=1e-6)
    # bfloat16 rounds to 2^-8: embeddings of length 1 differ by a few of these.
    half = score(Reward(name="clipscore", model=str(folder), dtype="bfloat16"), images)
    assert half.dtype == torch.float32 and not torch.equal(half, whole)
    torch.testing.assert_close(half, whole, rtol=0, atol=20.1 / 30 * 10 * 2**-8)


def test_a_model_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(LeanError, match="`rewards.model` is .* it cannot be loaded"):
        load_reward(Reward(name="clipscore", model=str(tmp_path)))
