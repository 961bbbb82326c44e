"""Bytes and seconds at the edge: parsing what people write, writing what people read.

Inside brimful there are only bytes (`int`) and seconds (`float`). GiB means 2**30, GB means 10**9.
"""

from __future__ import annotations

import re

from brimful.errors import SizeError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

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
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Bytes meant by `text`.

    Args:
        text: A number with a unit, such as `"11GiB"` or `"512 MB"`; an `int` is bytes already.

    Returns:
        A positive number of bytes.

    Raises:
        SizeError: `text` is no size, has no unit, or is not positive.
    """
    if isinstance(text, int):
        size_bytes = text
    else:
        match = _SIZE.fullmatch(text)
        unit = match.group(2).lower() if match else ""
        if match is None:
            raise SizeError(f"{text!r} is no size. Write a number and a unit, such as 11GiB or 800MiB.")
        if unit not in _UNIT_BYTES:
            number = match.group(1)
            found = "no unit" if not unit else f"the unit {match.group(2)!r}"
            raise SizeError(
                f"{text!r} has {found}. Write {number}GiB ({number} × 2**30 bytes) "
                f"or {number}GB ({number} × 10**9 bytes); a budget may also be {number}% of plain training."
            )
        size_bytes = int(float(match.group(1)) * _UNIT_BYTES[unit])
    if size_bytes <= 0:
        raise SizeError(f"{text!r} is not a positive size.")
    return size_bytes


def format_bytes(size_bytes: int) -> str:
    """`size_bytes` for a reader, in the binary unit that keeps three digits: "21.3 GiB"."""
    magnitude = abs(size_bytes)
    for unit_bytes, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if magnitude >= unit_bytes:
            value = size_bytes / unit_bytes
            return f"{value:.0f} {unit}" if abs(value) >= 100 else f"{value:.3g} {unit}"
    return f"{size_bytes} B"


def format_seconds(seconds: float) -> str:
    """`seconds` for a reader: "812 ms", "3.42 s", "2 h 05 min"."""
    for unit_seconds, unit in ((1e-6, "µs"), (1e-3, "ms")):
        if seconds < 999.5 * unit_seconds:  # what rounds to 1000 is 1 of the next unit
            return f"{seconds / unit_seconds:.3g} {unit}"
    if seconds < 119.5:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_rate(per_second: float, what: str = "samples") -> str:
    """A rate for a reader, three digits or whole: "34.1 samples/s", "1820 tokens/s"."""
    number = f"{per_second:.0f}" if per_second >= 100 else f"{per_second:.3g}"
    return f"{number} {what}/s"


def round_up(number: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple
