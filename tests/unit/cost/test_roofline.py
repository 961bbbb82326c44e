"""The roofline of one op: arithmetic, traffic or launch, whichever takes longest."""

from dataclasses import replace

import pytest

from brimful.cost import op_seconds, region_seconds
from brimful.cost.roofline import (
    BANDWIDTH_EFFICIENCY,
    COMPUTE_EFFICIENCY,
    SPLIT_INNER,
    TILE_OUTPUTS,
)
from brimful.devices import find_device
from brimful.settings import Precision
from brimful.trace import Op, Phase

A100 = find_device("A100 80GB SXM")
SMALL = Op(
    name="aten.mul.Tensor",
    module="",
    phase=Phase.FORWARD,
    step=0,
    micro_batch=0,
    flops=0,
    read_bytes=8,
    written_bytes=8,
    dtype="float32",
)


def test_a_small_op_takes_its_launch() -> None:
    assert op_seconds(SMALL, A100) == A100.launch_seconds


def test_an_elementwise_op_takes_its_bytes_at_the_achieved_bandwidth() -> None:
    op = replace(SMALL, read_bytes=2 * 10**9, written_bytes=10**9)
    assert op_seconds(op, A100) == pytest.approx(3e9 / (2.039e12 * BANDWIDTH_EFFICIENCY))


@pytest.mark.parametrize(
    ("dtype", "precision", "peak"),
    [
        ("float32", Precision.FP32, 19.5e12),
        ("float32", Precision.TF32, 156e12),
        ("bfloat16", Precision.BF16, 312e12),
        ("float16", Precision.FP16, 312e12),
    ],
)
def test_a_matmul_takes_its_flops_at_the_rate_of_its_type(
    dtype: str, precision: Precision, peak: float
) -> None:
    op = replace(SMALL, flops=10**13, dtype=dtype, written_bytes=10**9)
    assert op_seconds(op, A100, precision) == pytest.approx(1e13 / (peak * COMPUTE_EFFICIENCY))


def test_a_product_of_fewer_tiles_than_multiprocessors_leaves_the_others_idle() -> None:
    """27 tiles of 64 × 64 keep a quarter of 108 multiprocessors busy, or all if four share each tile."""
    outputs = 27 * TILE_OUTPUTS
    product = replace(SMALL, dtype="bfloat16", written_bytes=2 * outputs)
    short, long = (replace(product, flops=2 * outputs * inner) for inner in (SPLIT_INNER, 4 * SPLIT_INNER))
    slow = replace(A100, bf16_flops_per_second=1e9)
    assert op_seconds(short, slow) == pytest.approx(4 * short.flops / (1e9 * COMPUTE_EFFICIENCY))
    assert op_seconds(long, slow) == pytest.approx(long.flops / (1e9 * COMPUTE_EFFICIENCY))


def test_tf32_changes_nothing_where_the_hardware_lacks_it() -> None:
    op = replace(SMALL, flops=10**12)
    t4 = find_device("T4")
    assert op_seconds(op, t4, Precision.TF32) == op_seconds(op, t4, Precision.FP32)


def test_a_cpus_rates_are_achieved_ones_already() -> None:
    cpu = replace(find_device("cpu"), fp32_flops_per_second=1e11, memory_bandwidth_bytes_per_second=1e10)
    assert op_seconds(replace(SMALL, flops=10**11), cpu) == pytest.approx(1.0)
    assert op_seconds(replace(SMALL, read_bytes=10**10, written_bytes=0), cpu) == pytest.approx(1.0)


def test_a_region_costs_more_where_random_states_are_kept() -> None:
    assert 1e-4 < region_seconds(A100, stashes_rng=False) < region_seconds(A100) < 2e-3
