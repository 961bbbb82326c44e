"""Cached captures of one job on one device, because a search needs the same ones repeatedly."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Self

from brimful.capture.cautious import CautiousCapture
from brimful.capture.repeats import RepeatedBlocks
from brimful.capture.step import capture_short_step
from brimful.capture.updates import SharedUpdates
from brimful.devices import Device
from brimful.gc_pause import without_garbage_collection
from brimful.job import Job
from brimful.settings import Settings
from brimful.trace import Trace


class CachedCapture:
    """Captures steps and keeps the traces while it is open; a job's own loop is not captured.

    Garbage collection is off meanwhile: it would search the traces, which hold no reference cycles.

    Args:
        job: The job to capture.
        device: The target device, whose choice of kernels the captures follow.
        like: Captures of the same job on another device. Blocks that repeat there are captured once here too,
            without a whole capture to check that.
    """

    def __init__(self, job: Job, device: Device, like: CachedCapture | None = None) -> None:
        job = replace(job, loop=None)
        self._capture = CautiousCapture(job, device)
        self._updates = SharedUpdates(job, device, None if like is None else like._updates)
        short = (
            self._updates.short,
            lambda settings, shortening: capture_short_step(job, settings, device, shortening),
        )
        self._repeated = RepeatedBlocks(short)
        if like is not None:
            self._repeated.learn_from(like._repeated)
        self._traces: dict[tuple[Settings, int], Trace] = {}
        self._exit = ExitStack()

    def __call__(self, settings: Settings, steps: int = 1) -> Trace:
        """The trace of `steps` optimizer steps under some settings."""
        key = settings, steps
        if key not in self._traces:
            self._traces[key] = self._one_step(settings) if steps == 1 else self._capture(settings, steps)
        return self._traces[key]

    def _one_step(self, settings: Settings) -> Trace:
        trace = self._repeated.captured(settings) or self._updates.whole(settings)
        if trace is None:
            trace = self._capture(settings, 1)
            self._repeated.learn(settings, trace)
            self._updates.learn(settings, trace)
        return trace

    def __enter__(self) -> Self:
        self._exit.enter_context(without_garbage_collection())
        self._exit.callback(self._traces.clear)  # before collection is on again
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exit.close()
