"""Which kernel an attention runs in on CUDA, and what it keeps and takes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from brimful.capture.corrections.cuda.attention_backward import (
    cudnn_backward_bytes,
    efficient_backward_bytes,
    flash_backward_bytes,
)
from brimful.capture.corrections.cuda.attention_choice import AttentionBackend, AttentionCall, choose_backend
from brimful.devices import Device, find_device
from brimful.settings import Precision
from brimful.trace import Category, Phase, Trace
from helpers.captured_jobs import A100, H100, V100, capture, job, made_by, ops

# B batch, H heads, G heads of keys and values, M query length, N key length, D head size

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CUDNN, FLASH, EFFICIENT, MATH = AttentionBackend
RTX_4090 = find_device("RTX 4090")


def chosen(
    capability: tuple[int, int],
    dtype: torch.dtype,
    *,
    head_size: int = 64,
    value_size: int | None = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    shares_heads: bool = False,
    key_heads: int = 4,
    rows: int = 16,
    columns: int = 16,
    last_stride: int = 1,
    trains: bool = True,
    version: tuple[int, int] = (2, 13),
) -> AttentionBackend:
    def made(heads: int, length: int, size: int) -> Tensor:
        x = torch.empty(2, heads, length, size * last_stride, dtype=dtype, device="meta")
        return x[..., ::last_stride].requires_grad_(trains)

    return choose_backend(
        AttentionCall(
            query=made(4, rows, head_size),
            key=made(key_heads, columns, head_size),
            value=made(key_heads, columns, value_size or head_size),
            mask=mask,
            dropout=dropout,
            is_causal=is_causal,
            shares_heads=shares_heads,
            capability=capability,
            torch_version=version,
        )
    )


SOME_MASK = torch.ones(16, 16, dtype=torch.bool, device="meta")
A, H, B, ADA, GEFORCE_BLACKWELL, VOLTA = (8, 0), (9, 0), (10, 0), (8, 9), (12, 0), (7, 0)

CHOICES: list[tuple[tuple[int, int], torch.dtype, dict[str, Any], AttentionBackend]] = [
    # cuDNN comes first on data-center Hopper and Blackwell alone
    (H, BF16, {}, CUDNN),
    (B, FP16, {}, CUDNN),
    (A, BF16, {}, FLASH),
    (GEFORCE_BLACKWELL, BF16, {}, FLASH),
    (H, BF16, {"version": (2, 9)}, CUDNN),
    (H, BF16, {"version": (2, 10)}, FLASH),
    # and takes halves, multiples of 8 up to 128 (keys and values 192 and 128), masks and shared heads
    (H, FP32, {}, EFFICIENT),
    (H, BF16, {"head_size": 128}, CUDNN),
    (H, BF16, {"head_size": 136}, FLASH),
    (H, BF16, {"head_size": 192, "value_size": 128}, CUDNN),
    (H, BF16, {"head_size": 60}, FLASH),
    (H, BF16, {"mask": SOME_MASK}, CUDNN),
    (H, BF16, {"mask": SOME_MASK[0]}, EFFICIENT),
    (H, BF16, {"mask": SOME_MASK.float().requires_grad_()}, EFFICIENT),
    (H, BF16, {"mask": SOME_MASK, "shares_heads": True, "key_heads": 2}, CUDNN),
    (H, BF16, {"columns": 1}, FLASH),
    (H, BF16, {"rows": 1, "dropout": 0.1}, FLASH),
    # dropout: any in 2.13, sixteenths later
    (H, BF16, {"dropout": 0.1}, CUDNN),
    (H, BF16, {"dropout": 0.1, "version": (2, 14)}, FLASH),
    (H, BF16, {"dropout": 0.125, "version": (2, 14)}, CUDNN),
    # flash takes halves from 8.0 on, one head size up to 256, no mask, causal squares
    (VOLTA, FP16, {}, EFFICIENT),
    (A, FP32, {}, EFFICIENT),
    (A, BF16, {"head_size": 60}, FLASH),
    (A, BF16, {"head_size": 256}, FLASH),
    (A, BF16, {"head_size": 264}, EFFICIENT),
    (A, BF16, {"value_size": 128}, EFFICIENT),
    (A, BF16, {"mask": SOME_MASK}, EFFICIENT),
    (A, BF16, {"is_causal": True}, FLASH),
    (A, BF16, {"is_causal": True, "columns": 32}, EFFICIENT),
    (A, BF16, {"dropout": 0.1}, FLASH),
    (A, BF16, {"shares_heads": True, "key_heads": 2}, FLASH),
    (A, BF16, {"shares_heads": True, "key_heads": 2, "mask": SOME_MASK}, MATH),
    (A, BF16, {"key_heads": 1}, MATH),
    (A, BF16, {"last_stride": 2}, MATH),
    # 8.6 to 8.9 and 12.x lack shared memory for the backward of large heads
    (ADA, BF16, {"head_size": 192}, FLASH),
    (ADA, BF16, {"head_size": 200}, EFFICIENT),
    (ADA, BF16, {"head_size": 200, "trains": False}, FLASH),
    (ADA, BF16, {"head_size": 232}, FLASH),
    (ADA, BF16, {"head_size": 232, "dropout": 0.1}, EFFICIENT),
    (GEFORCE_BLACKWELL, BF16, {"head_size": 224}, EFFICIENT),
    (A, BF16, {"head_size": 224}, FLASH),
    # memory-efficient attention wants rows of 16 bytes, on older cards for halves only
    (A, FP32, {"head_size": 60}, EFFICIENT),
    (A, FP32, {"head_size": 62}, MATH),
    (VOLTA, FP32, {"head_size": 62}, EFFICIENT),
    (VOLTA, FP16, {"head_size": 60}, MATH),
    (VOLTA, BF16, {}, MATH),
    (A, torch.float64, {}, MATH),
]


@pytest.mark.parametrize(("capability", "dtype", "asked", "kernel"), CHOICES)
def test_the_first_kernel_that_takes_a_call_runs_it(
    capability: tuple[int, int], dtype: torch.dtype, asked: dict[str, Any], kernel: AttentionBackend
) -> None:
    assert chosen(capability, dtype, **asked) is kernel


def test_kernels_that_the_user_has_switched_off_are_passed_over() -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        assert chosen(A, BF16) is EFFICIENT
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert chosen(H, BF16) is MATH


class Attention(nn.Module):
    """(B, inputs) → (B, 1), through one attention; `asked` goes to it."""

    def __init__(self, *, key_heads: int = 4, head_size: int = 16, tokens: int = 16, **asked: Any) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head_size, self.tokens = 4, key_heads, head_size, tokens
        self.query = nn.Linear(12, 4 * tokens * head_size)
        self.both = nn.Linear(12, 2 * key_heads * tokens * head_size)
        self.asked = asked

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).view(len(x), self.heads, self.tokens, self.head_size)
        key, value = self.both(x).view(len(x), 2, self.key_heads, self.tokens, self.head_size).unbind(1)
        asked = {name: make() if callable(make) else make for name, make in self.asked.items()}
        return F.scaled_dot_product_attention(query, key, value, **asked).flatten(1)


def captured(device: Device, precision: Precision, **model: Any) -> Trace:
    return capture(
        job(lambda: Attention(**model), loss=lambda module, batch: module(batch).square().mean(), batch=inputs),
        device,
        precision=precision,
    )


def inputs(samples: int) -> Tensor:
    return torch.randn(samples, 12)


SAMPLES = 8


def saved(trace: Trace) -> set[int]:
    return {s.size_bytes for s in trace.storages if s.category is Category.SAVED_TENSORS}


def inside(trace: Trace) -> list[int]:
    """What the kernel's backward takes in one step."""
    found = [s.size_bytes for s in trace.storages if "attention_backward" in s.label and "inside" in s.label]
    return found[: len(found) // trace.captured_steps]


def test_flash_attention_keeps_shared_heads_once_and_its_backward_takes_them_apart() -> None:
    trace = captured(A100, Precision.BF16, key_heads=2, enable_gqa=True)
    assert ops(trace, "aten._scaled_dot_product_flash_attention.default")
    assert not ops(trace, "aten.repeat_interleave")
    assert not ops(trace, "aten.index_select")  # what it would copy heads with
    expanded = SAMPLES * 4 * 16 * 16 * 2
    sums, query = SAMPLES * 4 * 128 * 4, SAMPLES * 4 * 128 * 32 * 4  # 16 rows fill 128, heads of 16 fill 32
    gradient_of_output = expanded  # (B, H, M, D) lies in that order, so both are copied
    assert inside(trace) == [sums, query, expanded, expanded, gradient_of_output, gradient_of_output]
    equal = captured(A100, Precision.BF16)
    assert inside(equal) == [sums, query, gradient_of_output, gradient_of_output]


def test_heads_that_fill_no_multiple_of_8_are_padded_for_flash_attention() -> None:
    trace = captured(A100, Precision.BF16, head_size=12)
    padded = SAMPLES * 4 * 16 * 16 * 2
    assert [s.size_bytes for s in made_by(trace, "aten.constant_pad_nd")] == [padded] * 3
    assert not made_by(captured(A100, Precision.BF16), "aten.constant_pad_nd")


def test_a_boolean_mask_becomes_a_bias_of_padded_rows_that_is_kept() -> None:
    def made(tokens: int) -> list[int]:
        trace = captured(
            A100,
            Precision.BF16,
            tokens=tokens,
            attn_mask=lambda: torch.ones(SAMPLES, 1, tokens, tokens, dtype=torch.bool),
        )
        assert ops(trace, "aten._scaled_dot_product_efficient_attention.default")
        biases = made_by(trace, "aten.where") + made_by(trace, "aten.constant_pad_nd")
        return [s.size_bytes for s in biases if s.category is Category.SAVED_TENSORS]

    assert made(16) == [SAMPLES * 16 * 16 * 2]  # as it is
    assert made(20) == [SAMPLES * 20 * 24 * 2]  # rows of 20 numbers begin at no multiple of 8: 24
    assert made(24) == [SAMPLES * 24 * 24 * 2]


def test_cudnn_attention_takes_a_mask_that_hides_by_a_large_number() -> None:
    trace = captured(H100, Precision.BF16, attn_mask=lambda: torch.ones(16, 16, dtype=torch.bool))
    assert ops(trace, "aten._scaled_dot_product_cudnn_attention.default")
    assert not made_by(trace, "aten.logical_not")
    assert [s.size_bytes for s in made_by(trace, "aten.where")] == [2 * 16 * 16]
    (block,) = {
        (s.size_bytes, s.most_bytes)
        for s in trace.storages
        if "inside aten._scaled_dot_product_cudnn_attention_backward" in s.label
    }
    numel = SAMPLES * 4 * 16 * 16
    likely = (SAMPLES * 4 * 16 + numel) * 4
    assert block == (likely, 2 * likely + 2 * numel * 4)


def test_math_attention_computes_halves_in_float32_and_adds_its_mask_in_place() -> None:
    trace = captured(
        A100,
        Precision.BF16,
        key_heads=2,
        enable_gqa=True,
        attn_mask=lambda: torch.ones(16, 16, dtype=torch.bool),
    )
    scores = SAMPLES * 4 * 16 * 16 * 4
    (added,) = ops(trace, "aten.add.Tensor", Phase.FORWARD)
    assert added.dtype == "float32"
    (product,) = [
        i
        for i, s in enumerate(trace.storages)
        if s.op is not None
        and trace.ops[s.op].step == 0
        and trace.ops[s.op].name == "aten.bmm.default"
        and trace.ops[s.op].phase is Phase.FORWARD
        and s.size_bytes == scores
        and s.category is Category.TEMPORARIES
        and s.label == "aten.bmm.default"
    ][:1]
    (freed,) = [event for event in trace.events if event.storage == product and event.kind == "free"]
    index = trace.ops.index(added)
    assert freed.op == index - 1  # before the sum is allocated


def test_multi_head_attention_of_torch_reaches_the_fused_kernel_too() -> None:
    def trained(device: Device, precision: Precision) -> Trace:
        return capture(
            job(
                lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),
                loss=lambda module, batch: module(batch).square().mean(),
                batch=lambda samples: torch.randn(samples, 16, 32),
            ),
            device,
            precision=precision,
        )

    assert ops(trained(A100, Precision.BF16), "aten._scaled_dot_product_flash_attention.default")
    assert ops(trained(H100, Precision.BF16), "aten._scaled_dot_product_cudnn_attention.default")
    assert ops(trained(V100, Precision.FP32), "aten._scaled_dot_product_efficient_attention.default")


def test_the_accumulators_of_each_backward_by_hand() -> None:
    def made(heads: int, rows: int, size: int) -> Tensor:
        return torch.empty(2, heads, rows, size, dtype=BF16, device="meta")

    # 2 · 8 · 1024 sums of 4 bytes; 80 numbers fill 96
    assert flash_backward_bytes(made(8, 1000, 80), made(8, 1000, 80)) == (65536, 65536 * 96)
    assert flash_backward_bytes(made(8, 1000, 160), made(8, 1000, 160)) == (65536, 65536 * 192)
    # keys and values of 2 heads, apart for 8: 2 · 8 · 500 · 80 · 2 bytes
    assert flash_backward_bytes(made(8, 1000, 80), made(2, 500, 80))[2:] == (1280000, 1280000)
    assert efficient_backward_bytes(made(8, 1000, 80)) == (64000, 2 * 8 * 1024 * 128 * 4)
    assert cudnn_backward_bytes(made(8, 1000, 80), made(2, 500, 80), made(2, 500, 80)) == (
        5184000 + 4 * 2 * (2 * 2 * 500 * 80) * 2,  # and 4 query heads for each key head, in bfloat16
        2 * (5184000 + 4 * 2 * (2 * 2 * 500 * 80) * 2) + 4 * 2 * (2 * 2 * 500 * 80) * 4,
    )


def test_an_attention_without_gradients_keeps_no_logarithms() -> None:
    with FakeTensorMode():
        x = torch.empty(2, 4, 16, 16)
        call = AttentionCall(
            query=x,
            key=x,
            value=x,
            mask=None,
            dropout=0.0,
            is_causal=False,
            shares_heads=False,
            capability=A,
            torch_version=(2, 13),
        )
        assert not call.needs_gradient
        query = torch.empty(2, 4, 16, 16, requires_grad=True)
        assert dataclasses.replace(call, query=query).needs_gradient
        with torch.no_grad():
            assert not dataclasses.replace(call, query=query).needs_gradient
