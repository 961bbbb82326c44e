"""Checks of the options and configurations that models take."""

from __future__ import annotations

from typing import Any

from brimful.errors import MultipleError, UsageError


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

    The `MultipleError` names the model, the option and the nearest valid value.
    """
    check_range(model, option, value, divisor)
    if value % divisor:
        nearest = round(value / divisor) * divisor
        message = f"{model} takes a multiple of {divisor} as {option}, not {value}; {nearest} would do."
        raise MultipleError(message, divisor)


_MOST_IN_A_FILE = 2**31
"""Larger sizes in a configuration are refused. A choice."""


def checked_size(name: str, key: str, value: object) -> int:
    """A size in the configuration of a model; UsageError if it is none."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _MOST_IN_A_FILE:
        raise UsageError(f"{key} in the configuration of {name} is {value!r}; it must be a positive size.")
    return value
