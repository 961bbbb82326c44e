"""The GPU of this machine gets a row whether the table has it or not. No GPU is needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import brimful as bf
from brimful.errors import UnknownNameError, UsageError
from brimful.profiling import calibrate as calibrating
from brimful.profiling import named_device
from brimful.profiling.cuda_context import CudaContext
from brimful.profiling.gpu_properties import read_properties
from brimful.profiling.local_device import device_record
from brimful.profiling.named_device import resolve_device
from brimful.utils.quantities import MIB
from helpers.calibrated import CALIBRATION
from helpers.fake_gpu import FakeNvml, put_gpu

GPU = torch.device("cuda")
LAPTOP = "NVIDIA GeForce RTX 4050 Laptop GPU"
LAPTOP_PROPERTIES = {
    "major": 8,
    "minor": 9,
    "multi_processor_count": 20,
    "clock_rate": 2_370_000,
    "memory_clock_rate": 8_001_000,
    "memory_bus_width": 96,
    "L2_cache_size": 24 * MIB,
}
JOB = bf.Job(
    model=lambda: nn.Linear(64, 64),
    loss=lambda model, batch: model(batch).square().mean(),
    batch=lambda n: torch.randn(n, 64),
)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_gpu_that_the_table_does_not_have_is_planned_for_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    put_gpu(monkeypatch, FakeNvml(5_900, {}), LAPTOP, **LAPTOP_PROPERTIES)
    device = device_record(GPU)
    assert (device.name, device.capacity_bytes, device.sm_count) == (LAPTOP, 5_900 * MIB, 20)
    assert device.memory_bandwidth_bytes_per_second == pytest.approx(192e9, rel=1e-3)
    assert device.host_link_bytes_per_second == pytest.approx(12.5e9)
    plan = bf.plan(JOB, "cuda", global_batch_size=8)
    assert plan.device == LAPTOP
    assert any("low confidence" in note and "not in the table" in note for note in plan.notes)
    low, high = plan.predicted_step_seconds_interval or (0, 0)
    assert low < plan.predicted_step_seconds < high


def test_a_plan_for_such_a_gpu_is_checked_on_its_own_machine_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_gpu(monkeypatch, FakeNvml(5_900, {}), LAPTOP, **LAPTOP_PROPERTIES)
    plan = bf.plan(JOB, "cuda", global_batch_size=8)
    assert plan.check(JOB).fits
    monkeypatch.undo()
    with pytest.raises(UnknownNameError, match="describe another"):
        plan.check(JOB)


def test_what_torch_does_not_have_is_nvmls(monkeypatch: pytest.MonkeyPatch) -> None:
    older = {key: value for key, value in LAPTOP_PROPERTIES.items() if "clock" not in key and "bus" not in key}
    put_gpu(monkeypatch, FakeNvml(5_900, {}, clocks=(2370, 8001, 96)), LAPTOP, **older)
    properties = read_properties(GPU)
    assert (properties.clock_hertz, properties.memory_clock_hertz, properties.memory_bus_bits) == (
        2.37e9,
        8.001e9,
        96,
    )
    assert "NVML" in device_record(GPU).source
    put_gpu(monkeypatch, None, LAPTOP, **older)
    with pytest.raises(UsageError, match="reports its memory clock and bus width"):
        device_record(GPU)


def test_a_card_of_the_table_is_its_row_with_the_memory_that_the_driver_reports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_gpu(monkeypatch, FakeNvml(24_100, {}), major=8, minor=6, multi_processor_count=82)
    device = device_record(GPU)
    assert (device.name, device.capacity_bytes) == ("RTX 3090", 24_100 * MIB)


def test_the_memory_clock_of_a_gpu_that_shares_the_cpus_memory_is_not_relied_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = {"major": 12, "minor": 1, "multi_processor_count": 48, "is_integrated": 1}
    put_gpu(monkeypatch, None, "NVIDIA GB10", **own, memory_clock_rate=1, memory_bus_width=1)
    assert device_record(GPU).name == "GB10"


def test_a_calibration_measures_a_gpu_that_the_table_does_not_have_and_is_kept_under_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_gpu(monkeypatch, FakeNvml(5_900, {}), LAPTOP, **LAPTOP_PROPERTIES)
    measured = replace(CALIBRATION, to_device_bytes_per_second=11e9, to_host_bytes_per_second=10e9)
    monkeypatch.setattr(calibrating, "measure_device", lambda *_args, **_options: measured)
    context = CudaContext(context_bytes=MIB, low_bytes=MIB, high_bytes=MIB, source="by hand", is_measured=True)
    monkeypatch.setattr(named_device, "measure_context", lambda where: context)
    _cpu, gpu = named_device.calibrate()
    assert gpu.name == LAPTOP
    assert gpu.curves == measured.curves
    assert gpu.host_link_bytes_per_second == 10e9
    assert resolve_device("cuda").curves == measured.curves
    assert resolve_device(LAPTOP).curves == measured.curves
    plan = bf.plan(JOB, "cuda", global_batch_size=8)
    assert not any("low confidence" in note for note in plan.notes)


def test_a_gpu_of_amd_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    put_gpu(monkeypatch, None, "AMD Instinct MI250X", major=9, minor=0, multi_processor_count=110)
    monkeypatch.setattr(torch.version, "hip", "6.2.41133")
    with pytest.raises(UsageError, match=r"MI250X' is a GPU of AMD.*ROCm 6\.2.*Describe the GPU"):
        bf.plan(JOB, "cuda", global_batch_size=8)


def test_a_described_gpu_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = bf.plan(JOB, "name=Mine,memory=8GiB,bandwidth=300GB,tflops=9", global_batch_size=8)
    assert plan.device == "Mine"
    assert any("described by the user" in note for note in plan.notes)


def test_an_old_card_is_planned_for_with_the_words_that_torch_has_no_kernels_for_it() -> None:
    plan = bf.plan(JOB, "K80", global_batch_size=8)
    assert any("no build of torch 2.13" in note for note in plan.notes)
    with pytest.warns(UserWarning, match="compute capability 3.7"):
        bf.estimate(JOB, "K80")
