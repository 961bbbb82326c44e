"""What a CUDA memory snapshot shows: what holds the memory, at its end and at its peak, and what is wrong."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

from brimful.doctor.findings import Finding
from brimful.doctor.snapshot import Block, Lines, Segment, Snapshot, TraceEvent
from brimful.utils.quantities import MIB

KEPT_BLOCKS = 8
"""Blocks of one line from which they are a growth. A choice."""
LATE_FRACTION = 0.05
"""Fraction of the reserved memory that waits for other streams from which it is a finding. A choice."""
_LARGE_SEGMENT_BYTES = 20 * MIB
"""Segments above it are as large as what was asked for. Source: kLargeBuffer."""
_ALIKE_FRACTION = 0.25
_QUARTERS = 4
UNKNOWN_LINE = "no line of Python code (backward, or no stacks recorded)"


@dataclass(frozen=True, slots=True, kw_only=True)
class LineUse:
    """What lines of code hold."""

    line: str
    """As "train.py:12 (forward)"."""
    size_bytes: int
    """As requested."""
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePeak:
    """The most memory of tensors in a recorded history."""

    size_bytes: int
    event: int
    """Its place in the history."""
    lines: tuple[LineUse, ...]
    """What held it, the largest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanOut:
    """Memory ran out."""

    asked_bytes: int
    line: str
    allocated_bytes: int
    """Bytes of tensors then."""
    device_free_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """The memory of one GPU in a snapshot."""

    device: int
    segments: int
    reserved_bytes: int
    allocated_bytes: int
    """Bytes of blocks of tensors, as rounded."""
    late_bytes: int
    """Bytes of freed blocks that another stream may still use."""
    free_inside_bytes: int
    """Free bytes in segments that tensors use, which `empty_cache` cannot return."""
    largest_free_bytes: int
    """The largest free block among them."""
    cached_bytes: int
    """Bytes of segments that nothing uses."""
    lines: tuple[LineUse, ...]
    """What holds the memory at the end, the largest first."""
    events: int
    """Length of the recorded history."""
    before_bytes: int
    """Bytes of tensors that lived when the history began."""
    peak: TracePeak | None
    """None without a history."""
    ran_out: tuple[RanOut, ...]
    findings: tuple[Finding, ...]


def device_uses(snapshot: Snapshot) -> list[DeviceUse]:
    """The memory of each GPU that a snapshot has something of."""
    used = {segment.device for segment in snapshot.segments}
    used |= {device for device, trace in enumerate(snapshot.device_traces) if trace}
    return [_device_use(snapshot, device) for device in sorted(used)]


def _device_use(snapshot: Snapshot, device: int) -> DeviceUse:
    lines = Lines()
    segments = [each for each in snapshot.segments if each.device == device]
    traces = snapshot.device_traces
    trace = traces[device] if device < len(traces) else ()
    blocks = [block for segment in segments for block in segment.blocks]
    live = [block for block in blocks if block.state == "active_allocated"]
    partly = [segment for segment in segments if any(block.state != "inactive" for block in segment.blocks)]
    free = [block.size for segment in partly for block in segment.blocks if block.state == "inactive"]
    history = _History(trace, live, lines)
    expands = snapshot.allocator_settings.expandable_segments or any(each.is_expandable for each in segments)
    reserved_bytes = sum(segment.total_size for segment in segments)
    late_bytes = sum(block.size for block in blocks if block.state.startswith(("active_aw", "active_pe")))
    free_inside_bytes = sum(free)
    found = [
        *history.growths(),
        *(() if expands else _fragmented(segments, free, history.ran_out)),
        *_late(late_bytes, reserved_bytes),
    ]
    return DeviceUse(
        device=device,
        segments=len(segments),
        reserved_bytes=reserved_bytes,
        allocated_bytes=sum(block.size for block in live),
        late_bytes=late_bytes,
        free_inside_bytes=free_inside_bytes,
        largest_free_bytes=max(free, default=0),
        cached_bytes=reserved_bytes - sum(segment.total_size for segment in partly),
        lines=_by_line((_line_of(lines, block.frames), block.used_bytes) for block in live),
        events=len(trace),
        before_bytes=history.before_bytes,
        peak=history.peak,
        ran_out=history.ran_out,
        findings=tuple(sorted(found, key=lambda each: -(each.size_bytes or 0))),
    )


def live_bytes(snapshot: Snapshot, device: int) -> list[int]:
    """Bytes of tensors on a GPU before the first event of its history, and after each."""
    blocks = (block for each in snapshot.segments if each.device == device for block in each.blocks)
    traces = snapshot.device_traces
    trace = traces[device] if device < len(traces) else ()
    return _totals(trace, [block for block in blocks if block.state == "active_allocated"])


def _totals(trace: Sequence[TraceEvent], live: Sequence[Block]) -> list[int]:
    changes = [_change(event) for event in trace]
    before_bytes = max(sum(block.used_bytes for block in live) - sum(changes), 0)
    return [*accumulate(changes, initial=before_bytes)]


class _History:
    """The allocations and frees of one GPU, replayed."""

    def __init__(self, trace: Sequence[TraceEvent], live: Sequence[Block], lines: Lines) -> None:
        self._trace, self._lines = trace, lines
        self._live = {block.address: block for block in live}
        totals = _totals(trace, live)
        self.before_bytes = totals[0]
        self.peak: TracePeak | None = None
        if trace:
            place = max(range(len(trace)), key=lambda index: totals[index + 1])
            self.peak = TracePeak(
                size_bytes=totals[place + 1], event=place, lines=self._held_after(place, totals[place + 1])
            )
        self.ran_out = tuple(
            RanOut(
                asked_bytes=event.size,
                line=_line_of(lines, event.frames),
                allocated_bytes=total,
                device_free_bytes=event.device_free,
            )
            for event, total in zip(trace, totals, strict=False)
            if event.action == "oom"
        )

    def _held_after(self, place: int, total_bytes: int) -> tuple[LineUse, ...]:
        """What lives after an event, by the line that allocated it."""
        held: dict[int, tuple[str, int]] = {}
        for event in self._trace[: place + 1]:
            if event.action == "alloc":
                held[event.addr] = _line_of(self._lines, event.frames), event.size
            elif event.action == "free_requested":
                held.pop(event.addr, None)
        known = [*held.values(), *self._older()]
        rest_bytes = total_bytes - sum(size for _, size in known)
        unknown = [("allocated before the history begins", rest_bytes)] if rest_bytes > 0 else []
        return _by_line([*known, *unknown])

    def _older(self) -> Iterator[tuple[str, int]]:
        """Blocks that live from before the history until its end."""
        touched = {each.addr for each in self._trace if each.action in ("alloc", "free_requested")}
        for address, block in self._live.items():
            if address not in touched:
                yield _line_of(self._lines, block.frames), block.used_bytes

    def growths(self) -> Iterator[Finding]:
        """Lines of which blocks remain from every quarter of the history, in all of which others are freed."""
        events = [each for each in self._trace if each.action in ("alloc", "free_requested")]
        if len(events) < _QUARTERS:
            return
        quarter_of = [index * _QUARTERS // len(events) for index in range(len(events))]
        living: dict[int, int] = {}
        made, frees = Counter[str](), Counter[int]()
        for index, event in enumerate(events):
            if event.action == "alloc":
                living[event.addr] = index
                made[self._lines.of(event.frames)] += 1
            else:
                living.pop(event.addr, None)
                frees[quarter_of[index]] += 1
        if any(frees[quarter] < len(events) / _QUARTERS**2 for quarter in range(_QUARTERS)):
            return  # not a loop that frees what it makes, such as the building of a model
        kept: dict[str, list[int]] = defaultdict(list)
        for index in living.values():
            kept[self._lines.of(events[index].frames)].append(index)
        for line, indices in kept.items():
            is_steady = {quarter_of[index] for index in indices} == {*range(_QUARTERS)}
            if line and is_steady and len(indices) >= max(KEPT_BLOCKS, made[line] / 2):
                yield Finding(
                    what=f"{len(indices)} blocks that this line makes, over the whole history, are never freed",
                    change="find what keeps them: a sum or list of tensors; keep .detach(), or .item()",
                    line=line,
                    size_bytes=sum(events[index].size for index in indices),
                    check="memory-grows",
                )


def _change(event: TraceEvent) -> int:
    return {"alloc": event.size, "free_requested": -event.size}.get(event.action, 0)


def _fragmented(segments: list[Segment], free: list[int], ran_out: tuple[RanOut, ...]) -> Iterator[Finding]:
    """Memory ran out for what the free blocks hold together, and none of them alone."""
    size_bytes = sum(free)
    if not any(max(free, default=0) < each.asked_bytes <= size_bytes for each in ran_out):
        return
    sizes = sorted(each.total_size for each in segments if each.total_size > _LARGE_SEGMENT_BYTES)
    middle = median(sizes) if sizes else 0
    alike = {size for size in sizes if abs(size - middle) <= _ALIKE_FRACTION * middle}
    lengths = f", as of batches of {len(alike)} nearly equal sizes" if len(alike) > 3 else ""
    yield Finding(
        what=f"{len(free)} free blocks lie between tensors and are too small for what was asked for{lengths}",
        change="PYTORCH_ALLOC_CONF=expandable_segments:True, or batches of a few lengths",
        size_bytes=size_bytes,
        check="fragmented",
    )


def _late(late_bytes: int, reserved_bytes: int) -> Iterator[Finding]:
    if late_bytes > LATE_FRACTION * reserved_bytes:
        yield Finding(
            what="freed memory waits for other streams that have used it, and cannot be used again yet",
            change="synchronise the streams before the tensors are freed, in place of record_stream",
            size_bytes=late_bytes,
            check="freed-late",
        )


def _line_of(lines: Lines, frames: object) -> str:
    return lines.of(frames) or UNKNOWN_LINE


def _by_line(held: Iterable[tuple[str, int]]) -> tuple[LineUse, ...]:
    sizes, blocks = Counter[str](), Counter[str]()
    for line, size_bytes in held:
        sizes[line] += size_bytes
        blocks[line] += 1
    return tuple(LineUse(line=line, size_bytes=size, blocks=blocks[line]) for line, size in sizes.most_common())
