"""Python code in the model or loss that reads values of tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brimful.errors import CaptureError
from brimful.trace import Phase
from helpers.captured_jobs import CLASSES, INPUTS, SAMPLES, capture, job, made_by, mlp, ops, rows


def loss_that(read: object) -> object:
    """A loss that calls `read` on the batch, then computes the cross-entropy."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        read(batch)  # type: ignore[operator]
        return F.cross_entropy(model(batch["x"]), batch["y"])

    return loss


def test_ctc_knows_its_table_from_the_lengths_of_the_targets() -> None:
    longest, steps = 5, 30

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        log_probs = model(batch["x"]).log_softmax(-1).transpose(0, 1)
        given = torch.full((SAMPLES,), steps)
        return F.ctc_loss(log_probs, batch["targets"], given, batch["lengths"])

    def batch(samples: int) -> dict[str, Tensor]:
        return {
            "x": torch.randn(samples, steps, INPUTS),
            "targets": torch.randint(1, CLASSES, (samples, 9)),
            "lengths": torch.tensor([longest] + [2] * (samples - 1)),
        }

    trace = capture(job(lambda: nn.Linear(INPUTS, CLASSES), loss=loss, batch=batch))
    losses, table = made_by(trace, "aten._ctc_loss.Tensor")
    assert losses.size_bytes == SAMPLES * 4
    assert table.size_bytes == SAMPLES * steps * (2 * longest + 1) * 4


def test_integers_of_the_batch_and_what_is_computed_from_them_are_known() -> None:
    seen: list[object] = []

    def read(batch: dict[str, Tensor]) -> None:
        labels = batch["y"]
        seen.append(labels.max().item())
        seen.append(bool((labels >= 0).all()))
        seen.append(int((labels[1:] != labels[:-1]).cumsum(0)[-1]))
        seen.append(torch.arange(7).sum().item())
        seen.append(torch.equal(labels, labels.clone()))

    def batch(samples: int) -> dict[str, Tensor]:
        return rows(samples) | {"y": torch.arange(samples) % CLASSES}

    trace = capture(job(loss=loss_that(read), batch=batch))
    assert seen[:5] == [CLASSES - 1, True, SAMPLES - 1, 21, True]
    assert trace.uncertain_ops == ()


def test_writes_in_place_are_followed_and_leave_the_batch_as_it_was() -> None:
    seen: list[int] = []
    real = torch.arange(SAMPLES) % CLASSES

    def read(batch: dict[str, Tensor]) -> None:
        labels = batch["y"]
        labels[0] = 3
        labels.view(-1)[1:2].add_(1)
        seen.append(labels[:2].sum().item())
        labels[0] = 0
        labels[1:2] -= 1

    capture(job(loss=loss_that(read), batch=lambda n: {"x": torch.randn(n, INPUTS), "y": real}))
    assert seen == [5, 5]
    assert torch.equal(real, torch.arange(SAMPLES) % CLASSES)


def test_a_buffer_of_integers_is_known() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("limit", torch.tensor([3, 1, 4]))
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            assert self.limit.max() == 4
            return self.inner(x)

    assert capture(job(Positions)).uncertain_ops == ()


def test_a_value_that_is_not_known_reads_as_1_and_is_named() -> None:
    class Reader(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.max().item()

    def model() -> nn.Module:
        return nn.Sequential(mlp(), Reader())

    trace = capture(job(model))
    assert trace.uncertain_ops == ("a number read from a tensor in '1'",)


def test_integers_that_come_from_unknown_values_are_not_known() -> None:
    def read(batch: dict[str, Tensor]) -> None:
        batch["y"][:2] = batch["x"][:2, 0].long()  # unknown is written over known
        batch["y"].max().item()

    (named,) = capture(job(loss=loss_that(read))).uncertain_ops
    assert "<loss>" in named


def test_a_mask_of_known_values_selects_as_many_rows_as_it_does_for_real() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        kept = batch["y"] < 2
        logits = model(batch["x"])[kept]
        assert logits.shape[0] == 4
        assert batch["y"].nonzero().shape == (6, 1)
        assert torch.masked_select(model(batch["x"]), kept[:, None]).numel() == 4 * CLASSES
        return F.cross_entropy(logits, batch["y"][kept])

    def batch(samples: int) -> dict[str, Tensor]:
        return rows(samples) | {"y": torch.tensor([0, 1, 2, 3] * (samples // 4))}

    trace = capture(job(loss=loss, batch=batch))
    assert made_by(trace, "aten.index.Tensor")[0].size_bytes == 4 * CLASSES * 4
    assert ops(trace, "aten.index_put", Phase.BACKWARD)


def test_a_mask_of_unknown_values_is_a_capture_error_that_says_where() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["x"])
        return logits[logits > 0].mean()

    with pytest.raises(
        CaptureError, match=r"one step of 'job' cannot be run on fake tensors .*micro_batch_size=8"
    ):
        capture(job(loss=loss))
