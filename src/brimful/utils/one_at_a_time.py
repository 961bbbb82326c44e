"""Changes of what all threads share, such as torch's functions, its profiler and the garbage collector.

Changes that overlap would be undone in the wrong order: the second puts back what the first had put in place,
and leaves it there for good.

A fork by another thread waits until no thread is within. It has the changes otherwise, and it has the lock of
torch's random numbers if a thread draws some at that moment: whatever draws in the fork then waits for ever.
"""

from __future__ import annotations

import os
import threading
import time
from _thread import interrupt_main
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE_SECONDS = 60
"""How long a fork waits for a thread that is within, from its entry on. A choice: longer than a capture of a
large model; not for ever, as that thread may wait for the one that forks."""

_AFTER_HOOKS_SECONDS = 0.05
"""Time after which the hooks of a fork have ended. A choice."""

_lock = threading.RLock()
_entered: list[float] = []
"""When the thread that is within entered, and entered again."""
_undone_in_forks: list[Callable[[], object]] = []
_fork = threading.local()
"""State of the thread that forks: `has_lock`, and `is_interrupted` by Ctrl-C while it waited."""


@contextmanager
def one_at_a_time(undo: Callable[[], object] | None = None) -> Iterator[None]:
    """Let only one thread at a time into the context, which it may enter again.

    `undo` is called in a fork that did not wait for the end: nothing else ends the context there.
    """
    with _lock:
        _entered.append(time.monotonic())
        if undo is not None:
            _undone_in_forks.append(undo)
        try:
            yield
        finally:
            _entered.pop()
            if undo is not None:
                _undone_in_forks.pop()


def _before_fork() -> None:
    """Wait for another thread; Python ignores what a hook raises, so Ctrl-C is repeated after the fork."""
    _fork.has_lock = _fork.is_interrupted = False
    try:
        since = next(iter(_entered), time.monotonic())
        _fork.has_lock = _lock.acquire(timeout=max(since + PATIENCE_SECONDS - time.monotonic(), 0))
    except KeyboardInterrupt:
        _fork.is_interrupted = True


def _after_fork_in_parent() -> None:
    if _fork.has_lock:
        _lock.release()
    if _fork.is_interrupted:
        threading.Timer(_AFTER_HOOKS_SECONDS, interrupt_main).start()


def _after_fork_in_child() -> None:
    """Threads of the parent are not in the child; one that forks within may end what it began."""
    global _lock
    if not _fork.has_lock:
        while _undone_in_forks:
            _undone_in_forks.pop()()
        _entered.clear()
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
    )
