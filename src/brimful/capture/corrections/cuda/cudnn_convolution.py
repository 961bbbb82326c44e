"""cuDNN's convolutions take a workspace from torch: for copies in another layout, or for transforms."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from brimful.capture.corrections.cuda.convolution_workspaces import (
    ConvolutionShape,
    Transforms,
    copied_bytes,
    padded_image_bytes,
    partial_sums,
    winograd_bytes,
)
from brimful.capture.corrections.rule import Rule
from brimful.settings import Precision
from brimful.trace import Kernel

aten = torch.ops.aten

TENSOR_CORE_GAIN = 1.5
"""How many times as fast as float32 a type must be for cuDNN to copy operands for tensor cores; a choice
between what is known: 1.0 for TF32 on a GeForce (no copies), 7.4 on an H100 (copies)."""

HALF_STEP = 8
"""Channels of which tensor-core kernels of half types need a multiple: others are filled up in a copy (NVIDIA,
Convolutional Layers User's Guide, "Channels In And Out")."""

WINOGRAD_CHANNELS = 64
"""Fewest channels, in and out, of weight gradients seen with Winograd's algorithm; none has it with 3."""

LARGE_WEIGHT_SHARE = 0.3
"""Size of a weight, relative to input and output of one sample, from which its gradient is computed in NHWC.
In NCHW each sample's would be a result of its own, added up later. Seen with 0.33 to 8.4, none with
0.01 to 0.29."""

FORWARD_GAIN, GRADIENT_GAIN, UPPER_END_GAIN = 2.0, 1.0, 1.5
"""How many times fewer multiplications Fourier transforms must need. Forward: seen with 3.1 and 3.2, none with
0.8 to 1.1. Input gradient: seen with 1.06 to 3.4, none with 0.2 and 0.8. In the upper end: a choice."""

_LARGEST_TILE_BYTES = 128 * 128 * 4
"""Bytes of float32 sums that a multiprocessor may keep of an unfinished tile."""


class _Workspace(NamedTuple):
    likely_bytes: int
    most_bytes: int
    kernel: Kernel | None = None
    """What decides the likely size, where that is not affine in the micro-batch."""

    @classmethod
    def of(cls, likely: Kernel, most_bytes: int) -> _Workspace:
        """The workspace of a kernel."""
        likely_bytes = likely.size_bytes()
        return cls(likely_bytes, max(most_bytes, likely_bytes), likely)


class CudnnConvolution(Rule):
    """Add the workspace of each kernel that a convolution runs, one after the other.

    **On tensor cores** (half types, and TF32 where it is faster than float32) kernels read and write NHWC. Of
    tensors in NCHW cuDNN copies input, output and weight, in half types with channels filled up to 8, in
    forward and for each gradient. 1 × 1 convolutions are matrix products in NCHW too, except gradients of
    large weights. Weight gradients take partial sums besides.

    **In float32 alone** a weight gradient of 3 × 3 takes Winograd's algorithm. Forward and input gradient take
    Fourier transforms where these save multiplications and have enough tiles to share a transformed weight;
    input gradients with fewer or more channels in than out do in 2 of 8 cases, which is cuDNN's choice and in
    the upper end only. Of one step on an H100 these are all 48 workspaces above 0.4 MB of a ResNet-50 and 27 of
    29 of a U-Net, to the byte. Before compute capability 8.0 all are in the upper end: with them one of the two
    published rows of VGG16 on a P100 (torch 1.10) would be as much too high as the other is too low without.

    **TF32 where it is as slow as FP32** (GeForce) has workspaces in the upper end only: with copies, public
    runs of ResNet, RegNet, MobileNet and VGG on an RTX 3060 would have reserved 9 to 50 % more than they did.
    """

    name = "cudnn_convolution"
    source = (
        "torch aten/src/ATen/native/cudnn/Conv_v8.cpp, run_conv_plan (06ca69ca: the plan's workspace, no cap); "
        "NVIDIA, Convolutional Layers User's Guide, 3.1 (tensor cores need NHWC; NCHW is transposed); "
        "benchmarks/results/gpu_record.json (H100, cuDNN 9.19); benchmarks/gpu_truth.py (RTX 3060)"
    )

    def watches_op(self, func: Any) -> bool:
        """Whether an op is a convolution or its backward."""
        return func in (aten.convolution.default, aten.convolution_backward.default)

    def after_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> None:
        """Add a workspace for each kernel the op runs."""
        if func is aten.convolution.default:
            (x, weight), y, how, results = args[:2], outputs[0], args[3:9], ["output"]
        else:
            y, x, weight, how, mask = *args[:3], args[4:10], args[10]
            results = [name for name, has in zip(("input", "weight"), mask, strict=False) if has]
        stride, _padding, dilation, transposed, _output_padding, groups = how
        if transposed:  # the input's gradient of a convolution the other way
            x, y = y, x
            results = [{"output": "input", "input": "output"}.get(name, name) for name in results]
        if not x.numel():
            return
        shape = ConvolutionShape.of(x, weight, y, stride=stride, dilation=dilation, groups=groups)
        is_nchw = not any(_is_channels_last(tensor) for tensor in (x, weight))
        for result in results:
            workspace = self._workspace(shape, result, x.dtype, is_nchw=is_nchw)
            self.add(
                workspace.likely_bytes,
                f"inside {func}, gradient of the {result}" if len(results) > 1 else f"inside {func}",
                most_bytes=workspace.most_bytes,
                kernel=workspace.kernel,
                is_alone=bool(workspace.likely_bytes or workspace.kernel),
            )

    def _workspace(
        self, shape: ConvolutionShape, result: str, dtype: torch.dtype, *, is_nchw: bool
    ) -> _Workspace:
        """The workspace of the kernel of a result: "output", "input" or "weight"."""
        if shape.is_depthwise:  # kernels of their own
            return _Workspace(0, 0)
        if self._uses_tensor_cores(dtype):
            return self._on_tensor_cores(shape, result, is_nchw=is_nchw)
        is_known = dtype is torch.float32 and self._is_known_in_float32()
        return self._without_tensor_cores(shape, result, is_nchw=is_nchw, is_known=is_known)

    def _on_tensor_cores(self, shape: ConvolutionShape, result: str, *, is_nchw: bool) -> _Workspace:
        """The workspace for copies to NHWC and back, and for partial sums of a weight's gradient."""
        step = HALF_STEP if shape.item_bytes == 2 else 1
        if is_nchw:
            most = likely = copied_bytes(shape, padded_to=step)
        else:
            most = likely = padded_image_bytes(shape, step) if shape.in_channels % step else 0
        if (
            is_nchw
            and shape.is_pointwise
            and not (result == "weight" and shape.weight_share >= LARGE_WEIGHT_SHARE)
        ):
            likely = 0
        multiprocessors = self.target.answer(lambda device: device.sm_count or 0)  # not only of a kernel
        at_most = most + multiprocessors * _LARGEST_TILE_BYTES
        if result == "weight":
            return _Workspace.of(partial_sums(shape, multiprocessors, likely), at_most)
        return _Workspace(likely, at_most)

    def _without_tensor_cores(
        self, shape: ConvolutionShape, result: str, *, is_nchw: bool, is_known: bool
    ) -> _Workspace:
        """The workspace for transforms, and for tensors in NHWC copies beside them.

        The likely size counts only what is known.
        """
        copies = copied_bytes(shape)
        beside = 0 if is_nchw else copies
        if result == "weight":
            likely = copies if shape.weight_share >= LARGE_WEIGHT_SHARE else 0
            most = copies
            if shape.is_plain_3x3:
                most = max(copies, winograd_bytes(shape) + beside)
                if shape.fewest_channels >= WINOGRAD_CHANNELS:
                    likely = winograd_bytes(shape) + beside
            return _Workspace(likely if is_known else 0, most)
        transforms = Transforms.of(shape, is_forward=result == "output") if shape.is_plain_3x3 else None
        if transforms is None:
            return _Workspace(0, copies)
        most = copies
        if transforms.gain >= UPPER_END_GAIN:
            most = max(copies, transforms.size_bytes(beside))
        if is_known and _takes(transforms):
            return _Workspace.of(transforms.kernel(beside), most)
        return _Workspace(0, most)

    def _uses_tensor_cores(self, dtype: torch.dtype) -> bool:
        """Whether tensor cores are so much faster that cuDNN copies operands for them."""
        plain = self.target.fp32_flops_per_second
        if dtype is torch.float32:
            precision = Precision.TF32 if self._allows_tf32() else Precision.FP32
            rate = self.target.flops_per_second("float32", precision)
        else:
            rate = self.target.flops_per_second(str(dtype).removeprefix("torch."))
        return rate is not None and plain is not None and rate >= TENSOR_CORE_GAIN * plain

    def _is_known_in_float32(self) -> bool:
        """Whether what cuDNN takes is known: on GPUs that have TF32, without its use."""
        return self.target.supports(Precision.TF32) and not self._allows_tf32()

    def _allows_tf32(self) -> bool:
        """Whether convolutions in float32 may round to TF32; brimful's own steps set it by the precision."""
        return self.settings.precision is Precision.TF32 or (
            self.recorder.runs_own_loop and torch.backends.cudnn.allow_tf32
        )


def _takes(transforms: Transforms) -> bool:
    """Whether cuDNN likely runs a forward or an input's gradient by Fourier transforms."""
    if transforms.is_forward:
        return transforms.gain >= FORWARD_GAIN
    shape = transforms.shape
    return transforms.gain >= GRADIENT_GAIN and shape.in_channels == shape.out_channels


def _is_channels_last(tensor: Tensor) -> bool:
    """Whether torch runs a convolution of this tensor in channels_last.

    Source: torch aten/src/ATen/native/ConvUtils.h, cudnn_conv_suggest_memory_format.
    """
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    return layout is not None and tensor.is_contiguous(memory_format=layout) and not tensor.is_contiguous()
