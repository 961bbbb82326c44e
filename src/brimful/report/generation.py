"""The memory of a generation for a reader and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from brimful.codec import JsonForm, json_form
from brimful.prediction import GenerationEstimate
from brimful.report.layout import Bar, Gauge, Listing, Part, Remark, Report, Row
from brimful.report.plans import TONES, uncertain_rows
from brimful.utils.quantities import format_bytes


def generation_report(found: GenerationEstimate) -> Report:
    """The phases of a generation, its cache, whether it fits, and the largest batch that does."""
    peak, capacity = format_bytes(found.predicted_peak_device_bytes), format_bytes(found.capacity_bytes)
    return Report(
        heading=f"{found.job} on {found.device}, generating: {found.verdict} ({peak} of {capacity})",
        parts=tuple(_parts(found)),
    )


def _parts(found: GenerationEstimate) -> Iterator[Part]:
    low, high = found.predicted_device_interval_bytes
    peak_bytes, allocated = (
        found.predicted_peak_device_bytes,
        format_bytes(found.predicted_peak_allocated_bytes),
    )
    peak = Bar(
        label="peak",
        text=format_bytes(peak_bytes),
        size=peak_bytes,
        high=high,
        tone=TONES[found.verdict],
    )
    yield Gauge(bars=(peak,), limit=found.capacity_bytes)
    beams = "greedy" if found.num_beams == 1 else f"{found.num_beams} beams"
    yield Row(
        "generation",
        f"{found.new_tokens:,} tokens after prompts of {found.prompt_tokens:,}, {beams}, "
        f"micro-batch {found.micro_batch_size:,}, {found.precision}",
    )
    yield Row("assumed", f"kernels and allocator of PyTorch {found.torch_version}; no padding, no early end")
    context_bytes = peak_bytes - found.predicted_peak_reserved_bytes
    reserved = format_bytes(found.predicted_peak_reserved_bytes)
    beside = f", {reserved} reserved, {format_bytes(context_bytes)} CUDA context" if context_bytes else ""
    yield Row("predicted peak", f"{allocated} allocated{beside}, in the {found.peak_phase}")
    if context_bytes:
        yield Row("interval", f"{format_bytes(low)} to {format_bytes(high)} with the CUDA context")
    yield Row("weights", format_bytes(found.weights_bytes))
    per_token = found.cache_bytes_per_token
    grows = "" if per_token is None else f", {per_token:,} B a token and sequence"
    yield Row("key/value cache", f"{format_bytes(found.cache_bytes)} at the end{grows}")
    largest = found.largest_micro_batch_size
    yield Row("largest batch", f"{largest:,} fits" if largest else "not even one sample fits")
    yield from uncertain_rows(found.uncertain_ops)
    if found.cache_flushes:
        yield Row("cache flushes", f"{found.cache_flushes} to fit, each of which stalls the device")
    yield Listing(
        title="peak allocated in each phase",
        line="    {:<22}{:>7}{:>11}{:>11}  {}",
        heading=("phase", "token", "peak", "cache", "at the peak"),
        rows=tuple(
            (
                phase.name,
                f"{phase.token:,}",
                format_bytes(phase.predicted_peak_allocated_bytes),
                format_bytes(phase.cache_bytes),
                phase.module or f"choice of the token ({phase.op})",
            )
            for phase in found.phases
        ),
    )
    yield from (Remark("note", note) for note in found.notes)


json_form(JsonForm(derived={"verdict": attrgetter("verdict")}, order=("job", "device", "verdict")))(
    GenerationEstimate
)
