"""A call in a process of its own, so that one that ends the interpreter ends no benchmark."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any


class EndedError(Exception):
    """The process ended, or was ended as its time was up, without an answer; the text says how."""


def call_apart(function: Callable[..., Any], *arguments: Any, seconds: float, preload: Sequence[str]) -> Any:
    """What a function returns in a process of its own.

    Args:
        function: Of the top level of a module, as are the classes of what it takes and returns.
        *arguments: Its arguments.
        seconds: After which the process is killed.
        preload: Modules that take long to import; they are imported once for all processes.

    Raises:
        EndedError: There is no answer.
    """
    context = _forkserver(tuple(preload))
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sending, function, arguments))
    process.start()
    sending.close()
    answers = []
    if receiving.poll(seconds):
        with suppress(EOFError):  # it ended without a word
            answers.append(receiving.recv())
    else:
        process.kill()
    process.join()
    if answers:
        return answers[0]
    code = process.exitcode or 0
    raise EndedError(f"by {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}")


@cache
def _forkserver(preload: tuple[str, ...]) -> ForkServerContext:
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*preload])
    return context


def _send(sending: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    sending.send(function(*arguments))
