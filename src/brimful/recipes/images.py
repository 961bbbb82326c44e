"""Image classification: a job from a folder of class folders.

`image_folders.py` finds the files, `image_reader.py` reads them with Pillow. Values are normalized with
ImageNet's mean and standard deviation (source: torchvision's documentation of its models); for timm's models
with their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from brimful.errors import UnknownNameError, UsageError
from brimful.job import Batch, Data, Job
from brimful.models import architecture_names, find_architecture
from brimful.models.vision import VISION_ARCHITECTURES
from brimful.optimizers import named_optimizer
from brimful.recipes.bad_samples import BadSamples
from brimful.recipes.classes import one_label, warn_without_validation
from brimful.recipes.image_folders import LabelledImages, check_pillow, find_images, identities
from brimful.recipes.image_reader import Channels, ImageReader
from brimful.recipes.reading import ReadSamples
from brimful.recipes.samples import check_fraction, digest, sample
from brimful.recipes.timm_reader import TimmReader, as_key, transform_options
from brimful.recipes.weights import load_matching

_MEAN = (0.485, 0.456, 0.406)
_DEVIATION = (0.229, 0.224, 0.225)
_RATE_OF_PRETRAINED = 1e-4
"""Learning rate of AdamW, a tenth of torch's default: a choice, typical of published fine-tuning."""

TIMM = "timm/"
"""Prefix of the name of a timm model."""


def image_classification(
    directory: Path | str,
    *,
    model: str = "resnet50",
    weights: Path | str | None = None,
    image_size: int = 224,
    validation_fraction: float = 0.1,
    augment: bool = True,
    timm_transforms: bool = False,
    training_metrics: bool = False,
    balance_classes: bool = False,
    bad_samples: str = "refuse",
    check_files: bool = True,
    workers: int | None = None,
    prefetch_factor: int | None = None,
    seed: int = 0,
) -> Job:
    """Create a job that trains an image classifier.

    Args:
        directory: A folder with one folder of images per class, at any depth; or a folder with `train` and
            `val` (or `valid`, `validation`, `test`) that are such folders.
        model: A built-in classifier, such as "resnet18" or "vit-base"; or "timm/NAME" for a model of timm.
        weights: A safetensors file, or a file of tensors that `torch.save` wrote. Tensors with matching name
            and shape are loaded; a last layer for other classes is not.
        image_size: Height and width of the images, in pixels.
        validation_fraction: Fraction of each class's images for validation, if the folder has no validation
            images.
        augment: Crop and flip training images at random.
        timm_transforms: Transform images as timm does, with the crops, interpolation, mean and deviation of a
            model of timm; training images also change their colors at random. Needs torchvision.
        training_metrics: Also compute loss and metrics of training images at each validation, without
            augmentation, of as many as there are validation images.
        balance_classes: Weight each sample by the inverse frequency of its class.
        bad_samples: "refuse" broken images and empty classes, or "skip" them with a warning.
        check_files: Decode every file once before training, so that a broken file does not end a run hours
            later. It takes a few milliseconds per file.
        workers: Number of processes that read images; None uses one per processor, at most 8.
        prefetch_factor: Groups of 16 images that each of them reads ahead; None takes torch's default, 2.
        seed: Seed of the choice of validation images.

    Returns:
        A job with data, the metric `accuracy`, and its classes in `about`.

    Raises:
        UsageError: A folder, model or file does not exist, or a number is out of range.
        DataError: Images are broken or classes empty, and they are refused.
    """
    check_pillow()
    directory = Path(directory)
    bad = BadSamples.parse(bad_samples)
    check_fraction(validation_fraction)
    if weights is not None and not Path(weights).is_file():
        raise UsageError(f"there is no file {weights} to start from.")
    if timm_transforms and not model.startswith(TIMM):
        raise UsageError(f"timm's transforms are for its models, {TIMM}NAME, and the model is {model}.")
    found = _find_model(model, image_size)
    options = transform_options(model.removeprefix(TIMM), image_size) if timm_transforms else None
    classes, training, validation = find_images(
        directory, validation_fraction, seed, bad=bad, decodes=check_files
    )
    warn_without_validation(classes, validation.labels)

    def make_samples(samples: int) -> Batch:
        return {
            "images": torch.randn(samples, 3, image_size, image_size),
            "labels": torch.randint(len(classes), (samples,)),
        }

    def samples_of(images: LabelledImages, *, augments: bool = False) -> ReadSamples:
        if options is not None:
            return ReadSamples(
                TimmReader(images, augments, as_key(options)), workers=workers, prefetch_factor=prefetch_factor
            )
        reader = ImageReader(images, augments, image_size, found.mean, found.deviation)
        return ReadSamples(reader, workers=workers, prefetch_factor=prefetch_factor)

    def data() -> Data:
        has_sample = training_metrics and len(validation.paths) > 0
        some_training = training.some(sample(len(training.paths), len(validation.paths), seed))
        return Data(
            train=samples_of(training, augments=augment),
            validation=samples_of(validation) if validation.paths else None,
            training_sample=samples_of(some_training) if has_sample else None,
        )

    return Job(
        model=partial(found.build, num_classes=len(classes), image_size=image_size),
        weights=None if weights is None else partial(load_matching, path=Path(weights)),
        **one_label(training.labels, len(classes), logits_of=_logits, balances=balance_classes),
        batch=make_samples,
        optimizer=named_optimizer("adamw", learning_rate=1e-3 if weights is None else _RATE_OF_PRETRAINED),
        data=data,
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
            **({} if options is None else {"timm_transforms": options}),
            "balance_classes": balance_classes,
            "training_images": len(training.paths),
            "validation_images": len(validation.paths),
            "data": digest(identities(directory, training, validation)),
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A classifier, and the mean and deviation to normalize its images with."""

    build: Callable[..., nn.Module]
    """Builds the model from `num_classes` and `image_size`."""
    mean: Channels = _MEAN
    deviation: Channels = _DEVIATION


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
            f"{TIMM}{name} is built with timm, which cannot be imported: {error}. pip install timm."
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
