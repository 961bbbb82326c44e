"""Ctrl-C and SIGTERM end a run cleanly the first time, and at once the second."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stops_on_signals(stop: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call `stop` on the first Ctrl-C or SIGTERM, and give both back their own handlers.

    Signals that the process ignores stay ignored. Outside the main thread, which alone gets signals, it does
    nothing. After the first, processes that end are not told of: a DataLoader's workers get the signal too, and
    an error in the middle of the step under way would come of it.

    Args:
        stop: Called with the signal, in the middle of whatever runs; it should only take a note.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in _SIGNALS}
    ours = [number for number, handler in before.items() if handler not in (signal.SIG_IGN, None)]

    def restore(numbers: Iterable[int]) -> None:
        for number in numbers:
            if before[number] is not None:  # else it was not set from Python
                signal.signal(number, before[number])

    def handle(number: int, _frame: FrameType | None) -> None:
        restore(ours)
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        stop(signal.Signals(number))

    for number in ours:
        signal.signal(number, handle)
    try:
        yield
    finally:
        restore(before.keys() & {*ours, signal.SIGCHLD})
