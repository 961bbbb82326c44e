"""Which modules a function builds, and which were there before, such as a model that is trained now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from brimful.replaced import replaced


@contextmanager
def noting_built_modules() -> Iterator[Callable[[nn.Module], bool]]:
    """Yield a function that returns whether a model and all of its parts were built since."""
    built: dict[int, nn.Module] = {}
    initialise = nn.Module.__init__

    def note(module: nn.Module, *args: Any, **named: Any) -> None:
        built[id(module)] = module
        initialise(module, *args, **named)

    with replaced(nn.Module, "__init__", note):
        yield lambda model: all(id(module) in built for module in model.modules())
