"""One trace on many GPUs: the bound by which replays are spared, and times by kinds of ops."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from torch import nn

import brimful as bf
from brimful.capture import capture_step
from brimful.cost import Roofline, StepTimer
from brimful.cost.input_copies import INPUT_COPY
from brimful.devices import find_device
from brimful.memory import replay_allocations
from brimful.planner.on_gpus import AllocationsOnGpus
from brimful.settings import OptimizerImplementation, Settings
from brimful.trace import Phase, Trace

NAMES = ["A100 80GB SXM", "A100 40GB SXM", "H100 80GB SXM"]


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Two micro-batches of Linear layers, whose bias gradients are staged by multiprocessor."""
    job = bf.Job(
        model=lambda: nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))),
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda n: torch.randn(n, 256, 1024),
    )
    settings = Settings(
        micro_batch_size=4,
        gradient_accumulation_steps=3,
        optimizer_implementation=OptimizerImplementation.FUSED,
    )
    return capture_step(job, settings, find_device(NAMES[0]), steps=1)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_allocated_bounds_what_is_reserved(trace: Trace, name: str) -> None:
    allocations, device = AllocationsOnGpus(trace), find_device(name)
    assert 0 < allocations.least_bytes(device) <= allocations.reserved_bytes(device)


def test_the_device_of_the_capture_replays_the_trace_as_it_is_and_another_card_does_not(trace: Trace) -> None:
    allocations, (own, same, other) = AllocationsOnGpus(trace), map(find_device, NAMES)
    assert allocations.reserved_bytes(own) == replay_allocations(trace).peak_reserved_bytes
    assert allocations.reserved_bytes(same) == allocations.reserved_bytes(own)
    assert allocations.least_bytes(other) > allocations.least_bytes(own)  # of cuBLAS 32 instead of 8.1 MiB


@pytest.mark.parametrize("name", NAMES)
def test_times_by_kind_of_op_are_those_of_all_ops(trace: Trace, name: str) -> None:
    device = find_device(name)
    roofline, expected = Roofline.of(trace, device), defaultdict[str, float](float)
    for op in trace.ops:
        is_repeated = op.micro_batch == 1 and op.phase is not Phase.OPTIMIZER
        if op.phase is not Phase.SETUP:
            for kernel, seconds in roofline.work_parts(op):
                expected[kernel] += seconds * (2 if is_repeated else 1)
    found = dict(StepTimer(trace).on(device).kernel_seconds)
    assert found.keys() - {"host", INPUT_COPY} == expected.keys()
    assert {kernel: found[kernel] for kernel in expected} == expected
