"""A plan's suggestions as another trainer, or another command, takes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from brimful.errors import InfeasibleError
from brimful.results import Suggestion
from brimful.utils.quantities import format_bytes, format_seconds

_FLAG = "  would fit: --"
"""How lines begin that name an option of the command line."""


def for_trainer(suggestions: Iterable[Suggestion], options: Mapping[str, str]) -> Iterator[Suggestion]:
    """The suggestions that a trainer can be asked for; `options` has its own by those of `brimful.plan`."""
    for each in suggestions:
        asked = [options.get(part) for part in each.option.split(", ")]
        if None not in asked:
            words = " and ".join(filter(None, asked))
            yield replace(each, option=words, flag=words)


def infeasible_for_trainer(error: InfeasibleError, options: Mapping[str, str]) -> InfeasibleError:
    """The error with the suggestions that a trainer can be asked for, in its words."""
    return infeasible_with(error, tuple(for_trainer(error.suggestions, options)))


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
