"""A plan's suggestions as another trainer takes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from brimful.results import Suggestion


def for_trainer(suggestions: tuple[Suggestion, ...], options: Mapping[str, str]) -> Iterator[Suggestion]:
    """The suggestions that a trainer can be asked for.

    `options` has its own options by those of `brimful.plan`. What they lack is a change of the model, which
    stays in words; `dtype` and `lora` are options of brimful's architectures.
    """
    for each in suggestions:
        asked = options.get(each.option)
        if asked is not None:
            yield replace(each, option=asked, flag=asked)
        elif each.option.startswith(("dtype", "lora")):
            yield replace(each, option=each.change, flag=each.change)
