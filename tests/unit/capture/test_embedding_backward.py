"""The gradient of an embedding on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from brimful.trace import Kernel, Trace
from helpers.captured_jobs import A100, CPU, capture, job

ROWS, WIDTH = 500, 16


def embedding_bytes(
    tokens: int, rows: int, width: int, *, by_frequency: bool = False, sum_bytes: int = 4
) -> int:
    numbers = (108, 2048, tokens, rows, width, 8, sum_bytes, int(by_frequency))
    return Kernel(name="embedding backward", numbers=numbers).size_bytes()


def test_up_to_3072_tokens_are_added_up_without_sorting() -> None:
    assert embedding_bytes(3072, ROWS, WIDTH) == 0
    assert embedding_bytes(3073, ROWS, WIDTH) > 0
    assert embedding_bytes(10, ROWS, WIDTH, by_frequency=True) > 0


def test_more_tokens_take_sorted_indices_and_sums_in_float32() -> None:
    # 4000 tokens of 500 rows: 3 · 4000 + 2 · 500 + (400 + 500) indices of 8 bytes, 900 sums of 16 numbers
    assert embedding_bytes(4000, 500, 16) == 13900 * 8 + 900 * 16 * 4
    # fewer tokens than rows: at most as many runs as tokens
    assert embedding_bytes(4000, 50000, 16) == (12000 + 8000 + 4400) * 8 + 4400 * 16 * 4
    assert embedding_bytes(4000, 500, 16, by_frequency=True) == 17900 * 8 + 900 * 16 * 4


def trained(samples: int, device: object = A100) -> Trace:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    tokens = job(lambda: nn.Embedding(ROWS, WIDTH), loss=loss, batch=lambda n: torch.randint(0, ROWS, (n, 100)))
    return capture(tokens, device, samples=samples)


def sorting_bytes(trace: Trace) -> set[int]:
    return {s.size_bytes for s in trace.storages if s.label == "inside aten.embedding_dense_backward.default"}


def test_an_embedding_takes_it_on_cuda_alone() -> None:
    assert sorting_bytes(trained(40)) == {13900 * 8 + 900 * 16 * 4}
    assert sorting_bytes(trained(30)) == {0}
    assert not sorting_bytes(trained(40, CPU))


def test_a_trace_scaled_from_few_tokens_sorts_where_a_batch_of_many_would() -> None:
    scaled = trained(1).at_micro_batch_size(trained(3), 40)
    assert sorting_bytes(scaled) == sorting_bytes(trained(40))
