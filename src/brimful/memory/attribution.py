"""Peak memory of a trace on a device: its size, where it occurs, and what holds it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from msgspec import structs

from brimful.errors import UsageError
from brimful.memory.allocator import CachingAllocator
from brimful.memory.allocator_settings import AllocatorSettings
from brimful.memory.liveness import LiveProfile, live_profile, profile_of_levels, rounding_bytes_of
from brimful.trace import Category, EventKind, Op, Phase, Storage, Trace

LARGEST_STORAGES = 20
"""How many of the storages live at the peak a prediction names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldStorage:
    """A storage live at the peak."""

    label: str
    category: Category
    module: str | None
    """`fqn` of the module whose op made it; None for parameters, inputs and workspaces."""
    held_bytes: int
    """Bytes of its block: the requested size, rounded up, with a remainder too small to split off."""
    line: str
    """Line of code that made it, as "file.py:12"; "" for small storages and those that no op made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleShare:
    """Memory that a module and its submodules hold at the peak: parameters, gradients, state, tensors."""

    fqn: str
    """Dotted path of the module; "" is the whole model."""
    class_name: str
    held_bytes: int
    depth: int
    """Depth in the module tree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAllocation:
    """The first request that a device of the given capacity cannot meet."""

    op: str | None
    """Name of the latest op; None in setup."""
    module: str | None
    """`fqn` of that op's module; None in setup."""
    line: str
    """Line of code that calls that op, as "file.py:12"; "" if not known."""
    phase: Phase
    step: int
    label: str
    """Description of the requested memory."""
    requested_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPrediction:
    """Predicted memory of a trace on a device.

    All peaks are of the completed steps: within the capacity if they fit, else without a limit.
    """

    allocator: AllocatorSettings
    capacity_bytes: int | None
    """Bytes that the allocator may reserve; None is unlimited."""
    peak_allocated_bytes: int
    """Peak bytes of live storages, in whole blocks."""
    peak_reserved_bytes: int
    """Peak bytes in segments; equal to allocated on a CPU, which caches nothing."""
    unlimited_peak_reserved_bytes: int
    """Peak bytes in segments with unlimited capacity."""
    first_step_peak_allocated_bytes: int
    """Peak of setup and the first optimizer step, which creates gradients and optimizer state."""
    steady_peak_allocated_bytes: int
    """Peak of the last captured step, which represents all further ones."""
    cache_flushes: int
    """Number of times the allocator must release its whole cache to fit; each stalls the device."""
    out_of_memory_at: FailedAllocation | None
    """The first request that fails at the capacity; None if the steps fit."""
    peak_op: str | None
    """Name of the latest op at the peak of allocated bytes; None in setup."""
    peak_module: str | None
    """`fqn` of that op's module; None in setup."""
    peak_phase: Phase
    peak_step: int
    breakdown: tuple[tuple[Category, int], ...]
    """Bytes held at that peak by category, in whole blocks; they sum to the peak."""
    largest: tuple[HeldStorage, ...]
    """The largest storages at that peak, at most 20, largest first."""
    modules: tuple[ModuleShare, ...]
    """Bytes held at that peak by module, in the order of the module tree; they sum to the peak, except for
    storages without a module."""
    evaluation_peak_allocated_bytes: int | None
    """Peak of an evaluation after the last step; None if none was captured."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    """The allocations of a trace, played on one device."""

    profile: LiveProfile
    """Allocated bytes after each event that succeeded."""
    peak_reserved_bytes: int
    cache_flushes: int
    out_of_memory_at: FailedAllocation | None
    """The request that ended the replay; None if it ran to the end."""


def predict_memory(
    trace: Trace, *, allocator: AllocatorSettings | None = None, capacity_bytes: int | None = None
) -> MemoryPrediction:
    """The memory that a trace takes on its kind of device.

    Args:
        trace: Some training steps.
        allocator: The CUDA allocator's settings; None takes those of the trace's settings. Nothing to a CPU.
        capacity_bytes: What the allocator can reserve: on CUDA the device's memory less the context and what
            others hold. None is without limit. Near it the CUDA allocator gives back its cache, so it reserves
            less than it would without.

    Returns:
        The peaks, what holds them, and where the steps run out of memory if they do.

    Raises:
        UsageError: The trace allocates nothing, or its kind of device is unknown.
    """
    allocator = allocator or AllocatorSettings.of(trace.settings)
    if not trace.events:
        raise UsageError(f"the trace of {trace.job!r} allocates nothing, so it has no peak. Capture it again.")
    limited = replay_allocations(trace, allocator=allocator, capacity_bytes=capacity_bytes)
    fits = limited.out_of_memory_at is None
    is_untouched = fits and not limited.cache_flushes and allocator.garbage_collection_threshold is None
    unlimited = limited if is_untouched else replay_allocations(trace, allocator=allocator)
    finished = limited if fits else unlimited
    profile = finished.profile
    peak_op = profile.op_at(profile.peak_position)
    return MemoryPrediction(
        allocator=allocator,
        capacity_bytes=capacity_bytes,
        peak_allocated_bytes=profile.peak_bytes,
        peak_reserved_bytes=finished.peak_reserved_bytes,
        unlimited_peak_reserved_bytes=unlimited.peak_reserved_bytes,
        first_step_peak_allocated_bytes=profile.peak_bytes_in_step(0),
        steady_peak_allocated_bytes=profile.peak_bytes_in_step(profile.last_step),
        cache_flushes=finished.cache_flushes,
        out_of_memory_at=limited.out_of_memory_at,
        peak_op=peak_op.name if peak_op else None,
        peak_module=peak_op.module if peak_op else None,
        peak_phase=peak_op.phase if peak_op else Phase.SETUP,
        peak_step=peak_op.step if peak_op else 0,
        breakdown=profile.breakdown_at(profile.peak_position),
        largest=_largest_storages(profile, profile.peak_position),
        modules=_module_shares(profile, profile.peak_position),
        evaluation_peak_allocated_bytes=profile.peak_bytes_in_evaluation(),
    )


def most_held_bytes(trace: Trace, category: Category) -> int:
    """The most bytes of one category that are live in the last step captured to its end."""
    sizes_bytes = [storage.size_bytes if storage.category is category else 0 for storage in trace.storages]
    is_in_step = [*(op.step == trace.captured_steps - 1 for op in trace.ops), False]  # the last is setup's
    held = most = 0
    for event in trace.events:
        size_bytes = sizes_bytes[event.storage]
        if size_bytes:
            held += size_bytes if event.kind is EventKind.ALLOCATE else -size_bytes
        if held > most and is_in_step[event.op]:
            most = held
    return most


def least_allocated_bytes(trace: Trace) -> int:
    """Peak allocated bytes if `torch.compile` fuses all that it can of a trace, at most what the trace takes.

    The trace is compiled in part; in which part is not known. Results of matmuls, convolutions and attention
    stay: a compiler does not compute them again. All else that forward and backward make may be inside of a
    fused kernel, or made again in backward.
    """
    fixed = (Category.GRADIENTS, Category.INPUTS)
    return live_profile(
        replace(
            trace,
            storages=tuple(
                storage
                if storage.op is None or storage.category in fixed or _stays_if_compiled(trace.ops[storage.op])
                else structs.replace(storage, size_bytes=0)
                for storage in trace.storages
            ),
        ),
        rounding_bytes_of(trace.device_kind),
    ).peak_bytes


def _stays_if_compiled(op: Op) -> bool:
    return op.flops > 0 or op.phase in (Phase.SETUP, Phase.OPTIMIZER)


def most_reserved_bytes(trace: Trace, likely_bytes: int, *, allocator: AllocatorSettings | None = None) -> int:
    """Peak reserved bytes if what is not known for sure is as large as it may be; at least `likely_bytes`.

    Larger requests do not always make more be reserved: a block obtained for one of them may serve others
    later. So all uncertain sizes are enlarged together, then those of each phase alone, and the most is taken.

    `likely_bytes` is what is reserved without limit at the likely sizes. `allocator` has the CUDA allocator's
    settings; None takes those of the trace's settings.
    """
    uncertain = {
        event.storage: Phase.SETUP if event.op < 0 else trace.ops[event.op].phase
        for event in trace.events
        if event.kind is EventKind.ALLOCATE and trace.storages[event.storage].most_bytes is not None
    }
    phases = set(uncertain.values())
    scenarios = [phases, *({phase} for phase in sorted(phases))] if len(phases) > 1 else [phases]
    largest = (
        _enlarged(trace, {storage for storage, phase in uncertain.items() if phase in scenario})
        for scenario in scenarios
        if scenario
    )
    peaks = (replay_allocations(each, allocator=allocator).peak_reserved_bytes for each in largest)
    return max((likely_bytes, *peaks))


def _enlarged(trace: Trace, storages: set[int]) -> Trace:
    """The trace with some storages as large as they may be."""
    return replace(
        trace,
        storages=tuple(
            structs.replace(storage, size_bytes=storage.most_bytes)
            if index in storages and storage.most_bytes is not None
            else storage
            for index, storage in enumerate(trace.storages)
        ),
    )


def replay_allocations(
    trace: Trace, *, allocator: AllocatorSettings | None = None, capacity_bytes: int | None = None
) -> Replay:
    """Play a trace's allocations on its kind of device until the end or the first request that fails.

    `allocator` has the CUDA allocator's settings; None takes those of the trace's settings, and a CPU ignores
    them. `capacity_bytes` is what the allocator can reserve; None is without limit. Raises `UnknownNameError`
    if the trace's kind of device is unknown.
    """
    rounding_bytes = rounding_bytes_of(trace.device_kind)
    if trace.device_kind == "cuda":
        settings = allocator or AllocatorSettings.of(trace.settings)
        return _replay_cached(trace, CachingAllocator(settings, capacity_bytes))
    return _replay_uncached(live_profile(trace, rounding_bytes), capacity_bytes)


def _replay_cached(trace: Trace, allocator: CachingAllocator) -> Replay:
    """Replay through the caching allocator: a storage holds the block it is given."""
    sizes = [storage.size_bytes for storage in trace.storages]
    levels: list[int] = []
    failed = None
    for position, event in enumerate(trace.events):
        storage = event.storage
        if event.kind is EventKind.FREE:
            allocator.free(storage)
        elif allocator.allocate(storage, sizes[storage]) is not None:
            failed = _failed_allocation(trace, position)
            break
        levels.append(allocator.allocated_bytes)
    return Replay(
        profile=profile_of_levels(trace, levels),
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        cache_flushes=allocator.cache_flushes,
        out_of_memory_at=failed,
    )


def _replay_uncached(profile: LiveProfile, capacity_bytes: int | None) -> Replay:
    """Replay in which each storage holds its requested bytes and frees them immediately."""
    failed = None
    if capacity_bytes is not None and profile.peak_bytes > capacity_bytes:
        position = int(np.argmax(profile.live_bytes > capacity_bytes))
        failed = _failed_allocation(profile.trace, position)
        profile = profile_of_levels(profile.trace, profile.live_bytes[:position])
    return Replay(
        profile=profile, peak_reserved_bytes=profile.peak_bytes, cache_flushes=0, out_of_memory_at=failed
    )


def _failed_allocation(trace: Trace, position: int) -> FailedAllocation:
    event = trace.events[position]
    storage = trace.storages[event.storage]
    op = trace.ops[event.op] if event.op >= 0 else None
    return FailedAllocation(
        op=op.name if op else None,
        module=op.module if op else None,
        line=op.line if op else "",
        phase=op.phase if op else Phase.SETUP,
        step=op.step if op else 0,
        label=storage.label,
        requested_bytes=storage.size_bytes,
    )


def _largest_storages(profile: LiveProfile, position: int) -> tuple[HeldStorage, ...]:
    """The storages that hold most at a position, largest first, older first where equal."""
    held = sorted(profile.held_bytes_at(position).items(), key=lambda item: -item[1])
    return tuple(held_storage(profile.trace, *item) for item in held[:LARGEST_STORAGES])


def held_storage(trace: Trace, index: int, held_bytes: int) -> HeldStorage:
    """A storage of a trace and the bytes that it holds."""
    storage = trace.storages[index]
    return HeldStorage(
        label=storage.label,
        category=storage.category,
        module=None if storage.op is None else trace.ops[storage.op].module,
        held_bytes=held_bytes,
        line="" if storage.op is None else trace.ops[storage.op].line,
    )


def _module_shares(profile: LiveProfile, position: int) -> tuple[ModuleShare, ...]:
    """Bytes that each module holds at a position, including its submodules."""
    trace = profile.trace
    held = (
        (_owner(trace, trace.storages[index]), held_bytes)
        for index, held_bytes in profile.held_bytes_at(position).items()
    )
    return shares_of_modules(held, dict(trace.module_classes))


def shares_of_modules(
    held_by: Iterable[tuple[str, int]], classes: Mapping[str, str]
) -> tuple[ModuleShare, ...]:
    """What modules hold, submodules included, in the order of the module tree.

    `held_by` has paths of modules with bytes; a path "<…>" is outside of the model. `classes` has their names.
    """
    held: dict[str, int] = {}
    for owner, held_bytes in held_by:
        for fqn in _paths_to(owner):
            held[fqn] = held.get(fqn, 0) + held_bytes
    return tuple(
        ModuleShare(
            fqn=fqn,
            class_name=classes.get(fqn, ""),
            held_bytes=held_bytes,
            depth=0 if not fqn else fqn.count(".") + 1,
        )
        for fqn, held_bytes in sorted(held.items(), key=lambda item: _in_tree_order(item[0]))
    )


def _owner(trace: Trace, storage: Storage) -> str:
    """Path of the module that a storage belongs to; "<…>" for storages outside of the model, "" for storages
    without a module."""
    if storage.category in (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE):
        name = storage.label.partition(" ")[0]
        return name.rpartition(".")[0]
    if storage.category is Category.OTHER_TENSORS:
        return "<other>"
    return "" if storage.op is None else trace.ops[storage.op].module


def _paths_to(fqn: str) -> tuple[str, ...]:
    """The module and all it is inside of, outermost first: "", "a", "a.b"."""
    if fqn.startswith("<"):
        return ()
    parts = fqn.split(".") if fqn else []
    return tuple(".".join(parts[:count]) for count in range(len(parts) + 1))


def _in_tree_order(fqn: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key that puts children after their parent, numbered ones by number."""
    parts = fqn.split(".") if fqn else []
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts)
