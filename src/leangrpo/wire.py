"""Pictures, prompts and metadata as JSON: what a trainer sends to a reward's server.

    {"images": [PNG in base64, ...], "prompts": [...], "metadata": [...]}

A video is a list of PNGs, and a picture in the metadata is `{"image/png": base64}`.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .errors import RewardError

if TYPE_CHECKING:
    from .rewards import Metadata

IMAGE = "image/png"
"""The one key of what stands for a picture in the metadata."""

MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""Pillow's name of a picture with so many channels."""

MAX_PIXELS = 1 << 28
"""Pixels of a request, all pictures together: a small PNG may hold very many."""


class WireError(Exception):
    """What is sent is not of this form."""


def encode(images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> bytes:
    """What is sent for B pictures `(B, C, H, W)` or videos `(B, F, C, H, W)` in [0, 1].

    Raises RewardError for pictures of 2 or more than 4 channels, and metadata that is no JSON.
    """
    pixels = (images.clamp(0, 1) * 255).round().byte().movedim(-3, -1).numpy()
    if pixels.shape[-1] not in MODES:
        raise RewardError(f"pictures have {pixels.shape[-1]} channels, and a PNG has 1, 3 or 4.")
    sent = [_png(x) if x.ndim == 3 else [_png(frame) for frame in x] for x in pixels]
    tree = {"images": sent, "prompts": list(prompts), "metadata": list(metadata)}
    try:
        return json.dumps(tree, default=_in_metadata, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise RewardError(f"the metadata cannot be sent to a server as JSON: {error}.") from error


def _png(pixels: Any) -> str:
    mode = MODES[pixels.shape[-1]]
    return _encoded(Image.fromarray(pixels[..., 0] if mode == "L" else pixels))


def _encoded(picture: Any) -> str:
    file = io.BytesIO()
    picture.save(file, format="PNG", compress_level=1)  # the network is faster than zlib
    return base64.b64encode(file.getvalue()).decode()


def _in_metadata(value: object) -> dict[str, str]:
    if isinstance(value, Image.Image):
        return {IMAGE: _encoded(value)}
    raise TypeError(f"it holds a {type(value).__name__}")


def decode(body: bytes) -> tuple[Tensor, list[str], list[Metadata]]:
    """The images, prompts and metadata of a request.

    `(B, C, H, W)` or `(B, F, C, H, W)` float32 in [0, 1]. Raises WireError saying what is wrong.
    """
    pixels = 0

    def picture(text: object) -> Image.Image:
        nonlocal pixels
        try:
            file = io.BytesIO(base64.b64decode(cast(str, text), validate=True))
            opened = Image.open(file, formats=["PNG"])
            pixels += opened.width * opened.height
            if pixels > MAX_PIXELS:
                raise WireError(f"there are more than {MAX_PIXELS} pixels")
            opened.load()
        except (TypeError, ValueError, OSError, SyntaxError, Image.DecompressionBombError) as error:
            raise WireError("a picture is no PNG in base64") from error
        return opened

    def restored(tree: dict[str, Any]) -> Any:
        return picture(tree[IMAGE]) if tree.keys() == {IMAGE} else tree

    def array(text: object) -> Any:
        opened = picture(text)
        if opened.mode not in MODES.values():
            raise WireError(f"a PNG has mode {opened.mode}, and 8-bit grey, RGB or RGBA is needed")
        found = np.asarray(opened)
        return found if found.ndim == 3 else found[..., None]

    try:
        tree = json.loads(body, object_hook=restored)
        images, prompts, metadata = tree["images"], tree["prompts"], tree["metadata"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise WireError("it is no JSON object of images, prompts and metadata") from error
    if not all(isinstance(some, list) for some in (images, prompts, metadata)):
        raise WireError("images, prompts and metadata must be lists")
    if not len(images) == len(prompts) == len(metadata) > 0:
        counts = f"{len(images)} images, {len(prompts)} prompts and {len(metadata)} metadata"
        raise WireError(f"there are {counts}, and as many of each are needed")
    if not all(isinstance(p, str) for p in prompts):
        raise WireError("a prompt is no string")
    if not all(isinstance(about, dict) for about in metadata):
        raise WireError("metadata is no object")
    try:
        arrays = [
            np.stack([array(frame) for frame in x]) if isinstance(x, list) else array(x)
            for x in images
        ]
        stacked = np.stack(arrays)
    except ValueError as error:
        raise WireError("the pictures are not all of one shape") from error
    return torch.from_numpy(stacked).movedim(-1, -3).float().div(255), prompts, metadata
