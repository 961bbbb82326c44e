"""What becomes of a job: estimate → plan → apply → measure, each beside what really happens, and a verdict.

The truth of memory is `truth.py`'s, of the mathematics a step as one writes it by hand: loss, backward, update.
Recomputing must give the same gradients to the last bit. Splitting sums in another order: what that may change
is the bound that brimful's certificates state. Where random numbers are drawn a split batch gets others; then
losses and gradients are compared over several seeds by their size, which a loss that is scaled or compares
samples betrays.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

import brimful as bf
from brimful.devices import Device, find_device
from brimful.errors import BrimfulError
from job_zoo.case import JobCase
from job_zoo.steps import Stepped, plain_peak_bytes, planned_peak_bytes, seed_all, stepped

CLOSE_FRACTION = 0.01
"""A larger error of a prediction is to be named."""
ROUNDINGS, HALF_ROUNDINGS = 1000, 8
"""Splitting may change a number by so many roundings of its tensor's largest, as `bf.verify` states for
float32; and by so many in 16 bits."""
SMALL_GRADIENT = 1e-3
"""A gradient whose largest entry is less than this part of the largest of all counts as if it were so large:
that of a key's bias is nothing but rounding, as attention does not depend on it."""
SEEDS = 4
"""Over which random jobs are compared by size."""
SMALL_LOSS = 0.01
"""A smaller loss is compared as if it were so large."""
LOSS_RATIOS, GRADIENT_RATIOS = (0.93, 1.07), (0.9, 1.11)
"""What a random job's mean loss and gradient norm may be under a plan, over the baseline's: wide enough for
other random numbers, too narrow for a sum or a comparison of samples of a batch that is split."""

SUPPORTED, REFUSED, WARNED, WRONG = "supported", "refused", "warned", "wrong"

Result = TypeVar("Result")


@dataclass(slots=True, kw_only=True)
class PlanRow:
    """A plan, and what came of it."""

    settings: str
    micro_batch_size: int
    budget_bytes: int
    predicted_bytes: int
    true_bytes: int
    is_chunked: bool
    """Whether the loss is computed in chunks, which sums in another order too."""
    is_bitwise: bool = False
    largest_difference: float | None = None
    """Of any gradient or buffer, over its tensor's largest entry; None where random numbers differ."""
    where: str = ""
    bound: float = 0.0
    loss_ratio: float = math.nan
    """Loss under the plan over the baseline's; where random numbers differ, of the means over some seeds."""
    gradient_ratio: float = math.nan
    certificate: str = ""
    """What `bf.verify` says, where a batch is split."""


@dataclass(slots=True, kw_only=True)
class Row:
    """A line of the table."""

    name: str
    kind: str
    samples: int
    status: str = ""
    why: str = ""
    """What is wrong, or the sentence of the refusal, or the warning."""
    draws: bool = False
    """Whether a step draws random numbers."""
    true_bytes: int | None = None
    """Peak of a plain step, with all that is held besides."""
    predicted_bytes: int | None = None
    error_fraction: float | None = None
    measured_bytes: int | None = None
    """By `bf.measure`."""
    named: str = ""
    """As in `JobCase`."""
    uncertain: tuple[str, ...] = ()
    """What the estimate says it does not know well."""
    free: PlanRow | None = None
    """Of the plan for the budget alone."""
    pinned: PlanRow | None = None
    """Of the plan with the whole batch as one micro-batch; None where `free` is one."""
    warned: list[str] = field(default_factory=list)
    """What brimful warned of as the plans were applied and took their first steps."""
    refusals: dict[str, str] = field(default_factory=dict)
    """By what was asked."""
    wrongs: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    """What would be wrong if brimful did not warn of it."""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The record's own names."""
        return asdict(self)


def examine(case: JobCase) -> Row:
    """Run a job through everything and judge it."""
    row = Row(name=case.name, kind=case.kind, samples=case.samples, named=case.named)
    began = time.perf_counter()
    gc.freeze()  # memory is counted after collecting garbage, which goes through all that is imported else
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            if case.gpu:
                _foresee(case, row)
            else:
                _examine(case, row)
    finally:
        gc.unfreeze()
    _judge(case, row)
    row.seconds = round(time.perf_counter() - began, 2)
    return row


def _foresee(case: JobCase, row: Row) -> None:
    """What is said of a GPU that is not here."""
    job, device, size = case.job(), find_device(case.gpu), case.samples
    estimate = _tried(row, "estimate", lambda: bf.estimate(job, device, micro_batch_size=size))
    if estimate is not None:
        row.predicted_bytes, row.uncertain = estimate.predicted_peak_allocated_bytes, estimate.uncertain
    if job.loop is None:
        _tried(row, "plan", lambda: bf.plan(job, device, budget=case.budget, global_batch_size=size))


def _examine(case: JobCase, row: Row) -> None:
    seed_all(0)
    job, device, whole = case.job(), find_device("cpu"), bf.Settings(micro_batch_size=case.samples)
    estimate = _tried(row, "estimate", lambda: bf.estimate(job, device, micro_batch_size=case.samples))
    if estimate is not None:
        row.predicted_bytes, row.uncertain = estimate.predicted_peak_allocated_bytes, estimate.uncertain_ops
    row.true_bytes = _tried(row, "plain step", lambda: plain_peak_bytes(case))
    if row.predicted_bytes is not None and row.true_bytes is not None:
        row.error_fraction = row.predicted_bytes / row.true_bytes - 1
    measured = _tried(row, "measure", lambda: bf.measure(job, whole, "cpu"))
    if measured is not None:
        row.measured_bytes = measured.measured_peak_allocated_bytes
    if job.loop is not None:
        return
    _tried(row, "apply", lambda: stepped(case, whole))
    plan = _planned(case, row, job, device, "plan", {})
    if plan is None:
        return
    row.free = _carried_out(case, row, plan, "plan")
    if plan.settings.micro_batch_size < case.samples:
        pinned = _planned(case, row, job, device, "pinned plan", {"micro_batch_size": case.samples})
        if pinned is not None:
            row.pinned = _carried_out(case, row, pinned, "pinned plan")


def _planned(
    case: JobCase, row: Row, job: bf.Job, device: Device, what: str, pins: dict[str, int]
) -> bf.Plan | None:
    """The plan for the case's budget; pinned, where that is too little, for the least that is not and 1 %."""

    def plan(budget: str | int) -> bf.Plan:
        return bf.plan(job, device, budget=budget, global_batch_size=case.samples, **pins)

    def plan_or_least() -> bf.Plan:
        try:
            return plan(case.budget)
        except bf.InfeasibleError as error:
            if not pins:
                raise
            return plan(math.ceil(error.smallest_peak_bytes * (1 + CLOSE_FRACTION)))

    return _tried(row, what, plan_or_least)


def _carried_out(case: JobCase, row: Row, plan: bf.Plan, what: str) -> PlanRow | None:
    """A plan applied: its memory, its mathematics, and what brimful itself says of them."""
    true_bytes = _tried(row, what, lambda: planned_peak_bytes(case, plan, row.warned))
    if true_bytes is None:
        return None
    found = PlanRow(
        settings=in_words(plan.settings),
        micro_batch_size=plan.settings.micro_batch_size,
        budget_bytes=plan.budget_bytes,
        predicted_bytes=plan.predicted_peak_device_bytes,
        true_bytes=true_bytes,
        is_chunked=plan.settings.chunked_loss is not None,
    )
    is_split = found.micro_batch_size < case.samples
    pairs = [(stepped(case, None), stepped(case, plan))]
    row.draws = row.draws or pairs[0][0].draws
    if row.draws and is_split:
        pairs += [(stepped(case, None, seed=seed), stepped(case, plan, seed=seed)) for seed in range(1, SEEDS)]
    else:
        _note_difference(*pairs[0], found)
    found.loss_ratio = _ratio([planned.loss for _, planned in pairs], [plain.loss for plain, _ in pairs])
    found.gradient_ratio = _ratio(
        [planned.gradient_norm for _, planned in pairs], [plain.gradient_norm for plain, _ in pairs]
    )
    if is_split:
        certificate = _tried(row, "verify", lambda: bf.verify(case.job(), plan))
        found.certificate = "" if certificate is None else str(certificate)
    return found


def _note_difference(plain: Stepped, planned: Stepped, found: PlanRow) -> None:
    """The gradient or buffer that differs most, in roundings."""
    if plain.values.keys() != planned.values.keys():
        found.where = sorted(plain.values.keys() ^ planned.values.keys())[0]
        found.largest_difference = math.inf
        return
    gradients = [value for name, value in plain.values.items() if name.startswith("the gradient")]
    off = abs(plain.loss - planned.loss) / max(abs(plain.loss), SMALL_LOSS)
    found.largest_difference, found.where = off if math.isfinite(off) else math.inf, "the loss"
    found.bound = _bound(torch.empty((), dtype=plain.dtype))
    smallest = SMALL_GRADIENT * max((_largest(value) for value in gradients), default=0.0)
    found.is_bitwise = plain.loss == planned.loss
    worst = found.largest_difference / found.bound
    for name, expected in plain.values.items():
        value = planned.values[name]
        found.is_bitwise &= _are_equal(expected, value)
        difference, bound = _difference(expected, value, smallest), _bound(expected)
        if difference / bound > worst:
            found.largest_difference, found.where, found.bound = difference, name, bound
            worst = difference / bound


def _largest(value: Tensor) -> float:
    value = value.to_dense() if value.is_sparse else value
    return float(value.abs().max()) if value.numel() else 0.0


def _are_equal(a: Tensor, b: Tensor) -> bool:
    if a.is_sparse or b.is_sparse:
        a, b = a.to_dense(), b.to_dense()
    return a.dtype == b.dtype and torch.equal(a, b)


def _difference(expected: Tensor, found: Tensor, smallest: float) -> float:
    if expected.is_sparse or found.is_sparse:
        expected, found = expected.to_dense(), found.to_dense()
    if expected.shape != found.shape:
        return math.inf
    if not expected.numel() or torch.equal(expected, found):
        return 0.0
    wide = torch.complex128 if expected.is_complex() else torch.float64
    difference = float((expected.to(wide) - found.to(wide)).abs().max())
    scale = max(_largest(expected), smallest, torch.finfo(torch.float32).tiny)
    return difference / scale if math.isfinite(difference) else math.inf


def _bound(value: Tensor) -> float:
    if not (value.is_floating_point() or value.is_complex()):
        return ROUNDINGS * torch.finfo(torch.float32).eps
    eps = torch.finfo(value.dtype).eps
    return eps * (HALF_ROUNDINGS if value.dtype in (torch.bfloat16, torch.float16) else ROUNDINGS)


def _ratio(planned: Sequence[float], plain: Sequence[float]) -> float:
    below = statistics.fmean(plain)
    return statistics.fmean(planned) / below if below else math.nan


def in_words(settings: bf.Settings) -> str:
    """What a plan does, in a line."""
    actions = [str(unit.action) for unit in settings.units if unit.fqn in settings.changed]
    said = [f"{settings.micro_batch_size} × {settings.gradient_accumulation_steps}"]
    said += [f"{actions.count(action)} {action}" for action in dict.fromkeys(actions)]
    said += ["chunked loss"] if settings.chunked_loss is not None else []
    return ", ".join(said)


def _tried(row: Row, what: str, action: Callable[[], Result]) -> Result | None:
    """What an action returns; None, noted in the row, if it raises."""
    try:
        return action()
    except BrimfulError as error:
        row.refusals[what] = f"{type(error).__name__}: {error}"
    except Exception as error:  # whatever it is, a user gets it
        first = (str(error).strip() or "(no message)").splitlines()[0]
        row.wrongs.append(f"{what} raises {type(error).__name__}: {first}")
    return None


def _judge(case: JobCase, row: Row) -> None:
    """The status and why."""
    _judge_figure(case, row, "predicted", row.predicted_bytes)
    _judge_figure(case, row, "bf.measure", row.measured_bytes)
    for what, found in (("the plan", row.free), ("the pinned plan", row.pinned)):
        if found is not None:
            _judge_memory(case, row, what, found)
            _judge_mathematics(case, row, what, found)
    of_results = [each for each in row.warned if not each.startswith("a batch is larger than planned")]
    if of_results and not row.doubts and not row.draws:
        row.wrongs.append(f"warns of an equal plan: {of_results[0]}")
    if row.wrongs:
        row.status, row.why = WRONG, "; ".join(row.wrongs)
    elif row.refusals:
        row.status, row.why = REFUSED, next(iter(row.refusals.values()))
    elif row.doubts and row.warned:
        row.status, row.why = WARNED, " ".join(row.warned)
    elif row.doubts:
        row.status, row.why = WRONG, "; ".join(row.doubts)
    else:
        row.status = SUPPORTED


def _judge_figure(case: JobCase, row: Row, what: str, size_bytes: int | None) -> None:
    if size_bytes is None or row.true_bytes is None:
        return
    error = size_bytes / row.true_bytes - 1
    if abs(error) > CLOSE_FRACTION and not case.named:
        row.wrongs.append(f"{what} {error:+.1%}")


def _judge_memory(case: JobCase, row: Row, what: str, found: PlanRow) -> None:
    over = found.true_bytes / found.budget_bytes - 1
    error = found.predicted_bytes / found.true_bytes - 1
    if over > 0 and not case.named:
        row.wrongs.append(f"{what} is {over:.1%} over its budget ({found.settings})")
    elif abs(error) > CLOSE_FRACTION and not case.named:
        row.wrongs.append(f"{what} is predicted {error:+.1%} ({found.settings})")


def _judge_mathematics(case: JobCase, row: Row, what: str, found: PlanRow) -> None:
    is_split = found.micro_batch_size < case.samples
    if not is_split and not found.is_chunked:
        if not found.is_bitwise:
            row.wrongs.append(f"{what} changes {found.where} by {found.largest_difference:.2g}")
        return
    before = len(row.doubts)
    if found.largest_difference is None:
        for name, ratio, (low, high) in (
            ("loss", found.loss_ratio, LOSS_RATIOS),
            ("gradient", found.gradient_ratio, GRADIENT_RATIOS),
        ):
            if not low <= ratio <= high:
                row.doubts.append(f"{what} trains on {ratio:.2f} times the {name} ({found.settings})")
    elif found.largest_difference > found.bound:
        row.doubts.append(f"{what} changes {found.where} by {found.largest_difference:.2g} ({found.settings})")
    if len(row.doubts) == before and "NOT the same" in found.certificate:
        failed = next(line.strip() for line in found.certificate.splitlines() if "BEYOND" in line)
        row.wrongs.append(f"bf.verify says of an equal plan: {failed}")
