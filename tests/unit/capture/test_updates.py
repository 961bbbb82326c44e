"""The optimizer is captured once for many steps: a step joined to it is that of a whole capture."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import brimful.capture.updates as updates_module
from brimful.capture import capture_step
from brimful.capture.cache import CachedCapture
from brimful.capture.updates import SharedUpdates
from brimful.capture.watched_device import WatchedDevice
from brimful.devices import find_device
from brimful.errors import BrimfulError
from brimful.job import Job
from brimful.settings import (
    Action,
    MemoryFormat,
    OptimizerImplementation,
    Precision,
    Settings,
    UnitAction,
)
from helpers.models import GPT, ResNet, UNet
from helpers.planned_jobs import image_job, language_job, vector_job

DEVICES = {name: find_device(name) for name in ("RTX 3090", "cpu")}
PLAIN = Settings(micro_batch_size=4)


class HalfUsed(nn.Module):
    """One layer gets no gradient, one is frozen, and one weight is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.frozen, self.tied = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.tied_too = nn.Linear(8, 8)
        self.tied_too.weight = self.tied.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied_too(self.tied(self.frozen(x)).relu())


JOBS: dict[str, Job] = {
    "gpt": language_job(lambda: GPT(layers=2)),
    "resnet": image_job(ResNet),
    "unet": image_job(UNet),
    "half used": vector_job(HalfUsed, 8),
}


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro-batches": {"gradient_accumulation_steps": 3},
    "fused": {"optimizer_implementation": OptimizerImplementation.FUSED},
    "for-loop": {"optimizer_implementation": OptimizerImplementation.FOR_LOOP},
    "bf16": {"precision": Precision.BF16},
    "fp16": {"precision": Precision.FP16},
    "fp16, micro-batches": {"precision": Precision.FP16, "gradient_accumulation_steps": 3},
    "fp16, fused": {"precision": Precision.FP16, "optimizer_implementation": OptimizerImplementation.FUSED},
    "sgd": {"optimizer": "sgd"},
    "on the host": {"offload_optimizer": True},
    "ahead": {"prefetch_inputs": True, "gradient_accumulation_steps": 2},
}


def joined(job: Job, settings: Settings, device: str) -> Any:
    """A step joined to an update, once a whole capture of other settings is known."""
    shared = SharedUpdates(job, WatchedDevice(DEVICES[device]))
    shared.learn(PLAIN, capture_step(job, PLAIN, DEVICES[device], steps=1))
    return shared._captured(settings, None)


@pytest.mark.sweep
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", JOBS)
def test_a_joined_step_is_that_of_a_whole_capture(name: str, case: str, device: str) -> None:
    settings = replace(PLAIN, **CASES[case])
    found = joined(JOBS[name], settings, device)
    assert found is not None
    assert found == capture_step(JOBS[name], settings, DEVICES[device], steps=1)


@pytest.mark.parametrize("accumulates", [1, 2])
@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
@pytest.mark.parametrize("name", ["gpt", "resnet", "half used"])
def test_an_update_whose_matmuls_make_a_workspace_is_joined(
    name: str, optimizer: str, accumulates: int
) -> None:
    """Its setup makes cuBLAS's workspace, which is forward's otherwise."""
    settings = replace(PLAIN, optimizer=optimizer, gradient_accumulation_steps=accumulates)
    try:
        whole = capture_step(JOBS[name], settings, DEVICES["RTX 3090"], steps=1)
    except BrimfulError:  # Muon takes matrices alone
        assert optimizer == "muon"
        return
    assert joined(JOBS[name], settings, "RTX 3090") == whole


def test_state_is_converted_to_the_memory_format_before_the_step_begins() -> None:
    """Adafactor makes some of it contiguous, whatever its parameter is."""
    settings = replace(PLAIN, optimizer="adafactor", memory_format=MemoryFormat.CHANNELS_LAST)
    whole = capture_step(JOBS["unet"], settings, DEVICES["RTX 3090"], steps=1)
    assert joined(JOBS["unet"], settings, "RTX 3090") == whole


class Penalised(nn.Module):
    """Autograd runs in forward; only its ops and those of backward are matmuls."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.column = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(6))
        self.matrix = nn.Parameter(torch.ones(8, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.addr(self.matrix, self.row, self.column)
        (gradient,) = torch.autograd.grad(y.square().sum(), self.row, create_graph=True)
        return y + x.mean() + gradient.square().sum()


class MultipliesAtOnce(torch.optim.SGD):
    """A matmul where it is made, and one in its step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.mixing = torch.eye(8) @ torch.eye(8)

    def step(self, closure: Any = None) -> None:
        self.mixing @ self.mixing
        super().step(closure)


def test_a_workspace_of_autograd_in_forward_is_captured_whole() -> None:
    settings = replace(PLAIN, optimizer="adafactor")
    assert joined(vector_job(Penalised, 8), settings, "RTX 3090") is None


def test_a_workspace_that_both_parts_make_in_setup_is_counted_once() -> None:
    job = replace(JOBS["half used"], optimizer=MultipliesAtOnce)
    assert joined(job, PLAIN, "RTX 3090") == capture_step(job, PLAIN, DEVICES["RTX 3090"], steps=1)


def test_gradients_that_share_a_storage_are_captured_whole() -> None:
    """Those of an LSTM's weights, which cuDNN has in one buffer."""

    class First(nn.LSTM):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            out: torch.Tensor = super().forward(x)[0]
            return out

    job = vector_job(lambda: First(8, 16, batch_first=True), 5, 8)
    assert joined(job, PLAIN, "RTX 3090") is None


def test_actions_of_units_share_one_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for captures of a search, which are those of whole steps."""
    ran: list[Settings] = []
    run = updates_module.capture_update

    def counted(job: Job, settings: Settings, *args: Any) -> Any:
        ran.append(settings)
        return run(job, settings, *args)

    monkeypatch.setattr(updates_module, "capture_update", counted)
    job, device = JOBS["unet"], DEVICES["RTX 3090"]
    recomputed = tuple(UnitAction(fqn=name, action=Action.RECOMPUTE) for name in ("down1", "up1"))
    settings = [
        PLAIN,
        replace(PLAIN, micro_batch_size=2),
        replace(PLAIN, micro_batch_size=6),
        replace(PLAIN, units=recomputed),
        replace(PLAIN, memory_format=MemoryFormat.CHANNELS_LAST),
    ]
    with CachedCapture(job, device) as capture:
        traces = [capture(each) for each in settings]
    assert traces == [capture_step(job, each, device, steps=1) for each in settings]
    assert [(each.units, each.memory_format) for each in ran] == [((), None), ((), MemoryFormat.CHANNELS_LAST)]


def test_optimizers_share_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str | None] = []
    run = updates_module.capture_model

    def counted(job: Job, settings: Settings, *args: Any) -> Any:
        ran.append(settings.optimizer)
        return run(job, settings, *args)

    monkeypatch.setattr(updates_module, "capture_model", counted)
    job, device = language_job(lambda: GPT(layers=6)), DEVICES["RTX 3090"]
    named = [replace(PLAIN, optimizer=name) for name in ("adafactor", "sgd", "muon")]
    fused = replace(PLAIN, optimizer="sgd", optimizer_implementation=OptimizerImplementation.FUSED)
    on_host = replace(PLAIN, offload_optimizer=True)
    settings = [PLAIN, *named, fused, on_host]
    with CachedCapture(job, device) as capture:
        traces = [capture(each) for each in settings]
    assert traces == [capture_step(job, each, device, steps=1) for each in settings]
    assert ran == [None]  # the job's own optimizer is one by name too


class OverFrozen(nn.Module):
    """A trained layer over a frozen one whose weights have a type of their own."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.frozen, self.trained = nn.Linear(8, 8, dtype=dtype).requires_grad_(False), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(self.frozen(x.to(self.frozen.weight.dtype)).float())


def test_a_job_with_other_frozen_weights_has_an_update_of_its_own() -> None:
    """As QLoRA has after LoRA: the gradients are the same, what is there before the first forward is not."""
    device, shared = DEVICES["RTX 3090"], None
    for dtype in (torch.float32, torch.bfloat16):
        job = vector_job(partial(OverFrozen, dtype), 8)
        shared = SharedUpdates(job, WatchedDevice(device), like=shared)
        whole = capture_step(job, PLAIN, device, steps=1)
        shared.learn(PLAIN, whole)
        assert shared._captured(PLAIN, None) == whole


class UsesForward(torch.optim.SGD):
    """Keeps a tensor that forward made, so that its update is not the same without a forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.seen: list[torch.Tensor] = []
        model.register_forward_hook(lambda _module, _inputs, out: self.seen.append(out.detach()))

    def step(self, closure: Any = None) -> None:
        for tensor in self.seen:
            tensor.exp()
        self.seen.clear()
        super().step(closure)


def test_an_optimizer_that_uses_forward_is_captured_whole() -> None:
    job = replace(JOBS["half used"], optimizer=UsesForward)
    settings = [replace(PLAIN, micro_batch_size=size) for size in (4, 5, 6, 7)]
    with CachedCapture(job, DEVICES["cpu"]) as capture:
        traces = [capture(each) for each in settings]
    assert traces == [capture_step(job, each, DEVICES["cpu"], steps=1) for each in settings]
    assert any(op.name == "aten.exp.default" for op in traces[-1].ops)
