"""Sizes as people write them."""

from __future__ import annotations

import numpy as np
import pytest

from brimful.errors import SizeError
from brimful.utils.quantities import format_interval, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("11GiB", 11 * 2**30), ("512 MB", 512 * 10**6), ("1.5kib", 1536), (7, 7), ("4194303TiB", 4194303 * 2**40)],
)
def test_a_size_is_a_number_and_a_unit(text: str | int, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("11", "has no unit"),
        ("11XB", "has the unit 'XB'"),
        ("nan", "is not a size"),
        ("-1GiB", "is not a size"),
        ("0GiB", "is not a positive size"),
        (-3, "is not a positive size"),
        ("9" * 5000 + "GiB", "which no device has"),
        ("9" * 5000, "has no unit"),
        ("1" + "x" * 5000, "has the unit"),
        ("x" * 5000, "is not a size"),
        ("5000000TiB", "is more than 4,294,967,296 GiB"),
        (10**100, "a number of more than 60 digits is more than"),
    ],
)
def test_what_is_not_a_size_is_refused_in_a_short_line(text: str | int, said: str) -> None:
    with pytest.raises(SizeError, match=said) as caught:
        parse_bytes(text)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("number", [1e9, 10**9, np.int64(10**9), np.float64(1e9)])
def test_a_whole_number_of_any_type_is_bytes(number: float) -> None:
    assert parse_bytes(number) == 10**9
    assert type(parse_bytes(number)) is int


@pytest.mark.parametrize("number", [0.5, 1.5, float("nan"), float("inf"), True, None, [1]])
def test_what_is_not_a_number_of_bytes_is_refused_in_one_line(number: object) -> None:
    with pytest.raises(SizeError) as caught:
        parse_bytes(number)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert ("'50%'" in str(caught.value)) == (number == 0.5)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *[
            (0.9996, "1 s"),
            (119.4, "119 s"),
            (119.5, "2 min 00 s"),
            (138.1, "2 min 18 s"),
            (599.4, "9 min 59 s"),
        ],
        *[(599.5, "10 min"), (3599, "1 h 00 min"), (7500, "2 h 05 min")],
    ],
)
def test_times_have_about_three_digits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        ("350 ms", "480 ms", "350–480 ms"),
        ("812 ms", "1.2 s", "812 ms–1.2 s"),
        ("99.9 s", "5 min 10 s", "99.9 s–5 min 10 s"),
        ("2 min 03 s", "5 min 10 s", "2 min 03 s–5 min 10 s"),
    ],
)
def test_an_interval_has_one_unit_only_where_both_ends_have_the_same(low: str, high: str, text: str) -> None:
    assert format_interval(low, high) == text
