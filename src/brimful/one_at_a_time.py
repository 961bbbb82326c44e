"""Changes of what all threads share, such as torch's functions, its profiler and the garbage collector.

Changes that overlap would be undone in the wrong order: the second puts back what the first had put in place,
and leaves it there for good.

A fork by another thread waits until no thread is within. It has the changes otherwise, and it has the lock of
torch's random numbers if a thread draws some at that moment: whatever draws in the fork then waits for ever.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE_SECONDS = 60
"""How long a fork waits. A choice: longer than a capture of a large model; not for ever, as the other
thread may wait for the one that forks."""

_lock = threading.RLock()
_undone_in_forks: list[Callable[[], object]] = []
_fork = threading.local()
"""Of the thread that forks: whether it has the lock."""


@contextmanager
def one_at_a_time(undo: Callable[[], object] | None = None) -> Iterator[None]:
    """Only one thread at a time is within; it may enter again.

    Args:
        undo: Called in a fork that did not wait for the end: nothing else ends the context there.
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


def _wait() -> None:
    _fork.has_lock = _lock.acquire(timeout=PATIENCE_SECONDS)


def _go_on() -> None:
    if _fork.has_lock:
        _lock.release()


def _renew() -> None:
    global _lock
    if _fork.has_lock:
        _lock.release()
        return
    while _undone_in_forks:
        _undone_in_forks.pop()()
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_wait, after_in_parent=_go_on, after_in_child=_renew)
