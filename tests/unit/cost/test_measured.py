"""What a calibration changes on a GPU: curves that an H100 SXM gave, and made ones."""

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from brimful.cost.kernels import FactorTable
from brimful.cost.kernels.constants import KERNEL_SECONDS
from brimful.cost.kernels.measured import measured_rates
from brimful.devices import Device, RateCurve, find_device
from brimful.profiling.calibrate import Calibration

H100 = find_device("H100 SXM")
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def calibrated() -> Device:
    rows = json.loads((RESULTS / "gpu_calibration.json").read_text(encoding="utf-8"))["rows"]
    found = next(row["calibration"] for row in rows if "calibration" in row)
    return msgspec.convert(found, Calibration).applied_to(H100)


def with_curve(kind: str, *points: tuple[float, float]) -> Device:
    return replace(H100, curves=(RateCurve(kind=kind, points=points),))


def test_a_size_that_takes_little_more_than_a_launch_says_nothing_of_the_gpu() -> None:
    assert measured_rates(with_curve("softmax", (1e5, 1e-5), (1e7, 1.4e-5))) == {}
    seconds = 1e-3
    rates = measured_rates(with_curve("softmax", (1e5, 1e-5), (1e9, seconds)))
    assert rates == {"softmax": pytest.approx(1e9 / (seconds - KERNEL_SECONDS))}


def test_a_launch_of_the_host_is_not_subtracted_from_a_large_probe(calibrated: Device) -> None:
    """Small scatters took 94 µs of the host, which works while the GPU does."""
    curve = next(each for each in calibrated.curves if each.kind == "scatter")
    amount, seconds = curve.points[-1]
    assert measured_rates(calibrated)["scatter"] == pytest.approx(amount / seconds, rel=0.02)


def test_convolutions_are_slower_than_products_where_the_probe_was(calibrated: Device) -> None:
    reached = FactorTable.of(calibrated).reached
    assert 0.3 < reached.convolution_half < 0.6
    assert 0.6 < reached.convolution_fp32 < 0.8
    assert reached.convolution_spread > 0.2  # sizes differ


def test_convolutions_without_a_curve_are_those_of_the_table() -> None:
    reached = FactorTable.of(with_curve("elementwise", (1e3, 1e-5), (1e9, 4e-4))).reached
    assert reached.convolution_half == FactorTable.of(H100).reached.convolution_half


@pytest.mark.parametrize("name", ["batch_norm", "batch_norm_backward", "copy"])
def test_classes_whose_probe_runs_other_kernels_keep_the_table(calibrated: Device, name: str) -> None:
    assert FactorTable.of(calibrated).factors(name) == FactorTable.of(H100).factors(name)


def test_sums_over_rows_are_reductions_of_columns(calibrated: Device) -> None:
    assert FactorTable.of(calibrated).factors("reduction_of_columns").rows == 1
    assert FactorTable.of(calibrated).factors("reduction_of_rows") == FactorTable.of(H100).factors(
        "reduction_of_rows"
    )
