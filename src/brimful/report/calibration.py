"""Results of a calibration, as text and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from brimful.codec import to_builtins, to_json_document
from brimful.devices import Device, RateCurve
from brimful.quantities import format_bytes, format_seconds


def calibration_document(devices: Sequence[Device], paths: Sequence[str]) -> dict[str, Any]:
    """The document of `brimful calibrate --json`; `paths` has the file of each device's measurements.

    It has per device its rates, and per kind of work the points (amount, seconds): bytes, or FLOPs where the
    name has a type after a colon.
    """
    return {"devices": [_device_document(device, path) for device, path in zip(devices, paths, strict=True)]}


def _device_document(device: Device, path: str) -> dict[str, Any]:
    rates = ("launch_seconds", "host_link_bytes_per_second", "context_bytes")
    return {
        "name": device.name,
        "source": device.source,
        "kept_in": path,
        **{name: getattr(device, name) for name in rates},
        "dispatch": to_json_document(device.dispatch),
        "curves": {curve.kind: to_builtins(curve.points) for curve in device.curves},
    }


def calibration_text(device: Device, path: str) -> str:
    """The text of `brimful calibrate` for a device whose measurements are kept at `path`."""
    return "\n".join(_lines(device, path))


def _lines(device: Device, path: str) -> Iterator[str]:
    again = "" if device.was_measured_busy else "; `brimful calibrate --force` measures again"
    yield f"{device.name}: {device.source}{again}"
    for curve in device.curves:
        kind, _, dtype = curve.kind.partition(":")
        if dtype:
            yield f"  {f'{kind}, {dtype}':<24}{_rate_text(curve, 1e9, 'GFLOP/s')}"
    streaming = next(curve for curve in device.curves if curve.kind == "elementwise")
    yield f"  {'memory':<24}{_rate_text(streaming, 1e9, 'GB/s')}"
    yield f"  {'launch of an op':<24}{format_seconds(device.launch_seconds)}"
    dispatch = device.dispatch
    yield (
        f"  {'with Python, autograd':<24}{format_seconds(dispatch.forward_seconds)} an op forward, "
        f"{format_seconds(dispatch.backward_seconds)} backward, "
        f"{format_seconds(dispatch.optimizer_seconds)} in the optimizer"
    )
    if device.kind == "cpu":
        yield f"  {'in a GRU or RNN':<24}{format_seconds(dispatch.native_loop_seconds)} an op"
    yield f"  {'a recomputed region':<24}{format_seconds(dispatch.region_seconds)} beside its ops"
    forward_seconds, recompute_seconds = dispatch.selective_seconds
    yield (
        f"  {'results saved in it':<24}{format_seconds(forward_seconds)} an op forward, "
        f"{format_seconds(recompute_seconds)} recomputed"
    )
    if device.host_link_bytes_per_second is not None:
        yield f"  {'host link, slower way':<24}{device.host_link_bytes_per_second / 1e9:.3g} GB/s"
    if device.context_bytes:
        yield f"  {'CUDA context':<24}{format_bytes(device.context_bytes)}"
    yield f"  kept in {path}"


def _rate_text(curve: RateCurve, unit: float, name: str) -> str:
    """The rate of the smallest, a middle and the largest amount: what small ops lose is plain to see."""
    places = dict.fromkeys((0, len(curve.points) // 2, len(curve.points) - 1))
    rates = [curve.points[place][0] / curve.points[place][1] / unit for place in places]
    return " → ".join(f"{rate:.3g}" for rate in rates) + f" {name}, small to large"
