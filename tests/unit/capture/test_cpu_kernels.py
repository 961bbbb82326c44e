"""What CPU kernels take inside, against torch's profiler; and how the fakes of their results lie in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from brimful.capture import capture_step
from brimful.capture.corrections.rules import (
    BlockedConvolution,
    ContiguousCopies,
    FakeForms,
    KernelTemporaries,
    ReducedLosses,
    Rule,
)
from brimful.memory import predict_memory
from brimful.profiling import measure_step
from brimful.profiling.cpu_memory import record_cpu_memory
from brimful.settings import Settings
from helpers.captured_jobs import CPU, capture, changed, job

aten = torch.ops.aten
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
ONE_DNN = torch.backends.cpu.get_cpu_capability() == "AVX512"

# N samples, C channels, H height, W width

CONTIGUOUS = torch.randn(4, 16, 12, 8)
TRANSPOSED = torch.randn(4, 12, 16, 8).transpose(1, 2)
CHANNELS_LAST = CONTIGUOUS.to(memory_format=torch.channels_last)
LAYOUTS = {"contiguous": CONTIGUOUS, "transposed": TRANSPOSED, "channels last": CHANNELS_LAST}
ONES, IDS = torch.ones(16), torch.arange(16)
MEAN, DEVIATION = torch.zeros(16), torch.ones(16)
ROWS_MEAN = torch.zeros(4, 16, 12, 1)


@dataclass
class Temporaries:
    """Stands for a recorder: takes what rules tell it."""

    sizes: list[int] = field(default_factory=list)
    ops: tuple[()] = ()

    @property
    def ledger(self) -> Temporaries:
        return self

    def add_temporary(self, size_bytes: int, label: str, **_others: Any) -> None:
        self.sizes.append(size_bytes)


def predicted_and_measured(rules: tuple[type[Rule], ...], func: Any, args: tuple[Any, ...]) -> tuple[int, int]:
    """Bytes inside one call of an op, beside its results."""
    with record_cpu_memory() as peak:
        out = func(*args)
    outputs = [out] if isinstance(out, Tensor) else [tensor for tensor in out if tensor is not None]
    held = sum(tensor.untyped_storage().nbytes() for tensor in outputs)
    recorder = Temporaries()
    for make in rules:
        rule = make(target=CPU, settings=Settings(micro_batch_size=1))
        rule.recorder = recorder  # type: ignore[assignment]
        rule.after_op(func, args, {}, outputs)
    assert sum(tensor.untyped_storage().nbytes() for tensor in outputs) == held
    return sum(recorder.sizes), peak.peak_bytes - held


def attention_gradient(x: Tensor) -> tuple[Any, ...]:
    """The backward of attention, and its arguments, with a gradient that lies as `x` does."""
    result, logsumexp = ATTENTION(x, x, x)
    return ATTENTION_BACKWARD, x, x, x, x, result, logsumexp, 0.0, False


OPS: dict[str, Callable[[Tensor], tuple[Any, ...]]] = {
    "softmax": lambda x: (aten._softmax.default, x, -1, False),
    "log_softmax": lambda x: (aten._log_softmax.default, x, 1, False),
    "softmax backward": lambda x: (aten._softmax_backward_data.default, x, x, -1, torch.float32),
    "log_softmax backward": lambda x: (
        aten._log_softmax_backward_data.default, x, CONTIGUOUS, 1, torch.float32,
    ),
    "layer_norm": lambda x: (aten.native_layer_norm.default, x, [8], None, None, 1e-5),
    "layer_norm backward": lambda x: (
        aten.native_layer_norm_backward.default, x, CONTIGUOUS, [8], ROWS_MEAN, ROWS_MEAN, None, None,
        [True, False, False],
    ),
    "rms_norm": lambda x: (aten._fused_rms_norm.default, x, [8], torch.ones(8), 1e-5),
    "batch_norm backward": lambda x: (
        aten.native_batch_norm_backward.default, x, x, ONES, None, None, MEAN, DEVIATION, True, 1e-5,
        [True] * 3,
    ),
    "batch_norm backward, two layouts": lambda x: (
        aten.native_batch_norm_backward.default, x, CONTIGUOUS, ONES, None, None, MEAN, DEVIATION, True, 1e-5,
        [True] * 3,
    ),
    "gelu backward": lambda x: (aten.gelu_backward.default, x, CONTIGUOUS),
    "gelu backward, one layout": lambda x: (aten.gelu_backward.default, x, x),
    "log_sigmoid": lambda x: (aten.log_sigmoid_forward.default, x),
    "index_select": lambda x: (aten.index_select.default, x, 1, IDS),
    "roll": lambda x: (aten.roll.default, x, [1], [1]),
    "roll twice": lambda x: (aten.roll.default, x, [1, 2], [2, 3]),
    "max_pool": lambda x: (aten.max_pool2d_with_indices.default, x, [2, 2]),
    "avg_pool": lambda x: (aten.avg_pool2d.default, x, [2, 2]),
    "avg_pool backward": lambda x: (
        aten.avg_pool2d_backward.default, x[:, :, ::2, ::2], x, [2, 2], [2, 2], [0, 0], False, True, None,
    ),
    "adaptive_avg_pool": lambda x: (aten._adaptive_avg_pool2d.default, x, [2, 2]),
    "resize a small image": lambda x: (aten.upsample_bilinear2d.default, x, [64, 64], False),
    "resize a large image": lambda x: (aten.upsample_bilinear2d.default, x, [65, 64], False),
    "resize to the nearest": lambda x: (aten.upsample_nearest2d.default, x, [24, 16]),
    "mse_loss": lambda x: (aten.mse_loss.default, x, CONTIGUOUS, 1),
    "mse_loss of elements": lambda x: (aten.mse_loss.default, x, CONTIGUOUS, 0),
    "smooth_l1_loss": lambda x: (aten.smooth_l1_loss.default, x, CONTIGUOUS, 1),
    "huber_loss": lambda x: (aten.huber_loss.default, x, CONTIGUOUS, 1),
    "binary_cross_entropy": lambda x: (
        aten.binary_cross_entropy.default, CONTIGUOUS.sigmoid(), CONTIGUOUS.sigmoid(), None, 1,
    ),
    "binary_cross_entropy_with_logits": lambda x: (
        aten.binary_cross_entropy_with_logits.default, x, CONTIGUOUS.sigmoid(), None, None, 1,
    ),
    "sum of booleans": lambda x: (aten.sum.default, x > 0),
    "running sum of booleans": lambda x: (aten.cumsum.default, x > 0, 1),
    "safe softmax": lambda x: (aten._safe_softmax.default, x, -1),
    "masked_select": lambda x: (aten.masked_select.default, x, x > 0),
    "masked_select, expanded": lambda x: (aten.masked_select.default, x, torch.ones(4, 16, 12, 1) > 0),
    "index by a mask": lambda x: (aten.index.Tensor, x, [torch.ones(4, 16) > 0]),
    "put by a mask": lambda x: (
        aten.index_put.default, CONTIGUOUS, [torch.ones(4, 16) > 0], torch.ones(64, 12, 8), True,
    ),
    "integers times floats": lambda x: (aten.mul.Tensor, x, torch.ones(4, 16, 12, 8, dtype=torch.long)),
    "integers over a number": lambda x: (aten.div.Tensor, torch.ones(4, 16, 12, 8, dtype=torch.long), 2),
    "comparison of two types": lambda x: (aten.gt.Tensor, x, torch.ones(4, 16, 12, 8, dtype=torch.long)),
    "halves plus floats": lambda x: (aten.add.Tensor, x.bfloat16(), x),
    "floats": lambda x: (aten.add.Tensor, x, x),
    "real to complex": lambda x: (aten._fft_r2c.default, x, [2, 3], 0, True),
    "real to complex along rows": lambda x: (aten._fft_r2c.default, x, [2], 0, True),
    "complex to complex": lambda x: (aten._fft_c2c.default, torch.complex(x, x), [2, 3], 0, True),
    "complex to complex along rows": lambda x: (aten._fft_c2c.default, torch.complex(x, x), [2], 0, True),
    "complex to real": lambda x: (aten._fft_c2r.default, torch.complex(x, x), [3], 0, 14),
    "complex to real along rows": lambda x: (aten._fft_c2r.default, torch.complex(x, x), [2], 0, 22),
    "complex to real along both": lambda x: (aten._fft_c2r.default, torch.complex(x, x), [2, 3], 0, 14),
    "attention": lambda x: (ATTENTION, x, x, x),
    "attention, halves": lambda x: (ATTENTION, *[x.bfloat16()] * 3),
    "attention, long": lambda x: (ATTENTION, *[x.repeat(1, 1, 70, 1)] * 3),
    "attention, backward": attention_gradient,
    "attention, backward, halves": lambda x: attention_gradient(x.bfloat16()),
    "attention, backward, long": lambda x: attention_gradient(x.repeat(1, 1, 20, 1)),
    "distances": lambda x: (aten._euclidean_dist.default, torch.randn(200, 64), torch.randn(64, 64)),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OPS)
def test_what_a_kernel_takes_inside_is_what_the_profiler_sees(op: str, layout: str) -> None:
    func, *args = OPS[op](LAYOUTS[layout])
    predicted, measured = predicted_and_measured(
        (ContiguousCopies, KernelTemporaries, ReducedLosses), func, tuple(args)
    )
    assert predicted == pytest.approx(measured, abs=4096)  # scalars, a number for each channel or row of pixels


def test_a_summed_loss_keeps_the_storage_of_its_elements() -> None:
    for func in (aten.mse_loss.default, aten.smooth_l1_loss.default):
        assert func(CONTIGUOUS, CONTIGUOUS + 1).untyped_storage().nbytes() == CONTIGUOUS.nbytes
    one = job(
        lambda: nn.Linear(8, 8),
        lambda model, batch: torch.nn.functional.mse_loss(model(batch), batch),
        lambda n: torch.randn(n, 1000, 8),
    )
    assert changed(capture(one), "reduced_losses") == 2 * 8 * 1000 * 8 * 4


def convolution(
    samples: int, channels: int, width: int, size: int, kernel: int, **how: Any
) -> tuple[Tensor, tuple[Any, ...]]:
    """Input and further arguments of `aten.convolution`."""
    groups, is_transposed = how.get("groups", 1), how.get("transposed", False)
    shape = (channels, width // groups) if is_transposed else (width, channels // groups)
    dims = how.get("dims", 2)
    x = torch.randn(samples, channels, *[size] * dims)
    weight = torch.randn(*shape, *[kernel] * dims)
    if how.get("channels_last", False):
        x = x.to(memory_format=torch.channels_last)
    if how.get("weight_too", False):
        weight = weight.to(memory_format=torch.channels_last)
    if how.get("transposed_input", False):
        x = x.transpose(-1, -2)
    padding, stride = how.get("padding", kernel // 2), how.get("stride", 1)
    return x, (
        weight, None, [stride] * dims, [padding] * dims, [1] * dims, is_transposed, [0] * dims, groups,
    )  # fmt: skip


CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "3 × 3": {"samples": 4, "channels": 32, "width": 48, "size": 24, "kernel": 3},
    "the first": {"samples": 4, "channels": 3, "width": 32, "size": 24, "kernel": 3},
    "few channels": {"samples": 4, "channels": 8, "width": 32, "size": 24, "kernel": 3},
    "1 × 1": {"samples": 4, "channels": 32, "width": 48, "size": 24, "kernel": 1},
    "1 × 1 of many samples": {"samples": 16, "channels": 32, "width": 48, "size": 24, "kernel": 1},
    "strided": {"samples": 8, "channels": 32, "width": 64, "size": 32, "kernel": 3, "stride": 2},
    "patches": {"samples": 4, "channels": 3, "width": 64, "size": 32, "kernel": 8, "stride": 8, "padding": 0},
    "large patches": {
        "samples": 4, "channels": 3, "width": 64, "size": 64, "kernel": 16, "stride": 16, "padding": 0,
    },
    "depthwise": {"samples": 4, "channels": 48, "width": 48, "size": 24, "kernel": 3, "groups": 48},
    "depthwise, wide": {"samples": 4, "channels": 48, "width": 48, "size": 24, "kernel": 7, "groups": 48},
    "depthwise, channels last": {
        "samples": 4, "channels": 48, "width": 48, "size": 24, "kernel": 7, "groups": 48, "channels_last": True,
    },
    "groups": {"samples": 4, "channels": 64, "width": 64, "size": 24, "kernel": 3, "groups": 4},
    "channels last": {
        "samples": 4, "channels": 32, "width": 48, "size": 24, "kernel": 3, "channels_last": True,
    },
    "all channels last": {
        "samples": 4, "channels": 32, "width": 48, "size": 24, "kernel": 3, "channels_last": True,
        "weight_too": True,
    },
    "all channels last, large weight": {
        "samples": 8, "channels": 256, "width": 256, "size": 4, "kernel": 3, "channels_last": True,
        "weight_too": True,
    },
    "all channels last, 1 × 1": {
        "samples": 16, "channels": 256, "width": 256, "size": 4, "kernel": 1, "channels_last": True,
        "weight_too": True,
    },
    "all channels last, of one channel": {
        "samples": 4, "channels": 1, "width": 64, "size": 32, "kernel": 3, "channels_last": True,
        "weight_too": True,
    },
    "all channels last, depthwise": {
        "samples": 4, "channels": 48, "width": 48, "size": 24, "kernel": 3, "groups": 48,
        "channels_last": True, "weight_too": True,
    },
    "transposed input": {
        "samples": 4, "channels": 32, "width": 48, "size": 24, "kernel": 3, "transposed_input": True,
    },
    "transposed": {"samples": 4, "channels": 48, "width": 32, "size": 24, "kernel": 3, "transposed": True},
    "transposed, strided": {
        "samples": 4, "channels": 64, "width": 32, "size": 24, "kernel": 2, "padding": 0, "stride": 2,
        "transposed": True,
    },
    "1-d": {"samples": 4, "channels": 32, "width": 48, "size": 400, "kernel": 5, "dims": 1},
    "3-d": {"samples": 2, "channels": 16, "width": 32, "size": 10, "kernel": 3, "dims": 3},
}  # fmt: skip
SCRATCH_FRACTION = 0.05
SCRATCH_BYTES = 2**16
"""What the rule leaves out: of operands and results, and of the smallest kernels."""


IN_BLOCKS = ("3 × 3", "the first", "groups", "transposed", "1-d", "3-d")
"""Convolutions that the kernel of blocks of channels computes, without a stride."""
FURTHER_BYTES = 2**14
"""What the rule leaves out with several threads: sums of a bias and what threads wait at."""


@pytest.mark.skipif(not ONE_DNN, reason="the layouts are those of oneDNN on AVX-512")
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_what_a_convolution_takes_inside_is_what_the_profiler_sees(case: str) -> None:
    x, others = convolution(**CONVOLUTIONS[case])
    y = aten.convolution(x, *others)
    weight, _bias, *how = others
    forward = (aten.convolution.default, (x, *others))
    backward = (
        aten.convolution_backward.default,
        (torch.randn_like(y), x, weight, [0], *how, [True, True, False]),
    )
    for func, args in (forward, backward):
        predicted, measured = predicted_and_measured((BlockedConvolution,), func, args)
        operands = 2 * (x.nbytes + weight.nbytes + y.nbytes)
        assert predicted == pytest.approx(measured, abs=max(SCRATCH_FRACTION * operands, SCRATCH_BYTES))


@pytest.mark.skipif(not ONE_DNN, reason="the layouts are those of oneDNN on AVX-512")
@pytest.mark.parametrize("thread_count", [2, 4])
@pytest.mark.parametrize("case", IN_BLOCKS)
def test_threads_that_sum_a_weight_gradient_over_samples_are_counted(case: str, thread_count: int) -> None:
    x, (weight, _bias, *how) = convolution(**CONVOLUTIONS[case])
    y = aten.convolution(x, weight, None, *how)
    args = (torch.randn_like(y), x, weight, [0], *how, [False, True, False])
    before = torch.get_num_threads()
    torch.set_num_threads(thread_count)
    try:
        func = aten.convolution_backward.default
        predicted, measured = predicted_and_measured((BlockedConvolution,), func, args)
    finally:
        torch.set_num_threads(before)
    assert predicted == pytest.approx(measured, abs=FURTHER_BYTES)


FORMS: dict[str, Callable[[Tensor, Tensor], tuple[Any, ...]]] = {
    "layer_norm": lambda g, x: (
        aten.native_layer_norm_backward.default, g, x, [8], ROWS_MEAN, ROWS_MEAN, None, None,
        [True, False, False],
    ),
    "log_softmax": lambda g, x: (aten._log_softmax_backward_data.default, g, x, -1, torch.float32),
    "batch_norm": lambda g, x: (
        aten.native_batch_norm_backward.default, g, x, ONES, None, None, MEAN, DEVIATION, True, 1e-5,
        [True] * 3,
    ),
    "batch_norm forward": lambda g, x: (
        aten.native_batch_norm.default, x, ONES, ONES, None, None, True, 0.1, 1e-5,
    ),
    "group_norm": lambda g, x: (
        aten.native_group_norm_backward.default, g, x.contiguous(), torch.zeros(4, 4), torch.ones(4, 4), None,
        4, 16, 96, 4, [True, False, False],
    ),
    "dropout": lambda g, x: (aten.native_dropout_backward.default, g, x > 0, 2.0),
    "hardswish": lambda g, x: (aten.hardswish_backward.default, g, x),
    "hardtanh": lambda g, x: (aten.hardtanh_backward.default, g, x, 0, 6),
    "elu": lambda g, x: (aten.elu_backward.default, g, 1.0, 1.0, 1.0, False, x),
    "softplus": lambda g, x: (aten.softplus_backward.default, g, x, 1, 20),
    "mse_loss": lambda g, x: (aten.mse_loss_backward.default, torch.ones(()), g, x, 1),
    "smooth_l1_loss": lambda g, x: (aten.smooth_l1_loss_backward.default, torch.ones(()), g, x, 1, 1.0),
    "huber_loss": lambda g, x: (aten.huber_loss_backward.default, torch.ones(()), g, x, 1, 1.0),
    "log_sigmoid": lambda g, x: (aten.log_sigmoid_forward.default, x),
    "gelu": lambda g, x: (aten.gelu_backward.default, g, x),
    "add": lambda g, x: (aten.add.Tensor, g, x),
}  # fmt: skip


@pytest.mark.parametrize("of_input", LAYOUTS)
@pytest.mark.parametrize("of_gradient", LAYOUTS)
@pytest.mark.parametrize("op", FORMS)
def test_fakes_lie_in_memory_as_what_the_kernel_returns_does(op: str, of_gradient: str, of_input: str) -> None:
    func, *args = FORMS[op](LAYOUTS[of_gradient], LAYOUTS[of_input])
    made = func(*args)
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in args]
    with FakeForms(target=CPU, settings=Settings(micro_batch_size=1)).context(), mode:
        faked = func(*fakes)
    real, fake = (each if isinstance(each, Tensor) else each[0] for each in (made, faked))
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_groups_of_rows_are_multiplied_in_float32_too() -> None:
    rows, weight = torch.randn(12, 8), torch.randn(3, 8, 16)
    ends = torch.tensor([3, 9, 12], dtype=torch.int32)
    real = torch._grouped_mm(rows, weight, ends)
    mode = FakeTensorMode()
    with FakeForms(target=CPU, settings=Settings(micro_batch_size=1)).context(), mode:
        fake_rows, fake_weight = (mode.from_tensor(each).requires_grad_() for each in (rows, weight))
        fake = torch._grouped_mm(fake_rows, fake_weight, mode.from_tensor(ends))
        fake.sum().backward()
    assert fake.shape == real.shape
    assert fake_rows.grad is not None
    assert fake_rows.grad.shape == rows.shape
    assert fake_weight.grad is not None
    assert fake_weight.grad.shape == weight.shape


class UsedOften(nn.Module):
    """One vector that several ops read, so that backward adds up its gradients."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner = how, nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.how == "fresh gradients":
            return y.sin() + y.cos() + y.tanh()
        if self.how == "a gradient that others hold":
            z = self.inner(y)
            a, b = y.sin(), z.cos()
            return a + b + (y + z)
        if self.how == "one product":
            return y * y
        return torch.atan2(y, y + 1)  # its formula adds


@pytest.mark.parametrize(
    "how", ["fresh gradients", "a gradient that others hold", "one product", "a sum within a formula"]
)
def test_gradients_are_added_up_in_place_where_autograd_does_it(how: str) -> None:
    one = job(
        lambda: UsedOften(how),
        lambda model, batch: model(batch).mean(),
        lambda n: torch.randn(n, 500, 64),
    )
    predicted = predict_memory(capture_step(one, Settings(micro_batch_size=4), CPU)).peak_allocated_bytes
    measured = measure_step(one, Settings(micro_batch_size=4), steps=1).measured_peak_allocated_bytes
    assert predicted == pytest.approx(measured, abs=256)


def test_sequences_of_known_lengths_are_packed_and_padded_as_they_are_for_real() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = nn.GRU(16, 24, batch_first=True)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            padded, restored = nn.utils.rnn.pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)
            assert torch.equal(restored, lengths)
            assert padded.shape == (len(x), int(lengths.max()), 24)
            return padded

    one = job(
        Packed,
        lambda model, batch: model(batch["x"], batch["lengths"]).square().mean(),
        lambda n: {"x": torch.randn(n, 20, 16), "lengths": torch.tensor([7, 19, 3, 12] * (n // 4))},
    )
    trace = capture_step(one, Settings(micro_batch_size=8), CPU)
    measured = measure_step(one, Settings(micro_batch_size=8), steps=1).measured_peak_allocated_bytes
    assert predict_memory(trace).peak_allocated_bytes == pytest.approx(measured, rel=0.005)
    assert trace.uncertain_ops == ()


def test_a_module_that_changes_its_own_type_changes_its_parameters_in_place() -> None:
    class Converts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            weight = self.inner.weight
            self.inner = self.inner.to(x.dtype)
            assert self.inner.weight is weight
            return self.inner(x)

    capture(job(Converts, lambda model, batch: model(batch).mean(), lambda n: torch.randn(n, 8)))


def test_what_onednn_takes_is_said_not_to_be_known() -> None:
    def halves() -> nn.Module:
        return nn.Linear(64, 64).bfloat16()

    def volumes() -> nn.Module:
        return nn.Conv3d(4, 8, 3)

    def powers() -> nn.Module:
        return nn.utils.parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="matrix_exp")

    def mean(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).float().mean()

    said = {
        "aten.addmm.default": job(halves, mean, lambda n: torch.randn(n, 64).bfloat16()),
        "aten.convolution.default": job(volumes, mean, lambda n: torch.randn(n, 4, 8, 8, 8)),
        "aten.linalg_matrix_exp.default": job(powers(), mean, lambda n: torch.randn(n, 8)),
    }
    for op, one in said.items():
        assert any(named.startswith(op) for named in capture(one).uncertain_ops)
    plain = job(lambda: nn.Conv2d(4, 8, 3), mean, lambda n: torch.randn(n, 4, 8, 8))
    assert not capture(plain).uncertain_ops
