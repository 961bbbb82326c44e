"""Odd parts of a job are errors of one line, and the same ones from whatever is done with the job."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import brimful as bf
from brimful.errors import (
    BatchError,
    BrimfulError,
    CallError,
    InfeasibleError,
    LossError,
    UnknownNameError,
    UsageError,
)

# B batch, D width

DEVICE = "RTX 3090"
SETTINGS = bf.Settings(micro_batch_size=2, gradient_accumulation_steps=2)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def batch(samples: int) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, 4), "y": torch.zeros(samples, dtype=torch.long)}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def a_job(**parts: Any) -> bf.Job:
    given = {"model": net, "loss": loss, "batch": batch, "optimizer": sgd} | parts
    make = given["batch"]
    return bf.Job(**{"data": lambda: bf.Data(train=make(8))} | given)


def applied(job: bf.Job) -> None:
    model = job.model()
    bf.apply(SETTINGS, job, model, job.optimizer(model.parameters()))(job.batch(4))


DONE_WITH_A_JOB: dict[str, Callable[[bf.Job], object]] = {
    "estimate": lambda job: bf.estimate(job, DEVICE, micro_batch_size=2),
    "plan": lambda job: bf.plan(job, DEVICE, global_batch_size=4),
    "apply": applied,
    "measure": lambda job: bf.measure(job, SETTINGS, "cpu"),
    "fit": lambda job: bf.fit(job, SETTINGS, epochs=1, show_progress=False),
}


def elsewhere(parameters: Any) -> torch.optim.Optimizer:
    return sgd(net().parameters())


TEMPERATURE = nn.Parameter(torch.ones(()))

ODD: dict[str, tuple[dict[str, Any], type[BrimfulError], str]] = {
    "a complex loss": (
        {"loss": lambda model, batch: loss(model, batch) * torch.ones((), dtype=torch.complex64)},
        LossError,
        r"the loss is complex \(complex64\)",
    ),
    "a number for a loss": (
        {"loss": lambda model, batch: 3.0},
        LossError,
        "the loss is a float, not a tensor",
    ),
    "a batch on the meta device": (
        {"batch": lambda n: batch(n) | {"x": torch.empty(n, 4, device="meta")}},
        BatchError,
        r'batch\["x"\] is on the meta device',
    ),
    "a sparse batch": (
        {"batch": lambda n: batch(n) | {"x": torch.randn(n, 4).to_sparse()}},
        BatchError,
        r'batch\["x"\] is a sparse tensor \(sparse_coo\)',
    ),
    "a batch in sparse rows": (
        {"batch": lambda n: batch(n) | {"x": torch.randn(n, 4).to_sparse_csr()}},
        BatchError,
        r'batch\["x"\] is a sparse tensor \(sparse_csr\)',
    ),
    "a count in words": ({"count": lambda batch: "many"}, BatchError, "returned an object of type str"),
    "a count in digits": ({"count": lambda batch: "5"}, BatchError, "returned an object of type str"),
    "no count": ({"count": lambda batch: None}, BatchError, "returned an object of type NoneType"),
    "several counts": (
        {"count": lambda batch: torch.ones(3)},
        BatchError,
        r"returned a float32 tensor of shape \(3,\)",
    ),
    "a negative count": ({"count": lambda batch: -1}, BatchError, "must be finite and at least 0"),
    "a count that is NaN": (
        {"count": lambda batch: torch.tensor(torch.nan)},
        BatchError,
        "must be finite and at least 0",
    ),
    "no optimizer": ({"optimizer": lambda parameters: None}, UsageError, "of type NoneType"),
    "an optimizer of another model": (
        {"optimizer": elsewhere},
        UsageError,
        r"updates none of the model's parameters, but 4 parameters of shape \(4, 4\), \(4,\), \(3, 4\), ….*"
        r"parameters that Job\.optimizer receives",
    ),
    "an optimizer of the loss's parameter, too": (
        {"optimizer": lambda parameters: sgd([*parameters, TEMPERATURE])},
        UsageError,
        r"updates 1 parameter of shape \(\) that the model does not have.*assign it to a module of the model",
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("done", DONE_WITH_A_JOB)
@pytest.mark.parametrize("name", ODD)
def test_an_odd_part_is_an_error_of_one_line_whatever_is_done_with_the_job(name: str, done: str) -> None:
    parts, error, words = ODD[name]
    with pytest.raises(error, match=words) as raised:
        DONE_WITH_A_JOB[done](a_job(**parts))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("part", "found", "words"),
    [
        ("name", 5, "of type int; it must be text"),
        ("counted", None, "of type NoneType; it must be text"),
        ("model", "gpt2", r"of type str; it must be a function, called as model\(\), or an nn.Module"),
        ("loss", None, r"of type NoneType; it must be a function, called as loss\(model, batch\)"),
        ("weights", "model.safetensors", r"must be a function, called as weights\(model\)"),
        ("count", 5, r"must be a function, called as count\(batch\)"),
        ("embed", 5, r"must be a function, called as embed\(model, batch\)"),
        ("loop", 5, r"must be a function, called as loop\(model, batches\)"),
        ("metrics", {"accuracy": 1.0}, r"must be a function, called as metrics\(model, batch\)"),
        ("optimizer", elsewhere(()), "of type SGD; it must be a name, or a function that makes one"),
        ("data", [1], "of type list; it must be a function that returns a Data"),
        ("about", ["cat"], "of type list; it must be a dict"),
    ],
)
def test_a_part_of_another_kind_is_refused_when_the_job_is_made(part: str, found: object, words: str) -> None:
    with pytest.raises(UsageError, match=rf"Job\({part}=…\) is .*{words}"):
        a_job(**{part: found})


def test_a_count_that_raises_is_the_jobs_error_and_not_that_of_fake_tensors() -> None:
    job = a_job(count=lambda batch: batch["mask"].sum())
    with pytest.raises(BatchError, match=r"count\(batch\) raised KeyError: 'mask'"):
        bf.estimate(job, DEVICE, micro_batch_size=2)


def test_counts_of_any_kind_of_number_are_taken() -> None:
    counts = (2, 2.0, torch.tensor(2), torch.tensor([2]), torch.tensor(2.0).numpy())
    losses = set()
    for count in counts:
        torch.manual_seed(0)
        model = net()
        outcome = bf.apply(
            SETTINGS, a_job(count=lambda _batch, count=count: count), model, sgd(model.parameters())
        )(batch(4))
        losses.add(float(outcome.loss))
    assert len(losses) == 1


@pytest.mark.parametrize("done", DONE_WITH_A_JOB)
def test_an_optimizer_may_update_a_part_of_the_model(done: str) -> None:
    DONE_WITH_A_JOB[done](a_job(optimizer=lambda parameters: sgd([*parameters][-2:])))


def test_an_optimizer_of_frozen_parameters_alone_updates_nothing() -> None:
    model = net()
    model[0].requires_grad_(False)
    with pytest.raises(UsageError, match="updates nothing: none of its parameters requires a gradient"):
        bf.apply(SETTINGS, a_job(), model, sgd(model[0].parameters()))


def test_an_optimizer_over_the_module_a_job_was_given_is_refused_where_it_is_copied() -> None:
    """What is estimated is a copy, which that optimizer would leave as it is."""
    model = net()
    job = a_job(model=model, optimizer=lambda _parameters: sgd(model.parameters()))
    with pytest.raises(UsageError, match=r"parameters that Job\.optimizer receives"):
        bf.estimate(job, DEVICE)


def test_a_plan_is_applied_to_a_module() -> None:
    with pytest.raises(UsageError, match=r"model is .*of type function; it must be an nn\.Module"):
        bf.apply(SETTINGS, a_job(), net, sgd(net().parameters()))


class Stream(IterableDataset):
    """As many samples as it happens to have."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for _ in range(12):
            yield {"x": torch.randn(4), "y": torch.tensor(0)}


class Unsized:
    """Has a length by its class alone."""

    def __len__(self) -> int:
        raise TypeError("object of type 'Unsized' has no len()")

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (batch(4) for _ in range(3))


@pytest.mark.parametrize("make", [lambda: DataLoader(Stream(), batch_size=4), Unsized])
def test_data_that_do_not_tell_their_length_are_trained_on(make: Callable[[], Any]) -> None:
    job = a_job(data=lambda: bf.Data(train=make()))
    result, _plain = bf.fit(job, SETTINGS, epochs=2, show_progress=False)
    assert len(result.losses) == 6


class UnsizedSamples(Unsized):
    def batches(self, size: int, *, seed: int, epoch: int, skip: int = 0) -> Iterator[dict[str, Tensor]]:
        return (batch(size) for _ in range(3))


def test_samples_that_do_not_tell_how_many_they_are_are_refused() -> None:
    job = replace(a_job(), data=lambda: bf.Data(train=UnsizedSamples()))
    with pytest.raises(UsageError, match="do not say how many samples"):
        bf.fit(job, SETTINGS, epochs=1, show_progress=False)


def test_a_loss_with_other_arguments_is_refused_with_how_it_is_called() -> None:
    with pytest.raises(UsageError, match=r"called as loss\(model, batch\), and takes other arguments"):
        bf.Job(model=lambda: nn.Linear(2, 2), loss=lambda output: output.sum(), batch=lambda n: None)
    with pytest.raises(UsageError, match=r"of 'tiny' \(.*test_job\.py:\d+\) .* other arguments: \(output\)"):
        bf.Job(
            model=lambda: nn.Linear(2, 2), loss=lambda output: output.sum(), batch=lambda n: None, name="tiny"
        )
    with pytest.raises(UsageError, match=r"called as loss\(embeddings\)"):
        bf.Job(
            model=lambda: nn.Linear(2, 2),
            embed=lambda model, batch: model(batch),
            loss=lambda model, batch: model(batch).sum(),
            batch=lambda n: None,
        )


@pytest.mark.parametrize(
    "error",
    [
        InfeasibleError("nothing fits", budget_bytes=3, smallest_peak_bytes=5),
        UnknownNameError("device", "RTX 390", ["RTX 3090"]),
        UsageError("odd"),
    ],
)
def test_errors_can_be_sent_to_other_processes(error: BrimfulError) -> None:
    """Their `__init__` takes other arguments than the message."""
    found = pickle.loads(pickle.dumps(error))
    assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bf.Job(loss_fn=None), r"Job\(\) has no option 'loss_fn'; did you mean loss\?"),
        (lambda: bf.Job(nn.Linear(1, 1)), r"Job\(\): too many positional arguments\. It takes \(model=…"),
        (lambda: bf.Job(model=nn.Linear(1, 1)), r"Job\(\): missing a required argument: 'loss'"),
        (lambda: bf.Data(trian=None), r"Data\(\) has no option 'trian'; did you mean train\?"),
        (
            lambda: bf.Settings(micro_batch=1),
            r"Settings\(\) has no option 'micro_batch'; did you mean micro_batch_size",
        ),
    ],
)
def test_other_fields_than_a_record_has_are_refused_with_the_nearest(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(CallError, match=message):
        make()
