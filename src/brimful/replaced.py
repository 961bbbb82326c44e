"""Attributes of libraries' classes, modules and objects, replaced for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def replace_attribute(owner: Any, name: str, stand_in: Any) -> Callable[[], None]:
    """Let `owner.name` be `stand_in` until it is restored.

    Args:
        owner: A class, module or instance.
        name: Of an attribute of its own, or an inherited one.
        stand_in: Takes its place.

    Returns:
        What restores it.
    """
    is_own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, stand_in)

    def restore() -> None:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)

    return restore


@contextmanager
def replaced(owner: Any, name: str, stand_in: Any) -> Iterator[None]:
    """Let `owner.name` be `stand_in` while the context is open; see `replace_attribute`."""
    restore = replace_attribute(owner, name, stand_in)
    try:
        yield
    finally:
        restore()
