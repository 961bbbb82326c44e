"""The caching allocator's rules, one by one; every expected number is worked out in a comment."""

import pytest

from brimful.memory import AllocatorSettings, CachingAllocator, OutOfMemory, round_allocation

MIB = 1 << 20


def mib(size_bytes: int) -> float:
    return size_bytes / MIB


def held(allocator: CachingAllocator) -> tuple[float, float]:
    """(allocated, reserved) in MiB."""
    return mib(allocator.allocated_bytes), mib(allocator.reserved_bytes)


@pytest.mark.parametrize(("size_bytes", "rounded"), [(1, 512), (512, 512), (513, 1024), (MIB + 1, MIB + 512)])
def test_sizes_round_up_to_multiples_of_512(size_bytes, rounded):
    assert round_allocation(size_bytes) == rounded


@pytest.mark.parametrize(
    ("size_bytes", "rounded"),
    [
        (1200 * MIB, 1280 * MIB),  # between 1024 and 2048 the quarters are 1280, 1536, 1792
        (1024 * MIB, 1024 * MIB),  # a power of two stays
        (2048, 2048),  # up to 4 × 512 bytes there is no room for four steps of 512
        (2049, 2560),  # 2048 + 512
        (5000, 5120),  # steps of 4096 / 4
    ],
)
def test_sizes_round_up_to_quarters_of_powers_of_two(size_bytes, rounded):
    assert round_allocation(size_bytes, power2_divisions=4) == rounded


def test_there_is_no_block_without_bytes():
    with pytest.raises(ValueError, match="at least 1 byte"):
        round_allocation(0)


def test_small_requests_share_segments_of_2_mib():
    allocator = CachingAllocator()
    allocator.allocate("a", 100)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (512, 2 * MIB)
    allocator.allocate("b", MIB)  # the largest small request; 2 MiB − 512 are free
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (512 + MIB, 2 * MIB)
    allocator.allocate("c", MIB)  # 1 MiB − 512 are left: too little
    assert (allocator.reserved_bytes, allocator.segment_count) == (4 * MIB, 2)


def test_requests_below_10_mib_share_segments_of_20_mib():
    allocator = CachingAllocator()
    allocator.allocate("a", 9 * MIB)
    allocator.allocate("b", 9 * MIB)  # from the 11 MiB left; then 2 MiB are
    assert held(allocator) == (18, 20)
    allocator.allocate("c", 9 * MIB)
    assert held(allocator) == (27, 40)


def test_large_requests_get_a_segment_of_their_own_in_steps_of_2_mib():
    allocator = CachingAllocator()
    allocator.allocate("a", 10 * MIB)
    assert held(allocator) == (10, 10)
    allocator.allocate("b", 13 * MIB)  # 14 MiB; the rest of 1 MiB is not over 1 MiB, so it stays with the block
    assert held(allocator) == (10 + 14, 10 + 14)
    allocator.allocate("c", 12 * MIB + 512)  # 14 MiB; the rest of 2 MiB − 512 is cut off
    assert allocator.allocated_bytes == 24 * MIB + 12 * MIB + 512
    assert mib(allocator.reserved_bytes) == 10 + 14 + 14


def test_the_smallest_block_that_fits_is_taken():
    allocator = CachingAllocator()
    for key, size_mib in (("a", 40), ("b", 16), ("c", 12)):
        allocator.allocate(key, size_mib * MIB)
    for key in "abc":
        allocator.free(key)
    allocator.allocate("d", 15 * MIB)  # takes all of b's 16
    assert held(allocator) == (16, 68)
    allocator.allocate("e", 12 * MIB)  # takes c's 12
    assert held(allocator) == (28, 68)


@pytest.mark.parametrize("order", ["abc", "acb", "bac", "bca", "cab", "cba"])
def test_free_neighbours_become_one_block_in_any_order(order):
    allocator = CachingAllocator()
    for key in "abc":
        allocator.allocate(key, 5 * MIB)
    for key in order:
        allocator.free(key)
    allocator.allocate("d", 19 * MIB + 512 * 1024)  # only the whole 20 MiB hold it, and the rest is not cut off
    assert held(allocator) == (20, 20)


def test_a_full_device_gives_back_free_segments_and_tries_again():
    allocator = CachingAllocator(capacity_bytes=40 * MIB)
    allocator.allocate("a", 20 * MIB)
    allocator.free("a")
    assert allocator.allocate("b", 30 * MIB) is None  # 20 + 30 are over 40, so a's segment goes
    assert held(allocator) == (30, 30)
    assert (allocator.cache_flushes, mib(allocator.peak_reserved_bytes)) == (1, 30)


def test_a_segment_partly_in_use_is_not_given_back():
    allocator = CachingAllocator(capacity_bytes=41 * MIB)
    allocator.allocate("a", 8 * MIB)  # 20 MiB, 12 of them free
    allocator.allocate("b", 20 * MIB)
    allocator.free("b")
    refused = allocator.allocate("c", 22 * MIB)  # 20 + 22 are over 41, without b's segment too
    assert refused == OutOfMemory(
        key="c",
        requested_bytes=22 * MIB,
        allocated_bytes=8 * MIB,
        reserved_bytes=20 * MIB,
        capacity_bytes=41 * MIB,
    )


def test_a_refused_request_leaves_the_allocator_usable():
    allocator = CachingAllocator(capacity_bytes=20 * MIB)
    assert allocator.allocate("a", 30 * MIB) is not None
    assert allocator.allocate("a", 20 * MIB) is None
    assert held(allocator) == (20, 20)


def test_uncuttable_blocks_only_serve_requests_near_their_size():
    allocator = CachingAllocator(AllocatorSettings(max_split_size_bytes=30 * MIB))
    allocator.allocate("a", 60 * MIB)
    allocator.free("a")
    allocator.allocate("b", 16 * MIB)  # below the limit, so not from 60
    assert held(allocator) == (16, 76)
    allocator.allocate("c", 40 * MIB)  # 60 is not less than 40 + 20
    assert held(allocator) == (56, 116)
    allocator.allocate("d", 41 * MIB)  # 60 is less than 41 + 20; it is not cut
    assert held(allocator) == (116, 116)


def test_uncuttable_blocks_are_given_back_before_the_cache_is_flushed():
    allocator = CachingAllocator(AllocatorSettings(max_split_size_bytes=30 * MIB), capacity_bytes=100 * MIB)
    allocator.allocate("a", 60 * MIB)
    allocator.allocate("b", 16 * MIB)
    allocator.free("a")
    allocator.free("b")
    allocator.allocate("c", 36 * MIB)  # 76 + 36 are over 100; a's 60 go, b's 16 stay
    assert held(allocator) == (36, 52)
    assert allocator.cache_flushes == 0


def test_uncuttable_blocks_are_given_back_largest_first_and_no_more_than_needed():
    allocator = CachingAllocator(AllocatorSettings(max_split_size_bytes=30 * MIB), capacity_bytes=120 * MIB)
    for key, size_mib in (("a", 30), ("b", 40), ("c", 50)):
        allocator.allocate(key, size_mib * MIB)
    for key in "abc":
        allocator.free(key)
    allocator.allocate("d", 80 * MIB)  # 50 + 40 are enough, so a's 30 stay
    assert held(allocator) == (80, 110)
    assert allocator.cache_flushes == 0


def test_an_expandable_segment_grows_by_pages_of_20_mib():
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=True))
    allocator.allocate("a", 15 * MIB)
    allocator.allocate("b", 25 * MIB)  # 5 MiB are left, so one page more
    assert held(allocator) == (40, 40)  # fixed segments would take 16 + 26
    allocator.allocate("c", 512)
    assert (mib(allocator.reserved_bytes), allocator.segment_count) == (42, 2)  # small pages are 2 MiB


def test_an_expandable_segment_grows_from_its_free_end():
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=True))
    allocator.allocate("a", 18 * MIB)
    allocator.free("a")
    allocator.allocate("b", 30 * MIB)  # 20 mapped and free, 10 more wanted: one page
    assert held(allocator) == (30, 40)  # fixed segments would hold 18 + 30


def test_a_gap_is_filled_before_the_end_of_an_expandable_segment():
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=True))
    allocator.allocate("a", 12 * MIB)
    allocator.allocate("b", 17 * MIB)  # 29 of 40 MiB; 11 at the end are free
    allocator.free("a")
    allocator.allocate("c", 10 * MIB)  # 11 would fit closer than the gap of 12, but can grow
    allocator.allocate("d", 30 * MIB)  # 11 + one page of 20; had c taken 10 of the 11, two pages
    assert held(allocator) == (57, 60)


def test_a_full_device_gets_back_the_free_pages_of_an_expandable_segment():
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=True), capacity_bytes=100 * MIB)
    allocator.allocate("a", 30 * MIB)
    allocator.allocate("b", 30 * MIB)
    assert held(allocator) == (60, 60)
    allocator.free("a")
    allocator.allocate("c", 50 * MIB)  # 60 + 60 are over 100; of a's 30 one whole page goes: 40 + 60
    assert held(allocator) == (80, 100)
    assert allocator.cache_flushes == 1
    allocator.allocate("d", 10 * MIB)  # the end has 10 free; so have a's last 10, which border no unmapped page
    assert held(allocator) == (90, 100)
    allocator.free("c")
    allocator.allocate("e", 55 * MIB)  # c's 50 and the 10 after it are 60
    assert held(allocator) == (95, 100)


def test_an_expandable_segment_runs_out_like_any_other():
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=True), capacity_bytes=80 * MIB)
    allocator.allocate("a", 30 * MIB)
    allocator.allocate("b", 30 * MIB)
    allocator.free("a")
    refused = allocator.allocate("c", 50 * MIB)  # 40 are left after the flush and 60 more are needed
    assert refused is not None
    assert mib(refused.reserved_bytes) == 40


def test_pages_given_back_are_mapped_again_where_they_were():
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=True), capacity_bytes=100 * MIB)
    allocator.allocate("a", 40 * MIB)
    allocator.allocate("b", 20 * MIB)
    allocator.free("a")
    assert allocator.allocate("c", 90 * MIB) is not None  # 20 + 100 are over 100, but a's two pages went
    assert held(allocator) == (20, 20)
    allocator.allocate("d", 30 * MIB)  # into a's gap of 40: two pages
    allocator.allocate("e", 10 * MIB)  # the end of that gap
    assert held(allocator) == (60, 60)


def test_a_request_for_nothing_takes_no_block():
    allocator = CachingAllocator()
    assert allocator.allocate("a", 0) is None
    allocator.free("a")
    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (0, 0)


def test_a_block_is_freed_once():
    allocator = CachingAllocator()
    allocator.allocate("a", 1)
    allocator.free("a")
    with pytest.raises(KeyError):
        allocator.free("a")


def test_peaks_stay_after_everything_is_freed():
    allocator = CachingAllocator()
    allocator.allocate("a", 10 * MIB)
    allocator.free("a")
    assert held(allocator) == (0, 10)
    assert (mib(allocator.peak_allocated_bytes), mib(allocator.peak_reserved_bytes)) == (10, 10)


def collecting(threshold: float, capacity_mib: int, **settings) -> CachingAllocator:
    chosen = AllocatorSettings(garbage_collection_threshold=threshold, **settings)
    return CachingAllocator(chosen, capacity_bytes=capacity_mib * MIB)


def test_segments_are_collected_once_more_than_the_threshold_is_reserved():
    allocator = collecting(0.5, 100)
    allocator.allocate("a", 20 * MIB)
    allocator.free("a")
    allocator.allocate("b", 30 * MIB)  # 20 are reserved
    assert held(allocator) == (30, 50)
    allocator.allocate("c", 22 * MIB)  # 50 are reserved, which is just the threshold
    assert held(allocator) == (52, 72)
    allocator.allocate("d", 24 * MIB)  # 72 are, so a's 20 go
    assert held(allocator) == (76, 76)
    assert allocator.cache_flushes == 0


def test_nothing_is_collected_while_the_cache_serves_requests():
    allocator = collecting(0.1, 1000)
    for key, size_mib in (("a", 100), ("b", 200)):
        allocator.allocate(key, size_mib * MIB)
        allocator.free(key)
    allocator.allocate("c", 100 * MIB)
    assert held(allocator) == (100, 300)  # 300 are over 100, but a's 100 serve c


def test_segments_of_average_age_or_older_are_collected_first():
    allocator = collecting(0.12, 1000)
    allocator.allocate("a", 40 * MIB)  # search 1
    allocator.allocate("b", 60 * MIB)  # search 2
    allocator.free("a")
    allocator.allocate("c", 50 * MIB)  # search 3; 100 are not over 120
    allocator.free("b")
    allocator.allocate(
        "d", 70 * MIB
    )  # search 4; 150 are 30 over; ages a 2, b 1, average 1.5: a's 40 are enough
    assert held(allocator) == (120, 180)


def test_younger_segments_follow_while_too_little_is_collected():
    allocator = collecting(0.1, 1000)
    allocator.allocate("a", 40 * MIB)
    allocator.allocate("b", 60 * MIB)
    allocator.free("a")
    allocator.allocate("c", 50 * MIB)
    allocator.free("b")
    allocator.allocate("d", 70 * MIB)  # as above, but 150 are 50 over: after a's 40 b's 60 go too
    assert held(allocator) == (120, 120)


def with_two_cached(threshold):
    """Segments of 40 and 60 MiB, both free, obtained by searches 1 and 2."""
    allocator = collecting(threshold, 1000)
    allocator.allocate("a", 40 * MIB)
    allocator.allocate("b", 60 * MIB)
    allocator.free("a")
    allocator.free("b")
    return allocator


def test_segments_of_one_age_are_collected_together():
    allocator = with_two_cached(0.09)
    allocator.allocate("c", 70 * MIB)  # 100 are 10 over; either would be enough
    assert held(allocator) == (70, 70)


def test_a_segment_that_was_used_is_young_again():
    allocator = with_two_cached(0.09)
    allocator.allocate("a", 40 * MIB)  # search 3
    allocator.free("a")
    allocator.allocate("c", 70 * MIB)  # search 4; ages a 1, b 2
    assert held(allocator) == (70, 110)


def test_segments_age_by_large_requests_alone():
    allocator = collecting(0.1, 1000)
    allocator.allocate("a", 40 * MIB)  # search 1
    allocator.allocate("b", 60 * MIB)  # search 2
    allocator.allocate("small", 512)
    allocator.free("a")
    allocator.allocate("small too", 512)
    allocator.free("b")
    allocator.allocate("c", 70 * MIB)  # search 3; both are 1 old, so both go, though 102 are but 2 over
    assert allocator.allocated_bytes == 70 * MIB + 2 * 512
    assert mib(allocator.reserved_bytes) == 2 + 70


def test_segments_partly_in_use_and_small_ones_are_not_collected():
    allocator = collecting(0.01, 1000)
    allocator.allocate("a", 8 * MIB)  # cut off 20
    allocator.allocate("small", 512)
    allocator.free("small")
    allocator.allocate("b", 70 * MIB)  # 22 are over 10
    assert held(allocator) == (78, 92)


def test_a_small_request_collects_large_segments():
    allocator = collecting(0.01, 1000)
    allocator.allocate("a", 40 * MIB)
    allocator.free("a")
    allocator.allocate("b", MIB)
    assert held(allocator) == (1, 2)


def test_without_a_capacity_nothing_is_collected():
    allocator = CachingAllocator(AllocatorSettings(garbage_collection_threshold=0.01))
    allocator.allocate("a", 40 * MIB)
    allocator.free("a")
    allocator.allocate("b", 50 * MIB)
    assert held(allocator) == (50, 90)


def test_expandable_segments_are_not_collected():
    allocator = collecting(0.01, 1000, expandable_segments=True)
    allocator.allocate("a", 40 * MIB)
    allocator.free("a")
    allocator.allocate("b", MIB)
    assert held(allocator) == (1, 42)


def test_requests_round_by_the_range_their_size_is_in():
    halves_from_4_mib = (0, 0, *[2] * 14)
    allocator = CachingAllocator(AllocatorSettings(roundup_power2_divisions=halves_from_4_mib))
    allocator.allocate("a", 3 * MIB + 512)  # from 2 MiB: as it is
    assert allocator.allocated_bytes == 3 * MIB + 512
    allocator.allocate("b", 4 * MIB + 512)  # from 4 MiB: to 6
    assert allocator.allocated_bytes == 9 * MIB + 512
