"""Arithmetic that autocast leaves in float32 is noted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import brimful as bf


class Experts(nn.Module):
    """A layer of four experts."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 64, 64, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1).to(self.weight.dtype)
        ends = torch.arange(1, 5, dtype=torch.int32, device=x.device) * (len(rows) // 4)
        return torch._grouped_mm(rows, self.weight, ends)


def notes(module: nn.Module, precision: str) -> str:
    job = bf.Job(
        model=module,
        loss=lambda model, x: model(x).float().mean(),
        batch=lambda count: torch.zeros(count, 16, 64),
        optimizer="sgd",
    )
    return "\n".join(bf.estimate(job, "A100 80GB SXM", micro_batch_size=4, precision=precision).notes)


def test_a_grouped_product_of_float32_weights_under_autocast_is_noted() -> None:
    found = notes(Experts(torch.float32), "bf16")
    assert "100% of the arithmetic stays in float32" in found
    assert "aten._grouped_mm" in found


@pytest.mark.parametrize(
    ("module", "precision"),
    [
        (Experts(torch.float32), "fp32"),
        (Experts(torch.bfloat16), "bf16"),
        (nn.Linear(64, 64), "bf16"),
    ],
    ids=["without autocast", "weights in bf16", "autocast has a rule"],
)
def test_what_is_cast_or_not_asked_for_is_not_noted(module: nn.Module, precision: str) -> None:
    assert "float32" not in notes(module, precision)
