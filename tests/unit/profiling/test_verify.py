"""A certificate holds where training under a plan is the same training, and only there."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import brimful as bf
from brimful.profiling import verify
from brimful.profiling.equivalence import deterministic_kernels
from brimful.results import Comparison, EquivalenceReport
from brimful.settings import Action, Precision, Settings, UnitAction

WIDTH, CLASSES = 16, 5


class Block(nn.Module):
    """What makes recomputation hard: BatchNorm, work in place, dropout, Python's random numbers."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True))
        self.draws = draws

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return F.dropout(x, 0.5) * random.uniform(0.5, 1.5) if self.draws else x


class Counter:
    calls = 0


class Counting(nn.Module):
    """Another result each time, by a count that an object in it holds, or a class, which nothing restores."""

    def __init__(self, counter: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.counter = counter

    def forward(self, x: Tensor) -> Tensor:
        self.counter.calls += 1
        return torch.tanh(self.inner(x) * self.counter.calls)


def job_of(*blocks: Callable[[], nn.Module]) -> bf.Job:
    return bf.Job(
        model=lambda: nn.Sequential(*(block() for block in blocks), nn.Linear(WIDTH, CLASSES)),
        loss=lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
        batch=lambda n: {"x": torch.randn(n, WIDTH), "y": torch.randint(0, CLASSES, (n,))},
        optimizer="sgd",
        name="job",
    )


def certificate(
    job: bf.Job, *, micro_batches: int = 1, recompute: tuple[str, ...] = (), **others: Any
) -> EquivalenceReport:
    units = tuple(UnitAction(fqn=fqn, action=Action.RECOMPUTE) for fqn in recompute)
    settings = Settings(micro_batch_size=8, gradient_accumulation_steps=micro_batches, units=units, **others)
    return verify(job, settings)


def found(certificate: EquivalenceReport) -> dict[str, Comparison]:
    return {comparison.name: comparison for comparison in certificate.comparisons}


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16, Precision.FP16])
def test_recomputing_is_the_same_to_the_last_bit(precision: Precision) -> None:
    job = job_of(lambda: Block(True), lambda: Block(True))
    found_ = certificate(job, recompute=("0", "1"), micro_batches=2, precision=precision)
    assert found_.holds
    assert found(found_)["recomputing"].is_bitwise
    assert "BatchNorm" in found(found_)["splitting"].why_not_compared
    assert "is the same training, except for layers that depend on the micro-batch (16 samples" in str(found_)


def test_splitting_is_the_same_within_a_stated_bound() -> None:
    splitting = found(certificate(job_of(lambda: nn.Linear(WIDTH, WIDTH)), micro_batches=4))["splitting"]
    assert 0 < splitting.largest_difference < 1e-6 < splitting.bound
    assert splitting.holds
    assert "within the bound" in str(splitting)


def test_a_loss_weighted_wrongly_is_found() -> None:
    job = job_of(lambda: nn.Linear(WIDTH, WIDTH))

    def summed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return job.loss(model, batch) * len(batch["x"])  # no mean: micro-batches do not add up to it

    wrong = certificate(bf.Job(model=job.model, loss=summed, batch=job.batch, optimizer="sgd"), micro_batches=4)
    assert not wrong.holds
    assert not found(wrong)["splitting"].holds
    assert "is NOT the same training" in str(wrong)


def test_a_forward_that_recomputes_something_else_is_found() -> None:
    """What a class holds is not restored."""
    wrong = certificate(job_of(lambda: Counting(Counter), lambda: nn.Linear(WIDTH, WIDTH)), recompute=("0",))
    assert not wrong.holds
    assert found(wrong)["recomputing"].where.startswith("the gradient of 0.inner")


def test_what_an_object_in_the_model_holds_is_as_it_was_where_it_is_recomputed() -> None:
    right = certificate(job_of(lambda: Counting(Counter()), lambda: nn.Linear(WIDTH, WIDTH)), recompute=("0",))
    assert found(right)["recomputing"].is_bitwise


def test_what_is_not_compared_says_why() -> None:
    drawing = certificate(job_of(lambda: nn.Dropout(0.5)), micro_batches=2)
    assert "random numbers" in found(drawing)["splitting"].why_not_compared
    whole = certificate(job_of(lambda: nn.Linear(WIDTH, WIDTH)))
    assert "does not split" in found(whole)["splitting"].why_not_compared
    assert "recomputes nothing" in found(whole)["recomputing"].why_not_compared
    assert whole.holds


def test_a_plan_for_a_gpu_is_compared_on_the_cpu_with_a_few_samples() -> None:
    job = job_of(lambda: nn.Linear(WIDTH, WIDTH))
    plan = bf.plan(job, "RTX 3090", global_batch_size=32, micro_batch_size=8)
    held = bf.verify(job, plan)
    assert held.holds
    assert held.samples == 4


def test_the_jobs_own_model_and_all_generators_stay_as_they_are() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES))
    before = copy.deepcopy(module.state_dict())
    states = torch.get_rng_state(), random.getstate()
    job = job_of()
    certificate(bf.Job(model=module, loss=job.loss, batch=job.batch, optimizer="sgd"), recompute=("0",))
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert all(parameter.grad is None for parameter in module.parameters())


class Attention(nn.Module):
    """The gradient of the keys' bias is 0 but for rounding, as in every transformer with one."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None] * torch.arange(1, 6)[:, None]
        weights = (self.query(x) @ self.key(x).transpose(1, 2) / 4).softmax(-1)
        return self.head((weights @ self.value(x)).mean(1))


def with_model(model: Callable[[], nn.Module], loss: Callable[..., Tensor] | None = None) -> bf.Job:
    def cross_entropy(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        dtype = next(iter(model.parameters())).dtype
        return F.cross_entropy(model(batch["x"].to(dtype)).float(), batch["y"])

    plain = job_of()
    return bf.Job(model=model, loss=loss or cross_entropy, batch=plain.batch, optimizer="sgd", name="job")


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


@pytest.mark.parametrize(
    "model",
    [Attention, lambda: mlp().bfloat16(), lambda: torch.jit.script(mlp())],
    ids=["a gradient of rounding alone", "weights in bfloat16", "a scripted model"],
)
def test_splitting_is_the_same_where_rounding_is_all_that_differs(model: Callable[[], nn.Module]) -> None:
    assert certificate(with_model(model), micro_batches=4).holds


def test_a_sum_is_found_in_bfloat16_too() -> None:
    def summed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"].bfloat16()), batch["y"], reduction="sum")

    found_out = certificate(with_model(lambda: mlp().bfloat16(), summed), micro_batches=4)
    assert not found_out.holds
    assert 'Job(reduction="sum")' in str(found_out)


@pytest.mark.parametrize("was_on", [False, True])
def test_on_cuda_steps_are_compared_with_kernels_that_add_in_a_fixed_order(was_on: bool) -> None:
    """An H100 computes other last digits each time without them; what has none does not warn."""
    torch.use_deterministic_algorithms(was_on, warn_only=False)
    try:
        with deterministic_kernels(torch.device("cuda")):
            assert torch.is_deterministic_algorithms_warn_only_enabled()
            warnings.warn("op does not have a deterministic implementation", UserWarning, stacklevel=1)
        assert torch.are_deterministic_algorithms_enabled() is was_on
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        with deterministic_kernels(torch.device("cpu")):
            assert torch.are_deterministic_algorithms_enabled() is was_on
    finally:
        torch.use_deterministic_algorithms(False)
