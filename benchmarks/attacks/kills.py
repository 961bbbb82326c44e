"""Processes that are killed: what they leave is resumed, again and again, to the undisturbed run."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from attacks import memory
from attacks.case import (
    Case,
    Outcome,
    Place,
    check_done,
    check_equal,
    check_nothing_lost,
    kept_names,
)
from attacks.material import train
from attacks.process import HANG_SECONDS, Ran, Running, call

_FILE_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree")
_FILE_OPERATIONS = 200
"""The undisturbed run has 218 in its run directory."""
_RANK_STOPS_SECONDS = 5.0
"""torchrun ends the other ranks of one that died."""


def process_cases(seed: int) -> Iterator[Case]:
    """Kills of a run's only process, up to three in a row."""
    random = Random(f"kills {seed}")
    for number in range(22):
        for workers in (0, 2):
            draw = random.random()
            yield Case(f"at a time, {workers} workers, {seed}.{number}", partial(_killed, draw, workers, False))
        yield Case(f"at a file operation, {seed}.{number}", partial(_killed, random.random(), 0, True))


def _killed(draw: float, workers: int, at_operation: bool, place: Place) -> Outcome:
    random = Random(draw)
    run = place.folder / "run"
    kills = 0
    before: set[str] = set()
    for _ in range(random.randint(1, 3)):
        arguments = _arguments(place, run, workers)
        if at_operation:
            stop = random.randrange(_FILE_OPERATIONS)
            ran = place.run(*arguments, prepare=partial(_kill_at_file_operation, stop, run))
        else:
            running = place.start(*arguments)
            _sleep_until(running, random.uniform(0, place.material.run_seconds))
            running.send(signal.SIGKILL)
            ran = running.wait()
        kills += ran.status == -signal.SIGKILL
        if ran.status != -signal.SIGKILL:
            check_done(ran)
        check_nothing_lost(run, before)
        before = kept_names(run)
    check_done(place.run(*_arguments(place, run, workers)))
    check_nothing_lost(run, before)
    check_equal(run, place.material.whole_run(workers))
    return Outcome(tried=max(kills, 1))


def _arguments(place: Place, run: Path, workers: int) -> list[str]:
    """The same command each time, as a scheduler gives; with the plan until the run has one."""
    has_plan = (run / "plan.json").exists()
    plan = () if has_plan else ("--plan", str(place.material.plan))
    return train("--resume", *plan, workers=workers)


def _sleep_until(running: Running, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not running.has_ended():
        time.sleep(0.001)


def _kill_at_file_operation(number: int, folder: Path) -> None:
    """Let this process kill itself as it changes or looks at a file in a folder for the nth time."""

    def kill(count: int) -> None:
        if count > number:
            os.kill(os.getpid(), signal.SIGKILL)

    at_file_operations(folder, kill)


def at_file_operations(folder: Path, call: Callable[[int], object]) -> None:
    """Call something as this process changes or looks at a file in a folder, with the number of times."""
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event in _FILE_EVENTS and any(_is_inside(folder, name) for name in arguments[:2]):
            count += 1
            call(count)

    sys.addaudithook(hook)


def _is_inside(folder: Path, name: object) -> bool:
    if not isinstance(name, str | Path):
        return False
    path = Path(name).absolute()
    return path == folder or folder in path.parents


# Adapters over frozen weights, which saves share a file of


def adapter_cases(seed: int) -> Iterator[Case]:
    """Kills of a run that trains adapters."""
    random = Random(f"adapters {seed}")
    for number in range(20):
        for at_operation in (False, True):
            where = "a file operation" if at_operation else "a time"
            yield Case(f"at {where}, {seed}.{number}", partial(_adapter_killed, random.random(), at_operation))


def _adapter_killed(draw: float, at_operation: bool, place: Place) -> Outcome:
    random = Random(draw)
    run = place.folder / "run"
    expected = memory.undisturbed(place, memory.LORA)
    fit = call(lambda: memory.fit(memory.job(memory.LORA), run))
    if at_operation:
        stop = random.randrange(int((expected / "file operations").read_text()))
        ran = place.run(action=fit, prepare=partial(_kill_at_file_operation, stop, run))
    else:
        running = place.start(action=fit)
        _sleep_until(running, random.uniform(0, float((expected / "seconds").read_text())))
        running.send(signal.SIGKILL)
        ran = running.wait()
    before = kept_names(run)
    check_done(place.run(action=fit))
    check_nothing_lost(run, before)
    check_equal(run, expected)
    return Outcome(tried=int(ran.status == -signal.SIGKILL))


# Two ranks


def rank_cases(seed: int) -> Iterator[Case]:
    """Kills of one rank or both; the launch after it resumes."""
    random = Random(f"ranks {seed}")
    for number in range(9):
        yield Case(f"DDP {seed}.{number}", partial(_rank_killed, "ddp", random.random()))
    for number in range(30):
        yield Case(f"FSDP2 {seed}.{number}", partial(_rank_killed, "fsdp2", random.random()))
    for number in range(30):
        stage = f"zero{number % 3 + 1}"
        yield Case(f"{stage} {seed}.{number}", partial(_rank_killed, stage, random.random()))


def _rank_killed(parallelism: str, draw: float, place: Place) -> Outcome:
    random = Random(draw)
    run = place.folder / "run"
    expected = place.material.once(
        f"ranks-{parallelism}", lambda folder: _finish(_launched(place, str(folder), parallelism))
    )
    ranks = _launched(place, "run", parallelism)
    _wait_for_step(run, ranks, random.randint(0, 10))
    time.sleep(random.uniform(0, 0.2))
    kills = False
    for rank in random.choice(([0], [1], [0, 1])):
        kills |= not ranks[rank].has_ended()
        ranks[rank].send(signal.SIGKILL)
    _stopped(ranks)
    before = kept_names(run)
    _finish(_launched(place, "run", parallelism, "--resume"))
    check_nothing_lost(run, before)
    check_equal(run, expected)
    return Outcome(tried=int(kills))


def _launched(place: Place, run: str, parallelism: str, *more: str) -> list[Running]:
    """What torchrun starts on a machine; with what to plan, until the run has a plan."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    planning = ("--global-batch-size", "16", "--split-batch-norm", "--parallelism", parallelism)
    begins = () if (place.folder / run / "plan.json").exists() else planning
    arguments = (
        "train",
        "job.py:job",
        "--run-dir",
        run,
        "--epochs",
        "3",
        "--save-every",
        "1",
        "--device",
        "cpu",
    )
    return [
        place.start(
            *arguments,
            *begins,
            *more,
            environment=common | {"RANK": rank, "LOCAL_RANK": rank, "SLEEP_SECONDS": "0.02"},
            memory_bytes=None,
        )
        for rank in ("0", "1")
    ]


def _finish(ranks: list[Running]) -> None:
    for ran in [rank.wait() for rank in ranks]:
        check_done(ran)


def _wait_for_step(run: Path, ranks: list[Running], steps: int) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    path = run / "metrics.jsonl"
    while time.monotonic() < deadline and not any(rank.has_ended() for rank in ranks):
        if path.exists() and path.read_bytes().count(b'"step"') >= steps:
            return
        time.sleep(0.005)


def _stopped(ranks: list[Running]) -> list[Ran]:
    """As torchrun does once a rank has died: SIGTERM for the others, and SIGKILL where that does not help."""
    deadline = time.monotonic() + _RANK_STOPS_SECONDS
    for rank in ranks:
        rank.send(signal.SIGTERM)
    while time.monotonic() < deadline and not all(rank.has_ended() for rank in ranks):
        time.sleep(0.01)
    for rank in ranks:
        rank.send(signal.SIGKILL)
    return [rank.wait() for rank in ranks]
