"""Make the small Stable Diffusion 3 pipeline that ships inside ``leangrpo``.

The pipeline draws a two-digit number in a named colour on a 32x32 canvas, for
prompts such as ``the number 47 in blue``.  Everything is trained here, from random
weights, on images rendered with the DejaVu font that comes with matplotlib:

1. an ``AutoencoderKL`` (32x32x3 pixels <-> 8x8x8 latents);
2. an ``SD3Transformer2DModel`` trained with rectified flow, together with two tiny
   CLIP text encoders.

Training of step 2 stops early on purpose: as soon as a text recogniser reads
``--target-exact`` of the held-out prompts.  The result writes numbers that are often
wrong or misshapen, which leaves room for reinforcement learning to improve it.

    python scripts/make_embedded.py                   # train and write the folder
    python scripts/make_embedded.py --evaluate-only   # measure the folder

Reading the images needs ``onnxruntime`` and the model file of ``rapidocr``.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import math
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

EMBEDDED = Path(__file__).resolve().parents[1] / "src" / "leangrpo" / "embedded"

SIZE = 32
FONT_SIZE = 21
JITTER = 2
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 30, 30),
    "green": (25, 150, 45),
    "blue": (30, 60, 225),
    "orange": (245, 135, 0),
    "purple": (145, 40, 175),
    "black": (20, 20, 20),
    "brown": (120, 70, 30),
    "teal": (0, 145, 150),
}
NUMBERS = range(10, 100)
HELD_OUT_PER_COLOUR = 18
SPLIT_SEED = 20240607

TEXT_LENGTH = 8  # <start> the number 4 7 in blue <end>
TEXT_WIDTH = 32
LATENT_CHANNELS = 8
SAMPLING_STEPS = 10
SDE_NOISE = 0.7


class Combo(NamedTuple):
    """One thing to draw: a number and a colour."""

    number: int
    colour: str

    @property
    def prompt(self) -> str:
        """The sentence that asks for this combination."""
        return f"the number {self.number} in {self.colour}"


def split_combos() -> tuple[list[Combo], list[Combo]]:
    """Split all combinations into (training, held out), always the same way.

    Every colour gives up the same count of numbers, drawn by a fixed seed.
    """
    rng = random.Random(SPLIT_SEED)
    train: list[Combo] = []
    held_out: list[Combo] = []
    for colour in COLOURS:
        hidden = set(rng.sample(list(NUMBERS), HELD_OUT_PER_COLOUR))
        for number in NUMBERS:
            (held_out if number in hidden else train).append(Combo(number, colour))
    return sorted(train), sorted(held_out)


# ---------------------------------------------------------------------------
# Images
# ---------------------------------------------------------------------------


def load_font() -> ImageFont.FreeTypeFont:
    """The DejaVu Sans Bold that matplotlib ships."""
    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans-Bold.ttf"
    return ImageFont.truetype(str(path), FONT_SIZE)


def render(combo: Combo, font: ImageFont.FreeTypeFont, dx: int, dy: int) -> np.ndarray:
    """Draw a combination, its centre moved by (dx, dy); uint8, height x width x 3."""
    image = Image.new("RGB", (SIZE, SIZE), (250, 250, 248))
    draw = ImageDraw.Draw(image)
    centre = (SIZE / 2 + dx, SIZE / 2 + dy)
    draw.text(centre, str(combo.number), font=font, fill=COLOURS[combo.colour], anchor="mm")
    return np.asarray(image)


def render_pool(combos: Sequence[Combo]) -> tuple[Tensor, Tensor]:
    """Draw every combination at every offset.

    Returns the images (count x 3 x 32 x 32, in -1..1) and the index of each image's
    combination.
    """
    font = load_font()
    offsets = [(x, y) for x in range(-1, 2) for y in range(-JITTER, JITTER + 1)]
    arrays = [render(c, font, dx, dy) for c in combos for dx, dy in offsets]
    images = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).float() / 127.5 - 1
    owner = torch.arange(len(combos)).repeat_interleave(len(offsets))
    return images.contiguous(), owner


class Reader:
    """Reads one line of text per image with the recognition model of rapidocr."""

    def __init__(self, threads: int) -> None:
        """Load the ONNX model; ``threads`` bounds the CPU use."""
        import onnxruntime

        spec = importlib.util.find_spec("rapidocr")
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit("rapidocr is not installed: its recognition model is needed")
        folder = Path(next(iter(spec.submodule_search_locations))) / "models"
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(
            str(folder / "PP-OCRv6_rec_small.onnx"), options, providers=["CPUExecutionProvider"]
        )
        charset = self.session.get_modelmeta().custom_metadata_map["character"].splitlines()
        self.charset = ["", *charset, " "]
        self.input = self.session.get_inputs()[0].name

    def read(self, images: Tensor) -> list[str]:
        """Read a batch of RGB images in 0..1 (count x 3 x height x width)."""
        texts: list[str] = []
        for chunk in torch.split(images, 48):
            batch = F.interpolate(chunk.float(), size=(48, 48), mode="bicubic").clamp(0, 1)
            array = ((batch.flip(1) - 0.5) / 0.5).numpy()  # RGB -> BGR, then -1..1
            best = self.session.run(None, {self.input: array})[0].argmax(-1)
            for row in best:
                kept = [int(c) for i, c in enumerate(row) if c and (i == 0 or c != row[i - 1])]
                texts.append("".join(self.charset[c] for c in kept).strip())
        return texts


def name_colours(images: Tensor) -> list[str]:
    """Name the ink of each image (0..1): the palette entry nearest to its darker half."""
    names = list(COLOURS)
    palette = torch.tensor([COLOURS[n] for n in names]) / 255.0
    background = images.flatten(2).median(-1).values[:, :, None]
    pixels = images.flatten(2)
    distance = (pixels - background).pow(2).sum(1)
    ink = distance >= 0.5 * distance.amax(1, keepdim=True)
    mean = (pixels * ink[:, None]).sum(-1) / ink.sum(1, keepdim=True)
    return [names[int(i)] for i in torch.cdist(mean, palette).argmin(1)]


# ---------------------------------------------------------------------------
# Parts of the pipeline
# ---------------------------------------------------------------------------


def build_tokenizer() -> CLIPTokenizer:
    """A CLIP tokenizer with one token per letter, digit and known word.

    CLIP's own splitting puts every digit by itself, so numbers compose from digits.
    """
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    tokens = ["<|startoftext|>", "<|endoftext|>"]
    tokens += [f"{d}</w>" for d in range(10)]
    tokens += letters + [f"{letter}</w>" for letter in letters]
    merges: list[tuple[str, str]] = []
    for word in ["the", "number", "in", *COLOURS]:
        pieces = [*word[:-1], word[-1] + "</w>"]
        while len(pieces) > 1:  # build the word from its end, so "</w>" is never lost
            pair = (pieces[-2], pieces[-1])
            pieces[-2:] = ["".join(pair)]
            if pair not in merges:
                merges.append(pair)
                tokens.append(pieces[-1])
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=TEXT_LENGTH)


def build_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    """A two-layer CLIP text encoder over the small vocabulary."""
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=TEXT_WIDTH,
            intermediate_size=2 * TEXT_WIDTH,
            projection_dim=TEXT_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=TEXT_LENGTH,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def build_vae() -> AutoencoderKL:
    """The autoencoder: 32x32x3 pixels to 8x8x8 latents."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 48),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=SIZE,
        use_quant_conv=False,
        use_post_quant_conv=False,
        force_upcast=False,
    )


def build_transformer() -> SD3Transformer2DModel:
    """The denoiser: 16 image tokens, 5 joint blocks of width 160."""
    return SD3Transformer2DModel(
        sample_size=SIZE // 4,
        patch_size=2,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=5,
        attention_head_dim=32,
        num_attention_heads=5,
        caption_projection_dim=160,
        joint_attention_dim=2 * TEXT_WIDTH,
        pooled_projection_dim=2 * TEXT_WIDTH,
        pos_embed_max_size=SIZE // 8,
    )


def encode_text(
    encoders: Sequence[CLIPTextModelWithProjection], ids: Tensor, zeros: int = 0
) -> tuple[Tensor, Tensor]:
    """What ``StableDiffusion3Pipeline.encode_prompt`` does with two CLIP encoders.

    ``zeros`` is the count of empty tokens that stand for the missing third encoder
    (the pipeline's ``max_sequence_length``).
    """
    outputs = [encoder(ids, output_hidden_states=True) for encoder in encoders]
    hidden = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
    pooled = torch.cat([output.text_embeds for output in outputs], dim=-1)
    return F.pad(hidden, (0, 0, 0, zeros)), pooled


# ---------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------


def batches(count: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Endless shuffled index batches."""
    while True:
        shuffled = torch.randperm(count, generator=generator)
        yield from torch.split(shuffled[: count // size * size], size)


def train_vae(images: Tensor, steps: int, seed: int) -> AutoencoderKL:
    """Train the autoencoder and set its latent shift and scale."""
    torch.manual_seed(seed)
    vae = build_vae()
    optimiser = torch.optim.AdamW(vae.parameters(), lr=3e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, 3e-3, total_steps=steps, pct_start=0.1
    )
    stream = batches(len(images), 32, torch.Generator().manual_seed(seed))
    started = time.monotonic()
    for step in range(1, steps + 1):
        batch = images[next(stream)]
        posterior = vae.encode(batch).latent_dist
        output = vae.decode(posterior.sample()).sample
        loss = F.mse_loss(output, batch) + 0.1 * F.l1_loss(output, batch)
        loss = loss + 1e-5 * posterior.kl().mean() / LATENT_CHANNELS
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step % 100 == 0 or step == steps:
            seconds = time.monotonic() - started
            print(f"vae {step}/{steps} loss {loss.item():.5f} {seconds:.0f} s", flush=True)
    vae.eval().requires_grad_(False)
    latents = encode_images(vae, images[:: max(1, len(images) // 2000)])
    shift, scale = latents.mean().item(), 1 / latents.std().item()
    vae.register_to_config(shift_factor=shift, scaling_factor=scale)
    return vae


@torch.no_grad()
def encode_images(vae: AutoencoderKL, images: Tensor) -> Tensor:
    """Latent means, not yet shifted or scaled."""
    return torch.cat([vae.encode(part).latent_dist.mean for part in torch.split(images, 256)])


@torch.no_grad()
def decode_latents(vae: AutoencoderKL, latents: Tensor) -> Tensor:
    """Images in 0..1 from the transformer's latents."""
    raw = latents / vae.config.scaling_factor + vae.config.shift_factor
    images = torch.cat([vae.decode(part).sample for part in torch.split(raw, 256)])
    return (images / 2 + 0.5).clamp(0, 1)


def train_flow(
    pipe: StableDiffusion3Pipeline,
    images: Tensor,
    owner: Tensor,
    train: Sequence[Combo],
    held_out: Sequence[Combo],
    reader: Reader,
    args: argparse.Namespace,
) -> None:
    """Train transformer and text encoders with rectified flow, until the target is met.

    The pipeline's modules are left with the averaged (EMA) weights.
    """
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    vae: Any = pipe.vae
    latents = (encode_images(vae, images) - vae.config.shift_factor) * vae.config.scaling_factor
    ids = tokenise(pipe, [c.prompt for c in train])
    empty = tokenise(pipe, [""])

    averaged = torch.nn.ModuleList([pipe.transformer, pipe.text_encoder, pipe.text_encoder_2])
    live = copy.deepcopy(averaged).train()
    averaged.eval().requires_grad_(False)
    optimiser = torch.optim.AdamW(
        live.parameters(), lr=1.5e-3, betas=(0.9, 0.98), weight_decay=0.01
    )
    stream = batches(len(latents), 64, generator)
    small_stream = batches(len(latents), 8, generator)
    started = time.monotonic()
    recent: list[float] = []
    for step in range(1, args.steps + 1):
        for group in optimiser.param_groups:
            group["lr"] = 1.5e-3 * min(1.0, step / 100)
        # The pipeline pads the text with zeros (256 by default): learn to ignore them.
        zeros = 256 if step % 16 == 0 else random.Random(step).choice((0, 0, 0, 1, 2, 4, 8, 16))
        chosen = next(small_stream if zeros == 256 else stream)
        clean = latents[chosen]
        text = ids[owner[chosen]]
        drop = torch.rand(len(chosen), generator=generator) < 0.1  # for guidance
        text = torch.where(drop[:, None], empty, text)
        noise = torch.randn(clean.shape, generator=generator)
        sigma = torch.randn(len(chosen), generator=generator).sigmoid()
        mixed = torch.lerp(clean, noise, sigma[:, None, None, None])
        hidden, pooled = encode_text([live[1], live[2]], text, zeros)
        velocity = live[0](mixed, hidden, pooled, 1000 * sigma).sample
        loss = F.mse_loss(velocity, noise - clean)
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
        score = measure(pipe, held_out, reader, seeds=[1], sde=False)
        mean = sum(recent) / len(recent)
        recent.clear()
        print(
            f"flow {step}/{args.steps} loss {mean:.4f} {seconds:.0f} s:"
            f" held-out exact {score.exact:.3f} colour {score.colour:.3f}",
            flush=True,
        )
        if args.checkpoints:
            folder = args.checkpoints / f"step{step:05d}-exact{100 * score.exact:.0f}"
            save(pipe, folder)
        if score.exact >= args.target_exact or seconds > args.seconds:
            break


# ---------------------------------------------------------------------------
# Sampling and measuring
# ---------------------------------------------------------------------------


class Score(NamedTuple):
    """Share of images whose digits are read exactly, and whose colour is right."""

    exact: float
    colour: float
    images: int


def tokenise(pipe: StableDiffusion3Pipeline, prompts: Sequence[str]) -> Tensor:
    """Token ids, padded to the tokenizer's length."""
    ids: Tensor = pipe.tokenizer(
        list(prompts), padding="max_length", truncation=True, return_tensors="pt"
    ).input_ids
    return ids


@torch.no_grad()
def sample(
    pipe: StableDiffusion3Pipeline,
    prompts: Sequence[str],
    seed: int,
    sde: bool = False,
    zeros: int = 0,
) -> Tensor:
    """Draw one image (0..1) per prompt, without guidance.

    ``sde=False`` is the scheduler's Euler step; ``sde=True`` the stochastic step of
    Flow-GRPO at noise level 0.7.
    """
    generator = torch.Generator().manual_seed(seed)
    encoders = [pipe.text_encoder, pipe.text_encoder_2]
    hidden, pooled = encode_text(encoders, tokenise(pipe, prompts), zeros)
    scheduler = copy.deepcopy(pipe.scheduler)
    scheduler.set_timesteps(SAMPLING_STEPS)
    side = SIZE // 4
    x = torch.randn(len(prompts), LATENT_CHANNELS, side, side, generator=generator)
    sigmas = scheduler.sigmas.tolist()
    for i, timestep in enumerate(scheduler.timesteps):
        v = pipe.transformer(x, hidden, pooled, timestep.expand(len(prompts))).sample
        s, dt = sigmas[i], sigmas[i + 1] - sigmas[i]
        if not sde:
            x = x + v * dt
            continue
        g = SDE_NOISE * math.sqrt(s / (1 - (sigmas[1] if s == 1 else s)))
        drift = g * g / (2 * s)
        noise = torch.randn(x.shape, generator=generator)
        x = x * (1 + drift * dt) + v * (1 + drift * (1 - s)) * dt + g * math.sqrt(-dt) * noise
    return decode_latents(pipe.vae, x)


def score_images(images: Tensor, combos: Sequence[Combo], reader: Reader) -> Score:
    """Read the images and compare them with what was asked for."""
    exact = [t == str(c.number) for t, c in zip(reader.read(images), combos, strict=True)]
    colour = [n == c.colour for n, c in zip(name_colours(images), combos, strict=True)]
    return Score(sum(exact) / len(exact), sum(colour) / len(colour), len(exact))


def measure(
    pipe: StableDiffusion3Pipeline,
    combos: Sequence[Combo],
    reader: Reader,
    seeds: Sequence[int],
    sde: bool,
    zeros: int = 0,
) -> Score:
    """Mean score over all the combinations and seeds."""
    prompts = [c.prompt for c in combos]
    scores = [
        score_images(sample(pipe, prompts, seed, sde, zeros), combos, reader) for seed in seeds
    ]
    count = len(scores)
    exact, colour = (sum(s[i] for s in scores) / count for i in (0, 1))
    return Score(exact, colour, sum(s.images for s in scores))


def time_steps(transformer: SD3Transformer2DModel, batch: int, repeats: int) -> tuple[float, float]:
    """Milliseconds of one forward pass and of one forward and backward pass."""
    side = SIZE // 4
    x = torch.randn(batch, LATENT_CHANNELS, side, side)
    hidden = torch.randn(batch, TEXT_LENGTH, 2 * TEXT_WIDTH)
    pooled = torch.randn(batch, 2 * TEXT_WIDTH)
    t = torch.full((batch,), 500.0)

    def forward() -> None:
        with torch.no_grad():
            transformer(x, hidden, pooled, t)

    def both() -> None:
        transformer(x, hidden, pooled, t).sample.pow(2).mean().backward()

    timings = []
    transformer.requires_grad_(True)
    for run in (forward, both):
        for _ in range(5):
            run()
        laps = []
        for _ in range(repeats):
            started = time.perf_counter()
            run()
            laps.append(time.perf_counter() - started)
        timings.append(1000 * float(np.median(laps)))
    transformer.zero_grad()
    transformer.requires_grad_(False)
    return timings[0], timings[1]


def evaluate(folder: Path, reader: Reader, seed_count: int, grid: Path | None) -> None:
    """Print the figures of a finished folder."""
    pipe = load(folder)
    train, held_out = split_combos()
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    print(f"size {size / 2**20:.2f} MiB")
    for name, part in (("transformer", pipe.transformer), ("vae", pipe.vae)):
        print(f"{name} parameters {sum(p.numel() for p in part.parameters()):,}")

    font = load_font()
    pixels = np.stack([render(c, font, 0, 0) for c in held_out])
    truth = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    rebuilt = encode_images(pipe.vae, truth * 2 - 1) - pipe.vae.config.shift_factor
    rebuilt = decode_latents(pipe.vae, rebuilt * pipe.vae.config.scaling_factor)
    for name, images in (("rendered", truth), ("reconstructed", rebuilt)):
        score = score_images(images, held_out, reader)
        print(f"{name} held-out: exact {score.exact:.3f} colour {score.colour:.3f}")

    seeds = list(range(100, 100 + seed_count))
    runs: list[tuple[str, Sequence[Combo], bool, int]] = [
        ("held-out, Euler", held_out, False, 0),
        ("held-out, stochastic", held_out, True, 0),
        ("training, Euler", train, False, 0),
        ("training, stochastic", train, True, 0),
        ("held-out, Euler, 256 empty text tokens", held_out, False, 256),
    ]
    for name, combos, sde, zeros in runs:
        use = seeds[:1] if zeros else seeds
        score = measure(pipe, combos, reader, use, sde, zeros)
        print(f"{name}: exact {score.exact:.3f} colour {score.colour:.3f} ({score.images} images)")
    for guidance in (1.0, 4.0):
        images = draw(pipe, held_out, guidance)
        score = score_images(images, held_out, reader)
        print(
            f"held-out, pipe(...) guidance {guidance:.0f}: exact {score.exact:.3f}"
            f" colour {score.colour:.3f} ({score.images} images)"
        )

    threads = torch.get_num_threads()
    for count in dict.fromkeys((1, threads)):
        torch.set_num_threads(count)
        for batch in (1, 12):
            forward, both = time_steps(pipe.transformer, batch, 40)
            print(
                f"batch {batch}, {count} thread(s): forward {forward:.1f} ms,"
                f" forward and backward {both:.1f} ms"
            )
    torch.set_num_threads(threads)
    if grid is not None:
        save_grid(pipe, held_out, grid)


def draw(pipe: StableDiffusion3Pipeline, combos: Sequence[Combo], guidance: float) -> Tensor:
    """Draw by calling the pipeline itself; images in 0..1."""
    output = pipe(
        prompt=[c.prompt for c in combos],
        num_inference_steps=SAMPLING_STEPS,
        guidance_scale=guidance,
        max_sequence_length=0,
        generator=torch.Generator().manual_seed(7),
        output_type="pt",
    )
    images: Tensor = output.images
    return images


def save_grid(pipe: StableDiffusion3Pipeline, combos: Sequence[Combo], path: Path) -> None:
    """Save a picture: truth, reconstruction, Euler and stochastic samples, row by row."""
    picked = random.Random(0).sample(list(combos), 36)
    font = load_font()
    pixels = np.stack([render(c, font, 0, 0) for c in picked])
    truth = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    rebuilt = encode_images(pipe.vae, truth * 2 - 1) - pipe.vae.config.shift_factor
    rebuilt = decode_latents(pipe.vae, rebuilt * pipe.vae.config.scaling_factor)
    prompts = [c.prompt for c in picked]
    kinds = [truth, rebuilt, sample(pipe, prompts, 1), sample(pipe, prompts, 1, sde=True)]
    rows = [kind[start : start + 12] for start in (0, 12, 24) for kind in kinds]
    sheet = torch.cat([torch.cat(list(row), dim=2) for row in rows], dim=1)
    array = (sheet.permute(1, 2, 0) * 255).round().byte().numpy()
    image = Image.fromarray(array)
    image.resize((image.width * 3, image.height * 3), Image.Resampling.NEAREST).save(path)


# ---------------------------------------------------------------------------
# Folder
# ---------------------------------------------------------------------------


def save(pipe: StableDiffusion3Pipeline, folder: Path) -> None:
    """Write a diffusers folder; the large parts in half precision."""
    small = copy.deepcopy(pipe)
    # Unused tokenizers: a used one would write its last padding settings into the file.
    small.register_modules(tokenizer=build_tokenizer(), tokenizer_2=build_tokenizer())
    small.transformer.half()
    small.vae.half()
    small.save_pretrained(str(folder), safe_serialization=True)


def load(folder: Path) -> StableDiffusion3Pipeline:
    """Load a folder in float32, ready to sample."""
    pipe = StableDiffusion3Pipeline.from_pretrained(
        str(folder), text_encoder_3=None, tokenizer_3=None, dtype=torch.float32
    )
    pipe.set_progress_bar_config(disable=True)
    for part in (pipe.vae, pipe.transformer, pipe.text_encoder, pipe.text_encoder_2):
        part.eval().requires_grad_(False)
    loaded: StableDiffusion3Pipeline = pipe
    return loaded


def make(args: argparse.Namespace, reader: Reader) -> None:
    """Train everything and write the prompts and the pipeline."""
    train, held_out = split_combos()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for name, combos in (("train", train), ("heldout", held_out)):
        lines = "".join(f"{c.prompt}\n" for c in combos)
        (args.out.parent / f"prompts_{name}.txt").write_text(lines, encoding="utf-8")

    images, owner = render_pool(train)
    print(f"{len(train)} training and {len(held_out)} held-out prompts, {len(images)} images")
    if args.vae_from:
        found = AutoencoderKL.from_pretrained(str(args.vae_from), subfolder="vae")
        vae = build_vae()  # a fresh one, as the loaded one remembers its folder's path
        vae.load_state_dict(found.state_dict())
        vae.register_to_config(
            shift_factor=found.config.shift_factor, scaling_factor=found.config.scaling_factor
        )
        vae.eval().requires_grad_(False)
    else:
        vae = train_vae(images, args.vae_steps, args.seed)
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    pipe = StableDiffusion3Pipeline(
        transformer=build_transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=vae,
        text_encoder=build_text_encoder(tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=build_text_encoder(tokenizer),
        tokenizer_2=build_tokenizer(),
        text_encoder_3=None,
        tokenizer_3=None,
    )
    if args.checkpoints:
        save(pipe, args.checkpoints / "step00000-exact0")
    train_flow(pipe, images, owner, train, held_out, reader, args)
    save(pipe, args.out)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=EMBEDDED / "pipeline")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vae-steps", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=3000, help="most transformer steps")
    parser.add_argument("--seconds", type=float, default=1200, help="most transformer time")
    parser.add_argument("--target-exact", type=float, default=0.45, help="stop at this share read")
    parser.add_argument("--eval-from", type=int, default=350, help="step of the first reading")
    parser.add_argument("--eval-every", type=int, default=25, help="steps between readings")
    parser.add_argument("--checkpoints", type=Path, help="also keep every reading's weights here")
    parser.add_argument("--vae-from", type=Path, help="reuse the autoencoder of this folder")
    parser.add_argument("--evaluate-only", action="store_true", help="measure --out, do not train")
    parser.add_argument("--eval-seeds", type=int, default=5, help="seeds of the evaluation")
    parser.add_argument("--grid", type=Path, help="save a picture of samples here")
    return parser.parse_args()


def main() -> None:
    """Train (unless told not to), then measure."""
    args = parse()
    torch.set_num_threads(args.threads)
    reader = Reader(args.threads)
    started = time.monotonic()
    if not args.evaluate_only:
        make(args, reader)
        print(f"made in {time.monotonic() - started:.0f} s")
    evaluate(args.out, reader, args.eval_seeds, args.grid)


if __name__ == "__main__":
    main()
