"""Decides which tensors lie in the host's memory, where the device is a GPU and all fakes are on the CPU.

What code puts on the host by name is there: `.cpu()`, `.to("cpu")`, `device="cpu"`, pinned memory, and what is
computed from that alone. What it makes without naming a device, its own real tensors, and what it computes from
an unmoved batch may be on the host: they count until the end, and then only if an op read them together with
what is on the device, which torch permits of one place alone.

On a machine without a GPU, a script's `device` is "cpu". Then "cpu" names the device: code that never names a
GPU moves its model or its batch there, or reads there what it "moved" together with the model.

Private torch API used here: `torch.utils._device._device_constructors` (checked: torch 2.13, 2.11).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._device import _device_constructors

from brimful.capture.recording.ledger import StorageLedger
from brimful.torch_utils.replaced import replaced
from brimful.trace import Category
from brimful.transforms.chunked_loss import DeferredLogits

aten = torch.ops.aten

DEVICE = torch.device("cpu", 0)
"""The device that code sees for a tensor on the GPU. `torch.device("cpu")`, without an index, is the host."""

_MARK = "_brimful_host"
"""Attribute of storages on the host."""
_READS_BOTH = frozenset(
    {
        aten.copy_.default,
        aten._to_copy.default,
        aten.index.Tensor,
        aten.index_put.default,
        aten.index_put_.default,
        aten._index_put_impl_.default,
        aten._unsafe_index.Tensor,
        aten._pack_padded_sequence.default,
        aten._ctc_loss.Tensor,
    }
)
"""Ops that take tensors of both places: copies, and indices or lengths on the host."""
_MAKERS = frozenset(_device_constructors())
"""Functions that make tensors on torch's default device, as torch lists them for `set_default_device`."""
_BETWEEN = ("brimful.capture.", "brimful.torch_utils.replaced")
"""Beginnings of the names of modules between code and a capture: `replaced` adds a frame to a call."""
_SILENT = ("torch.", "brimful.")
"""Beginnings of the names of modules whose code names no place: it passes on the devices of tensors."""


class Place(Enum):
    """The memory in which a tensor lies, and how that is known."""

    DEVICE = auto()
    UNNAMED = auto()
    """On the host, unless it is read together with what is on the device."""
    BATCH = auto()
    """A batch that code has not moved: on the host, unless its loader moves it, as Accelerate's does."""
    NAMED = auto()
    """On a device named "cpu": the host, unless that is what a script calls its device."""
    HOST = auto()
    """On the host: by `.cpu()`, pinned memory, a list or an array."""


class Places:
    """Decides where tensors lie.

    Blocks of `ledger` lose their bytes if their tensors turn out to be on the host. `are_two` says that the
    host's memory is another than the device's; else nothing is followed. `cpu_is_device` says that "cpu" is
    known to name the device.
    """

    def __init__(self, ledger: StorageLedger, *, are_two: bool, cpu_is_device: bool) -> None:
        self._ledger = ledger
        self.are_two = are_two
        self.cpu_is_device = cpu_is_device
        self.is_wrong = False
        """Whether tensors were put on the host before it was seen that "cpu" names the device."""
        self.runs_op = False
        """Whether an op is running. Its code for fakes expects the devices of its inputs."""
        self._names_gpu = self._has_named = self._has_marks = False
        self._making: Place | None = None
        self._unnamed: dict[int, tuple[int, ...]] = {}
        """Blocks that may be on the host, each with those that it was computed from."""

    def of(self, tensor: Tensor) -> Place:
        """Where a tensor lies."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # sparse and others
            return Place.DEVICE
        if self._has_marks and (mark := getattr(storage, _MARK, None)) is not None:
            assert isinstance(mark, Place)
            return mark
        is_unnamed = bool(self._unnamed) and self._ledger.live.get(storage._cdata) in self._unnamed
        return Place.UNNAMED if is_unnamed else Place.DEVICE

    def is_on_host(self, tensor: Tensor) -> bool:
        """Whether a tensor lies on the host for sure."""
        return self._has_marks and self.of(tensor) in _MARKED

    def put(self, tensor: Tensor, place: Place) -> None:
        """Take a tensor, and all views of its storage, for one on the host from now on, or on the device."""
        if place is Place.DEVICE:
            if self.is_on_host(tensor):
                delattr(tensor.untyped_storage(), _MARK)
                self._ledger.track(tensor, "moved to the device")
            if (index := self._ledger.index_of(tensor)) is not None:
                self._unnamed.pop(index, None)
            return
        self._has_marks = True
        self._has_named |= place is Place.NAMED
        self._ledger.free_tensor(tensor)
        setattr(tensor.untyped_storage(), _MARK, place)

    def note_unnamed(self, tensor: Tensor, computed_from: tuple[int, ...] = ()) -> None:
        """Count a tensor only if it, or what is computed from it, is read together with the device's."""
        index = self._ledger.index_of(tensor)
        if self.are_two and index is not None and index not in computed_from:
            self._unnamed.setdefault(index, computed_from)

    def names_host(self, device: Any, *, of_module: bool = False) -> bool:
        """Whether the calling code asks for the host by `device`; torch's own code does for modules alone."""
        if not self.are_two or str(device) != "cpu":
            self._names_gpu |= str(device).startswith("cuda")
            return False
        return not self.cpu_is_device and (of_module or not _is_asked_by_torch())

    def names_device(self, device: Any) -> bool:
        """Whether the calling code asks for the training device by `device`; it may call that the CPU."""
        is_gpu = isinstance(device, int) or str(device).startswith("cuda")
        return is_gpu or (self.are_two and str(device).startswith("cpu") and not self.names_host(device))

    def note_moved_to_cpu(self, tensor: Tensor) -> None:
        """Note that code moves a tensor to "cpu", its name for the device if that is its batch or its model.

        Code that names a GPU too means the host by "cpu".
        """
        index = self._ledger.index_of(tensor)
        category = None if index is None else self._ledger.blocks[index].category
        if self.of(tensor) is Place.BATCH or category in (Category.INPUTS, Category.PARAMETERS):
            self._note_cpu_is_device()

    def asked(self, func: Any, kwargs: dict[str, Any]) -> Place | None:
        """The place in which a call of a torch function puts what it makes; None if the call does not say."""
        device, is_pinned = kwargs.get("device"), bool(kwargs.get("pin_memory"))
        if is_pinned or device is not None:
            is_named = not is_pinned and self.names_host(device)
            return Place.NAMED if is_named else Place.HOST if is_pinned and self.are_two else Place.DEVICE
        return Place.UNNAMED if func in _MAKERS and not _is_asked_by_torch() else None

    @contextmanager
    def making(self, place: Place | None) -> Iterator[None]:
        """Put what is made while the context is open in a place."""
        before, self._making = self._making, place
        try:
            yield
        finally:
            self._making = before

    def of_results(self, func: Any, inputs: list[Tensor]) -> tuple[Place, tuple[int, ...]]:
        """The place of what an op makes from `inputs`; and if it is unnamed, the blocks that decide it."""
        if self._making is not None:
            return self._making, ()
        if not inputs or not (self._has_marks or self._unnamed):
            return Place.DEVICE, ()
        places = [self.of(tensor) for tensor in inputs]
        count = places.count(Place.DEVICE)
        if count:
            if count < len(places) and func not in _READS_BOTH:
                self._note_read_together(inputs, places)
            return Place.DEVICE, ()
        known = next((place for place in places if place in (Place.HOST, Place.NAMED)), None)
        if known is not None:
            return known, ()
        indices = (self._ledger.index_of(tensor) for tensor in inputs)
        return Place.UNNAMED, tuple(index for index in indices if index is not None)

    @property
    def device_bytes(self) -> int:
        """Bytes that tensors hold now on the device, as far as is known."""
        live = self._ledger.live.values()
        return sum(self._ledger.blocks[index].size_bytes for index in live if index not in self._unnamed)

    def settle(self) -> None:
        """Take what was never read together with the device's tensors for on the host: its bytes become 0."""
        for index in self._unnamed:
            self._ledger.blocks[index].size_bytes = 0
        self._unnamed.clear()

    def _note_read_together(self, tensors: list[Tensor], places: list[Place]) -> None:
        for tensor, place in zip(tensors, places, strict=True):
            if place is Place.UNNAMED:
                self._settle_on_device(self._ledger.index_of(tensor))
            elif place is Place.NAMED and tensor.dim():  # a number may be on the host
                self._note_cpu_is_device()

    def _settle_on_device(self, index: int | None) -> None:
        for each in self._unnamed.pop(index, ()):  # type: ignore[arg-type]
            self._settle_on_device(each)

    def _note_cpu_is_device(self) -> None:
        if not self._names_gpu and not self.cpu_is_device:
            self.cpu_is_device = True
            self.is_wrong = self._has_named


_MARKED = (Place.BATCH, Place.NAMED, Place.HOST)


def _is_asked_by_torch() -> bool:
    """Whether the call comes from torch or brimful, which pass on the devices of tensors and name none."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _module_of(frame).startswith(_BETWEEN):
        frame = frame.f_back
    return _module_of(frame).startswith(_SILENT)


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


@contextmanager
def devices_told(places: Places) -> Iterator[None]:
    """Report to code that fakes are on `DEVICE`, so that they differ from what it puts on the host.

    Torch's own code compares the devices of fakes with others, and gets the CPU, as does code of ops.
    """
    told = FakeTensor.device

    def device(fake: FakeTensor) -> torch.device:
        real: torch.device = told.fget(fake)  # type: ignore[attr-defined]
        if real.type != "cpu" or places.runs_op:
            return real
        is_told = not _module_of(sys._getframe(2)).startswith(_SILENT)  # past `replaced`
        return DEVICE if is_told and getattr(fake.untyped_storage(), _MARK, None) is None else real

    def device_of_logits(logits: DeferredLogits) -> torch.device:
        real: torch.device = Tensor.device.__get__(logits)
        is_told = not places.runs_op and not _module_of(sys._getframe(2)).startswith(_SILENT)
        return DEVICE if real.type == "cpu" and is_told else real

    with (
        replaced(FakeTensor, "device", property(device)),
        replaced(DeferredLogits, "device", property(device_of_logits)),
    ):
        yield
