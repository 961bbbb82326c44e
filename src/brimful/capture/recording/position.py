"""The part of a training step that the next op belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from brimful.trace import Phase


class StepPosition:
    """Phase, step and micro-batch of the next op, and whether the host runs it.

    `host_is_device` says that the host's memory is the device's, as on a CPU.
    """

    def __init__(self, *, host_is_device: bool = False) -> None:
        self.host_is_device = host_is_device
        self.phase = Phase.SETUP
        self.step = 0
        self.micro_batch = 0
        self.is_on_host = False
        """Whether the host runs the ops, where the device is another."""
        self.is_compiled = False
        """Whether compiled code runs the ops."""
        self._is_updating = False

    def enter(self, phase: Phase, micro_batch: int, step: int | None = None) -> None:
        """Begin a phase; without `step`, of the current step."""
        self.phase, self.micro_batch = phase, micro_batch
        self.step = self.step if step is None else step

    @property
    def is_in_optimizer(self) -> bool:
        """Whether the optimizer runs, which makes its state in setup."""
        return self._is_updating or self.phase is Phase.OPTIMIZER or self.phase is Phase.SETUP

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Count the ops as the optimizer's while the context is open, in backward too."""
        self._is_updating = True
        try:
            yield
        finally:
            self._is_updating = False

    @contextmanager
    def compiled(self) -> Iterator[None]:
        """Let compiled code run the ops while the context is open."""
        self.is_compiled = True
        try:
            yield
        finally:
            self.is_compiled = False

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Let the host run the ops while the context is open, with their results in its memory."""
        before, self.is_on_host = self.is_on_host, not self.host_is_device
        try:
            yield
        finally:
            self.is_on_host = before
