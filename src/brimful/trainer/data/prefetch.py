"""Batches that are made ready while the step before them runs."""

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
    """Read one batch after the other in a thread, each while the one before it is used.

    Only for a `read` that draws no random numbers: those of a thread would come between those of a step.

    Args:
        places: What to read, in order.
        read: Gives a batch on the host.
        device: Where it is going; for a GPU its memory is pinned, so that the copy need not be waited for.

    Yields:
        What `read` gives, in order. What it raises is raised here.
    """
    is_gpu = device.type == "cuda"
    # without it the thread would pin by way of the first GPU, and so make a context there (torch does the same)
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
