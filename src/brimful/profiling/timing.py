"""How long something takes on a torch device, beside other work on the machine."""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from brimful.utils.one_at_a_time import one_at_a_time

_ROUND_SECONDS = 0.3e-3
"""What is quicker is run several times in a row, so that reading the clock does not count. Not longer, because
a short round more often ends before another program gets its turn."""
_LONGEST_ROUND_SECONDS = 5e-3
"""A time slice of another program. A thousand calls that take one each would last seconds."""
_CALLS_BETWEEN_CLOCKS = 20
"""Reading the clock takes about 50 ns, a hundredth of this number of the quickest ops."""

_LEAST_ROUNDS = 3
_ENOUGH_ROUNDS = 25
"""Undisturbed rounds that are enough."""
_PATIENCE = 3
"""How many times as long is tried if nearly all rounds are disturbed."""
_WAITED_FRACTION = 0.05
"""Fraction of a round that one of its threads may have waited for a processor. A choice; waking one takes 1 %
or less."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Duration:
    """How long something took once."""

    seconds: float
    is_disturbed: bool
    """Whether the system gave a processor that this process was using to another one meanwhile, or had one of
    its threads wait for a processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Typical:
    """How long something takes."""

    seconds: float
    is_quiet: bool
    """Whether it is of rounds that nothing disturbed."""


def typical_seconds(
    runs: Sequence[Callable[[], object]], device: torch.device, *, most_seconds: float
) -> Typical:
    """Seconds of one run, when several runs of the same work on different operands take turns.

    On CUDA the device is waited for at the end of a round, not between runs. `most_seconds` may be spent; up to
    three times as much while other work disturbs most rounds, and as much again for one thread alone. At least
    three rounds are made.

    Where other work disturbs nearly all rounds of a CPU, one thread does the work alone as well: it has its
    undisturbed moments where threads that wait for each other have none. The quicker of the two counts.
    """
    found = _typical_seconds(runs, device, most_seconds)
    if found.is_quiet or device.type != "cpu" or torch.get_num_threads() == 1:
        return found
    with one_thread():
        alone = _typical_seconds(runs, device, most_seconds)
    return Typical(seconds=min(found.seconds, alone.seconds), is_quiet=False)


def _typical_seconds(
    runs: Sequence[Callable[[], object]], device: torch.device, most_seconds: float
) -> Typical:
    start = time.perf_counter()
    turns = itertools.cycle(runs)
    _round(turns, device, 1)  # first calls choose kernels and grow heaps
    once = min(_round(turns, device, 1).seconds for _ in range(2))
    calls = max(1, min(1000, int(_ROUND_SECONDS / once)))
    durations: list[Duration] = []
    quiet = 0
    while len(durations) < _LEAST_ROUNDS or quiet < _ENOUGH_ROUNDS:
        spent = time.perf_counter() - start
        is_patient = quiet < _LEAST_ROUNDS and spent < _PATIENCE * most_seconds
        if len(durations) >= _LEAST_ROUNDS and spent > most_seconds and not is_patient:
            break
        durations.append(_round(turns, device, calls))
        quiet += not durations[-1].is_disturbed
    return Typical(seconds=typical(durations), is_quiet=quiet >= _LEAST_ROUNDS)


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread, which other work on the machine leaves undisturbed moments."""
    with one_at_a_time():
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def typical(durations: Sequence[Duration]) -> float:
    """The median of the undisturbed durations; the shortest of all if fewer than three are undisturbed.

    With two threads on two processors and another busy process, most ops take a whole time slice of it, 4 or
    8 ms, as each thread waits for the other at the end: a median of all would be the length of the slice.
    """
    quiet = [duration.seconds for duration in durations if not duration.is_disturbed]
    if len(quiet) >= _LEAST_ROUNDS:
        return statistics.median(quiet)
    return min(duration.seconds for duration in durations)


class WaitsForCores:
    """How much of the time a thread of this process waits for a processor, from when this object is made."""

    def __init__(self) -> None:
        self._before, self._start = _waited_seconds(), time.perf_counter()

    def fraction(self) -> float | None:
        """Fraction of time for the thread that waited longest; None if the system does not report it."""
        seconds, now = time.perf_counter() - self._start, _waited_seconds()
        if not now or seconds <= 0:
            return None
        return min(max(total - self._before.get(task, 0.0) for task, total in now.items()) / seconds, 1.0)


def host_timed(run: Callable[[], Result]) -> tuple[Result, Duration]:
    """The result of one call, and how long the host was busy with it; the device may still be busy."""
    lost, before = _lost_turns(), _waited_seconds()
    start = time.perf_counter()
    result = run()
    seconds = time.perf_counter() - start
    waited = max((total - before.get(task, 0.0) for task, total in _waited_seconds().items()), default=0.0)
    is_disturbed = _lost_turns() > lost or waited > _WAITED_FRACTION * seconds
    return result, Duration(seconds=seconds, is_disturbed=is_disturbed)


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished all submitted work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _round(turns: Iterator[Callable[[], object]], device: torch.device, calls: int) -> Duration:
    """Seconds of one of several calls; not all are made if each takes a time slice of another program."""
    made = 0

    def run() -> None:
        nonlocal made
        end = time.perf_counter() + _LONGEST_ROUND_SECONDS
        while made < calls and (not made or time.perf_counter() < end):
            some = min(calls - made, _CALLS_BETWEEN_CLOCKS)
            for each in itertools.islice(turns, some):
                each()
            made += some
        wait_for(device)

    wait_for(device)
    together = host_timed(run)[1]
    return replace(together, seconds=together.seconds / made)


def _lost_turns() -> int:
    """Number of involuntary context switches of this process's threads; 0 if the system does not report it."""
    if sys.platform == "win32":
        return 0
    import resource  # there is none on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _waited_seconds() -> dict[str, float]:
    """Seconds that each thread of this process was ready but not running; empty if the system reports none.

    A thread that is woken and waits for a processor has not lost a turn: if threads wait for each other, lost
    turns miss most of the effect of other work. Linux reports the wait in a task's `schedstat`, in nanoseconds
    (Documentation/scheduler/sched-stats.rst).
    """
    waited = {}
    with suppress(OSError, ValueError, IndexError):
        for task in Path("/proc/self/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # one that has ended meanwhile
                waited[task.name] = int((task / "schedstat").read_bytes().split()[1]) / 1e9
    return waited
