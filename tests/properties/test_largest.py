"""The search for the largest size that fits, against trying all, in few predictions."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from brimful.planner import Limit, Tried, find_largest


@given(
    increments=st.lists(st.sampled_from([0, 1, 2, 50, 3000]), min_size=1, max_size=200),
    permitted_bytes=st.integers(1, 50_000),
    start=st.integers(1, 300),
    step=st.sampled_from([1, 8]),
)
def test_any_growth_of_memory_is_searched_as_by_trying_all(
    increments: list[int], permitted_bytes: int, start: int, step: int
) -> None:
    needed = [sum(increments[: count + 1]) + 1 for count in range(len(increments))]
    most = len(needed)
    found = find_largest(
        lambda size: of_bytes(needed[size // step - 1], permitted_bytes),
        step=step,
        start=start * step,
        most=most,
    )
    fitting = [count for count in range(1, most + 1) if needed[count - 1] <= permitted_bytes]
    assert found.value == step * max(fitting, default=0)
    assert found.next_value == found.value + step
    assert (found.limited_by is Limit.SEARCH) == (len(fitting) == most)
    assert len(found.tried) <= 4 * math.log2(most) + 6


@given(
    constant=st.floats(0, 0.5),
    slope=st.floats(1e-4, 0.05),
    bend=st.sampled_from([0.0, 1e-8, 1e-6, 1e-4]),
    start=st.integers(1, 30),
)
def test_lines_and_parabolas_take_few_predictions(
    constant: float, slope: float, bend: float, start: int
) -> None:
    def load(size: int) -> float:
        return constant + slope * size + bend * size**2

    found = find_largest(lambda size: of_bytes(load(size) * 2**30, 2**30), start=start)
    assert found.value == max((size for size in range(1, 20_000) if load(size) <= 1), default=0)
    growth = math.log(max(found.value, 8), 8)
    assert len(found.tried) <= growth + 6


@given(takes=st.integers(1, 4000), fits=st.integers(1, 4000), start=st.integers(1, 300))
def test_a_limit_of_the_model_ends_the_search_without_predictions(takes: int, fits: int, start: int) -> None:
    refusals = []

    def refusal(size: int) -> str | None:
        refusals.append(size)
        return None if size <= takes else f"takes {takes}, not {size}"

    def predict(size: int) -> Tried[None]:
        assert size <= takes
        return of_bytes(size, fits)

    found = find_largest(predict, refusal=refusal, start=start)
    assert found.value == min(takes, fits)
    assert found.limited_by is (Limit.MODEL if takes <= fits else Limit.MEMORY)
    if found.limited_by is Limit.MODEL:
        assert found.reason == f"takes {takes}, not {takes + 1}"


def of_bytes(needed_bytes: float, permitted_bytes: int) -> Tried[None]:
    fits = needed_bytes <= permitted_bytes
    return Tried(fits=fits, needed_bytes=needed_bytes, permitted_bytes=permitted_bytes, why="memory")
