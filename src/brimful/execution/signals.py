"""Delay signal handlers, which may raise (KeyboardInterrupt, above all), while a step must not be left."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

_NAMES = ("SIGINT", "SIGTERM", "SIGALRM", "SIGCHLD")
"""Signals whose handlers usually raise: Ctrl-C, a request to end, a timeout, and the end of a process (torch's
handler raises if it was a worker of a DataLoader). Windows has the first two."""

SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


class HeldSignals:
    """Calls the handlers of signals as they come, or later, once they are held back.

    A handler that raises holds back those that come after it, while what it raised is handled.
    """

    def __init__(self) -> None:
        self._is_holding = False
        self._before: dict[int, Any] = {}
        self._pending: dict[int, None] = {}

    def hold(self) -> None:
        """Delay handlers from now on until `in_force` ends."""
        self._is_holding = True

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Within, signals are handled here; at the end of the context, handlers that waited are called.

        Outside the main thread, which alone gets signals, it does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._is_holding = False
        self._pending = {}
        handlers = {number: signal.getsignal(number) for number in SIGNALS}
        self._before = {number: handler for number, handler in handlers.items() if callable(handler)}
        with ExitStack() as at_end:
            at_end.callback(self._before.clear)  # a handler may hold what holds this
            at_end.callback(self._deliver)
            for number in self._before:
                at_end.callback(self._give_back, number)
                signal.signal(number, self._handle)
            yield

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within, handlers wait."""
        with self.in_force():
            self.hold()
            yield

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_holding:
            self._pending[number] = None
            return
        self._is_holding = True
        if (handler := self._before.get(number)) is not None:  # else a handler that chains calls it afterwards
            handler(number, frame)
        self._is_holding = False  # it raised nothing

    def _give_back(self, number: int) -> None:
        found = signal.signal(number, self._before[number])
        if found != self._handle:  # somebody else took it meanwhile
            signal.signal(number, found)

    def _deliver(self) -> None:
        with ExitStack() as each:  # the others too, if one raises
            for number in self._pending:
                each.callback(signal.raise_signal, number)
