"""Tensors that a step reads besides its own: counted once, left as they are, never computed with."""

from __future__ import annotations

import json
from collections.abc import Callable

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brimful.memory import predict_memory
from brimful.profiling import measure_step
from brimful.settings import Settings
from brimful.trace import Category, EventKind, Trace
from helpers.captured_jobs import (
    A100,
    CLASSES,
    CPU,
    INPUTS,
    SAMPLES,
    bytes_of,
    capture,
    cross_entropy,
    job,
    mlp,
)

WIDTH = 256


def wide() -> nn.Module:
    return nn.Sequential(
        nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
    )


def bytes_in(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def distilling(teacher: Callable[[Tensor], Tensor], *, no_grad: bool = True) -> Callable[..., Tensor]:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.set_grad_enabled(not no_grad):
            soft = teacher(batch["x"]).softmax(-1)
        return F.kl_div(model(batch["x"]).log_softmax(-1), soft, reduction="batchmean")

    return loss


class WithTeacher(nn.Module):
    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.student, self.teacher = mlp(), teacher.requires_grad_(False)


def others(trace: Trace) -> int:
    return bytes_of(trace, Category.OTHER_TENSORS)


@pytest.mark.parametrize("device", [CPU, A100], ids=["cpu", "gpu"])
def test_a_teacher_outside_of_the_model_counts_as_one_inside(device) -> None:
    teacher = wide()
    outside = predict_memory(capture(job(loss=distilling(teacher)), device))
    inside_job = job(
        lambda: WithTeacher(wide()),
        lambda model, batch: distilling(model.teacher)(model.student, batch),
    )
    inside = predict_memory(capture(inside_job, device))
    assert outside.peak_allocated_bytes == inside.peak_allocated_bytes
    assert outside.steady_peak_allocated_bytes == inside.steady_peak_allocated_bytes
    assert dict(outside.breakdown)[Category.OTHER_TENSORS] >= bytes_in(teacher)
    assert dict(inside.breakdown)[Category.OTHER_TENSORS] == 0


def test_it_is_there_before_the_first_op_and_to_the_end() -> None:
    trace = capture(job(loss=distilling(wide())))
    indices = {i for i, s in enumerate(trace.storages) if s.category is Category.OTHER_TENSORS}
    events = [event for event in trace.events if event.storage in indices]
    assert {event.kind for event in events} == {EventKind.ALLOCATE}
    assert {event.op for event in events} == {-1}
    assert trace.events[: len(events)] == tuple(events)


def test_its_ops_are_no_modules_of_the_model() -> None:
    trace = capture(job(loss=distilling(wide())))
    assert {fqn for fqn, _ in trace.module_classes} == {"", "0", "1", "2"}
    assert "<loss>" in {op.module for op in trace.ops if op.name == "aten.addmm.default"}


def test_a_trace_with_other_tensors_can_be_saved() -> None:
    trace = capture(job(loss=distilling(wide())))
    assert Trace.from_json(json.loads(json.dumps(trace.to_json()))) == trace


def test_views_of_one_storage_count_once() -> None:
    table = torch.randn(1000, CLASSES)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (
            cross_entropy(model, batch) + table[3:9].sum() + table.t()[0].mean() + table.detach().square().sum()
        )

    assert others(capture(job(loss=loss))) == table.nbytes


def test_constants_that_the_loss_makes_are_not_other_tensors() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        weights = torch.tensor([1.0] * CLASSES)
        return F.cross_entropy(model(batch["x"]), batch["y"], weight=weights) * torch.tensor(2.0)

    assert others(capture(job(loss=loss))) == 0


def test_a_plain_attribute_of_the_model_counts() -> None:
    class Rotates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.angles = mlp(), torch.randn(INPUTS)  # no buffer

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x * self.angles.cos())

    assert others(capture(job(Rotates))) == others(capture(job(Rotates()))) == INPUTS * 4


def test_what_is_moved_from_the_host_at_each_use_is_copied_and_does_not_stay() -> None:
    table = torch.randn(1000, CLASSES)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return cross_entropy(model, batch) + table.to(batch["x"].device).sum()

    trace = capture(job(loss=loss), A100)
    assert others(trace) == 0
    assert table.nbytes in {storage.size_bytes for storage in trace.storages}
    assert others(capture(job(loss=loss), CPU)) == table.nbytes


def test_what_a_capture_reads_it_leaves_as_it_was() -> None:
    class Centred(nn.Module):
        """DINO's teacher: centres move, BatchNorm counts, gradients would come if one let them."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(INPUTS, CLASSES), nn.BatchNorm1d(CLASSES)
            self.register_buffer("center", torch.zeros(CLASSES))
            self.latest: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.layer(x))
            self.center = self.center * 0.9 + y.mean(0).detach() * 0.1
            self.latest = y.detach()
            return y - self.center

    teacher, count = Centred(), torch.zeros(3)
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        count.add_(1)
        with torch.no_grad():
            for parameter in teacher.parameters():
                parameter.data.mul_(0.99)
        return distilling(teacher, no_grad=False)(model, batch) + count[0]

    trace = capture(job(loss=loss))
    assert others(trace) == bytes_in(teacher) + count.nbytes
    assert {name: tensor.tolist() for name, tensor in teacher.state_dict().items()} == {
        name: tensor.tolist() for name, tensor in before.items()
    }
    assert type(teacher.center) is Tensor
    assert teacher.latest is None
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert count.tolist() == [0, 0, 0]


def test_gradients_of_a_teacher_that_nobody_clears_stay() -> None:
    teacher = wide()
    frozen = predict_memory(capture(job(loss=distilling(teacher))))
    trained = predict_memory(capture(job(loss=distilling(teacher, no_grad=False))))
    more = trained.steady_peak_allocated_bytes - frozen.steady_peak_allocated_bytes
    assert more >= sum(parameter.nbytes for parameter in teacher.parameters())


def test_a_large_teacher_computes_nothing() -> None:
    weight = torch.empty(2**14, 2**14)  # never written to, so reading it would take its pages

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return cross_entropy(model, batch) + (torch.ones(1, 2**14) @ weight).sum()

    before = psutil.Process().memory_info().rss
    trace = capture(job(loss=loss))
    assert others(trace) == weight.nbytes
    assert psutil.Process().memory_info().rss - before < weight.nbytes / 8


def preference(reference: nn.Module) -> Callable[..., Tensor]:
    """DPO: the policy's log ratios against those of a frozen reference."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        def ratio(one: nn.Module) -> Tensor:
            chosen, rejected = one(batch["x"]).log_softmax(-1), one(batch["x"].flip(0)).log_softmax(-1)
            return (chosen - rejected).gather(1, batch["y"][:, None])

        with torch.no_grad():
            expected = ratio(reference)
        return -F.logsigmoid(0.1 * (ratio(model) - expected)).mean()

    return loss


def perceptual(features: nn.Module) -> Callable[..., Tensor]:
    """LPIPS: gradients go through a frozen network."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        made = model(batch["x"])
        return (features(F.pad(made, (0, INPUTS - CLASSES))) - features(batch["x"])).square().mean()

    return loss


LOSSES: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "distillation": lambda: distilling(wide().requires_grad_(False)),
    "preference": lambda: preference(wide()),
    "perceptual": lambda: perceptual(wide().requires_grad_(False)),
    "class weights": lambda: (
        lambda model, batch: nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)(model(batch["x"]), batch["y"])
    ),
    "a trained teacher": lambda: distilling(wide(), no_grad=False),
}
CLASS_WEIGHTS = torch.rand(CLASSES)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("steps", [1, 3])
def test_what_is_predicted_is_measured_to_the_byte(name: str, steps: int) -> None:
    settings = Settings(micro_batch_size=SAMPLES * 8, gradient_accumulation_steps=steps)
    predicted = predict_memory(
        capture(job(loss=LOSSES[name]()), samples=SAMPLES * 8, gradient_accumulation_steps=steps)
    )
    measured = measure_step(job(loss=LOSSES[name]()), settings, steps=1)
    assert measured.measured_peak_allocated_bytes == predicted.steady_peak_allocated_bytes
    assert dict(predicted.breakdown)[Category.OTHER_TENSORS] > 0
