"""Devices on which a capture is the same: those that answer alike whatever it asks of its own device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from brimful.capture.recording.update import RecordedPart
from brimful.devices import Device
from brimful.trace.gpu_sizes import DECIDING_PROPERTIES, size_on


class WatchedDevice:
    """A device that notes what is asked of it, and which of `others` would give the same answers."""

    def __init__(self, device: Device, others: Sequence[Device] = ()) -> None:
        self.device = device
        self.others = tuple(others)
        self._alike = [other for other in others if other != device]
        self._asked: set[tuple[str, tuple[Any, ...]]] = set()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.device, name)
        if not callable(value):
            self._note(name, (), value, lambda other: getattr(other, name))
            return value

        def called(*arguments: Any) -> Any:
            answer = value(*arguments)
            self._note(name, arguments, answer, lambda other: getattr(other, name)(*arguments))
            return answer

        return called

    def answer(self, question: Callable[[Device], Any]) -> Any:
        """The answer to a question about the device, as `Device.answer` gives it."""
        answer = question(self.device)
        self._alike = [other for other in self._alike if question(other) == answer]
        return answer

    def as_device(self) -> Device:
        """This object, typed for code that reads a device."""
        return cast(Device, self)

    def is_like(self, device: Device) -> bool:
        """Whether another device, or the own one, gives the same answers to all that was asked."""
        return device == self.device or device in self._alike

    def follow(self, other: WatchedDevice) -> None:
        """Depend also on what another watched device was asked."""
        self._alike = [each for each in self._alike if other.is_like(each)]

    def _note(self, name: str, arguments: tuple[Any, ...], answer: Any, on: Callable[[Device], Any]) -> None:
        if name in DECIDING_PROPERTIES or (name, arguments) in self._asked:
            return
        self._asked.add((name, arguments))
        self._alike = [other for other in self._alike if on(other) == answer]


@dataclass(frozen=True, slots=True)
class CapturedUpdate:
    """An optimizer's part of a step, and the devices that it is the same on."""

    part: RecordedPart
    watched: WatchedDevice

    def on(self, device: Device) -> RecordedPart | None:
        """The part on a device; None where it may differ there."""
        if not self.watched.is_like(device):
            return None
        blocks = []
        for block in self.part.recorded.blocks:
            size_bytes, kernel = size_on(block, device)
            if size_bytes != block.size_bytes:
                return None  # corrections count these bytes
            blocks.append(replace(block, kernel=kernel))
        return replace(self.part, recorded=self.part.recorded._replace(blocks=tuple(blocks)))
