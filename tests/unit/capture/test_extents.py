"""Problem sizes of kernels, as captured from real modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import brimful as bf
from brimful.capture import capture_step
from brimful.trace import Op
from brimful.trace.extents import Attention, Convolution, Copy, Product, Rows, Strided, extents_of
from helpers.captured_jobs import A100

SAMPLES = 4


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous()


class SelfAttention(nn.Module):
    """By flash attention; by the memory-efficient kernels with a mask, or a causal one that is not square."""

    def __init__(self, *, is_causal: bool = True, is_flash: bool = True) -> None:
        super().__init__()
        self.is_causal, self.is_flash = is_causal, is_flash

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        keys, mask = heads, None
        if not self.is_flash:
            keys = heads[:, :, :32]
            mask = None if self.is_causal else heads.new_zeros(heads.shape[2], keys.shape[2])
        return F.scaled_dot_product_attention(heads, keys, keys, mask, is_causal=self.is_causal)


def ops_of(module: nn.Module, *shape: int, layout: torch.memory_format = torch.contiguous_format) -> list[Op]:
    before = nn.Conv2d(shape[0], shape[0], 1) if len(shape) == 3 else nn.Linear(shape[-1], shape[-1])
    job = bf.Job(
        model=nn.Sequential(before, module).to(memory_format=layout),
        loss=lambda model, x: model(x.to(memory_format=layout) if x.dim() == 4 else x).float().mean(),
        batch=lambda count: torch.zeros(count, *shape),
        optimizer="sgd",
    )
    trace = capture_step(job, bf.Settings(micro_batch_size=SAMPLES, precision="bf16"), A100, steps=1)
    return [op for op in trace.ops if op.module == "1"]


def extents(ops: list[Op], name: str) -> Any:
    return [extents_of(op.extents) for op in ops if op.name.split(".")[1] == name]


def test_a_convolution_has_channels_kernel_stride_and_layout() -> None:
    def conv() -> nn.Module:
        return nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=4)

    expected = Convolution(SAMPLES, 8, 16, 4, 9, 4, 32 * 32, 16 * 16, 0, 0, 3, 1)
    ops = ops_of(conv(), 8, 32, 32)
    assert extents(ops, "convolution") == [expected]
    assert extents(ops, "convolution_backward") == [expected._replace(gradients=3)]
    last = ops_of(conv(), 8, 32, 32, layout=torch.channels_last)
    assert extents(last, "convolution") == [expected._replace(is_channels_last=1)]


def test_a_transposed_convolution_is_described_as_the_one_it_reverses() -> None:
    ops = ops_of(nn.ConvTranspose2d(8, 16, 2, stride=2), 8, 16, 16)
    assert extents(ops, "convolution") == [Convolution(SAMPLES, 16, 8, 1, 4, 4, 32 * 32, 16 * 16, 0, 0, 2, 1)]


def test_a_linear_layer_is_a_product_of_all_tokens() -> None:
    ops = ops_of(nn.Linear(32, 64), 10, 32)
    assert extents(ops, "addmm") == [Product(1, SAMPLES * 10, 64, 32, is_second_transposed=1)]
    weight_gradient = Product(1, 64, 32, 40, is_first_transposed=1)
    assert sorted(extents(ops, "mm")) == [Product(1, 40, 32, 64), weight_gradient]


def test_attention_has_heads_of_all_samples() -> None:
    ops = ops_of(SelfAttention(), 16, 32)
    (forward,) = extents(ops, "_scaled_dot_product_flash_attention")
    assert forward == Attention(SAMPLES * 2, 16, 16, 16, 1)
    assert extents(ops, "_scaled_dot_product_flash_attention_backward") == [forward]


@pytest.mark.parametrize(
    ("module", "shape", "name", "rows"),
    [
        (nn.LayerNorm(32), (10, 32), "native_layer_norm", Rows(SAMPLES * 10, 32, 1)),
        (nn.GroupNorm(2, 8), (8, 4, 4), "native_group_norm", Rows(SAMPLES * 2, 64, 1)),
        (nn.BatchNorm2d(8), (8, 4, 4), "native_batch_norm", Rows(8, SAMPLES * 16, 1)),
        (nn.Softmax(dim=1), (10, 32), "_softmax", Rows(SAMPLES * 32, 10, 32)),
    ],
)
def test_norms_and_softmax_have_their_groups(
    module: nn.Module, shape: tuple[int, ...], name: str, rows: Rows
) -> None:
    ops = ops_of(module, *shape)
    assert extents(ops, name) == [rows]
    backward = {"_softmax": "_softmax_backward_data"}.get(name, f"{name}_backward")
    assert extents(ops, backward) == [rows]


def test_batch_norm_of_channels_last_strides_over_channels() -> None:
    ops = ops_of(nn.BatchNorm2d(8), 8, 4, 4, layout=torch.channels_last)
    assert extents(ops, "native_batch_norm") == [Rows(8, SAMPLES * 16, 8)]


def test_a_copy_that_transposes_has_short_runs() -> None:
    assert Copy(1) in extents(ops_of(Transposed(), 10, 32), "clone")


class Pointwise(nn.Module):
    """Applies a function to an input (B, 16, 32) without gradients."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.function(x)
        return x


def in_other_order(x: Tensor) -> Tensor:
    """The same shape, with the middle dimension contiguous."""
    return torch.zeros_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("mul", lambda x: x * in_other_order(x)),
        ("mul_", lambda x: torch.zeros_like(x).mul_(in_other_order(x))),
        ("where", lambda x: torch.where(in_other_order(x) > 0, x, 0.0)),
    ],
)
def test_a_pointwise_op_whose_operands_lie_in_different_orders_transposes(
    name: str, function: Callable[[Tensor], Tensor]
) -> None:
    assert extents(ops_of(Pointwise(function), 16, 32), name) == [Copy(1)]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * x,
        lambda x: x * 2,
        lambda x: x * torch.tensor(2.0),
        lambda x: in_other_order(x) * in_other_order(x),  # dense in one order
        lambda x: x[:1] * x[:1],
    ],
)
def test_pointwise_ops_of_dense_operands_in_one_order_are_vectorized(
    function: Callable[[Tensor], Tensor],
) -> None:
    assert extents(ops_of(Pointwise(function), 16, 32), "mul") == [None]


@pytest.mark.parametrize(
    ("function", "elements"),
    [
        (lambda x: x * x[:, :, :1], SAMPLES * 16 * 32),
        (lambda x: x * x[:, :1], SAMPLES * 16 * 32),
        (lambda x: x * torch.zeros(16, 1), SAMPLES * 16 * 32),  # broadcast
        (lambda x: x * torch.zeros(16, 1).expand_as(x), SAMPLES * 16 * 32),
        (lambda x: x[..., ::2] * x[..., 1::2], SAMPLES * 16 * 16),  # strided
        # pairs fill sectors
        (lambda x: x[:, :, :2] * torch.zeros(len(x), 2, 16).transpose(1, 2), SAMPLES * 16 * 2),
        # rows stay contiguous
        (lambda x: x * torch.zeros(16, len(x), 32).transpose(0, 1), SAMPLES * 16 * 32),
    ],
)
def test_pointwise_ops_of_other_operands_compute_where_each_element_lies(
    function: Callable[[Tensor], Tensor], elements: int
) -> None:
    assert extents(ops_of(Pointwise(function), 16, 32), "mul") == [Strided(elements, 3)]


def test_a_trace_scaled_from_one_sample_transposes_where_a_batch_of_many_does() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        return (y * torch.ones(32, len(y)).t()).sum()  # one sample has one row

    job = bf.Job(
        model=lambda: nn.Linear(32, 32), loss=loss, batch=lambda n: torch.zeros(n, 32), optimizer="sgd"
    )
    one, many = (capture_step(job, bf.Settings(micro_batch_size=n), A100, steps=1) for n in (1, 16))
    assert extents(list(one.ops), "mul")[0] is None
    assert extents(list(many.ops), "mul")[0] == Copy(1)
    scaled = one.at_micro_batch_size(many, 64)
    assert extents(list(scaled.ops), "mul")[0] == Copy(1)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("is_flash", [False, True])
def test_attention_is_causal_in_both_directions_or_in_none(is_causal: bool, is_flash: bool) -> None:
    """Whatever else their arguments say, such as whether log-sum-exp is returned."""
    ops = ops_of(SelfAttention(is_causal=is_causal, is_flash=is_flash), 64, 128)
    attention = [op for op in ops if "scaled_dot_product" in op.name]
    assert [op.extents[-1] for op in attention] == [is_causal] * 2
    assert all(("flash" if is_flash else "efficient") in op.name for op in attention)


class Grouped(nn.Module):
    """Three linear layers, each for a third of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 16, 32))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([4, 8, 12], dtype=torch.int32, device=x.device)
        return torch._grouped_mm(x.flatten(0, 1).bfloat16(), self.weight.bfloat16(), ends)


def test_groups_of_rows_are_one_product() -> None:
    forward, *backward = extents(ops_of(Grouped(), 3, 16), "_grouped_mm")
    assert forward == Product(1, 12, 32, 16)
    assert sorted(product.rows * product.columns * product.inner for product in backward) == [12 * 32 * 16] * 2
