"""The standard streams of a command: results on standard output, all else best effort."""

from __future__ import annotations

import errno
import os
import sys
from dataclasses import dataclass
from typing import TextIO

from brimful.errors import SaveError
from brimful.utils.display import BestEffortFile, open_best_effort

_STDOUT, _STDERR = 1, 2


@dataclass(frozen=True, slots=True)
class _Results:
    """Standard output as the process was given it, whatever the job does with `sys.stdout`."""

    stream: TextIO
    file: BestEffortFile


_results: _Results | None = None
"""None until the streams are replaced: in a process that is not the command's own."""


def replace_standard_streams() -> None:
    """Replace the process's standard streams, to its end, by ones that discard what cannot be displayed."""
    global _results
    for descriptor in (0, _STDOUT, _STDERR):
        _reserve(descriptor)
    if os.name == "nt" and sys.stdout is not None and sys.stdout.isatty():
        return  # a console of Windows has a file of its own kind
    stream, file = open_best_effort(os.dup(_STDOUT), sys.stdout)
    _results = _Results(stream, file)
    for name, descriptor in (("stdout", _STDOUT), ("stderr", _STDERR)):
        before = getattr(sys, name)
        stream, file = open_best_effort(descriptor, before)
        file.name = f"<{name}>"
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _reserve(descriptor: int) -> None:
    """Open a standard descriptor that is closed, or the next file of the process would get its number.

    It is opened such that writing to it fails, as to a closed one.
    """
    try:
        os.fstat(descriptor)
    except OSError:
        os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)


def keep_stdout_for_the_result() -> None:
    """Send whatever else is printed in this process, and in those it starts, to standard error."""
    if _results is None:
        return
    _flush_what_was_printed()
    os.dup2(_STDERR, _STDOUT)


def print_result(text: str) -> None:
    """Print text and a newline on standard output, after what was printed before."""
    if _results is None:
        print(text, flush=True)
        return
    _flush_what_was_printed()
    print(text, file=_results.stream, flush=True)


def _flush_what_was_printed() -> None:
    """Flush `sys.stdout`, unless the job has closed it."""
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()


def check_result_is_written() -> None:
    """Raise `SaveError` if standard output did not take every result.

    A reader that closes a pipe early has what it wanted.
    """
    failure = None if _results is None else _results.file.failure
    if failure is not None and failure.errno != errno.EPIPE:
        raise SaveError(f"standard output could not be written: {failure.strerror}.")
