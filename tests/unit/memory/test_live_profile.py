"""Live bytes over a trace's events, checked against sums done by hand."""

import pytest

from brimful.errors import UnknownNameError
from brimful.memory import live_profile, rounding_bytes_of
from brimful.trace import Category
from helpers.traces import TraceWriter, two_steps

MIB = 1 << 20


def test_live_bytes_follow_allocations_and_releases():
    profile = live_profile(two_steps(), 512)
    in_mib = (profile.live_bytes // MIB).tolist()
    assert in_mib == [8, 16, 19, 27, 24, 16, 24, 32, 40, 32, 24]
    assert profile.ops.tolist() == [-1, 0, 1, 2, 2, 2, 3, 4, 5, 5, 5]


def test_sizes_are_rounded_on_cuda_and_exact_on_a_cpu():
    writer = TraceWriter()
    for size_bytes in (0, 1, 513):
        writer.allocate(size_bytes, "x")
    trace = writer.trace()
    assert live_profile(trace, rounding_bytes_of("cuda")).live_bytes.tolist() == [0, 512, 1536]
    assert live_profile(trace, rounding_bytes_of("cpu")).live_bytes.tolist() == [0, 1, 514]


def test_the_peak_is_the_first_of_equals():
    writer = TraceWriter()
    writer.op("a")
    first = writer.allocate(512, "first")
    writer.free(first)
    writer.op("b")
    writer.allocate(512, "second")
    profile = live_profile(writer.trace(), 1)
    assert (profile.peak_position, profile.peak_bytes) == (0, 512)
    assert profile.op_at(profile.peak_position).name == "a"


def test_storages_live_at_a_position_hold_its_bytes():
    profile = live_profile(two_steps(), 512)
    for position, live_bytes in enumerate(profile.live_bytes):
        assert sum(profile.held_bytes_at(position).values()) == live_bytes
        assert sum(dict(profile.breakdown_at(position)).values()) == live_bytes
    assert list(profile.held_bytes_at(5)) == [0, 3]  # the weight and its gradient


def test_the_breakdown_names_every_category_in_order():
    profile = live_profile(two_steps(), 512)
    assert profile.breakdown_at(3) == (
        (Category.PARAMETERS, 8 * MIB),
        (Category.GRADIENTS, 8 * MIB),
        (Category.OPTIMIZER_STATE, 0),
        (Category.SAVED_TENSORS, 8 * MIB),
        (Category.INPUTS, 0),
        (Category.OTHER_TENSORS, 0),
        (Category.TEMPORARIES, 3 * MIB),
    )


def test_each_step_has_its_peak():
    profile = live_profile(two_steps(), 512)
    assert profile.last_step == 1
    assert [profile.peak_bytes_in_step(step) // MIB for step in (0, 1)] == [27, 40]


def test_a_step_starts_with_what_the_last_one_left():
    writer = TraceWriter()
    writer.op("a", step=0)
    left = writer.allocate(512, "left")
    writer.op("b", step=1)
    writer.free(left)
    assert live_profile(writer.trace(), 1).peak_bytes_in_step(1) == 512


def test_in_setup_there_is_no_op():
    assert live_profile(two_steps(), 512).op_at(0) is None


def test_an_unknown_kind_of_device_is_an_error():
    with pytest.raises(UnknownNameError, match="device kind 'tpu'"):
        rounding_bytes_of("tpu")
