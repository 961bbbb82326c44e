"""Step times against published measurements: work at peak rates, archives, and the fit of factors."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from brimful.devices import find_device
from brimful.settings import Precision
from brimful.trace import Op, Phase
from brimful.trace.extents import Convolution, Extents, Product
from times.archive import Step, read_steps, write_steps
from times.kernel_classes import AtPeak, class_seconds, kernels_at_peak, plain_roofline_seconds
from times.kernel_fit import Table
from times.summary import summary_of

GPU = find_device("RTX 3090")
RATE = GPU.flops_per_second("bfloat16", Precision.BF16) or 0.0
BANDWIDTH = GPU.memory_bandwidth_bytes_per_second


def op(name: str, extents: Extents | None = None, *, flops: int = 0, size_bytes: int = 2**20) -> Op:
    return Op(
        name=f"aten.{name}.default",
        module="",
        phase=Phase.FORWARD,
        step=0,
        micro_batch=0,
        flops=flops,
        read_bytes=size_bytes,
        written_bytes=size_bytes,
        dtype="bfloat16",
        extents=() if extents is None else tuple(extents),
    )


def step_of(kernels: Counter[AtPeak], seconds: float, *, family: str = "net") -> Step:
    return Step("synthetic", "m", family, "nchw", "RTX 3090", 8, seconds, 0.0, kernels)


def synthetic_steps(passes: float, slowdown: float) -> list[Step]:
    """Steps of an elementwise, a norm's and a depthwise kernel, in varied parts, without error."""
    random, steps = np.random.default_rng(0), []
    for index in range(120):
        adds, norms, convs = random.uniform(0.01, 0.1, 3)
        kernels = Counter(
            [
                AtPeak("elementwise", "half", 0.0, adds),
                AtPeak("layer_norm", "half", 0.0, norms),
                AtPeak("depthwise", "scalar", convs, 1e-4),
            ]
        )
        seconds = (adds + passes * norms) / 0.88 + slowdown * convs
        steps.append(step_of(kernels, seconds * (3 if index % 20 == 0 else 1), family=f"f{index % 8}"))
    return steps


def test_the_fit_finds_the_factors_that_made_the_times_though_some_rows_are_wrong() -> None:
    table = Table(synthetic_steps(passes=2.5, slowdown=6.0))
    found = table.unpack(table.fit())
    by_class = dict(zip(table.classes, zip(found.passes, found.slowdowns, strict=True), strict=True))
    assert by_class["layer_norm"][0] == pytest.approx(2.5, rel=0.1)  # 1.5 before
    assert by_class["depthwise"][1] == pytest.approx(6.0, rel=0.1)  # 4 before


def test_a_class_that_no_chosen_row_has_keeps_what_was_known_before() -> None:
    steps = [*synthetic_steps(1.5, 4.0), step_of(Counter([AtPeak("scatter", "half", 0.0, 1.0)]), 9.0)]
    table = Table(steps)
    chosen = np.arange(len(steps)) < len(steps) - 1
    found = table.unpack(table.fit(chosen))
    assert found.passes[table.classes.index("scatter")] == pytest.approx(2.5, rel=1e-3)


def test_an_archive_of_steps_is_read_as_it_was_written(tmp_path: Path) -> None:
    kernels = Counter({AtPeak("matmul", "half", 1.25e-3, 2.5e-4): 3, AtPeak("copy", "half", 0.0, 1e-5): 1})
    steps = [step_of(kernels, 0.5), step_of(Counter(), 0.25)]
    write_steps(tmp_path / "steps.csv.gz", steps)
    assert list(read_steps(tmp_path / "steps.csv.gz")) == steps


def test_kernels_at_peak_have_the_device_s_rates() -> None:
    size = 82 * 1024
    product = op("mm", Product(1, size, 1024, 1024), flops=2 * size * 1024**2, size_bytes=2**21)
    (kernel,) = kernels_at_peak([product], GPU, Precision.BF16)
    assert kernel[:2] == ("matmul", "half")
    assert kernel.computing_seconds == pytest.approx(product.flops / RATE, rel=0.05)
    assert kernel.moving_seconds == pytest.approx(2**22 / BANDWIDTH)
    depthwise = Convolution(8, 64, 64, 64, 9, 1, 1024, 1024, 1, 0, 3, 1)
    (scalar,) = kernels_at_peak([op("convolution", depthwise, flops=1)], GPU, Precision.BF16)
    assert scalar.arithmetic == "scalar"
    assert scalar.computing_seconds == pytest.approx(2 * 8 * 64 * 9 * 1024 / GPU.fp32_flops_per_second)


def test_memory_that_is_only_reserved_takes_no_time() -> None:
    ops = [op("empty"), op("add")]
    assert set(class_seconds(ops, GPU, Precision.BF16)) == {"elementwise"}
    assert plain_roofline_seconds(ops, GPU, Precision.BF16) == pytest.approx(2**21 / BANDWIDTH)


def test_an_optimizer_s_ops_are_a_class() -> None:
    updates = [structs.replace(op("add"), phase=Phase.OPTIMIZER)]
    assert set(class_seconds(updates, GPU, Precision.BF16)) == {"optimizer"}


def test_a_summary_has_errors_bias_and_rank() -> None:
    rows = [
        {"measured_seconds": measured, "predicted_seconds": predicted}
        for measured, predicted in [(1.0, 1.1), (2.0, 1.8), (3.0, 3.0), (4.0, 6.0), (5.0, 5.0)]
    ]
    assert summary_of(rows) == {
        "rows": 5,
        "median_error": 0.1,
        "p90_error": 0.34,
        "median_ratio": 1.0,
        "least_ratio": 0.9,
        "largest_ratio": 1.5,
        "rank_correlation": 0.9,
    }
