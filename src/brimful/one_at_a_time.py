"""Changes of what all threads share, such as torch's functions, its profiler and the garbage collector.

Changes that overlap would be undone in the wrong order: the second puts back what the first had put in place,
and leaves it there for good.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.RLock()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Only one thread at a time is within; it may enter again."""
    with _lock:
        yield


def _renew() -> None:
    """A fork has no other thread that could release the lock."""
    global _lock
    if not _lock._is_owned():  # type: ignore[attr-defined]
        _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
