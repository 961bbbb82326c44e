"""Changes of what all threads share, such as torch's functions, its profiler and the garbage collector.

Changes that overlap would be undone in the wrong order: the second puts back what the first had put in place,
and leaves it there for good.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_lock = threading.RLock()
_undone_in_forks: list[Callable[[], object]] = []


@contextmanager
def one_at_a_time(undo: Callable[[], object] | None = None) -> Iterator[None]:
    """Only one thread at a time is within; it may enter again.

    Args:
        undo: Called in a fork that another thread makes meanwhile: nothing else ends the context there.
    """
    with _lock:
        if undo is None:
            yield
            return
        _undone_in_forks.append(undo)
        try:
            yield
        finally:
            _undone_in_forks.pop()


def _renew() -> None:
    global _lock
    if not _lock._is_owned():  # type: ignore[attr-defined]
        while _undone_in_forks:
            _undone_in_forks.pop()()
        _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
