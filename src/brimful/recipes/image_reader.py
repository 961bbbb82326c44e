"""One image file → pixels in the size of a model, cropped, flipped and normalized.

For training, images are cropped at random and flipped as in Szegedy et al. 2014, "Going Deeper with
Convolutions", section 6 (8 to 100 % of the area, sides from 3:4 to 4:3); for validation, they are cropped to
the center: 224 of 256 pixels, Krizhevsky et al. 2012.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from brimful.errors import DataError
from brimful.recipes.image_folders import LabelledImages

if TYPE_CHECKING:
    from PIL.Image import Image

_LEAST_AREA = 0.08
_MOST_RATIO = 4 / 3
_MIDDLE = 224 / 256


Channels = tuple[float, float, float]
"""Values for red, green and blue."""


@dataclass(frozen=True, slots=True)
class ImageReader:
    """Reads single images of a data set."""

    images: LabelledImages
    augments: bool
    image_size: int
    mean: Channels
    deviation: Channels

    def __len__(self) -> int:
        return len(self.images.paths)

    def read(self, index: int, random: torch.Generator | None) -> dict[str, Tensor]:
        """The pixels and the label of one image; with augmentation if `augments` and `random` is given."""
        whole = read_image(self.images.paths[index])
        flips = False
        if self.augments and random is not None:
            box = random_box(whole.width, whole.height, random)
            flips = bool(torch.rand((), generator=random) < 0.5)
        else:
            box = _middle_box(whole.width, whole.height)
        pixels = _pixels(whole, box, self.image_size)
        mean, deviation = torch.tensor(self.mean), torch.tensor(self.deviation)
        normalized = (pixels - mean[:, None, None]) / deviation[:, None, None]
        return {
            "images": normalized.flip(-1) if flips else normalized,
            "labels": torch.tensor(self.images.labels[index]),
        }


def read_image(path: Path) -> Image:
    """Read an image as `opened` does; raises `DataError` if it cannot be read."""
    try:
        return opened(path)
    except Exception as error:  # Pillow's readers raise whatever the bytes lead to
        raise DataError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def opened(path: Path) -> Image:
    """Open an image file in upright orientation, as 8-bit RGB."""
    from PIL import Image, ImageOps

    with Image.open(path) as image:
        upright = ImageOps.exif_transpose(image)
        if upright.mode.startswith("I"):  # 16 bits, which `convert` would clip at 255
            upright = Image.fromarray((np.asarray(upright).clip(0, 65535) / 257).astype(np.uint8))
        return upright.convert("RGB")


_Box = tuple[float, float, float, float]
"""A box in an image: left, top, right and bottom, in pixels."""


def _pixels(image: Image, box: _Box, size: int) -> Tensor:
    """A crop of an image resized to (3, size, size), with values from 0 to 1."""
    from PIL.Image import Resampling

    resized = image.resize((size, size), Resampling.BILINEAR, box=box)
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1).float() / 255


def random_box(width: int, height: int, random: torch.Generator) -> _Box:
    """A box with random area and aspect ratio, as close to both as fits into the image."""
    drawn = torch.rand(4, generator=random, dtype=torch.float64).tolist()
    area = width * height * (_LEAST_AREA + (1 - _LEAST_AREA) * drawn[0])
    ratio = math.exp((2 * drawn[1] - 1) * math.log(_MOST_RATIO))
    box_width = min(math.sqrt(area * ratio), width)
    box_height = min(math.sqrt(area / ratio), height)
    left, top = (width - box_width) * drawn[2], (height - box_height) * drawn[3]
    return left, top, left + box_width, top + box_height


def _middle_box(width: int, height: int) -> _Box:
    side = min(width, height) * _MIDDLE
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side
