"""One trace on many GPUs: the bytes that its allocations take on each, with as few replays as can be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from msgspec import structs

from brimful.devices import Device
from brimful.memory import replay_allocations, rounding_bytes_of
from brimful.trace import EventKind, Storage, Trace
from brimful.trace.gpu_sizes import DECIDING_PROPERTIES, is_sized_by_gpu, size_on
from brimful.utils.quantities import round_up


class AllocationsOnGpus:
    """Replays a trace on one GPU after another, captured for a GPU that decides as these do.

    What differs from one to the next are the storages whose size depends on the card: its multiprocessors and
    cuBLAS's workspace.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._rounding_bytes = rounding_bytes_of(trace.device_kind)
        self._of_the_card = [index for index, storage in enumerate(trace.storages) if is_sized_by_gpu(storage)]
        self._rounded_bytes = np.array([self._rounded(each) for each in trace.storages], dtype=np.int64)
        self._storage = np.array([event.storage for event in trace.events], dtype=np.int64)
        signs = [1 if event.kind is EventKind.ALLOCATE else -1 for event in trace.events]
        self._sign = np.array(signs, dtype=np.int64)
        self._reserved_bytes: dict[tuple[int | None, ...], int] = {}
        self._least_bytes: dict[tuple[int | None, ...], int] = {}

    def reserved_bytes(self, device: Device) -> int:
        """The peak that the allocator reserves on a device."""
        card = _card(device)
        if card not in self._reserved_bytes:
            storages = list(self._trace.storages)
            for index, storage in self._storages_on(device):
                storages[index] = storage
            replay = replay_allocations(replace(self._trace, storages=tuple(storages)))
            self._reserved_bytes[card] = replay.peak_reserved_bytes
        return self._reserved_bytes[card]

    def least_bytes(self, device: Device) -> int:
        """The peak of bytes allocated in blocks as small as can be: no more than is reserved."""
        card = _card(device)
        if card not in self._least_bytes:
            rounded_bytes = self._rounded_bytes.copy()
            for index, storage in self._storages_on(device):
                rounded_bytes[index] = self._rounded(storage)
            live_bytes = np.cumsum(rounded_bytes[self._storage] * self._sign)
            self._least_bytes[card] = int(live_bytes.max(initial=0))
        return self._least_bytes[card]

    def _rounded(self, storage: Storage) -> int:
        return round_up(storage.size_bytes, self._rounding_bytes)

    def _storages_on(self, device: Device) -> Iterator[tuple[int, Storage]]:
        """The storages that depend on the card, as they are on a device."""
        for index in self._of_the_card:
            storage = self._trace.storages[index]
            size_bytes, kernel = size_on(storage, device)
            yield index, structs.replace(storage, size_bytes=size_bytes, kernel=kernel)


def _card(device: Device) -> tuple[int | None, ...]:
    """The properties of a GPU that sizes depend on."""
    return tuple(getattr(device, name) for name in DECIDING_PROPERTIES)
