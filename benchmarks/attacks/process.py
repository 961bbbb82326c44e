"""Processes under attack: forks of this one, which has imported brimful and torch once, or fresh ones."""

from __future__ import annotations

import atexit
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

HANG_SECONDS = 40.0
"""A command that takes longer is counted as a hang; undisturbed ones take 0.1 to 12 seconds."""
IDLE_SECONDS = 10.0
"""So is one that uses no processor for so long."""
MEMORY_BYTES = 3 << 30
"""Address space beyond what the process has at its start; undisturbed commands need less than 1 GiB."""

_PR_SET_PDEATHSIG = 1
_NOBODY = 65534


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a process did."""

    status: int | None
    """Exit status; negative: the signal that ended it; None: it had not ended in time and was killed."""
    out: str
    err: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A process that was started."""

    pid: int
    out: Path
    err: Path

    def send(self, number: int) -> None:
        """Send a signal to the process alone."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def has_ended(self) -> bool:
        """Whether the process has ended; it still has to be waited for."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def wait(self, seconds: float = HANG_SECONDS, idle_seconds: float = IDLE_SECONDS) -> Ran:
        """Wait for the end, kill what does not end in time, and read what was printed."""
        idle = _Idle(self.pid)
        deadline = time.monotonic() + seconds
        while not self.has_ended() and time.monotonic() < deadline and idle.seconds() < idle_seconds:
            time.sleep(0.005)
        in_time = self.has_ended()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # data workers too
        _, status = os.waitpid(self.pid, 0)
        out, err = (path.read_text("utf-8", "replace") for path in (self.out, self.err))
        return Ran(status=os.waitstatus_to_exitcode(status) if in_time else None, out=out, err=err)


class _Idle:
    """How long a process has used no processor time."""

    def __init__(self, pid: int) -> None:
        self._path = Path(f"/proc/{pid}/stat")
        self._used: list[str] = []
        self._since = time.monotonic()

    def seconds(self) -> float:
        """Since it was last seen to use some."""
        used = self._path.read_text().rpartition(")")[2].split()[11:15]  # its own and its children's
        if used != self._used:
            self._used, self._since = used, time.monotonic()
        return time.monotonic() - self._since


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """In what a process runs."""

    folder: Path
    """Its working directory."""
    environment: Mapping[str, str | None]
    """Changes; None removes a variable."""
    out: Path
    err: Path
    prepare: Callable[[], object] | None = None
    """Called in the process before anything else."""
    memory_bytes: int | None = MEMORY_BYTES
    is_nobody: bool = False
    """Give up root, which no permission stops."""


def fork(action: Callable[[], object], surroundings: Surroundings) -> Running:
    """Run a function in a fork of this process, which then ends as Python does."""
    for path in (surroundings.out, surroundings.err):
        path.touch()
    pid = os.fork()
    if pid == 0:
        try:
            _enter(surroundings)
            os._exit(_ended_as_python_does(action))
        except BaseException:
            surroundings.err.write_text(f"the surroundings could not be made: {traceback.format_exc()}")
        finally:
            os._exit(99)
    return Running(pid=pid, out=surroundings.out, err=surroundings.err)


def spawn(command: Sequence[str], surroundings: Surroundings) -> Running:
    """Run a command in a fresh process."""
    changed = {name: value for name, value in surroundings.environment.items() if value is not None}
    kept = {name: value for name, value in os.environ.items() if name not in surroundings.environment}
    with surroundings.out.open("wb") as out, surroundings.err.open("wb") as err:
        process = subprocess.Popen(
            command,
            cwd=surroundings.folder,
            env=kept | changed,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    process.returncode = 0  # `Running` waits for it
    return Running(pid=process.pid, out=surroundings.out, err=surroundings.err)


def command_line(*arguments: str) -> Callable[[], None]:
    """What the console script does."""

    def action() -> None:
        from brimful.cli.app import main

        sys.argv = ["brimful", *arguments]
        main()

    return action


def call(function: Callable[[], object]) -> Callable[[], None]:
    """A call of the library, whose own errors end it as they end a command."""

    def action() -> None:
        from brimful.errors import BrimfulError

        try:
            function()
        except BrimfulError as error:
            notes = getattr(error, "__notes__", ())
            print("\n".join([f"{type(error).__name__}: {error}", *notes]), file=sys.stderr)
            sys.exit(2 if isinstance(error, ValueError) else 1)

    return action


def _enter(surroundings: Surroundings) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number, path in ((1, surroundings.out), (2, surroundings.err)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
        os.dup2(descriptor, number)
        os.close(descriptor)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(surroundings.folder)
    for name, value in surroundings.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if surroundings.memory_bytes is not None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + surroundings.memory_bytes,) * 2)
    if surroundings.is_nobody:
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
    _open_streams()
    if surroundings.prepare is not None:
        surroundings.prepare()


def _open_streams() -> None:
    """Standard streams as a starting interpreter makes them."""
    asked, _, errors = os.environ.get("PYTHONIOENCODING", "").partition(":")
    encoding = asked or "utf-8"
    sys.stdin = open(0, encoding=encoding, closefd=False)  # noqa: SIM115 - it stays open
    sys.stdout = open(1, "w", encoding=encoding, errors=errors or "strict", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding=encoding, errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115


def _ended_as_python_does(action: Callable[[], object]) -> int:
    status = 0
    try:
        action()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        with suppress(Exception):
            traceback.print_exc()
        status = 130 if isinstance(error, KeyboardInterrupt) else 1
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    with suppress(Exception):
        atexit._run_exitfuncs()
    try:
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()
    except OSError:
        status = 120
    with suppress(Exception):
        sys.stderr.flush()
    return status & 0xFF
