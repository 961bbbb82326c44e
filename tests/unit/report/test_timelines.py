"""Files for memory_viz and Perfetto hold the events of the trace, in the form that torch itself reads."""

import json
import pickle
import pickletools
from itertools import pairwise

from torch.cuda import _memory_viz

from brimful.memory import live_profile, memory_timeline
from brimful.report.timelines import memory_viz_snapshot, perfetto_document
from helpers.captured_jobs import CPU, capture, job
from helpers.traces import two_steps

READ_BY_MEMORY_VIZ = """
PROTO FRAME STOP MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET APPEND APPENDS SETITEM SETITEMS DICT LIST
TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT EMPTY_LIST EMPTY_TUPLE BININT BININT1 BININT2 LONG1 BINFLOAT NONE NEWTRUE
NEWFALSE BINUNICODE SHORT_BINUNICODE
"""


def test_a_snapshot_has_every_allocation_and_free_and_torch_reads_it():
    trace = capture(job(), CPU, samples=8)
    snapshot = pickle.loads(memory_viz_snapshot(trace))
    (entries,) = snapshot["device_traces"]
    live: dict[int, int] = {}
    levels = []
    for entry in entries:
        if entry["action"] == "alloc":
            assert entry["addr"] not in live
            live[entry["addr"]] = entry["size"]
        elif entry["action"] == "free_completed":
            assert live.pop(entry["addr"]) == entry["size"]
        else:
            continue
        levels.append(sum(live.values()))
    assert levels == live_profile(trace, 1).live_bytes.tolist()
    assert _memory_viz.trace(snapshot).count("MEM[") == sum(e["action"] == "alloc" for e in entries)


def test_the_frames_of_a_block_are_what_it_is_its_op_with_its_line_and_its_module():
    trace = capture(job(), CPU, samples=8)
    entries = pickle.loads(memory_viz_snapshot(trace))["device_traces"][0]
    made = [[frame["name"] for frame in entry["frames"]] for entry in entries if entry["action"] == "alloc"]
    assert ["parameters: 0.weight"] in made
    assert any(len(names) == 3 and names[2] == "forward: 0" for names in made)


def test_memory_viz_can_read_a_snapshot():
    """torch/utils/viz/MemoryViz.js reads these codes of pickle, and fails on categories without "unknown"."""
    content = memory_viz_snapshot(capture(job(), CPU, samples=8))
    codes = {code.name: argument for code, argument, _ in pickletools.genops(content)}
    assert codes["PROTO"] in range(2, 5)
    assert codes.keys() <= set(READ_BY_MEMORY_VIZ.split())
    (entries,) = pickle.loads(content)["device_traces"]
    assert entries[-1]["action"] == "snapshot"
    assert "unknown" in {entry["category"] for entry in entries}
    assert all({"action", "addr", "size", "stream", "frames", "time_us"} <= entry.keys() for entry in entries)
    frames = [frame for entry in entries for frame in entry["frames"]]
    assert all(frame.keys() == {"name", "filename", "line"} for frame in frames)


def test_perfetto_has_a_counter_for_each_moment_and_a_slice_for_each_phase():
    timeline = memory_timeline(two_steps())
    document = perfetto_document(timeline)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    events = document["traceEvents"]
    assert all({"name", "ph", "pid", "tid"} <= each.keys() for each in events)
    assert all(isinstance(each["ts"], int) for each in events if each["ph"] != "M")
    counters = [event for event in events if event["ph"] == "C"]
    assert [sum(each["args"].values()) for each in counters] == [each.allocated_bytes for each in timeline]
    slices = [event for event in events if event["ph"] == "X"]
    assert slices[0]["ts"] == 0
    assert all(before["ts"] + before["dur"] <= after["ts"] for before, after in pairwise(slices))
    assert slices[-1]["ts"] + slices[-1]["dur"] == timeline[-1].position + 1
