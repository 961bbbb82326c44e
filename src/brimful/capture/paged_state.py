"""State that paged optimizers of bitsandbytes keep in CUDA's managed memory, outside of torch's allocator.

`bitsandbytes.functional.get_paged` calls cudaMallocManaged; each step prefetches a parameter's state to the
GPU before its update. CUDA keeps the pages there while there is room, else moves them to the host's memory.

Source: bitsandbytes/optim/optimizer.py, Optimizer8bit.get_state_buffer, prefetch_state; optim/ademamix.py,
AdEMAMix._get_state_double_buffer (0.50.2).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from brimful.capture.recording.places import Place
from brimful.capture.recording.recorder import Recorder

_LEAST_NUMBERS = 1e5
"""Parameters of fewer numbers have their state in the allocator's memory."""


def page_state(optimizer: Optimizer, recorder: Recorder) -> None:
    """Let a paged optimizer make its state in managed memory, whose bytes count in the facts of the step."""
    if recorder.host_is_device or not getattr(optimizer, "is_paged", False):
        return
    vars(optimizer).update(
        get_state_buffer=partial(_buffer, recorder, ()),
        _get_state_double_buffer=partial(_buffer, recorder, (2,)),
        prefetch_state=lambda _parameter: None,
    )


def _buffer(
    recorder: Recorder, more: tuple[int, ...], parameter: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """State of a parameter, whose shape is the parameter's after those dimensions."""
    is_paged = parameter.numel() >= _LEAST_NUMBERS
    with recorder.position.on_host() if is_paged else nullcontext():
        made = torch.zeros((*more, *parameter.shape), dtype=dtype)
    if is_paged:
        recorder.places.put(made, Place.HOST)
        recorder.facts.paged_state_bytes += made.nbytes
        vars(made)["is_paged"] = True
    return made


def forget_state(state: Iterable[Tensor], recorder: Recorder) -> None:
    """Count the managed memory of a state no longer, which a real step never makes."""
    if recorder.facts.paged_state_bytes:
        paged = (tensor.nbytes for tensor in state if recorder.places.of(tensor) is Place.HOST)
        recorder.facts.paged_state_bytes -= sum(paged)
