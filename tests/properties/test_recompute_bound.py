"""The bound of recomputation in benchmarks/plan is at most the time of the best schedule, by brute force."""

from __future__ import annotations

import heapq
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan.recompute_bound import Op, Step, Value, lower_bound

KIB = 1024


def best_seconds(step: Step, budget_bytes: int) -> float:
    """The time of the best schedule, by Dijkstra's algorithm over what ran and what is in memory."""
    forward = [index for index, op in enumerate(step.ops) if op.again_seconds is not None]
    size = [value.size_bytes for value in step.values]
    start: tuple[int, frozenset[int]] = (0, frozenset())
    queue: list[tuple[float, int, int, frozenset[int]]] = [(step.seconds, 0, *start)]
    seen: set[tuple[int, frozenset[int]]] = set()
    order = itertools.count(1)

    def after(op: Op, held: frozenset[int], beside: int) -> frozenset[int] | None:
        if not held.issuperset(op.reads):
            return None
        left = (held - set(op.overwrites)) | set(op.makes)
        return left if beside + sum(size[value] for value in left) <= budget_bytes else None

    while queue:
        seconds, _, done, held = heapq.heappop(queue)
        if done == len(step.ops):
            return seconds
        if (done, held) in seen:
            continue
        seen.add((done, held))
        following = step.ops[done]
        found = [(seconds, done, held - {value}) for value in held]
        first = after(following, held, following.other_bytes)
        if first is not None:
            found.append((seconds, done + 1, first))
        for index in forward:
            op = step.ops[index]
            assert op.again_seconds is not None
            again = after(op, held, following.standing_bytes + op.temporary_bytes) if index < done else None
            if again is not None:
                delay = op.again_seconds[done >= step.late_from]
                found.append((seconds + delay, done, again))
        for cost, ran, kept in found:
            if (ran, kept) not in seen:
                heapq.heappush(queue, (cost, next(order), ran, kept))
    return math.inf


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """A forward of up to five ops, in-place ones among them, and a backward that reads what they make."""
    count = draw(st.integers(2, 5))
    numbers = st.integers(0, 4)
    ops: list[Op] = []
    values: list[Value] = []
    there: list[int] = []
    for index in range(count):
        reads = draw(st.lists(st.sampled_from(there), unique=True, max_size=2)) if there else []
        is_in_place = bool(reads) and draw(st.booleans())
        size = values[reads[0]].size_bytes if is_in_place else draw(st.integers(1, 4))
        values.append(Value(op=index, size_bytes=size))
        times = draw(st.tuples(numbers, numbers))
        inside = draw(numbers)
        ops.append(
            Op(
                reads=tuple(reads),
                makes=(index,),
                overwrites=tuple(reads[:1]) if is_in_place else (),
                other_bytes=inside + draw(numbers),
                standing_bytes=draw(st.integers(0, 1)),
                temporary_bytes=inside,
                again_seconds=(float(times[0]), float(times[1])),
            )
        )
        there = [value for value in there if value not in ops[-1].overwrites] + [index]
    for _ in range(draw(st.integers(1, 5))):
        reads = draw(st.lists(st.sampled_from(there), unique=True, max_size=2))
        standing = draw(st.integers(0, 2))
        ops.append(Op(reads=tuple(reads), standing_bytes=standing, other_bytes=standing + draw(numbers)))
    late_from = draw(st.integers(0, len(ops)))
    return Step(ops=tuple(ops), values=tuple(values), late_from=late_from, seconds=float(count))


@settings(max_examples=300, deadline=None)
@given(step=steps(), budget=st.integers(3, 24), most_stages=st.integers(1, 10), integral=st.booleans())
def test_no_schedule_is_faster_than_the_bound(
    step: Step, budget: int, most_stages: int, integral: bool
) -> None:
    best = best_seconds(step, budget)
    bound = lower_bound(step, budget, most_stages=most_stages, integral=integral)
    if bound.is_impossible:
        assert best == math.inf
    else:
        assert bound.seconds <= best * (1 + 1e-9) + 1e-6


@settings(max_examples=100, deadline=None)
@given(step=steps(), budget=st.integers(3, 24))
def test_without_fractions_the_bound_is_not_lower(step: Step, budget: int) -> None:
    fractional, integral = (lower_bound(step, budget, integral=each) for each in (False, True))
    assert integral.is_impossible or integral.seconds >= fractional.seconds - 1e-6


@settings(max_examples=100, deadline=None)
@given(step=steps())
def test_without_a_limit_nothing_is_recomputed(step: Step) -> None:
    assert lower_bound(step, 10**6).seconds == pytest.approx(step.seconds)


def chain(length: int) -> Step:
    """Ops that each read the one before; the backward of each reads what it read."""
    forward = [
        Op(reads=(index - 1,) if index else (), makes=(index,), again_seconds=(1.0, 1.0))
        for index in range(length)
    ]
    backward = [Op(reads=(index,)) for index in reversed(range(length))]
    values = tuple(Value(op=index, size_bytes=1) for index in range(length))
    return Step(ops=(*forward, *backward), values=values, seconds=3.0 * length)


@pytest.mark.parametrize("budget", range(2, 7))
def test_the_bound_of_a_chain_is_its_best_schedule(budget: int) -> None:
    """It is a bound worth having: here it is reached, unless fractions are permitted."""
    step = chain(6)
    assert lower_bound(step, budget, integral=True).seconds == pytest.approx(best_seconds(step, budget))


def test_a_budget_below_what_one_op_needs_is_impossible() -> None:
    step = chain(4)
    assert best_seconds(step, 1) == math.inf
    assert lower_bound(step, 1).is_impossible
