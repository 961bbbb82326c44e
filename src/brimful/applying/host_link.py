"""Copies between a device and the host's memory, as torch ops, so that what records ops sees them.

    to_host(source)             a copy on the host, in pinned memory
    to_host_done(sources)       what follows on the device waits for all copies to the host issued so far
    to_device(hosted, device)   a copy back on the device
    to_device_done(copies)      what follows on the device waits for all copies back issued so far

On CUDA each direction has a stream of its own, so copies overlap with the computation that was issued after
them, and those of one direction follow one another. Memory is the computation's: a copy back is allocated from
its pool, and begins when all that was issued before it has ended. Who drops a source, or a copy back, before
calling the op that waits lets others write to memory that is still being copied.

Elsewhere the device's memory is the host's, and all are plain copies; so the moments at which memory is held
and released are the same on a CPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from brimful.timeline import pinned_bytes

_library = torch.library.Library("brimful", "DEF")
_library.define("to_host(Tensor source) -> Tensor")
_library.define("to_host_done(Tensor[] sources) -> ()")
_library.define("to_device(Tensor hosted, Device device) -> Tensor")
_library.define("to_device_done(Tensor[] copies) -> ()")

to_host = torch.ops.brimful.to_host.default
to_host_done = torch.ops.brimful.to_host_done.default
to_device = torch.ops.brimful.to_device.default
to_device_done = torch.ops.brimful.to_device_done.default


def give_back(hosted: Tensor) -> None:
    """Let another copy to the host have the memory of one that is not needed any more.

    Args:
        hosted: What `to_host` made of a tensor on CUDA. Copies back to the device must have been waited for.
    """
    _pinned[hosted.untyped_storage().nbytes()].append(hosted)


_pinned: dict[int, list[Tensor]] = defaultdict(list)
"""Pinned memory that is not in use, by bytes. Torch would reuse it too, but only once the GPU has come to the
end of the copy; the host is ahead of that, and would pin more and more."""


class _Streams:
    """The streams of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.to_host = torch.cuda.Stream(device)
        self.to_device = torch.cuda.Stream(device)


@cache
def _streams(device: torch.device) -> _Streams:
    return _Streams(device)


def _take_pinned(source: Tensor) -> Tensor:
    """Pinned memory for a copy of a dense tensor."""
    size_bytes = pinned_bytes(source.numel() * source.element_size())
    idle = _pinned[size_bytes]
    memory = idle.pop() if idle else torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    return memory.view(torch.uint8)[: source.numel() * source.element_size()].view(source.dtype)


def _to_host_cuda(source: Tensor) -> Tensor:
    stream, now = _streams(source.device).to_host, torch.cuda.current_stream(source.device)
    hosted = _take_pinned(source)
    stream.wait_stream(now)
    with torch.cuda.stream(stream):
        hosted.copy_(source, non_blocking=True)
    return hosted


def _to_host_done_cuda(sources: Sequence[Tensor]) -> None:
    device = sources[0].device
    torch.cuda.current_stream(device).wait_stream(_streams(device).to_host)


def _to_device_plain(hosted: Tensor, device: torch.device) -> Tensor:
    """Both begin on the host; of a CUDA device the copy is not waited for."""
    if device.type != "cuda":
        return hosted.clone()
    stream, now = _streams(device).to_device, torch.cuda.current_stream(device)
    copied = torch.empty_like(hosted, device=device)
    stream.wait_stream(now)
    with torch.cuda.stream(stream):
        copied.copy_(hosted, non_blocking=True)
    return copied


def _to_device_done_cuda(copies: Sequence[Tensor]) -> None:
    device = copies[0].device
    torch.cuda.current_stream(device).wait_stream(_streams(device).to_device)


for _name, _key, _implementation in (
    ("to_host", "CPU", torch.clone),
    ("to_host", "CUDA", _to_host_cuda),
    ("to_host", "Meta", torch.empty_like),
    ("to_host_done", "CPU", lambda _sources: None),
    ("to_host_done", "CUDA", _to_host_done_cuda),
    ("to_host_done", "Meta", lambda _sources: None),
    ("to_device", "CPU", _to_device_plain),
    ("to_device", "Meta", lambda hosted, _device: torch.empty_like(hosted)),
    ("to_device_done", "CPU", lambda _copies: None),
    ("to_device_done", "CUDA", _to_device_done_cuda),
    ("to_device_done", "Meta", lambda _copies: None),
):
    _library.impl(_name, _implementation, _key)
