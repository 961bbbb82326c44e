"""One step of a job, as one writes it by hand and under a plan: what it computes and what memory it takes.

A job is made anew for each, from the same seed, as are its model, its batch and what it draws.
"""

from __future__ import annotations

import inspect
import math
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import brimful as bf
from brimful.execution.setup import build_model
from brimful.optimizers import make_optimizer
from job_zoo.case import JobCase
from job_zoo.truth import all_bytes_counted, live_bytes, peak_bytes

WARM_STEPS = 2
LOOP_STEPS = 3
"""So many steps of a job's own loop are estimated."""
OF_BRIMFUL = (str(Path(bf.__file__).parent), str(Path(__file__).parent))
"""Where warnings of brimful's come from: its own code, or ours that calls it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """What a step computed."""

    loss: float
    gradient_norm: float
    values: dict[str, Tensor]
    """Gradients before the update, and buffers after it, by name."""
    draws: bool
    """Whether random numbers were drawn."""
    dtype: torch.dtype
    """Of the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What some steps came to."""

    losses: tuple[float, ...]
    start: dict[str, dict[str, Tensor]]
    """Before the first step: "weights" and "buffers", each by name."""
    end: dict[str, dict[str, Tensor]]
    draws: bool
    """Whether random numbers were drawn."""


@dataclass(frozen=True, slots=True)
class _Ready:
    """A job about to be trained."""

    model: nn.Module
    optimizer: Optimizer
    batch: Any
    step: Callable[[Any], Tensor]
    """A step on a batch; its loss."""


def stepped(case: JobCase, plan: bf.Plan | bf.Settings | None, *, seed: int = 0) -> Stepped:
    """Take one step, by hand if there is no plan, drawing from a seed."""
    ready = _ready(case, plan)
    gradients: dict[str, Tensor] = {}

    def keep(*_: Any) -> None:
        for name, parameter in ready.model.named_parameters():
            if parameter.grad is not None:
                gradients[f"the gradient of {name}"] = parameter.grad.detach().clone()

    ready.optimizer.register_step_pre_hook(keep)
    seed_all(seed)
    before = _generators()
    loss = ready.step(ready.batch)
    draws = not _are_same(before, _generators())
    buffers = {f"the buffer {name}": buffer.detach().clone() for name, buffer in ready.model.named_buffers()}
    dense = [value.to_dense() if value.is_sparse else value for value in gradients.values()]
    norm = math.sqrt(sum(float(value.abs().double().square().sum()) for value in dense))
    return Stepped(
        loss=float(loss), gradient_norm=norm, values=gradients | buffers, draws=draws, dtype=loss.dtype
    )


def trained(
    case: JobCase, plan: bf.Plan | None, *, steps: int, seed: int = 0, is_nudged: bool = False
) -> Trained:
    """Take some steps, each on its own batch, by hand if there is no plan, drawing from a seed.

    With `is_nudged` each weight begins by up to one rounding larger or smaller.
    """
    job = _job(case)
    ready = _ready(case, plan, job)
    if is_nudged:
        with torch.no_grad():
            for weight in ready.model.parameters():
                weight.mul_(1 + torch.finfo(weight.dtype).eps * torch.randint(-1, 2, weight.shape))
    batches = [ready.batch, *(_batch(job, case.samples) for _ in range(steps - 1))]
    start = _state(ready.model)
    seed_all(seed)
    before = _generators()
    losses = tuple(float(ready.step(batch)) for batch in batches)
    draws = not _are_same(before, _generators())
    return Trained(losses=losses, start=start, end=_state(ready.model), draws=draws)


def plain_peak_bytes(case: JobCase) -> int:
    """The most that a steady step, or the job's own loop, holds; what was there before it does not count."""
    with all_bytes_counted():
        before = live_bytes()
        job = _job(case)
        return (
            _steady_peak_bytes(_ready(case, None, job)) if job.loop is None else _loop_peak_bytes(case, job)
        ) - before


def planned_peak_bytes(case: JobCase, plan: bf.Plan | bf.Settings, warned: list[str]) -> int:
    """The same under a plan; what brimful warns of in the first steps is added to a list."""
    with all_bytes_counted(), _warnings_noted(warned):
        before = live_bytes()
        return _steady_peak_bytes(_ready(case, plan)) - before


def _steady_peak_bytes(ready: _Ready) -> int:
    for _ in range(WARM_STEPS):
        ready.step(ready.batch)
    return peak_bytes(lambda: ready.step(ready.batch))


def _loop_peak_bytes(case: JobCase, job: bf.Job) -> int:
    """With batches as a data loader gives them, each new."""
    assert job.loop is not None
    model = build_model(job).train()
    batches = (_batch(job, case.samples) for _ in range(LOOP_STEPS))
    return peak_bytes(partial(job.loop, model, batches))


def _state(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    return {
        "weights": {name: weight.detach().clone() for name, weight in model.named_parameters()},
        "buffers": {name: buffer.detach().clone() for name, buffer in model.named_buffers()},
    }


def _job(case: JobCase) -> bf.Job:
    seed_all(0)
    return case.job()


def _ready(case: JobCase, plan: bf.Plan | bf.Settings | None, job: bf.Job | None = None) -> _Ready:
    job = job or _job(case)
    model = build_model(job).train()
    optimizer = make_optimizer(job, model)
    batch = _batch(job, case.samples)
    if plan is None:
        return _Ready(model, optimizer, batch, lambda batch: _by_hand(job, model, optimizer, batch))
    step = bf.apply(plan, job, model, optimizer)
    return _Ready(model, optimizer, batch, lambda batch: step(batch).loss)


def _by_hand(job: bf.Job, model: nn.Module, optimizer: Optimizer, batch: Any) -> Tensor:
    def closure() -> Tensor:
        loss = job.loss(model, batch) if job.embed is None else job.loss(job.embed(model, batch))
        loss.backward()
        return loss.detach()

    if _wants_closure(optimizer):
        return optimizer.step(lambda: optimizer.zero_grad() or closure())
    loss = closure()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _wants_closure(optimizer: Optimizer) -> bool:
    first = next(iter(inspect.signature(optimizer.step).parameters.values()), None)
    return first is not None and first.name == "closure" and first.default is first.empty


def _batch(job: bf.Job, samples: int) -> Any:
    return job.batch(samples) if callable(job.batch) else job.batch


@contextmanager
def _warnings_noted(noted: list[str]) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        text = str(warning.message)
        if warning.filename.startswith(OF_BRIMFUL) and text not in noted:
            noted.append(text)


def seed_all(seed: int) -> None:
    """Seed torch's, Python's and NumPy's generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _generators() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()[1]


def _are_same(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    return torch.equal(before[0], after[0]) and before[1] == after[1] and bool((before[2] == after[2]).all())
