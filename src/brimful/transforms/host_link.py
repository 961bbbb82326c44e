"""Copies between a device and the host's memory, as torch ops, so that what records ops sees them.

    to_host(source)             a copy on the host, in pinned memory
    to_host_done(sources)       what follows on the device waits for all copies to the host issued so far
    to_device(hosted, device)   a copy back on the device
    to_device_done(copies)      what follows on the device waits for all copies back issued so far

    send_to_host(sources, hosted)       copies into the host's memory, after all that leave it
    arrived_on_host(sources)            the host waits for all copies to it issued so far
    send_to_device(hosted, targets)     copies into tensors of the device

On CUDA each direction has a stream of its own, so copies overlap with the computation that was issued after
them, and those of one direction follow one another. Device memory belongs to the computation's stream: a copy
back is allocated from its pool, and begins when all that was issued before it has ended. A caller that drops a
source, or a copy back, before calling the op that waits lets others write to memory that is still being copied.

Elsewhere the device's memory is the host's, and all are plain copies; so the moments at which memory is held
and released are the same on a CPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from brimful.memory import pinned_bytes

_library = torch.library.Library("brimful", "DEF")
_library.define("to_host(Tensor source) -> Tensor")
_library.define("to_host_done(Tensor[] sources) -> ()")
_library.define("to_device(Tensor hosted, Device device) -> Tensor")
_library.define("to_device_done(Tensor[] copies) -> ()")
_library.define("send_to_host(Tensor[] sources, Tensor(a!)[] hosted) -> ()")
_library.define("arrived_on_host(Tensor[] sources) -> ()")
_library.define("send_to_device(Tensor[] hosted, Tensor(a!)[] targets) -> ()")

to_host = torch.ops.brimful.to_host.default
to_host_done = torch.ops.brimful.to_host_done.default
to_device = torch.ops.brimful.to_device.default
to_device_done = torch.ops.brimful.to_device_done.default
send_to_host = torch.ops.brimful.send_to_host.default
arrived_on_host = torch.ops.brimful.arrived_on_host.default
send_to_device = torch.ops.brimful.send_to_device.default


def give_back(hosted: Tensor) -> None:
    """Return the memory of `hosted`, a result of `to_host`, for another copy to the host.

    All copies of it back to the device must have been waited for.
    """
    memory = _taken.pop(id(hosted), None)
    if memory is not None:
        _idle[memory.numel()].append(memory)


_taken: dict[int, Tensor] = {}
"""Pinned memory in use, by the identity of the copy that is in it."""

_idle: dict[int, list[Tensor]] = defaultdict(list)
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
    """Pinned memory for a copy of a dense tensor, until `give_back`."""
    size_bytes = source.numel() * source.element_size()
    idle = _idle[pinned_bytes(size_bytes)]
    memory = idle.pop() if idle else _new_pinned(pinned_bytes(size_bytes))
    hosted = memory[:size_bytes].view(source.dtype)
    _taken[id(hosted)] = memory
    return hosted


def _new_pinned(size_bytes: int) -> Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)


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
    """Copy from the host, also to a CUDA device: the op dispatches by the device of `hosted`."""
    return _to_device_cuda(hosted, device) if device.type == "cuda" else hosted.clone()


def _to_device_cuda(hosted: Tensor, device: torch.device) -> Tensor:
    stream, now = _streams(device).to_device, torch.cuda.current_stream(device)
    copied = torch.empty_like(hosted, device=device)
    stream.wait_stream(now)
    with torch.cuda.stream(stream):
        copied.copy_(hosted, non_blocking=True)
    return copied


def _to_device_done_cuda(copies: Sequence[Tensor]) -> None:
    device = copies[0].device
    torch.cuda.current_stream(device).wait_stream(_streams(device).to_device)


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)


def _send_to_host_cuda(sources: Sequence[Tensor], hosted: Sequence[Tensor]) -> None:
    device = sources[0].device
    streams = _streams(device)
    streams.to_host.wait_stream(torch.cuda.current_stream(device))
    streams.to_host.wait_stream(streams.to_device)
    with torch.cuda.stream(streams.to_host):
        _copy(sources, hosted)


def _arrived_on_host_cuda(sources: Sequence[Tensor]) -> None:
    _streams(sources[0].device).to_host.synchronize()


def _send_to_device_cuda(hosted: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    device = targets[0].device
    stream = _streams(device).to_device
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        _copy(hosted, targets)


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
    ("send_to_host", "CPU", _copy),
    ("send_to_host", "CUDA", _send_to_host_cuda),
    ("send_to_host", "Meta", lambda _sources, _hosted: None),
    ("arrived_on_host", "CPU", lambda _sources: None),
    ("arrived_on_host", "CUDA", _arrived_on_host_cuda),
    ("arrived_on_host", "Meta", lambda _sources: None),
    ("send_to_device", "CPU", _copy),
    ("send_to_device", "CUDA", _send_to_device_cuda),
    ("send_to_device", "Meta", lambda _hosted, _targets: None),
):
    _library.impl(_name, _implementation, _key)
