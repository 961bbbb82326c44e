"""A stand-in for CUDA's streams: every copy between device and host is put off until it is waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from brimful.transforms import host_link


class LateStream:
    """Makes its copies when another stream, or the host, waits for it; computing is done at once."""

    def __init__(self, device: object = None) -> None:
        self.late: list[Callable[[], object]] = []

    def wait_stream(self, other: LateStream) -> None:
        other.synchronize()

    def synchronize(self) -> None:
        for make in self.late:
            make()
        self.late.clear()


class _Postponed(TorchDispatchMode):
    def __init__(self, stream: LateStream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.stream.late.append(lambda: func(*args))
            return args[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def _on(stream: LateStream) -> Iterator[None]:
    with _Postponed(stream):
        yield


def garbage(memory: Tensor) -> Tensor:
    """Memory as an allocator hands it out: with what somebody left in it."""
    return memory.fill_(float("nan") if memory.is_floating_point() else 77)


def stand_in_for_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let copies on CUDA's streams, of tensors on a CPU, be as late as what waits for them permits."""
    compute, link = LateStream(), host_link._Streams.__new__(host_link._Streams)
    link.to_host, link.to_device = LateStream(), LateStream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: compute)
    monkeypatch.setattr(torch.cuda, "stream", _on)
    monkeypatch.setattr(host_link, "_streams", lambda device: link)
