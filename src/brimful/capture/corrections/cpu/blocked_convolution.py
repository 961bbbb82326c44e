"""The CPU's convolutions copy their operands into oneDNN's layouts, and their results back.

Not counted, as the profiler shows with torch 2.13 on AVX-512: scratch memory of the kernels for strides,
up to a fifth of the copies, and of those for 1 × 1 with a stride; and what the threads of a weight gradient add
up in, some KiB. oneDNN chooses other layouts on other machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from brimful.capture.corrections.rule import Rule
from brimful.quantities import round_up

# N samples, C channels, spatial sizes after them; a weight is (C_out, C_in / groups, kernel sizes), that of a
# transposed convolution (C_in, C_out / groups, kernel sizes). x is the input of forward, y its output.

aten = torch.ops.aten

_BLOCKS = {"AVX512": 16, "AVX2": 8}
"""Channels per block, by torch's name of the CPU's capability: the number of float32 in a register."""
_SMALL_NUMEL = 20480
_SMALL_KERNEL = 3
_SMALL_BATCH = 16
"""What torch's own convolution is for. Source: torch aten/src/ATen/native/Convolution.cpp, `use_mkldnn`."""
_DEPTHWISE_KERNEL = 3
"""oneDNN's kernel for the weights of one channel each takes no wider one, see `_has_kernel_of_its_own`."""
_WIDEST_KERNEL = 14
"""oneDNN's kernels for gradients take no wider one: ONEDNN_VERBOSE shows matrices for 15 and 16, not for 14."""
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
        """On CPUs whose vectors oneDNN blocks for."""
        return super().applies() and torch.backends.cpu.get_cpu_capability() in _BLOCKS

    def after_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> None:
        """Add the op's hidden memory to its outputs."""
        if func is aten.convolution.default:
            x, weight, _bias, *how = args
            (y,) = outputs
            inside = _forward_bytes(_convolution(x, weight, y, how))
        elif func is aten.convolution_backward.default:
            grad_y, x, weight, _bias_sizes, *how, wants = args
            inside = _backward_bytes(_convolution(x, weight, grad_y, how), *wants[:2])
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
        """Each output position's patch of one sample and group."""
        numel = prod(self.weight.shape[1:]) * prod(self.y.shape[2:])
        return numel * self.y.element_size()

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
        return widens and max(self.stride) > 1 and self.groups == 1

    def is_channels_last(self) -> bool:
        """Whether torch suggests it for input or weight, by strides, so that size 1 counts as it does in torch.

        Source: torch aten/src/ATen/native/ConvUtils.h, `mkldnn_conv_use_channels_last`.
        """
        layouts = (torch.channels_last, torch.channels_last_3d)
        return any(suggest_memory_format(tensor) in layouts for tensor in (self.x, self.weight))

    def copied_bytes(self, tensor: Tensor) -> int:
        """The copy that torch makes of what does not lie in the layout of the convolution."""
        layout = torch.contiguous_format
        if self.is_channels_last():
            layout = torch.channels_last if self.x.dim() == 4 else torch.channels_last_3d
        return 0 if tensor.is_contiguous(memory_format=layout) else tensor.nbytes

    def columns_bytes(self) -> int:
        """Input patches of all output positions, (C_in · kernel sizes, positions); 0 if the input serves."""
        if set(self.weight.shape[2:]) == {1} and max(self.stride) == 1 and max(self.padding) == 0:
            return 0
        return self.y.shape[0] * self.column_bytes()

    def source_bytes(self, tensor: Tensor) -> int:
        """None for a source of less than a block: oneDNN reads it as it is."""
        if self.groups == 1 and tensor.shape[1] < _block():
            return 0
        return _blocked_bytes(tensor)

    def weight_by_rows_bytes(self) -> int:
        """Bytes of the weight with the channels of what it makes filled up, which are its second dimension."""
        return self.weight.nbytes // self.weight.shape[1] * _up(self.weight.shape[1])

    def blocked_weight_bytes(self) -> int:
        """Bytes of the weight with its channels filled up, the groups' own where each has one channel."""
        outer, inner, *kernel = self.weight.shape
        if self.is_depthwise():
            numel = _up(self.groups)
        else:
            read = inner if self.groups == 1 and inner < _block() else _up(inner)
            numel = self.groups * _up(outer // self.groups) * read
        return numel * prod(kernel) * self.weight.element_size()


def _convolution(x: Tensor, weight: Tensor, y: Tensor, how: Sequence[Any]) -> _Convolution:
    """From the arguments of `aten.convolution` after the bias."""
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
    """The most that is live at once, the output included."""
    y = c.y.nbytes
    copied = c.copied_bytes(c.x)
    if not c.is_of_onednn():
        return y + copied + c.columns_bytes()
    if c.is_channels_last():
        return y + copied + c.copied_bytes(c.weight) + c.blocked_weight_bytes()
    if c.is_by_rows(c.is_transposed):
        return copied + max(c.x.nbytes + c.weight_by_rows_bytes() + y, 3 * y)
    blocked_y = _blocked_bytes(c.y)
    return copied + max(c.source_bytes(c.x) + c.blocked_weight_bytes() + blocked_y, blocked_y + y)


def _backward_bytes(c: _Convolution, wants_x: bool, wants_weight: bool) -> int:
    """The same for both gradients: the input's comes first, the weight's beside it."""
    grad_x = c.x.nbytes if wants_x else 0
    grad_weight = c.weight.nbytes if wants_weight else 0
    copied = c.copied_bytes(c.y) + c.copied_bytes(c.x)
    if not c.is_of_onednn():
        return grad_x + grad_weight + copied + c.columns_bytes()
    copied += c.copied_bytes(c.weight)
    of_x = _input_gradient_bytes(c) if wants_x else 0
    of_weight = _weight_gradient_bytes(c) if wants_weight else 0
    return copied + max(of_x, grad_x + of_weight)


def _input_gradient_bytes(c: _Convolution) -> int:
    """Copies of the output's gradient, the weight and the result at once, or the result in all layouts."""
    if c.is_channels_last():
        return c.x.nbytes + c.blocked_weight_bytes()
    if c.is_by_rows(not c.is_transposed):
        return max(c.y.nbytes + c.weight_by_rows_bytes() + c.x.nbytes, 3 * c.x.nbytes)
    if not c.is_narrow() and not c.is_depthwise():
        return c.x.nbytes + max(c.column_bytes(), c.x.nbytes)
    blocked_x = _blocked_bytes(c.x)
    blocked_y = c.source_bytes(c.y) if c.is_transposed else _blocked_bytes(c.y)
    return max(blocked_y + c.blocked_weight_bytes() + blocked_x, blocked_x + c.x.nbytes)


def _weight_gradient_bytes(c: _Convolution) -> int:
    """Copies of both activations and of the result at once, or the result in all layouts.

    A convolution by matrices takes columns and sums in the place of copies.
    """
    weight, blocked_weight = c.weight.nbytes, c.blocked_weight_bytes()
    has_kernel = _has_kernel_of_its_own(c) if c.is_depthwise() else c.is_narrow()
    if c.is_channels_last():
        if c.is_depthwise() and not has_kernel:
            # each channel's weight lies in a block of channels by channels
            blocked_weight = c.groups * _block() ** 2 * prod(c.weight.shape[2:]) * c.weight.element_size()
        return blocked_weight + 2 * weight  # in the layout of oneDNN's result, then in channels_last
    if not has_kernel:
        inside = torch.get_num_threads() * (_REDUCTIONS * weight + c.column_bytes())
        return weight + max(inside, weight)
    source, other = (c.y, c.x) if c.is_transposed else (c.x, c.y)
    return blocked_weight + max(c.source_bytes(source) + _blocked_bytes(other), weight)


def _has_kernel_of_its_own(c: _Convolution) -> bool:
    """Whether oneDNN has a kernel for the weight gradient of a depthwise convolution.

    Source: oneDNN src/cpu/x64/jit_uni_dw_conv_kernel_utils.cpp, the weights' kernel's init_conf.
    """
    kernel, channels = c.weight.shape[2:], c.x.shape[1]
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
    return max(c.dilation) == 1 and kernel[-1] <= _DEPTHWISE_KERNEL and channels % _block() == 0


def _of_each_dimension(numbers: Sequence[int], dimensions: int) -> Sequence[int]:
    return numbers if len(numbers) > 1 else [numbers[0]] * dimensions


def _blocked_bytes(tensor: Tensor) -> int:
    """Bytes of an (N, C, ...) tensor with C filled up to whole blocks."""
    samples, channels, *space = tensor.shape
    return samples * _up(channels) * prod(space) * tensor.element_size()


def _block() -> int:
    return _BLOCKS[torch.backends.cpu.get_cpu_capability()]


def _up(channels: int) -> int:
    return round_up(channels, _block())
