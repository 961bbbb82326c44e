"""The protocol of a correction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from brimful.devices import Device
from brimful.settings import Settings
from brimful.trace import Correction, Kernel

if TYPE_CHECKING:
    from brimful.capture.recording.recorder import Recorder


class Rule:
    """One thing that a device does and fake tensors on a CPU do not show.

    A rule replaces torch functions, watches ops, or opens a context around the capture. It counts what it
    changed in the last captured step, so that a result can list its contribution. Its class and its file have
    its name.

    The capture follows the choice of kernels of `target`. Rules only read its attributes and call its methods,
    by which a capture knows on which other devices it is the same.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    device_kinds: ClassVar[tuple[str, ...]] = ("cuda",)
    """Kinds of devices that the rule is for."""
    lasts: ClassVar[bool] = False
    """Whether what the rule changes once stays for all further steps."""

    recorder: Recorder
    """The recorder of the steps; set before the contexts are opened."""

    def __init__(self, target: Device, settings: Settings) -> None:
        self.target = target
        self.settings = settings
        self.occurrences = 0
        self.changed_bytes = 0
        self.counted: list[tuple[int, int, int]] = []
        """What each call of `count` added: the index of the next op, occurrences and changed bytes."""

    def applies(self) -> bool:
        """Whether the target decides otherwise under these settings."""
        return self.target.kind in self.device_kinds

    def functions(self) -> Mapping[Callable[..., Any], Callable[..., Any]]:
        """Torch functions and their replacements."""
        return {}

    def context(self) -> AbstractContextManager[object]:
        """A context that is open during the capture."""
        return nullcontext()

    def watches_op(self, func: Any) -> bool:
        """Whether `before_op` and `after_op` have anything to do with an op; asked once for each op."""
        return True

    def before_op(self, func: Any, args: tuple[Any, ...], *, in_backward: bool) -> None:
        """Called before each op that is watched."""

    def after_op(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[torch.Tensor]
    ) -> None:
        """Called after each op that is watched, before its outputs are recorded."""

    def begin_backward(self, roots: tuple[torch.Tensor, ...]) -> None:
        """Called before each backward pass, with the tensors that it begins at."""

    def begin_step(self) -> None:
        """Called before each captured step.

        What the rule changed in earlier steps counts no more, unless it lasts.
        """
        if not self.lasts:
            self.occurrences = self.changed_bytes = 0
            self.counted.clear()

    def count(self, changed_bytes: int, *, occurrences: int = 1) -> None:
        """Note one occurrence and the bytes it allocates more (positive) or less."""
        self.occurrences += occurrences
        self.changed_bytes += changed_bytes
        self.counted.append((len(self.recorder.ops), occurrences, changed_bytes))

    def add(
        self,
        size_bytes: int,
        label: str,
        *,
        most_bytes: int | None = None,
        kernel: Kernel | None = None,
        is_alone: bool = False,
    ) -> None:
        """Record and count memory that the op just run took inside and freed before it ended.

        `size_bytes` is the likely size, and `most_bytes` the largest, where the size is not known for sure.
        `kernel` is what decides the size, where it is not affine in the micro-batch; it may be nothing at this
        size and more at another. `is_alone` says that the memory is freed before the op's next temporary is
        allocated.
        """
        if size_bytes or most_bytes or kernel is not None:
            self.recorder.ledger.add_temporary(
                size_bytes, label, most_bytes=most_bytes, kernel=kernel, is_alone=is_alone
            )
        if size_bytes or most_bytes:
            self.count(size_bytes)

    def record(self) -> Correction:
        """The record of what the rule did in the last captured step."""
        return Correction(
            name=self.name,
            source=self.source,
            occurrences=self.occurrences,
            changed_bytes=self.changed_bytes,
        )
