"""What is uncertain stands in one block below the figures."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

import brimful as bf


def job() -> bf.Job:
    return bf.Job(
        model=lambda: nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)),
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda n: torch.rand(n, 32),
    )


def lines_after_figures(text: str, figures: str, count: int) -> list[str]:
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(f"  {figures} "))
    return lines[first + 1 : first + 1 + count]


def test_ops_with_the_same_reason_share_a_line_below_the_time() -> None:
    estimate = bf.estimate(job(), "cpu", micro_batch_size=8, precision="bf16")
    assert len(estimate.uncertain_ops) > 1
    (line,) = lines_after_figures(str(estimate), "time goes to", 1)
    reason = "what the CPU's library takes inside is not known"
    assert line == f"  uncertain       aten.addmm.default, aten.mm.default: {reason}"


def test_further_reasons_have_lines_of_their_own() -> None:
    estimate = bf.estimate(job(), "cpu", micro_batch_size=8)
    several = replace(estimate, uncertain_ops=("sizes of a mask", "a: inside", "b: inside"))
    assert lines_after_figures(str(several), "time goes to", 2) == [
        "  uncertain       sizes of a mask",
        "                  a, b: inside",
    ]


def test_a_plan_says_that_its_probability_is_apart_from_what_is_uncertain() -> None:
    certain = bf.plan(job(), "cpu", global_batch_size=8)
    plan = replace(certain, notes=(*certain.notes, "Not sure about: a: inside."))
    assert "probability under 0.1%)" in str(certain)
    assert "probability under 0.1%, apart from what is uncertain)" in str(plan)
    assert lines_after_figures(str(plan), "predicted", 1) == ["  uncertain       a: inside"]
