"""A job whose batches have smaller samples: shorter texts, smaller images."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

from torch import Tensor

from brimful.batches.layout import make_batch
from brimful.batches.tensors import map_tensors, named_tensors
from brimful.job import Job

_LEAST_TOKENS = 128
_LEAST_PIXELS = 64
"""Samples that are at least this long, or high and wide, are halved. A choice."""
_CHANNELS = (1, 3, 4)
"""Channels of images, and of latent ones."""
_MOST_ASPECT = 4
"""Height and width that differ more are those of a spectrogram, whose frequencies stay. A choice."""


class SmallerSamples(NamedTuple):
    """A job with samples of half the length, or half the height and width."""

    job: Job
    before: tuple[int, ...]
    """Tokens of a text, or height and width of an image."""
    after: tuple[int, ...]


def with_smaller_samples(job: Job) -> SmallerSamples | None:
    """The job with the first half of each text, or a quarter of each image; None if it has neither.

    A batch of texts has `input_ids` of shape (samples, tokens); of other tensors the second dimension is halved
    if it has as many, and the last two of masks. A batch of images has a floating-point tensor of shape
    (samples, 1, 3 or 4, height, width), where one is at most four times the other; of others the last two
    dimensions are halved where they are as large. Models may not take such samples.
    """
    if job.batch_dim or job.split is not None:
        return None
    tensors = dict(named_tensors(make_batch(job, 1)))
    text = tensors.get('batch["input_ids"]')
    images = [each for each in tensors.values() if _is_image(each)]
    before: tuple[int, ...] = ()
    if text is not None and text.ndim == 2:
        before, least = tuple(text.shape[1:]), _LEAST_TOKENS
    elif images:
        before, least = tuple(max(images, key=Tensor.numel).shape[2:]), _LEAST_PIXELS
    if not before or min(before) < least:
        return None
    after = tuple(size // 2 for size in before)
    crop = partial(_cropped, before, after)
    smaller = replace(job, batch=lambda samples: map_tensors(make_batch(job, samples), crop), data=None)
    return SmallerSamples(smaller, before, after)


def _is_image(tensor: Tensor) -> bool:
    return (
        tensor.ndim == 4
        and tensor.is_floating_point()
        and tensor.shape[1] in _CHANNELS
        and max(tensor.shape[2:]) <= _MOST_ASPECT * min(tensor.shape[2:])
    )


def _cropped(before: tuple[int, ...], after: tuple[int, ...], tensor: Tensor) -> Tensor:
    """The first part of a tensor, in its dimensions of tokens, or in those of pixels."""
    if len(before) == 1:
        is_mask = tensor.ndim > 2 and set(tensor.shape[-2:]) == set(before)
        if is_mask and (not tensor.is_floating_point() or tensor.shape[1] == 1):
            tensor = tensor[..., : after[0], : after[0]]
        elif tensor.ndim > 1 and tensor.shape[1] == before[0]:
            tensor = tensor[:, : after[0]]
    elif tensor.ndim > 2 and tuple(tensor.shape[-2:]) == before:
        tensor = tensor[..., : after[0], : after[1]]
    return tensor.contiguous()
