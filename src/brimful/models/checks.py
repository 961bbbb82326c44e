"""Checks of the options that built-in models take."""

from __future__ import annotations

from typing import Any

from brimful.errors import UsageError


def check_range(model: str, option: str, value: Any, least: int, most: int | None = None) -> None:
    """Refuse an option that is not a whole number in a range, which `most` None leaves open above.

    The UsageError names the model, the option and the valid values.
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    if whole and value >= least and (most is None or value <= most):
        return
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
    raise UsageError(f"{model} takes a whole number {bounds} as {option}, not {value!r}.")


def check_multiple(model: str, option: str, value: Any, divisor: int) -> None:
    """Refuse an option that is not a positive multiple of a number.

    The UsageError names the model, the option and the nearest valid value.
    """
    check_range(model, option, value, divisor)
    if value % divisor:
        nearest = round(value / divisor) * divisor
        raise UsageError(f"{model} takes a multiple of {divisor} as {option}, not {value}; {nearest} would do.")
