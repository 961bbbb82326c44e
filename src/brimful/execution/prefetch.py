"""Copies of micro-batches to the device that go on beside the computing of the one before."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from brimful.batches import map_tensors, named_tensors
from brimful.job import Batch
from brimful.transforms.host_link import to_device, to_device_done


def prefetch_to(device: torch.device | str) -> Callable[[Batch], Callable[[], Batch]]:
    """A `prefetch` for `run_step` that copies to `device` on a stream of its own.

    Only from pinned memory does the host go on meanwhile. Elsewhere than on CUDA it is a copy made at once.

    Args:
        device: Where the model is.

    Returns:
        Begins the copy of a micro-batch on the host; what it returns lets the device wait for it.
    """
    return partial(_Coming, device=torch.device(device))


class _Coming:
    """A micro-batch on its way.

    Args:
        batch: On the host.
        device: Where it goes.
    """

    def __init__(self, batch: Batch, device: torch.device) -> None:
        self._copies: Batch = map_tensors(batch, partial(_begun, device=device))

    def __call__(self) -> Batch:
        """The copy, once what follows on the device is to wait for it; it is not held here any more."""
        copies, self._copies = self._copies, None
        _arrive(copies)
        return copies

    def __del__(self) -> None:
        _arrive(self._copies)  # dropped on its way: nothing may write there before it is there


def _begun(tensor: Tensor, device: torch.device) -> Tensor:
    return to_device(tensor, device) if tensor.device.type == "cpu" else tensor.to(device, copy=True)


def _arrive(copies: Batch) -> None:
    if copies is not None:
        to_device_done([tensor for _name, tensor in named_tensors(copies)])
