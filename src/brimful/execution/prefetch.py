"""Copies of micro-batches to the device that overlap with computing the previous one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from brimful.batches import map_tensors, named_tensors
from brimful.job import Batch
from brimful.transforms.host_link import to_device, to_device_done


def prefetch_to(device: torch.device | str) -> Callable[[Batch], Callable[[], Batch]]:
    """A `prefetch` for `run_step` that copies to `device` on its own CUDA stream.

    It begins the copy of a micro-batch on the host, and its result makes the device wait for the copy. The host
    continues during the copy only if the memory is pinned. Without CUDA, the copy is synchronous.
    """
    return partial(_Coming, device=torch.device(device))


class _Coming:
    """A micro-batch that is being copied from the host to `device`."""

    def __init__(self, batch: Batch, device: torch.device) -> None:
        self._copies: Batch = map_tensors(batch, partial(_begun, device=device))

    def __call__(self) -> Batch:
        """Make the device wait for the copy, and return it; this object drops its reference."""
        copies, self._copies = self._copies, None
        _arrive(copies)
        return copies

    def __del__(self) -> None:
        _arrive(self._copies)  # dropped during the copy: nothing may write to its memory before it ends


def _begun(tensor: Tensor, device: torch.device) -> Tensor:
    return to_device(tensor, device) if tensor.device.type == "cpu" else tensor.to(device, copy=True)


def _arrive(copies: Batch) -> None:
    if copies is not None:
        to_device_done([tensor for _name, tensor in named_tensors(copies)])
