"""Which kernels and copies oneDNN needs for a convolution, and what they cost."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import brimful as bf
from brimful.capture import capture_step
from brimful.cost import op_seconds
from brimful.cost.cpu_convolutions import images_bytes, kernels, layout_copy_bytes
from brimful.devices import Device, Dispatch, RateCurve, find_device
from brimful.trace import Op
from brimful.trace.extents import Convolution, extents_of

SAMPLES, SIDE = 4, 8
IMAGE = SAMPLES * SIDE * SIDE * 4
"""Bytes of a channel of all samples."""


def shapes(layer: nn.Module, channels: int, *, layout: torch.memory_format = torch.contiguous_format) -> Any:
    """Forward and backward of a layer, as captured on a CPU, with its ops."""
    job = bf.Job(
        model=lambda: nn.Sequential(nn.Conv2d(3, channels, 1), layer).to(memory_format=layout),
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda n: torch.randn(n, 3, SIDE, SIDE).to(memory_format=layout),
        optimizer="sgd",
    )
    trace = capture_step(job, bf.Settings(micro_batch_size=SAMPLES), find_device("cpu"), steps=1)
    ops = [op for op in trace.ops if op.module == "1" and "convolution" in op.name]
    return [(op, extents_of(op.extents)) for op in ops]


def kinds(op: Op, shape: Convolution) -> list[str]:
    return [kind for kind, _ in kernels(shape, op.flops)]


@pytest.mark.parametrize(
    ("layer", "forward", "backward"),
    [
        (nn.Conv2d(32, 48, 3, padding=1), ["convolution"], ["convolution"] * 2),
        (nn.Conv2d(32, 32, 3, padding=1, groups=2), ["convolution"], ["convolution"] * 2),
        (nn.Conv2d(32, 32, 3, padding=1, groups=32), ["depthwise"], ["depthwise"] * 2),
        (nn.Conv2d(32, 32, 7, padding=3, groups=32), ["depthwise"], ["depthwise", "im2col"]),
        (nn.Conv2d(32, 32, 3, padding=2, dilation=2, groups=32), ["im2col"], ["im2col"] * 2),
        (nn.Conv2d(32, 32, 3, padding=1, groups=8), ["im2col"], ["im2col"] * 2),
    ],
)
def test_groups_dilation_and_width_decide_the_kernels(
    layer: nn.Module, forward: list[str], backward: list[str]
) -> None:
    (first, shape), (second, gradients) = shapes(layer, 32)
    assert kinds(first, shape) == forward
    assert kinds(second, gradients) == backward
    flops = 2 * SAMPLES * SIDE * SIDE * layer.weight.numel()  # type: ignore[operator,union-attr]
    assert first.flops == flops
    assert second.flops == 2 * flops


def test_images_are_copied_to_the_layout_and_back() -> None:
    (forward, shape), (backward, gradients) = shapes(nn.Conv2d(32, 48, 3, padding=1), 32)
    both = (32 + 48) * IMAGE
    assert images_bytes(shape, forward.weight_bytes) == both
    assert layout_copy_bytes(shape, forward.weight_bytes) == 2 * both
    assert layout_copy_bytes(gradients, backward.weight_bytes) == 2 * 2 * both


def test_images_of_few_channels_and_channels_last_and_im2col_are_not_copied() -> None:
    (few, shape), _ = shapes(nn.Conv2d(4, 48, 3, padding=1), 4)
    assert layout_copy_bytes(shape, few.weight_bytes) == 2 * 48 * IMAGE
    last = shapes(nn.Conv2d(32, 48, 3, padding=1), 32, layout=torch.channels_last)
    assert [layout_copy_bytes(each, op.weight_bytes) for op, each in last] == [0, 0]
    dilated = shapes(nn.Conv2d(32, 32, 3, padding=2, dilation=2, groups=32), 32)
    assert [layout_copy_bytes(each, op.weight_bytes) for op, each in dilated] == [0, 0]


def flat(kind: str, seconds: float) -> RateCurve:
    """A kind whose ops take this long per unit of its amount."""
    return RateCurve(kind=kind, points=((1.0, seconds),))


def device(*curves: RateCurve) -> Device:
    found = replace(find_device("cpu"), launch_seconds=1e-12, dispatch=Dispatch.of_launch(1e-12))
    return replace(found, curves=curves)


def test_a_convolution_takes_its_kernels_and_its_copies() -> None:
    (forward, shape), _ = shapes(nn.Conv2d(32, 48, 3, padding=1), 32)
    copied = layout_copy_bytes(shape, forward.weight_bytes)
    free = flat("elementwise", 1e-20)
    on_cpu = device(free, flat("copy", 2e-9), flat("convolution:float32", 1e-9))
    assert op_seconds(forward, on_cpu) == pytest.approx(forward.flops * 1e-9 + copied * 2e-9)
    bound_by_memory = device(flat("elementwise", 1.0), flat("copy", 1e-20), flat("convolution:float32", 1e-9))
    assert op_seconds(forward, bound_by_memory) == pytest.approx(images_bytes(shape, forward.weight_bytes))


def test_depthwise_kernels_have_a_rate_of_their_own_or_that_of_other_convolutions() -> None:
    (forward, _), _ = shapes(nn.Conv2d(32, 32, 3, padding=1, groups=32), 32)
    free = (flat("elementwise", 1e-20), flat("copy", 1e-20))
    dense, own = flat("convolution:float32", 1e-9), flat("depthwise:float32", 5e-9)
    assert op_seconds(forward, device(*free, dense, own)) == pytest.approx(forward.flops * 5e-9)
    assert op_seconds(forward, device(*free, dense)) == pytest.approx(forward.flops * 1e-9)
