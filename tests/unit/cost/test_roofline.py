"""The time of one op: of its kernels on a GPU, by a roofline on a CPU."""

from dataclasses import replace

import pytest
from msgspec import structs

from brimful.cost import Roofline, op_seconds, region_seconds
from brimful.cost.kernels import FactorTable
from brimful.cost.kernels.constants import (
    CACHED_FRACTION,
    KERNEL_SECONDS,
    L2_SPEEDUP,
    PLACE_OPERATIONS,
)
from brimful.cost.kernels.factors import reached_by
from brimful.devices import Device, find_device
from brimful.devices.data_rows import read_rows
from brimful.settings import Precision
from brimful.trace import Op, Phase
from brimful.trace.extents import Product, Strided

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


def elementwise_seconds(size_bytes: int, device: Device) -> float:
    return op_seconds(structs.replace(SMALL, read_bytes=size_bytes, written_bytes=0), device)


def test_an_elementwise_op_takes_its_bytes_at_the_achieved_bandwidth() -> None:
    bandwidth = A100.memory_bandwidth_bytes_per_second * reached_by(A100).bandwidth
    in_cache = CACHED_FRACTION * A100.l2_bytes * (1 - 1 / L2_SPEEDUP)
    expected = (3e9 - in_cache) / bandwidth + KERNEL_SECONDS
    assert elementwise_seconds(3 * 10**9, A100) == pytest.approx(expected)


def test_bytes_in_the_l2_cache_move_faster() -> None:
    few = int(CACHED_FRACTION * A100.l2_bytes)
    uncached = replace(A100, l2_bytes=0)
    launch = A100.launch_seconds
    fast, slow = (
        (elementwise_seconds(few, each) - KERNEL_SECONDS)
        for each in (replace(A100, launch_seconds=0.0), replace(uncached, launch_seconds=0.0))
    )
    assert slow == pytest.approx(L2_SPEEDUP * fast)
    assert launch < elementwise_seconds(10 * few, uncached)


def test_a_pointwise_op_on_strided_operands_takes_the_time_to_compute_where_elements_lie() -> None:
    """In half types an A100's memory moves more elements than its multiprocessors find."""
    elements, tensors = 10**9, 3
    strided = structs.replace(
        SMALL,
        read_bytes=4 * elements,
        written_bytes=2 * elements,
        dtype="bfloat16",
        extents=tuple(Strided(elements, tensors)),
    )
    integers = 108 * 1.41e9 * 64  # per second: multiprocessors, clock, operations of each per clock
    expected = elements * tensors * PLACE_OPERATIONS / integers
    assert op_seconds(strided, A100) == pytest.approx(expected, rel=0.01)
    assert op_seconds(strided, A100) > 1.2 * op_seconds(structs.replace(strided, extents=()), A100)
    in_float32 = structs.replace(strided, read_bytes=8 * elements, written_bytes=4 * elements, dtype="float32")
    assert op_seconds(in_float32, A100) == op_seconds(structs.replace(in_float32, extents=()), A100)


@pytest.mark.parametrize(
    ("dtype", "precision", "peak", "reached"),
    [
        ("float32", Precision.FP32, 19.5e12, "fp32"),
        ("float32", Precision.TF32, 156e12, "tf32"),
        ("bfloat16", Precision.BF16, 312e12, "half"),
        ("float16", Precision.FP16, 312e12, "half"),
    ],
)
def test_a_large_matmul_takes_its_flops_at_the_rate_reached_by_its_type(
    dtype: str, precision: Precision, peak: float, reached: str
) -> None:
    size = 27648  # 108 multiprocessors have whole waves of tiles
    op = structs.replace(
        SMALL,
        name="aten.mm.default",
        flops=2 * size**3,
        dtype=dtype,
        extents=tuple(Product(1, size, size, size)),
    )
    rate = peak * getattr(reached_by(A100), reached)
    assert op_seconds(op, A100, precision) == pytest.approx(2 * size**3 / rate, rel=1e-3)


@pytest.mark.parametrize(("gpu", "slower"), [("A100 80GB SXM", 3.0), ("H100 SXM", 4.0), ("RTX 3090", 1.0)])
def test_misaligned_half_products_do_not_follow_the_tensor_cores(gpu: str, slower: float) -> None:
    """Relative to the slowdown of their class, which is that of an RTX 3090."""
    device = find_device(gpu)
    slowdown = FactorTable.of(device).factors("matmul_unaligned").slowdown
    seconds = [
        op_seconds(
            structs.replace(
                SMALL,
                name="aten.mm.default",
                flops=2 * 8192**2 * columns,
                dtype="bfloat16",
                extents=tuple(Product(1, 8192, columns, 8192)),
            ),
            device,
        )
        for columns in (8192, 8191)
    ]
    assert seconds[1] / seconds[0] / slowdown == pytest.approx(slower, rel=0.03)


def test_an_update_of_one_parameter_after_another_takes_a_bare_launch_for_each_op() -> None:
    """On a GPU the optimizer's dispatch is measured on few ops, each on all parameters."""
    device = replace(A100, dispatch=replace(A100.dispatch, optimizer_seconds=1e-4))
    roofline = Roofline(device, Precision.FP32)
    update = structs.replace(SMALL, phase=Phase.OPTIMIZER)
    listed = structs.replace(update, name="aten._foreach_add_.List")
    plain = structs.replace(update, name="aten.add_.Tensor")
    assert roofline.host_seconds(listed) == pytest.approx(1e-4)
    assert roofline.host_seconds(plain) == device.launch_seconds


def test_tf32_changes_nothing_where_the_hardware_lacks_it() -> None:
    op = structs.replace(SMALL, flops=10**12)
    t4 = find_device("T4")
    assert op_seconds(op, t4, Precision.TF32) == op_seconds(op, t4, Precision.FP32)


def test_a_class_without_a_row_is_less_certain_than_any_with_one() -> None:
    table = FactorTable.of(A100)
    unknown = table.factors("a kernel of tomorrow")
    known = [table.factors(cells["kernel"]) for cells in read_rows("kernel_factors.csv")]
    assert unknown.rows == 0
    assert all(each.spread < unknown.spread for each in known if each != unknown)


def test_types_without_tensor_cores_run_at_the_float32_rate() -> None:
    pascal = find_device("GTX 1080 Ti")
    product = structs.replace(
        SMALL,
        name="aten.mm.default",
        flops=2 * 8192**3,
        extents=tuple(Product(1, 8192, 8192, 8192)),
    )
    seconds = {
        op_seconds(structs.replace(product, dtype=dtype), pascal)
        for dtype in ("float32", "float16", "bfloat16")
    }
    assert len(seconds) == 1


def test_a_gpu_without_a_row_has_those_of_its_generation_with_a_wider_spread() -> None:
    """Figures of the same architecture and kind of memory, else of the kind of memory."""
    measured, sister = reached_by(find_device("RTX 3090")), reached_by(find_device("RTX 3070"))
    assert sister.spread > measured.spread
    assert 0.5 < sister.bandwidth <= 1.0
    assert reached_by(replace(A100, name="none", architecture="Volta")).rows == 0


def test_a_cpus_rates_are_achieved_ones_already() -> None:
    cpu = replace(find_device("cpu"), fp32_flops_per_second=1e11, memory_bandwidth_bytes_per_second=1e10)
    assert op_seconds(structs.replace(SMALL, flops=10**11), cpu) == pytest.approx(1.0)
    assert op_seconds(structs.replace(SMALL, read_bytes=10**10, written_bytes=0), cpu) == pytest.approx(1.0)


def test_a_region_costs_more_where_random_states_are_kept() -> None:
    assert 1e-4 < region_seconds(A100, stashes_rng=False) < region_seconds(A100) < 2e-3
