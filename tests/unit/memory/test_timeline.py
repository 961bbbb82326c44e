"""Memory from moment to moment: what a chart shows is what the replay held."""

from brimful.memory import live_profile, memory_timeline, predict_memory
from brimful.trace import Category, Phase
from helpers.traces import TraceWriter, two_steps

MIB = 1 << 20


def test_with_a_moment_for_each_event_it_is_the_replay():
    trace = two_steps("cpu")
    profile, timeline = live_profile(trace, 1), memory_timeline(trace)
    assert [each.allocated_bytes for each in timeline] == profile.live_bytes.tolist()
    for each in timeline:
        assert each.held_bytes == tuple(size for _, size in profile.breakdown_at(each.position))


def test_in_few_moments_the_peak_is_among_them_and_they_are_in_order():
    trace = two_steps()
    for moments in (1, 2, 3, 7):
        timeline = memory_timeline(trace, moments=moments)
        assert len(timeline) == moments
        assert max(each.allocated_bytes for each in timeline) == predict_memory(trace).peak_allocated_bytes
        positions = [each.position for each in timeline]
        assert positions == sorted(set(positions))


def test_a_moment_names_its_op_and_the_largest_blocks_that_come_and_go():
    writer = TraceWriter()
    writer.allocate(9 * MIB, "weight", Category.PARAMETERS)
    writer.op("aten.mm.default", module="body.0")
    first = writer.allocate(MIB, "mm", Category.SAVED_TENSORS)
    writer.op("aten.exp.default", module="body.1", phase=Phase.BACKWARD)
    writer.allocate(4 * MIB, "exp")
    writer.free(first)
    setup, forward, backward, freed = memory_timeline(writer.trace())
    assert (setup.phase, setup.op, setup.largest) == (Phase.SETUP, None, ())
    assert (forward.module, forward.op) == ("body.0", "aten.mm.default")
    assert backward.phase is Phase.BACKWARD
    assert [(each.label, each.held_bytes, each.module) for each in backward.largest] == [
        ("exp", 4 * MIB, "body.1"),
        ("mm", MIB, "body.0"),
    ]
    assert [each.label for each in freed.largest] == ["exp"]


def test_a_trace_without_events_has_no_moments():
    assert memory_timeline(TraceWriter().trace()) == ()
