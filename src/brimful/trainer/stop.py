"""What ends a run early: a request of its user, Ctrl-C or SIGTERM; the second of these ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from brimful.distributed.ranks import Ranks
from brimful.results import StopReason

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """What a run is asked: to end after the step under way. It may come at any moment, on one rank alone."""

    def __init__(self) -> None:
        self._is_requested = self._is_terminated = False

    def clear(self) -> None:
        """Ask nothing of a run that begins."""
        self._is_requested = self._is_terminated = False

    def request(self) -> None:
        """Ask for the end of the run."""
        self._is_requested = True

    def handle(self, number: signal.Signals) -> None:
        """Ask for it as a signal does."""
        self._is_terminated = number is signal.SIGTERM
        self.request()

    def is_requested(self) -> bool:
        """Whether this rank is asked, which the others may not know yet."""
        return self._is_requested

    def synced(self, ranks: Ranks) -> StopReason | None:
        """Why all ranks stop, at the same point: where any of them is asked to.

        Args:
            ranks: All of them; they agree together.

        Returns:
            None if none of them is.
        """
        asked, terminated = ranks.all_reduce(self._is_requested, self._is_terminated)
        if not asked:
            return None
        return StopReason.TERMINATED if terminated else StopReason.INTERRUPTED


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
