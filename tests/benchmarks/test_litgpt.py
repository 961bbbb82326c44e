"""LitGPT's published table: the summary follows from the rows, and layers are as they were then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import litgpt

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "litgpt.json"


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
    return found


def test_the_summary_follows_from_the_rows(result: dict[str, Any]) -> None:
    assert result["summary"] == litgpt.summarise(result["rows"])


def test_errors_follow_from_published_and_predicted(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        published, minutes = row["published_gb"], row["published_minutes"]
        if published is None:
            assert row["error_fraction"] is row["time_error_fraction"] is minutes is None
            continue
        assert row["error_fraction"] == pytest.approx(row["predicted_gb"] / published - 1, abs=2e-4)
        assert row["time_error_fraction"] == pytest.approx(row["predicted_minutes"] / minutes - 1, abs=2e-3)


def test_the_adapters_have_the_published_parameters(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        assert row["trainable_parameters"] == row["published_trainable_parameters"]


def test_memory_is_within_five_percent_and_every_verdict_agrees(result: dict[str, Any]) -> None:
    summary = result["summary"]
    assert summary["memory"]["median_error_fraction"] <= 0.05
    assert summary["verdicts_that_agree"] == summary["rows"] == 21
    assert [row["published_gb"] for row in result["rows"]].count(None) == summary["out_of_memory"] == 4


def test_only_quantised_rows_and_those_of_llama_have_variants(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        names = [name for name, _ in litgpt.variants_of(row)]
        assert list(row["variants"]) == names


def test_products_of_the_old_library_are_the_same_and_keep_their_inputs() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    layer = bitsandbytes.nn.Linear4bit(64, 32, quant_type="nf4", compute_dtype=torch.float32)
    layer = layer.to("cpu")
    inputs = torch.randn(3, 64, requires_grad=True)
    today = layer(inputs)
    (gradient,) = torch.autograd.grad(today.square().sum(), inputs)
    litgpt._override(layer, litgpt._product_0411)
    old = layer(inputs)
    torch.testing.assert_close(old, today)
    torch.testing.assert_close(torch.autograd.grad(old.square().sum(), inputs)[0], gradient)
    assert old.grad_fn.kept[0] is inputs


def test_norms_in_float32_return_the_type_of_their_inputs() -> None:
    class RMSNorm(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            self.seen = inputs.dtype
            return inputs

    norm = RMSNorm()
    litgpt._override(norm, litgpt._in_float32)
    assert norm(torch.ones(2, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert norm.seen is torch.float32
