"""The CPU's convolutions copy their operands into oneDNN's layouts, and their results back.

Not counted, as the profiler shows with torch 2.13 on AVX-512: scratch memory of the kernels for strides, up to
a fifth of the copies, and of those for 1 × 1 with a stride; what several threads of a weight gradient sum in
for 1 × 1, for one channel each, in channels_last and with AVX2; and what they sum a bias in, up to 17 kB.
oneDNN chooses other layouts on other machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, gcd, prod
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from brimful.capture.corrections.rule import Rule
from brimful.utils.quantities import round_up

# N samples, C channels, spatial sizes after them; a weight is (C_out, C_in / groups, kernel sizes), that of a
# transposed convolution (C_in, C_out / groups, kernel sizes). x is the input of forward, y its output.

aten = torch.ops.aten

_BLOCKS = {"AVX512": 16, "AVX2": 8}
"""Channels per block, by torch's name of the CPU's capability: the number of float32 in a register."""
_SMALL_NUMEL = 20480
_SMALL_KERNEL = 3
_SMALL_BATCH = 16
"""Limits of torch's own convolution. Source: torch aten/src/ATen/native/Convolution.cpp, `use_mkldnn`."""
_DEPTHWISE_KERNEL = 3
"""oneDNN's kernel for the weights of one channel each takes no wider one, see `_has_kernel_of_its_own`."""
_WIDEST_KERNEL = 14
"""oneDNN's kernels for gradients take no wider one: ONEDNN_VERBOSE shows matrices for 15 and 16, not for 14."""
_GROUP_BLOCKS = (16, 8, 4)
"""Channels per block where groups have more than one each: as many as divide a group's, of input and output.
ONEDNN_VERBOSE shows matrices where none do."""
_MOST_AS_THEY_ARE = 3
"""Channels that the kernel for a first convolution reads without blocks for the weights' gradient. Of 4 to 15,
oneDNN takes its kernel for AVX2, as ONEDNN_VERBOSE shows with torch 2.13 on AVX-512."""
_AVX2_BLOCK = 8
_AVX512_BLOCK = 16
_FEWEST_ROWS = 9
_SUM_COST = 8
_BARRIER_BYTES = 2 * 4096 + 128
"""Limits and costs of dividing a weight gradient among threads, and what they wait at. Source: oneDNN
src/cpu/x64/jit_avx512_common_conv_kernel.cpp, `min_oh_reduce` and `balance`; simple_barrier::ctx_t."""
_REDUCTIONS = 4
"""Gradients of the weights, for each thread, that oneDNN's convolution by matrices makes room for: the size of
a float too often, as the profiler shows. Source: oneDNN src/cpu/gemm_convolution_utils.cpp."""


class BlockedConvolution(Rule):
    """Count what convolutions hold inside on a CPU."""

    name = "blocked_convolution"
    source = (
        "torch aten/src/ATen/native/mkldnn/Conv.cpp; oneDNN's layouts: ONEDNN_VERBOSE=1 and torch 2.13's "
        "profiler on AVX-512"
    )
    device_kinds = ("cpu",)

    def applies(self) -> bool:
        """Whether the CPU has vectors that oneDNN blocks for."""
        return super().applies() and torch.backends.cpu.get_cpu_capability() in _BLOCKS

    def after_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> None:
        """Add the op's hidden memory to its outputs."""
        if func is aten.convolution.default:
            x, weight, _bias, *how = args
            (y,) = outputs
            inside = _forward_bytes(_convolution(x, weight, y, how))
        elif func is aten.convolution_backward.default:
            grad_y, x, weight, _bias_sizes, *how, wants = args
            inside = _backward_bytes(_convolution(x, weight, grad_y, how), *wants)
        else:
            return
        hidden_bytes = inside - sum(output.nbytes for output in outputs)
        if hidden_bytes > 0:
            self.add(hidden_bytes, f"inside {func}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Convolution:
    """One convolution: its tensors, and what copies of them in oneDNN's layouts take."""

    x: Tensor
    weight: Tensor
    y: Tensor
    """The output, or its gradient."""
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    is_transposed: bool
    groups: int

    def is_narrow(self) -> bool:
        return self.weight.shape[-1] <= _WIDEST_KERNEL

    def column_bytes(self) -> int:
        """Bytes of each position's patch of one sample and group, on one level of a volume."""
        narrow = self.x if self.is_transposed else self.y
        return prod(self.weight.shape[1:]) * prod(narrow.shape[2:][-2:]) * narrow.element_size()

    def is_of_onednn(self) -> bool:
        kernel, samples = self.weight.shape[2:], self.x.shape[0]
        pays = (
            max(self.stride) > 1
            or max(self.dilation) > 1
            or samples >= _SMALL_BATCH
            or set(kernel) != {1}
            or torch.get_num_threads() > 1
        )
        is_large = (
            self.groups > 1
            or (len(kernel) > 1 and min(kernel[-2:]) > _SMALL_KERNEL)
            or samples > 1
            or self.x.numel() > _SMALL_NUMEL
        )
        return pays and is_large

    def is_depthwise(self) -> bool:
        return 1 < self.groups == self.x.shape[1] == self.y.shape[1]

    def is_by_rows(self, widens: bool) -> bool:
        """Whether the kernel for what widens by a stride is used: it takes rows of channels, without blocks."""
        has_rows = self.groups == 1 or self.block() is None
        return widens and max(self.stride) > 1 and max(self.dilation) == 1 and has_rows

    def is_pointwise(self) -> bool:
        return set(self.weight.shape[2:]) == {1}

    def block(self) -> int | None:
        """Channels per block of the activations; None where oneDNN multiplies matrices instead."""
        if self.is_pointwise() and max(self.padding) > 0 and self.groups == 1:
            return None
        if self.groups == 1 or self.is_depthwise():
            return _block()
        of_group = gcd(self.x.shape[1] // self.groups, self.y.shape[1] // self.groups)
        return next((size for size in _GROUP_BLOCKS if size <= _block() and of_group % size == 0), None)

    def widens_by_matrices(self) -> bool:
        """Whether an input's gradient is by matrices: no kernel dilates with a stride or for one channel."""
        return max(self.dilation) > 1 and (max(self.stride) > 1 or self.is_depthwise())

    def is_channels_last(self) -> bool:
        """Whether torch suggests channels_last for input or weight.

        Strides decide, so that size 1 counts as it does in torch. Source: torch
        aten/src/ATen/native/ConvUtils.h, `mkldnn_conv_use_channels_last`.
        """
        layouts = (torch.channels_last, torch.channels_last_3d)
        return any(suggest_memory_format(tensor) in layouts for tensor in (self.x, self.weight))

    def copied_bytes(self, tensor: Tensor) -> int:
        """Bytes of the copy that torch makes of a tensor that does not lie in the layout of the convolution."""
        layout = torch.contiguous_format
        if self.is_channels_last():
            layout = torch.channels_last if self.x.dim() == 4 else torch.channels_last_3d
        return 0 if tensor.is_contiguous(memory_format=layout) else tensor.nbytes

    def columns_bytes(self) -> int:
        """Bytes of the input patches of all output positions, (C_in · kernel sizes, positions).

        There are none if the input serves.
        """
        if self.is_pointwise() and max(self.stride) == 1 and max(self.padding) == 0:
            return 0
        return self.y.shape[0] * prod(self.weight.shape[1:]) * prod(self.y.shape[2:]) * self.y.element_size()

    def reads_as_it_is(self, source: Tensor) -> bool:
        """Whether what a forward reads has less than a block of channels, so that nothing is copied."""
        return self.groups == 1 and source.shape[1] < _block() and not self.is_pointwise()

    def weight_by_rows_bytes(self) -> int:
        """Bytes of the weight with the channels of what it makes filled up, which are its second dimension."""
        return self.weight.nbytes // self.weight.shape[1] * round_up(self.weight.shape[1], _block())

    def blocked_weight_bytes(self, block: int, *, source: Tensor | None = None) -> int:
        """Bytes of the weight with its channels filled up, the groups' own where each has one channel.

        Channels of a source that is read as it is are not filled up.
        """
        outer, inner, *kernel = self.weight.shape
        if self.is_depthwise():
            numel = round_up(self.groups, block)
        else:
            read = inner if source is not None and self.reads_as_it_is(source) else round_up(inner, block)
            numel = self.groups * round_up(outer // self.groups, block) * read
        return numel * prod(kernel) * self.weight.element_size()


def _convolution(x: Tensor, weight: Tensor, y: Tensor, how: Sequence[Any]) -> _Convolution:
    """A convolution from the arguments of `aten.convolution` after the bias."""
    stride, padding, dilation, is_transposed, _output_padding, groups = how
    return _Convolution(
        x=x,
        weight=weight,
        y=y,
        stride=stride,
        padding=padding,
        dilation=dilation,
        is_transposed=is_transposed,
        groups=groups,
    )


def _forward_bytes(c: _Convolution) -> int:
    """The most bytes that a forward holds at once, its output included."""
    copied = c.copied_bytes(c.x)
    if not c.is_of_onednn():
        return c.y.nbytes + copied + c.columns_bytes()
    if c.is_channels_last():
        source = None if c.is_transposed else c.x
        weight = c.copied_bytes(c.weight) + c.blocked_weight_bytes(_block(), source=source)
        return c.y.nbytes + copied + weight
    return copied + (_widened_bytes(c, c.x, c.y) if c.is_transposed else _narrowed_bytes(c, c.x, c.y))


def _narrowed_bytes(c: _Convolution, source: Tensor, result: Tensor) -> int:
    """Bytes that a forward takes: copies of source, weight and result, or the result in both layouts."""
    block = c.block()
    if block is None:
        return result.nbytes + max(c.column_bytes(), result.nbytes)
    of_source = 0 if c.reads_as_it_is(source) else _blocked_bytes(source, block)
    blocked = _blocked_bytes(result, block)
    weight = c.blocked_weight_bytes(block, source=source)
    return max(of_source + weight + blocked, blocked + result.nbytes)


def _widened_bytes(c: _Convolution, source: Tensor, result: Tensor) -> int:
    """Bytes of the direction that widens by a stride: an input's gradient, or a transposed forward."""
    block = c.block()
    if c.is_by_rows(widens=True):
        return max(source.nbytes + c.weight_by_rows_bytes() + result.nbytes, 3 * result.nbytes)
    if block is None or c.widens_by_matrices():
        return result.nbytes + max(c.column_bytes(), result.nbytes)
    blocked = _blocked_bytes(result, block)
    return max(_blocked_bytes(source, block) + c.blocked_weight_bytes(block) + blocked, blocked + result.nbytes)


def _backward_bytes(c: _Convolution, wants_x: bool, wants_weight: bool, wants_bias: bool) -> int:
    """The most bytes that a backward holds at once, all gradients included.

    The input's gradient comes first, the weight's and the bias' beside it.
    """
    grad_x = c.x.nbytes if wants_x else 0
    grad_bias = c.y.shape[1] * c.y.element_size() if wants_bias else 0
    grad_weight = grad_bias + (c.weight.nbytes if wants_weight else 0)
    copied = c.copied_bytes(c.y) + c.copied_bytes(c.x)
    if not c.is_of_onednn():
        return grad_x + grad_weight + copied + c.columns_bytes()
    copied += c.copied_bytes(c.weight)
    of_x = _input_gradient_bytes(c) if wants_x else 0
    of_weight = _weight_gradient_bytes(c) if wants_weight else 0
    return copied + max(of_x, grad_x + grad_bias + of_weight)


def _input_gradient_bytes(c: _Convolution) -> int:
    """Bytes of copies of the output's gradient, the weight and the result, or of the result in all layouts."""
    if c.is_channels_last():
        source = c.y if c.is_transposed else None
        return c.x.nbytes + c.blocked_weight_bytes(_block(), source=source)
    if not c.is_narrow() and not c.is_depthwise() and not c.is_by_rows(not c.is_transposed):
        return c.x.nbytes + max(c.column_bytes(), c.x.nbytes)
    return _narrowed_bytes(c, c.y, c.x) if c.is_transposed else _widened_bytes(c, c.y, c.x)


def _weight_gradient_bytes(c: _Convolution) -> int:
    """Bytes of copies of both activations and of the result at once, or of the result in all layouts.

    A convolution by matrices takes columns and sums in the place of copies.
    """
    weight = c.weight.nbytes
    source, other = (c.y, c.x) if c.is_transposed else (c.x, c.y)
    if c.is_channels_last():
        blocked_weight = c.blocked_weight_bytes(_block(), source=source)
        if c.is_depthwise() and not _has_kernel_of_its_own(c):
            # each channel's weight lies in a block of channels by channels
            blocked_weight = c.groups * _block() ** 2 * prod(c.weight.shape[2:]) * c.weight.element_size()
        return blocked_weight + 2 * weight  # in the layout of oneDNN's result, then in channels_last
    block = _weight_gradient_block(c, source)
    if block is None:
        inside = torch.get_num_threads() * (_REDUCTIONS * weight + c.column_bytes())
        return weight + max(inside, weight)
    as_it_is = c.reads_as_it_is(source) and source.shape[1] <= _MOST_AS_THEY_ARE
    blocked_weight = c.blocked_weight_bytes(block, source=source if as_it_is else None)
    of_source = 0 if as_it_is else _blocked_bytes(source, block)
    inside = of_source + _blocked_bytes(other, block) + _sums_bytes(c, source, other)
    return blocked_weight + max(inside, weight)


def _sums_bytes(c: _Convolution, source: Tensor, other: Tensor) -> int:
    """Bytes of the sums over samples that threads of a weight gradient hold beside the result.

    Each thread beyond the first that takes other samples or rows has its own, of the weight and the bias with
    channels filled up to blocks. Source: oneDNN src/cpu/x64/jit_avx512_common_conv_kernel.cpp,
    `jit_avx512_common_conv_bwd_weights_kernel_f32`, `init_scratchpad`.
    """
    if _block() != _AVX512_BLOCK or c.is_pointwise() or c.is_depthwise():
        return 0  # other kernels, which divide otherwise
    threads = _threads_of_samples(c, source, other, torch.get_num_threads())
    if threads == 1:
        return 0
    outer = round_up(other.shape[1], _AVX512_BLOCK)
    inner = source.shape[1] // c.groups
    if not c.reads_as_it_is(source):
        inner = round_up(inner, _AVX512_BLOCK)
    numel = outer * inner * prod(c.weight.shape[2:]) + outer
    return (threads - 1) * numel * c.weight.element_size() + _BARRIER_BYTES


def _threads_of_samples(c: _Convolution, source: Tensor, other: Tensor, threads: int) -> int:
    """Among how many of the threads oneDNN divides samples and rows; it divides channels among the others.

    It takes the division that reads and writes least, then one that computes less and moves at most 10 % more,
    or that computes a quarter less; where it takes more than half of the threads, it takes as many as there are
    samples and rows for. Source: as of `_sums_bytes`, `balance`.
    """
    if threads < c.groups:
        return 1
    threads //= c.groups
    block = source.shape[1] if c.reads_as_it_is(source) else _AVX512_BLOCK
    sources = ceil(source.shape[1] / c.groups / block)
    others = ceil(other.shape[1] / c.groups / _AVX512_BLOCK)
    samples, *_ = source.shape
    depth, height = 1, 1
    source_space, other_space = prod(source.shape[2:]), prod(other.shape[2:])
    source_rows = other_rows = samples
    if source.dim() == 5:
        depth = other.shape[2]
    elif source.dim() == 4 and c.dilation[0] == 1 and other.shape[2] > _FEWEST_ROWS:
        height = other.shape[2] // _FEWEST_ROWS
        source_rows, source_space = samples * source.shape[2], source.shape[3]
        other_rows, other_space = samples * other.shape[2], other.shape[3]
    weight = prod(c.weight.shape[2:]) * block * _AVX512_BLOCK
    strides = prod(_of_each_dimension(c.stride, source.dim() - 2))

    def moved(rows: int, outer: int, inner: int) -> int:
        read = ceil(source_rows / rows) * ceil(sources / inner) * block * source_space // strides
        written = ceil(other_rows / rows) * ceil(others / outer) * _AVX512_BLOCK * other_space
        return read + written + _SUM_COST * ceil(others / outer) * ceil(sources / inner) * weight

    def computed(rows: int, outer: int, inner: int) -> int:
        return ceil(other_rows / rows) * ceil(others / outer) * ceil(sources / inner)

    most = min(threads, samples * depth * height)
    divisions = [
        (rows, outer, min(threads // rows // outer, sources))
        for rows in range(1, most + 1)
        for outer in range(1, min(threads // rows, others) + 1)
    ]
    least = min(moved(*division) for division in divisions)
    best = [division for division in divisions if moved(*division) == least][-1]
    for division in divisions:
        is_cheap = computed(*division) <= computed(*best) and moved(*division) < 1.1 * least
        if is_cheap or 4 * computed(*division) <= 3 * computed(*best):
            best = division
    rows, *_ = best
    return most if threads / 2 < rows < threads else rows


def _weight_gradient_block(c: _Convolution, source: Tensor) -> int | None:
    """Channels per block for a gradient of the weights; None where oneDNN multiplies matrices."""
    block = c.block()
    if block is None:
        return None
    if c.is_depthwise():
        return block if _has_kernel_of_its_own(c) else None
    if c.reads_as_it_is(source) and source.shape[1] > _MOST_AS_THEY_ARE:
        block = _AVX2_BLOCK
    if block < _AVX2_BLOCK or not c.is_narrow() or c.widens_by_matrices():
        return None
    return None if block == _AVX2_BLOCK and max(c.dilation) > 1 else block  # which the kernel for AVX2 lacks


def _has_kernel_of_its_own(c: _Convolution) -> bool:
    """Whether oneDNN has a kernel for the weight gradient of a depthwise convolution.

    Source: oneDNN src/cpu/x64/jit_uni_dw_conv_kernel_utils.cpp, the weights' kernel's init_conf.
    """
    kernel = c.weight.shape[2:]
    for size, step, pad, before, after in zip(
        kernel,
        *(_of_each_dimension(numbers, len(kernel)) for numbers in (c.stride, c.padding)),
        c.x.shape[2:],
        c.y.shape[2:],
        strict=True,
    ):
        end_pad = (after - 1) * step + size - before - pad
        if max(pad, end_pad) > size // 2 or before < size + -pad % step:
            return False
    return max(c.dilation) == 1 and kernel[-1] <= _DEPTHWISE_KERNEL


def _of_each_dimension(numbers: Sequence[int], dimensions: int) -> Sequence[int]:
    return numbers if len(numbers) > 1 else [numbers[0]] * dimensions


def _blocked_bytes(tensor: Tensor, block: int) -> int:
    """Bytes of an (N, C, ...) tensor with C filled up to whole blocks."""
    samples, channels, *space = tensor.shape
    return samples * round_up(channels, block) * prod(space) * tensor.element_size()


def _block() -> int:
    return _BLOCKS[torch.backends.cpu.get_cpu_capability()]
