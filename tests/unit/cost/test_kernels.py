"""Which kernels an op launches on a GPU, and the work that tiles and padding add."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from brimful.cost.kernels import Kernel, Unit, kernels_of
from brimful.cost.kernels.tiles import tiled_flops
from brimful.trace import Op, Phase
from brimful.trace.extents import Attention, Convolution, Copy, Extents, Product, Rows

SM_COUNT = 82  # an RTX 3090
DENSE = Convolution(
    samples=8,
    in_channels=64,
    out_channels=128,
    groups=1,
    kernel=9,
    stride=1,
    in_positions=1024,
    out_positions=1024,
    is_channels_last=1,
    gradients=0,
    width=3,
    dilation=1,
)


def op(name: str, extents: Extents | None = None, *, flops: int = 0) -> Op:
    return Op(
        name=f"aten.{name}.default",
        module="",
        phase=Phase.FORWARD,
        step=0,
        micro_batch=0,
        flops=flops,
        read_bytes=2**20,
        written_bytes=2**20,
        dtype="bfloat16",
        extents=() if extents is None else tuple(extents),
    )


def names(each: Op) -> list[str]:
    return [kernel.name for kernel in kernels_of(each, SM_COUNT)]


def convolution(**changed: int) -> list[Kernel]:
    return kernels_of(op("convolution", DENSE._replace(**changed), flops=1), SM_COUNT)


sizes = st.integers(1, 5000)


@given(sizes, sizes, sizes, st.integers(1, 64))
def test_tiles_never_do_less_than_the_product(rows: int, columns: int, inner: int, products: int) -> None:
    assert tiled_flops(products, rows, columns, inner, SM_COUNT) >= 2 * products * rows * columns * inner


@given(sizes, sizes, sizes)
def test_a_larger_product_never_takes_less_and_sides_may_be_exchanged(
    rows: int, columns: int, inner: int
) -> None:
    one = tiled_flops(1, rows, columns, inner, SM_COUNT)
    assert one <= tiled_flops(1, rows + 1, columns, inner, SM_COUNT)
    assert one <= tiled_flops(2, rows, columns, inner, SM_COUNT)
    assert one == tiled_flops(1, columns, rows, inner, SM_COUNT)


def test_whole_waves_of_whole_tiles_waste_nothing() -> None:
    assert tiled_flops(1, 256 * SM_COUNT, 128, 4096, SM_COUNT) == 2 * 256 * SM_COUNT * 128 * 4096


def test_one_tile_more_than_a_wave_takes_nearly_another_wave_where_the_inner_dimension_is_short() -> None:
    full, more = (tiled_flops(1, 128 * tiles, 128, 64, SM_COUNT) for tiles in (SM_COUNT, SM_COUNT + 1))
    assert more > 1.4 * full


@pytest.mark.parametrize(
    ("extents", "expected"),
    [
        (Product(1, 256, 512, 128), "matmul"),
        (Product(1, 256, 511, 128), "matmul_unaligned"),
        (Product(12, 197, 64, 200), "batched_matmul"),
        (Product(12, 197, 197, 64), "batched_matmul_unaligned"),
        (Product(1, 511, 512, 128, is_first_transposed=1), "matmul_unaligned"),  # the weight's gradient
        (Product(1, 256, 512, 127, is_first_transposed=1), "matmul"),
        (Product(1, 256, 512, 127, is_first_transposed=1, is_second_transposed=1), "matmul_unaligned"),
    ],
)
def test_a_product_is_aligned_if_tensor_cores_load_whole_16_bytes(extents: Product, expected: str) -> None:
    assert names(op("mm", extents, flops=1)) == [expected]


def test_only_half_types_are_loaded_element_by_element() -> None:
    each = op("mm", Product(1, 256, 511, 128), flops=1)
    (half,) = kernels_of(each, SM_COUNT)
    (single,) = kernels_of(structs.replace(each, dtype="float32"), SM_COUNT)
    assert (half.loads_elements, single.loads_elements) == (True, False)


def test_a_causal_mask_spares_half_of_attention() -> None:
    extents = Attention(32, 1024, 1024, 64, 0)
    each = op("_scaled_dot_product_flash_attention", extents, flops=1000)
    (full,) = kernels_of(each, SM_COUNT)
    (causal,) = kernels_of(structs.replace(each, extents=tuple(extents._replace(is_causal=1))), SM_COUNT)
    assert (full.flops, causal.flops) == (1000, 500)


def test_only_a_contiguous_convolution_on_tensor_cores_converts_its_layout() -> None:
    assert [kernel.name for kernel in convolution()] == ["convolution_channels_last"]
    first, second = convolution(is_channels_last=0)
    assert (first.name, second.name) == ("convolution", "layout_conversion")
    assert second.moved_bytes == 2 * 8 * 1024 * (64 + 128) * 2  # both operands are read and written
    each = op("convolution", DENSE._replace(is_channels_last=0), flops=1)
    single = structs.replace(each, dtype="float32")
    assert names(single) == ["convolution"]
    assert len(kernels_of(single, SM_COUNT, is_tf32=True)) == 2  # tensor cores
    pointwise = structs.replace(single, extents=tuple(DENSE._replace(is_channels_last=0, kernel=1)))
    assert len(kernels_of(pointwise, SM_COUNT, is_tf32=True)) == 1  # a matrix product as it is


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"kernel": 1}, "pointwise_channels_last"),
        ({"in_channels": 3}, "stem_channels_last"),
        ({"in_channels": 3, "is_channels_last": 0}, "stem"),
        ({"out_channels": 130}, "convolution_unaligned_channels_last"),
        ({"groups": 16, "out_channels": 64}, "grouped_channels_last"),  # 4 channels each
        ({"groups": 4}, "grouped_fallback"),  # 4 groups
        ({"groups": 8, "in_channels": 96, "out_channels": 96}, "grouped_fallback"),  # 12 channels each
        ({"groups": 8, "in_channels": 96, "out_channels": 96, "is_channels_last": 0}, "grouped"),
        ({"groups": 64, "out_channels": 64}, "depthwise_channels_last"),
        ({"groups": 64, "out_channels": 64, "kernel": 49}, "depthwise_large_channels_last"),
        ({"groups": 64, "out_channels": 64, "is_channels_last": 0}, "depthwise"),
    ],
)
def test_layout_groups_and_channels_decide_the_class_of_a_convolution(
    changed: dict[str, int], expected: str
) -> None:
    assert convolution(**changed)[0].name == expected


def test_each_gradient_of_a_convolution_is_a_kernel() -> None:
    both = ["convolution_channels_last", "convolution_weight_channels_last"]
    assert [kernel.name for kernel in convolution(gradients=3)] == both
    assert [kernel.name for kernel in convolution(gradients=2)] == both[1:]


def test_the_gradient_of_a_bias_alone_is_a_sum() -> None:
    each = op("convolution_backward", DENSE._replace(gradients=0))
    assert names(each) == ["reduction_of_columns"]


def test_depthwise_convolutions_compute_outside_tensor_cores() -> None:
    (kernel,) = convolution(groups=64, out_channels=64)
    assert kernel.unit is Unit.SCALAR
    assert kernel.flops == 2 * 8 * 1024 * 64 * 9


@pytest.mark.parametrize(
    ("name", "extents", "expected"),
    [
        ("native_batch_norm_backward", Rows(64, 100, 64), "batch_norm_backward_channels_last"),
        ("native_batch_norm", Rows(64, 100, 1), "batch_norm"),
        ("native_layer_norm", Rows(100, 64, 1), "layer_norm"),
        ("_softmax", Rows(100, 1024, 1), "softmax"),
        ("_softmax", Rows(100, 1025, 1), "softmax_long"),
        ("_softmax_backward_data", Rows(100, 4096, 1), "softmax_backward_long"),
        ("sum", Rows(100, 64, 1), "reduction_of_rows"),
        ("sum", Rows(64, 100, 64), "reduction_of_columns"),
        ("clone", Copy(1), "transposing_copy"),
        ("clone", Copy(64), "copy"),
        ("add", None, "elementwise"),
        ("gelu", None, "activation"),
    ],
)
def test_memory_classes_follow_layout_length_and_direction(
    name: str, extents: Extents | None, expected: str
) -> None:
    assert names(op(name, extents)) == [expected]


def test_batch_norm_in_evaluation_is_a_class() -> None:
    each = op("native_batch_norm", Rows(64, 100, 1))
    assert names(structs.replace(each, phase=Phase.EVALUATION)) == ["batch_norm_inference"]


def test_the_gradient_of_an_embedding_fills_its_table_and_adds_rows() -> None:
    fill, add = kernels_of(
        structs.replace(op("embedding_dense_backward"), read_bytes=100, written_bytes=9000), SM_COUNT
    )
    assert (fill.name, fill.moved_bytes) == ("elementwise", 9000)
    assert (add.name, add.moved_bytes) == ("scatter", 200)


def test_what_only_allocates_launches_nothing() -> None:
    assert names(op("empty")) == []
