"""Sample grids: pictures and their prompts on one sheet, and cut out of it again."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .runfolder import unwritable

_GEOMETRY = "leangrpo:grid"
"""Key of the PNG text that tells where each picture of a grid lies, as JSON."""

LARGEST = 256
"""Longer side, in pixels, of a picture in the page; small ones are kept as they are."""


def save_grid(
    images: Tensor, prompts: Sequence[str], scores: Sequence[float], path: Path, columns: int = 8
) -> None:
    """Write pictures `(N, C, H, W)` in [0, 1] as one PNG, prompt and score under each.

    Small pictures are enlarged, pixel by pixel, to 96 at least. Where each picture lies is kept
    in the PNG's text, so that it can be cut out again. Raises LeanError when the disk refuses.
    """
    from PIL import Image, ImageDraw, ImageFont, PngImagePlugin

    num, _, height, width = images.shape
    factor = max(1, math.ceil(96 / min(height, width)))
    size = (width * factor, height * factor)
    columns = min(columns, num)
    cell = (size[0] + 8, size[1] + 46)
    sheet = Image.new("RGB", (columns * cell[0], math.ceil(num / columns) * cell[1]), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(10)
    corners = []
    for i, (image, prompt, score) in enumerate(zip(images, prompts, scores, strict=True)):
        x, y = (i % columns) * cell[0] + 4, (i // columns) * cell[1] + 2
        corners.append((x, y))
        picture = to_picture(image).resize(size, Image.Resampling.NEAREST)
        sheet.paste(picture, (x, y))
        shown = f"{score:.2f}" if math.isfinite(score) else "no score"
        lines = _wrap(prompt, lambda text: draw.textlength(text, font) <= size[0])
        draw.text((x, y + size[1] + 2), "\n".join([*lines, shown]), fill="black", font=font)
    geometry = PngImagePlugin.PngInfo()
    where = {"corners": corners, "width": size[0], "height": size[1], "factor": factor}
    geometry.add_text(_GEOMETRY, json.dumps(where))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sheet.save(path, pnginfo=geometry)
    except OSError as error:
        raise unwritable(path, error) from error


def _wrap(text: str, fits: Callable[[str], bool]) -> list[str]:
    """Two lines at most, broken at a space where there is one, the rest left out with an …"""
    lines, words = [""], text.split()
    while words:
        longer = f"{lines[-1]} {words[0]}".strip()
        if fits(longer):
            lines[-1] = longer
            words.pop(0)
        elif lines[-1] and len(lines) < 2:
            lines.append("")
        else:
            cut = longer
            while cut and not fits(f"{cut}…"):
                cut = cut[:-1]
            return [*lines[:-1], f"{cut}…"]
    return lines


def to_picture(image: Tensor) -> Any:
    """A PIL picture of `(C, H, W)` in [0, 1]; non-finite pixels become magenta, not black."""
    from PIL import Image

    image = image.detach().float().cpu()
    rgb = image[:1].expand(3, -1, -1) if image.shape[0] < 3 else image[:3]
    bad = ~rgb.isfinite().all(dim=0)
    pixels = (rgb.nan_to_num().clamp(0, 1) * 255).round().byte().movedim(0, -1).numpy().copy()
    pixels[bad.numpy()] = (255, 0, 255)
    return Image.fromarray(pixels)


def side_by_side(images: Tensor, columns: int = 4) -> Tensor:
    """Pictures `(N, C, H, W)` side by side, `(C, rows * H, columns * W)`, for TensorBoard."""
    images = images.detach().float().cpu().nan_to_num().clamp(0, 1)
    images = images[:, :1] if images.shape[1] < 3 else images[:, :3]
    num, channels, height, width = images.shape
    columns = min(columns, num)
    rows = math.ceil(num / columns)
    sheet = torch.ones(rows * columns, channels, height, width)
    sheet[:num] = images
    tiles = sheet.view(rows, columns, channels, height, width)
    return tiles.permute(2, 0, 3, 1, 4).reshape(channels, rows * height, columns * width)


def cut_out(path: Path) -> list[str]:
    """The pictures of a sample grid as data URIs, cut out where the PNG's text says they lie.

    Pictures that were enlarged shrink back to their own pixels; large ones to LARGEST.
    A PNG without that text, or with one that is damaged, is one picture; a file that is no
    picture has none.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as file:
            text = getattr(file, "text", {}).get(_GEOMETRY)
            sheet = file.convert("RGB")
    except (OSError, UnidentifiedImageError):
        return []
    try:
        where = json.loads(text or "")
        width, height, factor = where["width"], where["height"], where["factor"]
        corners, own = [(x, y) for x, y in where["corners"]], (width // factor, height // factor)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return [_data_uri(sheet)]
    found = []
    for x, y in corners:
        picture = sheet.crop((x, y, x + width, y + height))
        found.append(_data_uri(picture.resize(own, Image.Resampling.NEAREST)))
    return found


def _data_uri(picture: Any) -> str:
    kind = "png" if max(picture.size) <= 64 else "webp"
    picture.thumbnail((LARGEST, LARGEST))
    buffer = io.BytesIO()
    picture.save(buffer, kind, quality=85)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
