"""`brimful report`: a result as one HTML file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from brimful.cli.doctor import SNAPSHOTS
from brimful.cli.options import ModelOptions
from brimful.cli.output import report_errors, say
from brimful.cli.sources import find_source, job_of
from brimful.codec import parse_json, read_regular_file
from brimful.errors import BrimfulError, FileFormatError, SaveError, UsageError
from brimful.utils.files import is_directory, is_file, write_file

if TYPE_CHECKING:
    from brimful.devices import Device
    from brimful.planner import Plan
    from brimful.report.page import Page
    from brimful.trace import Trace

_Step = tuple["Trace | None", "Device | None", str]
"""The trace of a plan's step and its device; else why they are not known."""

_NO_STEP: _Step = (None, None, "")

_KINDS = (
    "a run directory (brimful train), a plan (brimful plan --output), a trace (brimful estimate --save-trace), "
    "an estimate (brimful estimate --json), a watched run (brimful run --output) or a CUDA memory snapshot "
    "(.pickle)"
)


def report_page(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|PLAN|ESTIMATE|SNAPSHOT",
            help="A run directory, a plan, a saved trace, an estimate in JSON, what `run --output` wrote, or a "
            "CUDA memory snapshot (.pickle).",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            help="Write the page to this file. With .json it has memory over the step for Perfetto instead, "
            "in .pickle for pytorch.org/memory_viz.",
        ),
    ] = Path("report.html"),
    device: Annotated[
        str | None,
        typer.Option("--device", help="Predict times for this device. Default: the plan's; for a trace none."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="The model of a plan or a run that is not built in, as plan takes it: its code runs, on fake "
            "tensors, to predict memory over the step.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
) -> None:
    """Write a page about a run, a plan or an estimate: one HTML file that needs no network."""
    with report_errors(as_json=False):
        from brimful.report.page import page_html

        if output.exists() and not force:
            raise SaveError(f"{output} is there already. Name another --output, or replace it with --force.")
        if output.suffix in TIMELINES:
            write_file(output, timeline(_trace_of(source, device, model), output.suffix))
        else:
            write_file(output, page_html(page_of(source, device, model)))
        say(f"wrote {output}")


def timeline(trace: Trace, suffix: str) -> str | bytes:
    """Memory over the step of a trace for other viewers."""
    from brimful.memory import memory_timeline
    from brimful.report.timelines import memory_viz_snapshot, perfetto_document

    if suffix == ".pickle":
        return memory_viz_snapshot(trace)
    return json.dumps(perfetto_document(memory_timeline(trace, moments=_EXPORTED_MOMENTS)))


TIMELINES = (".json", ".pickle")
"""Ends of names of files for Perfetto and for memory_viz."""

_EXPORTED_MOMENTS = 10_000
"""Moments of a file for Perfetto. A choice: 2 MB."""


def _trace_of(source: Path, device: str | None, model: str | None) -> Trace:
    """The trace in a file, or that of the step of a plan or a run."""
    from brimful.planner import Plan
    from brimful.trace import Trace

    plan_file = source / "plan.json" if is_directory(source) else source
    if plan_file.suffix != ".gz":
        content = parse_json(read_regular_file(plan_file, what="file"), where=f"the file {plan_file}")
        if isinstance(content, dict) and "brimful_plan" in content:
            trace, _, why_not = _step_of(Plan.load(plan_file), device, model)
            if trace is None:
                raise UsageError(f"{why_not}.")
            return trace
    return Trace.load(source)


def page_of(source: Path, device: str | None = None, model: str | None = None) -> Page:
    """The page of whatever a path names."""
    from brimful.planner import Plan
    from brimful.report import page
    from brimful.trace import Trace

    if is_directory(source):
        return _run_page(source, device, model)
    if source.suffix == ".gz":
        return _trace_page(Trace.load(source), device)
    if source.suffix in SNAPSHOTS:
        from brimful.doctor.snapshot import read_snapshot
        from brimful.doctor.snapshot_text import snapshot_page

        return snapshot_page(source.name, read_snapshot(str(source)))
    where = f"the file {source}"
    if not source.exists():
        raise FileFormatError(f"{where} cannot be read: No such file or directory. Give {_KINDS}.")
    content = read_regular_file(source, what="file")
    try:
        document = parse_json(content, where=where)
    except FileFormatError as error:
        watch = f" Of a script: brimful run --output seen.json {source}" if source.suffix == ".py" else ""
        raise FileFormatError(f"{error} Give {_KINDS}.{watch}") from error
    if not isinstance(document, dict):
        document = {}
    if "brimful_trace" in document:
        return _trace_page(Trace.load(source), device)
    if "brimful_plan" in document:
        plan = Plan.load(source)
        return page.plan_page(plan, *_step_of(plan, device, model))
    if "traceEvents" in document:
        raise FileFormatError(f"{source} is a timeline for Perfetto: open it at ui.perfetto.dev.")
    if "findings" in document:
        return page.watched_file_page(content, where=where)
    if "breakdown" in document:
        return page.estimate_file_page(content, where=where)
    raise FileFormatError(f"{source} is none of what a page is made of: {_KINDS}.")


def _trace_page(trace: Trace, device: str | None) -> Page:
    from brimful.prediction import estimate_trace
    from brimful.profiling.named_device import resolve_device
    from brimful.report.page import trace_page

    if device is None:
        return trace_page(trace)
    target = resolve_device(device)
    return trace_page(trace, estimate_trace(trace, target), target)


def _run_page(directory: Path, device: str | None, model: str | None) -> Page:
    from brimful.report.page import run_page
    from brimful.results import TrainingResult

    file, metrics = (directory / name for name in ("result.json", "metrics.jsonl"))
    if not (is_file(file) or is_file(metrics)):
        raise FileFormatError(
            f"{directory} is not a run directory: it has neither {file.name} nor {metrics.name}. Give {_KINDS}."
        )
    plan = _plan_of_run(directory)
    step = _NO_STEP if plan is None else _step_of(plan, device, model)
    if not is_file(file):
        return run_so_far(directory, step)
    where = f"the result {file}"
    document: Any = parse_json(read_regular_file(file, what="result"), where=where)
    return run_page(TrainingResult.from_json(document, where=where), plan, *step)


def run_so_far(directory: Path, step: _Step = _NO_STEP) -> Page:
    """The page of a run that has not ended, by its directory; `step` is that of its plan."""
    from brimful.report.page import unfinished_run_page
    from brimful.trainer.monitor.history import history_so_far

    history = history_so_far(read_regular_file(directory / "metrics.jsonl", what="record of steps"))
    records = (history.steps, history.validations, history.epochs)
    return unfinished_run_page(directory.resolve().name, *records, _plan_of_run(directory), *step)


def _plan_of_run(directory: Path) -> Plan | None:
    from brimful.planner import Plan

    file = directory / "plan.json"
    return Plan.load(file) if is_file(file) else None


def _step_of(plan: Plan, device: str | None, model: str | None) -> _Step:
    """The step of a plan on its device; else why it is not known.

    A plan is data: only a built-in model, or the one that the command line names, is run.
    """
    from brimful.api.plans import captured_plan
    from brimful.models import architecture_names
    from brimful.trace.ddp import per_rank_trace

    source = plan.source
    if model is not None and (source is None or source.name != model):
        source = find_source(model, ModelOptions())
    if source is None or (model is None and source.name not in architecture_names()):
        note = "memory over the step is not shown, as the plan's model is not built in: name it with --model"
        return None, None, note
    try:
        trace, target = captured_plan(job_of(source), plan, device)
    except UsageError:
        raise
    except BrimfulError as error:
        return None, None, f"memory over the step is not shown: {error}"
    return per_rank_trace(trace), target, ""
