"""Factors that training measured are read again for the same predictions alone, and only if plausible."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from brimful.devices import find_device
from brimful.profiling import job_calibrations
from brimful.profiling.job_calibrations import JobKind, keep_job_calibration, kept_job_calibration
from brimful.results import JobCalibration
from brimful.settings import Precision

KIND = JobKind(
    device=find_device("cpu"),
    job="gpt",
    parameter_count=1000,
    precision=Precision.FP32,
    optimizer="adamw",
    world_size=1,
)


def measured(**changes: object) -> JobCalibration:
    values: dict[str, object] = {
        "device": "cpu",
        "job": "gpt",
        "parameter_count": 1000,
        "precision": Precision.FP32,
        "optimizer": "adamw",
        "time_factor": 1.25,
        "peak_factor": 0.9,
        "measured_steps": 5,
        "measured_on": "2026-11-24",
    }
    return JobCalibration(**values | changes)  # type: ignore[arg-type]


def file() -> Path:
    return Path(job_calibrations.FILE)  # of this test alone; see conftest.py


def test_factors_are_read_again_and_the_latest_replace_those_before() -> None:
    assert kept_job_calibration(KIND) is None
    keep_job_calibration(KIND, measured())
    keep_job_calibration(KIND, latest := measured(time_factor=1.5, peak_factor=None))
    assert kept_job_calibration(KIND) == latest


@pytest.mark.parametrize(
    "other",
    [
        replace(KIND, job="other"),
        replace(KIND, parameter_count=1001),
        replace(KIND, precision=Precision.BF16),
        replace(KIND, optimizer="sgd"),
        replace(KIND, world_size=2),
        replace(KIND, device=replace(KIND.device, memory_bandwidth_bytes_per_second=1.0)),
    ],
    ids=["job", "parameters", "precision", "optimizer", "ranks", "calibration"],
)
def test_factors_of_another_kind_are_not_used(other: JobKind) -> None:
    keep_job_calibration(KIND, measured())
    assert kept_job_calibration(other) is None


def test_factors_hold_for_one_version_of_brimful(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_job_calibration(KIND, measured())
    monkeypatch.setattr(job_calibrations, "__version__", "99")
    assert kept_job_calibration(KIND) is None


def test_free_memory_does_not_matter() -> None:
    keep_job_calibration(KIND, measured())
    assert kept_job_calibration(replace(KIND, device=replace(KIND.device, capacity_bytes=1))) == measured()


@pytest.mark.parametrize(
    "change",
    [
        {"time_factor": 1e9},
        {"time_factor": 0.0},
        {"peak_factor": 3.0},
        {"peak_factor": -1.0},
        {"time_factor": "__import__('os')"},
        {"measured_on": "yesterday"},
        {"unknown": 1},
    ],
    ids=lambda change: "-".join(map(str, change)),
)
def test_an_implausible_entry_is_a_warning_that_names_the_file_and_is_not_used(
    change: dict[str, object],
) -> None:
    other = replace(KIND, job="other")
    keep_job_calibration(other, measured(job="other"))
    keep_job_calibration(KIND, measured())
    document = json.loads(file().read_text())
    document["jobs"][KIND.key] |= change
    file().write_text(json.dumps(document))
    with pytest.warns(UserWarning, match=f"{file()}.*not used"):
        assert kept_job_calibration(KIND) is None
    with pytest.warns(UserWarning, match=str(file())):
        assert kept_job_calibration(other) == measured(job="other")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"version": 5, "jobs": 7}'])
def test_a_damaged_file_is_a_warning_and_is_replaced(content: bytes) -> None:
    file().write_bytes(content)
    with pytest.warns(UserWarning, match=str(file())):
        assert kept_job_calibration(KIND) is None
    with pytest.warns(UserWarning, match=str(file())):
        keep_job_calibration(KIND, measured())
    assert kept_job_calibration(KIND) == measured()


def test_altered_factors_are_not_used() -> None:
    keep_job_calibration(KIND, measured())
    file().write_text(file().read_text().replace("1.25", "1.75"))
    with pytest.warns(UserWarning, match="altered after it was measured"):
        assert kept_job_calibration(KIND) is None


def test_the_oldest_are_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_calibrations, "MOST_JOBS", 2)
    kinds = [replace(KIND, job=name) for name in "abc"]
    for kind in kinds:
        keep_job_calibration(kind, measured(job=kind.job))
    assert [kept_job_calibration(kind) is not None for kind in kinds] == [False, True, True]
