"""Something of torch's or a library's, replaced for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, stand_in: Any) -> Iterator[None]:
    """Let `owner.name` be `stand_in` while the context is open.

    Args:
        owner: A class or module.
        name: Of an attribute of its own or, for a class, an inherited one.
        stand_in: Takes its place.
    """
    is_own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, stand_in)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
