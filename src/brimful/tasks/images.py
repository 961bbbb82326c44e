"""Classifying images: a folder of class folders makes a job.

Images are read with Pillow. For training each is cropped at random and flipped as in Szegedy et al. 2014,
"Going Deeper with Convolutions", section 6 (8 to 100 % of the area, sides from 3:4 to 4:3); for validation its
middle is taken: 224 of 256 pixels, Krizhevsky et al. 2012. Values are normalized by ImageNet's mean and
deviation, which published weights expect (torchvision's documentation of its models).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from brimful.architectures import architecture_names, find_architecture
from brimful.architectures.vision import VISION_ARCHITECTURES
from brimful.errors import UnknownNameError, UsageError
from brimful.job import Batch, Data, Job
from brimful.tasks.bad_samples import BadSample, BadSamples, heed
from brimful.tasks.classes import accuracy, balanced_weights, count, loss, split_by_class
from brimful.tasks.reading import ReadSamples
from brimful.tasks.weights import load_matching

if TYPE_CHECKING:
    from PIL.Image import Image

_MEAN = (0.485, 0.456, 0.406)
_DEVIATION = (0.229, 0.224, 0.225)
_LEAST_AREA = 0.08
_MOST_RATIO = 4 / 3
_MIDDLE = 224 / 256

_VALIDATION_FOLDERS = ("val", "valid", "validation", "test")

TIMM = "timm/"
"""Before the name of a model of timm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Labelled:
    """Image files and the class of each, by number."""

    paths: tuple[Path, ...]
    labels: tuple[int, ...]

    def some(self, indices: Sequence[int]) -> _Labelled:
        return _Labelled(
            paths=tuple(self.paths[index] for index in indices),
            labels=tuple(self.labels[index] for index in indices),
        )


def image_classification(
    directory: Path | str,
    *,
    model: str = "resnet50",
    weights: Path | str | None = None,
    image_size: int = 224,
    validation_fraction: float = 0.1,
    augment: bool = True,
    balance_classes: bool = False,
    bad_samples: str = "refuse",
    check_files: bool = True,
    workers: int | None = None,
    seed: int = 0,
) -> Job:
    """A job that learns to tell the classes of images.

    Args:
        directory: A folder with a folder for each class, in which images may lie at any depth; or one with
            `train` and `val` (or `valid`, `validation`, `test`) that are such folders.
        model: A built-in classifier, such as "resnet18" or "vit-base"; or "timm/NAME", of timm.
        weights: A safetensors file, or one that `torch.save` wrote of tensors. Those whose name and shape the
            model has are loaded; a last layer for other classes is not.
        image_size: Pixels per side.
        validation_fraction: Of each class's images, taken where the folder has none for validation.
        augment: Crop and flip at random.
        balance_classes: Weigh each sample by the inverse of how often its class comes.
        bad_samples: "refuse" images that are broken and classes that are empty, or "skip" them with a warning.
        check_files: Decode every file once, so that no broken one ends a run hours later. It takes a few
            milliseconds each.
        workers: Processes that read images; None takes as many as there are processors, 8 at most.
        seed: Decides which images are for validation.

    Returns:
        A job with data, the metric `accuracy`, and its classes in `about`.

    Raises:
        UsageError: There is no such folder, model or file, or a number is out of range.
        DataError: Images are broken or classes empty, and they are refused.
    """
    _check_pillow()
    directory = Path(directory)
    bad = BadSamples.parse(bad_samples)
    if not 0 < validation_fraction < 1:
        raise UsageError(f"validation_fraction is {validation_fraction}; it must lie between 0 and 1.")
    build = _find_model(model)
    classes, training, validation = _find_images(
        directory, validation_fraction, seed, bad=bad, decodes=check_files
    )
    class_weights = balanced_weights(training.labels, len(classes)) if balance_classes else None

    def make_samples(samples: int) -> Batch:
        return {
            "images": torch.randn(samples, 3, image_size, image_size),
            "labels": torch.randint(len(classes), (samples,)),
        }

    def data() -> Data:
        return Data(
            train=ReadSamples(_ImageReader(training, augment, image_size), workers=workers),
            validation=ReadSamples(_ImageReader(validation, False, image_size), workers=workers),
        )

    return Job(
        model=partial(build, num_classes=len(classes), image_size=image_size),
        weights=None if weights is None else partial(load_matching, path=Path(weights)),
        loss=partial(loss, logits_of=_logits, class_weights=class_weights),
        count=None if class_weights is None else partial(count, class_weights=class_weights),
        batch=make_samples,
        optimizer="adamw",
        data=data,
        metrics=partial(accuracy, logits_of=_logits),
        name=f"{directory.resolve().name}-{model.removeprefix(TIMM)}",
        about={
            "task": "images",
            "model": model,
            "classes": list(classes),
            "image_size": image_size,
            "mean": _MEAN,
            "deviation": _DEVIATION,
            "augment": augment,
            "balance_classes": balance_classes,
            "training_images": len(training.paths),
            "validation_images": len(validation.paths),
        },
    )


# Models


def _find_model(name: str) -> Callable[..., nn.Module]:
    """What builds a classifier from `num_classes` and `image_size`."""
    if name.startswith(TIMM):
        return partial(_build_timm, _checked_timm(name.removeprefix(TIMM)))
    classifiers = [known for known in VISION_ARCHITECTURES if known != "unet"]
    if name not in classifiers:
        kind = "image classifier" if name in architecture_names() else "model"
        raise UnknownNameError(kind, name, classifiers, hint=f'Those of timm are named "{TIMM}NAME".')
    return lambda **sizes: _built(find_architecture(name, **sizes))


def _built(job: Job) -> nn.Module:
    assert callable(job.model)
    model = job.model()
    assert isinstance(model, nn.Module)
    return model


def _checked_timm(name: str) -> str:
    try:
        import timm
    except Exception as error:  # of torchvision too, which timm imports
        raise UsageError(
            f"{TIMM}{name} is built with timm, which cannot be imported: {error}. "
            'pip install "brimful[vision]".'
        ) from error
    if not timm.is_model(name):
        raise UnknownNameError("model of timm", name, timm.list_models())
    return name


def _build_timm(name: str, *, num_classes: int, image_size: int) -> nn.Module:
    import timm

    settings = timm.get_pretrained_cfg(name)
    has_fixed_size = settings is not None and settings.fixed_input_size
    sizes = {"img_size": image_size} if has_fixed_size else {}
    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=num_classes, **sizes)
    return model


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    found: Any = model(batch["images"])
    logits: Tensor = found if isinstance(found, Tensor) else found.logits
    return logits


# Files


def _find_images(
    directory: Path, validation_fraction: float, seed: int, *, bad: BadSamples, decodes: bool
) -> tuple[tuple[str, ...], _Labelled, _Labelled]:
    """The classes, and the images to train on and to validate with."""
    if not directory.is_dir():
        raise UsageError(
            f"there is no folder {directory}. Images lie in a folder with a folder for each class."
        )
    apart = [directory / name for name in _VALIDATION_FOLDERS if (directory / name).is_dir()]
    if not (directory / "train").is_dir() or not apart:
        classes, found = _images_of(directory, None, bad=bad, decodes=decodes)
        training, validation = split_by_class(found.labels, validation_fraction, seed)
        return classes, found.some(training), found.some(validation)
    classes, found = _images_of(directory / "train", None, bad=bad, decodes=decodes)
    _, validation_found = _images_of(apart[0], classes, bad=bad, decodes=decodes)
    return classes, found, validation_found


def _images_of(
    directory: Path, classes: tuple[str, ...] | None, *, bad: BadSamples, decodes: bool
) -> tuple[tuple[str, ...], _Labelled]:
    """The classes, unless they are known, and the images of one folder of class folders."""
    folders = sorted(entry for entry in directory.iterdir() if entry.is_dir() and not _is_hidden(entry))
    files = [(path, folder.name) for folder in folders for path in _image_files(folder)]
    broken = list(_broken([path for path, _ in files])) if decodes else []
    left_out = {sample.where for sample in broken}
    files = [(path, name) for path, name in files if str(path) not in left_out]
    present = {name for _, name in files}
    empty = [folder for folder in folders if folder.name not in present]
    broken += [
        BadSample(where=str(folder), why="a class without an image that can be used") for folder in empty
    ]
    if classes is not None:
        unknown = sorted(present - set(classes))
        broken += [
            BadSample(where=str(directory / name), why="no class of the training data") for name in unknown
        ]
        files = [(path, name) for path, name in files if name in classes]
    heed(broken, of=len(files) + len(broken), asked=bad)
    classes = classes or tuple(sorted(present))
    if len(classes) < 2:
        raise UsageError(
            f"{directory} has images of {len(classes)} classes ({', '.join(classes) or 'none'}); at least 2 "
            "are to be told apart. Each class is a folder there, with its images in it."
        )
    numbers = {name: number for number, name in enumerate(classes)}
    return classes, _Labelled(
        paths=tuple(path for path, _ in files), labels=tuple(numbers[name] for _, name in files)
    )


def _image_files(folder: Path) -> Iterator[Path]:
    """Whatever Pillow reads, by its name."""
    from PIL import Image

    suffixes = Image.registered_extensions()
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in suffixes and not _is_hidden(path) and path.is_file():
            yield path


def _is_hidden(path: Path) -> bool:
    return path.name.startswith(".")


def _broken(paths: Sequence[Path]) -> Iterator[BadSample]:
    """The files that cannot be decoded to their end."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # Pillow decodes without holding the interpreter
        for path, why in zip(paths, threads.map(_why_broken, paths), strict=True):
            if why is not None:
                yield BadSample(where=str(path), why=why)


def _why_broken(path: Path) -> str | None:
    from PIL import Image

    if path.stat().st_size == 0:
        return "an empty file"
    try:
        with Image.open(path) as image:
            image.draft("RGB", (1, 1))  # a JPEG is then decoded to an eighth, though read to its end
            image.load()
    except Exception as error:  # Pillow's readers raise whatever the bytes lead to
        told = str(error).replace(repr(str(path)), "its content")
        return f"{type(error).__name__}: {told}"
    return None


def _check_pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise UsageError(
            'images are read with Pillow, which is not installed: pip install "brimful[vision]".'
        ) from error


# One image


@dataclass(frozen=True, slots=True)
class _ImageReader:
    """Reads one image after another."""

    images: _Labelled
    augments: bool
    image_size: int

    def __len__(self) -> int:
        return len(self.images.paths)

    def read(self, index: int, random: torch.Generator | None) -> dict[str, Tensor]:
        from PIL import Image

        with Image.open(self.images.paths[index]) as image:
            whole = image.convert("RGB")
        flips = False
        if self.augments and random is not None:
            box = _random_box(whole.width, whole.height, random)
            flips = bool(torch.rand((), generator=random) < 0.5)
        else:
            box = _middle_box(whole.width, whole.height)
        pixels = _pixels(whole, box, self.image_size)
        return {
            "images": pixels.flip(-1) if flips else pixels,
            "labels": torch.tensor(self.images.labels[index]),
        }


_Box = tuple[float, float, float, float]
"""Left, top, right and bottom, in pixels."""


def _pixels(image: Image, box: _Box, size: int) -> Tensor:
    """A part of an image at a size, (3, size, size), normalized."""
    from PIL.Image import Resampling

    resized = image.resize((size, size), Resampling.BILINEAR, box=box)
    pixels = torch.from_numpy(np.array(resized)).permute(2, 0, 1).float() / 255
    mean, deviation = torch.tensor(_MEAN), torch.tensor(_DEVIATION)
    return (pixels - mean[:, None, None]) / deviation[:, None, None]


def _random_box(width: int, height: int, random: torch.Generator) -> _Box:
    """Of an area and a ratio of sides at random, as near to them as fits into the image."""
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
