"""Plans whose predictions are wrong by a factor, for runs that correct themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import brimful as bf
from helpers.models import GPT

LENGTH, SAMPLES = 32, 8


def next_token(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["x"].flatten())


def gpt_job(*, dropout: float = 0.0, **changes: Any) -> bf.Job:
    """A small GPT on 64 sequences."""
    tokens = torch.randint(40, (64, LENGTH), generator=torch.Generator().manual_seed(1))
    values: dict[str, Any] = {
        "name": "small gpt",
        "model": lambda: GPT(layers=5, width=32, dropout=dropout),
        "loss": next_token,
        "batch": {"x": tokens[:SAMPLES]},
        "data": lambda: bf.Data(train={"x": tokens}),
    }
    return bf.Job(**values | changes)


def wrong_by(plan: bf.Plan, peaks: float, *, budget_bytes: int) -> bf.Plan:
    """The plan as if its peak were predicted as a factor of what it takes, within another budget."""
    peak_bytes = round(plan.predicted_peak_reserved_bytes * peaks)
    assert peak_bytes <= budget_bytes
    return replace(
        plan,
        budget_bytes=budget_bytes,
        budget_curve=(),
        predicted_peak_allocated_bytes=peak_bytes,
        predicted_peak_reserved_bytes=peak_bytes,
        predicted_peak_device_bytes=peak_bytes,
    )


def too_large(job: bf.Job, *, predicted: float = 0.69, **asked: Any) -> bf.Plan:
    """A plan that keeps everything and takes 1 / 0.7 of its budget; it predicts a part of what it takes."""
    plan = bf.plan(job, "cpu", global_batch_size=SAMPLES, **asked)
    assert not plan.settings.changed
    return wrong_by(plan, predicted, budget_bytes=int(0.7 * plan.predicted_peak_reserved_bytes))


def too_small(job: bf.Job, **asked: Any) -> bf.Plan:
    """A plan that recomputes although everything could be kept within its budget."""
    kept = bf.plan(job, "cpu", global_batch_size=SAMPLES, **asked)
    budget_bytes = kept.predicted_peak_reserved_bytes * 11 // 10
    plan = bf.plan(
        job, "cpu", global_batch_size=SAMPLES, budget=kept.predicted_peak_reserved_bytes * 6 // 10, **asked
    )
    assert plan.settings.changed
    return wrong_by(plan, 1.5, budget_bytes=budget_bytes)
