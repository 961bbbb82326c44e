"""What becomes of a public script: estimate → plan in little more than the least budget → apply → three steps.

Beside each stands what happens without brimful: the peak that torch's profiler counts of a step by hand, and
three steps by hand from the same weights, batches and random numbers.
"""

from __future__ import annotations

import gc
import json
import math
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import brimful as bf
from brimful.errors import BrimfulError
from brimful.torch_utils.replaced import replaced
from job_zoo.case import JobCase
from job_zoo.examine import GRADIENT_RATIOS, LOSS_RATIOS, SEEDS, in_words
from job_zoo.steps import Trained, plain_peak_bytes, planned_peak_bytes, seed_all, stepped, trained
from public.case import SCRIPTS, Script, imported_from

STEPS = 3
CLOSE_FRACTION = 0.005
"""A larger error of an estimate must be stated in words beside it."""
BUDGET_FRACTION = 1.1
"""Of the least feasible budget."""
ROUNDINGS = 1000
"""By so many roundings of float32 a loss may differ where a batch is split or a loss is computed in chunks, as
`bf.verify` states."""
SEARCH_FRACTION = 0.02
"""To this the least feasible budget is searched, where no refusal names it."""
CHANGE_FRACTION = 0.001
"""By so much of how far the steps moved them may weights and buffers differ where something is summed in
another order."""
NUDGES = 4
"""Or by so many times what steps by hand differ by if each weight begins one rounding off. Adam divides by a
gradient's own size, so where a gradient is nothing but rounding, as that of a bias before BatchNorm, so is the
move. `bf.verify` permits so much between two runs of one step."""
NOT_SURE = "Not sure about: "
"""A plan's note of what its prediction does not know."""
SMALL_LOSS = 0.01
"""A smaller loss is compared as if it were so large."""

EQUAL, ROUNDED, RANDOM, UNCERTAIN = "equal", "rounded", "random", "uncertain"
REFUSED, WARNED, WRONG = "refused", "warned", "wrong"


@dataclass(slots=True, kw_only=True)
class Carried:
    """A plan, and what came of it."""

    settings: str
    micro_batch_size: int
    budget_bytes: int
    predicted_bytes: int
    planning_seconds: float
    true_bytes: int
    verdict: str = ""
    """EQUAL to the last bit; ROUNDED: within rounding, as what is summed in another order may be; RANDOM: other
    random numbers, and equal without dropout, or losses and gradients of the same size over some seeds;
    UNCERTAIN: over its budget, and a note says what is not known; WARNED: different, and said to be."""
    is_without_dropout: bool = False
    """Whether the steps below are without dropout, which draws other numbers where a batch is split."""
    losses: tuple[float, ...] = ()
    losses_by_hand: tuple[float, ...] = ()
    loss_difference: float = math.nan
    """The largest of a step's, over its loss by hand."""
    weight_difference: float = math.nan
    """Of all weights after the steps, over how far the steps by hand moved them."""
    buffer_difference: float = math.nan
    """Of all buffers, likewise."""
    nudged_weight_difference: float | None = None
    """What of it one rounding of the first weights brings about, where it is large."""
    nudged_buffer_difference: float | None = None
    loss_ratio: float | None = None
    """Where random numbers differ: the first step's loss over that by hand, over some seeds."""
    gradient_ratio: float | None = None
    warned: list[str] = field(default_factory=list)
    notes: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class Row:
    """A line of the table."""

    name: str
    repository: str
    commit: str
    file: str
    samples: int
    verdict: str = ""
    """The plan's, or of the refusal; WRONG whatever is silently different, over its budget or a raw error."""
    why: str = ""
    true_bytes: int | None = None
    predicted_bytes: int | None = None
    error_fraction: float | None = None
    uncertain: tuple[str, ...] = ()
    """What the estimate says it does not know well."""
    least_bytes: int | None = None
    """The least feasible budget."""
    plan: Carried | None = None
    whole: Carried | None = None
    """Of the plan with the whole batch as one micro-batch, in its own least budget; None if `plan` is one."""
    refusals: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


def examined(name: str, checkouts: Path) -> dict[str, object]:
    """The row of the script of a name, whose code this process imports."""
    (entry,) = [entry for entry in SCRIPTS if entry.name == name]
    imported_from(entry, checkouts)
    gc.freeze()  # memory is counted after collecting garbage, which goes through all that is imported else
    with redirect_stdout(None), warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        row = json.dumps(asdict(_row(entry)))
        found: dict[str, object] = json.loads(row.replace(f"{checkouts}/", ""))  # a result names no folders
        return found


def _row(entry: Script) -> Row:
    row = Row(
        name=entry.name,
        repository=entry.repository,
        commit=entry.commit,
        file=entry.file,
        samples=entry.samples,
    )
    case = JobCase(name=entry.name, kind="public", job=entry.job, samples=entry.samples)
    began = time.perf_counter()
    try:
        _examine(case, row)
    except BrimfulError as error:
        row.verdict, row.why = REFUSED, f"{type(error).__name__}: {error}"
    except Exception as error:  # whatever it is, a user gets it
        first = (str(error).strip() or "(no message)").splitlines()[0]
        row.verdict, row.why = WRONG, f"raises {type(error).__name__}: {first}"
    row.seconds = round(time.perf_counter() - began, 2)
    return row


def _examine(case: JobCase, row: Row) -> None:
    seed_all(0)
    estimate = bf.estimate(case.job(), "cpu", micro_batch_size=case.samples)
    row.predicted_bytes, row.uncertain = estimate.predicted_peak_allocated_bytes, estimate.uncertain
    row.true_bytes = plain_peak_bytes(case)
    row.error_fraction = row.predicted_bytes / row.true_bytes - 1
    row.plan = _carried_out(case, row, {})
    if row.plan.micro_batch_size < case.samples:
        row.whole = _carried_out(case, row, {"micro_batch_size": case.samples})
    _judge(row)


def _carried_out(case: JobCase, row: Row, pins: dict[str, int]) -> Carried:
    """The plan in little more than the least budget, applied: its memory and its mathematics."""
    job = case.job()
    least_bytes = _least_bytes(job, case.samples, pins)
    if not pins:
        row.least_bytes = least_bytes
    began = time.perf_counter()
    budget_bytes = math.ceil(least_bytes * BUDGET_FRACTION)
    plan = bf.plan(job, "cpu", budget=budget_bytes, global_batch_size=case.samples, **pins)
    seconds = time.perf_counter() - began
    warned: list[str] = []
    found = Carried(
        settings=in_words(plan.settings),
        micro_batch_size=plan.settings.micro_batch_size,
        budget_bytes=plan.budget_bytes,
        predicted_bytes=plan.predicted_peak_device_bytes,
        planning_seconds=round(seconds, 2),
        true_bytes=planned_peak_bytes(case, plan, warned),
        warned=warned,
        notes=plan.notes,
    )
    _compare(case, plan, found)
    return found


def _least_bytes(job: bf.Job, samples: int, pins: dict[str, int]) -> int:
    """The least feasible budget: the smallest predicted peak of all plans, which a refusal names.

    The refusal of a budget below parameters, gradients and optimizer state may name that of some small step,
    which need not be the smallest; then budgets between the two are halved.
    """
    below, above = 1, math.inf
    budget_bytes = below
    while above - below > SEARCH_FRACTION * below:
        try:
            plan = bf.plan(job, "cpu", budget=budget_bytes, global_batch_size=samples, **pins)
        except bf.InfeasibleError as error:
            if "smallest predicted peak" in str(error):
                return error.smallest_peak_bytes
            below, above = budget_bytes, min(above, error.smallest_peak_bytes)
        else:
            above = plan.predicted_peak_device_bytes
        budget_bytes = int(below + above) // 2
    return int(above)


def _compare(case: JobCase, plan: bf.Plan, found: Carried) -> None:
    """Three steps under the plan beside three by hand."""
    by_hand = _note_differences(case, plan, found)
    if not (found.loss_difference or found.weight_difference or found.buffer_difference):
        found.verdict = EQUAL
    elif not _sums_otherwise(case, plan):
        found.verdict = WRONG
    elif by_hand.draws and found.micro_batch_size < case.samples:
        found.verdict = RANDOM if _is_equal_but_for_draws(case, plan, found) else WRONG
    else:
        found.verdict = ROUNDED if _is_within_rounding(case, by_hand, found) else WRONG
    if found.verdict == WRONG and found.warned:
        found.verdict = WARNED
    elif found.verdict != WRONG and found.true_bytes > found.budget_bytes:
        found.verdict = UNCERTAIN if any(NOT_SURE in note for note in found.notes) else found.verdict


def _note_differences(case: JobCase, plan: bf.Plan, found: Carried) -> Trained:
    """Note how far steps under the plan are from those by hand, which are returned."""
    by_hand, planned = trained(case, None, steps=STEPS), trained(case, plan, steps=STEPS)
    found.losses, found.losses_by_hand = planned.losses, by_hand.losses
    found.loss_difference = max(
        abs(loss - expected) / max(abs(expected), SMALL_LOSS)
        for loss, expected in zip(planned.losses, by_hand.losses, strict=True)
    )
    found.weight_difference = difference(by_hand, planned, "weights")
    found.buffer_difference = difference(by_hand, planned, "buffers")
    return by_hand


def _is_equal_but_for_draws(case: JobCase, plan: bf.Plan, found: Carried) -> bool:
    """Whether a split batch trains as the whole one without dropout; if it draws still, by size."""
    with _no_dropout():
        by_hand = _note_differences(case, plan, found)
        found.is_without_dropout = True
        if not by_hand.draws:
            return _is_within_rounding(case, by_hand, found)
    return _is_of_same_size(case, plan, found)


@contextmanager
def _no_dropout() -> Iterator[None]:
    attention = F.scaled_dot_product_attention

    def without_dropout(*inputs: Tensor, **options: Any) -> Tensor:
        return attention(*inputs, **options | {"dropout_p": 0.0})

    with (
        replaced(F, "dropout", lambda input, *_, **__: input),
        replaced(F, "scaled_dot_product_attention", without_dropout),
    ):
        yield


def _is_within_rounding(case: JobCase, by_hand: Trained, found: Carried) -> bool:
    if not found.loss_difference <= ROUNDINGS * torch.finfo(torch.float32).eps:
        return False
    if max(found.weight_difference, found.buffer_difference) <= CHANGE_FRACTION:
        return True
    nudged = trained(case, None, steps=STEPS, is_nudged=True)
    found.nudged_weight_difference = difference(by_hand, nudged, "weights")
    found.nudged_buffer_difference = difference(by_hand, nudged, "buffers")
    return (
        found.weight_difference <= max(CHANGE_FRACTION, NUDGES * found.nudged_weight_difference)
        and found.buffer_difference <= max(CHANGE_FRACTION, NUDGES * found.nudged_buffer_difference)
    )  # fmt: skip


def _sums_otherwise(case: JobCase, plan: bf.Plan) -> bool:
    """Whether a plan may round otherwise: it splits the batch or the loss, or updates by a fused kernel."""
    settings = plan.settings
    return (
        settings.micro_batch_size < case.samples
        or settings.chunked_loss is not None
        or settings.optimizer_implementation is bf.settings.OptimizerImplementation.FUSED
    )


def difference(by_hand: Trained, planned: Trained, what: str) -> float:
    """How far tensors are apart, over how far the steps by hand moved them, in the Euclidean norm of all."""
    apart = moved = 0.0
    for name, expected in by_hand.end[what].items():
        apart += _squares(planned.end[what][name], expected)
        moved += _squares(by_hand.start[what][name], expected)
    return math.sqrt(apart / moved) if moved else math.inf if apart else 0.0


def _squares(one: Tensor, other: Tensor) -> float:
    wide = torch.complex128 if one.is_complex() else torch.float64
    squares = float((one.to(wide) - other.to(wide)).abs().square().sum())
    return squares if math.isfinite(squares) else math.inf


def _is_of_same_size(case: JobCase, plan: bf.Plan, found: Carried) -> bool:
    """Whether losses and gradients are those of steps by hand over some seeds, but for other random numbers."""
    pairs = [(stepped(case, None, seed=seed), stepped(case, plan, seed=seed)) for seed in range(SEEDS)]
    found.loss_ratio, found.gradient_ratio = (
        sum(getattr(planned, of) for _, planned in pairs) / sum(getattr(plain, of) for plain, _ in pairs)
        for of in ("loss", "gradient_norm")
    )
    return (
        LOSS_RATIOS[0] <= found.loss_ratio <= LOSS_RATIOS[1]
        and GRADIENT_RATIOS[0] <= found.gradient_ratio <= GRADIENT_RATIOS[1]
    )


def _judge(row: Row) -> None:
    """The row's verdict and why."""
    wrongs = []
    assert row.error_fraction is not None
    if abs(row.error_fraction) > CLOSE_FRACTION and not row.uncertain:
        wrongs.append(f"the estimate is {row.error_fraction:+.2%} off")
    plans = [(what, plan) for what, plan in (("the plan", row.plan), ("the whole", row.whole)) if plan]
    for what, plan in plans:
        if plan.true_bytes > plan.budget_bytes and plan.verdict != UNCERTAIN:
            wrongs.append(f"{what} takes {plan.true_bytes / plan.budget_bytes:.1%} of its budget")
        if plan.verdict == WRONG:
            wrongs.append(
                f"{what} differs: losses by {plan.loss_difference:.2g}, weights {plan.weight_difference:.2g}, "
                f"buffers {plan.buffer_difference:.2g} ({plan.settings})"
            )
    row.why = "; ".join(wrongs)
    row.verdict = WRONG if wrongs else row.plan.verdict if row.plan else ""
