"""TRL's head of language models on CUDA: one buffer of logits, of the tokens whose label counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="trl is not installed")

from transformers import LlamaConfig, LlamaForCausalLM
from trl.trainer.utils import add_fused_lm_head

from brimful import Job
from brimful.capture import capture_step
from brimful.memory import predict_memory
from brimful.settings import Precision, Settings
from brimful.trace import Trace
from helpers.captured_jobs import A100, CPU, ops

TOKENS, COUNTED, WIDTH, TILE = 33, 12, 32, 32_768
"""Tokens of a text; those whose label counts; the width of the model; logits of a token in the buffer."""


def model() -> Any:
    config = LlamaConfig(
        vocab_size=500,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    made = LlamaForCausalLM(config)
    add_fused_lm_head(made, outputs=("log_probs", "entropy", "is_top1"))
    return made


def texts(count: int) -> dict[str, torch.Tensor]:
    ids = torch.ones(count, TOKENS, dtype=torch.int64)
    labels = ids.clone()
    labels[:, : TOKENS - COUNTED] = -100
    return {"input_ids": ids, "labels": labels}


def captured(device: Any, *, samples: int = 4, without: tuple[str, ...] = ()) -> Trace:
    job = Job(
        model=model(),
        loss=lambda model, batch: model(**batch, fused_lm_head=True).loss,
        batch=texts,
    )
    settings = Settings(micro_batch_size=samples, precision=Precision.BF16)
    return capture_step(job, settings, device, without=without)


def test_one_buffer_is_taken_in_each_direction() -> None:
    buffer_bytes = 4 * COUNTED * TILE * 2
    of_two_steps = [s for s in captured(A100).storages if s.size_bytes == buffer_bytes]
    assert len(of_two_steps) == 2 * 2
    without = captured(A100, without=("fused_lm_head",))
    taken = [s for s in without.storages if s.size_bytes == 4 * (TOKENS - 1) * TILE * 2]  # of all tokens
    assert len(taken) == 2 * 2
    assert peak(captured(A100, samples=32)) < peak(captured(A100, samples=32, without=("fused_lm_head",))) / 2


def peak(trace: Trace) -> int:
    return predict_memory(trace).peak_allocated_bytes


def test_a_kernel_runs_for_each_tile_on_cuda_alone() -> None:
    (rule,) = [each for each in captured(A100).corrections if each.name == "fused_lm_head"]
    assert rule.occurrences == 2  # one tile, forward and backward
    assert "fused_lm_head" not in {each.name for each in captured(CPU).corrections}


def test_products_in_float32_have_their_operations() -> None:
    (product, *_others) = ops(captured(A100), "aten.addmm.dtype_out")
    assert product.flops == 2 * 4 * COUNTED * 500 * WIDTH
