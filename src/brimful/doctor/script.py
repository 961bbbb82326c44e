"""A script or a module, run as Python runs it, and watched."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType

from brimful.distributed.ranks import shows_report
from brimful.doctor.evidence import Evidence
from brimful.doctor.watch import Watch
from brimful.errors import UsageError
from brimful.execution.out_of_memory import explain

_RUNNERS = (str(Path(__file__).parent), runpy.__file__, "<frozen runpy>")
"""Files whose frames are not the script's."""
_NOT_SCRIPTS = (
    ".ipynb",
    ".json",
    ".jsonl",
    ".yaml",
    ".yml",
    ".toml",
    ".pt",
    ".pth",
    ".ckpt",
    ".safetensors",
    ".md",
)
_RECORDING = str(Path(__file__).with_name("recording.py"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRun:
    """How a script ended, and what was seen of it."""

    evidence: Evidence
    exit_status: int
    """As Python would exit: 0, what `sys.exit` was given, or 1 for an error, which is printed."""
    is_interrupted: bool
    """Whether Ctrl-C ended it."""
    shows_report: bool
    """Whether what was seen is to be shown: of several ranks, not by all."""
    own_task: str
    """As `Watch.own_task`."""


def run_script(
    target: str,
    arguments: Sequence[str],
    *,
    steps: int,
    is_module: bool = False,
    eager: bool = False,
    within: AbstractContextManager[object] | None = None,
    on_step: Callable[[Evidence], None] | None = None,
) -> ScriptRun:
    """Run a script, or a module as `python -m` does, in this process, and watch its first optimizer steps.

    `sys.argv` and `sys.path` are as Python sets them, `eager` is as for `Watch`; the script runs in the context
    `within`. `on_step` is called with what was seen so far after each recorded step, and after the timed ones.
    UsageError if there is no such file or folder; of a module that is not there Python's error is shown.
    """
    if not is_module:
        _check_target(Path(target))
    elif "/" in target or target.endswith(".py"):
        name = target.removesuffix(".py").replace("/", ".")
        raise UsageError(f"-m takes a module, and {target} is a path. Write -m {name}, or the path without -m.")
    sys.argv = [target, *arguments]
    if not sys.flags.safe_path:
        file = Path(target).resolve()
        sys.path[0] = str(Path.cwd() if is_module else file if file.is_dir() else file.parent)
    status = 0
    ended_by: BaseException | None = None
    watch = Watch(steps, eager=eager)
    if on_step is not None:
        watch.on_step = lambda: on_step(watch.evidence())
    try:
        with within or nullcontext(), watch:
            _run(target, is_module=is_module)
    except SystemExit as end:
        status = _status(end)
    except BaseException as error:
        status, ended_by = 1, error
        if watch.evidence().failed is None:  # else the report explains it
            explain(error)
        _show(error)
    return ScriptRun(
        evidence=watch.evidence(),
        exit_status=status,
        is_interrupted=isinstance(ended_by, KeyboardInterrupt),
        shows_report=shows_report(ended_by, watch.own_task),
        own_task=watch.own_task,
    )


def _check_target(target: Path) -> None:
    """UsageError unless Python could run the file or folder."""
    if not target.exists():
        raise UsageError(f"there is no file {target} (looked in {Path.cwd()}).")
    if target.suffix in _NOT_SCRIPTS:
        in_notebook = (
            ": write `with brimful.watch():` around its training loop" if target.suffix == ".ipynb" else ""
        )
        raise UsageError(f"{target} is not a Python script{in_notebook}.")
    if target.is_dir() and not (target / "__main__.py").exists():
        scripts = sorted(map(str, target.glob("*.py")))[:3]
        near = f"Name one of its scripts: {', '.join(scripts)}" if scripts else "Name a script"
        raise UsageError(f"{target} is a folder without __main__.py. {near}")


def _run(target: str, *, is_module: bool) -> None:
    """Run the code as `__main__`, which it stays: what it made may be looked up there when Python exits."""
    if is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    elif Path(target).is_dir():
        runpy.run_path(target, run_name="__main__")
    else:
        main = ModuleType("__main__")
        main.__file__ = str(Path(target).absolute())
        sys.modules["__main__"] = main
        code = compile(Path(target).read_bytes(), main.__file__, "exec", dont_inherit=True)
        exec(code, vars(main))


def _status(end: SystemExit) -> int:
    """The exit status that Python gives a SystemExit, whose text it prints."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def _show(error: BaseException) -> None:
    """Show an error as Python does, from the script's own frames on, or as the script asks for."""
    for each in _chain(error):
        _leave_out_recording(each)
    first: TracebackType | None = error.__traceback__
    while first is not None and first.tb_frame.f_code.co_filename.startswith(_RUNNERS):
        first = first.tb_next
    if first is None and isinstance(error, ImportError):  # of `runpy`: no code began
        print(f"{error} (looked in {Path.cwd()} and among installed packages)", file=sys.stderr)
        return
    if first is None and not isinstance(error, SyntaxError):  # of code that never began
        first = error.__traceback__
    if sys.excepthook is not sys.__excepthook__:
        sys.excepthook(type(error), error, first)
    else:
        traceback.print_exception(type(error), error, first)


def _chain(error: BaseException) -> list[BaseException]:
    """An error, and those that its traceback shows with it."""
    found, left = dict[int, BaseException](), [error]
    while left:
        each = left.pop()
        if id(each) not in found:
            found[id(each)] = each
            left += filter(None, (each.__cause__, each.__context__))
    return [*found.values()]


def _leave_out_recording(error: BaseException) -> None:
    """Drop the frames by which ops were recorded from tracebacks; those of the ops themselves stay."""
    each = error.__traceback__
    while each is not None:
        while (inner := each.tb_next) is not None and inner.tb_frame.f_code.co_filename == _RECORDING:
            below = inner.tb_next  # of `torch._ops`, which calls the op
            each.tb_next = below if below is None else below.tb_next
        each = each.tb_next
