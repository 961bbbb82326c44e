"""One image file → pixels, by timm's own transforms."""

from __future__ import annotations

import random as python_random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from brimful.errors import UsageError
from brimful.execution.random_state import RandomState
from brimful.recipes.image_folders import LabelledImages
from brimful.recipes.image_reader import read_image

_Options = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class TimmReader:
    """Reads single images of a data set as timm's loaders do."""

    images: LabelledImages
    augments: bool
    options: _Options
    """What `timm.data.create_transform` is called with, beside `is_training`."""

    def __len__(self) -> int:
        return len(self.images.paths)

    def read(self, index: int, random: torch.Generator | None) -> dict[str, Tensor]:
        """The pixels and the label of one image; with augmentation if `augments` and `random` is given.

        timm draws from the generators of Python, NumPy and torch: they are seeded from `random` meanwhile.
        """
        image = read_image(self.images.paths[index])
        if not self.augments or random is None:
            pixels = _transform(self.options, is_training=False)(image)
        else:
            seed = int(torch.randint(2**32, (), generator=random))
            with RandomState.kept():
                python_random.seed(seed)
                np.random.seed(seed)
                torch.default_generator.manual_seed(seed)  # not that of a GPU, as torch.manual_seed would
                pixels = _transform(self.options, is_training=True)(image)
        return {"images": pixels, "labels": torch.tensor(self.images.labels[index])}


def transform_options(name: str, image_size: int) -> dict[str, Any]:
    """The options of `timm.data.create_transform` that a timm model was trained with, in plain containers.

    `image_size` is height and width, in pixels. Raises `UsageError` if timm's transforms cannot be imported.
    """
    try:
        import timm
        from timm.data import create_transform, resolve_data_config
    except Exception as error:  # of torchvision, which they are made of
        raise UsageError(
            f"timm's transforms cannot be imported: {error}. They need timm, and the torchvision for this "
            "torch. Leave --timm-transforms out to use brimful's own."
        ) from error
    pretrained = timm.get_pretrained_cfg(name)
    config: Mapping[str, Any] = resolve_data_config(
        {"img_size": image_size}, pretrained_cfg={} if pretrained is None else pretrained.to_dict()
    )
    options = {option: list(value) if isinstance(value, tuple) else value for option, value in config.items()}
    create_transform(**dict(as_key(options)), is_training=True)  # raises here, not in a worker process
    return options


def as_key(options: Mapping[str, Any]) -> _Options:
    """The options of `transform_options` as a tuple that can be compared and sent to worker processes."""
    return tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in options.items())


@cache
def _transform(options: _Options, *, is_training: bool) -> Callable[[Any], Tensor]:
    from timm.data import create_transform

    made: Callable[[Any], Tensor] = create_transform(**dict(options), is_training=is_training)
    return made
