"""Where the time of one step goes, by torch's profilers, which change no result.

On a CPU by the profiler of ops; on a GPU by Kineto, which records each kernel.

Private torch APIs used here: `_enable_profiler_legacy` and `_disable_profiler_legacy`, which start no Kineto
and print nothing; `profile._prepare_trace`, which both public profilers call first; `_profiler_enabled`;
`_dispatch_has_kernel_for_dispatch_key`; `_current_autograd_node` (checked: torch 2.13).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._C._profiler import ProfilerState, _ExperimentalConfig
from torch.autograd.profiler import profile
from torch.profiler import ProfilerActivity, supported_activities

from brimful.capture.recording.op_info import describe_op
from brimful.cost.time_shares import HOST, LOADING, OPTIMIZER, kind_of_op
from brimful.doctor.gpu_times import GpuTimes, gpu_times, tears_down
from brimful.torch_utils.replaced import replaced

autograd: Any = torch.autograd
_SCOPES = {"Optimizer.step#": OPTIMIZER, "enumerate(DataLoader)#": LOADING}
"""Beginnings of the names that torch gives to what optimizers and DataLoaders do."""
_BACKWARD = "autograd::engine::"
_NAMESPACE = "aten::"
_COMPOSITE = "CompositeImplicitAutograd"


class StepProfile:
    """Profiles ops from `begin` to `end`, unless the script itself uses a profiler."""

    def __init__(self, device_type: str) -> None:
        self.class_seconds: dict[str, float] = {}
        """Seconds by class of op, with what no op takes as the host's; empty until `end`."""
        self.gpu: GpuTimes | None = None
        """What the kernels of a GPU take; None on a CPU, and until `end`."""
        self._device_type = device_type
        self._kineto: profile | None = None
        self._was_cut = self._is_second = False
        """Whether a loader that began has ended the first profile, and whether this is another one."""
        self._began, self._is_on, self._hooks = 0.0, False, ExitStack()

    def begin(self) -> None:
        """Begin to profile; not within backward, which has a profiler state of its own."""
        if autograd._profiler_enabled() or torch._C._current_autograd_node() is not None:
            return
        prepare: Callable[..., None] = profile._prepare_trace

        def prepared(own: Any) -> None:
            self.stop()
            prepare(own)

        self._is_second = self._was_cut
        if self._device_type == "cpu":
            autograd._enable_profiler_legacy(
                autograd.ProfilerConfig(
                    ProfilerState.CPU, False, False, False, False, False, _ExperimentalConfig()
                )
            )
        elif ProfilerActivity.CUDA in supported_activities():
            self._kineto = profile(use_device="cuda", use_kineto=True)
            self._kineto.__enter__()
        else:
            return
        self._hooks.enter_context(replaced(profile, "_prepare_trace", prepared))
        self._is_on, self._began = True, time.perf_counter()

    def end(self) -> bool:
        """Keep what was profiled; returns whether a loader has cut it: another step is to be profiled."""
        if self._was_cut and not self._is_second:
            return True
        if self._is_on:
            seconds = time.perf_counter() - self._began
            events = self.stop()
            if self._kineto is None:
                found = _seconds_of_ops(events)
                found[HOST] += max(seconds - sum(found.values()), 0.0)
                self.class_seconds = dict(found)
            else:
                self.gpu = gpu_times(self._kineto.function_events)
        return False

    def seconds_by_class(self, step_seconds: float | None) -> dict[str, float]:
        """Seconds of a step by class of op or kernel, with what is the host's.

        Profiling lengthens no kernel, but the launches between them: on a GPU the host has what the kernels
        omit of a step that is not profiled.

        Args:
            step_seconds: What such a step takes, waiting for data included, if it is known.

        Returns:
            Classes, as `time_shares` takes them, and seconds.
        """
        if self.gpu is None:
            return self.class_seconds
        of_kernels = {**self.gpu.class_seconds, LOADING: self.gpu.loading_seconds}
        idle = self.gpu.idle_seconds
        if step_seconds is not None:
            idle = max(step_seconds - sum(of_kernels.values()), 0.0)
        return {kind: each for kind, each in {**of_kernels, HOST: idle}.items() if each > 0}

    def note_loader(self) -> None:
        """End a first profile as a loader begins: what follows may be an evaluation, which most steps lack."""
        if self._is_on and not self._is_second:
            self._was_cut = True
            self.stop()

    def stop(self) -> list[list[Any]]:
        """Profile no more; returns the events of each thread."""
        if not self._is_on:
            return []
        self._is_on = False
        self._hooks.close()
        if self._kineto is None:
            return list(autograd._disable_profiler_legacy())
        # Kineto unloads CUPTI while it runs on: another profile that follows at once would meet it.
        with nullcontext() if self._was_cut and not self._is_second else tears_down():
            self._kineto.__exit__(None, None, None)
        return []


@dataclass(slots=True)
class _Call:
    """A call that has begun."""

    begin: Any
    """Its event."""
    within: str
    """OPTIMIZER or LOADING, if it is or is called by the step of one or by a DataLoader."""
    inner_seconds: float = 0.0
    """Time of the calls in it."""


def _seconds_of_ops(threads: Iterable[Iterable[Any]]) -> defaultdict[str, float]:
    """The time of each call without the calls in it, by class."""
    found: defaultdict[str, float] = defaultdict(float)
    for events in threads:
        calls: list[_Call] = []
        for event in events:
            if event.kind() == "push":
                calls.append(_Call(event, _scope_of(event, calls[-1].within if calls else "")))
            elif event.kind() == "pop" and calls:  # what began before the profile has no push
                call = calls.pop()
                seconds = call.begin.cpu_elapsed_us(event) / 1e6
                found[_class_of(call)] += seconds - call.inner_seconds
                if calls:
                    calls[-1].inner_seconds += seconds
    return found


def _scope_of(event: Any, around: str) -> str:
    """OPTIMIZER or LOADING, for a call in one; a closure that an optimizer calls runs forward and backward."""
    name = event.name()
    if around == OPTIMIZER and (event.sequence_nr() >= 0 or name.startswith(_BACKWARD)):
        return ""  # the update itself runs without gradients
    return next((kind for beginning, kind in _SCOPES.items() if name.startswith(beginning)), around)


def _class_of(call: _Call) -> str:
    name = call.begin.name()
    if call.within == LOADING:
        return LOADING
    if not name.startswith(_NAMESPACE) or not _computes(name):
        return HOST
    return call.within or kind_of_op(name.removeprefix(_NAMESPACE).rstrip("_"))


@cache
def _computes(name: str) -> bool:
    """Whether an op computes or copies anything: allocations, views and ops made of other ops do not."""
    base = name.removeprefix(_NAMESPACE)
    packet = getattr(torch.ops.aten, base, None)
    if packet is None:
        return True
    func = getattr(packet, packet.overloads()[0])
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE)
    return not (base.startswith("empty") or is_composite or describe_op(func, ()).has_no_cost)
