"""A lower bound of the time of any schedule that fits a budget by recomputing forward ops.

The problem is Checkmate's (Jain et al., MLSys 2020): which results of forward ops are held, and which ops run
again when, so that memory never exceeds the budget and the time is least. Ops run for the first time in the
order in which they were captured; backward and optimizer run once, as autograd runs them. Between the first
runs of two ops any forward op may run again, any number of times, in any order.

Stage t is what happens from the end of the last op of stage t - 1 to the end of the last op of stage t; a stage
has the first runs of one or more ops. With values v made by op(v), of m(v) bytes, and

    S(t, v)   1 if v is in memory when stage t begins, before anything is freed
    R(t, i)   1 if op i runs at least once in stage t; 1 where its first run is
    H(t, v)   at least S(t + 1, v) - R(t, op(v)), at least 0: 1 if v is in memory all through stage t

every schedule satisfies

    S(t + 1, v) ≤ S(t, v) + R(t, op(v))                                        a value comes from somewhere
    R(t, j) ≤ S(t, v) + R(t, op(v))                       for v that j reads   an op needs what it reads
    Σ over v that o reads or makes: m(v), + Σ over others: m(v) · S(t + 1, v) + other(o) ≤ budget
                                                          for the last op o of stage t
    the same with H(t, v) instead of S(t + 1, v)          for the other first runs of stage t
    R(t, k) · (m of what k reads or makes + temporary(k)) + Σ over others: m(v) · H(t, v) + standing(t) ≤ budget
                                                          for what is run again

and takes at least Σ again(t, i) · R(t, i) longer than without recomputation. So the least of that sum under
these constraints is a lower bound. Every simplification can only lower it: a run counts once per stage, however
often it happens; within a stage only what certainly stays in memory counts; merging stages, dropping
constraints (those of the last kind are added where a solution violates them) and permitting fractions admit
more. Checkmate's own formulation, where an op runs at most once in a stage and in a fixed order, does not bound
other schedules.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_matrix

LEAST_VIOLATION = 1e-6
"""Of a constraint in parts of the budget, above which it is added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """What a forward op makes."""

    op: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One op of the step, in the order of first runs."""

    reads: tuple[int, ...] = ()
    """Values."""
    makes: tuple[int, ...] = ()
    overwrites: tuple[int, ...] = ()
    """Values that it reads and whose bytes what it makes takes."""
    other_bytes: int = 0
    """In memory when it ends, beside values, with memory inside its kernel."""
    standing_bytes: int = 0
    """In memory before it begins and after, beside values: while other ops run again before it."""
    temporary_bytes: int = 0
    """Inside its kernel."""
    again_seconds: tuple[float, float] | None = None
    """By how much one more run delays the step at least: before op `Step.late_from`, and from there on. None
    for an op that runs once, as those of backward."""

    @property
    def holds(self) -> tuple[int, ...]:
        """Values in memory when it ends, whatever else is."""
        return tuple(value for value in (*self.reads, *self.makes) if value not in self.overwrites)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The problem: ops of one step and the values that they exchange."""

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    late_from: int = 0
    seconds: float = 0.0
    """The time of the step without recomputation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What was proven of all schedules within a budget."""

    is_impossible: bool
    """No schedule fits the budget."""
    seconds: float
    """Each takes at least this long."""
    is_integral: bool
    """Whether the solver had to choose between holding and not; else it could hold fractions."""
    gap_fraction: float | None
    """Between the best choice found and the bound; None if none was found, or none was looked for."""
    stages: int
    variables: int
    constraints: int
    solver_seconds: float


def stages_of(step: Step) -> tuple[tuple[int, ...], ...]:
    """The ops of each stage: those that neither read nor make a value are merged with the next that does.

    Args:
        step: Its ops, in order; the last ones are those of the optimizer.

    Returns:
        Consecutive ops, by index.
    """
    last = len(step.ops) - 1
    stages, first = [], 0
    for end, op in enumerate(step.ops):
        if op.holds or end == last:
            stages.append(tuple(range(first, end + 1)))
            first = end + 1
    return tuple(stages)


def lower_bound(
    step: Step,
    budget_bytes: int,
    *,
    stages: tuple[tuple[int, ...], ...] | None = None,
    integral: bool = False,
    limit_seconds: float = 60.0,
) -> Bound:
    """The least time of schedules of a step within a budget, or less.

    Args:
        step: The problem.
        budget_bytes: Of all memory.
        stages: Consecutive ops of each; None takes `stages_of`. Merging lowers the bound at most.
        integral: Also search for the best choice without fractions, in the time left, and take its bound.
        limit_seconds: Of the solver.

    Returns:
        What the solver proved within the limit; without recomputation where it proved nothing.
    """
    return _Relaxation(step, budget_bytes, stages or stages_of(step)).bound(integral, limit_seconds)


_Term = int | float
"""A variable's index, or a constant as a float."""


@dataclass(slots=True)
class _Rows:
    """Constraints: sums of variables times coefficients that are at most a number."""

    entries: list[tuple[dict[int, float], float]] = field(default_factory=list)
    are_impossible: bool = False
    """Whether a sum of constants is too large."""

    def add(self, terms: Sequence[tuple[float, _Term]], most: float) -> None:
        """Σ coefficient · term ≤ most."""
        coefficients: dict[int, float] = defaultdict(float)
        for coefficient, term in terms:
            if isinstance(term, float):
                most -= coefficient * term
            else:
                coefficients[term] += coefficient
        if not coefficients:
            self.are_impossible |= most < -LEAST_VIOLATION
            return
        self.entries.append((dict(coefficients), most))

    def matrix(self, columns: int) -> tuple[csr_matrix, NDArray[np.float64]]:
        """All constraints as A · x ≤ b."""
        rows = np.concatenate(
            [np.full(len(terms), row) for row, (terms, _) in enumerate(self.entries)] or [np.zeros(0)]
        )
        cols = [column for terms, _ in self.entries for column in terms]
        data = [value for terms, _ in self.entries for value in terms.values()]
        matrix = csr_matrix((data, (rows.astype(int), cols)), shape=(len(self.entries), columns))
        return matrix, np.array([most for _, most in self.entries])


class _Relaxation:
    """The constraints above for one budget, in parts of the budget and of the step's time."""

    def __init__(self, step: Step, budget_bytes: int, stages: tuple[tuple[int, ...], ...]) -> None:
        self._step, self._stages = step, stages
        self._budget = max(budget_bytes, 1)
        self._size = [value.size_bytes / self._budget for value in step.values]
        self._stage_of = {op: stage for stage, ops in enumerate(stages) for op in ops}
        self._made_in = [self._stage_of[value.op] for value in step.values]
        self._needed_until, self._runs_until = self._last_stages()
        self._variables: dict[tuple[str, int, int], int] = {}
        self._rows = _Rows()
        self._inner: set[tuple[int, int]] = set()
        """Stages and ops whose memory when run again is constrained."""
        self._build()
        self._is_impossible = self._rows.are_impossible

    def _last_stages(self) -> tuple[list[int], list[int]]:
        """By value the last stage in which it is of use; by op the last in which it is of use to run it."""
        readers: dict[int, list[int]] = defaultdict(list)
        for index, op in enumerate(self._step.ops):
            for value in op.reads:
                readers[value].append(index)
        until_value = list(self._made_in)
        until_op = [self._stage_of[op] for op in range(len(self._step.ops))]
        for index in reversed(range(len(self._step.ops))):
            op = self._step.ops[index]
            for value in op.makes:
                ends = [until_op[reader] for reader in readers[value]]
                until_value[value] = max([self._made_in[value], *ends])
            if op.again_seconds is not None:
                until_op[index] = max([self._stage_of[index], *(until_value[value] for value in op.makes)])
        return until_value, until_op

    def _held(self, stage: int, value: int) -> _Term:
        """S: whether a value is in memory when a stage begins."""
        if stage > self._needed_until[value] or stage <= self._made_in[value]:
            return 0.0
        if value in self._step.ops[self._stages[stage - 1][-1]].holds:
            return 1.0
        return self._variables.setdefault(("S", stage, value), len(self._variables))

    def _runs(self, stage: int, op: int) -> _Term:
        """R: whether an op runs in a stage."""
        if stage == self._stage_of[op]:
            return 1.0
        if stage < self._stage_of[op] or stage > self._runs_until[op]:
            return 0.0
        return self._variables.setdefault(("R", stage, op), len(self._variables))

    def _stays(self, stage: int, value: int) -> _Term:
        """H: whether a value is in memory all through a stage."""
        after = self._held(stage + 1, value) if stage + 1 < len(self._stages) else 0.0
        again = self._runs(stage, self._step.values[value].op)
        if isinstance(after, float) and after == 0.0:
            return 0.0
        if isinstance(again, float):
            return after if again == 0.0 else 0.0
        key = ("H", stage, value)
        if key not in self._variables:
            stays = self._variables[key] = len(self._variables)
            self._rows.add([(1.0, after), (-1.0, again), (-1.0, stays)], 0.0)
        return self._variables[key]

    def _build(self) -> None:
        for stage, ops in enumerate(self._stages):
            for op in ops:
                self._needs(stage, op, 1.0)
                self._first_run_fits(stage, op)
            for op, other in enumerate(self._step.ops):
                if self._stage_of[op] < stage <= self._runs_until[op] and other.again_seconds is not None:
                    self._needs(stage, op, self._runs(stage, op))
            for value in range(len(self._step.values)):
                after = self._held(stage + 1, value) if stage + 1 < len(self._stages) else 0.0
                if not isinstance(after, float) and self._made_in[value] < stage:
                    maker = self._runs(stage, self._step.values[value].op)
                    self._rows.add([(1.0, after), (-1.0, self._held(stage, value)), (-1.0, maker)], 0.0)

    def _needs(self, stage: int, op: int, runs: _Term) -> None:
        """An op needs what it reads."""
        for value in self._step.ops[op].reads:
            maker = self._runs(stage, self._step.values[value].op)
            if not (isinstance(maker, float) and maker == 1.0):
                self._rows.add([(1.0, runs), (-1.0, self._held(stage, value)), (-1.0, maker)], 0.0)

    def _first_run_fits(self, stage: int, op: int) -> None:
        """Memory at the end of an op's first run."""
        holds, is_last = self._step.ops[op].holds, op == self._stages[stage][-1]
        own = sum(self._size[value] for value in holds) + self._step.ops[op].other_bytes / self._budget
        terms: list[tuple[float, _Term]] = [(own, 1.0)]
        if not is_last or stage + 1 < len(self._stages):
            others = set(self._values_before(stage, with_own=is_last)) - set(holds)
            of = (lambda value: self._held(stage + 1, value)) if is_last else (lambda v: self._stays(stage, v))
            terms += [(self._size[value], of(value)) for value in sorted(others)]
        self._rows.add(terms, 1.0)

    def _values_before(self, stage: int, *, with_own: bool) -> Iterator[int]:
        """Values that may be in memory in a stage."""
        for value, made_in in enumerate(self._made_in):
            if made_in < stage or (with_own and made_in == stage):
                yield value

    def _rerun_fits(self, stage: int, op: int) -> list[tuple[float, _Term]]:
        """Memory when an op runs again in a stage; at most 1."""
        holds = self._step.ops[op].holds
        own = sum(self._size[value] for value in holds) + self._step.ops[op].temporary_bytes / self._budget
        others = set(self._values_before(stage, with_own=False)) - set(holds)
        return [
            (self._standing(stage), 1.0),
            (own, self._runs(stage, op)),
            *((self._size[value], self._stays(stage, value)) for value in sorted(others)),
        ]

    def _standing(self, stage: int) -> float:
        return min(self._step.ops[op].standing_bytes for op in self._stages[stage]) / self._budget

    def _add_violated(self, x: NDArray[np.float64]) -> int:
        """Constrain what a solution violates when it runs ops again; how many."""
        added = 0
        known = {key: x[index] for key, index in self._variables.items() if index < len(x)}

        def level(kind: str, stage: int, index: int, term: _Term) -> float:
            return term if isinstance(term, float) else float(known.get((kind, stage, index), 0.0))

        for stage in range(len(self._stages)):
            rerun = [
                op
                for op in range(len(self._step.ops))
                if (stage, op) not in self._inner and known.get(("R", stage, op), 0.0) > LEAST_VIOLATION
            ]
            if not rerun:
                continue
            stays = {}
            for value in self._values_before(stage, with_own=False):
                after = self._held(stage + 1, value) if stage + 1 < len(self._stages) else 0.0
                maker = self._step.values[value].op
                again = level("R", stage, maker, self._runs(stage, maker))
                stays[value] = max(level("S", stage + 1, value, after) - again, 0.0)
            total = sum(self._size[value] * part for value, part in stays.items())
            for op in rerun:
                holds = self._step.ops[op].holds
                own = sum(self._size[v] for v in holds) + self._step.ops[op].temporary_bytes / self._budget
                others = total - sum(self._size[v] * stays.get(v, 0.0) for v in holds)
                if self._standing(stage) + own * known["R", stage, op] + others > 1 + LEAST_VIOLATION:
                    self._inner.add((stage, op))
                    self._rows.add(self._rerun_fits(stage, op), 1.0)
                    added += 1
        return added

    def _costs(self) -> NDArray[np.float64]:
        """Of the variables, in parts of the step's time (of one second if that is 0)."""
        costs = np.zeros(len(self._variables))
        for (kind, stage, index), variable in self._variables.items():
            again = self._step.ops[index].again_seconds if kind == "R" else None
            if again is not None:
                costs[variable] = self._delay(stage, again) / self._scale
        return costs

    @property
    def _scale(self) -> float:
        return self._step.seconds or 1.0

    def _delay(self, stage: int, again: tuple[float, float]) -> float:
        early, late = again
        if self._stages[stage][-1] < self._step.late_from:
            return early
        return late if self._stages[stage][0] >= self._step.late_from else min(early, late)

    def bound(self, integral: bool, limit_seconds: float) -> Bound:
        """Solve with fractions, then without."""
        began, proven, gap, is_integral = time.perf_counter(), 0.0, None, False
        while self._variables and not self._is_impossible:
            left = limit_seconds - (time.perf_counter() - began)
            if left <= 0:
                break
            costs = self._costs()
            matrix, most = self._rows.matrix(len(costs))
            solved = linprog(costs, matrix, most, bounds=(0, 1), method="highs", options={"time_limit": left})
            if solved.status == 2:
                self._is_impossible = True
            if solved.status != 0:
                break
            proven = max(proven, _proven(costs, matrix, most, solved.ineqlin.marginals))
            if not self._add_violated(solved.x):
                break
        left = limit_seconds - (time.perf_counter() - began)
        if integral and self._variables and not self._is_impossible and left > 0:
            found = self._integral(left)
            is_integral = True
            if found is None:
                self._is_impossible = True
            else:
                proven, gap = max(proven, found[0]), found[1]
        return Bound(
            is_impossible=self._is_impossible,
            seconds=self._step.seconds + proven * self._scale,
            is_integral=is_integral,
            gap_fraction=gap,
            stages=len(self._stages),
            variables=len(self._variables),
            constraints=len(self._rows.entries),
            solver_seconds=time.perf_counter() - began,
        )

    def _integral(self, limit_seconds: float) -> tuple[float, float | None] | None:
        """The bound without fractions, and its gap to the best choice found; None if there is none at all."""
        costs = self._costs()
        matrix, most = self._rows.matrix(len(costs))
        is_whole = np.array([key[0] != "H" for key in self._variables], dtype=int)
        solved = milp(
            costs,
            constraints=LinearConstraint(matrix, -np.inf, most),
            integrality=is_whole,
            bounds=Bounds(0, 1),
            options={"time_limit": limit_seconds, "mip_rel_gap": 1e-4},
        )
        if solved.status == 2:
            return None
        bound = solved.mip_dual_bound
        lowest = 0.0 if bound is None or not np.isfinite(bound) else max(float(bound), 0.0)
        return lowest, None if solved.fun is None else (solved.fun - lowest) / (1 + lowest)


def _proven(
    costs: NDArray[np.float64],
    matrix: csr_matrix,
    most: NDArray[np.float64],
    marginals: NDArray[np.float64],
) -> float:
    """What multipliers prove of the least of costs · x with A · x ≤ b and 0 ≤ x ≤ 1, whoever found them.

    For y ≤ 0: costs · x ≥ costs · x + y · (b - A · x) … ≥ y · b + Σ min(0, costs - Aᵀ y).
    """
    multipliers = np.minimum(marginals, 0.0)
    reduced = costs - matrix.T @ multipliers
    return max(float(multipliers @ most + np.minimum(reduced, 0.0).sum()), 0.0)
