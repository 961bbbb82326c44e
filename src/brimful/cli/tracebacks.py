"""Tracebacks of errors in a user's job, without the frames of brimful that lead to it."""

from __future__ import annotations

import argparse
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from brimful.errors import JobExitError

_PACKAGE = str(Path(__file__).parents[1])
_ENVIRONMENT = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def traceback_text(error: Exception) -> str:
    """The traceback of a caught error, from the first frame of the job on; whole where the job has none."""
    start = next(_of_job(error.__traceback__), None)
    if start is None and not isinstance(error, SyntaxError):  # which says its file and line
        start = error.__traceback__
    return "".join(traceback.format_exception(type(error), error, start))


def job_exit(end: SystemExit) -> JobExitError:
    """The error for a job that called `sys.exit`; it says where."""
    *_, last = [None, *_of_job(end.__traceback__)]
    parses = any(
        each.f_code.co_filename == argparse.__file__ for each, _ in traceback.walk_tb(end.__traceback__)
    )
    where = "" if last is None else f" in {last.tb_frame.f_code.co_filename}:{last.tb_lineno}"
    code = "" if end.code is None else repr(end.code)
    return JobExitError(
        f"the job called sys.exit({code}){where}, so the command did not finish. "
        + (
            "The file is imported, so that it parses the arguments of brimful: move parse_args into "
            "if __name__ == '__main__'."
            if parses
            else "Remove the call, or raise an exception that says what is wrong."
        )
    )


def _of_job(frames: TracebackType | None) -> Iterator[TracebackType]:
    """The frames of a traceback in files that are neither brimful's nor installed."""
    while frames is not None:
        if not frames.tb_frame.f_code.co_filename.startswith((_PACKAGE, *_ENVIRONMENT, "<")):
            yield frames
        frames = frames.tb_next
