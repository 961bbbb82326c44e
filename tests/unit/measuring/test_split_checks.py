"""A plan that splits batches is checked against the batch before anything is trained, in one's own loop too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import brimful as bf
from brimful.errors import CertificateError

SPLIT = bf.Settings(micro_batch_size=2, gradient_accumulation_steps=4)


def sum_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.mse_loss(model(batch + torch.randn_like(batch)), batch, reduction="sum")


def mixup_loss(model: nn.Module, batch: Tensor) -> Tensor:
    share = torch.rand(())
    return model(share * batch + (1 - share) * batch[torch.randperm(len(batch))]).square().mean()


def mean_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.mse_loss(model(batch + torch.randn_like(batch)), batch)


def job_of(loss: object) -> bf.Job:
    return bf.Job(
        model=lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)),
        loss=loss,  # type: ignore[arg-type]
        batch=lambda n: torch.rand(n, 8),
        optimizer="sgd",
        data=lambda: bf.Data(train=torch.rand(16, 8)),
    )


def applied(loss: object, settings: bf.Settings = SPLIT, **how: bool) -> tuple[nn.Module, object]:
    job = job_of(loss)
    model = job.model()  # type: ignore[operator]
    return model, bf.apply(settings, job, model, torch.optim.SGD(model.parameters(), 0.1), **how)  # type: ignore[arg-type]


def test_a_sum_that_would_be_scaled_is_refused_before_the_first_step_of_ones_own_loop() -> None:
    model, step = applied(sum_loss)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CertificateError, match="is NOT the same training"):
        step(torch.rand(8, 8))  # type: ignore[operator]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())


def test_what_cannot_be_compared_is_said_loudly_and_once() -> None:
    _model, step = applied(mixup_loss)
    with pytest.warns(UserWarning, match="split into 4 micro-batches.*could not be checked"):
        step(torch.rand(8, 8))  # type: ignore[operator]
    step(torch.rand(8, 8))  # type: ignore[operator]


def test_the_check_draws_nothing_and_changes_nothing() -> None:
    batch, found = torch.rand(8, 8), []
    for verify in (True, False):
        torch.manual_seed(3)
        model, step = applied(mean_loss, verify=verify)
        step(batch)  # type: ignore[operator]
        found.append((model[0].weight.detach().clone(), torch.rand(3)))  # type: ignore[index]
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_a_batch_that_is_not_split_is_not_checked() -> None:
    _model, step = applied(sum_loss, bf.Settings(micro_batch_size=8))
    step(torch.rand(8, 8))  # type: ignore[operator]


def test_training_says_when_a_split_could_not_be_compared() -> None:
    with pytest.warns(UserWarning, match="split into 4 micro-batches.*could not be checked"):
        bf.fit(job_of(mixup_loss), SPLIT, epochs=1, show_progress=False)
    with pytest.raises(CertificateError, match="is NOT the same training"):
        bf.fit(job_of(sum_loss), SPLIT, epochs=1, show_progress=False)


def slope_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """As of a physics-informed network: the loss is one of derivatives."""
    x = batch.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
    return slope.square().mean()


def summed_slope_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return slope_loss(model, batch) * batch.numel()


def test_a_loss_of_derivatives_is_compared() -> None:
    model, step = applied(slope_loss)
    model[1].p = 0.0  # type: ignore[index, assignment]
    step(torch.rand(8, 8))  # type: ignore[operator]
    model, step = applied(summed_slope_loss)
    with pytest.raises(CertificateError, match="is NOT the same training"):
        step(torch.rand(8, 8))  # type: ignore[operator]
    assert all(parameter.grad is None for parameter in model.parameters())


def ignoring(first: int, counted: bool = True) -> tuple[bf.Job, dict[str, Tensor]]:
    """A job and a batch of 16 samples; the labels of the first ones are ignored."""
    batch = {"x": torch.rand(16, 8), "y": torch.randint(0, 8, (16,))}
    batch["y"][:first] = -100
    job = bf.Job(
        model=lambda: nn.Linear(8, 8),
        loss=lambda model, part: F.cross_entropy(model(part["x"]), part["y"]),
        batch=batch,
        count=(lambda part: (part["y"] != -100).sum()) if counted else None,
        optimizer="sgd",
    )
    return job, batch


@pytest.mark.parametrize("first", [3, 9, 15])
def test_micro_batches_that_count_for_nothing_are_left_out(first: int) -> None:
    job, batch = ignoring(first)
    model = nn.Linear(8, 8)
    expected = F.cross_entropy(model(batch["x"]), batch["y"])
    settings = bf.Settings(micro_batch_size=2, gradient_accumulation_steps=8)
    outcome = bf.apply(settings, job, model, torch.optim.SGD(model.parameters(), 0.1))(batch)
    assert float(outcome.loss) == pytest.approx(float(expected.detach()), rel=1e-6)


def test_ignored_labels_that_are_not_counted_are_refused_wherever_they_are() -> None:
    job, batch = ignoring(6, counted=False)
    model = nn.Linear(8, 8)
    settings = bf.Settings(micro_batch_size=4, gradient_accumulation_steps=4)
    with pytest.raises(CertificateError, match="is NOT the same training"):
        bf.apply(settings, job, model, torch.optim.SGD(model.parameters(), 0.1))(batch)
