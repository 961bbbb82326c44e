"""A plan's suggestions as another trainer, or another command, takes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from brimful.errors import InfeasibleError
from brimful.results import Suggestion
from brimful.utils.quantities import format_bytes, format_seconds

_FLAG = "  would fit: --"
"""How lines begin that name an option of the command line."""


def translated(
    suggestions: Iterable[Suggestion], translation: Callable[[str], str | None]
) -> Iterator[Suggestion]:
    """The suggestions of which every flag has a translation, with flags of a command before other words.

    `translation` takes one flag of `brimful plan` with its value; None is for what cannot be asked for.
    """
    for each in suggestions:
        words = [translation(flag) for flag in re.split(r" (?=--)", each.flag)]
        known = [word for word in words if word is not None]
        if len(known) == len(words):
            flags = " ".join(word for word in known if word.startswith("--"))
            others = [word for word in known if not word.startswith("--")]
            yield replace(each, flag=" and ".join(filter(None, (flags, *others))))


def for_trainer(suggestions: Iterable[Suggestion], flags: Mapping[str, str]) -> Iterator[Suggestion]:
    """The suggestions that a trainer can be asked for; `flags` has its own words by those of `brimful plan`."""
    return (replace(each, option=each.flag) for each in translated(suggestions, flags.get))


def infeasible_for_trainer(error: InfeasibleError, flags: Mapping[str, str]) -> InfeasibleError:
    """The error with the suggestions that a trainer can be asked for, in its words."""
    return infeasible_with(error, tuple(for_trainer(error.suggestions, flags)))


def infeasible_with(error: InfeasibleError, found: tuple[Suggestion, ...]) -> InfeasibleError:
    """The error with other suggestions, each asked for by its `flag`."""
    lines = [line for line in str(error).splitlines() if not line.startswith(_FLAG)]
    place = next((i for i, line in enumerate(lines) if line.startswith("  would fit: ")), len(lines))
    lines[place:place] = [
        f"  would fit: {each.flag}: {format_bytes(each.predicted_peak_device_bytes)} and "
        f"{format_seconds(each.predicted_step_seconds)} a step predicted; {each.effect}"
        for each in found
    ]
    return InfeasibleError(
        "\n".join(lines),
        budget_bytes=error.budget_bytes,
        smallest_peak_bytes=error.smallest_peak_bytes,
        suggestions=found,
    )
