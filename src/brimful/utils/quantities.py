"""Bytes and seconds at the edge: parsing what people write, writing what people read.

Inside brimful there are only bytes (`int`) and seconds (`float`). GiB means 2**30, GB means 10**9.
"""

from __future__ import annotations

import math
import re
from numbers import Real

from brimful.errors import SizeError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
SHOWN_UNITS = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
"""The units in which readers see bytes, the largest first."""

_UNIT_BYTES = {
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_LARGEST_SIZE = 1 << 62
"""4 EiB: sums of a few still fit 64 bits. A choice."""
_MOST_SHOWN = 60
"""Characters of user input that an error shows. A choice."""
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | float, *, is_budget: bool = True) -> int:
    """The positive number of bytes that a text such as `"11GiB"` or `"512 MB"` means.

    A whole number, such as `11 * 2**30` or `8e9`, is bytes already. A text that is not a size, has no unit, or
    is not positive or larger than any device raises SizeError, which says how to write a share of the baseline
    if `is_budget` is set and one may be meant.
    """
    size_bytes = _parsed(text, is_budget=is_budget) if isinstance(text, str) else _whole(text)
    if size_bytes > _LARGEST_SIZE:
        raise SizeError(f"{_shown(text)} is more than {_LARGEST_SIZE // GIB:,} GiB, which no device has.")
    if size_bytes <= 0:
        raise SizeError(f"{_shown(text)} is not a positive size.")
    return size_bytes


def _parsed(text: str, *, is_budget: bool) -> int:
    """Bytes; more than `_LARGEST_SIZE` for any size beyond it."""
    match = _SIZE.fullmatch(text)
    if match is None:
        share = ", or as a budget a share of the baseline, such as 60%" if is_budget else ""
        raise SizeError(
            f"{_shown(text)} is not a size. Write a number and a unit, such as 11GiB or 800MiB{share}."
        )
    number, unit = match.group(1), match.group(2)
    if unit.lower() not in _UNIT_BYTES:
        found = f"the unit {_shown(unit)}" if unit else "no unit"
        written = number if len(number) <= _MOST_SHOWN else "11"
        raise SizeError(
            f"{_shown(text)} has {found}. Write {written}GiB ({written} × 2**30 bytes) "
            f"or {written}GB ({written} × 10**9 bytes).{_share_hint(written) if is_budget else ''}"
        )
    size = float(number) * _UNIT_BYTES[unit.lower()]
    return int(size) if size <= _LARGEST_SIZE else _LARGEST_SIZE + 1


def _share_hint(number: str) -> str:
    """How to write a number without a unit as a share of the baseline, where one below 1 is a fraction."""
    return (
        f" As a budget, {100 * float(number):g}% of the baseline is '{100 * float(number):g}%'."
        if float(number) < 1
        else (f" As a budget, a share of the baseline is written with a percent sign: {number}%.")
    )


def _whole(number: float) -> int:
    """A number of bytes, of whichever type it is."""
    is_number = isinstance(number, Real) and not isinstance(number, bool)
    if is_number and math.isfinite(number) and number == int(number):
        return int(number)
    share = f"; {number:.0%} of the baseline is written '{number:.0%}'" if is_number and 0 < number < 1 else ""
    raise SizeError(f"{number!r} is not a number of bytes. Write a size, such as '11GiB' or 11 * 2**30{share}.")


def _shown(asked: str | float) -> str:
    """User input, shortened for a message."""
    if not isinstance(asked, str):
        return str(asked) if abs(asked) < 10**_MOST_SHOWN else "a number of more than 60 digits"
    return repr(asked) if len(asked) <= _MOST_SHOWN else f"{asked[:_MOST_SHOWN]!r}…"


def format_bytes(size_bytes: int) -> str:
    """`size_bytes` for a reader, in the binary unit that keeps three digits: "21.3 GiB"."""
    magnitude = abs(size_bytes)
    for unit_bytes, unit in SHOWN_UNITS:
        if magnitude >= unit_bytes:
            value = size_bytes / unit_bytes
            return f"{value:.0f} {unit}" if abs(value) >= 100 else f"{value:.3g} {unit}"
    return f"{size_bytes} B"


def format_seconds(seconds: float) -> str:
    """`seconds` for a reader: "812 ms", "3.42 s", "2 min 18 s", "12 min", "2 h 05 min"."""
    for unit_seconds, unit in ((1e-6, "µs"), (1e-3, "ms")):
        if seconds < 999.5 * unit_seconds:  # what rounds to 1000 is 1 of the next unit
            return f"{seconds / unit_seconds:.3g} {unit}"
    if seconds < 119.5:
        return f"{seconds:.3g} s"
    if seconds < 599.5:
        return f"{round(seconds) // 60} min {round(seconds) % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_hours(seconds: float) -> str:
    """`seconds` as hours, in three digits or whole: "0.42", "14.2", "1,250"."""
    hours = seconds / 3600
    return f"{hours:,.0f}" if hours >= 99.95 else f"{hours:.3g}"


def format_interval(low: str, high: str) -> str:
    """Both ends of an interval, with one unit where both have the same: "350–480 ms", "812 ms–1.2 s"."""
    number, _, unit = low.partition(" ")
    return f"{number if high.partition(' ')[2] == unit and ' ' not in unit else low}–{high}"


def format_price(price: float) -> str:
    """A price for a reader: "1,890.00", "0.42", "0.0031"."""
    return f"{price:,.2f}" if price >= 0.1 else f"{price:.3g}"


def format_rate(per_second: float, what: str = "samples") -> str:
    """A rate for a reader, three digits or whole: "34.1 samples/s", "1820 tokens/s"."""
    number = f"{per_second:.0f}" if per_second >= 100 else f"{per_second:.3g}"
    return f"{number} {what}/s"


def format_rates(samples_per_second: float, counted_per_second: float, counted: str | None) -> list[str]:
    """Samples per second, and the rate of what a job's loss averages over where that is another number.

    These are one text or two: "34.1 samples/s", "1820 tokens/s". `counted` is what the job counts, such as
    "tokens"; None if it counts samples.
    """
    rates = [format_rate(samples_per_second)]
    if counted is not None and format_rate(counted_per_second) != rates[0]:
        rates.append(format_rate(counted_per_second, counted))
    return rates


def round_up(number: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple
