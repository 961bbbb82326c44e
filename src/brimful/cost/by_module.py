"""The device's work in a step by module."""

from __future__ import annotations

from collections import defaultdict

from brimful.cost.roofline import Roofline
from brimful.devices import Device
from brimful.trace import Phase, Trace
from brimful.trace.modules import ancestors


def work_seconds_by_module(trace: Trace, device: Device) -> dict[str, float]:
    """Seconds that a device works for each module in a steady step, its submodules included.

    "" has all of forward and backward, loss included. The optimizer is not. On a GPU these are the times of
    kernels, which add up to less than the step where it waits for its host.
    """
    roofline = Roofline.of(trace, device)
    last_step, last_micro_batch = trace.captured_steps - 1, trace.captured_micro_batches - 1
    repeats = max(trace.settings.gradient_accumulation_steps - last_micro_batch, 1)
    own: dict[str, float] = defaultdict(float)
    for op in trace.ops:
        if op.step == last_step and op.phase in (Phase.EMBEDDING, Phase.FORWARD, Phase.BACKWARD):
            times = repeats if op.micro_batch == last_micro_batch else 1
            own[op.module] += times * roofline.work_seconds(op)
    total: dict[str, float] = defaultdict(float)
    for module, seconds in own.items():
        for path in ancestors(module):
            total[path] += seconds
    return dict(total)
