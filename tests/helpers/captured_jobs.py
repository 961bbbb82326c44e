"""Jobs that take milliseconds to capture, and ways to look at their traces."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brimful.capture import capture_step
from brimful.devices import find_device
from brimful.job import Job
from brimful.settings import Action, Precision, Settings, UnitAction
from brimful.trace import Category, Op, Phase, Storage, Trace

CPU = find_device("cpu")
A100 = find_device("A100-SXM4-80GB")
H100 = find_device("H100 SXM")
V100 = find_device("V100-SXM2-32GB")

SAMPLES, INPUTS, HIDDEN, CLASSES = 8, 12, 20, 5


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def rows(samples: int) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, INPUTS), "y": torch.randint(0, CLASSES, (samples,))}


def cross_entropy(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def loop_of(
    loss: Callable[..., Tensor],
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    *,
    every: int = 1,
) -> Callable[[nn.Module, Iterable[Any]], None]:
    """A user's training loop that makes a step after every so many batches."""

    def loop(model: nn.Module, batches: Iterable[Any]) -> None:
        made = optimizer(model.parameters())
        for number, batch in enumerate(batches, start=1):
            loss(model, batch).backward()
            if number % every == 0:
                made.step()
                made.zero_grad()

    return loop


def job(
    model: Callable[[], nn.Module] | nn.Module = mlp,
    loss: Callable[..., Tensor] = cross_entropy,
    batch: Callable[[int], Any] = rows,
    **others: Any,
) -> Job:
    return Job(model=model, loss=loss, batch=batch, **others)


def capture(
    the_job: Job,
    device: Any = CPU,
    *,
    samples: int = SAMPLES,
    recompute: tuple[str, ...] = (),
    precision: Precision = Precision.FP32,
    **settings: Any,
) -> Trace:
    units = tuple(UnitAction(fqn=unit, action=Action.RECOMPUTE) for unit in recompute)
    return capture_step(
        the_job, Settings(micro_batch_size=samples, units=units, precision=precision, **settings), device
    )


def ops(trace: Trace, name: str, phase: Phase | None = None) -> list[Op]:
    """Ops of the first step whose name starts with `name`."""
    return [
        op
        for op in trace.ops
        if op.name.startswith(name)
        and op.step == 0
        and phase in (None, op.phase)
        and op.phase is not Phase.SETUP
    ]


def made_by(trace: Trace, name: str, phase: Phase = Phase.FORWARD) -> list[Storage]:
    """Storages that ops of the first step made whose name starts with `name`."""
    wanted = {index for index, op in enumerate(trace.ops) if op.name.startswith(name) and op.step == 0}
    return [
        storage
        for storage in trace.storages
        if storage.op in wanted and storage.op is not None and trace.ops[storage.op].phase is phase
    ]


def bytes_of(trace: Trace, category: Category) -> int:
    return sum(storage.size_bytes for storage in trace.storages if storage.category is category)


def changed(trace: Trace, name: str) -> int:
    """Bytes that a correction added or took away in the last step."""
    (found,) = [correction for correction in trace.corrections if correction.name == name]
    return found.changed_bytes
