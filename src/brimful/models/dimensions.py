"""The sizes of a model that a search for the largest can change: which options they are, and their steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from brimful.errors import MultipleError, UnknownNameError, UsageError
from brimful.models.resolve import option_names, resolve_job


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """A size of a model."""

    option: str
    """The option of the model."""
    step: int
    """What the sizes that are tried are multiples of."""
    start: int
    """The first size that is tried."""
    most: int | None
    """The largest size that is tried; None if it is not bounded."""


_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "seq-len": ("sequence_length",),
    "image-size": ("image_size",),
    "layers": ("num_hidden_layers", "num_layers", "layers"),
    "hidden": ("hidden_size", "hidden", "width"),
}
"""By what `--largest` calls it: names that the option has in models by name, and may have in a user's file."""
_STEPS = {"seq-len": 8, "image-size": 32, "layers": 1, "hidden": 64}
"""Steps where the model names none: those of tensor cores, of convolutional networks that halve an image five
times, and the usual size of a head. A choice."""
_STARTS = {"seq-len": 128, "image-size": 224, "layers": 4, "hidden": 256}
"""Small sizes, which are captured soon. A choice."""
_MOST = {"layers": 1024}
"""Sizes at which the search ends: a capture takes about 20 ms a layer, in which a tiny model is searched for
minutes. A choice."""
_NO_MULTIPLE = 2**16 + 1
"""A prime, which is a multiple of no step."""
LARGEST = ("batch", *_OPTIONS)
"""What `--largest` may ask for."""


def dimension(name: str, what: str, options: Mapping[str, Any]) -> Dimension:
    """The size of a model that `what` asks for, with the options that the model is given besides.

    UsageError if the model has no such option, or it is given.
    """
    if what not in _OPTIONS:
        raise UnknownNameError("size", what, LARGEST, hint="Write --largest batch for the largest micro-batch.")
    has = option_names(name)
    option = next((each for each in _OPTIONS[what] if each in has), None)
    if option is None:
        raise UsageError(
            f"{name} has no option {_OPTIONS[what][0]}, which --largest {what} changes. It has what these "
            f"change: --largest {', '.join(_those_of(has))}."
        )
    if option in options:
        raise UsageError(f"--largest {what} finds {option}; leave out {option}={options[option]}.")
    step = _step(name, option, options) or _STEPS[what]
    start = max(_STARTS[what] // step, 1) * step
    return Dimension(option=option, step=step, start=start, most=_MOST.get(what))


def _those_of(has: Collection[str]) -> list[str]:
    return ["batch", *(what for what, names in _OPTIONS.items() if any(each in has for each in names))]


def _step(name: str, option: str, options: Mapping[str, Any]) -> int | None:
    """What a named model takes multiples of as an option, as it says itself; None if it says nothing."""
    if ":" in name:
        return None
    try:
        resolve_job(name, **{**options, option: _NO_MULTIPLE})
    except MultipleError as error:
        return error.divisor
    except UsageError:
        return None  # out of range, or another option is wrong, which the first estimate reports
    return None
