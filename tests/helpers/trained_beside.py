"""Trainers that train with a plan beside ones without, and out-of-memory errors at many points of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Trainer

import brimful as bf
import brimful.integrations.transformers as bft
from helpers.faults import OutOfMemoryAt
from helpers.trainers import During, losses, train, weights

ITS_OWN = ("aten.isnan", "aten.isinf", "aten._local_scalar_dense", "aten.add_.Tensor")
"""Ops on the loss that a trainer's loop makes between the steps' functions, of one number each."""
_OF_THE_CLOCK = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos")

Make = Callable[..., Trainer]
"""Makes a trainer; `callbacks` may be passed."""


def logged(trained: Trainer) -> list[dict[str, Any]]:
    """What was logged, without what depends on the time."""
    return [
        {name: value for name, value in entry.items() if name not in _OF_THE_CLOCK}
        for entry in trained.state.log_history
    ]


def assert_same(first: Trainer, second: Trainer, *, exactly: bool) -> None:
    if exactly:
        assert logged(first) == logged(second)
    else:
        assert losses(first) == pytest.approx(losses(second), rel=1e-4)
    for name, value in weights(first).items():
        other = weights(second)[name]
        assert torch.equal(value, other) if exactly else torch.allclose(value, other, atol=2e-3), name


def recomputing_plan(own: Trainer, **options: Any) -> bf.Plan:
    size = own.args.per_device_train_batch_size
    return bft.plan(own, "cpu", **{"budget": "1GiB", "recompute": "all", "micro_batch_size": size, **options})


def check_predicted_and_trained(make: Make) -> bf.Plan:
    """The peak is predicted within 1 %, and training that only recomputes is that of the trainer alone."""
    alone, planned = make(), make()
    plan = recomputing_plan(planned)
    assert plan.settings.units
    measured = bf.measure(bft.job(planned), plan.settings, "cpu").measured_peak_allocated_bytes
    assert plan.predicted_peak_allocated_bytes == pytest.approx(measured, rel=0.01)
    bft.apply(plan, planned, report=False)
    train(alone)
    train(planned)
    assert_same(planned, alone, exactly=True)
    return plan


def check_out_of_memory(make: Make, points: int, *, micro_batch_size: int, last: int = 10) -> None:
    """Memory may run out at points spread over the third step and at its last ops: training ends the same."""
    calm, counting = make(callbacks=[During(2, seen := OutOfMemoryAt())]), seen
    plan = recomputing_plan(calm, micro_batch_size=micro_batch_size)
    bft.apply(plan, calm, report=False)
    train(calm)
    ops = counting.ops
    spread = {round(len(ops) * place / points) for place in range(points)} | {*range(len(ops) - last, len(ops))}
    numbers = sorted(number for number in spread if not ops[number].startswith(ITS_OWN))
    assert len(numbers) >= points // 2
    for number in numbers:
        fault = OutOfMemoryAt(number)
        own = make(callbacks=[During(2, fault)])
        applied = bft.apply(plan, own, report=False)
        train(own)
        assert fault.raised == 1, number
        assert_same(own, calm, exactly=True)
        assert len(applied.recoveries) <= 1  # an update is completed, not taken again


def larger_than(rows: int, op: str = "aten.embedding.default") -> Callable[[str, Any], bool]:
    """Whether an op looks up more than so many rows of tokens."""
    return lambda name, args: name == op and args[1].dim() == 2 and args[1].shape[0] > rows
