"""Predictions for traces small enough to follow by hand."""

import dataclasses
import subprocess
import sys
from dataclasses import replace

import pytest
from msgspec import structs

from brimful.errors import UsageError
from brimful.memory import (
    AllocatorSettings,
    FailedAllocation,
    HeldStorage,
    most_reserved_bytes,
    predict_memory,
    replay_allocations,
    smallest_surviving_capacity_bytes,
)
from brimful.trace import Category, Phase
from helpers.traces import TraceWriter, two_steps

MIB = 1 << 20


def test_on_cuda_blocks_are_counted_and_segments_reserved():
    # Segments of 20 MiB: [8 weight, 8 saved, 3 relu and the last MiB, not cut off], [8 gradient, 8 state];
    # step 1: 8 saved in the first, the temporary gradient of 8 in a third.
    predicted = predict_memory(two_steps())
    assert predicted.peak_allocated_bytes == 40 * MIB
    assert predicted.peak_reserved_bytes == 60 * MIB
    assert predicted.first_step_peak_allocated_bytes == 28 * MIB
    assert predicted.steady_peak_allocated_bytes == 40 * MIB


def test_on_a_cpu_exactly_what_is_asked_for_is_held():
    predicted = predict_memory(two_steps("cpu", mib=1001))
    assert predicted.peak_allocated_bytes == predicted.peak_reserved_bytes == 40 * 1001
    assert predicted.first_step_peak_allocated_bytes == 27 * 1001


def test_the_peak_is_placed():
    predicted = predict_memory(two_steps())
    assert (predicted.peak_op, predicted.peak_module) == ("aten.mm_backward", "layer")
    assert (predicted.peak_phase, predicted.peak_step) == (Phase.BACKWARD, 1)


def test_a_peak_in_setup_has_no_op():
    writer = TraceWriter()
    writer.allocate(MIB, "weight", Category.PARAMETERS)
    predicted = predict_memory(writer.trace())
    assert (predicted.peak_op, predicted.peak_module, predicted.peak_phase) == (None, None, Phase.SETUP)


@pytest.mark.parametrize("device_kind", ["cuda", "cpu"])
def test_the_breakdown_sums_to_the_peak(device_kind):
    predicted = predict_memory(two_steps(device_kind, mib=MIB + 77))
    assert sum(dict(predicted.breakdown).values()) == predicted.peak_allocated_bytes


def test_a_storage_counts_with_its_whole_block():
    writer = TraceWriter()
    writer.op("aten.empty", module="layer")
    writer.allocate(13 * MIB, "x", Category.INPUTS, by_op=False)  # 14 MiB: a rest of 1 MiB is not cut off
    predicted = predict_memory(writer.trace())
    assert dict(predicted.breakdown)[Category.INPUTS] == 14 * MIB
    assert predicted.largest == (
        HeldStorage(label="x", category=Category.INPUTS, module=None, held_bytes=14 * MIB, line=""),
    )


def test_the_largest_storages_are_named_largest_first():
    writer = TraceWriter("cpu")
    writer.op("aten.mm", module="layer")
    for size_bytes in range(1, 31):
        writer.allocate(size_bytes, f"x{size_bytes}")
    largest = predict_memory(writer.trace()).largest
    assert [storage.held_bytes for storage in largest] == list(range(30, 10, -1))
    assert (largest[0].label, largest[0].module) == ("x30", "layer")


def test_where_a_trace_does_not_fit_the_failure_is_placed_and_the_peaks_are_the_whole_steps():
    predicted = predict_memory(two_steps(), capacity_bytes=59 * MIB)
    assert predicted.out_of_memory_at == FailedAllocation(
        op="aten.mm_backward",
        module="layer",
        line="",
        phase=Phase.BACKWARD,
        step=1,
        label="aten.mm_backward",
        requested_bytes=8 * MIB,
    )
    assert predicted.peak_allocated_bytes == 40 * MIB
    assert predicted.peak_reserved_bytes == 60 * MIB


def test_a_trace_can_fail_at_its_first_request():
    predicted = predict_memory(two_steps(), capacity_bytes=1)
    assert predicted.out_of_memory_at.phase is Phase.SETUP
    assert predicted.out_of_memory_at.label == "layer.weight"


def test_a_cpu_fails_where_live_bytes_pass_its_capacity():
    failed = predict_memory(two_steps("cpu"), capacity_bytes=39 * MIB).out_of_memory_at
    assert (failed.op, failed.step) == ("aten.mm_backward", 1)
    assert predict_memory(two_steps("cpu"), capacity_bytes=40 * MIB).out_of_memory_at is None


def test_a_replay_ends_at_the_request_that_fails():
    for device_kind in ("cuda", "cpu"):
        replay = replay_allocations(two_steps(device_kind), capacity_bytes=39 * MIB)
        assert len(replay.profile.live_bytes) < len(replay.profile.trace.events)
        assert len(replay.profile.ops) == len(replay.profile.live_bytes)


def cached_then_large():
    """20 MiB used and freed, then 30 MiB: reserved 50 without limit, 30 where the cache must go."""
    writer = TraceWriter()
    writer.op("aten.first")
    writer.free(writer.allocate(20 * MIB, "first"))
    writer.op("aten.second")
    writer.allocate(30 * MIB, "second")
    return writer.trace()


def test_the_smallest_capacity_survived_is_below_what_is_reserved_without_limit():
    trace = cached_then_large()
    assert predict_memory(trace).peak_reserved_bytes == 50 * MIB
    assert smallest_surviving_capacity_bytes(trace) == 30 * MIB
    assert predict_memory(trace, capacity_bytes=30 * MIB).cache_flushes == 1
    assert predict_memory(trace, capacity_bytes=28 * MIB).out_of_memory_at is not None


def test_expandable_segments_grow_in_place_of_flushing():
    allocator = AllocatorSettings(expandable_segments=True)
    predicted = predict_memory(cached_then_large(), allocator=allocator, capacity_bytes=40 * MIB)
    assert (predicted.peak_reserved_bytes, predicted.cache_flushes) == (40 * MIB, 0)
    assert smallest_surviving_capacity_bytes(cached_then_large(), allocator=allocator) == 40 * MIB


def test_a_cpu_has_no_smaller_capacity_than_what_is_live():
    assert smallest_surviving_capacity_bytes(two_steps("cpu")) is None


def test_a_trace_that_allocates_nothing_is_refused():
    with pytest.raises(UsageError, match="allocates nothing"):
        predict_memory(TraceWriter().trace())


def test_an_unknown_kind_of_device_is_refused():
    with pytest.raises(UsageError, match="device kind 'xpu'"):
        predict_memory(dataclasses.replace(two_steps(), device_kind="xpu"))


def test_the_timeline_does_not_import_torch():
    code = "import sys, brimful.memory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def uncertain_trace():
    """A workspace in forward and one in backward, of no likely size and of 30 MiB at most."""
    writer = TraceWriter("cuda")
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        writer.op("aten.convolution", phase=phase)
        writer.free(writer.allocate(0, "workspace"))
        writer.allocate(12 * MIB, f"kept of {phase}")
    trace = writer.trace()
    storages = (
        structs.replace(s, most_bytes=30 * MIB) if s.label == "workspace" else s for s in trace.storages
    )
    return replace(trace, storages=tuple(storages))


def test_sizes_that_are_not_known_for_sure_count_at_their_most_in_the_upper_end_only():
    trace = uncertain_trace()
    assert predict_memory(trace).peak_reserved_bytes == 24 * MIB
    # A segment of 30 for each workspace: the first one's, with a kept tensor in it, has no room for the second.
    assert most_reserved_bytes(trace, 24 * MIB) == 60 * MIB
    known = replace(trace, storages=tuple(structs.replace(s, most_bytes=None) for s in trace.storages))
    assert most_reserved_bytes(known, 24 * MIB) == 24 * MIB
