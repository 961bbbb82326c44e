"""Attributes of libraries' classes, modules and objects, replaced for a while."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from brimful.utils.one_at_a_time import one_at_a_time


def replace_attribute(owner: Any, name: str, stand_in: Any) -> Callable[[], None]:
    """Let `owner.name` be `stand_in` until the returned function restores it.

    `owner` is a class, module or instance; the attribute may be its own or an inherited one.
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
    """Let `owner.name` be `stand_in` for this thread while the context is open; see `replace_attribute`.

    Other threads, and forks that they make, find the original: they may save a checkpoint or build a model
    while this one runs a step on fake tensors. They wait to replace anything themselves.
    """
    find = inspect.getattr_static if isinstance(owner, type) else getattr
    original = find(owner, name, None)
    with one_at_a_time():
        chosen = _ByThread(original, stand_in)
        restore = replace_attribute(owner, name, chosen)
        try:
            yield
        finally:
            restore()
            chosen.end()


class _ByThread:
    """A function, method, class or object that is another one in the thread that made this."""

    def __init__(self, original: Any, stand_in: Any) -> None:
        self._original, self._stand_in = original, stand_in
        self._here = threading.local()
        self._here.is_replaced = True

    def end(self) -> None:
        """Be the original everywhere, for code that imported this by name meanwhile."""
        self._stand_in = self._original

    def _chosen(self) -> Any:
        return self._stand_in if getattr(self._here, "is_replaced", False) else self._original

    def __get__(self, instance: Any, owner: type) -> Any:
        chosen = self._chosen()
        return chosen.__get__(instance, owner) if hasattr(chosen, "__get__") else chosen

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._chosen()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chosen(), name)

    def __getitem__(self, key: Any) -> Any:
        return self._chosen()[key]

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self._chosen())

    def __or__(self, other: Any) -> Any:
        return self._chosen() | other

    def __ror__(self, other: Any) -> Any:
        return other | self._chosen()
