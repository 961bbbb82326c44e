"""Every architecture of `benchmarks/zoo` is captured, for a CPU and for a GPU, and some are measured."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
from torch import Tensor, nn

from brimful.capture import capture_step
from brimful.devices import find_device
from brimful.memory import live_profile, predict_memory, rounding_bytes_of
from brimful.profiling import measure_step
from brimful.settings import Settings
from brimful.trace import Category, Trace
from zoo import ZOO, ZooModel, missing

pytestmark = pytest.mark.filterwarnings("ignore")  # what the libraries warn of is theirs

SLOW = {
    "bart", "bidirectional lstm, packed", "clip", "convnext", "deepseek-v3", "efficientnet", "funnel", "hubert",
    "longformer", "longt5", "mamba", "mamba2", "marian", "mobilenet-v2", "mobilevit", "mt5", "pegasus",
    "poolformer", "regnet", "resnet (transformers)", "rwkv", "segformer", "siglip", "speech, ctc", "swin",
    "switch", "t5", "vit-mae", "wav2vec2, masked", "whisper", "yolos", "densenet121 (torchvision)",
    "efficientnet_b0 (torchvision)", "resnet50 (torchvision)", "regnet_y_400mf (torchvision)",
    "swin_t (torchvision)", "vgg11 (torchvision)",
}  # fmt: skip
"""They take a second and more for both devices, two thirds of the time of all."""
MEASURED = (
    "bert", "gpt2", "vit", "resnet-18", "unet", "vae", "wavenet", "lstm lm", "mlp", "lora",
    "own checkpoint, reentrant", "graph", "boolean index", "recommender",
)  # fmt: skip
WITHIN_FRACTION = 0.005
"""Predicted against measured; benchmarks/results/cpu_zoo.json has all models."""


@pytest.fixture(autouse=True)
def _frozen_heap() -> Iterator[None]:
    """A capture collects garbage once; with transformers imported that takes longer than the capture."""
    gc.freeze()
    yield
    gc.unfreeze()


def skip_if_missing(model: ZooModel) -> None:
    reason = missing(model.needs) if model.needs else None
    if reason:
        pytest.skip(f"{model.needs}: {reason}")


@cache
def sizes_of(name: str) -> tuple[int, int]:
    """Bytes of a model's parameters and buffers, those that are shared once; how many parameters it has."""
    (built,) = [model.job().model() for model in ZOO if model.name == name]
    return resident_bytes(built), sum(parameter.numel() for parameter in built.parameters())


def resident_bytes(model: nn.Module) -> int:
    tensors: dict[int, Tensor] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(
        (1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)))
        * tensor.element_size()
        for tensor in tensors.values()
        if tensor.numel()
    )


def live_bytes_after_steps(trace: Trace) -> list[int]:
    """Bytes live when each captured step has ended."""
    profile = live_profile(trace, rounding_bytes_of(trace.device_kind))
    steps = np.array([trace.ops[event.op].step if event.op >= 0 else -1 for event in trace.events])
    return [int(profile.live_bytes[np.flatnonzero(steps == step)[-1]]) for step in range(trace.captured_steps)]


@pytest.mark.sweep
@pytest.mark.parametrize("device", ["cpu", "RTX 3090"])
@pytest.mark.parametrize(
    "model",
    [pytest.param(m, id=m.name, marks=[pytest.mark.slow] if m.name in SLOW else []) for m in ZOO],
)
def test_a_step_is_captured_and_leaves_nothing_behind(model: ZooModel, device: str) -> None:
    skip_if_missing(model)
    held_bytes, parameter_count = sizes_of(model.name)
    trace = capture_step(model.job(), Settings(micro_batch_size=model.micro_batch_size), find_device(device))
    assert trace.ops
    held = [storage for storage in trace.storages if storage.category is Category.PARAMETERS]
    assert sum(storage.size_bytes for storage in held) == held_bytes
    assert trace.parameter_count == parameter_count
    first, *_, last = live_bytes_after_steps(trace)
    assert last == first
    assert predict_memory(trace).peak_allocated_bytes > held_bytes


@pytest.mark.parametrize("name", MEASURED)
def test_what_is_predicted_for_a_cpu_is_what_a_step_takes(name: str) -> None:
    (model,) = [model for model in ZOO if model.name == name]
    settings = Settings(micro_batch_size=model.micro_batch_size)
    predicted = predict_memory(capture_step(model.job(), settings, find_device("cpu"))).peak_allocated_bytes
    measured = measure_step(model.job(), settings, steps=1).measured_peak_allocated_bytes
    assert predicted == pytest.approx(measured, rel=WITHIN_FRACTION)


def test_the_zoo_is_large_and_every_model_has_a_name_of_its_own() -> None:
    names = [model.name for model in ZOO]
    assert len(set(names)) == len(names) >= 45
    assert set(names) >= {*SLOW, *MEASURED}


def test_a_package_that_cannot_be_imported_is_named_with_the_reason() -> None:
    assert missing("torch") is None
    assert "no_such_package" in str(missing("no_such_package"))
