"""What a configuration takes on a real device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from brimful.batches import make_batch
from brimful.execution.executor import StepExecutor
from brimful.execution.precision import matmul_precision
from brimful.execution.setup import build_model, set_up_allocator
from brimful.job import Job
from brimful.optimizers import make_optimizer
from brimful.profiling import PeakMemory, peak_memory, repeated_step
from brimful.settings import Settings
from brimful.transforms import apply_units

FIRST_STEPS = 3
"""Steps before the timed ones: optimizer state is made in the first, the third is steady."""
TIMED_STEPS = 3
"""Steps after those; their median is the time."""
DRY_STEPS = 1
_LARGE_NUMEL = 1 << 16
_WEIGHTS_SCALE = 0.02
_FIRST_SCALE = 1.0
"""Of an FP16 loss: from torch's 65536 on the first steps may be skipped, and optimizer state comes late."""


def measure(
    job: Job,
    settings: Settings,
    *,
    dry: bool,
    then: Callable[[Callable[[], object]], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """What real steps took.

    Args:
        job: Its model is built here, with weights that are drawn on the device.
        settings: How the steps are carried out.
        dry: On the CPU, few steps, under the profiler; their times mean nothing. Else on the first GPU.
        then: Called with what runs a step, after the others; what it returns is among what was measured.
    """
    device = torch.device("cpu") if dry else torch.device("cuda", 0)
    set_up_allocator(settings, device)
    start = time.perf_counter()
    torch.manual_seed(0)
    with _large_weights_undrawn():
        model = build_model(job, is_copied=True).to(device).train()
    _draw_large_weights(model)
    optimizer = make_optimizer(job, model.parameters(), settings)
    executor = StepExecutor(job, settings, model, optimizer, device=device)
    if executor.scaler is not None:
        executor.scaler = GradScaler(device.type, init_scale=_FIRST_SCALE)
    applied = apply_units(model, settings)
    batch = make_batch(job, settings.rank_batch_size)
    run = repeated_step(executor, batch)
    peaks: list[PeakMemory] = []
    seconds: list[float] = []
    losses: list[float] = []
    updated: list[bool] = []
    with matmul_precision(settings.precision):
        for _ in range(DRY_STEPS if dry else FIRST_STEPS + TIMED_STEPS):
            with peak_memory(model, optimizer, device, batch=batch) as peak:
                began = time.perf_counter()
                outcome = run()
                losses.append(float(outcome.loss))  # waits for the device
                seconds.append(time.perf_counter() - began)
                updated.append(outcome.updated)
            peaks.append(peak)
        found = {} if then is None else then(run)
    applied.remove()
    measured = _measurement(peaks, seconds) | {"losses": losses, "updated": updated} | found
    measured["measurement_seconds"] = round(time.perf_counter() - start, 2)
    return measured | ({} if dry else _allocator_counters(device))


def _measurement(peaks: list[PeakMemory], seconds: list[float]) -> dict[str, Any]:
    return {
        "measured_peak_allocated_bytes": max(peak.allocated_bytes for peak in peaks),
        "measured_first_step_peak_allocated_bytes": peaks[0].allocated_bytes,
        "measured_steady_peak_allocated_bytes": peaks[-1].allocated_bytes,
        "measured_peak_reserved_bytes": max(peak.reserved_bytes for peak in peaks),
        "measured_peak_device_bytes": peaks[-1].device_bytes,
        "measured_step_seconds": statistics.median(seconds[-TIMED_STEPS:]),
        "measured_allocated_by_step_bytes": [peak.allocated_bytes for peak in peaks],
        "measured_reserved_by_step_bytes": [peak.reserved_bytes for peak in peaks],
        "measured_seconds_by_step": seconds,
    }


@contextmanager
def _large_weights_undrawn() -> Iterator[None]:
    """Leave large random weights as they are: drawing them on the CPU takes longer than the steps."""
    with ExitStack() as stack:
        for name in ("normal_", "uniform_", "erfinv_"):
            stack.enter_context(patch.object(Tensor, name, _unless_large(getattr(Tensor, name))))
        yield


def _unless_large(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def draw_if_small(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor if tensor.numel() >= _LARGE_NUMEL else draw(tensor, *args, **kwargs)

    return draw_if_small


@torch.no_grad()
def _draw_large_weights(model: nn.Module) -> None:
    """Small random numbers, in place and without temporaries."""
    for parameter in model.parameters():
        if parameter.numel() >= _LARGE_NUMEL:
            parameter.normal_(0.0, _WEIGHTS_SCALE)


def _allocator_counters(device: torch.device) -> dict[str, Any]:
    """What the allocator counted over the whole process."""
    statistics_of_device = torch.cuda.memory_stats(device)
    names = (
        "num_alloc_retries",
        "num_ooms",
        "segment.all.current",
        "segment.all.peak",
        "segment.small_pool.current",
        "segment.large_pool.current",
        "allocation.all.allocated",
        "inactive_split_bytes.all.peak",
        "requested_bytes.all.peak",
    )
    return {"allocator": {name: statistics_of_device.get(name) for name in names}}
