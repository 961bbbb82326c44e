"""What watching a run saw, for a reader and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from brimful.doctor.evidence import Evidence
from brimful.doctor.findings import Finding, findings
from brimful.doctor.savings import savings
from brimful.memory import MemoryPrediction, predict_memory
from brimful.report.at_peak import block_listing, category_listing, module_listing
from brimful.report.layout import Listing, Part, Remark, Report, Row, as_text
from brimful.report.out_of_memory import asked_row, savings_listing
from brimful.utils.quantities import format_bytes, format_seconds


def watched_text(evidence: Evidence) -> str:
    """The memory and time of a watched run, and what is wrong with it."""
    return as_text(watched_report(evidence))


def watched_report(evidence: Evidence) -> Report:
    """The memory and time of a watched run, and what is wrong with it."""
    count = len(evidence.steps)
    heading = f"watched {count} optimizer step{'s' if count != 1 else ''} on {evidence.trace.device_kind}"
    if evidence.error:
        text = f"recording ended by an error of brimful's own, please report it: {evidence.error}"
        return Report(heading=heading, parts=(Remark("note", text),))
    if evidence.compiled:
        text = (
            f"{evidence.compiled} calls compiled code: recording ended there, as it would change. "
            "--eager runs it eagerly in the recorded steps, which rounds otherwise."
        )
        return Report(heading=heading, parts=(Remark("note", text),))
    if not evidence.trace.events:
        return Report(heading=f"{heading}: the script made no tensor there", parts=())
    return Report(heading=heading, parts=tuple(_parts(evidence, predict_memory(evidence.trace))))


def watched_document(evidence: Evidence) -> dict[str, Any]:
    """The memory and time of a watched run, and what is wrong with it, as JSON."""
    memory = predict_memory(evidence.trace) if evidence.trace.events else None
    return {
        "device": evidence.trace.device_kind,
        "torch": evidence.trace.torch_version,
        "steps": len(evidence.steps),
        "peak_bytes": None if memory is None else memory.peak_allocated_bytes,
        "measured_peak_bytes": evidence.measured_peak_bytes,
        "peak_phase": None if memory is None else memory.peak_phase,
        "categories": {} if memory is None else dict(memory.breakdown),
        "modules": [] if memory is None else [asdict(each) for each in memory.modules],
        "largest": [] if memory is None else [asdict(each) for each in memory.largest],
        "growth_bytes_per_step": evidence.growth_bytes,
        "step_seconds": evidence.step_seconds,
        "watching_seconds": evidence.watching_seconds,
        "error": evidence.error,
        "compiled": evidence.compiled,
        "failed": None if evidence.failed is None else asdict(evidence.failed),
        "savings": [] if memory is None else [asdict(each) for each in savings(memory, evidence)],
        "findings": [asdict(each) for each in findings(evidence)],
    }


def _parts(evidence: Evidence, memory: MemoryPrediction) -> Iterator[Part]:
    yield Row("peak", f"{format_bytes(memory.peak_allocated_bytes)} in tensors, in step {memory.peak_step + 1}")
    if (failed := evidence.failed) is not None:
        yield asked_row(failed.op, failed.line, failed.requested_bytes, "out of memory")
    if evidence.measured_peak_bytes is not None:
        yield Row("allocated", f"{format_bytes(evidence.measured_peak_bytes)} at most, as torch measures it")
    growth_bytes = evidence.growth_bytes
    if growth_bytes is not None:
        yield Row(
            "growth", f"{format_bytes(growth_bytes)} a step" if growth_bytes > 0 else "none from step to step"
        )
    if evidence.step_seconds is not None:
        yield Row("step", f"{format_seconds(evidence.step_seconds)}, unwatched")
    if evidence.watching_seconds is not None:
        yield Row("watching", f"added {format_seconds(evidence.watching_seconds)} to these steps")
    yield category_listing(memory, memory.peak_allocated_bytes)
    yield block_listing(memory)
    yield from module_listing(memory, memory.peak_allocated_bytes)
    title = "would take less at the peak: about how much, and the change"
    yield from savings_listing(savings(memory, evidence), title)
    found = findings(evidence)
    if not found:
        yield Remark("findings", "none")
        return
    yield Listing(
        title="findings: at stake, what, and the change to make", line="    {:>9}  {}", rows=tuple(_rows(found))
    )


def _rows(found: tuple[Finding, ...]) -> Iterator[tuple[str, str]]:
    for each in found:
        stake = "" if each.size_bytes is None else format_bytes(each.size_bytes)
        stake = stake or ("" if each.seconds is None else format_seconds(each.seconds))
        yield stake, f"{f'{each.line}: ' if each.line else ''}{each.what}"
        yield "", f"→ {each.change}"
