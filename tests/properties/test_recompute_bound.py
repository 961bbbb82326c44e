"""The bound of recomputation in benchmarks/plan is at most the time of the best schedule, by brute force."""

from __future__ import annotations

import heapq
import itertools
import math

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from plan.recompute_bound import Op, Step, Value, lower_bound


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
def problems(draw: st.DrawFn) -> tuple[Step, int]:
    """A step and a budget between what its largest op needs and what keeping everything takes.

    Its forward has up to six ops, in-place ones among them, most of which read the one before; its backward
    reads some of what they make, the last ones first.
    """
    count = draw(st.integers(3, 6))
    small = st.integers(0, 2)
    ops: list[Op] = []
    values: list[Value] = []
    there: list[int] = []
    for index in range(count):
        reads = [index - 1] if index and draw(st.integers(0, 4)) else []
        earlier = [value for value in there if value not in reads]
        reads += [draw(st.sampled_from(earlier))] if earlier and not draw(st.integers(0, 3)) else []
        is_in_place = bool(reads) and not draw(st.integers(0, 3))
        size = values[reads[0]].size_bytes if is_in_place else draw(st.integers(1, 4))
        values.append(Value(op=index, size_bytes=size))
        early, late = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        inside = draw(small)
        ops.append(
            Op(
                reads=tuple(reads),
                makes=(index,),
                overwrites=tuple(reads[:1]) if is_in_place else (),
                other_bytes=inside,
                temporary_bytes=inside,
                again_seconds=(float(early), float(late)),
            )
        )
        there = [value for value in there if value not in ops[-1].overwrites] + [index]
    for value in reversed(there):
        if draw(st.integers(0, 3)):
            standing = draw(small)
            ops.append(Op(reads=(value,), standing_bytes=standing, other_bytes=standing + draw(small)))
    ops.append(Op(reads=()))
    step = Step(ops=tuple(ops), values=tuple(values), late_from=draw(st.integers(0, len(ops))), seconds=10.0)
    least = max(sum(values[value].size_bytes for value in op.holds) + op.other_bytes for op in ops)
    most = sum(value.size_bytes for value in values) + max(op.other_bytes for op in ops)
    return step, draw(st.integers(least, max(most - 1, least)))


@settings(max_examples=400, deadline=None)
@given(problem=problems(), cuts=st.sets(st.integers(1, 12)), are_merged=st.booleans(), integral=st.booleans())
def test_no_schedule_is_faster_than_the_bound(
    problem: tuple[Step, int], cuts: set[int], are_merged: bool, integral: bool
) -> None:
    step, budget = problem
    best = best_seconds(step, budget)
    stages = stages_between(step, cuts) if are_merged else None
    bound = lower_bound(step, budget, stages=stages, integral=integral)
    if bound.is_impossible:
        assert best == math.inf
    else:
        assert bound.seconds <= best * (1 + 1e-9) + 1e-6


def stages_between(step: Step, cuts: set[int]) -> tuple[tuple[int, ...], ...]:
    """Stages that begin at some ops."""
    count = len(step.ops)
    edges = [0, *sorted(cut for cut in cuts if cut < count), count]
    return tuple(tuple(range(begin, end)) for begin, end in itertools.pairwise(edges))


def test_the_bound_is_nearly_always_the_best_schedule() -> None:
    """Or it would be no use: of 200 problems, those whose budget requires recomputation."""
    reached: list[bool] = []

    @settings(max_examples=200, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(problem=problems())
    def look(problem: tuple[Step, int]) -> None:
        step, budget = problem
        best = best_seconds(step, budget)
        if step.seconds < best < math.inf:
            bound = lower_bound(step, budget, integral=True)
            reached.append(bound.seconds == pytest.approx(best))

    look()
    assert len(reached) >= 40
    assert sum(reached) >= 0.9 * len(reached)


@settings(max_examples=100, deadline=None)
@given(problem=problems())
def test_without_fractions_the_bound_is_not_lower(problem: tuple[Step, int]) -> None:
    step, budget = problem
    fractional, integral = (lower_bound(step, budget, integral=each) for each in (False, True))
    assert integral.is_impossible or integral.seconds >= fractional.seconds - 1e-6


@settings(max_examples=100, deadline=None)
@given(problem=problems())
def test_without_a_limit_nothing_is_recomputed(problem: tuple[Step, int]) -> None:
    step, _ = problem
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


def test_what_only_forward_reads_is_recomputed_for_what_backward_reads() -> None:
    """Backward reads every second value; the ones between are needed to make those again."""
    step = chain(6)
    sparse = tuple(op for op in step.ops if op.again_seconds is not None or op.reads[0] % 2)
    halved = Step(ops=sparse, values=step.values, seconds=step.seconds)
    for budget in (2, 3):
        best = best_seconds(halved, budget)
        assert step.seconds < lower_bound(halved, budget, integral=True).seconds <= best + 1e-6


def crowded(*, late_from: int, after: tuple[Op, ...]) -> Step:
    """Two results that the third op has no room for, and ops of backward."""
    forward = (
        Op(makes=(0,), other_bytes=5, temporary_bytes=5, again_seconds=(1.0, 10.0)),
        Op(makes=(1,), again_seconds=(1.0, 10.0)),
        Op(makes=(2,), other_bytes=5, temporary_bytes=5, again_seconds=(1.0, 10.0)),
    )
    values = tuple(Value(op=op, size_bytes=size) for op, size in enumerate((1, 3, 1)))
    return Step(ops=(*forward, *after), values=values, late_from=late_from, seconds=1.0)


def test_what_is_made_again_in_a_stage_takes_no_memory_in_the_ops_of_the_stage_before_that() -> None:
    step = crowded(late_from=9, after=(Op(reads=(1,)), Op(reads=(1,))))
    assert best_seconds(step, 6) == 2.0
    bound = lower_bound(step, 6, stages=((0, 1), (2, 3), (4,)), integral=True)
    assert not bound.is_impossible
    assert bound.seconds == pytest.approx(2.0)


def test_what_is_made_again_in_a_stage_may_be_before_its_memory_is_needed() -> None:
    step = crowded(late_from=9, after=(Op(reads=(1,)), Op(reads=(2,), standing_bytes=5, other_bytes=5)))
    assert best_seconds(step, 6) == 2.0
    bound = lower_bound(step, 6, stages=((0, 1, 2), (3, 4)), integral=True)
    assert not bound.is_impossible
    assert bound.seconds == pytest.approx(2.0)


def test_of_a_stage_on_both_sides_of_where_the_host_is_ahead_the_least_price_counts() -> None:
    step = crowded(late_from=4, after=(Op(reads=(1,)), Op(reads=(2,))))
    assert best_seconds(step, 6) == 2.0
    assert lower_bound(step, 6, stages=((0, 1, 2), (3, 4)), integral=True).seconds == pytest.approx(2.0)
