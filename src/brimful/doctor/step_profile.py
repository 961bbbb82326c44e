"""Where the time of one step goes, by torch's profiler of CPU ops, which changes no result.

Private torch APIs used here: `_enable_profiler_legacy` and `_disable_profiler_legacy`, which start no Kineto
and print nothing; `profile._prepare_trace`, which both public profilers call first; `_profiler_enabled`;
`_dispatch_has_kernel_for_dispatch_key`; `_current_autograd_node` (checked: torch 2.13).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._C._profiler import ProfilerState, _ExperimentalConfig
from torch.autograd.profiler import profile

from brimful.capture.recording.op_info import describe_op
from brimful.cost.kinds import kind_of_bytes
from brimful.cost.time_shares import ATTENTION, CONVOLUTION, HOST, LOADING, MATMUL, OPTIMIZER
from brimful.torch_utils.replaced import replaced

autograd: Any = torch.autograd
_SCOPES = {"Optimizer.step#": OPTIMIZER, "enumerate(DataLoader)#": LOADING}
"""Beginnings of the names that torch gives to what optimizers and DataLoaders do."""
_BACKWARD = "autograd::engine::"
_NAMESPACE = "aten::"
_COMPOSITE = "CompositeImplicitAutograd"
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "addr"})


class StepProfile:
    """Profiles ops from `begin` to `end`, unless the script itself uses a profiler."""

    def __init__(self) -> None:
        self.class_seconds: dict[str, float] = {}
        """Seconds by class of op, with what no op takes as the host's; empty until `end`."""
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
        self._hooks.enter_context(replaced(profile, "_prepare_trace", prepared))
        autograd._enable_profiler_legacy(
            autograd.ProfilerConfig(ProfilerState.CPU, False, False, False, False, False, _ExperimentalConfig())
        )
        self._is_on, self._began = True, time.perf_counter()

    def end(self) -> bool:
        """Keep what was profiled; returns whether a loader has cut it: another step is to be profiled."""
        if self._was_cut and not self._is_second:
            return True
        if self._is_on:
            seconds = time.perf_counter() - self._began
            found = _seconds_of_ops(self.stop())
            found[HOST] += max(seconds - sum(found.values()), 0.0)
            self.class_seconds = dict(found)
        return False

    def note_loader(self) -> None:
        """End a first profile as a loader begins: what follows may be an evaluation, which most steps lack."""
        if self._is_on and not self._is_second:
            self.stop()
            self._was_cut = True

    def stop(self) -> list[list[Any]]:
        """Profile no more; returns the events of each thread."""
        if not self._is_on:
            return []
        self._is_on = False
        self._hooks.close()
        return list(autograd._disable_profiler_legacy())


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
    return call.within or _class_of_op(name.removeprefix(_NAMESPACE).rstrip("_"))


def _class_of_op(base: str) -> str:
    if base.startswith(("_fused_adam", "_fused_sgd", "_fused_adagrad")):
        return OPTIMIZER
    if "conv" in base:
        return CONVOLUTION
    if "attention" in base:
        return ATTENTION
    return MATMUL if base in _PRODUCTS else kind_of_bytes(base)


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
