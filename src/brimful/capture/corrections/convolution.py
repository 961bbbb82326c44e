"""The CPU's convolutions copy their operands into oneDNN's blocked layouts, and their results back."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from brimful.capture.corrections.base import Rule

# N samples, C channels, spatial sizes after them; a weight is (C_out, C_in / groups, kernel sizes)

aten = torch.ops.aten

_BLOCKS = {"AVX512": 16, "AVX2": 8}
"""Channels of one block, by what torch calls the CPU's capability: as many float32 as a register holds."""
_PLAIN_CHANNELS = 3
"""Up to so many channels the source is read as it is: so the profiler shows for 1 and 3 (torch 2.13)."""
_SMALL_NUMEL = 20480
"""One sample of no more numbers than this, with a kernel of 3 at most and one group, goes to torch's own
convolution: `use_mkldnn` in torch aten/src/ATen/native/Convolution.cpp, not read in this version."""
_SMALL_KERNEL = 3


class BlockedConvolution(Rule):
    """Count what convolutions hold inside on a CPU.

    Against the profiler, with torch 2.13 on AVX-512: exact but for scratch memory of strided kernels (up to a
    tenth of the copies) and of the weight gradient's threads (some KiB), for channels that fill no block (up to
    15 % too high, with one thread), and for what oneDNN does on other machines.
    """

    name = "blocked_convolution"
    source = "measured: torch 2.13's profiler on AVX-512; oneDNN's manual on blocked memory formats"
    watches_ops = True

    def applies(self) -> bool:
        """On CPUs whose vectors oneDNN blocks for."""
        return self.target.kind == "cpu" and torch.backends.cpu.get_cpu_capability() in _BLOCKS

    def after_op(self, recorder: Any, func: Any, args: tuple[Any, ...], outputs: list[Tensor]) -> None:
        """Add the op's hidden memory to its outputs."""
        if func is aten.convolution.default:
            inside = self._forward_bytes(args[0], args[1], outputs[0], groups=args[8])
        elif func is aten.convolution_backward.default:
            inside = self._backward_bytes(*args[:3], stride=args[4], groups=args[9], wants=args[10])
        else:
            return
        hidden_bytes = inside - sum(output.nbytes for output in outputs)
        if hidden_bytes > 0:
            recorder.add_temporary(hidden_bytes, f"inside {func}")
            self.count(hidden_bytes)

    def _forward_bytes(self, x: Tensor, weight: Tensor, y: Tensor, *, groups: int) -> int:
        """Copies of operands and result at once, or the result in both layouts."""
        if _is_small(x, weight, groups):
            return y.nbytes + _columns_bytes(weight, y)
        if _is_channels_last(x):
            return y.nbytes + 2 * weight.nbytes
        blocked_y = self._blocked_bytes(y)
        return max(self._source_bytes(x) + weight.nbytes + blocked_y, y.nbytes + blocked_y)

    def _backward_bytes(
        self,
        grad_y: Tensor,
        x: Tensor,
        weight: Tensor,
        *,
        stride: list[int],
        groups: int,
        wants: list[bool],
    ) -> int:
        """The larger of the input's gradient, which comes first, and the weight's, which comes beside it."""
        grad_x_bytes = x.nbytes if wants[0] else 0
        if _is_small(x, weight, groups):
            return grad_x_bytes + weight.nbytes + _columns_bytes(weight, grad_y)
        if _is_channels_last(x):
            return grad_x_bytes + 4 * weight.nbytes
        blocked_y, blocked_x = self._blocked_bytes(grad_y), self._blocked_bytes(x)
        of_input = 0
        if wants[0]:
            results = 2 if max(stride) > 1 else 1  # a strided kernel's comes in one more layout
            of_input = blocked_x + max(blocked_y + weight.nbytes, results * x.nbytes)
        of_weight = grad_x_bytes + blocked_y + self._source_bytes(x) + 2 * weight.nbytes if wants[1] else 0
        return max(of_input, of_weight)

    def _source_bytes(self, x: Tensor) -> int:
        return 0 if x.shape[1] <= _PLAIN_CHANNELS else self._blocked_bytes(x)

    def _blocked_bytes(self, tensor: Tensor) -> int:
        """Bytes of an (N, C, ...) tensor with C filled up to whole blocks."""
        block = _BLOCKS[torch.backends.cpu.get_cpu_capability()]
        samples, channels, *space = tensor.shape
        return samples * -(-channels // block) * block * prod(space) * tensor.element_size()


def _is_small(x: Tensor, weight: Tensor, groups: int) -> bool:
    return (
        x.shape[0] == 1 and groups == 1 and x.numel() <= _SMALL_NUMEL and min(weight.shape[2:]) <= _SMALL_KERNEL
    )


def _columns_bytes(weight: Tensor, y: Tensor) -> int:
    """Each output position's patch of the input, (C_in · kernel sizes, output positions)."""
    return prod(weight.shape[1:]) * y.shape[0] * prod(y.shape[2:]) * y.element_size()


def _is_channels_last(x: Tensor) -> bool:
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.dim() in layouts and not x.is_contiguous() and x.is_contiguous(memory_format=layouts[x.dim()])
