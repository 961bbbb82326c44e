"""Stops a run early: on request, on Ctrl-C or on SIGTERM. A second signal stops it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from brimful.distributed.ranks import Ranks
from brimful.results import StopReason

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(slots=True)
class Stop:
    """A request to end the run after the current step. It may come at any moment, on one rank alone."""

    _is_requested: bool = False
    _is_terminated: bool = False

    def request(self) -> None:
        """Request the end of the run."""
        self._is_requested = True

    def handle(self, number: signal.Signals) -> None:
        """Request the end of the run on a signal."""
        self._is_terminated = number is signal.SIGTERM
        self.request()

    def is_requested(self) -> bool:
        """Whether this rank has the request; the others may not."""
        return self._is_requested

    def synced(self, ranks: Ranks) -> StopReason | None:
        """Why all ranks stop, if any of them has a request; None if none of them has.

        All ranks call this together, and get the same answer.
        """
        asked, terminated = ranks.all_reduce(self._is_requested, self._is_terminated)
        if not asked:
            return None
        return StopReason.TERMINATED if terminated else StopReason.INTERRUPTED


@contextmanager
def stops_on_signals(stop: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call `stop` on the first Ctrl-C or SIGTERM within the context, then restore the handlers of both.

    `stop` is called with the signal, between any two instructions; it should only set a flag. Signals that the
    process ignores stay ignored. Outside the main thread, which alone gets signals, this does nothing. The
    first signal also resets the handler of SIGCHLD: a DataLoader's workers get the signal too, and their end
    would raise an error within the current step.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in _SIGNALS}
    ours = [number for number, handler in before.items() if handler not in (signal.SIG_IGN, None)]

    def restore(numbers: Iterable[int]) -> None:
        for number in numbers:
            if before[number] is not None:  # None: it was not set from Python
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
