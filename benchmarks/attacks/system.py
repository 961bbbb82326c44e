"""Full disks, missing permissions, signals, second processes and streams that cannot be written to."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

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
from attacks.process import HANG_SECONDS, Ran, Running

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
    has_plan = (run / "plan.json").exists()
    plan = () if has_plan else ("--plan", str(place.material.plan))
    check_done(place.run(*train("--resume", *plan, run=str(run.relative_to(place.folder)))))
    check_nothing_lost(run, before)
    check_equal(run, place.material.whole_run())


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
