"""Intervals of predicted times, and of differences in which common errors cancel."""

from dataclasses import replace

import pytest

from brimful.cost import StepTime, bare_difference_interval, difference_interval, time_interval
from brimful.cost.kernels.constants import KERNEL_SECONDS
from brimful.cost.kernels.factors import FactorTable, reached_by
from brimful.devices import RateCurve, find_device

GPU = find_device("RTX 3090")


def step(**seconds: float) -> StepTime:
    """A step of these classes of kernels, all of it in forward."""
    return StepTime(
        forward_seconds=sum(seconds.values()),
        backward_seconds=0.0,
        recompute_seconds=0.0,
        optimizer_seconds=0.0,
        kernel_seconds=tuple(seconds.items()),
    )


def width(interval: tuple[float, float]) -> float:
    return interval[1] - interval[0]


def test_the_interval_has_the_prediction_in_it() -> None:
    low, high = time_interval(step(matmul=1.0), GPU)
    assert 0.5 < low < 1.0 < high < 2.0


def test_an_unknown_kernel_widens_the_interval() -> None:
    known, unknown = step(matmul=1.0), step(**{"a kernel of tomorrow": 1.0})
    assert width(time_interval(unknown, GPU)) > 2 * width(time_interval(known, GPU))


def test_rates_that_are_derived_widen_the_interval_until_the_gpu_is_measured() -> None:
    one, unsure = step(matmul=1.0), replace(GPU, rates_spread=0.3)
    assert width(time_interval(one, unsure)) > 2 * width(time_interval(one, GPU))
    curves = (RateCurve(kind="elementwise", points=((8.0, 1e-6), (8e6, 1e-3))),)
    measured = time_interval(one, replace(GPU, curves=curves))
    assert time_interval(one, replace(unsure, curves=curves)) == measured


def test_a_gpu_that_was_not_measured_has_a_wider_interval() -> None:
    one = step(matmul=1.0)
    assert width(time_interval(one, find_device("RTX 3070"))) > width(time_interval(one, GPU))


def test_attention_is_uncertain_on_a_gpu_where_nobody_measured_it() -> None:
    """Its kernels reach another fraction of the peak on each generation; other products do not."""
    attention, product = step(attention=1.0), step(matmul=1.0)
    measured = find_device("RTX 4090")
    assert width(time_interval(attention, measured)) == pytest.approx(width(time_interval(product, measured)))
    assert width(time_interval(attention, GPU)) > 3 * width(time_interval(product, GPU))


def test_errors_of_several_classes_partly_cancel() -> None:
    spread = step(elementwise=0.25, layer_norm=0.25, softmax=0.25, pooling=0.25)
    assert width(time_interval(spread, GPU)) < width(time_interval(step(elementwise=1.0), GPU))


def test_what_two_steps_share_does_not_make_their_difference_uncertain() -> None:
    plain = step(matmul=1.0, elementwise=0.5)
    more = step(matmul=1.0, elementwise=0.5, host_copy=0.01)
    low, high = difference_interval(more, plain, GPU)
    assert low < 0.01 < high
    assert high - low < 0.1 * width(time_interval(plain, GPU))  # beside what measurements vary by
    assert difference_interval(plain, plain, GPU) == (0.0, 0.0)


def test_a_difference_is_the_other_way_round_if_its_steps_are() -> None:
    one, other = step(matmul=1.0, layer_norm=0.2), step(matmul=1.2, softmax=0.1)
    low, high = difference_interval(one, other, GPU)
    assert difference_interval(other, one, GPU) == pytest.approx((-high, -low), rel=0.01)


def test_a_difference_whose_kernels_are_not_known_is_no_more_certain() -> None:
    plain, more = step(matmul=1.0), step(matmul=1.0, elementwise=0.1)
    known = difference_interval(more, plain, GPU)
    assert width(bare_difference_interval(0.1, 1.0)) >= width(known)
    assert width(bare_difference_interval(0.0, 1.0)) > 0


def test_an_empty_step_has_no_interval() -> None:
    assert time_interval(step(), GPU) == (0.0, 0.0)


def test_a_calibrated_gpu_has_its_own_rates_and_a_narrower_interval() -> None:
    """Half the table's bandwidth is measured, and softmax at half of that."""
    rate = GPU.memory_bandwidth_bytes_per_second / 2
    launch = KERNEL_SECONDS
    curves = (
        RateCurve(kind="elementwise", points=((1e6, launch + 1e6 / rate), (48e6, launch + 48e6 / rate))),
        RateCurve(kind="softmax", points=((1e5, launch + 2e5 / rate), (8e6, launch + 16e6 / rate))),
    )
    calibrated = replace(GPU, name="RTX 3070", curves=curves)
    table = FactorTable.of(calibrated)
    assert table.reached.bandwidth == pytest.approx(0.5)
    assert table.reached.half == reached_by(calibrated).half  # no matmul was measured
    assert table.factors("softmax").passes == pytest.approx(2.0)
    assert table.factors("layer_norm") == FactorTable.of(GPU).factors("layer_norm")
    one = step(softmax=1.0)
    assert width(time_interval(one, calibrated)) < width(time_interval(one, replace(calibrated, curves=())))
