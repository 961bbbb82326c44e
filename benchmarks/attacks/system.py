"""Full disks, missing permissions, signals, second processes and streams that cannot be written to."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from attacks.case import (
    Case,
    FailedError,
    Kind,
    Outcome,
    Place,
    check_claims,
    check_done,
    check_done_or_refused,
    check_ended,
    check_equal,
    check_nothing_lost,
    kept_names,
    saved_steps,
)
from attacks.material import train
from attacks.mutations import KINDS, put
from attacks.process import HANG_SECONDS, Ran, Running, call, command_line

_CLONE_NEWNS = 0x00020000
_SLEEP = {"SLEEP_SECONDS": "0.03"}
"""In each step, so that something can happen in the middle of a run."""
NOT_TRIED = Outcome(tried=0, note="not tried: needs root")


# Disks


def disk_cases(_seed: int) -> Iterator[Case]:
    """Disks that are full, or cannot be written to, from the start or from some step on."""
    for kib in range(4, 260, 4):  # pages of memory: so each write of the run is once the one that fails
        yield Case(f"a disk of {kib} KiB", partial(_small_disk, f"size={kib}k"))
    for inodes in (4, 8, 12, 16, 20):
        yield Case(f"a disk of {inodes} files", partial(_small_disk, f"nr_inodes={inodes}"))
    yield Case("a read-only disk", partial(_small_disk, "ro"))
    for step in (2, 6):
        yield Case(f"a disk full after step {step}", partial(_full_later, step))
    for size in (1000, 20_000, 60_000, 100_000):
        yield Case(f"files of at most {size} bytes", partial(_limited, resource.RLIMIT_FSIZE, size))
    for count in (12, 24):
        yield Case(f"at most {count} open files", partial(_limited, resource.RLIMIT_NOFILE, count))
    for name in ("", "saves", "metrics.jsonl"):
        for step in (0, 5):
            where = name or "the run directory"
            yield Case(f"{where} not writable after step {step}", partial(_no_permission, name, step))


def _mounted(folder: Path, options: str) -> bool:
    """Mount a small disk, seen by this process and its children only; it goes with them."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS) != 0:
        return False
    folder.mkdir()
    private = ["mount", "--make-rprivate", "/"]
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return all(subprocess.run(command, check=False).returncode == 0 for command in (private, mount))


def _begin(place: Place) -> list[str]:
    return train("--plan", str(place.material.plan), run="disk/run")


def _small_disk(options: str, place: Place) -> Outcome | None:
    if not _mounted(place.folder / "disk", options):
        return NOT_TRIED
    run = place.folder / "disk" / "run"
    ran = place.run(*_begin(place))
    _check_told(run, ran)
    before = kept_names(run)
    remount = ["mount", "-o", "remount,rw,size=64m,nr_inodes=10000", str(run.parent)]
    subprocess.run(remount, check=True)
    _check_resumed(place, run, before)
    return None


def _full_later(step: int, place: Place) -> Outcome | None:
    if not _mounted(place.folder / "disk", "size=4m"):
        return NOT_TRIED
    run = place.folder / "disk" / "run"
    running = place.start(*_begin(place), environment=_SLEEP)
    wait_for_step(run, running, step)
    with suppress(OSError):
        (run.parent / "filler").write_bytes(bytes(4 << 20))
    ran = running.wait()
    _check_told(run, ran)
    before = kept_names(run)
    (run.parent / "filler").unlink()
    _check_resumed(place, run, before)
    return None


def _check_told(run: Path, ran: Ran) -> None:
    """What could not be written is said, and nothing that is not so."""
    check_done_or_refused(ran)
    check_claims(run, ran)
    if "saves before it are whole" in ran.err and not saved_steps(run):
        raise FailedError(Kind.WRONG, "saves are said to be whole, and there are none")


def _check_resumed(place: Place, run: Path, before: set[str]) -> None:
    """Once the cause is gone the same command finishes the run."""
    check_done(place.run(*_resuming(place, run)))
    check_nothing_lost(run, before)
    check_equal(run, place.material.whole_run())


def _resuming(place: Place, run: Path) -> list[str]:
    has_plan = (run / "plan.json").exists()
    plan = () if has_plan else ("--plan", str(place.material.plan))
    return train("--resume", *plan, run=str(run.relative_to(place.folder)))


def _limited(what: int, limit: int, place: Place) -> None:
    run = place.folder / "run"

    def prepare() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python itself does
        resource.setrlimit(what, (limit, limit))

    ran = place.run(*train("--plan", str(place.material.plan)), prepare=prepare)
    _check_told(run, ran)
    _check_resumed(place, run, kept_names(run))


def _no_permission(name: str, step: int, place: Place) -> Outcome | None:
    """Another user than root loses the right to write."""
    if os.geteuid() != 0:
        return NOT_TRIED
    for path in (place.root, *place.root.rglob("*")):
        path.chmod(0o777)
    run = place.folder / "run"
    if step == 0:
        run.mkdir()
        if name == "metrics.jsonl":
            (run / name).touch()
        elif name:
            (run / name).mkdir()
    closed = run / name
    start = partial(
        place.start, *train("--resume", "--plan", str(place.material.plan)), is_nobody=True, environment=_SLEEP
    )
    running = start() if step else None
    if running is not None:
        wait_for_step(run, running, step)
    closed.chmod(0o500 if closed.is_dir() else 0o400)
    ran = (running or start()).wait()
    _check_told(run, ran)
    before = kept_names(run)
    closed.chmod(0o777)
    _check_resumed(place, run, before)
    return None


# File operations that fail, and clocks that jump

_OPERATIONS = ("rename", "replace", "fsync", "mkdir", "unlink", "rmdir")
_ERRORS = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EXDEV, errno.EBUSY, errno.EROFS)


def operation_cases(seed: int) -> Iterator[Case]:
    """A rename, a flush or another operation in the run directory fails, once or from then on."""
    random = Random(f"operations {seed}")
    for name in _OPERATIONS:
        for number in range(12):
            lasts, error = number % 2 == 1, random.choice(_ERRORS)
            attack = partial(_failing_operation, name, random.random(), error, lasts)
            how = "from then on" if lasts else "once"
            yield Case(f"{name}, {errno.errorcode[error]} {how} {seed}.{number}", attack)


def _failing_operation(name: str, at: float, error: int, lasts: bool, place: Place) -> Outcome | None:
    def count(folder: Path) -> None:
        folder.mkdir()
        arguments = train("--plan", str(place.material.plan), run=str(folder / "run"))
        check_done(place.run(action=partial(_failing, arguments, folder / "run", folder / "counts", {})))

    counts = json.loads((place.material.once("operations", count) / "counts").read_text())
    if not counts.get(name):
        return Outcome(tried=0, note=f"a run has no {name}")
    run = place.folder / "run"
    wanted = {name: (int(at * counts[name]), error, lasts)}
    arguments = train("--plan", str(place.material.plan))
    ran = place.run(action=partial(_failing, arguments, run, place.root / "counts", wanted))
    _check_told(run, ran)
    _check_resumed(place, run, kept_names(run))
    return None


def _failing(
    arguments: Sequence[str], run: Path, counts: Path, wanted: dict[str, tuple[int, int, bool]]
) -> None:
    """The command, in which some operations fail; counts those in the run directory."""
    found = dict.fromkeys(_OPERATIONS, 0)

    def stand_in(name: str) -> Callable[..., Any]:
        operation = getattr(os, name)

        def called(target: Any, *more: Any, **named: Any) -> Any:
            is_number = isinstance(target, int)
            path = Path(f"/proc/self/fd/{target}").readlink() if is_number else Path(target).absolute()
            if path.is_relative_to(run):
                number, (at, error, lasts) = found[name], wanted.get(name, (-1, 0, False))
                found[name] += 1
                if number == at or (lasts and number > at):
                    raise OSError(error, os.strerror(error), str(path))
            return operation(target, *more, **named)

        return called

    for name in _OPERATIONS:
        setattr(os, name, stand_in(name))
    try:
        command_line(*arguments)()
    finally:
        counts.write_text(json.dumps(found))


_JUMPS = {"back an hour": -3600.0, "on ten years": 3e8, "to 1970": -1.79e9, "back a second": -1.0}
_SUSPENDED = {"suspended a day": 86400.0, "suspended a minute": 60.0}


def clock_cases(seed: int) -> Iterator[Case]:
    """The clock is set while a run trains, or between a run and its resumption; or the machine sleeps."""
    random = Random(f"clocks {seed}")
    for names, jumps in ((("time", "time_ns"), _JUMPS), (("monotonic", "perf_counter"), _SUSPENDED)):
        for jump, seconds in jumps.items():
            for number in range(2):
                attack = partial(_clock, names, seconds, random.randrange(60))
                yield Case(f"{jump}, {seed}.{number}", attack)
            yield Case(f"{jump}, before resuming", partial(_clock, names, seconds, None))


def _clock(names: Sequence[str], seconds: float, calls: int | None, place: Place) -> None:
    run = place.copy_run() if calls is None else place.folder / "run"
    arguments = train("--resume") if calls is None else train("--plan", str(place.material.plan))

    def jumping() -> None:
        left = calls or 0
        for name in names:
            real = getattr(time, name)

            def told(real: Any = real, scale: float = 1e9 if name.endswith("_ns") else 1.0) -> Any:
                nonlocal left
                left -= 1
                return real() if left > 0 else real() + type(real())(seconds * scale)

            setattr(time, name, told)
        command_line(*arguments)()

    check_done(place.run(action=jumping))
    check_equal(run, place.material.whole_run())


# Data workers


def worker_cases(seed: int) -> Iterator[Case]:
    """A data worker ends in the middle of a run."""
    random = Random(f"workers {seed}")
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT):
        for index in range(6):
            attack = partial(_worker_ended, number, random.randint(1, 10), random.randrange(2))
            yield Case(f"{signal.Signals(number).name} {seed}.{index}", attack)


def _worker_ended(number: int, step: int, which: int, place: Place) -> Outcome:
    run = place.folder / "run"
    running = place.start(*train("--plan", str(place.material.plan), workers=2), environment=_SLEEP)
    wait_for_step(run, running, step)
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
    workers = children.read_text().split() if children.exists() else []
    with suppress(ProcessLookupError):
        if workers:
            os.kill(int(workers[which % len(workers)]), number)
    ran = running.wait()
    _check_told(run, ran)
    before = kept_names(run)
    if ran.status != 0:
        check_done(place.run(*train("--resume", workers=2)))
    check_nothing_lost(run, before)
    check_equal(run, place.material.whole_run(2))
    return Outcome(tried=int(bool(workers)), note="finished" if ran.status == 0 else "told, and resumed")


# Trackers and callbacks


def tracker_cases(seed: int) -> Iterator[Case]:
    """TensorBoard cannot write; a callback of the user's raises."""
    for kind in KINDS:
        yield Case(f"tensorboard, {kind}", partial(_tracker, kind))
    random = Random(f"callbacks {seed}")
    for name in ("on_step", "on_validation", "on_end"):
        for error in (RuntimeError, KeyboardInterrupt, MemoryError, OSError):
            at = random.randint(1, 2)  # the run validates twice
            yield Case(f"{name}, {error.__name__}", partial(_callback, name, error, at))


def _tracker(kind: str, place: Place) -> None:
    run = place.folder / "run"
    run.mkdir()
    put(kind, run / "tensorboard")
    ran = place.run(*train("--tensorboard", "--resume", "--plan", str(place.material.plan)))
    _check_told(run, ran)
    if ran.status != 0:
        with suppress(OSError):
            (run / "tensorboard").unlink()
        check_done(place.run(*_resuming(place, run)))
    check_equal(run, place.material.whole_run())


def _callback(name: str, error: type[BaseException], at: int, place: Place) -> None:
    from attacks import memory

    run = place.folder / "run"
    expected = memory.undisturbed(place, memory.LORA)
    ran = place.run(action=call(lambda: memory.fit(memory.job(memory.LORA), run, (_raising(name, error, at),))))
    if ran.status is None:
        raise FailedError(Kind.HANG, "it did not end")
    if ran.status == 0 and name != "on_end":
        raise FailedError(Kind.WRONG, "the callback's error was lost")
    before = kept_names(run)
    if ran.status != 0:
        check_done(place.run(action=call(lambda: memory.fit(memory.job(memory.LORA), run))))
    check_nothing_lost(run, before)
    check_equal(run, expected)


def _raising(name: str, error: type[BaseException], at: int) -> Any:
    import brimful as bf

    left = [1 if name == "on_end" else at]

    def raising(*_: object) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise error("of the user's")

    return type("Raising", (bf.trainer.Callback,), {name: raising})()


# Signals


def signal_cases(_seed: int) -> Iterator[Case]:
    """Signals that end a run, are caught, or stop it for a while."""
    for number in _ENDING:
        yield Case(signal.Signals(number).name, partial(_signalled, (number,), None))
    for name, (numbers, statuses) in _COMBINATIONS.items():
        yield Case(name, partial(_signalled, numbers, statuses))


_ENDING = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGALRM, signal.SIGXCPU, signal.SIGKILL),
)
_INT, _TERM, _STOP, _CONT = signal.SIGINT, signal.SIGTERM, signal.SIGSTOP, signal.SIGCONT
_STOPPED = (130, 143)
_COMBINATIONS: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "Ctrl-C once": ((_INT,), (130,)),
    "Ctrl-C twice": ((_INT, _INT), (130, 1)),
    "Ctrl-C three times": ((_INT, _INT, _INT), (130, 1)),
    "SIGTERM once": ((_TERM,), (143,)),
    "SIGTERM twice": ((_TERM, _TERM), (143, -_TERM)),
    "Ctrl-C and SIGTERM": ((_INT, _TERM), (*_STOPPED, -_TERM)),
    "SIGTERM and Ctrl-C": ((_TERM, _INT), (*_STOPPED, 1)),
    "stopped, continued": ((_STOP, _CONT), (0,)),
    "stopped, SIGTERM, continued": ((_STOP, _TERM, _CONT), (143,)),
    "stopped, Ctrl-C, continued": ((_STOP, _INT, _CONT), (130,)),
    "Ctrl-C and SIGKILL": ((_INT, signal.SIGKILL), (130, -9)),
}


def wait_for_step(run: Path, running: Running, step: int) -> None:
    """Wait until a run has written down a step."""
    deadline = time.monotonic() + HANG_SECONDS
    path = run / "metrics.jsonl"
    while time.monotonic() < deadline and not running.has_ended():
        if path.exists() and path.read_bytes().count(b'"kind": "step"') >= step:
            return
        time.sleep(0.005)


def _signalled(numbers: Sequence[int], statuses: Sequence[int] | None, place: Place) -> None:
    run = place.folder / "run"
    running = place.start(*train("--plan", str(place.material.plan)), environment=_SLEEP)
    wait_for_step(run, running, 5)
    for number in numbers:
        running.send(number)
        time.sleep(0.05)
    ran = running.wait()
    if ran.status is None:
        raise FailedError(Kind.HANG, "it did not end")
    if statuses is not None:
        if ran.status not in statuses:
            raise FailedError(Kind.WRONG, f"exit status {ran.status}, not {' or '.join(map(str, statuses))}")
        if ran.status in _STOPPED and len(numbers) == 1 and max(saved_steps(run), default=0) < 5:
            raise FailedError(Kind.LOST, "steps before the signal are not saved")
    before = kept_names(run)
    check_done(place.run(*train("--resume")))
    check_nothing_lost(run, before)
    check_equal(run, place.material.whole_run())


# Two processes


def pair_cases(_seed: int) -> Iterator[Case]:
    """Two processes in one run directory: one trains, the other is refused or waits its turn."""
    yield Case("both begin", partial(_pair, (), (), 0.0))
    yield Case("one begins, another begins later", partial(_pair, (), (), 0.6))
    yield Case("one begins, another resumes", partial(_pair, (), ("--resume",), 0.6))
    yield Case("both resume what is not there", partial(_pair, ("--resume",), ("--resume",), 0.0))
    yield Case("both resume", partial(_pair, ("--resume",), ("--resume",), 0.0, is_begun=True))


def _pair(
    first: Sequence[str], second: Sequence[str], apart: float, place: Place, *, is_begun: bool = False
) -> None:
    run = place.copy_run() if is_begun else place.folder / "run"
    plan = () if is_begun else ("--plan", str(place.material.plan))
    both = [place.start(*train(*first, *plan), environment=_SLEEP)]
    time.sleep(apart)
    both.append(place.start(*train(*second, *plan), environment=_SLEEP))
    ends = [each.wait() for each in both]
    for ran in ends:
        check_done_or_refused(ran)
    if all(ran.status != 0 for ran in ends):
        raise FailedError(Kind.WRONG, "neither of them trained")
    check_equal(run, place.material.whole_run())


# Standard streams


def stream_cases(_seed: int) -> Iterator[Case]:
    """Streams that are closed, full, or read by a process that ends: training does not depend on them."""
    for name, redirection in _REDIRECTIONS.items():
        yield Case(name, partial(_redirected, redirection))


_REDIRECTIONS = {
    "both to head -1": "2>&1 | head -1",
    "both to head -20": "2>&1 | head -20",
    "errors to head": "2> >(head -c 300 >/dev/null)",
    "errors to a full disk": "2>/dev/full",
    "output to a full disk": ">/dev/full",
    "output to head": "| head -1",
    "output closed": ">&-",
    "errors closed": "2>&-",
}


def _redirected(redirection: str, place: Place) -> None:
    arguments = " ".join(train("--plan", str(place.material.plan)))
    command = f"{sys.executable} -m brimful {arguments} {redirection}"
    running = place.start("bash", "-c", command, fresh=True)
    ran = running.wait(3 * HANG_SECONDS, idle_seconds=3 * HANG_SECONDS)  # the shell itself only waits
    check_ended(Ran(status=None if ran.status is None else 0, out=ran.out, err=ran.err))
    check_equal(place.folder / "run", place.material.whole_run())
    if not (place.folder / "run" / "report.txt").exists():
        raise FailedError(Kind.LOST, "report.txt is not there")
