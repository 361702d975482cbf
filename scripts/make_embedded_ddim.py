"""Make the small Stable Diffusion (epsilon prediction, DDIM) pipeline inside ``leangrpo``.

It draws the same numbers as the pipeline of ``make_embedded.py``, for the same prompts and
through the same autoencoder, but with a ``UNet2DConditionModel`` that predicts the noise and the
scheduler of Stable Diffusion 1.5: what DDPO was made for.  The UNet starts from random weights;
the text encoder starts from the other pipeline's and is trained along.

Training stops early on purpose, as soon as a text recogniser reads ``--target-exact`` of the
held-out prompts: the rest is left to reinforcement learning.

    python scripts/make_embedded_ddim.py                   # train and write the folder
    python scripts/make_embedded_ddim.py --evaluate-only   # measure the folder

Needs the folder that ``make_embedded.py`` made, ``onnxruntime`` and the model file of
``rapidocr``.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
from collections.abc import Sequence
from pathlib import Path

import make_embedded as base
import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from PIL import Image
from torch import Tensor
from transformers import CLIPTextModel, CLIPTextModelWithProjection

SAMPLING_STEPS = 10
BATCH = 64
LEARNING_RATE = 1e-3


# ---------------------------------------------------------------------------
# Parts of the pipeline
# ---------------------------------------------------------------------------


def build_unet() -> UNet2DConditionModel:
    """The denoiser: 8x8 latents at width 32, then 4x4 at width 64, where it attends to the text."""
    return UNet2DConditionModel(
        sample_size=base.SIZE // 4,
        in_channels=base.LATENT_CHANNELS,
        out_channels=base.LATENT_CHANNELS,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        attention_head_dim=(2, 4),  # diffusers reads the number of heads from this name
        cross_attention_dim=base.TEXT_WIDTH,
        norm_num_groups=8,
    )


def build_scheduler() -> DDIMScheduler:
    """Stable Diffusion 1.5's: its betas, its timesteps that end at 1, no clipping."""
    return DDIMScheduler(
        num_train_timesteps=1000,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="epsilon",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )


def copy_vae(folder: Path) -> AutoencoderKL:
    """The autoencoder of the other pipeline, without its shift.

    ``StableDiffusionPipeline`` divides latents by the scaling factor and adds no shift, so the
    denoiser has to draw latents that were not shifted either.  The shift was 2% of their spread.
    """
    found = AutoencoderKL.from_pretrained(str(folder), subfolder="vae")
    vae = base.build_vae()  # a fresh one, as the loaded one remembers its folder's path
    vae.load_state_dict(found.state_dict())
    vae.register_to_config(shift_factor=None, scaling_factor=found.config.scaling_factor)
    vae.eval().requires_grad_(False)
    return vae


def copy_text_encoder(folder: Path) -> CLIPTextModel:
    """The first text encoder of the other pipeline, without its projection."""
    found = CLIPTextModelWithProjection.from_pretrained(str(folder), subfolder="text_encoder")
    encoder = CLIPTextModel(base.build_text_encoder(base.build_tokenizer()).config)
    weights = found.text_model.state_dict()
    getattr(encoder, "text_model", encoder).load_state_dict(weights)
    return encoder


def build_pipeline(folder: Path) -> StableDiffusionPipeline:
    """An untrained pipeline around the parts of the other one in ``folder``."""
    pipe = StableDiffusionPipeline(
        vae=copy_vae(folder),
        text_encoder=copy_text_encoder(folder),
        tokenizer=base.build_tokenizer(),
        unet=build_unet(),
        scheduler=build_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


# ---------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------


def train_denoiser(
    pipe: StableDiffusionPipeline,
    images: Tensor,
    owner: Tensor,
    train: Sequence[base.Combo],
    held_out: Sequence[base.Combo],
    reader: base.Reader,
    args: argparse.Namespace,
) -> None:
    """Train UNet and text encoder to predict the noise, until the target is met.

    The pipeline's modules are left with the averaged (EMA) weights.
    """
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    latents = base.encode_images(pipe.vae, images) * pipe.vae.config.scaling_factor
    ids = base.tokenise(pipe, [c.prompt for c in train])
    empty = base.tokenise(pipe, [""])

    averaged = torch.nn.ModuleList([pipe.unet, pipe.text_encoder])
    live = copy.deepcopy(averaged).train()
    averaged.eval().requires_grad_(False)
    optimiser = torch.optim.AdamW(
        live.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01
    )
    stream = base.batches(len(latents), BATCH, generator)
    started = time.monotonic()
    recent: list[float] = []
    for step in range(1, args.steps + 1):
        for group in optimiser.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, step / 100)
        chosen = next(stream)
        text = ids[owner[chosen]]
        drop = torch.rand(len(chosen), generator=generator) < 0.1  # for guidance
        text = torch.where(drop[:, None], empty, text)
        noise = torch.randn(latents[chosen].shape, generator=generator)
        timesteps = torch.randint(0, 1000, (len(chosen),), generator=generator)
        mixed = pipe.scheduler.add_noise(latents[chosen], noise, timesteps)
        predicted = live[0](mixed, timesteps, live[1](text)[0]).sample
        loss = F.mse_loss(predicted, noise)
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(live.parameters(), 1.0)
        optimiser.step()
        decay = min(0.998, (1 + step) / (10 + step))
        with torch.no_grad():
            for average, value in zip(averaged.parameters(), live.parameters(), strict=True):
                average.lerp_(value, 1 - decay)
        recent.append(loss.item())
        due = step >= args.eval_from and step % args.eval_every == 0
        if not due and step != args.steps:
            continue
        seconds = time.monotonic() - started
        score = measure(pipe, held_out, reader, seeds=[1], eta=0.0)
        mean = sum(recent) / len(recent)
        recent.clear()
        print(
            f"unet {step}/{args.steps} loss {mean:.4f} {seconds:.0f} s:"
            f" held-out exact {score.exact:.3f} colour {score.colour:.3f}",
            flush=True,
        )
        if args.checkpoints:
            save(pipe, args.checkpoints / f"step{step:05d}-exact{100 * score.exact:.0f}")
        if score.exact >= args.target_exact or seconds > args.seconds:
            break


# ---------------------------------------------------------------------------
# Sampling and measuring
# ---------------------------------------------------------------------------


def sample(
    pipe: StableDiffusionPipeline,
    prompts: Sequence[str],
    seed: int,
    eta: float,
    guidance: float = 1.0,
) -> Tensor:
    """Draw one image (0..1) per prompt by calling the pipeline itself.

    ``eta`` is DDIM's: 0 is deterministic, 1 is the stochastic sampler of DDPO.
    """
    images: Tensor = pipe(
        prompt=list(prompts),
        num_inference_steps=SAMPLING_STEPS,
        guidance_scale=guidance,
        eta=eta,
        generator=torch.Generator().manual_seed(seed),
        output_type="pt",
    ).images
    return images


def measure(
    pipe: StableDiffusionPipeline,
    combos: Sequence[base.Combo],
    reader: base.Reader,
    seeds: Sequence[int],
    eta: float,
    guidance: float = 1.0,
) -> base.Score:
    """Mean score over all the combinations and seeds."""
    prompts = [c.prompt for c in combos]
    scores = [
        base.score_images(sample(pipe, prompts, seed, eta, guidance), combos, reader)
        for seed in seeds
    ]
    exact, colour = (sum(s[i] for s in scores) / len(scores) for i in (0, 1))
    return base.Score(exact, colour, sum(s.images for s in scores))


def evaluate(folder: Path, reader: base.Reader, seed_count: int, grid: Path | None) -> None:
    """Print the figures of a finished folder."""
    pipe = load(folder)
    train, held_out = base.split_combos()
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    print(f"size {size / 2**20:.2f} MiB")
    for name, part in (("unet", pipe.unet), ("vae", pipe.vae)):
        print(f"{name} parameters {sum(p.numel() for p in part.parameters()):,}")
    seeds = list(range(100, 100 + seed_count))
    runs: list[tuple[str, Sequence[base.Combo], Sequence[int], float, float]] = [
        ("held-out, eta 0", held_out, seeds, 0.0, 1.0),
        ("held-out, eta 1", held_out, seeds, 1.0, 1.0),
        ("training, eta 0", train, seeds[:1], 0.0, 1.0),
        ("training, eta 1", train, seeds[:1], 1.0, 1.0),
        ("held-out, eta 0, guidance 3", held_out, seeds[:1], 0.0, 3.0),
    ]
    for name, combos, use, eta, guidance in runs:
        score = measure(pipe, combos, reader, use, eta, guidance)
        print(f"{name}: exact {score.exact:.3f} colour {score.colour:.3f} ({score.images} images)")
    if grid is not None:
        save_grid(pipe, held_out, grid)


def save_grid(pipe: StableDiffusionPipeline, combos: Sequence[base.Combo], path: Path) -> None:
    """Save a picture: truth, deterministic and stochastic samples, row by row."""
    picked = random.Random(0).sample(list(combos), 36)
    font = base.load_font()
    pixels = np.stack([base.render(c, font, 0, 0) for c in picked])
    truth = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    prompts = [c.prompt for c in picked]
    kinds = [truth, sample(pipe, prompts, 1, eta=0.0), sample(pipe, prompts, 1, eta=1.0)]
    rows = [kind[start : start + 12] for start in (0, 12, 24) for kind in kinds]
    sheet = torch.cat([torch.cat(list(row), dim=2) for row in rows], dim=1)
    array = (sheet.permute(1, 2, 0) * 255).round().byte().numpy()
    image = Image.fromarray(array)
    image.resize((image.width * 3, image.height * 3), Image.Resampling.NEAREST).save(path)


# ---------------------------------------------------------------------------
# Folder
# ---------------------------------------------------------------------------


def save(pipe: StableDiffusionPipeline, folder: Path) -> None:
    """Write a diffusers folder; UNet and autoencoder in half precision."""
    small = copy.deepcopy(pipe)
    # An unused tokenizer: a used one would write its last padding settings into the file.
    small.register_modules(tokenizer=base.build_tokenizer())
    small.unet.half()
    small.vae.half()
    small.save_pretrained(str(folder), safe_serialization=True)


def load(folder: Path) -> StableDiffusionPipeline:
    """Load a folder in float32, ready to sample."""
    pipe = StableDiffusionPipeline.from_pretrained(
        str(folder), safety_checker=None, feature_extractor=None, dtype=torch.float32
    )
    pipe.set_progress_bar_config(disable=True)
    for part in (pipe.vae, pipe.unet, pipe.text_encoder):
        part.eval().requires_grad_(False)
    loaded: StableDiffusionPipeline = pipe
    return loaded


def make(args: argparse.Namespace, reader: base.Reader) -> None:
    """Train and write the pipeline."""
    train, held_out = base.split_combos()
    images, owner = base.render_pool(train)
    print(f"{len(train)} training and {len(held_out)} held-out prompts, {len(images)} images")
    torch.manual_seed(args.seed)
    pipe = build_pipeline(args.parts)
    train_denoiser(pipe, images, owner, train, held_out, reader, args)
    save(pipe, args.out)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=base.EMBEDDED / "ddim")
    parser.add_argument(
        "--parts",
        type=Path,
        default=base.EMBEDDED / "pipeline",
        help="take autoencoder and text encoder from this folder",
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=6000, help="most training steps")
    parser.add_argument("--seconds", type=float, default=1200, help="most training time")
    parser.add_argument("--target-exact", type=float, default=0.4, help="stop at this share read")
    parser.add_argument("--eval-from", type=int, default=800, help="step of the first reading")
    parser.add_argument("--eval-every", type=int, default=50, help="steps between readings")
    parser.add_argument("--checkpoints", type=Path, help="also keep every reading's weights here")
    parser.add_argument("--evaluate-only", action="store_true", help="measure --out, do not train")
    parser.add_argument("--eval-seeds", type=int, default=5, help="seeds of the evaluation")
    parser.add_argument("--grid", type=Path, help="save a picture of samples here")
    return parser.parse_args()


def main() -> None:
    """Train (unless told not to), then measure."""
    args = parse()
    torch.set_num_threads(args.threads)
    reader = base.Reader(args.threads)
    started = time.monotonic()
    if not args.evaluate_only:
        make(args, reader)
        print(f"made in {time.monotonic() - started:.0f} s")
    evaluate(args.out, reader, args.eval_seeds, args.grid)


if __name__ == "__main__":
    main()
