"""Output and exit status of commands.

Exit status: 0 done; 1 it does not fit, or failed; 2 bad usage; training that saved and ended early: 130 after
Ctrl-C, 143 after SIGTERM.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import typer

from brimful.cli.streams import check_result_is_written, keep_stdout_for_the_result, print_result
from brimful.cli.tracebacks import job_exit, traceback_text
from brimful.errors import BrimfulError, InterruptedRunError, UsageError
from brimful.utils.display import BestEffortText

INTERRUPTED = 130
TERMINATED = 143
"""Exit statuses of shells: 128 + SIGINT, and 128 + SIGTERM."""


def refuse(beside: Mapping[str, object], why: str) -> None:
    """Refuse options that cannot be combined with another."""
    asked = [name for name, value in beside.items() if value]
    if asked:
        raise UsageError(f"{why}; it does not go with {', '.join(asked)}.")


def say(text: str) -> None:
    """Print on standard error, best effort."""
    print(text, file=BestEffortText(sys.stderr), flush=True)


def show_warning(message: Warning | str, *_where: object) -> None:
    """Print a warning once, as a reader of the command line needs it, without where in the code it was made."""
    text = f"warning: {message}"
    if text not in _warned:
        _warned.add(text)
        say(text)


_warned: set[str] = set()
"""Warnings already printed: each capture of a model repeats the warnings of its constructor."""


def asked_on_command_line(context: typer.Context, is_meant: Callable[[str], bool]) -> list[str]:
    """The options that were given, of those whose parameters' names are meant."""
    sources = {
        p.opts[0]: context.get_parameter_source(p.name) for p in context.command.params if is_meant(p.name)
    }
    return [option for option, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def show(result: object, document: Callable[[], dict[str, Any]], as_json: bool) -> None:
    """Print the result of a command for a reader, or its JSON; `document` makes the JSON document.

    Raises `SaveError` if standard output cannot be written.
    """
    print_result(json.dumps(document(), indent=2) if as_json else str(result))
    check_result_is_written()


@contextmanager
def report_errors(as_json: bool) -> Iterator[None]:
    """Report errors by a message and an exit status; errors in the job, and bugs, also show their traceback.

    With `as_json` errors are also printed as JSON, and standard output has nothing but the result or the error.
    """
    if as_json:
        keep_stdout_for_the_result()
    try:
        yield
    except typer.Exit:
        raise
    except KeyboardInterrupt as error:
        _print_error(error, as_json)
        raise typer.Exit(INTERRUPTED) from None
    except SystemExit as end:
        _report(job_exit(end), as_json)
        raise typer.Exit(1) from None
    except BrimfulError as error:
        _report(error, as_json)
        raise typer.Exit(_exit_status(error)) from None
    except Exception as error:
        _print_error(error, as_json)
        say(traceback_text(error).rstrip())
        raise typer.Exit(1) from None


def exit_script(error: BrimfulError) -> NoReturn:
    """Report an error and exit with its status, from within a script that brimful runs."""
    _report(error, as_json=False)
    raise SystemExit(_exit_status(error)) from None


def _exit_status(error: BrimfulError) -> int:
    if isinstance(error, InterruptedRunError):
        return INTERRUPTED
    return 2 if isinstance(error, UsageError) else 1


def report_bad_usage(message: str, as_json: bool) -> None:
    """Print what is wrong with a command's arguments as JSON, if that was asked for."""
    _print_error(UsageError(message), as_json)


def _report(error: BrimfulError, as_json: bool) -> None:
    _print_error(error, as_json)
    say("\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]))


def _print_error(error: BaseException, as_json: bool) -> None:
    """Print an error as JSON, if asked for, on the first of several ranks alone: two documents are not one."""
    if as_json and is_first_rank():
        from brimful.report import error_document

        print_result(json.dumps(error_document(error), indent=2))


def is_first_rank() -> bool:
    """Whether this is the first rank, as a launcher says: known without torch, before ranks are connected."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") in ("", "0")
