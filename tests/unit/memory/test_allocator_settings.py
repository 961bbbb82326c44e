"""The allocator's settings and their text; the tables of divisions are what torch 2.13's own parser made."""

import pytest

from brimful.errors import UnknownNameError, UsageError
from brimful.memory import AllocatorSettings

MIB = 1 << 20
GIB = 1 << 30


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_split_size_bytes", 19 * MIB),
        ("max_split_size_bytes", 20 * MIB + 512),
        ("roundup_power2_divisions", 3),
        ("roundup_power2_divisions", 0),
        ("garbage_collection_threshold", 0.0),
        ("garbage_collection_threshold", 1.0),
    ],
)
def test_settings_that_pytorch_refuses_are_refused(field, value):
    with pytest.raises(UsageError, match=f"{field} is {value}"):
        AllocatorSettings(**{field: value})


def test_there_is_a_number_of_divisions_for_each_range():
    with pytest.raises(UsageError, match="has 15 numbers; PyTorch has 16"):
        AllocatorSettings(roundup_power2_divisions=(4,) * 15)
    with pytest.raises(UsageError, match="has 3; PyTorch takes 0 or a power"):
        AllocatorSettings(roundup_power2_divisions=(4,) * 15 + (3,))


def test_every_simulated_option_is_read():
    text = (
        "expandable_segments:True,max_split_size_mb:128,roundup_power2_divisions:4,"
        "garbage_collection_threshold:0.8"
    )
    settings = AllocatorSettings.parse(text)
    assert settings == AllocatorSettings(
        expandable_segments=True,
        max_split_size_bytes=128 * MIB,
        roundup_power2_divisions=4,
        garbage_collection_threshold=0.8,
    )
    assert str(settings) == text


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("", AllocatorSettings()),
        ("  ", AllocatorSettings()),
        ("expandable_segments:False", AllocatorSettings()),
        (" expandable_segments : True , ", AllocatorSettings(expandable_segments=True)),
        ("max_split_size_mb:64,max_split_size_mb:32", AllocatorSettings(max_split_size_bytes=32 * MIB)),
        ("backend:native,pinned_use_background_threads:True", AllocatorSettings()),
        ("release_lock_on_cudamalloc:True", AllocatorSettings()),
    ],
)
def test_what_pytorch_takes_is_taken(text, settings):
    assert AllocatorSettings.parse(text) == settings


def test_the_defaults_have_no_text():
    assert str(AllocatorSettings()) == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("expandable_segments:true", "expandable_segments is 'true'; PyTorch takes True or False"),
        ("expandable_segments", "option 'expandable_segments' has no value"),
        ("expandable_segments:", "option 'expandable_segments:' has no value"),
        ("max_split_size_mb:19", "19 MiB"),
        ("max_split_size_mb:128MB", "max_split_size_mb is '128MB'; PyTorch takes a whole number"),
        ("roundup_power2_divisions:3", "roundup_power2_divisions is 3"),
        ("roundup_power2_divisions:[]", "entry '' is ''"),
        ("roundup_power2_divisions:[256]", "entry '256' is ''"),
        ("roundup_power2_divisions:[1:2,256:3,256:2]", "roundup_power2_divisions has 3"),
        ("roundup_power2_divisions:[300:2]", "a range from 300 MiB; PyTorch takes powers of two"),
        ("roundup_power2_divisions:[256:2", "closing bracket is missing"),
        ("garbage_collection_threshold:1", "a fraction between 0 and 1"),
        ("garbage_collection_threshold:nan", "a fraction between 0 and 1"),
        ("garbage_collection_threshold:high", "is 'high'; PyTorch takes a number"),
        ("backend:cudaMallocAsync", "the CUDA driver pools memory, by rules that are not public"),
        ("backend:other", "backend is 'other'"),
        (
            "large_segment_size_mb:40",
            "'large_segment_size_mb' is not simulated. brimful simulates segments of 20",
        ),
        ("per_process_memory_fraction:0.9", "state that as the capacity"),
    ],
)
def test_what_is_not_taken_says_why(text, message):
    with pytest.raises(UsageError) as refused:
        AllocatorSettings.parse(text)
    assert message in str(refused.value)


@pytest.mark.parametrize("text", ["expandable_segment:True", "expandable_segments:True,,backend:native", "12"])
def test_an_unknown_option_is_an_error(text):
    with pytest.raises(UnknownNameError, match="unknown allocator option"):
        AllocatorSettings.parse(text)


def test_a_misspelled_option_leads_to_the_right_one():
    with pytest.raises(UnknownNameError) as refused:
        AllocatorSettings.parse("max_split_size:128")
    assert refused.value.nearest[0] == "max_split_size_mb"


@pytest.mark.parametrize(
    ("text", "table"),
    [
        ("[256:1,512:2,1024:4,>:8]", [1] * 9 + [2, 4] + [8] * 5),  # the first entry counts for all below, too
        ("[256:1,1024:4]", [1] * 9 + [0, 4] + [0] * 5),  # what no entry names is 0
        ("[>:4]", [0] + [4] * 15),  # "larger" begins at 2 MiB
        ("[4:2,>:4,8:1]", [2, 2, 2, 1] + [4] * 12),
        ("[4:2,2:8]", [2, 8, 2] + [0] * 13),
        ("[4:2,2:8,>:4]", [2, 8] + [4] * 14),  # "larger" than the latest entry
        ("[131072:4]", [4] * 16),  # beyond the last range: the last one
    ],
)
def test_divisions_by_range_are_read_as_pytorch_does(text, table):
    settings = AllocatorSettings.parse(f"roundup_power2_divisions:{text}")
    assert settings.roundup_power2_divisions == tuple(table)
    assert AllocatorSettings.parse(str(settings)) == settings


@pytest.mark.parametrize("text", ["[256:1,512:2,1024:4,>:8]", "[256:1,512:2]", "[1:0,>:4]"])
def test_divisions_by_range_are_written_shortly(text):
    assert str(AllocatorSettings.parse(f"roundup_power2_divisions:{text}")).endswith(f":{text}")


def test_a_size_is_in_the_range_of_its_power_of_two():
    settings = AllocatorSettings(roundup_power2_divisions=tuple(1 << index for index in range(16)))
    sizes = (1, 2 * MIB - 1, 2 * MIB, 4 * MIB - 1, 4 * MIB, 16 * GIB, 32 * GIB, 100 * GIB)
    assert [settings.power2_divisions_for(size) for size in sizes] == [1, 1, 2, 2, 4, 1 << 14, 1 << 15, 1 << 15]
    assert AllocatorSettings(roundup_power2_divisions=4).power2_divisions_for(100) == 4
