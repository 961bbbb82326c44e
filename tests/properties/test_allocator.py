"""Whatever is asked of the caching allocator, its books stay in order and a slow, plain one agrees with it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from hypothesis import given
from hypothesis import settings as run_settings
from hypothesis import strategies as st

from brimful.memory import (
    AllocatorSettings,
    CachingAllocator,
    compare_allocators,
    live_profile,
    replay_allocations,
    round_allocation,
    smallest_surviving_capacity_bytes,
)
from helpers.traces import TraceWriter

MIB = 1 << 20
ADDRESSES = 1 << 50

# A program is a list of sizes to allocate (positive) and of blocks to free (negative: the n-th in use).
SIZES = st.one_of(
    st.integers(1, 3 * MIB),
    st.integers(1, 60).map(lambda halves: halves * MIB // 2),
    st.sampled_from([MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 33 * MIB + 512]),
)
FREES = st.integers(-40, -1)
PROGRAMS = st.lists(st.one_of(SIZES, FREES, FREES), min_size=20, max_size=80)
SETTINGS = st.builds(
    AllocatorSettings,
    expandable_segments=st.booleans(),
    max_split_size_bytes=st.sampled_from([None, 20 * MIB, 26 * MIB]),
    roundup_power2_divisions=st.sampled_from([None, 1, 4, (0, 2, 1, 4, *[8] * 12)]),
    garbage_collection_threshold=st.sampled_from([None, 0.1, 0.4, 0.8]),
)
TABLES = st.lists(st.sampled_from([0, 1, 2, 4, 8, 1024]), min_size=16, max_size=16).map(tuple)
ALL_SETTINGS = st.builds(
    AllocatorSettings,
    expandable_segments=st.booleans(),
    max_split_size_bytes=st.none() | st.integers(20, 1 << 30).map(lambda mib: mib * MIB),
    roundup_power2_divisions=st.none() | st.integers(0, 12).map(lambda power: 1 << power) | TABLES,
    garbage_collection_threshold=st.none() | st.floats(0, 1, exclude_min=True, exclude_max=True),
)
CAPACITIES = st.one_of(st.none(), st.integers(1, 120).map(lambda mib: mib * MIB))
quickly = run_settings(deadline=None, max_examples=150)  # shared machines are slow now and then


def play(program, *allocators):
    """Run a program, yielding after each request what every allocator answered."""
    in_use: list[int] = []
    for key, request in enumerate(program):
        if request > 0:
            refused = [allocator.allocate(key, request) for allocator in allocators]
            if not refused[0]:
                in_use.append(key)
            yield [bool(refusal) for refusal in refused]
        elif in_use:
            freed = in_use.pop(request % len(in_use))
            for allocator in allocators:
                allocator.free(freed)
            yield []
    for key in in_use:
        for allocator in allocators:
            allocator.free(key)


def blocks_by_pool(allocator):
    """All blocks of each pool that are backed by memory, by address."""
    for pool in (allocator._small, allocator._large):
        in_use = [block for block in allocator._in_use.values() if block is not None and block.pool is pool]
        yield sorted([*in_use, *pool.free_blocks], key=lambda block: block.address)


@quickly
@given(program=PROGRAMS, settings=SETTINGS, capacity_bytes=CAPACITIES)
def test_blocks_lie_side_by_side_and_fill_the_reserved_memory(program, settings, capacity_bytes):
    allocator = CachingAllocator(settings, capacity_bytes)
    for _ in play(program, allocator):
        pools = list(blocks_by_pool(allocator))
        blocks = [block for pool in pools for block in pool]
        for lower, upper in (pair for pool in pools for pair in pairwise(pool)):
            assert lower.address + lower.size_bytes <= upper.address, "blocks overlap"
        assert all(block.size_bytes % 512 == 0 and block.size_bytes > 0 for block in blocks)
        assert sum(block.size_bytes for block in blocks) == allocator.reserved_bytes
        in_use_bytes = sum(block.size_bytes for block in blocks if not block.free)
        assert in_use_bytes == allocator.allocated_bytes <= allocator.reserved_bytes


@quickly
@given(program=PROGRAMS, settings=SETTINGS, capacity_bytes=CAPACITIES)
def test_free_neighbours_never_stay_apart(program, settings, capacity_bytes):
    allocator = CachingAllocator(settings, capacity_bytes)
    for _ in play(program, allocator):
        for block in (block for pool in blocks_by_pool(allocator) for block in pool):
            upper = block.next
            assert upper is None or upper.previous is block
            assert not (upper and block.free and upper.free and upper.mapped)


@quickly
@given(program=PROGRAMS, settings=SETTINGS, capacity_bytes=CAPACITIES)
def test_peaks_only_rise_and_stay_within_the_capacity(program, settings, capacity_bytes):
    allocator = CachingAllocator(settings, capacity_bytes)
    peaks = (0, 0)
    for _ in play(program, allocator):
        assert allocator.peak_allocated_bytes >= max(peaks[0], allocator.allocated_bytes)
        assert allocator.peak_reserved_bytes >= max(peaks[1], allocator.reserved_bytes)
        assert capacity_bytes is None or allocator.peak_reserved_bytes <= capacity_bytes
        peaks = allocator.peak_allocated_bytes, allocator.peak_reserved_bytes


@quickly
@given(program=PROGRAMS, settings=SETTINGS, capacity_bytes=CAPACITIES)
def test_freeing_everything_leaves_whole_segments(program, settings, capacity_bytes):
    allocator = CachingAllocator(settings, capacity_bytes)
    list(play(program, allocator))
    assert allocator.allocated_bytes == 0
    pools = list(blocks_by_pool(allocator))
    if settings.expandable_segments:
        assert all(
            lower.address + lower.size_bytes < upper.address for p in pools for lower, upper in pairwise(p)
        )
    else:
        assert all(block.is_whole_segment for pool in pools for block in pool)
    allocator._flush_cache()
    assert (allocator.reserved_bytes, allocator.segment_count) == (0, 0)


@quickly
@given(program=PROGRAMS, settings=SETTINGS, capacity_bytes=CAPACITIES)
def test_what_is_in_use_stays_where_it_is_and_its_segment_stays_whole(program, settings, capacity_bytes):
    allocator = CachingAllocator(settings, capacity_bytes)
    before: dict[int, tuple[int, int]] = {}
    for _ in play(program, allocator):
        after = {key: (block.address, block.size_bytes) for key, block in allocator._in_use.items()}
        assert all(before[key] == after[key] for key in before.keys() & after.keys())
        before = after
        held = {id(block) for pool in blocks_by_pool(allocator) for block in pool}
        for block in allocator._in_use.values():
            neighbours = [beside for beside in (block.previous, block.next) if beside and beside.mapped]
            assert all(id(beside) in held for beside in neighbours), "part of a segment in use was given back"


@quickly
@given(program=PROGRAMS, threshold=st.sampled_from([0.1, 0.4, 0.8]), capacity_mib=st.integers(20, 200))
def test_collection_leaves_no_more_above_the_threshold_than_it_must(program, threshold, capacity_mib):
    capacity_bytes = capacity_mib * MIB
    allocator = CachingAllocator(AllocatorSettings(garbage_collection_threshold=threshold), capacity_bytes)
    for _ in play(program, allocator):
        allocator._collect_garbage()
        left = [block for block in allocator._large.free_blocks if block.is_whole_segment]
        assert not left or allocator.reserved_bytes <= threshold * capacity_bytes


@quickly
@given(program=PROGRAMS, settings=SETTINGS)
def test_what_is_reserved_without_limit_is_enough_as_a_limit(program, settings):
    # Only if nothing is collected below the limit: that can leave blocks worse placed.
    settings = replace(settings, garbage_collection_threshold=None)
    unlimited = CachingAllocator(settings)
    assert not any(any(refused) for refused in play(program, unlimited))
    limited = CachingAllocator(settings, unlimited.peak_reserved_bytes)
    assert not any(any(refused) for refused in play(program, limited))
    assert limited.cache_flushes == 0
    assert limited.peak_reserved_bytes == unlimited.peak_reserved_bytes


@quickly
@given(program=PROGRAMS)
def test_an_expandable_pool_never_holds_more_than_all_its_requests_end_to_end(program):
    # Memory is mapped only where a request reaches beyond the highest page, so the pages reach no further than
    # all requests so far laid end to end. (No bound by fixed segments holds: either can be the smaller.)
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=True))
    list(play(program, allocator))
    sizes = [round_allocation(request) for request in program if request > 0]
    small = sum(size for size in sizes if size <= MIB)
    large = sum(size for size in sizes if size > MIB)
    bound = -(-small // (2 * MIB)) * 2 * MIB + -(-large // (20 * MIB)) * 20 * MIB
    assert allocator.peak_reserved_bytes <= bound


@quickly
@given(program=st.lists(SIZES, max_size=40))
def test_an_expandable_pool_has_no_gaps_while_nothing_is_freed(program):
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=True))
    for key, size_bytes in enumerate(program):
        allocator.allocate(key, size_bytes)
    sizes = [round_allocation(size_bytes) for size_bytes in program]
    small = sum(size for size in sizes if size <= MIB)
    large = sum(size for size in sizes if size > MIB)
    assert allocator.allocated_bytes == small + large
    assert allocator.reserved_bytes == -(-small // (2 * MIB)) * 2 * MIB + -(-large // (20 * MIB)) * 20 * MIB


def trace_of(program):
    """A trace with the allocations and releases of a program."""
    writer = TraceWriter()
    in_use: list[int] = []
    for request in program:
        if request > 0:
            in_use.append(writer.allocate(request, "storage"))
        elif in_use:
            writer.free(in_use.pop(request % len(in_use)))
    return writer.trace()


@quickly
@given(program=PROGRAMS, settings=SETTINGS)
def test_the_smallest_capacity_is_survived_and_a_page_less_is_not(program, settings):
    trace = trace_of(program)
    capacity_bytes = smallest_surviving_capacity_bytes(trace, allocator=settings)
    survived = replay_allocations(trace, allocator=settings, capacity_bytes=capacity_bytes)
    assert survived.out_of_memory_at is None
    assert survived.peak_reserved_bytes <= capacity_bytes
    assert survived.profile.peak_bytes <= capacity_bytes
    less = replay_allocations(trace, allocator=settings, capacity_bytes=capacity_bytes - 2 * MIB)
    assert less.out_of_memory_at is not None or capacity_bytes == 0
    if settings.garbage_collection_threshold is None:
        unlimited = replay_allocations(trace, allocator=settings)
        assert capacity_bytes <= unlimited.peak_reserved_bytes


@run_settings(deadline=None, max_examples=30)
@given(program=PROGRAMS, capacity_mib=st.integers(20, 400))
def test_compared_allocators_hold_what_is_live(program, capacity_mib):
    trace = trace_of(program)
    live_bytes = live_profile(trace, 512).peak_bytes
    for row in compare_allocators(trace, capacity_mib * MIB):
        assert row.peak_reserved_bytes >= live_bytes
        assert row.smallest_surviving_capacity_bytes >= live_bytes
        assert not row.fits or row.peak_reserved_bytes <= capacity_mib * MIB
        assert row.fits or row.cache_flushes == 0


@run_settings(deadline=None, max_examples=300)
@given(settings=ALL_SETTINGS)
def test_settings_are_read_back_from_their_text(settings):
    assert AllocatorSettings.parse(str(settings)) == settings


@run_settings(deadline=None, max_examples=300)
@given(program=PROGRAMS, settings=SETTINGS, capacity_bytes=CAPACITIES)
def test_the_plain_allocator_agrees(program, settings, capacity_bytes):
    fast, plain = CachingAllocator(settings, capacity_bytes), PlainAllocator(settings, capacity_bytes)
    for refused in play(program, fast, plain):
        assert len(set(refused)) <= 1, "one refuses, the other does not"
        assert fast.allocated_bytes == plain.allocated_bytes
        assert fast.reserved_bytes == plain.reserved_bytes
        assert fast.cache_flushes == plain.cache_flushes


@dataclass
class Span:
    """Some addresses of a segment."""

    state: str  # used, free or unmapped
    size: int
    key: int | None = None
    since: int = 0  # searches in its pool when it was freed


class PlainAllocator:
    """The same rules with lists alone: a segment is a list of spans, and every search looks at all of them."""

    def __init__(self, settings, capacity_bytes):
        self.settings = settings
        self.capacity = capacity_bytes or ADDRESSES
        self.cache_flushes = 0
        self.searches = {"small": 0, "large": 0}
        self.segments = {"small": [], "large": []}  # by address: each new one lies below the others
        if settings.expandable_segments:
            self.segments = {kind: [[Span("unmapped", ADDRESSES)]] for kind in self.segments}

    def spans(self):
        return [span for segments in self.segments.values() for segment in segments for span in segment]

    @property
    def allocated_bytes(self):
        return sum(span.size for span in self.spans() if span.state == "used")

    @property
    def reserved_bytes(self):
        return sum(span.size for span in self.spans() if span.state != "unmapped")

    def allocate(self, key, size):
        wanted = round_allocation(size, power2_divisions=self.settings.power2_divisions_for(size))
        kind = "small" if wanted <= MIB else "large"
        self.searches[kind] += 1
        place = self.cached(kind, wanted)
        if place is None:
            self.collect()
            place = self.grown(kind, wanted)
        if place is None and self.release_oversize(kind, wanted):
            place = self.grown(kind, wanted)
        if place is None:
            self.flush()
            place = self.grown(kind, wanted)
        if place is None:
            return True
        segment, index = place
        rest = segment[index].size - wanted
        if self.is_cut(kind, wanted, rest):
            segment[index : index + 1] = [Span("used", wanted, key), Span("free", rest)]
        else:
            segment[index] = Span("used", wanted + rest, key)
        self.tidy()
        return False

    def free(self, key):
        for kind, segments in self.segments.items():
            for span in (span for segment in segments for span in segment):
                if span.state == "used" and span.key == key:
                    span.state, span.key, span.since = "free", None, self.searches[kind]
        self.tidy()

    def limit(self):
        return self.settings.max_split_size_bytes or ADDRESSES

    def is_cut(self, kind, wanted, rest):
        if kind == "small" or self.settings.expandable_segments:
            return rest >= 512
        return wanted < self.limit() and rest > MIB

    def cached(self, kind, wanted):
        """(segment, index) of the free span to use."""
        found = [
            (span.size, place, index, segment)
            for place, segment in enumerate(self.segments[kind])
            for index, span in enumerate(segment)
            if span.state == "free" and span.size >= wanted
        ]
        found.sort(key=lambda entry: entry[:3])
        while len(found) > 1 and self.reach(*found[1][2:]) < self.reach(*found[0][2:]):
            del found[0]
        if not found:
            return None
        size, _, index, segment = found[0]
        fits = size < self.limit() if wanted < self.limit() else size < wanted + 20 * MIB
        return (segment, index) if fits else None

    def reach(self, index, segment):
        """Size of a free span with the unmapped addresses after it; without any in a fixed segment."""
        after = segment[index + 1 : index + 2]
        return segment[index].size + sum(span.size for span in after if span.state == "unmapped")

    def grown(self, kind, wanted):
        if self.settings.expandable_segments:
            return self.mapped(kind, wanted)
        own = -(-wanted // (2 * MIB)) * 2 * MIB
        size = 2 * MIB if kind == "small" else 20 * MIB if wanted < 10 * MIB else own
        if self.reserved_bytes + size > self.capacity:
            return None
        self.segments[kind].insert(0, [Span("free", size)])
        return self.segments[kind][0], 0

    def mapped(self, kind, wanted):
        segment = self.segments[kind][0]
        start = self.lowest_room(segment, wanted)
        index, missing = start, wanted
        while missing > 0:
            if segment[index].state == "unmapped":
                page = 2 * MIB if kind == "small" else 20 * MIB
                size = -(-min(missing, segment[index].size) // page) * page
                if self.reserved_bytes + size > self.capacity:
                    self.tidy()
                    return None
                rest = segment[index].size - size
                segment[index : index + 1] = [Span("free", size), *([Span("unmapped", rest)] if rest else [])]
            missing -= segment[index].size
            index += 1
        segment[start:index] = [Span("free", sum(span.size for span in segment[start:index]))]
        self.tidy()
        return segment, start

    def lowest_room(self, segment, wanted):
        for index, span in enumerate(segment):
            if span.state != "unmapped":
                continue
            start = index - 1 if index and segment[index - 1].state == "free" else index
            room = 0
            for further in segment[start:]:
                if further.state == "used":
                    break
                room += further.size
            if room >= wanted:
                return start
        raise AssertionError("no addresses left")

    def release_oversize(self, kind, wanted):
        if self.settings.max_split_size_bytes is None or self.settings.expandable_segments:
            return False
        missing = max(wanted, self.limit())
        whole = [segment for segment in self.segments[kind] if len(segment) == 1]
        oversize = [s for s in whole if s[0].state == "free" and s[0].size >= self.limit()]
        oversize.sort(key=lambda segment: segment[0].size)  # sorting keeps the order among equals
        enough = [segment for segment in oversize if segment[0].size >= missing]
        released = enough[:1]
        for segment in [] if enough else reversed(oversize):
            if sum(gone[0].size for gone in released) < missing:
                released.append(segment)
        self.segments[kind] = [s for s in self.segments[kind] if not any(s is gone for gone in released)]
        return sum(gone[0].size for gone in released) >= missing

    def collect(self):
        threshold = self.settings.garbage_collection_threshold
        if threshold is None or self.capacity == ADDRESSES or self.settings.expandable_segments:
            return
        while self.reserved_bytes > int(threshold * self.capacity):
            large = self.segments["large"]
            ages = [
                self.searches["large"] - segment[0].since
                if len(segment) == 1 and segment[0].state == "free"
                else None
                for segment in large
            ]
            known = [age for age in ages if age is not None]
            if not known:
                return
            self.segments["large"] = [
                segment
                for segment, age in zip(large, ages, strict=True)
                if age is None or age * len(known) < sum(known)
            ]

    def flush(self):
        self.cache_flushes += 1
        for kind, segments in self.segments.items():
            if self.settings.expandable_segments:
                segments[0] = self.unmapped(segments[0], 2 * MIB if kind == "small" else 20 * MIB)
            else:
                segments[:] = [segment for segment in segments if any(s.state == "used" for s in segment)]
        self.tidy()

    def unmapped(self, segment, page):
        spans, address = [], 0
        for span in segment:
            first = -(-address // page) * page
            last = (address + span.size) // page * page
            if span.state == "free" and first < last:
                spans += [Span("free", first - address), Span("unmapped", last - first)]
                spans += [Span("free", address + span.size - last)]
            else:
                spans.append(span)
            address += span.size
        return spans

    def tidy(self):
        """Drop empty spans and join neighbours that are not used and of one state."""
        for segments in self.segments.values():
            for segment in segments:
                joined: list[Span] = []
                for span in segment:
                    if span.size and joined and span.state != "used" and joined[-1].state == span.state:
                        joined[-1].size += span.size
                        joined[-1].since = max(joined[-1].since, span.since)
                    elif span.size:
                        joined.append(span)
                segment[:] = joined
