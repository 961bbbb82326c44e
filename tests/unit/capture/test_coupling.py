"""What couples the samples of a batch, so that splitting it changes what is computed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brimful.capture import capture_step
from brimful.capture.carried import CarriedState
from brimful.devices import find_device
from brimful.errors import InfeasibleError
from brimful.execution.buffers import BufferSnapshot
from brimful.job import Job
from brimful.planner import JobTraits, Request, search
from brimful.profiling import verify
from brimful.settings import Settings
from helpers.captured_jobs import CLASSES, HIDDEN, INPUTS, SAMPLES, capture, job, mlp
from helpers.planned_jobs import FASTEST

parametrized = nn.utils.parametrizations.spectral_norm


class Keeps(nn.Module):
    """Keeps something in a buffer, changed by `change` in each forward in training mode."""

    def __init__(self, buffer: Tensor, change: Callable[[Keeps, Tensor], None]) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("kept", buffer)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.change(self, x)
        return self.inner(x)


def replace_average(module: Keeps, x: Tensor) -> None:
    module.kept = 0.9 * module.kept + 0.1 * x.detach().mean(0)


def write_average(module: Keeps, x: Tensor) -> None:
    module.kept.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)


def count_forwards(module: Keeps, _x: Tensor) -> None:
    module.kept += 1


def normed(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), norm, nn.Linear(HIDDEN, CLASSES))


STATEFUL: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "a buffer that is replaced": (lambda: Keeps(torch.zeros(INPUTS), replace_average), ("kept",)),
    "a buffer that is written to": (lambda: Keeps(torch.zeros(INPUTS), write_average), ("kept",)),
    "one number": (lambda: Keeps(torch.zeros(()), count_forwards), ("kept",)),
    "spectral norm": (
        lambda: normed(parametrized(nn.Linear(HIDDEN, HIDDEN))),
        ("1.parametrizations.weight.0._u", "1.parametrizations.weight.0._v"),
    ),
    "spectral norm by hook": (
        lambda: normed(nn.utils.spectral_norm(nn.Linear(HIDDEN, HIDDEN))),
        ("1.weight_u", "1.weight_v"),
    ),
    "InstanceNorm's running statistics": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (3, INPUTS // 3)),
            nn.InstanceNorm1d(3, track_running_stats=True),
            nn.Flatten(),
            mlp(),
        ),
        ("1",),
    ),
}
HARMLESS: dict[str, Callable[[], nn.Module]] = {
    "a counter": lambda: Keeps(torch.zeros((), dtype=torch.int64), count_forwards),
    "a buffer that only evaluation changes": lambda: Keeps(torch.zeros(3), lambda _module, _x: None),
    "InstanceNorm": lambda: nn.Sequential(nn.Unflatten(1, (3, 4)), nn.InstanceNorm1d(3), nn.Flatten(), mlp()),
    "weight norm": lambda: normed(nn.utils.parametrizations.weight_norm(nn.Linear(HIDDEN, HIDDEN))),
}


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
@pytest.mark.parametrize("name", STATEFUL)
def test_a_buffer_that_each_forward_changes_couples_the_micro_batches(name: str) -> None:
    model, expected = STATEFUL[name]
    trace = capture(job(model))
    assert trace.stateful_modules == expected
    assert trace.batch_coupled_modules == expected
    assert trace.batch_norm_modules == ()


@pytest.mark.parametrize("name", HARMLESS)
def test_nothing_else_does(name: str) -> None:
    assert capture(job(HARMLESS[name])).batch_coupled_modules == ()


def test_batch_norm_couples_by_itself() -> None:
    trace = capture(job(lambda: normed(nn.BatchNorm1d(HIDDEN))))
    assert (trace.batch_coupled_modules, trace.stateful_modules) == (("1",), ())
    assert trace.batch_norm_modules == ("1",)


def test_a_capture_of_one_step_that_recomputes_finds_it_too() -> None:
    model = STATEFUL["spectral norm"][0]
    trace = capture(job(model), recompute=("1",))
    assert trace.stateful_modules == STATEFUL["spectral norm"][1]


def test_what_the_loss_changes_outside_of_the_model_couples_too() -> None:
    momentum_encoder, counter = mlp(), torch.zeros((), dtype=torch.int64)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        counter.add_(1)
        with torch.no_grad():
            for own, followed in zip(momentum_encoder.parameters(), model.parameters(), strict=True):
                own.mul_(0.99).add_(followed, alpha=0.01)
            expected = momentum_encoder(batch["x"])
        return F.mse_loss(model(batch["x"]), expected)

    assert capture(job(loss=loss)).stateful_modules == (
        "loss.momentum_encoder.0.weight",
        "loss.momentum_encoder.0.bias",
        "loss.momentum_encoder.2.weight",
        "loss.momentum_encoder.2.bias",
    )


@pytest.mark.parametrize("is_trained", [True, False])
def test_batch_norm_of_a_teacher_couples_unless_it_evaluates(is_trained: bool) -> None:
    teacher = normed(nn.BatchNorm1d(HIDDEN)).train(is_trained)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            expected = teacher(batch["x"])
        return F.mse_loss(model(batch["x"]), expected)

    found = capture(job(loss=loss)).batch_norm_modules
    assert found == (("BatchNorm1d outside of the model",) if is_trained else ())


def spectral_job() -> Job:
    return job(
        STATEFUL["spectral norm"][0], batch=lambda n: {"x": torch.randn(n, INPUTS), "y": torch.zeros(n).long()}
    )


def planned(budget_bytes: int, *, split_batch_norm: bool = False):
    request = Request(
        job=JobTraits(name="spectral"),
        device=find_device("cpu"),
        budget_bytes=budget_bytes,
        global_batch_size=512,
        asked=replace(FASTEST, chunked_loss=False, split_batch_norm=split_batch_norm),
    )

    def captured(settings: Settings, steps: int = 1):
        return capture_step(spectral_job(), settings, request.device, steps=steps)

    return search(captured, request)


def test_a_plan_does_not_split_such_a_batch_unasked_and_says_what_that_changes() -> None:
    with pytest.raises(
        InfeasibleError,
        match=r"each forward updates state that the next one reads.*1\.parametrizations.*--split-batch-norm",
    ):
        planned(100_000)
    plan = planned(100_000, split_batch_norm=True)
    assert plan.settings.gradient_accumulation_steps > 1
    (note,) = [note for note in plan.notes if "parametrizations" in note]
    steps = plan.settings.gradient_accumulation_steps
    assert note.startswith(f"Each forward updates state that the next one reads: {steps} times a step")


def test_the_certificate_of_such_a_split_says_why_it_compares_the_loss_alone() -> None:
    found = verify(spectral_job(), Settings(micro_batch_size=SAMPLES, gradient_accumulation_steps=2))
    assert found.holds
    (splitting,) = [each for each in found.comparisons if each.name == "splitting"]
    assert splitting.is_known_to_differ
    assert splitting.why_not_compared == (
        "each forward updates state that the next one reads: 2 times a step, and each micro-batch sees other "
        "values: '1.parametrizations.weight.0._u', '1.parametrizations.weight.0._v'"
    )
    (loss,) = [each for each in found.comparisons if each.name == "splitting, in evaluation mode"]
    assert loss.holds


def test_weights_that_a_forward_makes_anew_are_neither_kept_by_a_capture_nor_by_the_undo_of_a_step() -> None:
    """Weight normalisation sets another weight in each forward; that of the forward before is gone."""
    model = nn.utils.weight_norm(nn.Linear(4, 4))
    carried, snapshot = CarriedState(model, {}), BufferSnapshot(model)
    for _ in range(3):
        before = weakref.ref(model.weight)
        carried.begin()
        snapshot.take()
        model(torch.ones(2, 4)).sum().backward()
        carried.end()
        is_gone = before() is None
        snapshot.release()
    assert is_gone
    assert before() is None
