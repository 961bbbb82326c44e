"""Which properties of a device a capture depends on, so that it serves every device that has the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

from brimful.capture.recording.blocks import Block
from brimful.capture.recording.update import RecordedPart
from brimful.devices import Device

_IN_KERNELS = frozenset({"sm_count", "threads_per_multiprocessor"})
"""Properties on which only the sizes of kernels' memory depend, which are computed again for another device."""


class WatchedDevice:
    """A device that records which of its properties are read.

    Args:
        device: Has the properties.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._read: dict[tuple[str, tuple[Any, ...] | None], Any] = {}
        """By name, and by the arguments of a method: what was answered."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._device, name)
        if not callable(value):
            self._read[name, None] = value
            return value

        def called(*arguments: Any) -> Any:
            self._read[name, arguments] = answer = value(*arguments)
            return answer

        return called

    def as_device(self) -> Device:
        """This, for code that reads a device."""
        return cast(Device, self)

    def is_like(self, device: Device) -> bool:
        """Whether another device has the same in all that was read, but for what is in kernels."""
        return all(
            _answer(device, name, arguments) == answer
            for (name, arguments), answer in self._read.items()
            if name not in _IN_KERNELS
        )


@dataclass(frozen=True, slots=True)
class CapturedUpdate:
    """An optimizer's part of a step, and what it depends on."""

    part: RecordedPart
    device: WatchedDevice

    def on(self, device: Device) -> RecordedPart | None:
        """The part on another device; None where that may be another one."""
        if not self.device.is_like(device):
            return None
        blocks = tuple(_on(block, device) for block in self.part.recorded.blocks)
        if any(a.size_bytes != b.size_bytes for a, b in zip(blocks, self.part.recorded.blocks, strict=True)):
            return None  # corrections count these bytes
        return replace(self.part, recorded=self.part.recorded._replace(blocks=blocks))


def _answer(device: Device, name: str, arguments: tuple[Any, ...] | None) -> Any:
    value = getattr(device, name)
    return value if arguments is None else cast(Callable[..., Any], value)(*arguments)


def _on(block: Block, device: Device) -> Block:
    """A block as large as it is on another device."""
    if block.kernel is None or device.sm_count is None or device.threads_per_multiprocessor is None:
        return block
    kernel = block.kernel.on_multiprocessors(device.sm_count, device.threads_per_multiprocessor)
    return replace(block, size_bytes=kernel.size_bytes(), kernel=kernel)
