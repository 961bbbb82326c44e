"""The joint search: micro-batch × precision × an action per unit, replayed, the fastest that fits.

Two captures (everything kept, everything recomputed) pose the solver's problem for one micro-batch. Sizes are
affine in the micro-batch, so captures at two sizes pose it for every divisor of the global batch. The fastest
answers are then captured for real, and the one that is predicted within the budget after all wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from brimful.cost import step_seconds
from brimful.errors import BatchError, CaptureError, InfeasibleError, UsageError
from brimful.hardware import Device
from brimful.planning.estimate import NO_LIMIT_BYTES, Estimate, estimate_trace
from brimful.planning.problem import ACTIONS, build_problem
from brimful.planning.records import Alternative, Plan, PlanStatus
from brimful.planning.sizes import Capture, ScaledTraces
from brimful.planning.solver import Problem, Solution, smallest_peak_bytes, solve
from brimful.planning.units import find_units
from brimful.settings import Action, Precision, Settings, UnitAction
from brimful.trace import Trace
from brimful.units import format_bytes

REPLAYED_STEPS = 2
"""What is chosen is captured for two steps, as an estimate is: the second finds the allocator used."""

# These bound how long a search takes: each round is a capture, 1 to 5 seconds for a large model.
MOST_REPAIRS = 4
"""Rounds of solving and replaying one candidate."""

MOST_CANDIDATES = 6
"""Candidates replayed before the best so far is taken."""

_OWN_LOOP_NOTE = (
    "The job's own training loop is not used: this is a plan for brimful's own step, with one loss and one "
    "optimizer. `estimate` follows the loop."
)

WORTHWHILE_SLACK_FRACTION = 0.02
"""Budget left over that is worth another round of repair; about what captures and problem differ by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked of a plan, and what is pinned."""

    job: str
    device: Device
    budget_bytes: int
    global_batch_size: int
    precisions: tuple[Precision, ...] = (Precision.FP32,)
    """Those permitted; the first is that of plain training."""
    micro_batch_size: int | None = None
    """None lets the plan choose."""
    recompute: Action | None = None
    """The one action for all units; None lets the plan choose for each."""
    optimizer: str | None = None
    weighs_by_count: bool = False
    """Whether the job says what its mean loss is a mean over."""
    brings_own_loop: bool = False
    """Whether the job has a training loop of its own, which a plan says nothing of."""
    splits_coupled_batches: bool = False
    """Whether a batch may be split although a layer (BatchNorm) couples its samples, which changes what is
    computed. False keeps the mathematics: such a model trains its whole batch at once."""

    def micro_batch_sizes(self) -> tuple[int, ...]:
        """Micro-batches to choose from.

        Returns:
            Divisors of the global batch, largest first, or the one that is pinned.

        Raises:
            UsageError: The pinned one is no divisor.
        """
        pinned = self.micro_batch_size
        if pinned is None:
            return _divisors(self.global_batch_size)
        if self.global_batch_size % pinned:
            near = min(_divisors(self.global_batch_size), key=lambda size: abs(size - pinned))
            raise UsageError(
                f"micro_batch_size {pinned} does not divide the global batch size "
                f"{self.global_batch_size}. Nearest that does: {near}."
            )
        return (pinned,)

    def plain_settings(self) -> Settings:
        """Training without a plan: the whole global batch at once, everything kept."""
        return Settings(
            micro_batch_size=self.global_batch_size,
            precision=self.precisions[0],
            optimizer=self.optimizer,
        )

    @property
    def reserved_budget_bytes(self) -> int:
        """What the budget leaves for the allocator beside the CUDA context."""
        return self.budget_bytes - self.device.context_bytes


def search(capture: Capture, request: Request) -> Plan:
    """The fastest plan within the request's budget.

    Args:
        capture: Runs a step on fake tensors.
        request: What is asked and what is pinned.

    Returns:
        A plan whose prediction is of a capture with the plan applied.

    Raises:
        InfeasibleError: Nothing permitted fits; the message says by how much, why, and what would.
        UsageError: The request contradicts itself or the device.
    """
    for precision in request.precisions:
        request.device.check_precision(precision)
    notes: list[str] = []
    plain_trace = capture(request.plain_settings())
    plain = _estimate(plain_trace, request)
    sizes = _permitted_sizes(request, plain_trace)
    candidates: list[_Candidate] = []
    for precision in request.precisions:
        family = _Family(capture, request, precision, notes)
        candidates += family.candidates(sizes)
    verified = _verify(capture, request, candidates)
    if not verified:
        smallest = _smallest(capture, request, candidates)
        if smallest.predicted_peak_device_bytes > request.budget_bytes:
            raise _infeasible(capture, request, smallest, plain, plain_trace)
        verified = [smallest]
    best = min(verified, key=lambda found: found.predicted_step_seconds)
    return Plan(
        status=PlanStatus.FEASIBLE,
        job=request.job,
        device=request.device.name,
        device_kind=request.device.kind,
        budget_bytes=request.budget_bytes,
        settings=best.settings,
        predicted_peak_allocated_bytes=best.predicted_peak_allocated_bytes,
        predicted_peak_reserved_bytes=best.predicted_peak_reserved_bytes,
        predicted_peak_device_bytes=best.predicted_peak_device_bytes,
        predicted_step_seconds=best.predicted_step_seconds,
        plain=_alternative("plain training", plain, request),
        alternatives=_alternatives(request, candidates, verified, best),
        notes=(
            *notes,
            *([_OWN_LOOP_NOTE] if request.brings_own_loop else []),
            *_what_splitting_changes(best.settings, plain_trace, request),
            *(f"Not sure about: {uncertain}." for uncertain in best.uncertain),
        ),
    )


@dataclass(slots=True)
class _Candidate:
    """One micro-batch and precision, with the solver's problem for its units."""

    settings: Settings
    units: tuple[str, ...]
    problem: Problem
    kept: Trace
    recomputed: Trace
    kept_seconds: float
    pinned: Action | None

    def solve(self, budget_bytes: int) -> Solution | None:
        """The cheapest choice within a budget of allocated bytes."""
        if self.pinned is None:
            return solve(self.problem, budget_bytes)
        choice = (ACTIONS.index(self.pinned),) * len(self.units)
        peak = self.problem.peak_bytes(choice)
        if peak > budget_bytes:
            return None
        return Solution(
            choice=choice,
            seconds=self.problem.seconds(choice),
            peak_bytes=peak,
            is_optimal=True,
        )

    def step_seconds(self, solution: Solution) -> float:
        """Predicted time of a step under a choice."""
        return self.kept_seconds + solution.seconds * self.settings.gradient_accumulation_steps

    def with_choice(self, choice: tuple[int, ...]) -> Settings:
        """The settings that a choice means."""
        actions = tuple(
            UnitAction(fqn=unit, action=ACTIONS[index]) for unit, index in zip(self.units, choice, strict=True)
        )
        return replace(self.settings, units=actions)

    def capture_of(self, action: Action) -> Trace:
        """The step with one action for all units."""
        return self.kept if action is Action.KEEP else self.recomputed

    def smallest_peak_bytes(self) -> int:
        """Least allocated bytes that any permitted choice takes."""
        if self.pinned is None:
            return smallest_peak_bytes(self.problem)
        return self.problem.peak_bytes((ACTIONS.index(self.pinned),) * len(self.units))


class _Family:
    """All micro-batches of one precision."""

    def __init__(self, capture: Capture, request: Request, precision: Precision, notes: list[str]) -> None:
        self._capture = capture
        self._request = request
        self._notes = notes
        self._base = Settings(
            micro_batch_size=request.global_batch_size,
            precision=precision,
            optimizer=request.optimizer,
        )
        self._units: tuple[str, ...] | None = None
        self._scaled = ScaledTraces(capture, scales_to_one=True)

    def candidates(self, micro_batch_sizes: Sequence[int]) -> list[_Candidate]:
        """Those micro-batches that the job can be trained with; what cannot be captured is noted.

        Args:
            micro_batch_sizes: Those to try.

        Returns:
            A candidate for each that can be captured.

        Raises:
            CaptureError: None can.
            BatchError: None can.
        """
        found = []
        failed: CaptureError | BatchError | None = None
        for size in micro_batch_sizes:
            try:
                found.append(self.candidate(size))
            except (CaptureError, BatchError) as error:
                failed = error
                self._notes.append(f"Micro-batches of {size} are left out: {error}")
        if failed is not None and not found:
            raise failed
        return found

    def candidate(self, micro_batch_size: int) -> _Candidate:
        """The candidate of one micro-batch."""
        settings = self._base.with_micro_batch_size(micro_batch_size)
        kept, recomputed = self._traces(settings)
        assert self._units is not None
        problem = build_problem(
            kept,
            recomputed,
            self._units,
            self._request.device,
            micro_batches=kept.captured_micro_batches,
        )
        return _Candidate(
            settings=settings,
            units=self._units,
            problem=problem,
            kept=kept,
            recomputed=recomputed,
            kept_seconds=step_seconds(kept, self._request.device).total_seconds,
            pinned=self._request.recompute,
        )

    def _traces(self, settings: Settings) -> tuple[Trace, Trace]:
        """The step with everything kept and with everything recomputed."""
        kept = self._trace(settings)
        if self._units is None:
            self._units = self._find_units(kept, settings)
        if not self._units:
            return kept, kept
        return kept, self._trace(replace(settings, units=_all(self._units, Action.RECOMPUTE)))

    def _trace(self, settings: Settings) -> Trace:
        is_one_of_many = settings.gradient_accumulation_steps > 1 and self._request.micro_batch_size is None
        return self._scaled.at(settings) if is_one_of_many else self._capture(settings)

    def _find_units(self, kept: Trace, settings: Settings) -> tuple[str, ...]:
        """Units that can really be recomputed; none, with a note, if recomputing fails."""
        units = find_units(kept)
        try:
            if units:
                self._capture(replace(settings, units=_all(units, Action.RECOMPUTE)))
        except CaptureError as error:
            self._notes.append(f"Nothing is recomputed: doing so fails in this model. {error}")
            return ()
        return units


def _verify(capture: Capture, request: Request, candidates: list[_Candidate]) -> list[Estimate]:
    """Replay the fastest candidates until none that is left can be faster than the best found."""
    budget = request.reserved_budget_bytes
    hopeful = []
    for candidate in candidates:
        solution = candidate.solve(budget)
        if solution is not None:
            hopeful.append((candidate.step_seconds(solution), candidate))
    hopeful.sort(key=lambda pair: pair[0])
    verified: list[Estimate] = []
    for seconds, candidate in hopeful:
        done = min((found.predicted_step_seconds for found in verified), default=float("inf"))
        if seconds >= done or (verified and len(verified) >= MOST_CANDIDATES):
            break
        found = _repair(capture, request, candidate)
        if found is not None:
            verified.append(found)
    return verified


def _repair(capture: Capture, request: Request, candidate: _Candidate) -> Estimate | None:
    """Solve, capture the real thing, move the solver's budget by the gap, solve again."""
    permitted = request.reserved_budget_bytes
    budget = permitted
    best: Estimate | None = None
    replayed: set[tuple[int, ...]] = set()
    for _ in range(MOST_REPAIRS):
        solution = candidate.solve(budget)
        if solution is None or solution.choice in replayed:
            break
        replayed.add(solution.choice)
        trace = capture(candidate.with_choice(solution.choice), steps=REPLAYED_STEPS)
        estimate = _estimate(trace, request)
        slack = permitted - estimate.predicted_peak_reserved_bytes
        if slack >= 0 and (best is None or estimate.predicted_step_seconds < best.predicted_step_seconds):
            best = estimate
        if 0 <= slack <= WORTHWHILE_SLACK_FRACTION * permitted or not any(solution.choice):
            break
        # What the solver sees is allocated bytes; what counts is reserved ones.
        budget = solution.peak_bytes + slack if slack < 0 else budget + slack
    return best


def _alternatives(
    request: Request, candidates: list[_Candidate], verified: list[Estimate], best: Estimate
) -> tuple[Alternative, ...]:
    """What was replayed and lost, and what people do by hand: one rule for all, the largest micro-batch."""
    others = [
        _alternative(found.settings.describe(), found, request) for found in verified if found is not best
    ]
    for label, action in (("keep everything", Action.KEEP), ("recompute everything", Action.RECOMPUTE)):
        by_hand = _largest_by_hand(request, candidates, action)
        if by_hand is not None and by_hand.settings != best.settings:
            others.append(_alternative(f"{label}, largest micro-batch", by_hand, request))
    return tuple(sorted(others, key=lambda other: other.predicted_step_seconds))


def _largest_by_hand(request: Request, candidates: list[_Candidate], action: Action) -> Estimate | None:
    """One action for all units at the largest micro-batch that fits; None if none does."""
    own_precision = [c for c in candidates if c.settings.precision is request.precisions[0]]
    for candidate in sorted(own_precision, key=lambda c: -c.settings.micro_batch_size):
        if action is Action.RECOMPUTE and not candidate.units:
            return None
        estimate = _estimate(candidate.capture_of(action), request)
        if estimate.predicted_peak_device_bytes <= request.budget_bytes:
            settings = replace(candidate.settings, units=_all(candidate.units, action))
            return replace(estimate, settings=settings)
    return None


def _smallest(capture: Capture, request: Request, candidates: list[_Candidate]) -> Estimate:
    """What takes least, by a capture of it: the solver's problem may be a little too high."""
    candidate = min(candidates, key=lambda candidate: candidate.smallest_peak_bytes())
    action = Action.RECOMPUTE if candidate.pinned is None else candidate.pinned
    settings = replace(candidate.settings, units=_all(candidate.units, action))
    return _estimate(capture(settings, steps=REPLAYED_STEPS), request)


def _infeasible(
    capture: Capture, request: Request, smallest: Estimate, plain: Estimate, plain_trace: Trace
) -> InfeasibleError:
    """Why nothing fits: by how much, because of what, and the nearest ways out."""
    peak = smallest.predicted_peak_device_bytes
    category, part_bytes = max(smallest.breakdown, key=lambda part: part[1])
    lines = [
        f"no plan fits {format_bytes(request.budget_bytes)} on {request.device.name}.",
        f"  plain training: {format_bytes(plain.predicted_peak_device_bytes)}",
        f"  smallest predicted peak: {format_bytes(peak)} ({smallest.settings.describe()}), "
        f"{format_bytes(peak - request.budget_bytes)} too much",
        f"  largest part: {category.replace('_', ' ')}, {format_bytes(part_bytes)}",
    ]
    if request.device.context_bytes:
        lines.append(f"  CUDA context: {format_bytes(request.device.context_bytes)}")
    if _must_stay_whole(request, plain_trace):
        lines.append(
            f"  the batch was not split: {len(plain_trace.batch_coupled_modules)} BatchNorm layers "
            f"(first: {plain_trace.batch_coupled_modules[0]!r}) compute with the whole of it. Permit it with "
            "split_batch_norm (statistics are then over a micro-batch)"
        )
    lines += [f"  would fit: {way}" for way in _ways_out(capture, request, smallest)]
    return InfeasibleError("\n".join(lines), budget_bytes=request.budget_bytes, smallest_peak_bytes=peak)


def _ways_out(capture: Capture, request: Request, smallest: Estimate) -> Iterator[str]:
    """Changes that would fit, none of which is made unasked: they change the mathematics or the budget."""
    settings = smallest.settings
    tried = [
        (f"precision={str(precision)!r}", replace(settings, precision=precision))
        for precision in (Precision.BF16, Precision.FP16)
        if precision not in request.precisions and request.device.supports(precision)
    ][:1]
    if request.optimizer is None:
        tried += [(f"optimizer={name!r}", replace(settings, optimizer=name)) for name in ("adafactor", "sgd")]
    for label, changed in tried:
        try:
            estimate = _estimate(capture(changed), request)
        except CaptureError:
            continue
        if estimate.predicted_peak_device_bytes <= request.budget_bytes:
            yield f"{label} ({format_bytes(estimate.predicted_peak_device_bytes)} predicted)"
    yield f"a budget of {format_bytes(smallest.predicted_peak_device_bytes)}"


def _estimate(trace: Trace, request: Request) -> Estimate:
    return estimate_trace(trace, request.device, capacity_bytes=NO_LIMIT_BYTES)


def _must_stay_whole(request: Request, plain: Trace) -> bool:
    """Whether splitting the batch would change the mathematics and is not permitted."""
    return (
        bool(plain.batch_coupled_modules)
        and not request.splits_coupled_batches
        and request.micro_batch_size is None
    )


def _permitted_sizes(request: Request, plain: Trace) -> tuple[int, ...]:
    """Micro-batches to search."""
    if _must_stay_whole(request, plain):
        return (request.global_batch_size,)
    return request.micro_batch_sizes()


def _what_splitting_changes(settings: Settings, plain: Trace, request: Request) -> list[str]:
    """What is not the same as in plain training, if the batch is split."""
    if settings.gradient_accumulation_steps == 1:
        return []
    changes = []
    if not request.weighs_by_count:
        changes.append(
            "The loss is taken for a mean over samples. If it is one over something else, such as the tokens "
            "that are not ignored, say so by Job(count=...): else micro-batches are weighted wrongly."
        )
    if plain.batch_coupled_modules:
        changes.append(
            f"{len(plain.batch_coupled_modules)} BatchNorm layers normalise over micro-batches of "
            f"{settings.micro_batch_size}, not over the global batch, and update their running statistics "
            f"{settings.gradient_accumulation_steps} times a step."
        )
    if any(op.random for op in plain.ops):
        changes.append(
            "Random layers (dropout) draw other numbers for a split batch: the same distribution, "
            "not the same values."
        )
    return changes


def _alternative(label: str, estimate: Estimate, request: Request) -> Alternative:
    return Alternative(
        label=label,
        settings=estimate.settings,
        predicted_peak_reserved_bytes=estimate.predicted_peak_reserved_bytes,
        predicted_step_seconds=estimate.predicted_step_seconds,
        fits=estimate.predicted_peak_device_bytes <= request.budget_bytes,
    )


def _all(units: tuple[str, ...], action: Action) -> tuple[UnitAction, ...]:
    return tuple(UnitAction(fqn=unit, action=action) for unit in units)


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(d for d in range(number, 0, -1) if number % d == 0)
