"""What a page shows of each result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from brimful.cost import work_seconds_by_module
from brimful.devices import Device
from brimful.memory import ModuleShare, Moment, memory_timeline, predict_memory
from brimful.planner import Plan
from brimful.prediction import Estimate
from brimful.report.at_peak import block_listing, category_listing, peak_place, place_of
from brimful.report.layout import Part, Remark, Row
from brimful.report.measurements import MeasuredSoFar, gauges, predicted_beside_measured
from brimful.report.page.charts import Chart, Series, Unit, curve
from brimful.report.page.document import Branch, Model, Page, Section, Tree, UnitBox
from brimful.report.plans import estimate_report, plan_report
from brimful.report.training import training_report
from brimful.results import (
    EpochRecord,
    StepRecord,
    TrainingResult,
    ValidationRecord,
    median_step_seconds,
)
from brimful.settings import Action, UnitAction
from brimful.trace import Category, Phase, Trace
from brimful.trace.modules import shown_module
from brimful.utils.quantities import format_bytes, format_seconds

_LEAST_SHARE = 0.001
"""Part of the peak below which a module is not shown. A choice."""

_MOST_BRANCHES = 2000
"""Modules that are shown, those that hold most. A choice: 0.5 MB."""

_DEEPEST = 40
"""Depth in the module tree to which modules are shown. A choice."""

_LONGEST_NAME = 120
"""Characters of a name that is shown many times. A choice."""

_WIDE = 16
"""Ratio of the largest to the smallest budget above which their axis is logarithmic. A choice."""

_MOST_UNITS = 500
"""Units that are shown. A choice."""


def trace_page(trace: Trace, estimate: Estimate | None = None, device: Device | None = None) -> Page:
    """A captured step: its memory, and on a device its time.

    `estimate` is that of the trace on `device`.
    """
    if estimate is not None:
        report = estimate_report(estimate)
        summary = Section(title="Estimate", content=report.parts)
        context_bytes = estimate.predicted_peak_device_bytes - estimate.predicted_peak_reserved_bytes
        limit = _Limit(estimate.capacity_bytes - context_bytes, _of_device("capacity", context_bytes))
        return Page(title=report.heading, sections=(summary, *_trace_sections(trace, device, limit)))
    memory = predict_memory(trace)
    peak_bytes = memory.peak_allocated_bytes
    place = peak_place(memory.peak_phase, memory.peak_module, memory.peak_op)
    held = (category_listing(place, memory.breakdown, peak_bytes), block_listing(memory.largest))
    note = Remark("note", "without a device there are no times: name it with --device")
    return Page(
        title=f"{trace.job}: {format_bytes(peak_bytes)} in tensors at the peak, {trace.settings.describe()}",
        sections=(Section(title="Peak", content=(*held, note)), *_trace_sections(trace)),
    )


def plan_page(plan: Plan, trace: Trace | None = None, device: Device | None = None, note: str = "") -> Page:
    """A plan; with the trace of its step also its memory and time. `note` says why there is none."""
    report = plan_report(plan)
    summary = Section(title="Plan", content=report.parts)
    context_bytes = plan.predicted_peak_device_bytes - plan.predicted_peak_reserved_bytes
    limit = _Limit(plan.budget_bytes - context_bytes, _of_device("budget", context_bytes))
    sections = (summary, *_sections_of_plan(plan), *_sections_of_step(trace, device, limit, note))
    return Page(title=report.heading, sections=sections)


def run_page(
    result: TrainingResult,
    plan: Plan | None,
    trace: Trace | None = None,
    device: Device | None = None,
    note: str = "",
) -> Page:
    """A training run: predicted beside measured, its curves, and its plan if it had one."""
    report = training_report(result)
    parts = [each for each in report.parts if not (isinstance(each, Row) and each.label == "loss")]  # a curve
    sections = [
        Section(title="Run", content=(*gauges(result, result.budget_bytes), *parts)),
        *_curves(result.steps, result.validations, result.epochs, plan),
    ]
    if plan is not None:
        sections += [Section(title="Plan", content=plan_report(plan).parts), *_sections_of_plan(plan)]
        measured_bytes = result.measured_peak_allocated_bytes
        limit = None if measured_bytes is None else _Limit(measured_bytes, "measured peak")
        sections += _sections_of_step(trace, device, limit, note)
    return Page(title=report.heading, sections=tuple(sections))


class _Limit(NamedTuple):
    """A line in the chart of memory."""

    size_bytes: int
    label: str


def _of_device(what: str, context_bytes: int) -> str:
    return f"{what}, less the CUDA context" if context_bytes else what


def _trace_sections(
    trace: Trace, device: Device | None = None, limit: _Limit | None = None
) -> Iterator[Section]:
    """Memory over a step and by module, and on a device the seconds of its work."""
    yield from timeline_sections(memory_timeline(trace), limit)
    seconds = {} if device is None else work_seconds_by_module(trace, device)
    yield from module_sections(predict_memory(trace).modules, seconds)


def unfinished_run_page(
    name: str,
    steps: Sequence[StepRecord],
    validations: Sequence[ValidationRecord],
    epochs: Sequence[EpochRecord],
    plan: Plan | None,
    trace: Trace | None = None,
    device: Device | None = None,
    note: str = "",
) -> Page:
    """A training run that has not ended, or was killed: its curves so far, and its plan if it has one."""
    count = len(steps)
    sections = [*_curves(steps, validations, epochs, plan)]
    if plan is not None:
        compared = Section(title="Run", content=tuple(_compared_so_far(plan, steps, epochs)))
        sections = [compared, *sections, *plan_page(plan, trace, device, note).sections]
    if not sections:
        remark = Remark("", "curves follow from the second step on, in a report that is made later")
        sections = [Section(title="Run", content=(remark,))]
    title = f"{name}: {count} step{'s' if count != 1 else ''} so far"
    return Page(title=title, sections=tuple(sections))


def _compared_so_far(plan: Plan, steps: Sequence[StepRecord], epochs: Sequence[EpochRecord]) -> Iterator[Part]:
    """What a plan predicts beside what its run has measured."""

    def highest(name: str) -> int | None:
        return max((size for each in epochs if (size := getattr(each, name)) is not None), default=None)

    average_bytes = max((each.average_bytes for each in epochs), default=0)
    found = MeasuredSoFar(
        predicted_peak_allocated_bytes=plan.predicted_peak_allocated_bytes + average_bytes,
        measured_peak_allocated_bytes=highest("measured_peak_allocated_bytes"),
        predicted_peak_reserved_bytes=plan.predicted_peak_reserved_bytes + average_bytes,
        measured_peak_reserved_bytes=highest("measured_peak_reserved_bytes"),
        predicted_peak_device_bytes=plan.predicted_peak_device_bytes + average_bytes,
        measured_peak_device_bytes=highest("measured_peak_device_bytes"),
        predicted_step_seconds=plan.predicted_step_seconds,
        measured_step_seconds=median_step_seconds(steps, plan.settings.global_batch_size),
    )
    yield from gauges(found, plan.budget_bytes)
    yield predicted_beside_measured(found)
    if found.measured_peak_allocated_bytes is None:
        yield Remark("note", "the peak is known when the first epoch has ended")


def timeline_sections(timeline: Sequence[Moment], limit: _Limit | None = None) -> Iterator[Section]:
    """Memory over a step, by category."""
    if timeline:
        yield Section(title="Memory over the step", content=(_memory_chart(timeline, limit),))


def module_sections(shares: Sequence[ModuleShare], seconds: Mapping[str, float]) -> Iterator[Section]:
    """The modules as a tree with the bytes that they hold at the peak, and the seconds of work where known."""
    if shares:
        of_time = ", and the time that the device works for it in a step" if seconds else ""
        what = f"What each module holds at the peak, its submodules included{of_time}."
        tree = Tree(_tree(shares, seconds))
        yield Section(title="Modules", content=(Remark("", what), tree))


def _sections_of_step(
    trace: Trace | None, device: Device | None, limit: _Limit | None, note: str
) -> Iterator[Section]:
    if trace is not None:
        yield from _trace_sections(trace, device, limit)
    elif note:
        yield Section(title="Memory over the step", content=(Remark("note", note),))


def _sections_of_plan(plan: Plan) -> Iterator[Section]:
    units = plan.settings.units
    if units:
        boxes = tuple(map(_box, units[:_MOST_UNITS]))
        more = f" The first {_MOST_UNITS} of {len(units)}." if len(units) > _MOST_UNITS else ""
        what = Remark("", f"{plan.settings.describe()}.{more}")
        yield Section(title="Model", content=(what, Model(boxes)))
    if len(plan.budget_curve) > 1:
        yield Section(title="Budget against throughput", content=(_budget_chart(plan),))


_KINDS = {Action.KEEP: "kept", Action.OFFLOAD: "offloaded"}


def _box(unit: UnitAction) -> UnitBox:
    what = {
        Action.KEEP: "kept",
        Action.RECOMPUTE: "recomputed",
        Action.NEST: "nested: recomputed with its input",
        Action.SAVE: f"recomputed, but {', '.join(unit.saved)} saved",
        Action.OFFLOAD: "offloaded",
    }[unit.action]
    most = unit.most_offloaded_bytes
    if most is not None:
        what += f", {format_bytes(most)} at most"
    kind = _KINDS.get(unit.action, "recomputed")
    return UnitBox(name=_short(unit.fqn) or "the model itself", action=what, kind=kind)


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"…{name[1 - _LONGEST_NAME :]}"


def _budget_chart(plan: Plan) -> Chart:
    samples = plan.settings.global_batch_size
    here = (plan.budget_bytes, plan.predicted_step_seconds)
    points = sorted({*((each.budget_bytes, each.predicted_step_seconds) for each in plan.budget_curve), here})
    now = samples / plan.predicted_step_seconds
    return Chart(
        title="Predicted throughput by budget",
        summary=(
            f"{now:.4g} samples a second with the plan's budget of {format_bytes(plan.budget_bytes)}, marked; "
            f"{samples / points[0][1]:.4g} with {format_bytes(points[0][0])}, "
            f"{samples / points[-1][1]:.4g} with {format_bytes(points[-1][0])}"
        ),
        x_label="budget",
        x=tuple(float(budget) for budget, _ in points),
        x_unit=Unit.BYTES,
        x_is_log=points[-1][0] > _WIDE * points[0][0],
        unit=Unit.RATE,
        series=(Series(label="throughput", values=tuple(samples / seconds for _, seconds in points)),),
        mark=points.index(here),
    )


def _curves(
    steps: Sequence[StepRecord],
    validations: Sequence[ValidationRecord],
    epochs: Sequence[EpochRecord],
    plan: Plan | None,
) -> Iterator[Section]:
    """The curves of a run, in a section of their own."""
    if len(steps) > 1:
        yield Section(title="Curves", content=tuple(_charts(steps, validations, epochs, plan)))


def _charts(
    steps: Sequence[StepRecord],
    validations: Sequence[ValidationRecord],
    epochs: Sequence[EpochRecord],
    plan: Plan | None,
) -> Iterator[Chart]:
    numbers = [float(each.step) for each in steps]
    yield curve("Loss", "step", numbers, Unit.NUMBER, {"loss": [each.loss for each in steps]})
    if len(validations) > 1:
        at = [float(each.step) for each in validations]
        names = dict.fromkeys(name for each in validations for name in each.metrics)
        losses = [each.loss for each in validations]
        yield curve("Validation loss", "step", at, Unit.NUMBER, {"loss": losses})
        for name in names:
            values = [each.metrics.get(name) for each in validations]
            yield curve(f"Validation {name}", "step", at, Unit.NUMBER, {name: values})
    times = {
        "step": [each.seconds for each in steps],
        "waiting for data": [each.data_seconds for each in steps],
    }
    drawn = curve("Step time", "step", numbers, Unit.SECONDS, times)
    if plan is not None:
        seconds = plan.predicted_step_seconds
        summary = f"{drawn.summary}; {format_seconds(seconds)} predicted by the plan"
        drawn = replace(drawn, limit=seconds, limit_label="predicted step", summary=summary)
    yield drawn
    peaks = [each for each in epochs if each.measured_peak_allocated_bytes is not None]
    if len(peaks) > 1:
        numbers = [float(each.epoch) for each in peaks]
        measured = {"allocated": [each.measured_peak_allocated_bytes for each in peaks]}
        if any(each.measured_peak_device_bytes for each in peaks):
            measured |= {
                "reserved": [each.measured_peak_reserved_bytes for each in peaks],
                "on the device": [each.measured_peak_device_bytes for each in peaks],
            }
        yield curve("Measured peak by epoch", "epoch", numbers, Unit.BYTES, measured)


def _memory_chart(timeline: Sequence[Moment], limit: _Limit | None) -> Chart:
    peak = max(range(len(timeline)), key=lambda at: timeline[at].allocated_bytes)
    highest = timeline[peak]
    columns = zip(Category, zip(*(each.held_bytes for each in timeline), strict=True), strict=True)
    held = [(category, column) for category, column in columns if any(column)]
    where = peak_place(highest.phase, highest.module, highest.op, highest.line)
    line = "" if limit is None else f"; {limit.label}: {format_bytes(limit.size_bytes)}"
    return Chart(
        title="Memory in tensors by category",
        summary=(
            f"Peak {format_bytes(highest.allocated_bytes)} in step {highest.step + 1} ({where}), marked; "
            "each point is the highest of its part of "
            f"{timeline[-1].position + 1} allocations and frees in their order{line}"
        ),
        x_label="allocations and frees",
        x=tuple(float(each.position) for each in timeline),
        unit=Unit.BYTES,
        series=tuple(
            Series(label=category.replace("_", " "), values=column, colour=place_of(category))
            for category, column in held
        ),
        is_stacked=True,
        mark=peak,
        limit=None if limit is None else float(limit.size_bytes),
        limit_label="" if limit is None else limit.label,
        bands=tuple(_bands(timeline)),
        details=tuple(map(_details, timeline)),
    )


_SHORT_PHASES = {Phase.EMBEDDING: "emb", Phase.FORWARD: "fwd", Phase.BACKWARD: "bwd", Phase.OPTIMIZER: "opt"}


def _bands(timeline: Sequence[Moment]) -> Iterator[tuple[int, str, str]]:
    at = 0
    for phase, moments in groupby(timeline, key=lambda each: each.phase):
        yield at, str(phase), _SHORT_PHASES.get(phase, "")
        at += sum(1 for _ in moments)


def _details(moment: Moment) -> str:
    where = peak_place(moment.phase, moment.module and _short(moment.module), moment.op, moment.line)
    blocks = (
        f"{format_bytes(each.held_bytes)} {each.category.replace('_', ' ')}: {_short(each.label)}"
        f"{f' in {_short(shown_module(each.module))}' if each.module else ''}"
        f"{f' ({each.line})' if each.line else ''}"
        for each in moment.largest
    )
    return "\n".join((f"step {moment.step + 1}, {where}", *blocks))


def _tree(shares: Sequence[ModuleShare], seconds: Mapping[str, float]) -> Branch:
    whole = max((share.held_bytes for share in shares if not share.fqn), default=0) or 1
    large = (share for share in shares if share.held_bytes >= _LEAST_SHARE * whole)
    near = [share for share in large if share.fqn.count(".") < _DEEPEST]
    shown = sorted(near, key=lambda share: -share.held_bytes)[:_MOST_BRANCHES]
    names = {share.fqn for share in shown}
    inside: dict[str, list[ModuleShare]] = {}
    for share in shares:  # in the order of the module tree
        if share.fqn and share.fqn in names:
            inside.setdefault(share.fqn.rpartition(".")[0], []).append(share)

    def branch(share: ModuleShare) -> Branch:
        return Branch(
            name=_short(share.fqn.rpartition(".")[2]) or "the whole model",
            class_name=_short(share.class_name),
            held_bytes=share.held_bytes,
            seconds=seconds.get(share.fqn),
            share=min(share.held_bytes / whole, 1.0),
            branches=tuple(map(branch, inside.get(share.fqn, ()))),
        )

    root = next((share for share in shares if not share.fqn), None)
    return branch(root or ModuleShare(fqn="", class_name="", held_bytes=0, depth=0))
