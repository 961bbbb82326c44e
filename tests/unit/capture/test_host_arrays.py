"""Losses and loops that read tensors as NumPy arrays or lists."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from sklearn.metrics import accuracy_score
from torch import Tensor, nn

from brimful.capture import capture_step
from brimful.errors import CaptureError
from brimful.job import Job
from brimful.memory import predict_memory
from brimful.profiling import measure_step
from brimful.settings import ChunkedLoss, Settings
from brimful.trace import Category, Trace
from helpers.captured_jobs import A100, CPU, bytes_of, capture, loop_of, made_by

QUERIES, WIDTH, CLASSES = 32, 16, 4


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.boxes = nn.Linear(WIDTH, 2048), nn.Linear(2048, QUERIES * CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.boxes(self.body(x).relu()).unflatten(-1, (QUERIES, CLASSES))


def samples(count: int) -> dict[str, Tensor]:
    labels = torch.arange(count * QUERIES).view(count, QUERIES) % CLASSES
    return {"x": torch.randn(count, WIDTH), "boxes": torch.randn(count, QUERIES, CLASSES), "labels": labels}


def matched(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """As detection transformers are trained: each target is matched with a query by SciPy."""
    predicted, losses = model(batch["x"]), []
    for boxes, targets in zip(predicted, batch["boxes"], strict=True):
        costs = torch.cdist(boxes, targets).detach().cpu().numpy()
        queries, matches = (torch.as_tensor(each) for each in linear_sum_assignment(costs))
        losses.append(F.l1_loss(boxes[queries], targets[matches]))
    return torch.stack(losses).mean()


def with_metrics(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["x"])
    found = logits.detach().argmax(-1).cpu().numpy().ravel()
    assert 0 <= accuracy_score(batch["labels"].numpy().ravel(), found) <= 1
    loss: Tensor = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    assert np.isfinite(np.asarray(loss.detach()))
    assert np.isfinite(loss.detach().cpu().numpy()).all()
    return loss


def weighted_by_numpy(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["x"])
    weights = torch.from_numpy(np.exp(-logits.detach().numpy()))
    return (logits * weights).mean()


def job(loss: Callable[..., Any], **others: Any) -> Job:
    return Job(model=Detector, loss=loss, batch=samples, **others)


def traced(loss: Callable[..., Any], device: Any = CPU) -> Trace:
    return capture(job(loss), device, samples=64)


@pytest.mark.parametrize(
    ("loss", "within"),
    [
        (matched, 0.01),  # where NumPy's memory is, torch does not count it, and what is measured is the most
        (with_metrics, 0.001),
        (weighted_by_numpy, 0.01),
    ],
)
def test_a_loss_that_reads_arrays_takes_what_is_predicted(loss: Callable[..., Any], within: float) -> None:
    predicted = predict_memory(traced(loss)).peak_allocated_bytes
    measured = measure_step(job(loss), Settings(micro_batch_size=64), steps=1).measured_peak_allocated_bytes
    assert predicted == pytest.approx(measured, rel=within)


@pytest.mark.parametrize("device", [CPU, A100])
def test_unknown_numbers_are_told_and_known_ones_are_not(device: Any) -> None:
    told = traced(matched, device).uncertain_ops
    assert any("numbers read from a tensor in" in uncertain for uncertain in told)

    def by_labels(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        chosen = torch.from_numpy(np.flatnonzero(batch["labels"].numpy() == 1))
        return model(batch["x"]).flatten(0, 1)[chosen].square().mean()

    trace = traced(by_labels, device)
    assert trace.uncertain_ops == ()
    assert trace.sizes_depend_on_values
    chosen = {storage.size_bytes for storage in made_by(trace, "aten.index")}
    assert chosen == {64 * QUERIES // CLASSES * CLASSES * 4}


def reading(read: Callable[[Tensor], object]) -> list[Any]:
    """What a loss reads of its values: activations, one of them, whole numbers, a condition, and the labels."""

    class Found:  # a capture restores what closures hold, and not what a class holds
        values: list[Any] = []  # noqa: RUF012

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["x"])
        values = logits.detach()
        of_batch = (values[0], values.mean(), values[0].argmax(-1), values > 0, batch["labels"])
        Found.values = list(map(read, of_batch))
        return logits.mean()

    traced(loss)
    return Found.values


@pytest.mark.parametrize(
    "read",
    [
        lambda tensor: tensor.numpy(),
        np.asarray,
        lambda tensor: np.array(tensor.tolist()),
        lambda tensor: tensor.requires_grad_(tensor.is_floating_point()).numpy(force=True),
    ],
)
def test_unknown_numbers_are_plausible(read: Callable[[Tensor], Any]) -> None:
    activations, one, whole, condition, labels = reading(read)
    assert activations.shape == (QUERIES, CLASSES)
    assert (activations >= 0.5).all()
    assert (activations <= 1.5).all()
    assert np.linalg.matrix_rank(activations) == CLASSES
    assert one == 1
    assert set(whole.tolist()) <= set(range(CLASSES)), "of an argmax, indices that there are"
    assert condition.all()
    assert (labels == samples(64)["labels"].numpy()).all()


def test_arrays_are_of_the_type_of_their_tensor_and_may_be_written_to() -> None:
    arrays = reading(lambda tensor: tensor.numpy())
    assert [array.dtype.name for array in arrays] == ["float32", "float32", "int64", "bool", "int64"]
    for array in arrays:
        array[...] = 0
    assert reading(lambda tensor: tensor.numpy())[4].any()  # the batch stays as it was


def test_what_a_real_tensor_refuses_is_refused() -> None:
    def attached(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        model(batch["x"]).numpy()
        raise AssertionError("unreachable")

    with pytest.raises(CaptureError, match=r"Can't call numpy\(\) on Tensor that requires grad"):
        traced(attached)


def test_arrays_that_go_to_a_gpu_are_copied_there() -> None:
    def moved(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["x"].cuda())
        weights = torch.from_numpy(np.ones(logits.shape, np.float32)).cuda()
        return (logits * weights).mean()

    def without(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"].cuda()).mean()

    weights_bytes = 64 * QUERIES * CLASSES * 4
    moved_bytes, without_bytes = (
        bytes_of(
            capture_step(job(loss, loop=loop_of(loss)), Settings(micro_batch_size=64), A100), Category.INPUTS
        )
        for loss in (moved, without)
    )
    assert moved_bytes - without_bytes == 2 * weights_bytes


def test_a_list_goes_to_the_device_of_another_tensor() -> None:
    """There the device of a tensor is the GPU; in the capture it is the CPU, where the fakes are."""

    def indexed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["x"])
        columns = torch.tensor([*range(CLASSES)], device=logits.device)
        return logits.index_select(-1, columns).mean()

    def on_host(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        torch.tensor([*range(CLASSES)], device="cpu")
        return model(batch["x"]).mean()

    def listed_bytes(loss: Callable[..., Any], device: Any) -> set[int]:
        return {storage.size_bytes for storage in traced(loss, device).storages if storage.label == "tensor"}

    assert listed_bytes(indexed, A100) == {CLASSES * 8}
    assert listed_bytes(on_host, A100) == set()


@pytest.mark.parametrize("chunked", [None, ChunkedLoss(layer="boxes", chunks=4)])
def test_labels_follow_logits_to_the_gpu_while_the_cpu_stays_the_host(chunked: ChunkedLoss | None) -> None:
    """Logits of a loss in chunks name the GPU as others do: what is put on the CPU stays on the host."""

    def on_the_host(model: Any, batch: dict[str, Tensor], *, follows: bool) -> Tensor:
        hidden = model.body(batch["x"])
        copies = [hidden.detach().cpu() for _ in range(8)]
        logits = model.boxes(hidden)
        labels = batch["labels"].to(logits.device) if follows else batch["labels"]
        loss = F.cross_entropy(logits, labels[:, 0])
        return loss + 0 * copies[0].sum()

    settings = Settings(micro_batch_size=64, chunked_loss=chunked)
    made = (job(partial(on_the_host, follows=follows)) for follows in (True, False))
    following, beside = (capture_step(each, settings, A100, steps=1) for each in made)
    assert following.events == beside.events
    assert predict_memory(following).peak_allocated_bytes == predict_memory(beside).peak_allocated_bytes
