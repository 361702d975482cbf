"""Write a pipeline large enough that communication shows, to time `leangrpo bench` with.

    python scripts/make_bench_model.py FOLDER

A Stable Diffusion 3 pipeline in diffusers format, randomly initialised, nothing downloaded
(`leangrpo.bench_model`). Its transformer has 6 joint blocks of width 384 (6 heads of 64), 30.8
million parameters; latents of (4, 32, 32) in patches of 2 make 256 image tokens. Call it with
height 64, width 64 and max_sequence_length 16. It draws noise: only its times mean something.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from leangrpo.bench_model import make_bench_model


def main(folder: Path, layers: int = 6, heads: int = 6) -> None:
    """Write the pipeline with so many blocks, and so many heads of 64 in each."""
    number = make_bench_model(folder, layers, heads)
    print(f"{folder}: {number / 1e6:.1f}M parameters")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write it")
    main(parser.parse_args().folder)
