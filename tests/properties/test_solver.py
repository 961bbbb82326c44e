"""The prefix solver against brute force, against a MILP solver, and against itself at other budgets."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from brimful.planner.solvers import chain as solver
from brimful.planner.solvers.chain import Option, Problem, Solution, smallest_peak_bytes, solve

options = st.builds(
    Option,
    retained_bytes=st.integers(0, 12),
    peak_bytes=st.integers(0, 25),
    seconds=st.integers(0, 9).map(float),  # whole numbers: sums are exact in any order
)


offloading_options = st.builds(
    Option,
    retained_bytes=st.integers(0, 6),
    peak_bytes=st.integers(0, 25),
    seconds=st.integers(0, 3).map(float),
    lingering_bytes=st.integers(0, 12),
    copy_seconds=st.integers(0, 6).map(float),
    forward_seconds=st.integers(0, 4).map(float),
    backward_seconds=st.integers(0, 4).map(float),
)
"""Some of which let the next unit wait, and hide what it would wait for."""


@st.composite
def problems(draw, most_units=6):
    either = st.one_of(options, offloading_options)
    units = draw(st.lists(st.lists(either, min_size=1, max_size=3).map(tuple), max_size=most_units))
    gaps = draw(st.lists(st.integers(0, 25), min_size=len(units) + 1, max_size=len(units) + 1))
    return Problem(units=tuple(units), gap_peaks_bytes=tuple(gaps))


budgets = st.integers(0, 90)


def choices(problem):
    return list(itertools.product(*(range(len(unit)) for unit in problem.units)))


def least_cost(problem, budget_bytes):
    """Least seconds over all choices within the budget, by trying all; None if there is none."""
    costs = [problem.seconds(c) for c in choices(problem) if problem.peak_bytes(c) <= budget_bytes]
    return min(costs, default=None)


def random_problem(seed, unit_count, option_count, *, is_offloading=False):
    """A problem of the size of a real one: bytes in millions, seconds that are no whole numbers.

    Offloading, the last option of each unit but the last is to do so: little is retained, much lingers.
    """
    rng = random.Random(seed)
    problem = Problem(
        units=tuple(
            tuple(
                Option(
                    retained_bytes=rng.randrange(10**8),
                    peak_bytes=rng.randrange(10**8, 2 * 10**8),
                    seconds=rng.random(),
                )
                for _ in range(option_count)
            )
            for _ in range(unit_count)
        ),
        gap_peaks_bytes=tuple(rng.randrange(2 * 10**8) for _ in range(unit_count + 1)),
    )
    if not is_offloading:
        return problem
    timed = [
        tuple(replace(o, forward_seconds=rng.random() / 2, backward_seconds=rng.random()) for o in unit)
        for unit in problem.units
    ]
    offloading = [
        replace(
            unit[-1],
            retained_bytes=unit[-1].retained_bytes // 10,
            lingering_bytes=rng.randrange(10**8),
            seconds=unit[-1].seconds / 10,
            copy_seconds=rng.random(),
        )
        for unit in timed[:-1]
    ]
    units = (*((*unit[:-1], o) for unit, o in zip(timed, offloading, strict=False)), timed[-1])
    return replace(problem, units=units)


def budgets_between(problem, count):
    """Budgets from just feasible to where nothing is given up."""
    fastest = tuple(min(range(len(unit)), key=lambda o: unit[o].seconds) for unit in problem.units)
    low, high = smallest_peak_bytes(problem), problem.peak_bytes(fastest)
    return [low + (high - low) * i // (count - 1) for i in range(count)]


@given(problem=problems(), budget_bytes=budgets)
def test_the_cost_is_that_of_brute_force_and_none_means_that_nothing_fits(problem, budget_bytes):
    solution = solve(problem, budget_bytes)
    least = least_cost(problem, budget_bytes)
    if least is None:
        assert solution is None
    else:
        assert solution is not None
        assert solution.is_optimal
        assert solution.seconds == least == problem.seconds(solution.choice)


@given(problem=problems(), budget_bytes=budgets)
def test_the_peak_reported_is_that_of_the_choice_and_within_the_budget(problem, budget_bytes):
    solution = solve(problem, budget_bytes)
    if solution is not None:
        assert solution.peak_bytes == problem.peak_bytes(solution.choice) <= budget_bytes


@given(problem=problems(), budget_bytes=budgets, more_bytes=st.integers(0, 30))
def test_a_larger_budget_never_costs_more(problem, budget_bytes, more_bytes):
    tight, loose = solve(problem, budget_bytes), solve(problem, budget_bytes + more_bytes)
    if tight is not None:
        assert loose is not None
        assert loose.seconds <= tight.seconds


@given(problem=problems())
def test_the_smallest_peak_is_the_least_peak_of_all_choices(problem):
    assert smallest_peak_bytes(problem) == min(map(problem.peak_bytes, choices(problem)))


@given(problem=problems(), budget_bytes=budgets, most_states=st.integers(1, 4))
def test_with_too_many_states_a_choice_is_still_found_whenever_there_is_one(problem, budget_bytes, most_states):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solver, "MOST_STATES", most_states)
        solution = solve(problem, budget_bytes)
    least = least_cost(problem, budget_bytes)
    assert (solution is None) == (least is None)
    if solution is not None:
        assert solution.peak_bytes <= budget_bytes
        assert solution.seconds >= least
        assert solution.seconds == least or not solution.is_optimal


@given(problem=problems(), budget_bytes=budgets, most_states=st.integers(1, 4))
def test_with_too_many_states_the_cost_is_at_most_that_of_a_budget_lower_by_a_quantum_a_unit(
    problem, budget_bytes, most_states
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solver, "MOST_STATES", most_states)
        solution = solve(problem, budget_bytes)
    quantum_bytes = max(1, budget_bytes // most_states)
    reference = least_cost(problem, budget_bytes - len(problem.units) * quantum_bytes)
    if reference is not None:
        assert solution is not None
        assert solution.seconds <= reference


@settings(max_examples=20)
@given(problem=problems(), budget_bytes=budgets)
def test_among_equally_cheap_choices_the_one_that_retains_least_is_taken(problem, budget_bytes):
    solution = solve(problem, budget_bytes)
    if solution is not None:
        equals = [
            c
            for c in choices(problem)
            if problem.peak_bytes(c) <= budget_bytes and problem.seconds(c) == solution.seconds
        ]
        assert retained(problem, solution.choice) == min(retained(problem, c) for c in equals)


def retained(problem, choice):
    return sum(unit[o].retained_bytes for unit, o in zip(problem.units, choice, strict=True))


def solve_as_milp(problem, budget_bytes):
    """The same problem for HiGHS: a binary per unit and option, a row per prefix constraint; least seconds.

    One column more for each pair of options of which the second waits for copies of the first.
    """
    columns = [(i, o) for i, unit in enumerate(problem.units) for o in range(len(unit))]
    of = [problem.units[i][o] for i, o in columns]
    pairs = [
        (a, b, wait)
        for a, (i, _) in enumerate(columns)
        for b, (j, _) in enumerate(columns)
        if j == i + 1 and (wait := of[b].waiting_seconds(of[a].copy_seconds)) > 0
    ]
    cost = np.array([*(option.seconds for option in of), *(wait for _a, _b, wait in pairs)])
    retained_mb = np.array([option.retained_bytes for option in of]) / 1e6
    lingering_mb = np.array([option.lingering_bytes for option in of]) / 1e6
    peak_mb = np.array([option.peak_bytes for option in of]) / 1e6
    unit_of = np.array([i for i, _ in columns])
    rows, upper, lower = [], [], []
    for i in range(len(problem.units)):
        before = retained_mb * (unit_of < i)
        lingers = lingering_mb * (unit_of == i - 1)
        rows.append(before + lingers + peak_mb * (unit_of == i))  # Σ_{j<i} r(j, o) + l(i - 1, o) + p(i, o) ≤ B
        upper.append(budget_bytes / 1e6)
        # Σ_{j≤i} r(j, o) + l(i, o) ≤ B - g(i + 1)
        rows.append(before + (retained_mb + lingering_mb) * (unit_of == i))
        upper.append((budget_bytes - problem.gap_peaks_bytes[i + 1]) / 1e6)
        lower += [-np.inf, -np.inf]
        rows.append((unit_of == i).astype(float))  # Σ_o x(i, o) = 1
        upper.append(1)
        lower.append(1)
    matrix = np.zeros((len(rows) + len(pairs), len(cost)))
    matrix[: len(rows), : len(of)] = rows
    for row, (a, b, _wait) in enumerate(pairs, len(rows)):
        matrix[row, [a, b, len(of) + row - len(rows)]] = 1, 1, -1  # x(a) + x(b) - y(a, b) ≤ 1
        upper.append(1)
        lower.append(-np.inf)
    result = milp(
        cost,
        constraints=LinearConstraint(matrix, lower, upper),
        bounds=Bounds(0, 1),
        integrality=np.array([1] * len(of) + [0] * len(pairs)),
        options={"mip_rel_gap": 0},
    )
    return result.fun if result.status == 0 else None


@pytest.mark.parametrize("is_offloading", [False, True])
@pytest.mark.parametrize(
    ("seed", "unit_count", "option_count"), [(0, 12, 2), (1, 20, 3), (2, 30, 2), (3, 14, 5)]
)
def test_the_cost_is_that_of_a_milp_solver(seed, unit_count, option_count, is_offloading):
    problem = random_problem(seed, unit_count, option_count, is_offloading=is_offloading)
    for budget_bytes in budgets_between(problem, 4)[1:]:
        solution = solve(problem, budget_bytes)
        assert solution is not None
        assert solution.is_optimal
        # HiGHS holds constraints to 1e-6, here a byte in the megabytes it is given.
        assert solution.seconds == pytest.approx(solve_as_milp(problem, budget_bytes), rel=1e-6)


def test_a_byte_below_the_smallest_peak_nothing_is_found():
    problem = random_problem(seed=4, unit_count=40, option_count=3)
    smallest = smallest_peak_bytes(problem)
    assert solve(problem, smallest) is not None
    assert solve(problem, smallest - 1) is None


def two_units(**offloading):
    """The first kept or offloaded, the second kept or recomputed."""
    keep = Option(retained_bytes=10, peak_bytes=12, seconds=0, forward_seconds=2, backward_seconds=3)
    offload = Option(
        retained_bytes=1,
        peak_bytes=12,
        seconds=0,
        lingering_bytes=9,
        forward_seconds=2,
        backward_seconds=3,
        **offloading,
    )
    recompute = Option(retained_bytes=0, peak_bytes=12, seconds=1.5, forward_seconds=2, backward_seconds=4.5)
    return Problem(units=((keep, offload), (keep, recompute)), gap_peaks_bytes=(2, 2, 2))


def test_what_lingers_is_there_while_the_next_unit_runs_and_not_afterwards():
    problem = two_units(copy_seconds=1.0)
    assert problem.peak_bytes((0, 0)) == 10 + 12
    assert problem.peak_bytes((1, 0)) == 1 + 9 + 12
    later = replace(problem, gap_peaks_bytes=(2, 2, 20))
    assert later.peak_bytes((0, 0)) == 10 + 10 + 20
    assert later.peak_bytes((1, 0)) == 1 + 10 + 20


@pytest.mark.parametrize(
    ("copy_seconds", "waits", "waits_beside_recomputation"),
    [(1.0, 0, 0), (2.5, 0.5, 0.5), (4.0, 2 + 1, 2), (5.0, 3 + 2, 3 + 0.5)],
)
def test_copies_cost_what_the_next_unit_does_not_hide_each_way(copy_seconds, waits, waits_beside_recomputation):
    problem = two_units(copy_seconds=copy_seconds)
    assert problem.seconds((0, 0)) == 0
    assert problem.seconds((1, 0)) == pytest.approx(waits)
    assert problem.seconds((1, 1)) == pytest.approx(1.5 + waits_beside_recomputation)


def test_a_hundred_units_of_twenty_options_are_solved_to_the_optimum():
    problem = random_problem(seed=5, unit_count=100, option_count=20)
    solution = solve(problem, budgets_between(problem, 3)[1])
    assert solution is not None
    assert solution.is_optimal


def test_a_quarter_of_the_states_costs_hardly_more(monkeypatch):
    """Thinning loses 0.2 % here, where the exact frontier has more than 1,000 states."""
    problem = random_problem(seed=5, unit_count=100, option_count=20)
    budget_bytes = budgets_between(problem, 3)[1]
    exact = solve(problem, budget_bytes)
    monkeypatch.setattr(solver, "MOST_STATES", 250)
    thinned = solve(problem, budget_bytes)
    assert exact is not None
    assert thinned is not None
    assert not thinned.is_optimal
    assert exact.seconds <= thinned.seconds <= exact.seconds * 1.01


def test_without_units_only_the_gap_counts():
    problem = Problem(units=(), gap_peaks_bytes=(7,))
    assert solve(problem, 7) == Solution(choice=(), seconds=0, peak_bytes=7, is_optimal=True)
    assert solve(problem, 6) is None
    assert smallest_peak_bytes(problem) == 7
