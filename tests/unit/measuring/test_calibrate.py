"""Calibration of the CPU: what it measures, and how measurements are kept."""

import json
from pathlib import Path

import pytest

from brimful.hardware import find_device
from brimful.measuring import calibrate
from brimful.measuring.calibrate import CpuRates, cache_path, calibrate_cpu

RATES = CpuRates(
    fp32_flops_per_second=1e11,
    fp16_flops_per_second=1e9,
    bf16_flops_per_second=2e11,
    memory_bandwidth_bytes_per_second=8e9,
    launch_seconds=2e-6,
)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[CpuRates]:
    """An empty cache directory and a measurement that takes no time; lists the measurements made."""
    made: list[CpuRates] = []

    def measure() -> CpuRates:
        made.append(RATES)
        return RATES

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibrate, "measure_cpu", measure)
    return made


def test_the_measured_rates_replace_the_defaults(measured: list[CpuRates]) -> None:
    device = calibrate_cpu()
    assert device.fp32_flops_per_second == RATES.fp32_flops_per_second
    assert device.flops_per_second("bfloat16") == RATES.bf16_flops_per_second
    assert device.memory_bandwidth_bytes_per_second == RATES.memory_bandwidth_bytes_per_second
    assert device.launch_seconds == RATES.launch_seconds
    assert device.source == "measured on this machine"
    assert device.capacity_bytes == find_device("cpu").capacity_bytes


def test_a_measurement_is_made_once_and_kept_in_the_cache_directory(
    measured: list[CpuRates], tmp_path: Path
) -> None:
    assert calibrate_cpu() == calibrate_cpu()
    assert len(measured) == 1
    assert cache_path() == tmp_path / "brimful" / "cpu.json"
    assert [path.name for path in cache_path().parent.iterdir()] == ["cpu.json"]


def test_remeasuring_is_possible(measured: list[CpuRates]) -> None:
    calibrate_cpu()
    calibrate_cpu(remeasure=True)
    assert len(measured) == 2


def test_another_cpu_or_thread_count_is_measured_apart_and_both_are_kept(
    measured: list[CpuRates], monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrate_cpu()
    monkeypatch.setattr(calibrate, "_cache_key", lambda: "another cpu")
    calibrate_cpu()
    assert len(measured) == 2
    assert len(json.loads(cache_path().read_text())["cpus"]) == 2


def test_the_key_names_cpu_torch_and_threads() -> None:
    key = calibrate._cache_key()
    assert "torch 2." in key
    assert "threads" in key
    assert not key.startswith(";")


@pytest.mark.parametrize(
    "broken",
    ["", "{", "[]", '{"version": 0}', '{"version": 1}', '{"version": 1, "cpus": {"x": {"fp32": 1}}}', "\x00"],
)
def test_a_broken_cache_is_ignored_and_rewritten(measured: list[CpuRates], broken: str) -> None:
    cache_path().parent.mkdir()
    cache_path().write_text(broken)
    calibrate_cpu()
    calibrate_cpu()
    assert len(measured) == 1


def test_a_kept_rate_that_cannot_be_is_measured_anew(measured: list[CpuRates]) -> None:
    calibrate_cpu()
    document = json.loads(cache_path().read_text())
    for rates in document["cpus"].values():
        rates["launch_seconds"] = 0
    cache_path().write_text(json.dumps(document))
    assert calibrate_cpu().launch_seconds == RATES.launch_seconds
    assert len(measured) == 2


def test_a_cache_that_cannot_be_written_is_only_a_warning(
    measured: list[CpuRates], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("no directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with pytest.warns(UserWarning, match="could not be kept"):
        device = calibrate_cpu()
    assert device.launch_seconds == RATES.launch_seconds


@pytest.mark.slow
def test_a_real_measurement_is_plausible() -> None:
    rates = calibrate.measure_cpu()
    assert 1e8 < rates.fp32_flops_per_second < 1e14
    assert rates.fp16_flops_per_second > 1e7
    assert rates.bf16_flops_per_second > 1e7
    assert 1e8 < rates.memory_bandwidth_bytes_per_second < 1e13
    assert 1e-7 < rates.launch_seconds < 1e-3
