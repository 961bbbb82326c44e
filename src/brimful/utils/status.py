"""Status of long calls on standard error: planning, calibrating, reading files.

`busy(title)` surrounds the call, `report(text)` names each step of it wherever that runs. Nothing appears in
the first second. Then a terminal or a notebook has a status line; elsewhere, such as in a log, a line appears
every ten seconds. The environment variable `BRIMFUL_PROGRESS=0` turns both off.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Protocol

from brimful.utils.display import make_console

if TYPE_CHECKING:
    from rich.console import Console

SECONDS_BEFORE_DISPLAY = 1.0
SECONDS_BETWEEN_LINES = 10.0
_REFRESHES_PER_SECOND = 4.0
"""Few, as what runs meanwhile may be measured. A choice."""
OFF = "BRIMFUL_PROGRESS"
"""The environment variable: "0" displays nothing."""


class _Display(Protocol):
    def update(self, text: str) -> None:
        """Display what happens next."""

    def stop(self) -> None:
        """End the display."""


_current: ContextVar[_Display | None] = ContextVar("brimful_status", default=None)
_part: ContextVar[str] = ContextVar("brimful_status_part", default="")


def report(text: str) -> None:
    """Say what happens next, in a short text without a full stop; outside of `busy` nothing is displayed."""
    display = _current.get()
    if display is not None:
        part = _part.get()
        display.update(f"{part}: {text}" if part else text)


@contextmanager
def reporting_part(name: str) -> Iterator[None]:
    """Begin what is reported within with the part of the work that it belongs to, such as "GPU 3 of 82"."""
    token = _part.set(name)
    try:
        yield
    finally:
        _part.reset(token)


@contextmanager
def busy(title: str) -> Iterator[None]:
    """Display what is reported within; inside another `busy`, the outer one displays it.

    Also a decorator: `@busy("planning")`.
    """
    if _current.get() is not None or os.environ.get(OFF) == "0":
        yield
        return
    console = make_console()
    lives = console.is_terminal or console.is_jupyter
    display = (
        _StatusLine(title, console)
        if lives
        else _Lines(title, partial(console.print, soft_wrap=True, markup=False, highlight=False))
    )
    token = _current.set(display)
    try:
        yield
    finally:
        _current.reset(token)
        display.stop()


class _StatusLine:
    """A spinner on a terminal or in a notebook, from one second on."""

    def __init__(self, title: str, console: Console) -> None:
        from rich.text import Text

        self._text = Text  # imported only where something is displayed
        self._title = title
        self._status = console.status(f"{title} …", refresh_per_second=_REFRESHES_PER_SECOND)
        self._lock = threading.Lock()
        self._is_stopped = False
        self._timer = threading.Timer(SECONDS_BEFORE_DISPLAY, self._start)
        self._timer.daemon = True
        self._timer.start()

    def update(self, text: str) -> None:
        with self._lock:
            self._status.update(self._text(f"{self._title}: {text} …"))

    def stop(self) -> None:
        """Remove the line."""
        self._timer.cancel()
        with self._lock:
            self._is_stopped = True
            self._status.stop()

    def _start(self) -> None:
        with self._lock:
            if not self._is_stopped:
                self._status.start()


class _Lines:
    """A line every ten seconds."""

    def __init__(self, title: str, write: Callable[[str], None]) -> None:
        self._title, self._write = title, write
        self._began = self._last = time.monotonic()

    def update(self, text: str) -> None:
        """Write the text if the last line is ten seconds old."""
        now = time.monotonic()
        if now - self._last >= SECONDS_BETWEEN_LINES:
            self._last = now
            self._write(f"{self._title}: {text} ({now - self._began:.0f} s)")

    def stop(self) -> None:
        """Nothing is left to be removed."""
