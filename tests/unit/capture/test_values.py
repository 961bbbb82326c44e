"""Python code in the model or loss that reads values of tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brimful.trace import Phase
from helpers.captured_jobs import CLASSES, INPUTS, SAMPLES, capture, job, made_by, mlp, ops, rows


class Seen:
    """What code of a job saw: a capture restores what closures hold, and not what a class holds."""

    values: list[object] = []  # noqa: RUF012


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    Seen.values = []


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
    def read(batch: dict[str, Tensor]) -> None:
        labels = batch["y"]
        Seen.values.append(labels.max().item())
        Seen.values.append(bool((labels >= 0).all()))
        Seen.values.append(int((labels[1:] != labels[:-1]).cumsum(0)[-1]))
        Seen.values.append(torch.arange(7).sum().item())
        Seen.values.append(torch.equal(labels, labels.clone()))

    def batch(samples: int) -> dict[str, Tensor]:
        return rows(samples) | {"y": torch.arange(samples) % CLASSES}

    trace = capture(job(loss=loss_that(read), batch=batch))
    assert Seen.values[:5] == [CLASSES - 1, True, SAMPLES - 1, 21, True]
    assert trace.uncertain_ops == ()


def test_writes_in_place_are_followed_and_leave_the_batch_as_it_was() -> None:
    real = torch.arange(SAMPLES) % CLASSES

    def read(batch: dict[str, Tensor]) -> None:
        labels = batch["y"]
        labels[0] = 3
        labels.view(-1)[1:2].add_(1)
        Seen.values.append(labels[:2].sum().item())
        labels[0] = 0
        labels[1:2] -= 1

    capture(job(loss=loss_that(read), batch=lambda n: {"x": torch.randn(n, INPUTS), "y": real}))
    assert Seen.values
    assert set(Seen.values) == {5}
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
        batch["y"][:2] = torch.randn(2).long()  # unknown is written over known
        batch["y"].max().item()

    (named,) = capture(job(loss=loss_that(read))).uncertain_ops
    assert "the loss" in named


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


def test_a_mask_of_unknown_values_is_taken_for_true_everywhere_and_named() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["x"])
        is_kept = logits[:, 0] > 0
        kept = logits[is_kept]
        assert len(kept) == SAMPLES
        assert is_kept.sum().item() == SAMPLES  # from then on it counts as such
        assert is_kept.nonzero().shape == (SAMPLES, 1)
        assert torch.masked_select(logits, logits > 0).shape == (SAMPLES * CLASSES,)
        assert [positions.tolist() for positions in torch.where(logits[:2, :1] > 0)] == [[0, 1], [0, 0]]
        return kept.mean()

    named = capture(job(loss=loss)).uncertain_ops
    assert "aten.index.Tensor in the loss, assumed at its largest possible size" in named


def test_all_elements_of_unknown_values_are_taken_to_differ() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["x"])
        rounded = logits.detach().round()
        each, back, counts = torch.unique(rounded, return_inverse=True, return_counts=True)
        assert each.shape == counts.shape == (SAMPLES * CLASSES,)
        assert each[back].shape == rounded.shape
        assert torch.unique(rounded > 0).shape == (2,)
        assert torch.unique(rounded, dim=0).shape == rounded.shape
        assert torch.bincount(rounded[0].long(), minlength=CLASSES + 2).shape == (CLASSES + 2,)
        return logits.mean()

    capture(job(loss=loss))


def test_a_large_mask_costs_no_memory_for_its_positions() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = model(batch["x"]).sum() + torch.zeros(2**13, 2**13)
        assert x[x > 0].shape == (x > 0).nonzero()[:, 0].shape == (2**26,)
        return x[x > 0].mean()

    capture(job(loss=loss))


def test_small_numbers_are_followed_as_far_as_the_batch_decides_them() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        added = (1.0 - batch["mask"].float()) * -10000.0
        assert (added == 0).all()
        assert not bool((added < 0).any())
        total = torch.zeros(3)
        total += 2
        assert total.sum().item() == 6
        total.view(1, 3)[:, :1].copy_(model(batch["x"]).detach()[:1, :1])
        total.sum().item()  # unknown now
        return model(batch["x"]).mean()

    def batch(samples: int) -> dict[str, Tensor]:
        return {"x": torch.randn(samples, INPUTS), "mask": torch.ones(samples, 4, dtype=torch.long)}

    (named,) = capture(job(loss=loss, batch=batch)).uncertain_ops
    assert "a number read" in named


def test_views_by_strides_of_what_is_filled_with_one_number_are_not_known() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        filled = torch.zeros(6, 4)
        filled.as_strided((3, 4), (8, 1)).sum()
        filled += 1
        assert filled.sum().item() == 24
        filled.as_strided((3, 4), (8, 1)).add_(1)
        assert filled.sum().item() == 36
        return model(batch["x"]).mean()

    assert capture(job(loss=loss)).uncertain_ops == ()


def test_what_a_cpu_has_no_kernel_for_is_not_known() -> None:
    halves = torch.ones(2, 3, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="not implemented for 'Half'"):
        torch.cdist(halves, halves)

    def read(_batch: dict[str, Tensor]) -> None:
        points = torch.ones(2, 3, dtype=torch.float16)
        torch.cdist(points, points).max().item()

    (named,) = capture(job(loss=loss_that(read))).uncertain_ops
    assert "a number read" in named


def test_what_is_drawn_in_place_over_known_values_is_not_known() -> None:
    def read(batch: dict[str, Tensor]) -> None:
        batch["y"].random_(0, 3)
        batch["y"].max().item()

    (named,) = capture(job(loss=loss_that(read))).uncertain_ops
    assert "a number read" in named


@pytest.mark.parametrize("rate", [0.1, 0.9])
def test_a_layer_dropped_at_random_is_there_if_that_is_likelier(rate: float) -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(INPUTS, INPUTS) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if torch.rand([]) < rate:
                    continue
                x = layer(x)
            return x

    trace = capture(job(lambda: nn.Sequential(Dropped(), mlp())))
    ran = {op.module for op in ops(trace, "aten.addmm", Phase.FORWARD)} & {f"0.layers.{i}" for i in range(3)}
    assert len(ran) == (3 if rate < 0.5 else 0)
    assert "a number drawn at random in '0', taken for its mean" in trace.uncertain_ops


def test_an_unknown_number_has_the_type_of_its_tensor() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["x"])
        Seen.values.extend([logits.argmax().item(), logits.max().item(), (logits > 0).any().item()])
        Seen.values.append(torch.equal(logits, logits + 1))
        assert f"layer {logits.argmax()}" == "layer 1"
        return logits.mean()

    capture(job(loss=loss))
    assert Seen.values[:4] == [1, 1.0, True, True]
    assert list(map(type, Seen.values[:4])) == [int, float, bool, bool]
