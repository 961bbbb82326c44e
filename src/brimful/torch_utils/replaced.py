"""Attributes of libraries' classes, modules and objects, replaced for a while."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from pkgutil import resolve_name
from typing import Any

_lock = threading.RLock()
"""Held only while an attribute is set."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


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


_in_place: list[_ByThread] = []
"""Stand-ins of all threads, in the order in which they were put in place."""


@contextmanager
def replaced(owner: Any, name: str, stand_in: Any) -> Iterator[None]:
    """Let `owner.name` be `stand_in` for this thread while the context is open; see `replace_attribute`.

    Other threads, and forks that they make, find the original: they may save a checkpoint or build a model
    while this one runs a step on fake tensors. They may replace the attribute too, on top of this.
    """
    find = inspect.getattr_static if isinstance(owner, type) else getattr
    with _lock:
        chosen = _ByThread(owner, name, find(owner, name, None), stand_in)
        chosen.put_in_place()
        _in_place.append(chosen)
    try:
        yield
    finally:
        with _lock:
            _in_place.remove(chosen)
            chosen.end()
            while type(top := vars(owner).get(name)) is _ByThread and top.has_ended:
                top.restore()


@contextmanager
def originals_in_place() -> Iterator[None]:
    """Put the originals of all that this thread has replaced back while the context is open.

    A compiler reads attributes themselves, and does not follow a `_ByThread` to what it is in this thread.
    """
    lifted: list[_ByThread] = []
    with _lock:
        for each in reversed(_in_place):
            if each.is_here and each.is_on_top:
                each.restore()
                lifted.append(each)
    _lifted.append(lifted)
    try:
        yield
    finally:
        _lifted.remove(lifted)
        with _lock:
            for each in reversed(lifted):
                each.put_in_place()


_lifted: list[list[_ByThread]] = []
"""What each `originals_in_place` that is open has put back, of all threads."""


@contextmanager
def stand_ins_in_place() -> Iterator[None]:
    """Put the stand-ins that this thread's `originals_in_place` put back in place while the context is open."""
    lifted = next((each for each in reversed(_lifted) if each and each[0].is_here), [])
    with _lock:
        for each in reversed(lifted):
            each.put_in_place()
    try:
        yield
    finally:
        with _lock:
            for each in lifted:
                each.restore()


class _ByThread:
    """A function, method, class or object that is another one in the thread that made this."""

    restore: Callable[[], None]
    """Puts what was there before in its place."""

    def __init__(self, owner: Any, name: str, original: Any, stand_in: Any) -> None:
        self._owner, self._name = owner, name
        self._original, self._stand_in = original, stand_in
        self._here = threading.local()
        self._here.is_replaced = True
        self.has_ended = False
        update_wrapper(self, original, updated=())

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        # Whoever imported it may copy or pickle it: it is what has its name.
        return resolve_name, (f"{self._owner.__name__}:{self._name}",)

    def put_in_place(self) -> None:
        """Take the place of the original."""
        self.restore = replace_attribute(self._owner, self._name, self)

    @property
    def is_here(self) -> bool:
        """Whether this thread made it."""
        return getattr(self._here, "is_replaced", False)

    @property
    def is_on_top(self) -> bool:
        """Whether nothing else has taken the place since."""
        return vars(self._owner).get(self._name) is self

    def end(self) -> None:
        """Be the original everywhere, for code that imported this by name, and below that of another thread."""
        self._stand_in, self.has_ended = self._original, True

    def _chosen(self) -> Any:
        return self._stand_in if self.is_here else self._original

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
