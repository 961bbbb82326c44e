"""cuDNN's convolutions may copy their operands into a workspace; how much it takes is its own choice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brimful.capture.corrections.rule import Rule

# N samples, C channels, spatial sizes after them; a weight is (C_out, C_in / groups, kernel sizes)

aten = torch.ops.aten


class CudnnConvolution(Rule):
    """Widen the interval by the copies that a convolution of NCHW tensors may make.

    Tensor-core kernels read and write NHWC. For tensors in NCHW, cuDNN either takes a kernel that works on them
    as they are, or copies operands and result through the plan's workspace, which torch allocates and frees
    around each of forward, input gradient and weight gradient. Its heuristics decide by sizes, GPU and version,
    and torch sets no limit. So nothing is added to the likely size, and one copy of both activations to the
    most: with copies everywhere, public RTX 3060 runs of ResNet, RegNet, MobileNet and VGG would have reserved
    9 to 50 % more than they did; with none, two runs of MnasNet at 300 samples would have reserved 17 % less.
    Depthwise and grouped convolutions have kernels of their own.
    """

    name = "cudnn_convolution"
    source = (
        "torch aten/src/ATen/native/cudnn/Conv_v8.cpp, run_conv_plan (06ca69ca: the plan's workspace, no cap); "
        "benchmarks/gpu_truth.py"
    )

    def watches_op(self, func: Any) -> bool:
        """Those it knows something of."""
        return func in (aten.convolution.default, aten.convolution_backward.default)

    def after_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> None:
        """Add a workspace of no likely size for each kernel the op runs."""
        if func is aten.convolution.default:
            x, y, groups, kernels = args[0], outputs[0], args[8], 1
        elif func is aten.convolution_backward.default:
            y, x, groups, kernels = args[0], args[1], args[9], sum(map(bool, args[10][:2]))
        else:
            return
        if groups != 1 or not x.is_contiguous():
            return
        for _ in range(kernels):
            self.add(0, f"inside {func}", most_bytes=x.nbytes + y.nbytes)
