"""Single blocks against published times and peaks of memory."""

from __future__ import annotations

import json

import pytest
from msgspec import structs

from brimful.devices import find_device
from brimful.settings import Precision
from brimful.trace import Op, Phase
from times.blocks import sizes_of
from times.kernel_classes import plain_roofline_seconds
from times.ops import compare, queued_seconds, refusals

A100 = find_device("NVIDIA A100-SXM4-80GB")
MIB = 2**20


def row(
    kernel: str, mode: str, metric: str, median: float, x: tuple[str, int], **config: object
) -> dict[str, str]:
    return {
        "kernel": kernel,
        "provider": "huggingface",
        "mode": mode,
        "metric": metric,
        "x_name": x[0],
        "x": str(x[1]),
        "median": str(median),
        "config": json.dumps(config),
        "gpu": "NVIDIA A100-SXM4-80GB",
    }


def test_the_peak_of_a_layer_norm_has_the_gradients_of_earlier_calls() -> None:
    measured = row("layer_norm", "full", "memory", 80.06249, ("N", 1024), M=4096, eps=1e-6)
    found = compare(measured)
    assert found["error_fraction"] == pytest.approx(0, abs=1e-4)
    assert found["predicted_bytes"] > 5 * 4096 * 1024 * 4  # x, its gradient twice, y, the gradient of y


@pytest.mark.parametrize("mode", ["forward", "backward", "full"])
def test_the_peak_of_a_gated_mlp_is_as_measured(mode: str) -> None:
    config = {"bsz": 8, "hidden_size": 4096, "intermediate_size": 11008}
    measured = {"forward": 1090.25, "backward": 1992.25, "full": 1992.25}[mode]
    found = compare(row("geglu", mode, "memory", measured, ("T", 1024), **config))
    assert found["error_fraction"] == pytest.approx(0, abs=1e-4)


def test_a_time_comes_with_its_classes_and_those_of_both_directions_add_up() -> None:
    times = {
        mode: compare(row("layer_norm", mode, "speed", 1.0, ("N", 8192), M=4096, eps=1e-6))
        for mode in ("forward", "backward", "full")
    }
    assert set(times["forward"]["class_seconds"]) == {"layer_norm"}
    assert times["backward"]["class_seconds"]["layer_norm_backward"] > 0
    assert times["full"]["ops"] == times["forward"]["ops"] + times["backward"]["ops"]
    assert times["full"]["predicted_seconds"] == pytest.approx(
        times["forward"]["predicted_seconds"] + times["backward"]["predicted_seconds"], rel=0.05
    )
    assert all(each["roofline_seconds"] < each["predicted_seconds"] for each in times.values())


def test_a_row_that_measures_something_else_is_refused_with_its_reason() -> None:
    config = {"B": 32, "T": 512, "D": 768}
    found = compare(row("embedding", "full", "memory", 12356.5, ("V", 1024), **config))
    assert "12 GiB" in found["refused"]
    assert [each["rows"] for each in refusals([found, found])] == [2]


def test_a_size_that_varies_takes_the_place_of_none() -> None:
    assert sizes_of(row("fused_moe", "full", "speed", 1.0, ("T", 128), T=None, E=8)) == {"T": 128, "E": 8}


ADD = Op(
    name="aten.add.Tensor",
    module="",
    phase=Phase.FORWARD,
    step=0,
    micro_batch=0,
    flops=0,
    read_bytes=512 * MIB,
    written_bytes=512 * MIB,
    dtype="float32",
)


def test_a_queue_hides_the_host_behind_long_kernels_only() -> None:
    work = plain_roofline_seconds([ADD], A100, Precision.FP32)
    assert work == pytest.approx(1024 * MIB / A100.memory_bandwidth_bytes_per_second)
    assert work < queued_seconds([ADD], A100, Precision.FP32) < 1.3 * work
    tiny = [structs.replace(ADD, read_bytes=0, written_bytes=512)] * 200
    assert queued_seconds(tiny, A100, Precision.FP32) > 150 * A100.launch_seconds
