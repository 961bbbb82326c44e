"""Checks of what recipes are asked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from brimful.errors import UsageError


def check_fraction(value: float) -> None:
    """Refuse a part of the samples for validation that is none or all of them.

    Args:
        value: What was given.

    Raises:
        UsageError: It is not between 0 and 1.
    """
    if not 0 < value < 1:
        raise UsageError(f"validation_fraction is {value}; it must lie between 0 and 1.")


def digest(parts: Iterable[str | memoryview]) -> str:
    """By which the same data are known again, in another process too.

    Args:
        parts: Texts or memory, in their order.

    Returns:
        16 hexadecimal digits.
    """
    found = hashlib.sha256()
    for part in parts:
        found.update(part.encode(errors="surrogatepass") + b"\0" if isinstance(part, str) else part)
    return found.hexdigest()[:16]
