"""Measured curves: between, before and beyond the points."""

import pytest

from brimful.devices import RateCurve

CURVE = RateCurve(kind="matmul:float32", points=((100.0, 1.0), (10_000.0, 4.0), (20_000.0, 8.0)))


@pytest.mark.parametrize(("amount", "seconds"), [(100, 1.0), (10_000, 4.0), (20_000, 8.0), (1000, 2.0)])
def test_points_are_met_and_logarithms_interpolated_between_them(amount: int, seconds: float) -> None:
    assert CURVE.seconds_at(amount) == pytest.approx(seconds)


def test_below_the_first_point_its_time_stands_and_beyond_the_last_its_rate() -> None:
    assert CURVE.seconds_at(0) == CURVE.seconds_at(1) == 1.0
    assert CURVE.seconds_at(200_000) == pytest.approx(80.0)


def test_more_work_never_takes_less_time() -> None:
    seconds = [CURVE.seconds_at(amount) for amount in range(0, 40_000, 37)]
    assert seconds == sorted(seconds)


def test_a_point_disturbed_upwards_is_replaced_by_the_larger_amount_s_time() -> None:
    curve = RateCurve.through("elementwise", [(10, 1.0), (30, 3.0), (20, 9.0)])
    assert curve.points == ((10.0, 1.0), (20.0, 3.0), (30.0, 3.0))


def test_arithmetic_takes_no_longer_than_as_many_smaller_amounts() -> None:
    measured = [(10, 1.0), (20, 9.0), (40, 3.0)]
    curve = RateCurve.through("matmul:float32", measured, is_arithmetic=True)
    assert curve.points == ((10.0, 1.0), (20.0, 2.0), (40.0, 3.0))
    cached = RateCurve.through("elementwise", [(10, 1.0), (20, 9.0), (40, 30.0)])
    assert cached.points[1] == (20.0, 9.0)


@pytest.mark.parametrize(
    "points",
    [
        (),
        ((0.0, 1.0),),
        ((1.0, 0.0),),
        ((2.0, 1.0), (1.0, 2.0)),
        ((1.0, 2.0), (2.0, 1.0)),
        ((1.0, float("nan")),),
    ],
)
def test_points_that_cannot_be_are_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValueError, match="curve 'x'"):
        RateCurve(kind="x", points=points)
