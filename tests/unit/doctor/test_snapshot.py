"""A CUDA memory snapshot is read without running anything, and its peak, holders and faults are those in it."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from brimful.doctor.allocations import UNKNOWN_LINE, DeviceUse, device_uses
from brimful.doctor.snapshot import Lines, read_snapshot
from brimful.doctor.snapshot_text import snapshot_text
from brimful.errors import FileFormatError
from brimful.utils.quantities import MIB


def frame(file: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": file, "line": line, "name": name}


TORCH = frame("/env/lib/python3.11/site-packages/torch/nn/modules/linear.py", 134, "forward")
CPP = frame("CUDACachingAllocator.cpp", 0, "gather_with_cpp")
FORWARD = [CPP, TORCH, frame("/home/me/train.py", 12, "forward"), frame("/home/me/train.py", 40, "main")]
LOSS = [frame("/home/me/train.py", 20, "step"), frame("/home/me/train.py", 40, "main")]
OF_LIBRARY = [TORCH, frame("/env/lib/python3.11/site-packages/timm/layers/mlp.py", 7, "forward"), *LOSS]


class Allocator:
    """Writes a snapshot as torch does: blocks in segments, and events."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.live: dict[int, tuple[int, list[Any]]] = {}
        self.next = 4096

    def alloc(self, size: int, frames: list[Any]) -> int:
        address, self.next = self.next, self.next + size
        self.live[address] = size, frames
        self._event("alloc", address, size, frames)
        return address

    def free(self, address: int) -> None:
        size, frames = self.live.pop(address)
        self._event("free_requested", address, size, frames)
        self._event("free_completed", address, size, frames)

    def ran_out(self, size: int) -> None:
        self.events.append({"action": "oom", "size": size, "device_free": MIB, "frames": LOSS, "stream": 0})

    def _event(self, action: str, addr: int, size: int, frames: list[Any]) -> None:
        at = {"stream": 0, "time_us": len(self.events)}
        self.events.append({"action": action, "addr": addr, "size": size, "frames": frames, **at})

    def snapshot(self, *, free: tuple[int, ...] = (), **segment: Any) -> dict[str, Any]:
        blocks = [
            {
                "address": address,
                "size": size,
                "requested_size": size,
                "state": "active_allocated",
                "frames": frames,
            }
            for address, (size, frames) in self.live.items()
        ]
        blocks += [
            {"address": 0, "size": size, "requested_size": 0, "state": "inactive", "frames": []}
            for size in free
        ]
        total = sum(block["size"] for block in blocks)
        sizes = {"total_size": total, "allocated_size": total - sum(free), "active_size": total - sum(free)}
        kind = {"device": 0, "address": 4096, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0)}
        segments = [{**kind, **sizes, "blocks": blocks, **segment}] if blocks else []
        return {"segments": segments, "device_traces": [self.events], "allocator_settings": {}}


def use_of(folder: Path, document: Any) -> DeviceUse:
    path = folder / "snapshot.pickle"
    path.write_bytes(pickle.dumps(document))
    (use,) = device_uses(read_snapshot(path))
    return use


def training(allocator: Allocator, *, leaks: bool) -> None:
    for _ in range(12):
        activations = [allocator.alloc(4 * MIB, FORWARD) for _ in range(3)]
        loss = allocator.alloc(512, LOSS)
        for each in activations:
            allocator.free(each)
        if not leaks:
            allocator.free(loss)


def test_the_peak_and_what_holds_it_are_those_of_the_events(tmp_path: Path) -> None:
    allocator = Allocator()
    weights = [allocator.alloc(MIB, OF_LIBRARY) for _ in range(2)]
    training(allocator, leaks=False)
    allocator.alloc(2 * MIB, [])
    use = use_of(tmp_path, allocator.snapshot(free=(3 * MIB,)))
    assert use.peak is not None
    assert use.peak.size_bytes == (2 + 12) * MIB + 512
    held = [(each.line, each.size_bytes, each.blocks) for each in use.peak.lines]
    assert held == [
        ("/home/me/train.py:12 (forward)", 12 * MIB, 3),
        ("timm/layers/mlp.py:7 (forward)", 2 * MIB, len(weights)),
        ("/home/me/train.py:20 (step)", 512, 1),
    ]
    assert {each.line for each in use.lines} == {"timm/layers/mlp.py:7 (forward)", UNKNOWN_LINE}
    assert (use.allocated_bytes, use.reserved_bytes) == (4 * MIB, 7 * MIB)
    assert (use.free_inside_bytes, use.largest_free_bytes, use.cached_bytes) == (3 * MIB, 3 * MIB, 0)
    assert (use.before_bytes, use.findings) == (0, ())
    text = snapshot_text("snapshot.pickle", [use])
    assert "peak            14 MiB in tensors" in text
    assert "12 MiB  /home/me/train.py:12 (forward), 3 blocks" in text


def test_a_history_that_begins_late_says_so_and_counts_what_was_there(tmp_path: Path) -> None:
    allocator = Allocator()
    kept = allocator.alloc(8 * MIB, OF_LIBRARY)
    gone = allocator.alloc(4 * MIB, FORWARD)
    allocator.events.clear()
    allocator.alloc(MIB, LOSS)
    allocator.free(gone)
    assert kept in allocator.live
    use = use_of(tmp_path, allocator.snapshot())
    assert use.peak is not None
    assert (use.before_bytes, use.peak.size_bytes) == (12 * MIB, 13 * MIB)
    assert [(each.line, each.size_bytes) for each in use.peak.lines] == [
        ("timm/layers/mlp.py:7 (forward)", 8 * MIB),
        ("allocated before the history begins", 4 * MIB),
        ("/home/me/train.py:20 (step)", MIB),
    ]
    assert "begins with 12 MiB allocated" in snapshot_text("s", [use])


def test_blocks_that_a_line_makes_and_never_frees_are_found(tmp_path: Path) -> None:
    leaking, well = Allocator(), Allocator()
    training(leaking, leaks=True)
    training(well, leaks=False)
    (found,) = use_of(tmp_path, leaking.snapshot()).findings
    assert (found.check, found.line) == ("memory-grows", "/home/me/train.py:20 (step)")
    assert found.size_bytes == 12 * 512
    assert use_of(tmp_path, well.snapshot()).findings == ()


def test_the_building_of_a_model_is_no_growth(tmp_path: Path) -> None:
    allocator = Allocator()
    for _ in range(40):
        allocator.alloc(MIB, FORWARD)
    assert use_of(tmp_path, allocator.snapshot()).findings == ()


@pytest.mark.parametrize(
    ("asked", "free", "segment", "checks"),
    [
        (60 * MIB, (30 * MIB, 40 * MIB), {}, ["fragmented"]),
        (60 * MIB, (30 * MIB, 40 * MIB), {"is_expandable": True}, []),
        (60 * MIB, (30 * MIB, 40 * MIB), {"settings": {"expandable_segments": True}}, []),
        (60 * MIB, (10 * MIB,), {}, []),
        (None, (100 * MIB,), {}, []),  # between two steps
    ],
)
def test_free_memory_between_tensors_is_fragmentation_if_memory_ran_out_for_less(
    tmp_path: Path, asked: int | None, free: tuple[int, ...], segment: dict[str, Any], checks: list[str]
) -> None:
    allocator = Allocator()
    allocator.alloc(100 * MIB, FORWARD)
    if asked:
        allocator.ran_out(asked)
    settings = segment.pop("settings", {})
    document = allocator.snapshot(free=free, **segment)
    use = use_of(tmp_path, {**document, "allocator_settings": settings})
    assert [each.check for each in use.findings] == checks
    if checks:
        assert use.findings[0].size_bytes == sum(free)


def test_where_memory_ran_out_is_said(tmp_path: Path) -> None:
    allocator = Allocator()
    allocator.alloc(100 * MIB, FORWARD)
    allocator.ran_out(12 * MIB)
    use = use_of(tmp_path, allocator.snapshot(free=(8 * MIB, 8 * MIB)))
    (ran_out,) = use.ran_out
    assert (ran_out.asked_bytes, ran_out.allocated_bytes, ran_out.device_free_bytes) == (
        12 * MIB,
        100 * MIB,
        MIB,
    )
    assert ran_out.line == "/home/me/train.py:20 (step)"
    assert [each.check for each in use.findings] == ["fragmented"]


def test_freed_memory_that_waits_for_a_stream_is_found(tmp_path: Path) -> None:
    allocator = Allocator()
    allocator.alloc(100 * MIB, FORWARD)
    allocator.alloc(10 * MIB, FORWARD)
    document = allocator.snapshot()
    document["segments"][0]["blocks"][1]["state"] = "active_pending_free"
    use = use_of(tmp_path, document)
    assert (use.allocated_bytes, use.late_bytes) == (100 * MIB, 10 * MIB)
    assert [each.check for each in use.findings] == ["freed-late"]


def test_a_snapshot_without_history_has_its_end_alone(tmp_path: Path) -> None:
    allocator = Allocator()
    allocator.alloc(MIB, FORWARD)
    segments = allocator.snapshot()["segments"]
    use = use_of(tmp_path, segments)
    assert (use.peak, use.allocated_bytes) == (None, MIB)
    assert "_record_memory_history" in snapshot_text("s", [use])


def test_torch_reads_the_snapshots_of_these_tests(tmp_path: Path) -> None:
    """They have the format of torch's own viewer."""
    from torch.cuda import _memory_viz

    allocator = Allocator()
    training(allocator, leaks=True)
    document = allocator.snapshot(free=(MIB,))
    assert "[a" in _memory_viz.segsum(document)
    assert f"{len(allocator.events)} entries" in _memory_viz.trace(document)


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def hostile(folder: Path) -> dict[str, bytes]:
    canary = folder / "canary"
    looped: list[Any] = []
    looped.append(looped)
    shared = [{"size": 1, "state": "inactive", "frames": []}] * 2000
    laughs = {"segments": [{"total_size": 1, "blocks": shared}] * 2000}
    nested: Any = []
    for _ in range(300):
        nested = [nested]
    return {
        "code": pickle.dumps({"segments": [Hostile(canary)]}),
        "code in the oldest protocol": pickle.dumps(Hostile(canary), protocol=0),
        "a global": b"cos\nsystem\n.",
        "a persistent id": b"P1\n.",
        "an extension": b"\x80\x02\x82\x01.",
        "a large memo": b"\x80\x02]r\xff\xff\xff\x7f.",
        "a large memo as text": b"]p2147483647\n.",
        "a large bytearray": b"\x80\x05\x96" + (2**62).to_bytes(8, "little") + b".",
        "a large text": b"\x80\x04\x8d" + (2**62).to_bytes(8, "little") + b".",
        "truncated": pickle.dumps(Allocator().snapshot())[:-7],
        "not a pickle": b"PK\x03\x04 a zip",
        "empty": b"",
        "a loop": pickle.dumps(looped),
        "a nest": pickle.dumps(nested),
        "many of the same": pickle.dumps(laughs),
        "another document": pickle.dumps({"a": 1}),
        "a negative size": pickle.dumps({"segments": [{"total_size": -1, "blocks": []}]}),
        "a large size": pickle.dumps({"segments": [{"total_size": 2**80, "blocks": []}]}),
        "a state": pickle.dumps({"segments": [{"total_size": 1, "blocks": [{"size": 1, "state": "odd"}]}]}),
        "a set": pickle.dumps({"segments": {1, 2}}),
    }


@pytest.mark.parametrize("name", list(hostile(Path())))
def test_a_hostile_snapshot_is_refused_in_one_line_and_runs_nothing(tmp_path: Path, name: str) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(hostile(tmp_path)[name])
    with pytest.raises(FileFormatError) as refusal:
        device_uses(read_snapshot(path))
    assert not (tmp_path / "canary").exists()
    assert len(str(refusal.value).splitlines()) == 1
    assert str(path) in str(refusal.value)


def test_the_hostile_snapshots_would_run_code(tmp_path: Path) -> None:
    pickle.loads(hostile(tmp_path)["code"])
    assert (tmp_path / "canary").is_dir()


def test_odd_frames_have_no_line_and_control_characters_are_escaped() -> None:
    lines = Lines()
    assert lines.of("frames") == lines.of([{"filename": 1}]) == lines.of([]) == ""
    assert lines.of([frame("/a/\x1b[31m.py", 1, "f")]) == "/a/\\x1b[31m.py:1 (f)"
