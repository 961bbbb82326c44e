"""Whether a function builds a model, or returns one that was there before, such as one that is trained now."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import Tensor, nn

from brimful.torch_utils.replaced import replaced

_FRAMES = 4
"""Frames between a module's `__setstate__` and `copy.copy`, with those of `replaced`."""


@contextmanager
def noting_built_modules(*, with_tensors: bool = False) -> Iterator[Callable[[nn.Module], bool]]:
    """Note which modules are built while the context is open.

    It yields a function that returns whether a model and all of its parts were built. Modules that are copied
    deeply or read from a file count as built. `with_tensors` notes parameters and buffers too, which takes a
    walk through all objects.
    """
    before = (
        {id(each) for each in gc.get_objects() if issubclass(type(each), Tensor)} if with_tensors else set()
    )
    built: dict[int, nn.Module] = {}
    initialise, set_state = nn.Module.__init__, nn.Module.__setstate__

    def note(module: nn.Module, *args: Any, **named: Any) -> None:
        built[id(module)] = module
        initialise(module, *args, **named)

    def note_state(module: nn.Module, state: dict[str, Any]) -> None:
        if not _is_in_shallow_copy():
            built[id(module)] = module
        set_state(module, state)

    def is_built(model: nn.Module) -> bool:
        tensors = chain(model.parameters(), model.buffers())
        return all(id(each) in built for each in model.modules()) and before.isdisjoint(map(id, tensors))

    with replaced(nn.Module, "__init__", note), replaced(nn.Module, "__setstate__", note_state):
        yield is_built


def _is_in_shallow_copy() -> bool:
    """Whether `copy.copy` calls, which shares the original's parameters."""
    frame = sys._getframe(2)
    for _ in range(_FRAMES):
        if frame.f_code is copy._reconstruct.__code__:  # type: ignore[attr-defined]
            return not frame.f_locals["deep"]
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
