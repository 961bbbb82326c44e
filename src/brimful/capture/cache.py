"""Caches of one job's captures, on one device or several: a search needs the same captures repeatedly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Self

from brimful.capture.cautious import CautiousCapture
from brimful.capture.fakes.cache import results_shared
from brimful.capture.repeats import RepeatedBlocks
from brimful.capture.step import capture_short_step
from brimful.capture.updates import SharedUpdates
from brimful.capture.watched_device import WatchedDevice
from brimful.devices import Device
from brimful.job import Job
from brimful.settings import Precision, Settings
from brimful.trace import Trace
from brimful.utils.gc_pause import without_garbage_collection


class CachedCapture:
    """Captures steps of a job and keeps the traces while it is open; a job's own loop is not captured.

    Garbage collection is off meanwhile: it would search the traces, which hold no reference cycles.

    The captures follow the choice of kernels of `device`; they may be the same on the devices in `others`.
    `like` has captures of the same job on another device, in another precision or with other samples: blocks
    that repeat there are captured once here too, without a whole capture to check that, and updates are shared.
    Paths of modules may begin with `prefix` here, and not there.
    """

    def __init__(
        self,
        job: Job,
        device: Device,
        like: CachedCapture | None = None,
        others: Sequence[Device] = (),
        prefix: str = "",
    ) -> None:
        job = replace(job, loop=None)
        self._watched = watched = WatchedDevice(device, others)
        target = watched.as_device()
        self._capture = CautiousCapture(job, target)
        self._updates: SharedUpdates = SharedUpdates(job, watched, None if like is None else like._updates)
        short = (
            self._updates.short,
            lambda settings, shortening: capture_short_step(job, settings, target, shortening),
        )
        self._repeated = RepeatedBlocks(short)
        if like is not None:
            self._repeated.learn_from(like._repeated, prefix)
        self._traces: dict[tuple[Settings, int], Trace] = {}
        self.counts: Counter[str] = Counter()
        """How many captures were "short", "in two parts" or "whole"; a benchmark shows it."""
        self._exit = ExitStack()

    def __call__(self, settings: Settings, steps: int = 1) -> Trace:
        """The trace of `steps` optimizer steps under some settings."""
        shared = replace(settings, expandable_segments=False)  # of the allocator, which a capture does not run
        key = shared, steps
        if key not in self._traces:
            self._traces[key] = self._one_step(shared) if steps == 1 else self._whole(shared, steps)
        trace = self._traces[key]
        return trace if settings == shared else replace(trace, settings=settings)

    def is_same_on(self, device: Device) -> bool:
        """Whether all captures so far are the same on another device: one of `others`, or the own one.

        The device must give the same answers to all that the captures asked of theirs. Sizes that are set for
        each device may differ: those of `Storage.kernel` and of cuBLAS's workspace.
        """
        return self._watched.is_like(device)

    def _one_step(self, settings: Settings) -> Trace:
        for how, captured in {"short": self._repeated.captured, "in two parts": self._updates.whole}.items():
            trace = captured(settings)
            if trace is not None:
                self.counts[how] += 1
                return trace
        trace = self._whole(settings, 1)
        self._repeated.learn(settings, trace)
        self._updates.learn(settings, trace)
        return trace

    def _whole(self, settings: Settings, steps: int) -> Trace:
        self.counts["whole"] += 1
        return self._capture(settings, steps)

    def __enter__(self) -> Self:
        self._exit.enter_context(without_garbage_collection())
        self._exit.enter_context(results_shared())
        self._exit.callback(self._traces.clear)  # before collection is on again
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exit.close()


class CapturesOnDevices(ExitStack):
    """Captures steps of one job on several devices, and keeps the traces while it is open."""

    def __init__(self, job: Job, devices: Sequence[Device]) -> None:
        super().__init__()
        self._job, self._devices = job, tuple(devices)
        self._captures: dict[tuple[Device, Precision], CachedCapture] = {}
        """By device and precision: devices may run the same ops in one precision and not in another."""

    def __call__(self, settings: Settings, device: Device) -> Trace:
        """The trace of one optimizer step under some settings on one of the devices."""
        key = device, settings.precision
        if key not in self._captures:
            first = next(iter(self._captures.values()), None)
            capture = CachedCapture(self._job, device, like=first, others=self._devices)
            self._captures[key] = self.enter_context(capture)
        return self._captures[key](settings)

    def is_same_on(self, device: Device, other: Device, precision: Precision) -> bool:
        """Whether what was captured on a device is the same on another; see `CachedCapture.is_same_on`."""
        capture = self._captures.get((device, precision))
        return capture is not None and capture.is_same_on(other)
