"""The simulated allocator against a real one: requests of training steps on an H100, and the segments it took.

A file has a string of actions and a list of numbers, one each per entry, recorded with torch 2.11: A allocates
the number of bytes, F frees the allocation with this number, S takes a segment of this size from the device.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from brimful.memory import CachingAllocator

HISTORIES = sorted((Path(__file__).parents[2] / "helpers" / "gpu_allocations").glob("*.json.gz"))


def test_there_are_histories() -> None:
    assert len(HISTORIES) == 6


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.name.partition(".")[0])
def test_the_simulated_allocator_reserves_what_a_gpu_did_after_each_of_its_requests(path: Path) -> None:
    document = json.loads(gzip.decompress(path.read_bytes()))
    entries = list(zip(document["actions"], document["values"], strict=True))
    assert len(entries) == document["entries_recorded"] > 2000
    allocator = CachingAllocator()
    measured = segments = allocations = 0
    for position, (action, value) in enumerate(entries):
        if action == "S":
            measured, segments = measured + value, segments + 1
        elif action == "F":
            allocator.free(value)
        else:
            assert action == "A"  # none of these runs gave segments back
            allocator.allocate(allocations, value)
            allocations += 1
            assert (position, allocator.reserved_bytes) == (position, measured)
    assert allocator.segment_count == segments
    assert allocator.peak_reserved_bytes == document["measured_peak_reserved_bytes"] == measured
