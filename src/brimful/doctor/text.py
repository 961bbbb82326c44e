"""What watching a run saw, for a reader and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from brimful.cost import step_seconds
from brimful.devices import Device
from brimful.doctor.evidence import Evidence, Failure
from brimful.doctor.findings import Finding, findings
from brimful.doctor.savings import savings
from brimful.memory import MemoryPrediction, memory_timeline, predict_memory
from brimful.prediction.odd_sizes import odd_size_notes
from brimful.prediction.uncast import uncast_notes
from brimful.report.at_peak import peak_listings
from brimful.report.layout import Listing, Part, Remark, Report, Row, as_text
from brimful.report.out_of_memory import savings_listing
from brimful.report.watched import watched_rows, why_partial
from brimful.trace import Category, Trace
from brimful.utils.quantities import format_bytes, format_seconds

_NO_TENSOR = (
    "watch the process and the thread that train: name the script itself, not one that starts it, "
    "or write `with brimful.watch():` around its training loop"
)


def watched_text(evidence: Evidence) -> str:
    """The memory and time of a watched run, and what is wrong with it."""
    return as_text(watched_report(evidence))


def watched_report(evidence: Evidence) -> Report:
    """The memory and time of a watched run, and what is wrong with it."""
    count = len(evidence.steps)
    heading = f"watched {count} optimizer step{'s' if count != 1 else ''} on {evidence.trace.device_kind}"
    if why := why_partial(evidence.error, evidence.compiled):
        return Report(heading=heading, parts=(Remark("note", why),))
    if not evidence.trace.events:
        return Report(
            heading=f"{heading}: the script made no tensor there", parts=(Remark("next", _NO_TENSOR),)
        )
    return Report(heading=heading, parts=tuple(_parts(evidence, predict_memory(evidence.trace))))


def watched_document(evidence: Evidence) -> dict[str, Any]:
    """The memory and time of a watched run, and what is wrong with it, as JSON."""
    memory = predict_memory(evidence.trace) if evidence.trace.events else None
    held = None if memory is None else _held(memory, evidence.failed)
    return {
        "device": evidence.trace.device_kind,
        "torch": evidence.trace.torch_version,
        "steps": len(evidence.steps),
        "peak_bytes": None if held is None else held.peak_allocated_bytes,
        "measured_peak_bytes": evidence.measured_peak_bytes,
        "peak_phase": None if held is None else held.peak_phase,
        "categories": {} if held is None else dict(held.breakdown),
        "modules": [] if held is None else [asdict(each) for each in held.modules],
        "largest": [] if held is None else [asdict(each) for each in held.largest],
        "growth_bytes_per_step": evidence.growth_bytes,
        "step_seconds": evidence.step_seconds,
        "time_shares": dict(evidence.time_shares),
        "launches": evidence.launches,
        "host_waiting_seconds": evidence.host_waiting_seconds,
        "watching_seconds": evidence.watching_seconds,
        "error": evidence.error,
        "compiled": evidence.compiled,
        "notes": list(evidence.notes),
        "failed": None if evidence.failed is None else asdict(evidence.failed),
        "savings": [] if memory is None else [asdict(each) for each in savings(memory, evidence)],
        "findings": [asdict(each) for each in findings(evidence)],
        "timeline": [asdict(each) for each in memory_timeline(evidence.trace)],
    }


def _parts(evidence: Evidence, memory: MemoryPrediction) -> Iterator[Part]:
    held = _held(memory, evidence.failed)
    yield Row("peak", f"{format_bytes(held.peak_allocated_bytes)} in tensors, in step {memory.peak_step + 1}")
    yield from watched_rows(
        steps=len(evidence.steps),
        failed=evidence.failed,
        measured_peak_bytes=evidence.measured_peak_bytes,
        growth_bytes=evidence.growth_bytes,
        step_seconds=evidence.step_seconds,
        time_shares=evidence.time_shares,
        launches=evidence.launches,
        host_waiting_seconds=evidence.host_waiting_seconds,
        watching_seconds=evidence.watching_seconds,
        notes=evidence.notes,
    )
    yield from _held_parts(evidence, memory, held)
    yield findings_part(findings(evidence))


def _held(memory: MemoryPrediction, failed: Failure | None) -> MemoryPrediction:
    """What was held at the peak; where memory ran out, without what was asked for then."""
    if failed is None:
        return memory
    asked_bytes = failed.requested_bytes or 0
    return replace(
        memory,
        peak_allocated_bytes=memory.peak_allocated_bytes - asked_bytes,
        peak_phase=failed.phase,
        peak_op=failed.op,
        breakdown=tuple(
            (category, size - asked_bytes * (category is Category.TEMPORARIES))
            for category, size in memory.breakdown
        ),
        largest=tuple(each for each in memory.largest if each.label != failed.asked_label),
        modules=tuple(
            each if each.fqn else replace(each, held_bytes=each.held_bytes - asked_bytes)
            for each in memory.modules
        ),
    )


def captured_notes(trace: Trace, device: Device) -> tuple[str, ...]:
    """What makes a job's captured step slower on a GPU: odd sizes of layers, arithmetic left in float32."""
    return (*odd_size_notes(trace, device, step_seconds(trace, device)), *uncast_notes(trace))


def captured_text(evidence: Evidence, *, device: str, found: tuple[Finding, ...], notes: Sequence[str]) -> str:
    """The memory of a job's step that was captured, not run, and what is wrong with it."""
    trace, memory = evidence.trace, predict_memory(evidence.trace)
    parts = [
        Row("peak", f"{format_bytes(memory.peak_allocated_bytes)} in tensors, predicted"),
        *_held_parts(evidence, memory, memory),
        *(Remark("note", each) for each in notes),
        findings_part(found),
    ]
    samples = trace.settings.micro_batch_size
    heading = f"{trace.job} on {device}: a step of {samples} sample{'s' if samples != 1 else ''}, not run"
    return as_text(Report(heading=heading, parts=tuple(parts)))


def captured_document(
    evidence: Evidence, *, device: str, found: tuple[Finding, ...], notes: Sequence[str]
) -> dict[str, Any]:
    """The memory of a job's step that was captured, not run, and what is wrong with it, as JSON."""
    memory = predict_memory(evidence.trace)
    return {
        "job": evidence.trace.job,
        "device": device,
        "torch": evidence.trace.torch_version,
        "micro_batch_size": evidence.trace.settings.micro_batch_size,
        "predicted_peak_allocated_bytes": memory.peak_allocated_bytes,
        "peak_phase": memory.peak_phase,
        "categories": dict(memory.breakdown),
        "modules": [asdict(each) for each in memory.modules],
        "largest": [asdict(each) for each in memory.largest],
        "savings": [asdict(each) for each in savings(memory, evidence)],
        "notes": list(notes),
        "findings": [asdict(each) for each in found],
    }


def _held_parts(evidence: Evidence, memory: MemoryPrediction, held: MemoryPrediction) -> Iterator[Part]:
    """What holds the memory at the peak, and what would take less."""
    yield from peak_listings(held, held.peak_allocated_bytes)
    title = "would take less at the peak: about how much, and the change"
    yield from savings_listing(savings(memory, evidence), title)


def findings_part(found: tuple[Finding, ...]) -> Part:
    """Findings for a reader."""
    if not found:
        return Remark("findings", "none")
    title = "findings: at stake, what, and the change to make"
    return Listing(title=title, line="    {:>9}  {}", rows=tuple(_rows(found)))


def _rows(found: tuple[Finding, ...]) -> Iterator[tuple[str, str]]:
    for each in found:
        stake = "" if each.size_bytes is None else format_bytes(each.size_bytes)
        stake = stake or ("" if each.seconds is None else format_seconds(each.seconds))
        yield stake, f"{f'{each.line}: ' if each.line else ''}{each.what}"
        yield "", f"→ {each.change}"
