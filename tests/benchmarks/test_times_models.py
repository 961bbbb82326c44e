"""Step times of language models and of several GPUs against published ones: tiny models, rows from here."""

from __future__ import annotations

from typing import Any

import pytest

from times import gpus, llm
from times.examples import BertShape, TransformerXlShape
from times.mpt import SHAPES, Shape

TINY = Shape(64, 2, 6, 512)
LLM_ROW = {
    "model": "tiny",
    "sequence_length": "128",
    "gpus": "16",
    "gpu": "a100_80gb",
    "micro_batch_size": "32",
    "accumulation": "1",
    "global_batch_size": "512",
    "tokens_per_second": "1e6",
    "mixed_precision_mode": "DEFAULT",
    "sharding": "FULL_SHARD",
    "activation_checkpointing": "True",
    "parameters": str(2 * 64 + 64 * (512 + 128) + 6 * (12 * 64**2 + 13 * 64)),
}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    return LLM_ROW


def gpu_row(model: str, precision: str = "fp16") -> dict[str, str]:
    return {
        "gpu": "LambdaCloud 8x H100 80GB SXM5",
        "gpus": "8",
        "model": model,
        "precision": precision,
        "batch_size_all_gpus": "32",
        "throughput": "1000",
    }


def test_a_row_of_a_language_model_is_compared_and_few_blocks_stand_for_all(tiny: dict[str, str]) -> None:
    found, whole = llm.compare(tiny), llm.compare_whole(tiny)
    assert found["measured_seconds"] == pytest.approx(512 * 128 / 1e6)
    parts = found["computing_seconds"] + found["exposed_communication_seconds"]
    assert found["predicted_seconds"] == pytest.approx(parts)
    assert 0 < found["exposed_communication_seconds"] <= found["communication_seconds"]
    assert 0 < found["plain_roofline_seconds"] < found["predicted_seconds"]
    assert {"matmul", "attention", "layer_norm", "optimizer"} <= set(found["class_seconds"])
    assert found["recompute_seconds"] > 0
    assert whole["parameters_differ_by"] == 0
    assert whole["verdict"] == "fits"
    assert found["predicted_seconds"] == pytest.approx(whole["predicted_seconds"], rel=0.02)


def test_the_fraction_of_the_peak_that_makes_a_row_right() -> None:
    row = {
        "gpu": "a100_80gb",
        "gpus": 8,
        "tokens": 2048,
        "predicted_seconds": 3.0,
        "measured_seconds": 4.0,
        "work_seconds": {"matmul": 2.0},
        "peak_seconds": {"matmul": 1.5},
    }
    assert llm.fractions([row])["a100_80gb"]["matmul"] == pytest.approx(1.5 / (4.0 - 1.0))


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_a_row_of_several_gpus_is_compared(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    monkeypatch.setitem(gpus.BERT, "bert", BertShape(32, 2, 1, 64, 16))
    monkeypatch.setitem(
        gpus.TRANSFORMER_XL, "transformerxl", TransformerXlShape(32, 2, 1, 64, 0.1, 0.1, 16, 64)
    )
    for model, units in (("bert", 1), ("transformerxl", 16)):
        found = gpus.compare(gpu_row(model, precision))
        assert found["gpu"] == "H100 SXM"
        assert found["batch_size"] == 4
        assert found["measured_seconds"] == pytest.approx(32 * units / 1000)
        assert found["communication_seconds"] > 0
        assert 0 < found["plain_roofline_seconds"] < found["predicted_seconds"]
        assert {"matmul", "batched_matmul", "softmax", "optimizer"} <= set(found["class_seconds"])


def test_resnet_in_fp16_is_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    small = gpus.resnet(blocks=(1, 1))
    monkeypatch.setattr(gpus, "resnet", lambda: small)
    found = gpus.compare(gpu_row("resnet50"))
    assert found["precision"] == "fp16 autocast"
    assert "convolution" in found["class_seconds"]


def test_ratios_of_two_gpus_do_not_depend_on_a_common_factor() -> None:
    def row(gpu: str, measured: float, predicted: float) -> dict[str, Any]:
        common = {"model": "bert", "half": True, "gpus": 1, "gpu": gpu, "batch_size": 8}
        return common | {"measured_seconds": measured, "predicted_seconds": predicted}

    rows = [row("a", 2.0, 1.0), row("b", 4.0, 2.0)]
    assert gpus.ratios(rows) == {"pairs": 1, "median_error": 0.0, "p90_error": 0.0, "right_order": 1.0}
    assert gpus.ratios([*rows, row("c", 4.0, 4.0)])["median_error"] == pytest.approx(1.0)


def test_bert_that_stopped_after_two_epochs_is_not_compared() -> None:
    row = gpu_row("bert_base_squad") | {"batch_size_all_gpus": "2560"}
    assert gpus.is_miscounted(row)
    assert not gpus.is_miscounted(row | {"batch_size_all_gpus": "1280"})
    assert not gpus.is_miscounted(row | {"model": "resnet50"})
