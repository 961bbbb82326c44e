"""Which measured curve an op is priced by, and where there is none."""

from dataclasses import replace

import pytest
from msgspec import structs

from brimful.cost import Roofline, op_seconds
from brimful.cost.kinds import ARITHMETIC_KINDS, BYTE_KINDS, WEIGHT_GRADIENT, work_of
from brimful.devices import Device, Dispatch, RateCurve, find_device
from brimful.settings import Precision
from brimful.trace import Op, Phase

OP = Op(
    name="aten.mul.Tensor",
    module="",
    phase=Phase.FORWARD,
    step=0,
    micro_batch=0,
    flops=0,
    read_bytes=600,
    written_bytes=400,
    dtype="float32",
)
MIB = 1 << 20


def flat(kind: str, seconds: float) -> RateCurve:
    """A kind whose ops take this long per 1000 of its amount."""
    return RateCurve(kind=kind, points=((1000.0, seconds),))


def calibrated(*curves: RateCurve) -> Device:
    return replace(
        find_device("cpu"),
        launch_seconds=1e-9,
        dispatch=Dispatch.of_launch(1e-9),
        memory_bandwidth_bytes_per_second=1e12,
        fp32_flops_per_second=1e12,
        curves=curves,
    )


@pytest.mark.parametrize(
    ("name", "flops", "dtype", "kind"),
    [
        ("aten.mul.Tensor", 0, "float32", "elementwise"),
        ("aten.add_.Tensor", 0, "float32", "elementwise"),
        ("aten._foreach_lerp_.Scalar", 0, "float32", "elementwise"),
        ("aten.exp.default", 0, "float32", "exponential"),
        ("aten.tanh_.default", 0, "float32", "tanh"),
        ("aten.bernoulli_.float", 0, "float32", "random"),
        ("aten.native_layer_norm_backward.default", 0, "float32", "normalization"),
        ("aten.native_batch_norm.default", 0, "float32", "batch_norm"),
        ("aten.index_put_.default", 0, "float32", "scatter"),
        ("aten.__and__.Tensor", 0, "bool", "elementwise"),
        ("aten.mm.default", 8, "float32", "matmul:float32"),
        ("aten.addmm.default", 8, "bfloat16", "matmul:bfloat16"),
        ("aten.convolution_backward.default", 8, "float32", "convolution:float32"),
        ("aten._scaled_dot_product_flash_attention_for_cpu.default", 8, "float32", "attention:float32"),
        ("aten.mkldnn_rnn_layer.default", 8, "float32", "recurrent:float32"),
    ],
)
def test_the_name_and_the_arithmetic_say_the_kind(name: str, flops: int, dtype: str, kind: str) -> None:
    work = work_of(structs.replace(OP, name=name, flops=flops, dtype=dtype), Precision.FP32)
    assert work.kind == kind
    assert work.amount == (flops or 1000)
    assert kind.partition(":")[0] in (*ARITHMETIC_KINDS, *BYTE_KINDS)


def test_tf32_products_have_a_curve_of_their_own() -> None:
    product = structs.replace(OP, name="aten.mm.default", flops=8)
    assert work_of(product, Precision.TF32).kind == "matmul:tf32"
    assert work_of(structs.replace(product, dtype="bfloat16"), Precision.TF32).kind == "matmul:bfloat16"


def test_the_curve_of_an_op_s_kind_prices_it() -> None:
    device = calibrated(flat("elementwise", 1.0), flat("random", 7.0))
    assert op_seconds(OP, device) == pytest.approx(1.0)
    assert op_seconds(structs.replace(OP, name="aten.bernoulli_.float"), device) == pytest.approx(7.0)


def test_a_kind_without_a_curve_is_priced_as_elementwise() -> None:
    assert (
        op_seconds(structs.replace(OP, name="aten.tanh.default"), calibrated(flat("elementwise", 1.0))) == 1.0
    )


def test_a_product_takes_its_arithmetic_or_its_traffic() -> None:
    device = calibrated(flat("elementwise", 1.0), flat("matmul:float32", 5.0))
    product = structs.replace(OP, name="aten.mm.default", flops=1000)
    assert op_seconds(product, device) == pytest.approx(5.0)
    assert op_seconds(structs.replace(product, read_bytes=99_600), device) == pytest.approx(100.0)


def test_attention_without_a_curve_for_its_type_is_priced_as_a_product() -> None:
    device = calibrated(flat("elementwise", 1.0), flat("matmul:bfloat16", 5.0))
    attention = structs.replace(OP, name="aten._scaled_dot_product_x.default", flops=1000, dtype="bfloat16")
    assert op_seconds(attention, device) == pytest.approx(5.0)


def test_arithmetic_without_any_curve_keeps_the_roofline_and_an_unknown_type_is_named() -> None:
    device = calibrated(flat("elementwise", 1e-6), flat("matmul:float32", 5.0))
    roofline = Roofline(device, Precision.FP32)
    double = structs.replace(OP, name="aten.mm.default", flops=10**12, dtype="float64")
    assert roofline.op_seconds(double) == pytest.approx(1.0)
    assert roofline.dtypes_at_fp32_rate == ("float64",)


def test_a_convolution_on_a_cpu_lays_out_its_operands_and_adds_up_gradients_of_weights() -> None:
    curves = (flat("elementwise", 1.0), flat("convolution:float32", 10.0), flat(WEIGHT_GRADIENT, 100.0))
    forward = structs.replace(OP, name="aten.convolution.default", flops=1000, weight_bytes=2000)
    backward = structs.replace(forward, name="aten.convolution_backward.default")
    assert op_seconds(forward, calibrated(*curves)) == pytest.approx(11.0)
    assert op_seconds(backward, calibrated(*curves)) == pytest.approx(211.0)


def test_what_python_takes_depends_on_the_phase_and_a_recomputed_op_is_forward() -> None:
    dispatch = Dispatch(forward_seconds=5.0, backward_seconds=3.0, optimizer_seconds=2.0)
    device = replace(calibrated(flat("elementwise", 1.0)), launch_seconds=0.5, dispatch=dispatch)
    assert op_seconds(OP, device) == pytest.approx(1.0 + 4.5)
    backward = structs.replace(OP, phase=Phase.BACKWARD)
    assert op_seconds(backward, device) == pytest.approx(1.0 + 2.5)
    assert op_seconds(structs.replace(backward, recomputed=True), device) == pytest.approx(1.0 + 4.5)
