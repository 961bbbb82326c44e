"""Results of a calibration, as text and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from brimful.codec import to_builtins, to_json_document
from brimful.devices import Device, RateCurve
from brimful.report.layout import Part, Remark, Report, Row, as_text
from brimful.utils.quantities import format_bytes, format_seconds


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
    again = "" if device.was_measured_busy else "; `brimful calibrate --force` measures again"
    heading = f"{device.name}: {device.source}{again}"
    return as_text(Report(heading=heading, parts=tuple(_parts(device, path)), label_cells=24))


def _parts(device: Device, path: str) -> Iterator[Part]:
    for curve in device.curves:
        kind, _, dtype = curve.kind.partition(":")
        if dtype:
            yield Row(f"{kind}, {dtype}", _rate_text(curve, 1e9, "GFLOP/s"))
    streaming = next(curve for curve in device.curves if curve.kind == "elementwise")
    yield Row("memory", _rate_text(streaming, 1e9, "GB/s"))
    yield Row("launch of an op", format_seconds(device.launch_seconds))
    dispatch = device.dispatch
    forward, backward = format_seconds(dispatch.forward_seconds), format_seconds(dispatch.backward_seconds)
    update = format_seconds(dispatch.optimizer_seconds)
    yield Row(
        "with Python, autograd", f"{forward} an op forward, {backward} backward, {update} in the optimizer"
    )
    if device.kind == "cpu":
        yield Row("in a GRU or RNN", f"{format_seconds(dispatch.native_loop_seconds)} an op")
    yield Row("a recomputed region", f"{format_seconds(dispatch.region_seconds)} beside its ops")
    forward, recompute = map(format_seconds, dispatch.selective_seconds)
    yield Row("results saved in it", f"{forward} an op forward, {recompute} recomputed")
    if device.host_link_bytes_per_second is not None:
        yield Row("host link, slower way", f"{device.host_link_bytes_per_second / 1e9:.3g} GB/s")
    if device.context_bytes:
        yield Row("CUDA context", format_bytes(device.context_bytes))
    yield Remark("", f"kept in {path}")


def _rate_text(curve: RateCurve, unit: float, name: str) -> str:
    """The rate of the smallest, a middle and the largest amount: what small ops lose is plain to see."""
    places = dict.fromkeys((0, len(curve.points) // 2, len(curve.points) - 1))
    rates = [curve.points[place][0] / curve.points[place][1] / unit for place in places]
    return " → ".join(f"{rate:.3g}" for rate in rates) + f" {name}, small to large"
