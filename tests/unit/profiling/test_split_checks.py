"""A plan that splits batches is checked against the batch before anything is trained, in one's own loop too."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

import brimful as bf
from brimful.errors import EquivalenceError, UsageError
from brimful.profiling.splitting import compare_split_loss
from helpers.faults import OutOfMemoryAt

Loss = Callable[[nn.Module, Tensor], Tensor]
SPLIT = bf.Settings(micro_batch_size=2, gradient_accumulation_steps=4)


def sum_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.mse_loss(model(batch + torch.randn_like(batch)), batch, reduction="sum")


def mixup_loss(model: nn.Module, batch: Tensor) -> Tensor:
    share = torch.rand(())
    return model(share * batch + (1 - share) * batch[torch.randperm(len(batch))]).square().mean()


def mean_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.mse_loss(model(batch + torch.randn_like(batch)), batch)


def zero_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.relu(model(batch).square().sum() - 1e6)


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
    with pytest.raises(EquivalenceError, match="is NOT the same training"):
        step(torch.rand(8, 8))  # type: ignore[operator]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())


def test_what_cannot_be_compared_is_said_loudly_and_once() -> None:
    _model, step = applied(mixup_loss)
    with pytest.warns(UserWarning, match="split into 4 micro-batches.*could not be checked"):
        step(torch.rand(8, 8))  # type: ignore[operator]
    step(torch.rand(8, 8))  # type: ignore[operator]


def test_a_loss_of_zero_is_not_compared() -> None:
    _model, step = applied(zero_loss)
    with pytest.warns(UserWarning, match="could not be checked: the loss of few samples is zero"):
        step(torch.rand(8, 8))  # type: ignore[operator]


def contrasted(model: nn.Module, batch: Tensor) -> Tensor:
    found = model(batch)
    return F.cross_entropy(found @ found.T, torch.arange(len(batch)))


def squared(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def short_of_memory(loss: Loss, most: int, *, without_gradients: bool = False) -> Loss:
    """Memory runs out with more than so many samples, in training or wherever the loss is computed."""

    def computed(model: nn.Module, batch: Tensor) -> Tensor:
        is_real = not isinstance(batch, FakeTensor)
        if len(batch) > most and is_real and (torch.is_grad_enabled() or without_gradients):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return loss(model, batch)

    return computed


def test_micro_batches_that_nobody_checked_are_divided_only_if_the_loss_stays() -> None:
    _model, step = applied(short_of_memory(contrasted, 1), verify=False)
    with pytest.raises(
        bf.errors.OutOfMemoryError, match=r"(?s)may not be split.*If it compares samples"
    ) as error:
        step(torch.rand(8, 8))
    assert "verify" not in str(error.value)
    _model, step = applied(short_of_memory(squared, 1), verify=False)
    with pytest.warns(UserWarning, match="micro-batches of 1 in place of 2"):
        step(torch.rand(8, 8))


def test_fewer_samples_are_compared_where_memory_is_short() -> None:
    _model, step = applied(short_of_memory(squared, 2, without_gradients=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(torch.rand(8, 8))
    _model, step = applied(short_of_memory(contrasted, 2, without_gradients=True))
    with pytest.raises(EquivalenceError):
        step(torch.rand(8, 8))


def test_a_first_batch_of_few_samples_leaves_the_check_to_the_next() -> None:
    _model, step = applied(contrasted)
    step(torch.rand(2, 8))
    with pytest.raises(EquivalenceError):
        step(torch.rand(8, 8))


def test_the_check_draws_nothing_and_changes_nothing() -> None:
    batch, found = torch.rand(8, 8), []
    for verify in (True, False):
        torch.manual_seed(3)
        model, step = applied(mean_loss, verify=verify)
        step(batch)  # type: ignore[operator]
        found.append((model[0].weight.detach().clone(), torch.rand(3)))  # type: ignore[index]
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("verify", [True, False])
def test_a_batch_too_small_to_be_checked_when_memory_runs_out_leaves_that_to_the_next(verify: bool) -> None:
    _model, step = applied(sum_loss, bf.Settings(micro_batch_size=8), verify=verify)
    failures = iter(range(2))  # the step is repeated, and then divided

    def fails(name: str, _args: object) -> bool:
        return name == "aten.addmm.default" and next(failures, None) is not None

    with OutOfMemoryAt(fails=fails), pytest.warns(UserWarning, match="micro-batches of 4 in place of 8"):
        step(torch.rand(2, 8))  # type: ignore[operator]
    for _ in range(2):
        with pytest.raises(EquivalenceError, match="is NOT the same training"):
            step(torch.rand(8, 8))  # type: ignore[operator]


def test_a_comparison_that_was_not_made_is_not_claimed() -> None:
    job, _batch = ignoring(6, counted=False)
    with pytest.raises(EquivalenceError) as refused:
        bf.plan(job, "cpu", global_batch_size=16, micro_batch_size=4)
    assert "a mean over labels other than -100" in str(refused.value)
    assert "compared on" not in str(refused.value)


def test_a_batch_that_is_not_split_is_not_checked() -> None:
    _model, step = applied(sum_loss, bf.Settings(micro_batch_size=8))
    step(torch.rand(8, 8))  # type: ignore[operator]


def test_training_says_when_a_split_could_not_be_compared() -> None:
    with pytest.warns(UserWarning, match="split into 4 micro-batches.*could not be checked"):
        bf.fit(job_of(mixup_loss), SPLIT, epochs=1, show_progress=False)
    with pytest.raises(EquivalenceError, match="is NOT the same training"):
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
    with pytest.raises(EquivalenceError, match="is NOT the same training"):
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
    with pytest.raises(EquivalenceError, match="is NOT the same training"):
        bf.apply(settings, job, model, torch.optim.SGD(model.parameters(), 0.1))(batch)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_ignored_labels_of_a_later_batch_give_a_warning_whatever_their_type(dtype: torch.dtype) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        labels = batch["y"].long()
        kept = labels != -100
        return F.mse_loss(model(batch["x"]), batch["x"]) + 0 * F.cross_entropy(batch["x"], labels * kept)

    batch = {"x": torch.randn(8, 8), "y": torch.arange(8).to(dtype)}
    job = bf.Job(model=lambda: nn.Linear(8, 8), loss=loss, batch=batch, optimizer="sgd")
    model = job.model()  # type: ignore[operator]
    step = bf.apply(SPLIT, job, model, torch.optim.SGD(model.parameters(), 0.1))
    step(batch)
    later = {"x": batch["x"], "y": batch["y"].clone().index_fill_(0, torch.tensor([1]), -100)}
    with pytest.warns(UserWarning, match=r"labels of -100, 0 to 1 in a sample"):
        step(later)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ignored_labels_that_are_not_counted_are_refused_whatever_the_weights_are_rounded_to(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    labels = torch.randint(0, 64, (8, 32))
    for index in range(8):
        labels[index, 8 + 3 * index :] = -100
    batch = {"x": torch.randn(8, 32, 16), "y": labels}

    def loss(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
        logits = model(part["x"].to(dtype)).float()
        return F.cross_entropy(logits.flatten(0, 1), part["y"].flatten())

    job = bf.Job(model=lambda: nn.Linear(16, 64).to(dtype), loss=loss, batch=batch, optimizer="sgd")
    model = job.model()  # type: ignore[operator]
    with pytest.raises(EquivalenceError, match="is NOT the same training"):
        bf.apply(SPLIT, job, model, torch.optim.SGD(model.parameters(), 0.1))(batch)


def test_a_loss_whose_terms_cancel_is_not_refused_for_their_rounding() -> None:
    """As of a critic: large outputs for both, and a small difference of their means."""

    def critic_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (8 + model(batch["real"])).mean() - (8 + model(batch["fake"])).mean()

    for seed in range(12):
        torch.manual_seed(seed)
        batch = {"real": torch.randn(8, 16), "fake": torch.randn(8, 16)}
        model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
        job = bf.Job(model=model, loss=critic_loss, batch=batch, optimizer="sgd")
        bf.apply(SPLIT, job, model, torch.optim.SGD(model.parameters(), 0.1))(batch)


def test_gradients_that_are_there_are_there_unchanged_after_a_loss_that_runs_backward() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        x = batch.detach().requires_grad_()
        model(x).square().sum().backward(retain_graph=True)
        return model(x).square().mean()

    model = nn.Linear(8, 8)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    job = bf.Job(model=model, loss=loss, batch=lambda n: torch.rand(n, 8))
    compare_split_loss(job, model, torch.rand(8, 8), samples=8, micro_batch_size=2)
    assert all(not parameter.grad.any() for parameter in model.parameters())  # type: ignore[union-attr]


class Follower(nn.Module):
    """A state follows the mean of the outputs, and the loss reads it before or after that."""

    state: Tensor

    def __init__(self, *, reads_before: bool) -> None:
        super().__init__()
        self.linear, self.reads_before = nn.Linear(8, 8), reads_before
        self.register_buffer("state", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y, before = self.linear(x), self.state
        self.state = 0.9 * self.state + 0.1 * y.detach().mean(0)
        return y + (before if self.reads_before else self.state)


def follower_job(*, reads_before: bool, reduction: str = "mean") -> bf.Job:
    return bf.Job(
        model=lambda: Follower(reads_before=reads_before),
        loss=lambda model, batch: getattr(model(batch).square().mean(1), reduction)(),
        batch=lambda n: torch.rand(n, 8),
        optimizer="sgd",
    )


def split_plan(job: bf.Job) -> bf.Plan:
    return bf.plan(job, "RTX 3090", global_batch_size=8, micro_batch_size=2, split_batch_norm=True)


@pytest.mark.parametrize("reads_before", [True, False])
def test_state_that_forwards_update_is_not_taken_for_another_loss(*, reads_before: bool) -> None:
    job = follower_job(reads_before=reads_before)
    plan = split_plan(job)
    assert any("each micro-batch sees other values: 'state'" in note for note in plan.notes)
    report = bf.verify(job, plan)
    assert report.holds
    of_loss = report.comparisons[-1]
    assert bool(of_loss.why_not_compared) is not reads_before  # from the same state it is the mean over samples
    model = Follower(reads_before=reads_before)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bf.apply(plan, job, model, torch.optim.SGD(model.parameters(), 0.1))(torch.rand(8, 8))
    assert any("each forward updates state" in str(each.message) for each in caught)


def spectral(width: int) -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(width, width))


@pytest.mark.parametrize("layer", [nn.BatchNorm1d, spectral])
def test_a_loss_that_compares_samples_is_refused_although_a_layer_couples_them(
    layer: Callable[[int], nn.Module],
) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        embedded = model(batch)
        return F.cross_entropy(embedded @ embedded.T, torch.arange(len(batch)))

    job = bf.Job(
        model=lambda: nn.Sequential(nn.Linear(8, 8), layer(8)),
        loss=loss,
        batch=lambda n: torch.rand(n, 8),
        optimizer="sgd",
    )
    with pytest.raises(EquivalenceError, match="is NOT the same training"):
        split_plan(job)
    assert not bf.verify(job, SPLIT).holds
    model = job.model()  # type: ignore[operator]
    step = bf.apply(SPLIT, job, model, torch.optim.SGD(model.parameters(), 0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(EquivalenceError, match="is NOT the same training"):
            step(torch.rand(8, 8))


def test_a_sum_is_refused_although_forwards_update_state() -> None:
    with pytest.raises(EquivalenceError, match=r'Job\(reduction="sum"\)'):
        split_plan(follower_job(reads_before=True, reduction="sum"))


COUPLED_LAYERS = {
    "BatchNorm": (nn.BatchNorm1d, "1 BatchNorm layer normalises over micro-batches of 2"),
    "spectral norm": (spectral, "each forward updates state that the next one reads: 4 times a step"),
}


@pytest.mark.parametrize("kind", COUPLED_LAYERS)
def test_layers_that_depend_on_the_micro_batch_are_named_before_the_first_step(kind: str) -> None:
    layer, message = COUPLED_LAYERS[kind]
    job = replace(job_of(mean_loss), model=lambda: nn.Sequential(nn.Linear(8, 8), layer(8)))
    model = job.model()  # type: ignore[operator]
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    step = bf.apply(SPLIT, job, model, torch.optim.SGD(model.parameters(), 0.0))
    with pytest.warns(UserWarning, match=message):
        step(torch.rand(8, 8))
    step(torch.rand(8, 8))  # said once: a second warning would fail the test
    # The check itself changes no buffer: those of a model that is not checked come out the same.
    torch.manual_seed(0)
    batch = torch.rand(8, 8)
    found = []
    for verify in (True, False):
        model.load_state_dict({**model.state_dict(), **buffers})
        torch.manual_seed(1)
        step = bf.apply(SPLIT, job, model, torch.optim.SGD(model.parameters(), 0.0), verify=verify)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step(batch)
        found.append({name: value.clone() for name, value in model.named_buffers()})
        step.remove()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())

    with pytest.warns(UserWarning, match=message):
        bf.fit(job, SPLIT, steps=1, show_progress=False)
    certificate = bf.verify(job, SPLIT)
    assert certificate.holds
    assert "except for layers that depend on the micro-batch" in str(certificate)


def test_an_optimizer_that_cannot_be_used_is_refused_by_certify_too() -> None:
    job = replace(job_of(mean_loss), optimizer=torch.optim.LBFGS)
    with pytest.raises(bf.BrimfulError, match="LBFGS computes the loss several times"):
        bf.verify(job, SPLIT)


def gradient_penalty(model: nn.Module, batch: Tensor) -> Tensor:
    batch = batch.detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
    return slope.square().mean()


def test_layers_with_a_state_are_found_with_a_loss_that_asks_for_gradients() -> None:
    job = replace(job_of(gradient_penalty), model=lambda: nn.Sequential(nn.Linear(8, 8), spectral(8)))
    model = job.model()  # type: ignore[operator]
    step = bf.apply(SPLIT, job, model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.warns(UserWarning, match="each forward updates state that the next one reads"):
        step(torch.rand(8, 8))
    parameters = list(model.parameters())
    assert all(parameter.grad is None for parameter in parameters)


def test_a_buffer_of_nan_that_stays_is_not_taken_for_a_state() -> None:
    class WithNaN(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.register_buffer("empty", torch.full((2,), torch.nan))

    job = replace(job_of(mean_loss), model=WithNaN)
    model = job.model()  # type: ignore[operator]
    bf.apply(SPLIT, job, model, torch.optim.SGD(model.parameters(), 0.1))(torch.rand(8, 8))  # without a warning


def test_ignored_labels_of_the_data_are_refused_where_the_loss_is_known_to_ignore_them() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    batch = {"x": torch.randn(8, 8), "y": torch.arange(8)}
    job = bf.Job(model=lambda: nn.Linear(8, 8), loss=loss, batch=batch, optimizer="sgd")
    model = job.model()  # type: ignore[operator]
    step = bf.apply(SPLIT, job, model, torch.optim.SGD(model.parameters(), 0.1))
    step(batch)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    later = {"x": batch["x"], "y": batch["y"].clone().index_fill_(0, torch.tensor([1]), -100)}
    for _ in range(2):  # not only once
        with pytest.raises(EquivalenceError, match=r'count=lambda batch: \(batch\["y"\] != -100\).sum'):
            step(later)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_model_on_the_meta_device_is_refused() -> None:
    job = bf.Job(
        model=lambda: nn.Linear(8, 8), loss=lambda m, b: m(b).mean(), batch=torch.ones(8, 8), optimizer="sgd"
    )
    model = nn.Linear(8, 8, device="meta")
    with pytest.raises(UsageError, match=r"meta device.*to_empty"):
        bf.apply(SPLIT, job, model, torch.optim.SGD(model.parameters(), 0.1))
