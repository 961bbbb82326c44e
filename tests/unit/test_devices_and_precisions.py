"""Devices and precisions in the words that PyTorch's users write."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import brimful as bf
from brimful.errors import InfeasibleError, UsageError

JOB = bf.Job(
    model=lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)),
    loss=lambda model, batch: model(batch).square().mean(),
    batch=lambda n: torch.randn(n, 64),
)


@pytest.mark.parametrize("device", [torch.device("cpu"), "cpu:0", " CPU ", torch.device("cpu", 0)])
def test_a_device_may_be_named_as_in_torch(device: str | torch.device) -> None:
    assert bf.estimate(JOB, device).device == "cpu"


def test_a_measurement_takes_the_same_names() -> None:
    assert bf.measure(JOB, bf.Settings(micro_batch_size=2), device="cpu:0").device == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is asserted is true without a GPU")
@pytest.mark.parametrize("device", ["cuda:0", "cuda", 0, torch.device("cuda", 1)])
def test_a_gpu_that_is_not_here_is_refused_with_the_way_to_plan_for_one(
    device: str | int | torch.device,
) -> None:
    with pytest.raises(UsageError, match=r'no CUDA GPU.*name it, such as "RTX 3090"'):
        bf.estimate(JOB, device)


@pytest.mark.parametrize("device", [None, 3.5, torch.device("meta")])
def test_what_does_not_name_a_device_is_refused_in_one_line(device: object) -> None:
    with pytest.raises(UsageError) as caught:
        bf.estimate(JOB, device)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("precision", ["bf16", "bfloat16", torch.bfloat16, "torch.bfloat16", "BFloat16"])
def test_a_precision_may_be_named_by_its_dtype(precision: str | torch.dtype) -> None:
    assert bf.estimate(JOB, "RTX 3090", precision=precision).settings.precision is bf.settings.Precision.BF16


def test_a_precision_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown precision 'int8'"):
        bf.estimate(JOB, "RTX 3090", precision="int8")


def wide_job() -> bf.Job:
    """64 MiB of parameters and, with AdamW, twice as much state."""
    return bf.Job(
        model=lambda: nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16))),
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda n: torch.randn(n, 1024),
    )


def small_gpu(capacity_bytes: int = 1 << 30) -> bf.devices.Device:
    return replace(
        bf.devices.find_device("RTX 3090"),
        capacity_bytes=capacity_bytes,
        context_bytes=0,
        context_low_bytes=0,
        context_high_bytes=0,
    )


def test_the_host_of_a_gpu_that_is_only_described_does_not_depend_on_the_machine_that_plans() -> None:
    """Half of the GPU's memory is assumed; 128 MiB of optimizer state do not fit in half of 240 MiB."""
    with pytest.raises(InfeasibleError) as caught:
        bf.plan(wide_job(), small_gpu(240 << 20), global_batch_size=8, budget=200 << 20)
    found = str(caught.value)
    assert "needs" in found
    assert "permits 120 MiB" in found
    assert "would fit: host_memory" in found


def test_the_host_memory_that_is_named_as_the_way_out_is_enough() -> None:
    device = small_gpu(240 << 20)
    plan = bf.plan(wide_job(), device, global_batch_size=8, budget=200 << 20, host_memory="400MiB")
    assert plan.settings.offload_optimizer
    assert any("--host-memory" in note for note in plan.notes)
