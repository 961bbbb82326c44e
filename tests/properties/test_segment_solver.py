"""The solver for nested segments, against trying everything."""

import random
import time
from itertools import product

import pytest

from brimful.planner.solvers.segments import FINEST, SegmentProblem, smallest_segment_peak_bytes, solve_segments


def draw(seed: int) -> SegmentProblem:
    """Problems of all kinds: alike units and others, some that cannot be nested, peaks of all sizes."""
    rng = random.Random(seed)
    count = rng.randint(1, 9)
    alike = rng.random() < 0.3
    sizes = [rng.choice((0, 5, 10, 10, 10, 30)) for _ in range(count)]
    if alike:
        sizes = [10] * count
    spread = rng.choice((0, 20, 60))

    def peaks(number: int) -> tuple[int, ...]:
        return tuple(rng.randint(200, 200 + spread) + 8 * i * (rng.random() < 0.9) for i in range(number))

    return SegmentProblem(
        input_bytes=tuple(sizes),
        seconds=tuple(1.0 if alike else rng.choice((0.0, 1.0, 2.5, 4.0)) for _ in range(count)),
        forward_peaks_bytes=peaks(count + 1),
        backward_peaks_bytes=peaks(count),
        deriving_peaks_bytes=peaks(count),
    )


def choices(problem: SegmentProblem) -> list[tuple[bool, ...]]:
    """All that are permitted: the first unit has none before it."""
    can = [False, *(size > 0 for size in problem.input_bytes[1:])]
    return list(product(*((False, True) if each else (False,) for each in can)))


@pytest.mark.parametrize("seed", range(150))
def test_it_finds_the_cheapest_choice_within_any_budget(seed: int) -> None:
    problem = draw(seed)
    tried = [(problem.peak_bytes(c), problem.cost_seconds(c)) for c in choices(problem)]
    smallest = min(peak for peak, _ in tried)
    for budget in sorted({smallest - 1, *(peak for peak, _ in tried)}):
        within = [seconds for peak, seconds in tried if peak <= budget]
        found = solve_segments(problem, budget)
        if found is None:
            assert not within
        else:
            assert problem.peak_bytes(found) <= budget
            assert problem.cost_seconds(found) == pytest.approx(min(within))
    assert smallest <= smallest_segment_peak_bytes(problem) <= smallest * (1 + 1 / FINEST) + 1


def naive_peak_bytes(problem: SegmentProblem, nested: tuple[bool, ...]) -> int:
    """The constraints of the module's docstring, word by word."""
    count = len(nested)
    let_go = [sum(problem.input_bytes[j] for j in range(k) if nested[j]) for k in range(count + 1)]
    anchor = [max(a for a in range(j + 1) if not nested[a]) for j in range(count)]
    return max(
        *(problem.forward_peaks_bytes[k] - let_go[k] for k in range(count + 1)),
        *(problem.backward_peaks_bytes[j] - let_go[anchor[j]] for j in range(count)),
        *(problem.deriving_peaks_bytes[j] - let_go[anchor[j]] for j in range(count) if nested[j]),
    )


@pytest.mark.parametrize("seed", range(40))
def test_the_peak_is_that_of_the_formulas(seed: int) -> None:
    problem = draw(seed)
    for choice in choices(problem):
        assert problem.peak_bytes(choice) == naive_peak_bytes(problem, choice)


def test_equal_units_are_nested_in_several_segments() -> None:
    """64 blocks with inputs of 10 and a backward of 100: held, the inputs take 640 at the last one."""
    count = 64
    problem = SegmentProblem(
        input_bytes=(10,) * count,
        seconds=(1.0,) * count,
        forward_peaks_bytes=tuple(10 * k + 50 for k in range(count + 1)),
        backward_peaks_bytes=tuple(10 * k + 110 for k in range(count)),
        deriving_peaks_bytes=tuple(10 * k + 60 for k in range(count)),
    )
    assert problem.peak_bytes((False,) * count) == 740
    smallest = smallest_segment_peak_bytes(problem)
    choice = solve_segments(problem, smallest)
    # With a anchors before it, a segment may have 11 - a units: 11 + 10 + … + 1 are 66. Within 200 it were 55.
    assert smallest == 210
    assert choice is not None
    assert count - sum(choice) == 11


@pytest.mark.parametrize("seed", range(60))
def test_with_few_states_a_choice_is_still_found_whenever_there_is_one(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = draw(seed)
    smallest = min(problem.peak_bytes(choice) for choice in choices(problem))
    monkeypatch.setattr("brimful.planner.solvers.segments.MOST_STATES", 2)
    assert solve_segments(problem, smallest) is not None
    assert solve_segments(problem, smallest - 1) is None


def test_128_different_units_take_about_a_second() -> None:
    rng = random.Random(0)
    count = 128
    sizes = [rng.randint(1, 1000) for _ in range(count)]
    held = [sum(sizes[:k]) for k in range(count + 1)]
    problem = SegmentProblem(
        input_bytes=tuple(sizes),
        seconds=tuple(rng.random() for _ in range(count)),
        forward_peaks_bytes=tuple(h + 1000 for h in held),
        backward_peaks_bytes=tuple(h + 8000 for h in held[:-1]),
        deriving_peaks_bytes=tuple(h + 3000 for h in held[:-1]),
    )
    smallest = smallest_segment_peak_bytes(problem)
    most = problem.peak_bytes((False,) * count)
    begin = time.process_time()
    for part in range(3):
        assert solve_segments(problem, smallest + (most - smallest) * part // 3) is not None
    assert time.process_time() - begin < 3
