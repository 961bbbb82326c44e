"""Reads batches ahead, while the step before them runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from brimful.batches import map_tensors
from brimful.job import Batch

T = TypeVar("T")


def read_ahead(places: Iterable[T], read: Callable[[T], Batch], device: torch.device) -> Iterator[Batch]:
    """Read batches in a thread, in the order of `places`, each while the one before it is used.

    `read` returns a batch on the host. It must not draw random numbers: they would come between those of a
    step. If the device is a GPU the batch is pinned, which makes its copy asynchronous. An error in `read` is
    raised here.
    """
    is_gpu = device.type == "cuda"
    # otherwise pinning would create a context on the first GPU (torch's own pinning thread does the same)
    on_device = partial(torch.cuda.set_device, device) if is_gpu else None
    with ThreadPoolExecutor(1, "brimful-data", initializer=on_device) as thread:
        coming: Future[Batch] | None = None
        for place in places:
            after = thread.submit(_pinned, read, place) if is_gpu else thread.submit(read, place)
            if coming is not None:
                yield coming.result()
            coming = after
        if coming is not None:
            yield coming.result()


def _pinned(read: Callable[[T], Batch], place: T) -> Batch:
    return map_tensors(read(place), Tensor.pin_memory)
