"""`functools.cached_property` for methods of one argument."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, TypeVar

Argument = TypeVar("Argument", bound=Hashable)
Answer = TypeVar("Answer")


def cached_method(method: Callable[[Any, Argument], Answer]) -> Callable[[Any, Argument], Answer]:
    """The method, run once for each argument; its object keeps the answers."""
    name = f"_cached_{method.__name__}"

    @wraps(method)
    def answer(self: Any, argument: Argument) -> Answer:
        answers = self.__dict__.setdefault(name, {})
        if argument not in answers:
            answers[argument] = method(self, argument)
        return answers[argument]  # type: ignore[no-any-return]

    return answer
