"""Workspaces of cuDNN's convolutions, beside what an H100 took (benchmarks/results/gpu_record.json)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from brimful.capture import capture_step
from brimful.devices import find_device
from brimful.job import Job
from brimful.settings import MemoryFormat, Precision, Settings
from brimful.trace import EventKind, Phase, Storage, Trace
from brimful.trace.scaling import TraceLine
from helpers.captured_jobs import H100, V100

FP32, TF32, BF16 = Precision.FP32, Precision.TF32, Precision.BF16
GEFORCE = find_device("RTX 3060 12GB")
NHWC = MemoryFormat.CHANNELS_LAST


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """A convolution of square images whose own input has a gradient."""

    ins: int
    outs: int
    size: int
    kernel: int = 3
    options: tuple[tuple[str, int], ...] = (("padding", 1),)

    def job(self) -> Job:
        def model() -> nn.Module:
            layer = nn.Conv2d(self.ins, self.outs, self.kernel, bias=False, **dict(self.options))
            return nn.ModuleDict({"scale": nn.Conv2d(self.ins, self.ins, 1, groups=self.ins), "layer": layer})

        def loss(net: Any, batch: Tensor) -> Tensor:
            result: Tensor = net["layer"](net["scale"](batch)).float().square().mean()
            return result

        return Job(model=model, loss=loss, batch=lambda n: torch.randn(n, self.ins, self.size, self.size))


def capture(
    images: Images, precision: Precision, *, samples: int = 32, device: Any = H100, **more: Any
) -> Trace:
    settings = Settings(micro_batch_size=samples, precision=precision, **more)
    return capture_step(images.job(), settings, device, steps=1)


def workspaces(trace: Trace, phase: Phase) -> list[Storage]:
    """Those of the layer, not of the depthwise one before it."""
    return [
        storage
        for storage in trace.storages
        if storage.label.startswith("inside aten.convolution")
        and storage.op is None
        and trace.ops[made_by(trace, storage)].module == "layer"
        and trace.ops[made_by(trace, storage)].phase is phase
    ]


def made_by(trace: Trace, storage: Storage) -> int:
    index = next(i for i, each in enumerate(trace.storages) if each is storage)
    return next(e.op for e in trace.events if e.storage == index and e.kind is EventKind.ALLOCATE)


def bytes_in(trace: Trace, phase: Phase) -> list[int]:
    return [storage.size_bytes for storage in workspaces(trace, phase)]


SMALL = Images(ins=64, outs=64, size=56)
WIDE = Images(ins=512, outs=512, size=14)
POINTWISE = Images(ins=256, outs=64, size=56, kernel=1, options=())
STEM = Images(ins=3, outs=64, size=224, kernel=7, options=(("stride", 2), ("padding", 3)))
PATCHES = Images(ins=3, outs=768, size=224, kernel=16, options=(("stride", 16),))
GROUPS = Images(ins=256, outs=256, size=56, options=(("padding", 1), ("groups", 32)))


@pytest.mark.parametrize(
    ("images", "precision", "forward", "backward"),
    [
        (SMALL, BF16, [25763987], [25763987, 27681447]),
        (WIDE, TF32, [35127312], [35127312, 43778799]),
        (WIDE, BF16, [17563664], [17563795, 17563664]),  # forward on the GPU: 8 MiB more
        (GROUPS, BF16, [102797328], [102797459, 104567391]),
        (GROUPS, TF32, [205594771], [205594771, 206774879]),
        (STEM, BF16, [77120528], [77323920, 83242128]),
        (PATCHES, BF16, [38469648], None),
    ],
)
def test_kernels_on_tensor_cores_copy_nchw_tensors(
    images: Images, precision: Precision, forward: list[int], backward: list[int] | None
) -> None:
    """Kernels' own few KB are not predicted; partial sums of weight gradients are, within a few MB."""
    trace = capture(images, precision)
    assert bytes_in(trace, Phase.FORWARD) == pytest.approx(forward, rel=1e-4)
    if backward is not None:
        assert bytes_in(trace, Phase.BACKWARD) == pytest.approx(backward, rel=0.06)


@pytest.mark.parametrize(
    ("images", "forward", "backward"),
    [
        (SMALL, 0, [53477376, 116195328]),
        (WIDE, 651165696, [0, 113246208]),
        (POINTWISE, 0, [0, 0]),
    ],
)
def test_in_float32_workspaces_of_transforms_are_equal_to_the_byte(
    images: Images, forward: int, backward: list[int]
) -> None:
    trace = capture(images, FP32)
    assert sum(bytes_in(trace, Phase.FORWARD)) == forward
    assert bytes_in(trace, Phase.BACKWARD) == backward


def test_channels_last_needs_no_copies_but_for_images_in_half_types() -> None:
    assert sum(bytes_in(capture(SMALL, BF16, memory_format=NHWC), Phase.FORWARD)) == 0
    assert bytes_in(capture(STEM, BF16, memory_format=NHWC), Phase.FORWARD) == [25740304]
    assert bytes_in(capture(PATCHES, BF16, memory_format=NHWC), Phase.FORWARD) == [28835856]


def test_in_channels_last_float32_copies_lie_beside_the_transforms() -> None:
    forward = bytes_in(capture(WIDE, FP32, memory_format=NHWC), Phase.FORWARD)
    assert forward == [686293008]


def test_1x1_convolutions_are_matrix_products_unless_the_weight_is_large() -> None:
    assert sum(bytes_in(capture(POINTWISE, BF16), Phase.FORWARD)) == 0
    large = Images(ins=1024, outs=256, size=14, kernel=1, options=())
    of_input, of_weight = bytes_in(capture(large, FP32, samples=64), Phase.BACKWARD)
    assert (of_input, of_weight) == (0, 64225296)


def test_depthwise_convolutions_have_kernels_of_their_own() -> None:
    depthwise = Images(ins=256, outs=256, size=56, options=(("padding", 1), ("groups", 256)))
    trace = capture(depthwise, BF16)
    assert not workspaces(trace, Phase.FORWARD) + workspaces(trace, Phase.BACKWARD)


@pytest.mark.parametrize(("device", "precision"), [(GEFORCE, TF32), (V100, FP32)])
def test_where_it_is_not_known_workspaces_are_in_the_upper_end_only(device: Any, precision: Precision) -> None:
    trace = capture(SMALL, precision, device=device)
    found = workspaces(trace, Phase.FORWARD) + workspaces(trace, Phase.BACKWARD)
    assert [storage.size_bytes for storage in found] == [0, 0, 0]
    assert all((storage.most_bytes or 0) > 49 * 2**20 for storage in found)


def test_the_workspaces_of_one_backward_are_not_held_at_once() -> None:
    trace = capture(SMALL, BF16)
    first, second = (trace.storages.index(storage) for storage in workspaces(trace, Phase.BACKWARD))
    events = [(e.storage, e.kind) for e in trace.events if e.storage in (first, second)]
    assert events.index((first, EventKind.FREE)) < events.index((second, EventKind.ALLOCATE))


def test_transforms_set_in_with_enough_samples_when_a_trace_is_scaled() -> None:
    line = TraceLine(*(capture(WIDE, FP32, samples=samples) for samples in (2, 3)))
    for samples in (2, 31, 32, 64):
        scaled, captured = line.at(samples), capture(WIDE, FP32, samples=samples)
        assert bytes_in(scaled, Phase.FORWARD) == bytes_in(captured, Phase.FORWARD)
        most = [storage.most_bytes for storage in workspaces(captured, Phase.FORWARD)]
        assert [storage.most_bytes for storage in workspaces(scaled, Phase.FORWARD)] == most
    assert sum(bytes_in(line.at(31), Phase.FORWARD)) == 0


def test_a_loop_of_ones_own_takes_tf32_unless_it_says_otherwise() -> None:
    """torch permits TF32 to convolutions by default; brimful's steps in fp32 do not."""

    def loop(model: Any, batches: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in batches:
            optimizer.zero_grad()
            SMALL.job().loss(model, batch).backward()
            optimizer.step()

    own = replace(SMALL.job(), loop=loop)
    trace = capture_step(own, Settings(micro_batch_size=32), H100)
    assert set(bytes_in(trace, Phase.FORWARD)) == {51380224 + 147456 + 16}
