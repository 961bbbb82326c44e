"""Sizes of layers that tensor cores load slowly, and what padding them would gain, for reports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from msgspec import structs

from brimful.cost import StepTime, difference_interval, step_seconds
from brimful.cost.kernels.classes import odd_sizes
from brimful.cost.kernels.kernel import ALIGNMENT, HALF_TYPES
from brimful.devices import Device
from brimful.trace import Op, Trace
from brimful.trace.extents import Product, extents_of
from brimful.trace.modules import LOSS
from brimful.utils.quantities import format_seconds

NOTED_GAIN = 0.01
"""Fraction of the step that padding a size must gain, as predicted, to be noted. A choice."""

TENSOR_CORES_SINCE = (7, 0)
"""The first compute capability with tensor cores. Source: NVIDIA, "CUDA C++ Programming Guide"."""

_WIDE_STEP = 64
"""What large sizes are padded to a multiple of, as whole tiles do: 50257 to 50304."""


def odd_size_notes(trace: Trace, device: Device, time: StepTime) -> tuple[str, ...]:
    """The gain of padding each size of a layer that is not a multiple of 8, in half types on tensor cores.

    `time` is that of the traced step on the device. Only sizes with a gain above `NOTED_GAIN` are noted.
    """
    if (device.compute_capability or (0, 0)) < TENSOR_CORES_SINCE:
        return ()
    return tuple(
        note for size, ops in _ops_by_odd_size(trace).items() for note in _noted(trace, device, time, size, ops)
    )


def _noted(trace: Trace, device: Device, time: StepTime, size: int, ops: list[Op]) -> Iterator[str]:
    padded = _padded(size)
    modules = dict.fromkeys(op.module for op in ops)
    edited = replace(
        trace, ops=tuple(_resized(op, size, padded) if op.module in modules else op for op in trace.ops)
    )
    shorter = step_seconds(edited, device)
    gain_seconds, seconds = time.total_seconds - shorter.total_seconds, time.total_seconds
    if gain_seconds <= NOTED_GAIN * seconds:
        return
    low, high = (each / seconds for each in difference_interval(time, shorter, device))
    gain = f"{gain_seconds / seconds:.1%} ({low:+.1%} to {high:+.1%})"
    yield (
        f"{size}, a size of {_layers(trace, modules)}, is not a multiple of {ALIGNMENT}, which tensor cores "
        f"need in {ops[0].dtype}: padded to {padded}, its matrix products take {format_seconds(gain_seconds)} "
        f"less of a step of {format_seconds(seconds)} as predicted, {gain}."
    )


def _layers(trace: Trace, modules: Iterable[str]) -> str:
    """The first layer of some modules and the number of others; a loss in chunks has the products of one."""
    chunked = trace.settings.chunked_loss
    named = [module for module in modules if module not in ("", LOSS)]
    if chunked is not None and chunked.layer not in named:
        named.append(chunked.layer)
    if not named:
        return "the model itself"
    return named[0] + (f" and {len(named) - 1} more" if len(named) > 1 else "")


def _ops_by_odd_size(trace: Trace) -> dict[int, list[Op]]:
    """Matrix products in half types by the sizes of their layers that are not aligned.

    Batched products do not count: they depend on the samples, such as their length, and padding those makes
    other work longer.
    """
    found: dict[int, list[Op]] = {}
    for op in trace.ops:
        product = extents_of(op.extents)
        if isinstance(product, Product) and product.products == 1 and op.dtype in HALF_TYPES:
            for size in odd_sizes(product):
                found.setdefault(size, []).append(op)
    return found


def _padded(size: int) -> int:
    """The next multiple of 64 if that adds less than 1 %, else of 8."""
    wide = -(-size // _WIDE_STEP) * _WIDE_STEP
    return wide if wide < 1.01 * size else -(-size // ALIGNMENT) * ALIGNMENT


def _resized(op: Op, size: int, padded: int) -> Op:
    """The op with a size of its matrix product padded; other ops as they are."""
    old = extents_of(op.extents)
    if not isinstance(old, Product):
        return op
    changed = {name: padded for name in ("rows", "columns", "inner") if getattr(old, name) == size}
    new = old._replace(**changed)
    read = (new.rows + new.columns) * new.inner / ((old.rows + old.columns) * old.inner)
    written = new.rows * new.columns / (old.rows * old.columns)
    return structs.replace(
        op,
        extents=tuple(new),
        flops=round(op.flops * written * new.inner / old.inner),
        read_bytes=round(op.read_bytes * read),
        written_bytes=round(op.written_bytes * written),
    )
