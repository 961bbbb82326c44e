"""Bytes that ops read and write."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brimful.trace import Op
from helpers.captured_jobs import A100, capture, job, ops

ROWS, COLUMNS = 64, 128
ROW = COLUMNS * 4
ALL = ROWS * ROW
"""Bytes of `y`, the output of a linear layer: (ROWS, COLUMNS) float32."""
INDEX = 8


def ops_of(loss: Callable[[Tensor], Tensor], name: str) -> list[Op]:
    """Ops of one step whose loss is computed from `y`."""
    trace = capture(
        job(
            lambda: nn.Linear(COLUMNS, COLUMNS),
            lambda model, x: loss(model(x)),
            lambda count: torch.randn(count, COLUMNS),
            optimizer="sgd",
        ),
        A100,
        samples=ROWS,
    )
    return [op for op in ops(trace, f"aten.{name}.") if op.phase != "optimizer"]


def moved(loss: Callable[[Tensor], Tensor], name: str) -> list[tuple[int, int]]:
    return [(op.read_bytes, op.written_bytes) for op in ops_of(loss, name) if op.written_bytes != 4]


@pytest.mark.parametrize("name", ["randn_like", "rand_like", "zeros_like", "ones_like"])
def test_what_is_made_like_a_tensor_reads_nothing(name: str) -> None:
    assert moved(lambda y: (y * getattr(torch, name)(y.detach())).sum(), name) == [(0, ALL)]


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("full_like", lambda y: torch.full_like(y, 2.0)),
        ("new_zeros", lambda y: y.new_zeros(y.shape)),
        ("new_ones", lambda y: y.new_ones(y.shape)),
        ("new_full", lambda y: y.new_full(y.shape, 2.0)),
        ("zero_", lambda y: torch.empty_like(y).zero_()),
        ("fill_", lambda y: torch.empty_like(y).fill_(2.0)),
        ("uniform_", lambda y: torch.empty_like(y).uniform_()),
        ("normal_", lambda y: torch.empty_like(y).normal_()),
        ("bernoulli_", lambda y: torch.empty_like(y).bernoulli_(0.5)),
    ],
)
def test_what_is_filled_or_drawn_reads_nothing(name: str, make: Callable[[Tensor], Tensor]) -> None:
    assert moved(lambda y: (y * make(y.detach())).sum(), name) == [(0, ALL)]


def test_what_is_only_allocated_moves_nothing() -> None:
    def loss(y: Tensor) -> Tensor:
        for _made in (torch.empty_like(y), y.new_empty(y.shape), y.new_empty_strided((4, 4), (4, 1))):
            pass
        return y.sum()

    for name in ("empty_like", "new_empty", "new_empty_strided"):
        assert (0, 0) in moved(loss, name)
        assert set(moved(loss, name)) == {(0, 0)}


def test_a_copy_reads_its_source_alone() -> None:
    assert moved(lambda y: (torch.empty_like(y).copy_(y) * 2).sum(), "copy_") == [(ALL, ALL)]


def test_a_loss_of_classes_reads_one_number_of_each_row_and_its_backward_fills_and_writes_them() -> None:
    def loss(y: Tensor) -> Tensor:
        return F.cross_entropy(y, torch.zeros(len(y), dtype=torch.long))

    assert moved(loss, "nll_loss_forward") == [(ROWS * (4 + INDEX), 4 + 4)]
    assert moved(loss, "nll_loss_backward") == [(4 + ROWS * INDEX + 4, ALL + ROWS * 4)]


def test_the_weights_of_classes_are_read_once_for_each_row() -> None:
    def loss(y: Tensor) -> Tensor:
        return F.nll_loss(y, torch.zeros(len(y), dtype=torch.long), torch.ones(COLUMNS))

    assert moved(loss, "nll_loss_forward") == [(ROWS * (4 + INDEX + 4), 4 + 4)]


def test_an_embedding_reads_the_rows_that_it_returns() -> None:
    tokens = torch.zeros(10, dtype=torch.long)
    assert moved(lambda y: F.embedding(tokens, y).sum(), "embedding") == [(10 * (ROW + INDEX), 10 * ROW)]


def test_a_tensor_passed_twice_is_read_once_whichever_call_comes_first() -> None:
    def loss(y: Tensor) -> Tensor:
        z = torch.ones_like(y)
        return (z * y + y * y + y * z + z * z).sum()

    assert moved(loss, "mul")[:4] == [(2 * ALL, ALL), (ALL, ALL), (2 * ALL, ALL), (ALL, ALL)]


def test_halves_of_a_tensor_are_two_operands() -> None:
    def loss(y: Tensor) -> Tensor:
        first, second = y.chunk(2, -1)
        return (first * second).sum()

    assert moved(loss, "mul")[0] == (ALL, ALL // 2)


def test_the_backward_of_a_slice_fills_all_and_writes_the_slice() -> None:
    assert moved(lambda y: y[:, :4].square().sum(), "slice_backward") == [(ROWS * 16, ALL + ROWS * 16)]
    assert moved(lambda y: y[0].square().sum(), "select_backward") == [(ROW, ALL + ROW)]


def test_what_is_expanded_is_read_by_the_elements_that_it_has() -> None:
    def loss(y: Tensor) -> Tensor:
        return (y + torch.ones(COLUMNS).expand_as(y) + y.detach()[:, :1].expand_as(y)).sum()

    assert moved(loss, "add") == [(ALL + ROW, ALL), (ALL + ROWS * 4, ALL)]
    assert moved(lambda y: y.sum() * 2, "sum")[0] == (4, ROW)  # of the bias, from the gradient of the sum


@pytest.mark.parametrize(
    ("name", "add", "reads_target"),
    [
        ("index_add_", lambda z, rows: z.index_add_(0, torch.tensor([1, 2]), rows), True),
        ("index_copy_", lambda z, rows: z.index_copy_(0, torch.tensor([1, 2]), rows), False),
        (
            "scatter_add_",
            lambda z, rows: z.scatter_add_(0, torch.zeros(2, COLUMNS, dtype=torch.long), rows),
            True,
        ),
        ("scatter_", lambda z, rows: z.scatter_(0, torch.zeros(2, COLUMNS, dtype=torch.long), rows), False),
    ],
)
def test_rows_written_in_place_move_as_much_as_they_are(
    name: str, add: Callable[[Tensor, Tensor], Tensor], reads_target: bool
) -> None:
    index_bytes = INDEX * (2 if name.startswith("index") else 2 * COLUMNS)
    found = moved(lambda y: add(torch.zeros_like(y), y[:2] * 2).sum(), name)
    assert found == [(index_bytes + 2 * ROW * (2 if reads_target else 1), 2 * ROW)]
