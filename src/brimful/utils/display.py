"""Display is best effort: a terminal, pipe or log file that cannot be written never ends a run.

The command line replaces its standard streams by `open_best_effort`, so that everything that prints in the
process is covered: progress, warnings, tracebacks, and the job's own prints. In a process that is not brimful's
own, `BestEffortText` covers what brimful itself displays.
"""

from __future__ import annotations

import io
import os
import select
import sys
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console


class BestEffortFile(io.FileIO):
    """A file that discards what it cannot write.

    Each write is tried: a log on a disk that was full for a while is continued.
    """

    failure: OSError | None = None
    """Why something was discarded first; None if nothing was."""

    def write(self, content: Any, /) -> int:
        """Write what can be written; see `io.RawIOBase.write`."""
        try:
            while (written := super().write(content)) is None:  # a non-blocking pipe is full
                select.select((), (self,), ())
        except OSError as error:
            self.failure = self.failure or error
            return memoryview(content).nbytes
        return written


def open_best_effort(descriptor: int, like: TextIO | None) -> tuple[TextIO, BestEffortFile]:
    """A text stream on a file descriptor whose writes never raise, and the file below it.

    The stream escapes characters outside its encoding, and leaves the descriptor open when it is closed. It
    keeps encoding and buffering of `like`, the stream that it replaces; None takes UTF-8.
    """
    file = BestEffortFile(descriptor, "w", closefd=False)
    stream = io.TextIOWrapper(
        io.BufferedWriter(file),
        encoding=getattr(like, "encoding", None) or "utf-8",
        errors="backslashreplace",
        line_buffering=file.isatty() or _writes_lines_at_once(like),
    )
    return stream, file


def _writes_lines_at_once(stream: TextIO | None) -> bool:
    return bool(getattr(stream, "line_buffering", False) or getattr(stream, "write_through", False))


class BestEffortText(io.TextIOBase):
    """A view of a stream that discards what the stream cannot write; None discards everything."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a plain attribute in the base class
        """The encoding of the stream."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str, /) -> int:
        """Write what can be written."""
        with suppress(OSError, ValueError):  # ValueError: the stream is closed, or cannot encode the text
            if self._stream is not None:
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush what can be flushed."""
        with suppress(OSError, ValueError):
            if self._stream is not None:
                self._stream.flush()

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        with suppress(OSError, ValueError, AttributeError):
            return self._stream is not None and self._stream.isatty()
        return False

    def fileno(self) -> int:
        """The stream's file descriptor, by which a terminal's width is found."""
        if self._stream is None:
            raise io.UnsupportedOperation("no file descriptor")
        return self._stream.fileno()


def write_from_signal(text: str) -> None:
    """Display a line on standard error from a signal handler, which may interrupt a print."""
    with suppress(OSError):
        os.write(2, text.encode())


def make_console() -> Console:
    """A console on standard error that discards what cannot be written."""
    from rich.console import Console

    return Console(file=BestEffortText(sys.stderr))  # type: ignore[arg-type]  # it has what a console calls


class PrintedResult:
    """A result as text for `print` and IPython, as HTML and as JSON, all made by `brimful.report`.

    The records are below `report` in the layers, so `report` is imported by name, when a result is printed.
    """

    __slots__ = ()

    def __str__(self) -> str:
        return str(import_module("brimful.report").text_of(self))

    def to_json(self) -> dict[str, Any]:
        """A JSON object with the record's own names; numbers that JSON lacks are "nan", "inf" and "-inf"."""
        document: dict[str, Any] = import_module("brimful.report").document_of(self)
        return document

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """IPython's protocol (lib.pretty)."""
        printer.text("…" if cycle else str(self))

    def _repr_html_(self) -> str:
        """The protocol of notebooks (IPython.display): HTML without scripts, in which all text is escaped."""
        return str(import_module("brimful.report").html_of(self))
