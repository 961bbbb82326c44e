"""The settings of PyTorch's CUDA caching allocator, and their text.

The options are those of the environment variable `PYTORCH_ALLOC_CONF`, whose older name is
`PYTORCH_CUDA_ALLOC_CONF`. What each accepts was tried on the parser of torch 2.13 (in libc10).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from brimful.errors import UnknownNameError, UsageError
from brimful.memory.pools import LARGE_SEGMENT_BYTES
from brimful.settings import Settings
from brimful.utils.quantities import MIB, format_bytes

SIZE_RANGES = 16
"""Ranges of request sizes that can round differently: below 2 MiB, from 2, 4, 8, … MiB, and from 32 GiB on.

Source: kRoundUpPowerOfTwoIntervals, kRoundUpPowerOfTwoStart.
"""

_WITHOUT_EFFECT = frozenset(
    {
        "graph_capture_record_stream_reuse",
        "pinned_free_catch_all",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
    }
)
"""Options about host memory, locks or CUDA graphs: a training step reserves the same with them.

Source: CUDAAllocatorConfig.h, getKeys, and the keys in libc10 (checked: torch 2.13).
"""
_NOT_SIMULATED = {
    "large_segment_size_mb": "brimful simulates segments of 20 MiB, the default.",
    "max_non_split_rounding_mb": "brimful simulates 20 MiB, the default.",
    "per_process_memory_fraction": "It limits what can be reserved: state that as the capacity instead.",
    "throw_on_cudamalloc_oom": "brimful simulates requests that are refused only after the cache is flushed.",
}
"""Options that change the reserved memory in ways that are not simulated, with advice for each."""
_SIMULATED = (
    "backend",
    "expandable_segments",
    "garbage_collection_threshold",
    "max_split_size_mb",
    "roundup_power2_divisions",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """Settings of PyTorch's CUDA allocator, as in `PYTORCH_ALLOC_CONF`; the defaults are PyTorch's.

    `str` returns the text that sets them, which is empty for the defaults, and `parse` reads it.

    Raises:
        UsageError: PyTorch does not accept a value.

    Source: c10/core/AllocatorConfig.h, class AcceleratorAllocatorConfig (checked: torch 2.13).
    """

    expandable_segments: bool = False
    """Use one growing segment per pool instead of many fixed ones. Source: use_expandable_segments."""
    max_split_size_bytes: int | None = None
    """Blocks of this size or more are neither split nor used for smaller requests; None sets no limit.

    A multiple of 1 MiB, 20 MiB or more. Source: max_split_size.
    """
    roundup_power2_divisions: int | tuple[int, ...] | None = None
    """Round requests up to one of this many steps between powers of two; None rounds to 512 bytes only.

    A power of two for all sizes; or 16 numbers, one for each range of `SIZE_RANGES`, in which 0 and 1 round to
    512 bytes only. Source: roundup_power2_divisions.
    """
    garbage_collection_threshold: float | None = None
    """Release long unused segments when more than this fraction of the capacity is reserved; None does not.

    PyTorch ignores it unless `torch.cuda.set_per_process_memory_fraction` or (from torch 2.10 on) the option
    `per_process_memory_fraction` limits the process to less than the device has. The capacity simulated is
    taken to be that limit; without one nothing is released. The pages of expandable segments never are.

    Source: CUDACachingAllocator.cpp, malloc and garbage_collect_cached_blocks.
    """

    def __post_init__(self) -> None:
        _check_max_split_size(self.max_split_size_bytes)
        _check_divisions(self.roundup_power2_divisions)
        threshold = self.garbage_collection_threshold
        if threshold is not None and not 0 < threshold < 1:
            raise UsageError(
                f"garbage_collection_threshold is {threshold}; PyTorch takes a fraction between 0 and 1."
            )

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Parse the text of `PYTORCH_ALLOC_CONF`.

        Options that do not change the reserved memory of a step are accepted and ignored: `backend:native`, the
        pinned host memory's (`pinned_…`), locks, CUDA graphs.

        Args:
            text: Text such as "expandable_segments:True,max_split_size_mb:128". White space is ignored; the
                last value of a repeated option counts; empty text gives the defaults.

        Returns:
            The settings.

        Raises:
            UnknownNameError: torch 2.13 has no such option.
            UsageError: An option has no value or an invalid one, or brimful does not simulate it.

        Source: AllocatorConfig.cpp and CUDAAllocatorConfig.cpp, parseArgs (checked: torch 2.13).
        """
        settings = cls()
        for name, value in _split_options(text):
            match name:
                case "expandable_segments":
                    settings = replace(settings, expandable_segments=_parse_flag(name, value))
                case "max_split_size_mb":
                    settings = replace(settings, max_split_size_bytes=_parse_int(name, value) * MIB)
                case "roundup_power2_divisions":
                    settings = replace(settings, roundup_power2_divisions=_parse_divisions(name, value))
                case "garbage_collection_threshold":
                    settings = replace(settings, garbage_collection_threshold=_parse_float(name, value))
                case "backend":
                    _check_backend(value)
        return settings

    @classmethod
    def of(cls, settings: Settings) -> AllocatorSettings:
        """Allocator settings that a step's settings ask for; PyTorch's defaults for the others."""
        return cls(expandable_segments=settings.expandable_segments)

    def __str__(self) -> str:
        """The text for `PYTORCH_ALLOC_CONF`, such as "max_split_size_mb:128"; empty for PyTorch's defaults."""
        options = []
        if self.expandable_segments:
            options.append("expandable_segments:True")
        if self.max_split_size_bytes is not None:
            options.append(f"max_split_size_mb:{self.max_split_size_bytes // MIB}")
        if self.roundup_power2_divisions is not None:
            options.append(f"roundup_power2_divisions:{_format_divisions(self.roundup_power2_divisions)}")
        if self.garbage_collection_threshold is not None:
            options.append(f"garbage_collection_threshold:{self.garbage_collection_threshold}")
        return ",".join(options)

    def power2_divisions_for(self, size_bytes: int) -> int | None:
        """Steps between powers of two that a request of `size_bytes` rounds up to; 0, 1 and None mean none."""
        divisions = self.roundup_power2_divisions
        if not isinstance(divisions, tuple):
            return divisions
        size_range = size_bytes.bit_length() - MIB.bit_length()
        return divisions[min(max(size_range, 0), SIZE_RANGES - 1)]


def _check_max_split_size(limit_bytes: int | None) -> None:
    if limit_bytes is None:
        return
    asked = f"max_split_size_bytes is {limit_bytes} ({format_bytes(limit_bytes)})"
    if limit_bytes < LARGE_SEGMENT_BYTES:
        raise UsageError(f"{asked}; PyTorch takes none below {format_bytes(LARGE_SEGMENT_BYTES)}.")
    if limit_bytes % MIB:
        raise UsageError(f"{asked}; PyTorch takes a multiple of 1 MiB.")


def _check_divisions(divisions: int | tuple[int, ...] | None) -> None:
    if divisions is None:
        return
    if not isinstance(divisions, tuple):
        if not _is_power_of_two(divisions):
            raise UsageError(f"roundup_power2_divisions is {divisions}; PyTorch takes a power of two.")
        return
    if len(divisions) != SIZE_RANGES:
        raise UsageError(
            f"roundup_power2_divisions has {len(divisions)} numbers; PyTorch has {SIZE_RANGES} ranges of sizes."
        )
    for number in divisions:
        _check_division(number)


def _check_division(number: int) -> None:
    if number != 0 and not _is_power_of_two(number):
        raise UsageError(f"roundup_power2_divisions has {number}; PyTorch takes 0 or a power of two.")


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number.bit_count() == 1


def _split_options(text: str) -> Iterator[tuple[str, str]]:
    """The (name, value) of each option, all names known and simulated or without effect."""
    dense = "".join(text.split()).removesuffix(",")
    for option in re.split(r",(?![^\[]*\])", dense) if dense else ():  # not at commas between brackets
        name, _, value = option.partition(":")
        if name in _NOT_SIMULATED:
            raise UsageError(f"allocator option {name!r} is not simulated. {_NOT_SIMULATED[name]}")
        if name not in _WITHOUT_EFFECT and name not in _SIMULATED:
            raise UnknownNameError("allocator option", name, (*_SIMULATED, *_NOT_SIMULATED, *_WITHOUT_EFFECT))
        if not value:
            raise UsageError(f"allocator option {option!r} has no value. Write {name}:VALUE.")
        yield name, value


def _parse_flag(name: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise UsageError(f"{name} is {value!r}; PyTorch takes True or False, written so.")
    return value == "True"


def _parse_int(name: str, value: str) -> int:
    if re.fullmatch(r"[0-9]+", value) is None:
        raise UsageError(f"{name} is {value!r}; PyTorch takes a whole number.")
    return int(value)


def _parse_float(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise UsageError(f"{name} is {value!r}; PyTorch takes a number.") from None


def _check_backend(value: str) -> None:
    if value in ("cudaMallocAsync", "hipMallocAsync"):
        raise UsageError(
            f"backend is {value!r}: then the CUDA driver pools memory, by rules that are not public, so what "
            "it reserves cannot be simulated. Use backend:native, the default."
        )
    if value != "native":
        raise UsageError(f"backend is {value!r}; PyTorch takes native or cudaMallocAsync.")


def _parse_divisions(name: str, value: str) -> int | tuple[int, ...]:
    """Parse one number, or "[256:1,512:2,>:4]": for sizes from 256 MiB, from 512 MiB, and all larger ones.

    The first entry counts for smaller sizes too; a range that no entry names has 0. Source:
    parseRoundUpPower2Divisions.
    """
    if not value.startswith("["):
        return _parse_int(name, value)
    if not value.endswith("]"):
        raise UsageError(f"{name} is {value!r}; its closing bracket is missing.")
    table = [0] * SIZE_RANGES
    latest: int | None = None
    for entry in value[1:-1].split(","):
        size, _, number = entry.partition(":")
        divisions = _parse_int(f"{name}'s entry {entry!r}", number)
        _check_division(divisions)
        if size == ">":
            first = 1 if latest is None else latest + 1
            table[first:] = [divisions] * (SIZE_RANGES - first)
            continue
        size_mib = _parse_int(f"{name}'s entry {entry!r}", size)
        if not _is_power_of_two(size_mib):
            raise UsageError(f"{name} has a range from {size_mib} MiB; PyTorch takes powers of two.")
        index = min(size_mib.bit_length() - 1, SIZE_RANGES - 1)
        if latest is None:
            table[:index] = [divisions] * index
        table[index] = divisions
        latest = index
    return tuple(table)


def _format_divisions(divisions: int | tuple[int, ...]) -> str:
    """The shortest text that `_parse_divisions` reads back."""
    if not isinstance(divisions, tuple):
        return str(divisions)
    ranges = range(SIZE_RANGES - 1)
    changes = [index for index in ranges if divisions[index] != divisions[index + 1]]
    first, last = (changes[0], changes[-1]) if changes else (SIZE_RANGES - 1, SIZE_RANGES - 1)
    named = [f"{1 << index}:{divisions[index]}" for index in range(first, last + 1)]
    if divisions[-1] != 0 and changes:
        named.append(f">:{divisions[-1]}")
    return f"[{','.join(named)}]"


DEFAULT_ALLOCATOR = AllocatorSettings()
"""PyTorch's allocator with nothing set."""
