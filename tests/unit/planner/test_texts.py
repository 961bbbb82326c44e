"""What the text of an estimate and of a plan explains: which peak, which sum, which words."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import brimful as bf
from brimful.planner import Plan
from brimful.planner.coupling import batch_norms_that

GPU = "RTX 3090"


def layers_job() -> bf.Job:
    return bf.Job(
        name="layers",
        model=lambda: nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(6))),
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda n: torch.randn(n, 512, 1024),
        optimizer="sgd",
    )


def convolutions_job() -> bf.Job:
    return bf.Job(
        name="convolutions",
        model=lambda: nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1) for _ in range(4))),
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda n: torch.randn(n, 16, 128, 128),
        optimizer="sgd",
    )


@cache
def planned(name: str, budget: str, micro_batch_size: int | None = None) -> Plan:
    job = {"layers": layers_job, "convolutions": convolutions_job}[name]()
    return bf.plan(job, GPU, global_batch_size=64, budget=budget, micro_batch_size=micro_batch_size)


def line_of(text: str, label: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith(f"  {label}")]
    return line


def test_the_interval_is_of_the_peak_with_the_context_on_a_gpu() -> None:
    estimate = bf.estimate(layers_job(), GPU, micro_batch_size=8)
    low, high = estimate.predicted_device_interval_bytes
    assert low < estimate.predicted_peak_device_bytes < high
    assert line_of(str(estimate), "interval").endswith(" with the CUDA context")


def test_corrections_are_said_to_be_sums_and_not_at_the_peak() -> None:
    assert "not at the peak" in line_of(str(bf.estimate(layers_job(), GPU, micro_batch_size=8)), "corrections")


def test_words_about_units_are_explained_where_the_plan_has_them() -> None:
    plan = planned("layers", "60%", micro_batch_size=64)
    assert plan.settings.recomputed
    line = line_of(str(plan), "unit")
    assert "a module that is kept, recomputed or offloaded as a whole" in line
    for words in ("recomputed in part", "nested", "offloaded in part"):
        assert (f"; {words}: " in line) == (words in plan.settings.describe())


def test_words_about_units_are_explained_where_only_an_alternative_has_them() -> None:
    plan = planned("convolutions", "40%")
    assert not plan.settings.changed
    assert any(other.settings.recomputed for other in plan.alternatives)
    assert "a module" in line_of(str(plan), "unit  ")


@pytest.mark.parametrize(("name", "budget"), [("convolutions", "40%"), ("layers", "60%")])
def test_no_alternative_takes_the_memory_and_time_of_the_plan_or_of_another(name: str, budget: str) -> None:
    """With growing segments the four convolutions take the same memory and time as without."""
    plan = planned(name, budget)
    seen = [(plan.predicted_peak_reserved_bytes, plan.predicted_step_seconds)]
    for other in plan.alternatives:
        held, seconds = other.predicted_peak_reserved_bytes, other.predicted_step_seconds
        assert not any(held == h and math.isclose(seconds, s, rel_tol=1e-9) for h, s in seen), other.label
        seen.append((held, seconds))


def test_one_batch_norm_is_one_layer() -> None:
    assert batch_norms_that("compute with all", ["a"]) == "1 BatchNorm layer computes with all"
    assert batch_norms_that("compute with all", ["a", "b"]) == "2 BatchNorm layers compute with all"


def test_every_alternative_is_predicted_within_the_budget(tmp_path: Path) -> None:
    """Splices expect more than the budget of one choice here, which is tried and not captured."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 96,
        "intermediate_size": 200,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 1003,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = bf.plan(bf.find_architecture(str(tmp_path)), "T4", global_batch_size=64, budget="190MiB")
    context_bytes = plan.predicted_peak_device_bytes - plan.predicted_peak_reserved_bytes
    assert len(plan.alternatives) > 1
    for other in plan.alternatives:
        assert other.predicted_peak_reserved_bytes + context_bytes <= plan.budget_bytes, other.label
