"""How long something takes on a torch device, beside other work on the machine."""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

_ROUND_SECONDS = 0.3e-3
"""What is quicker is run several times in a row, so that reading the clock does not count. Not longer, because
a short round more often ends before another program gets its turn."""

_LEAST_ROUNDS = 3
_ENOUGH_ROUNDS = 25
"""That nothing disturbed."""
_PATIENCE = 6
"""How many times as long is tried if nearly all rounds are disturbed."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Duration:
    """How long something took once."""

    seconds: float
    is_disturbed: bool
    """Whether the system gave a processor that this process was using to another one meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Typical:
    """How long something takes."""

    seconds: float
    disturbed_fraction: float
    """Of the rounds it was timed in."""


def typical_seconds(
    runs: Sequence[Callable[[], object]], device: torch.device, *, most_seconds: float
) -> Typical:
    """Seconds of one run, when several take turns.

    Args:
        runs: The same work on different operands; on CUDA not waited for in between.
        device: Is waited for at the end of a round.
        most_seconds: To spend on this; up to six times as much while other work disturbs most rounds. At least
            three rounds are made.

    Returns:
        Per run.
    """
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
    disturbed = len(durations) - quiet
    return Typical(seconds=typical(durations) / calls, disturbed_fraction=disturbed / len(durations))


def typical(durations: Sequence[Duration]) -> float:
    """The median of those that nothing disturbed; the shortest if there are not three.

    With two threads on two processors and another busy process, most ops take a whole time slice of it, 4 or
    8 ms, as each thread waits for the other at the end: a median of all would tell the slice.
    """
    quiet = [duration.seconds for duration in durations if not duration.is_disturbed]
    if len(quiet) >= _LEAST_ROUNDS:
        return statistics.median(quiet)
    return min(duration.seconds for duration in durations)


def host_timed(run: Callable[[], Result]) -> tuple[Result, Duration]:
    """One call, and how long the host was busy with it; the device may still be."""
    lost = _lost_turns()
    start = time.perf_counter()
    result = run()
    seconds = time.perf_counter() - start
    return result, Duration(seconds=seconds, is_disturbed=_lost_turns() > lost)


def wait_for(device: torch.device) -> None:
    """Until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _round(turns: Iterable[Callable[[], object]], device: torch.device, calls: int) -> Duration:
    def run() -> None:
        for each in itertools.islice(turns, calls):
            each()
        wait_for(device)

    wait_for(device)
    return host_timed(run)[1]


def _lost_turns() -> int:
    """How often the system took a processor from one of this process's threads; 0 where it does not say."""
    if sys.platform == "win32":
        return 0
    import resource  # there is none on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
