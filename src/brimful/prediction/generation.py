"""Traces of a generation and a device → its memory by phase, and the largest batch that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from brimful.devices import Device
from brimful.memory import AllocatorSettings, ForwardPeak, GenerationReplay, GrowingForwards
from brimful.prediction.estimate import RESIDUAL_FRACTION, Verdict
from brimful.prediction.estimator import MOST_SAMPLES
from brimful.settings import Precision
from brimful.trace import Category
from brimful.utils.display import PrintedResult
from brimful.utils.quantities import format_bytes


class GenerationPhase(StrEnum):
    """A part of a generation."""

    PREFILL = "prefill"
    """The prompt, by an encoder-decoder its encoder too, and the choice of the first token."""
    FIRST_STEP = "first decoding step"
    STEP = "decoding step"
    LAST_STEP = "last decoding step"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPeak:
    """Peak memory of one phase of a generation."""

    name: GenerationPhase
    token: int
    """The new token that is chosen, from 1."""
    predicted_peak_allocated_bytes: int
    cache_bytes: int
    """Key/value cache after the phase."""
    module: str | None
    """`fqn` of the module at the peak; None outside of the model, as where the next token is chosen."""
    op: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEstimate(PrintedResult):
    """Predicted memory of `model.generate` of transformers, greedy or with beams, on a device.

    Each sample has a prompt of the same length and receives all new tokens, as if no token ended it.
    """

    job: str
    device: str
    prompt_tokens: int
    """Tokens of each prompt; of an encoder-decoder, those that the encoder reads."""
    new_tokens: int
    num_beams: int
    micro_batch_size: int
    """Samples that are generated for at once."""
    precision: Precision
    capacity_bytes: int
    """Memory of the device, or the budget."""
    predicted_peak_allocated_bytes: int
    predicted_peak_reserved_bytes: int
    """Peak bytes of the caching allocator; equal to allocated on a CPU, which caches nothing."""
    predicted_peak_device_bytes: int
    """Reserved bytes and the CUDA context."""
    predicted_device_interval_bytes: tuple[int, int]
    """The context included; below it the allocator has less than is allocated."""
    is_out_of_memory: bool
    """Whether a request fails at the capacity, even after the allocator has released its cache."""
    cache_flushes: int
    """Number of times the allocator must release its whole cache to fit."""
    weights_bytes: int
    """Parameters and buffers."""
    cache_bytes: int
    """Key/value cache after the last step; it lacks the last token, which no step reads."""
    cache_bytes_per_token: int | None
    """What the cache grows by with each token of one sequence; a sample has a sequence for each beam. None if
    it does not grow: one token, or a full window."""
    phases: tuple[GenerationPeak, ...]
    peak_phase: GenerationPhase
    largest_micro_batch_size: int
    """The most samples with which the upper end of the interval fits; 0 if not even one fits."""
    context_source: str
    """Source of the CUDA context's size."""
    torch_version: str
    uncertain_ops: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """Whether the generation fits the capacity."""
        if self.is_out_of_memory:
            return Verdict.DOES_NOT_FIT
        if self.cache_flushes or self.predicted_device_interval_bytes[1] > self.capacity_bytes:
            return Verdict.TIGHT
        return Verdict.FITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A generation on a device, of which `forwards_of` has the forwards for a micro-batch size."""

    forwards_of: Callable[[int], GrowingForwards]
    new_tokens: int
    device: Device
    capacity_bytes: int
    allocator: AllocatorSettings

    def played(self, micro_batch_size: int, *, is_limited: bool = False) -> GenerationReplay:
        """The generation of one size, without limit or in what the capacity leaves beside the context."""
        reservable_bytes = max(self.capacity_bytes - self.device.context_bytes, 0)
        return self.forwards_of(micro_batch_size).play(
            self.new_tokens,
            self.device.kind,
            allocator=self.allocator,
            capacity_bytes=reservable_bytes if is_limited else None,
        )

    def interval(self, replay: GenerationReplay) -> tuple[int, int]:
        """The least and the most on the device; on a CPU, what is allocated."""
        allocated_bytes = max(peak.allocated_bytes for peak in replay.peaks)
        if self.device.kind == "cpu":
            return allocated_bytes, allocated_bytes
        most_bytes = int(replay.peak_reserved_bytes * (1 + RESIDUAL_FRACTION))
        return allocated_bytes + self.device.context_low_bytes, most_bytes + self.device.context_high_bytes

    def largest(self, size: int, needed_bytes: int) -> int:
        """The most samples whose upper end fits; `size` is known to need `needed_bytes`.

        Memory is nearly affine in the number of samples, so the next size tried is where the line through two
        known ones meets the capacity. Where that does not halve what is left, the middle is tried.
        """
        needed = {size: needed_bytes}
        fitting, too_large, guess = 0, MOST_SAMPLES + 1, 2 * size
        while too_large - fitting > 1:
            guess = min(max(guess, fitting + 1), too_large - 1)
            if guess not in needed:
                needed[guess] = self.interval(self.played(guess))[1]
            before = too_large - fitting
            fitting = max((s for s, each in needed.items() if each <= self.capacity_bytes), default=0)
            too_large = min((s for s, each in needed.items() if each > self.capacity_bytes), default=too_large)
            guess = self._meeting(needed, guess) if len(needed) > 1 else (fitting + too_large) // 2
            if 2 * (too_large - fitting) > before and len(needed) > _LINES_TRIED and too_large <= MOST_SAMPLES:
                guess = (fitting + too_large) // 2
        return fitting

    def _meeting(self, needed: dict[int, int], latest: int) -> int:
        """The size at which the line through the latest and the nearest other size meets the capacity."""
        other = min((size for size in needed if size != latest), key=lambda size: abs(size - latest))
        per_sample = (needed[latest] - needed[other]) / (latest - other)
        if per_sample <= 0:
            return 2 * latest
        return int(latest + (self.capacity_bytes - needed[latest]) / per_sample)


_LINES_TRIED = 4
"""Sizes known from which on a line that does not halve what is left gives way to the middle. A choice."""


def predict_generation(
    generation: Generation,
    *,
    job: str,
    prompt_tokens: int,
    num_beams: int,
    micro_batch_size: int,
    precision: Precision,
    notes: tuple[str, ...],
) -> GenerationEstimate:
    """Predict the memory of a generation for one micro-batch size, and the largest that fits."""
    forwards = generation.forwards_of(micro_batch_size)
    limited = generation.played(micro_batch_size, is_limited=True)
    is_untouched = not (limited.is_out_of_memory or limited.cache_flushes)
    free = limited if is_untouched else generation.played(micro_batch_size)
    shown = free if limited.is_out_of_memory else limited
    device, trace = generation.device, forwards.trace
    low, high = generation.interval(free)
    phases = _phases(forwards, shown)
    grown = phases[1].cache_bytes - phases[0].cache_bytes if len(phases) > 1 else 0
    return GenerationEstimate(
        job=job,
        device=device.name,
        prompt_tokens=prompt_tokens,
        new_tokens=generation.new_tokens,
        num_beams=num_beams,
        micro_batch_size=micro_batch_size,
        precision=precision,
        capacity_bytes=generation.capacity_bytes,
        predicted_peak_allocated_bytes=max(peak.allocated_bytes for peak in shown.peaks),
        predicted_peak_reserved_bytes=shown.peak_reserved_bytes,
        predicted_peak_device_bytes=shown.peak_reserved_bytes + device.context_bytes,
        predicted_device_interval_bytes=(low, high),
        is_out_of_memory=limited.is_out_of_memory,
        cache_flushes=limited.cache_flushes,
        weights_bytes=sum(s.size_bytes for s in trace.storages if s.category is Category.PARAMETERS),
        cache_bytes=phases[-1].cache_bytes,
        cache_bytes_per_token=grown // (micro_batch_size * num_beams) or None,
        phases=phases,
        peak_phase=max(phases, key=lambda phase: phase.predicted_peak_allocated_bytes).name,
        largest_micro_batch_size=generation.largest(micro_batch_size, high),
        context_source=device.context_source,
        torch_version=trace.torch_version.partition("+")[0],
        uncertain_ops=trace.uncertain_ops,
        notes=(*notes, *_note_of_gaps(generation, micro_batch_size, shown)),
    )


_GAPS_FRACTION = 0.25
"""Fraction of the allocated peak that may be reserved beyond it without a note. A choice."""


def _note_of_gaps(generation: Generation, size: int, replay: GenerationReplay) -> Iterator[str]:
    """A note where much more is reserved than allocated, if expandable segments would reserve less."""
    allocated_bytes = max(peak.allocated_bytes for peak in replay.peaks)
    is_settled = generation.device.kind == "cpu" or generation.allocator.expandable_segments
    if is_settled or replay.peak_reserved_bytes <= (1 + _GAPS_FRACTION) * allocated_bytes:
        return
    expandable = replace(generation, allocator=AllocatorSettings.parse("expandable_segments:True")).played(size)
    if expandable.peak_reserved_bytes >= replay.peak_reserved_bytes:
        return
    yield (
        f"The allocator reserves {format_bytes(replay.peak_reserved_bytes - allocated_bytes)} more than is "
        "allocated: in each step the cache needs larger blocks, and those of the steps before stay reserved "
        "until memory runs out. With PYTORCH_ALLOC_CONF=expandable_segments:True (--allocator) it reserves "
        f"{format_bytes(expandable.peak_reserved_bytes)}."
    )


def _phases(forwards: GrowingForwards, replay: GenerationReplay) -> tuple[GenerationPeak, ...]:
    """The prefill, the first and the last decoding step, and the step of the peak if it is another."""
    last = len(replay.peaks) - 1
    peak = max(range(last + 1), key=lambda forward: (replay.peaks[forward].allocated_bytes, forward))
    return tuple(_phase(forwards, replay.peaks, forward) for forward in sorted({0, min(1, last), peak, last}))


def _phase(forwards: GrowingForwards, peaks: tuple[ForwardPeak, ...], forward: int) -> GenerationPeak:
    last = len(peaks) - 1
    names = {last: GenerationPhase.LAST_STEP, 1: GenerationPhase.FIRST_STEP, 0: GenerationPhase.PREFILL}
    at = peaks[forward]
    op = forwards.trace.ops[at.op] if at.op >= 0 else None
    return GenerationPeak(
        name=names.get(forward, GenerationPhase.STEP),
        token=forward + 1,
        predicted_peak_allocated_bytes=at.allocated_bytes,
        cache_bytes=forwards.cache_bytes_after(forward),
        module=None if op is None or op.module.startswith("<") else op.module,
        op=None if op is None else op.name,
    )
