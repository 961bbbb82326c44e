"""Checks of the arguments of recipes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from brimful.errors import UsageError


def check_fraction(value: float) -> None:
    """Raise `UsageError` for a validation fraction that takes no samples or all of them."""
    if not 0 < value < 1:
        raise UsageError(f"validation_fraction is {value}; it must lie between 0 and 1.")


def digest(parts: Iterable[str | memoryview]) -> str:
    """A digest that identifies the same data, also in another process: 16 hexadecimal digits."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part.encode(errors="surrogatepass") + b"\0" if isinstance(part, str) else part)
    return found.hexdigest()[:16]
