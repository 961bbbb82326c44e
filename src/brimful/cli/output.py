"""What commands print, and how they end.

Exit status: 0 done; 1 it does not fit, or failed; 2 bad usage; training that saved and ended early: 130 after
Ctrl-C, 143 after SIGTERM.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import typer

from brimful.errors import BrimfulError, InterruptedRunError, UsageError

INTERRUPTED = 130
TERMINATED = 143
"""What shells give for Ctrl-C: 128 + SIGINT."""


def refuse(beside: Mapping[str, object], why: str) -> None:
    """Say which options that are given do not go with another."""
    asked = [name for name, value in beside.items() if value]
    if asked:
        raise UsageError(f"{why}; it does not go with {', '.join(asked)}.")


def show_warning(message: Warning | str, *_where: object) -> None:
    """Print a warning once, as a reader of the command line needs it, without where in the code it was made."""
    text = f"warning: {message}"
    if text not in _warned:
        _warned.add(text)
        print(text, file=sys.stderr, flush=True)


_warned: set[str] = set()
"""Those printed: each capture of a model makes what its constructor warns of anew."""


def asked_on_command_line(context: typer.Context, is_meant: Callable[[str], bool]) -> list[str]:
    """The options that were given, of those whose parameters' names are meant."""
    sources = {
        p.opts[0]: context.get_parameter_source(p.name) for p in context.command.params if is_meant(p.name)
    }
    return [option for option, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """On a terminal, a line on standard error while something takes seconds or minutes."""
    from rich.console import Console

    with Console(stderr=True).status(f"{what} …"):  # prints nothing where there is no terminal
        yield


@contextmanager
def progress_shown() -> Iterator[Callable[[str], None]]:
    """What is being measured: one line on a terminal, a line each elsewhere; on standard error."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what: print(f"measuring: {what}", file=sys.stderr, flush=True)
        return
    with console.status("measuring …") as status:
        yield lambda what: status.update(f"measuring: {what}")


def show(result: object, document: Callable[[], dict[str, Any]], as_json: bool) -> None:
    """Print a result for a reader, or its JSON."""
    print(json.dumps(document(), indent=2) if as_json else str(result))


@contextmanager
def errors_told(as_json: bool) -> Iterator[None]:
    """Turn our own errors into a message and an exit status; anything else is a bug and shows its trace."""
    try:
        yield
    except BrimfulError as error:
        if as_json:
            from brimful.report import error_document

            print(json.dumps(error_document(error), indent=2))
        print(
            "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr
        )
        if isinstance(error, InterruptedRunError):
            raise typer.Exit(INTERRUPTED) from None
        raise typer.Exit(2 if isinstance(error, UsageError) else 1) from None
