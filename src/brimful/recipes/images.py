"""Classifying images: a folder of class folders makes a job.

Images are read with Pillow. For training each is cropped at random and flipped as in Szegedy et al. 2014,
"Going Deeper with Convolutions", section 6 (8 to 100 % of the area, sides from 3:4 to 4:3); for validation its
middle is taken: 224 of 256 pixels, Krizhevsky et al. 2012. Values are normalized by ImageNet's mean and
deviation (torchvision's documentation of its models), of timm's models by those that each was trained with.
"""

from __future__ import annotations

import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from brimful.distributed.ranks import processors_here
from brimful.errors import DataError, UnknownNameError, UsageError
from brimful.files import is_directory
from brimful.job import Batch, Data, Job
from brimful.models import architecture_names, find_architecture
from brimful.models.vision import VISION_ARCHITECTURES
from brimful.optimizers import named_optimizer
from brimful.recipes.bad_samples import BadSample, BadSamples, check_bad_samples
from brimful.recipes.checks import check_fraction, digest
from brimful.recipes.classes import (
    accuracy,
    balanced_weights,
    count,
    loss,
    split_by_class,
    tell_without_validation,
)
from brimful.recipes.reading import ReadSamples
from brimful.recipes.weights import load_matching

if TYPE_CHECKING:
    from PIL.Image import Image

_MEAN = (0.485, 0.456, 0.406)
_DEVIATION = (0.229, 0.224, 0.225)
_LEAST_AREA = 0.08
_MOST_RATIO = 4 / 3
_MIDDLE = 224 / 256

_VALIDATION_FOLDERS = ("val", "valid", "validation", "test")

_MOST_ENDINGS = 6

_RATE_OF_PRETRAINED = 1e-4
"""Of AdamW, a tenth of torch's own: a choice, of the size that fine-tuning is published with."""

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
    check_fraction(validation_fraction)
    if weights is not None and not Path(weights).is_file():
        raise UsageError(f"there is no file {weights} to start from.")
    found = _find_model(model, image_size)
    classes, training, validation = _find_images(
        directory, validation_fraction, seed, bad=bad, decodes=check_files
    )
    tell_without_validation(classes, validation.labels)
    class_weights = balanced_weights(training.labels, len(classes)) if balance_classes else None

    def make_samples(samples: int) -> Batch:
        return {
            "images": torch.randn(samples, 3, image_size, image_size),
            "labels": torch.randint(len(classes), (samples,)),
        }

    def reader(images: _Labelled, augments: bool) -> _ImageReader:
        return _ImageReader(images, augments, image_size, found.mean, found.deviation)

    def data() -> Data:
        return Data(
            train=ReadSamples(reader(training, augment), workers=workers),
            validation=ReadSamples(reader(validation, False), workers=workers) if validation.paths else None,
        )

    return Job(
        model=partial(found.build, num_classes=len(classes), image_size=image_size),
        weights=None if weights is None else partial(load_matching, path=Path(weights)),
        loss=partial(loss, logits_of=_logits, class_weights=class_weights),
        count=None if class_weights is None else partial(count, class_weights=class_weights),
        batch=make_samples,
        optimizer=named_optimizer("adamw", learning_rate=1e-3 if weights is None else _RATE_OF_PRETRAINED),
        data=data,
        metrics=partial(accuracy, logits_of=_logits),
        name=f"{directory.resolve().name}-{model.removeprefix(TIMM)}",
        about={
            "task": "images",
            "model": model,
            "classes": list(classes),
            "image_size": image_size,
            "starts_from": "random weights" if weights is None else str(weights),
            "mean": found.mean,
            "deviation": found.deviation,
            "augment": augment,
            "balance_classes": balance_classes,
            "training_images": len(training.paths),
            "validation_images": len(validation.paths),
            "data": digest(_names(directory, training, validation)),
        },
    )


# Models

_Channels = tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A classifier, and what its images are normalized by."""

    build: Callable[..., nn.Module]
    """From `num_classes` and `image_size`."""
    mean: _Channels = _MEAN
    deviation: _Channels = _DEVIATION


def _find_model(name: str, image_size: int) -> _Found:
    if name.startswith(TIMM):
        return _find_timm(name.removeprefix(TIMM))
    classifiers = [known for known in VISION_ARCHITECTURES if known != "unet"]
    if name not in classifiers:
        kind = "image classifier" if name in architecture_names() else "model"
        raise UnknownNameError(kind, name, classifiers, hint=f'Those of timm are named "{TIMM}NAME".')
    find_architecture(name, image_size=image_size, num_classes=2)  # it refuses sizes before anything is read
    return _Found(build=lambda **sizes: _built(find_architecture(name, **sizes)))


def _built(job: Job) -> nn.Module:
    assert callable(job.model)
    model = job.model()
    assert isinstance(model, nn.Module)
    return model


def _find_timm(name: str) -> _Found:
    try:
        import timm
    except Exception as error:  # of torchvision too, which timm imports
        raise UsageError(
            f"{TIMM}{name} is built with timm, which cannot be imported: {error}. "
            'pip install "brimful[vision]".'
        ) from error
    if not timm.is_model(name):
        raise UnknownNameError("model of timm", name, timm.list_models())
    build = partial(_build_timm, name)
    settings = timm.get_pretrained_cfg(name)
    if settings is None:
        return _Found(build=build)
    return _Found(build=build, mean=tuple(settings.mean), deviation=tuple(settings.std))


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
    if not is_directory(directory):
        raise UsageError(
            f"there is no folder {directory}. Images lie in a folder with a folder for each class."
        )
    by_name = {folder.name.lower(): folder for folder in _folders(directory)}
    training_folder = by_name.get("train")
    apart = [by_name[name] for name in _VALIDATION_FOLDERS if name in by_name]
    is_alone = len(by_name) == 1
    if training_folder is not None and (apart or is_alone):
        lost = _lost_links(directory)
        check_bad_samples(lost, of=len(by_name) + len(lost), asked=bad)
    if training_folder is not None and apart:
        classes, found = _images_of(training_folder, None, bad=bad, decodes=decodes)
        _, validation_found = _images_of(apart[0], classes, bad=bad, decodes=decodes)
        return classes, found, validation_found
    within = training_folder if is_alone and training_folder is not None else directory
    _check_classes_are_no_parts(within)
    classes, found = _images_of(within, None, bad=bad, decodes=decodes)
    training, validation = split_by_class(found.labels, validation_fraction, seed)
    return classes, found.some(training), found.some(validation)


def _check_classes_are_no_parts(directory: Path) -> None:
    """Refuse folders for training and testing, by whatever names, in place of classes."""
    within = [{inner.name for inner in _folders(folder)} for folder in _folders(directory)]
    if len(within) > 1 and len(within[0]) > 1 and all(names == within[0] for names in within):
        raise UsageError(
            f"the folders in {directory} all have the same folders in them "
            f"({', '.join(sorted(within[0])[:4])}), so they are not classes. Call the one to train on "
            "train, that to validate with val."
        )


def _folders(directory: Path) -> list[Path]:
    return [entry for entry in _entries(directory) if is_directory(entry)]


def _entries(directory: Path) -> list[Path]:
    """All but what is hidden."""
    try:
        return sorted(entry for entry in directory.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise UsageError(f"the folder {directory} cannot be read: {error.strerror or error}.") from error


def _lost_links(directory: Path) -> list[BadSample]:
    """Links in the place of folders that lead nowhere, as to a disk that is not mounted."""
    entries = ((entry, _why_lost(entry)) for entry in _entries(directory) if entry.is_symlink())
    return [BadSample(where=str(entry), why=why) for entry, why in entries if why is not None]


def _images_of(
    directory: Path, classes: tuple[str, ...] | None, *, bad: BadSamples, decodes: bool
) -> tuple[tuple[str, ...], _Labelled]:
    """The classes, unless they are known, and the images of one folder of class folders."""
    folders = _folders(directory)
    broken = _lost_links(directory)
    files: list[tuple[Path, str]] = []
    for folder in folders:
        files += [(path, folder.name) for path in _files(folder, broken)]
    files = _images_by_name(directory, files)
    broken += _broken([path for path, _ in files], decodes=decodes)
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
    check_bad_samples(broken, of=len(files) + len(broken), asked=bad)
    classes = classes or tuple(sorted(present))
    if len(classes) < 2:
        raise UsageError(
            f"{directory} has images of {len(classes)} classes ({', '.join(classes) or 'none'}); at least 2 "
            "are needed. Each class is a folder there, with its images in it."
        )
    numbers = {name: number for number, name in enumerate(classes)}
    return classes, _Labelled(
        paths=tuple(path for path, _ in files), labels=tuple(numbers[name] for _, name in files)
    )


def _files(folder: Path, unreadable: list[BadSample]) -> list[Path]:
    """All but what is hidden, at any depth, also behind links; folders that cannot be read go to a list."""

    def add(error: OSError) -> None:
        why = f"a folder that cannot be read: {error.strerror or error}"
        unreadable.append(BadSample(where=str(error.filename), why=why))

    found: list[Path] = []
    seen = {_identity(parent) for parent in folder.resolve().parents}  # a link may lead to a folder above it
    for root, folders, names in os.walk(folder, onerror=add, followlinks=True):
        identity = _identity(Path(root))
        if identity in seen:
            folders.clear()
            continue
        seen.add(identity)
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(root, name) for name in names if not name.startswith(".")]
    return sorted(found)


def _identity(folder: Path) -> tuple[int, int]:
    found = folder.stat()
    return found.st_dev, found.st_ino


def _images_by_name(directory: Path, files: list[tuple[Path, str]]) -> list[tuple[Path, str]]:
    """Those that Pillow may read; the others are told of by the ends of their names."""
    from PIL import Image

    endings = {ending for ending, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    others = Counter(path.suffix.lower() for path, _ in files if path.suffix.lower() not in endings)
    if others:
        told = ", ".join(
            f"{count} × {ending or 'no ending'}" for ending, count in others.most_common(_MOST_ENDINGS)
        )
        warnings.warn(
            f"{others.total()} files in {directory} are not images by their names and are skipped: {told}.",
            stacklevel=4,
        )
    return [(path, name) for path, name in files if path.suffix.lower() in endings]


def _names(directory: Path, *parts: _Labelled) -> Iterator[str]:
    """By which the same images are known again."""
    for part in parts:
        for path, label in zip(part.paths, part.labels, strict=True):
            yield f"{path.relative_to(directory)} {label} {path.stat().st_size}"


def _broken(paths: Sequence[Path], *, decodes: bool) -> Iterator[BadSample]:
    """What is not a file, and, if they are decoded, files that cannot be decoded to their end."""
    why_broken = _why_broken if decodes else _why_no_file
    with ThreadPoolExecutor(processors_here()) as threads:  # Pillow decodes without holding the interpreter
        for path, why in zip(paths, threads.map(why_broken, paths), strict=True):
            if why is not None:
                yield BadSample(where=str(path), why=why)


def _why_no_file(path: Path) -> str | None:
    """Why there is not a regular file at a path; None if there is one."""
    why = _why_lost(path)
    return "not a regular file" if why is None and not path.is_file() else why


def _why_lost(path: Path) -> str | None:
    """Why there is nothing at a path that a folder names; None if there is something."""
    try:
        path.stat()
    except OSError as error:
        reason = error.strerror or error
        return f"a link to {path.readlink()}: {reason}" if path.is_symlink() else f"cannot be read: {reason}"
    return None


def _why_broken(path: Path) -> str | None:
    from PIL import Image

    why = _why_no_file(path)
    if why is not None:
        return why
    if path.stat().st_size == 0:
        return "an empty file"
    try:
        with Image.open(path) as image:
            image.draft("RGB", (1, 1))  # a JPEG is then decoded to an eighth, though read to its end
            image.load()
            if image.mode == "F":
                return "pixels in floating point, of which no one says what is white"
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
    mean: _Channels
    deviation: _Channels

    def __len__(self) -> int:
        return len(self.images.paths)

    def read(self, index: int, random: torch.Generator | None) -> dict[str, Tensor]:
        path = self.images.paths[index]
        try:
            whole = _opened(path)
        except Exception as error:  # Pillow's readers raise whatever the bytes lead to
            raise DataError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
        flips = False
        if self.augments and random is not None:
            box = _random_box(whole.width, whole.height, random)
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


def _opened(path: Path) -> Image:
    """An image upright, in 8 bits of three colours."""
    from PIL import Image, ImageOps

    with Image.open(path) as image:
        upright = ImageOps.exif_transpose(image)
        if upright.mode.startswith("I"):  # 16 bits, which `convert` would cut off at 255
            upright = Image.fromarray((np.asarray(upright).clip(0, 65535) / 257).astype(np.uint8))
        return upright.convert("RGB")


_Box = tuple[float, float, float, float]
"""Left, top, right and bottom, in pixels."""


def _pixels(image: Image, box: _Box, size: int) -> Tensor:
    """A part of an image at a size, (3, size, size), from 0 to 1."""
    from PIL.Image import Resampling

    resized = image.resize((size, size), Resampling.BILINEAR, box=box)
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1).float() / 255


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
