"""Write a pipeline large enough that communication shows, to time `leangrpo bench` with.

    python scripts/make_bench_model.py FOLDER

A Stable Diffusion 3 pipeline in diffusers format, randomly initialised, nothing downloaded. Its
transformer has 6 joint blocks of width 384 (6 heads of 64), 30.8 million parameters; latents of
(4, 32, 32) in patches of 2 make 256 image tokens, beside 32 text tokens. Text encoders and VAE are
those of the tests' tiny pipelines (two CLIPs and a T5 of width 16 and 32; 64 x 64 pixels). Call it
with height 64, width 64 and max_sequence_length 16. It draws noise: only its times mean something.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from diffusers import SD3Transformer2DModel

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import tiny


def main(folder: Path, layers: int = 6, heads: int = 6) -> None:
    """Write the pipeline with so many blocks, and so many heads of 64 in each."""
    pipe = tiny.tiny_sd3()
    torch.manual_seed(0)
    transformer = SD3Transformer2DModel(
        sample_size=32,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=layers,
        attention_head_dim=64,
        num_attention_heads=heads,
        joint_attention_dim=32,
        caption_projection_dim=64 * heads,
        pooled_projection_dim=32,
        pos_embed_max_size=32,
        qk_norm="rms_norm",
    )
    with torch.no_grad():  # away from diffusers' zeros, behind which no gradient passes
        for parameter in transformer.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)
    pipe.register_modules(transformer=transformer)
    tiny.save(pipe, folder)
    print(f"{folder}: {sum(p.numel() for p in transformer.parameters()) / 1e6:.1f}M parameters")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write it")
    main(parser.parse_args().folder)
