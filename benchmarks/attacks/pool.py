"""Runs cases, a few at a time, each in a fork of this process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attacks.case import Case, FailedError, Kind, Outcome, Place
from attacks.material import Material

CASE_SECONDS = 600.0
"""No case takes as long: its own commands end after `HANG_SECONDS` each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a case."""

    area: str
    case: str
    tried: int
    kind: str | None
    """A `Kind`; None: as expected; "broken": the case itself failed, which says nothing of brimful."""
    detail: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Started:
    area: str
    case: Case
    root: Path
    begun: float


def run_all(
    cases: Iterable[tuple[str, Case]],
    material: Material,
    folder: Path,
    *,
    workers: int,
    deadline: float | None = None,
    report: Callable[[Result], object],
    keeps: bool = False,
) -> list[Result]:
    """Run cases.

    Args:
        cases: Each with the name of its area.
        material: From which they start.
        folder: For the cases' own folders.
        workers: How many at a time.
        deadline: In `time.monotonic()`, after which no further case is begun.
        report: Called with each result.
        keeps: Leave the cases' folders.

    Returns:
        All results, in the order in which cases ended.
    """
    results = []
    for result in _results(iter(cases), material, folder, workers, deadline, keeps):
        report(result)
        results.append(result)
    return results


def _results(
    cases: Iterator[tuple[str, Case]],
    material: Material,
    folder: Path,
    workers: int,
    deadline: float | None,
    keeps: bool,
) -> Iterator[Result]:
    running: dict[int, _Started] = {}
    number = 0
    is_more = True
    while running or is_more:
        while is_more and len(running) < workers:
            following = None if deadline is not None and time.monotonic() > deadline else next(cases, None)
            is_more = following is not None
            if following is not None:
                area, case = following
                root = folder / f"case-{number}"
                number += 1
                running[_begin(case, root, material)] = _Started(
                    area=area, case=case, root=root, begun=time.monotonic()
                )
        ended = [pid for pid in running if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)]
        for pid in ended or _late(running):
            started = running.pop(pid)
            yield _end(pid, started)
            if not keeps:
                _remove(started.root)
        time.sleep(0.005)


def _late(running: dict[int, _Started]) -> list[int]:
    now = time.monotonic()
    return [pid for pid, started in running.items() if now - started.begun > CASE_SECONDS]


def _begin(case: Case, root: Path, material: Material) -> int:
    root.mkdir()
    root.chmod(0o777)
    (root / "work").mkdir()
    (root / "work").chmod(0o777)
    shutil.copy(material.job, root / "work" / "job.py")
    pid = os.fork()
    if pid == 0:
        try:
            _attack(case, Place(root=root, material=material))
        finally:
            os._exit(0)
    return pid


def _attack(case: Case, place: Place) -> None:
    """Try a case in this process, and write what came of it."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log = os.open(place.root / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    os.chdir(place.root)
    tried, kind, detail = 1, None, ""
    try:
        outcome = case.attack(place) or Outcome()
        tried, detail = outcome.tried, outcome.note
    except FailedError as failure:
        kind, detail = str(failure.kind), failure.detail
    except BaseException as error:
        traceback.print_exc()
        kind, detail = "broken", traceback.format_exception_only(error)[-1].strip()
    if place.canary.exists():
        kind, detail = str(Kind.EXECUTED), "hostile code ran"
    for folder in (place.folder, place.root):
        detail = detail.replace(str(folder), "…")
    document = {"tried": tried, "kind": kind, "detail": detail}
    (place.root / "result.json").write_text(json.dumps(document))


def _end(pid: int, started: _Started) -> Result:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    found: dict[str, Any] = {"tried": 1, "kind": "broken", "detail": "the case did not end"}
    with suppress(OSError, ValueError):
        found = json.loads((started.root / "result.json").read_text())
    return Result(area=started.area, case=started.case.name, seconds=time.monotonic() - started.begun, **found)


def _remove(folder: Path) -> None:
    def retry(function: Callable[..., Any], path: str, _error: object) -> None:
        with suppress(OSError):
            Path(path).parent.chmod(0o700)
            function(path)

    shutil.rmtree(folder, onerror=retry)
