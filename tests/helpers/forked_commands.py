"""Several commands at the cost of one start: each in a fork of a process that has loaded torch.

A fork has standard streams of its own and ends as any process does: it flushes them, calls what is registered
for its exit, and returns its status. One that is served does not clear the interpreter after that.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from runpy import run_path
from typing import NoReturn

_LOADED = (
    *("brimful.api", "brimful.trainer", "brimful.cli.app", "brimful.models.resolve"),
    *("torch._dynamo", "torch.onnx", "torch._inductor.config", "torch._subclasses.schema_check_mode"),
    *("typer._adapters", "numpy.ma"),
)
"""What most commands import, at their first capture if not before."""
_OF_OTHERS = (
    *(f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gpt2", "llama")),
    *("tokenizers", "deepspeed", "bitsandbytes", "torchao", "PIL.Image"),
)
"""What commands import that build models of other libraries, where it is installed."""

KEPT, FULL, CLOSED, UNREAD = "kept", "full", "closed", "unread"
"""Where a stream goes: to a file that is returned, a full disk, nowhere, a pipe whose reader is gone."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """What `brimful` is called with, or a script and its arguments that Python runs."""

    arguments: Sequence[str]
    is_script: bool = False
    stdout: str = KEPT
    stderr: str = KEPT
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Done:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> dict:
        """Standard output as JSON."""
        return json.loads(self.out)


def as_case(command: Command, *, folder: str, outputs: str, seconds: float) -> dict:
    """A command for the process that serves them: run in a folder, with its output in another one."""
    return asdict(command) | {"folder": folder, "outputs": outputs, "seconds": seconds}


def run(folder: Path, commands: Sequence[Command]) -> list[Done]:
    """Run commands one after another in a folder, with a calibration that nothing was measured for."""
    from helpers.calibrated import calibrated  # which the process that forks has no need of

    cases = [asdict(command) for command in commands]
    subprocess.run(
        [sys.executable, __file__],
        cwd=folder,
        env=calibrated(folder / "cache"),
        input=json.dumps(cases),
        text=True,
        timeout=300,
        check=True,
    )
    statuses = json.loads((folder / "statuses.json").read_text())
    return [
        Done(status=status, out=_read(folder / f"{number}.out"), err=_read(folder / f"{number}.err"))
        for number, status in enumerate(statuses)
    ]


def _read(path: Path) -> str:
    return path.read_text(errors="surrogateescape") if path.exists() else ""


def _forked(number: int, case: dict) -> int:
    """The exit status of a command, run in a fork of this process."""
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        os.environ.update(case["environment"])
        _carry_out(number, case, Path())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _carry_out(number: int, case: dict, outputs: Path) -> NoReturn:
    """Be the command, from here to its end."""
    for descriptor, name in ((1, "out"), (2, "err")):
        _redirect(descriptor, case[f"std{name}"], str(outputs / f"{number}.{name}"))
    sys.argv = [*([] if case["is_script"] else ["brimful"]), *case["arguments"]]
    _make_streams(case)
    if case["is_script"]:
        run_path(sys.argv[0], run_name="__main__")
        sys.exit()

    from brimful.cli.app import main

    main()
    raise AssertionError("main ends the process")


def _redirect(descriptor: int, kind: str, file: str) -> None:
    if kind == CLOSED:
        os.close(descriptor)
        return
    if kind == UNREAD:
        reader, opened = os.pipe()
        os.close(reader)
    else:
        opened = os.open("/dev/full" if kind == FULL else file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(opened, descriptor)
    os.close(opened)


def _make_streams(case: dict) -> None:
    """As the interpreter does when it starts."""
    encoding = case["environment"].get("PYTHONIOENCODING", "utf-8")
    for name, descriptor, buffering, errors in (
        ("stdout", 1, -1, "strict"),
        ("stderr", 2, 1, "backslashreplace"),
    ):
        stream = None
        if case[name] != CLOSED:
            stream = os.fdopen(descriptor, "w", buffering, encoding, errors, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _serve() -> None:
    """Run the command of each line of standard input; its exit status is a line of standard output."""
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        case = json.loads(line)
        pid = os.fork()
        if not pid:
            _carry_out_apart(case)
        print(json.dumps(_status_within(pid, case["seconds"])), file=answers, flush=True)


def _carry_out_apart(case: dict) -> NoReturn:
    os.setsid()
    os.environ.clear()
    os.environ.update(case["environment"])
    os.chdir(case["folder"])
    sys.path[0] = case["folder"]
    reader = os.open(os.devnull, os.O_RDONLY)
    os.dup2(reader, 0)
    status = 1
    try:
        _carry_out(0, case, Path(case["outputs"]))
    except SystemExit as ended:
        status = _status_of(ended.code)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        os._exit(status)  # clearing all modules would take most of the time of a short command


def _status_of(code: object) -> int:
    """The exit status that `sys.exit` with a code means, whose text it prints."""
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    return 1


def _status_within(pid: int, seconds: float) -> int | None:
    """The exit status of a process; None if it had to be killed for its time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _main() -> None:
    sys.path[0] = str(Path.cwd())
    for name in _LOADED:
        import_module(name)
    with redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _OF_OTHERS:
            with suppress(ImportError):
                import_module(name)

    gc.freeze()  # a fork need not look through what is loaded as it ends
    if sys.argv[1:] == ["serve"]:
        _serve()
        return
    cases = json.load(sys.stdin)
    statuses = [_forked(number, case) for number, case in enumerate(cases)]
    Path("statuses.json").write_text(json.dumps(statuses))


if __name__ == "__main__":
    _main()
