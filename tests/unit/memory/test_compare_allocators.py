"""What other settings of the allocator would change, for traces small enough to follow by hand."""

import pytest

from brimful.errors import UnknownNameError
from brimful.memory import (
    AllocatorSettings,
    compare_allocators,
    predict_memory,
    smallest_surviving_capacity_bytes,
)
from helpers.traces import TraceWriter, two_steps

MIB = 1 << 20


def play(*requests: tuple[str, int] | str):
    """A trace: ("a", 40) allocates 40 MiB, "a" frees them."""
    writer = TraceWriter()
    writer.op("aten.mm")
    storages = {}
    for request in requests:
        if isinstance(request, str):
            writer.free(storages[request])
        else:
            label, size_mib = request
            storages[label] = writer.allocate(size_mib * MIB, label)
    return writer.trace()


def cut_by_large_requests():
    """A large block is freed and a smaller request keeps a piece of it when the next large one comes."""
    return play(("a", 200), "a", ("b", 30), ("c", 200), "b", "c")


def rows(trace, capacity_mib=None):
    """Settings as text: (peak reserved, smallest surviving capacity) in MiB, flushes, fits."""
    compared = compare_allocators(trace, None if capacity_mib is None else capacity_mib * MIB)
    return {
        str(row.settings): (
            row.peak_reserved_bytes // MIB,
            row.smallest_surviving_capacity_bytes // MIB,
            row.cache_flushes,
            row.fits,
        )
        for row in compared
    }


def test_every_setting_is_compared_with_the_defaults():
    assert rows(cut_by_large_requests()) == {
        "": (400, 400, 0, True),  # b is cut off a's 200, which can then neither serve c nor be given back
        # a takes 10 pages of 20; b lies at their start and 170 after it are free, so c needs two pages more.
        "expandable_segments:True": (240, 240, 0, True),
        "max_split_size_mb:128": (230, 230, 0, True),  # b may not cut the 200, which c takes again
        "max_split_size_mb:512": (400, 400, 0, True),
        "roundup_power2_divisions:4": (448, 448, 0, True),  # 200 are rounded to 224 and 30 to 32
    }


def test_at_a_capacity_collection_is_compared_too():
    compared = rows(cut_by_large_requests(), 300)
    assert compared[""] == (400, 400, 0, False)
    assert compared["max_split_size_mb:128"] == (230, 230, 0, True)
    # b still finds a's 200, as nothing is collected for a request that the cache serves
    assert compared["garbage_collection_threshold:0.8"] == (400, 400, 0, False)


def test_what_fits_by_flushing_says_so():
    compared = rows(play(("a", 40), "a", ("b", 60)), 70)
    assert compared[""] == (60, 60, 1, True)
    # 40 are not over 0.8 × 70; at the 60 that survive they are not over 48 either, so b's flush frees them
    assert compared["garbage_collection_threshold:0.8"] == (60, 60, 1, True)


def test_collection_takes_the_place_of_a_flush():
    compared = rows(play(("a", 60), "a", ("b", 62)), 70)
    assert compared[""] == (62, 62, 1, True)
    assert compared["garbage_collection_threshold:0.8"] == (62, 62, 0, True)  # 60 are over 56


def test_a_row_says_what_a_prediction_says():
    for capacity_bytes in (None, 44 * MIB, 20 * MIB):
        for row in compare_allocators(two_steps(), capacity_bytes):
            predicted = predict_memory(two_steps(), allocator=row.settings, capacity_bytes=capacity_bytes)
            assert row.peak_reserved_bytes == predicted.peak_reserved_bytes
            assert row.cache_flushes == predicted.cache_flushes
            assert row.fits == (predicted.out_of_memory_at is None)
            surviving = smallest_surviving_capacity_bytes(two_steps(), allocator=row.settings)
            assert row.smallest_surviving_capacity_bytes == surviving


def test_collecting_early_can_need_more_than_is_reserved_without_it():
    # Without collection p and q share a's 60, and so do s and r after them: 130 with b. At a capacity of 130
    # a's segment goes when b comes (60 > 39), p and q get 30 each, s is cut off p's, and r's 46 do not fit
    # beside b's 70 and p's 30.
    trace = play(("a", 60), "a", ("b", 70), ("p", 30), ("q", 30), "p", ("s", 11), "q", ("r", 45))
    assert smallest_surviving_capacity_bytes(trace) == 130 * MIB
    collecting = AllocatorSettings(garbage_collection_threshold=0.3)
    assert predict_memory(trace, allocator=collecting, capacity_bytes=130 * MIB).out_of_memory_at is not None
    assert smallest_surviving_capacity_bytes(trace, allocator=collecting) == 146 * MIB


def test_a_cpu_has_nothing_to_compare():
    assert compare_allocators(two_steps("cpu"), 100 * MIB) == ()


def test_an_unknown_kind_of_device_is_refused():
    with pytest.raises(UnknownNameError, match="device kind 'xpu'"):
        compare_allocators(two_steps("xpu"))
