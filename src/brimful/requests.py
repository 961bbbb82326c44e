"""A job, a device and `PlanOptions` → the planner's `Request`: what they mean for the job, the host and memory.

Start reading at `request_of`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from brimful.batches import why_not_split
from brimful.capture import fake_model
from brimful.devices import Device, find_device
from brimful.errors import UnknownNameError, UsageError
from brimful.job import DefaultOptimizer, Job
from brimful.memory import predict_memory
from brimful.optimizers import (
    NOT_UNDER_FSDP2,
    ZERO_OPTIMIZERS,
    NamedOptimizer,
    has_implementation,
    make_optimizer,
)
from brimful.options import PlanOptions, parse_implementation, parse_parallelisms
from brimful.planner import JobTraits, Request
from brimful.prediction import MARGIN_FRACTION
from brimful.prediction.estimator import Capture
from brimful.settings import OptimizerImplementation, Parallelism, Settings
from brimful.trace import per_rank_trace
from brimful.utils.quantities import format_bytes, parse_bytes


def request_of(
    job: Job,
    device: Device,
    options: PlanOptions,
    *,
    global_batch_size: int,
    world_size: int,
    num_nodes: int,
    is_here: bool,
) -> Request:
    """The planner's request, with a budget of 0 bytes: `with_budget` sets the budget.

    `is_here` is whether the device is in this machine, so that its host memory is this machine's. Options that
    contradict each other, the job or the device, or name nothing that is known, raise UsageError.
    """
    parallelisms = parse_parallelisms(options.parallelism, world_size)
    if world_size == 1 and parallelisms != (Parallelism.DDP,):
        warnings.warn(
            f"there is one rank, which has the whole model: parallelism={str(parallelisms[0])!r} divides "
            "nothing and is ignored. Train under torchrun --nproc-per-node N, or plan with world_size=N.",
            stacklevel=3,
        )
        parallelisms = (Parallelism.DDP,)
        options = replace(options, parallelism=str(Parallelism.DDP))
    _check_zero(job, (options.optimizer, *options.allow_optimizers), parallelisms)
    if options.reshard_after_forward is None and job.shard is not None and Parallelism.FSDP2 in parallelisms:
        options = replace(options, reshard_after_forward=True)  # `Job.shard` decides
    request = Request(
        job=JobTraits(name=job.name),
        device=device,
        budget_bytes=0,
        global_batch_size=global_batch_size,
        world_size=world_size,
        num_nodes=num_nodes,
        asked=options,
        implementations={
            **{name: _implementation(job, name, None) for name in options.allow_optimizers},
            options.optimizer: _implementation(job, options.optimizer, options.optimizer_implementation),
        },
        offload_host_bytes=_offload_host_bytes(options, device, is_here=is_here),
    )
    return replace(request, job=job_traits(job, global_batch_size))  # last: it runs the job's own code


def job_traits(job: Job, batch_size: int) -> JobTraits:
    """Properties of a job that the planner needs; `batch_size` is that of a whole batch."""
    return JobTraits(
        name=job.name,
        why_not_split=why_not_split(job, batch_size),
        weighs_by_count=job.count is not None or job.reduction == "sum",
        brings_own_loop=job.loop is not None,
        has_default_optimizer=isinstance(job.optimizer, DefaultOptimizer),
    )


def with_budget(request: Request, capture: Capture) -> Request:
    """The request with its budget: the bytes permitted to each rank on its device, CUDA context included.

    The option `budget` is a size such as "11GiB", or a share of what the baseline takes such as "50%", for
    which `capture` captures the baseline. Without one, what must not be exceeded is the capacity, and the
    budget is that, on a GPU less a margin for what the prediction may miss. A text that is not a size, or a
    size larger than the device has, raises UsageError.
    """
    budget, device, capacity_bytes = request.asked.budget, request.device, _capacity_of_rank(request)
    if budget is None:
        margin = MARGIN_FRACTION if device.kind == "cuda" else 0.0
        return replace(request, budget_bytes=int(capacity_bytes / (1 + margin)), limit_bytes=capacity_bytes)
    if budget.strip().endswith("%"):
        share = _share(budget)
        plain = per_rank_trace(capture(request.baseline_settings())).with_last_step_again()
        budget_bytes = int(share * (predict_memory(plain).peak_reserved_bytes + device.context_bytes))
    else:
        budget_bytes = parse_bytes(budget)
    if budget_bytes > capacity_bytes:
        has = "has" if device.kind == "cuda" or request.world_size == 1 else "has for each rank"
        raise UsageError(
            f"a budget of {format_bytes(budget_bytes)} is more than {device.name} {has}, "
            f"{format_bytes(capacity_bytes)}. Use no budget, or a larger device."
        )
    return replace(request, budget_bytes=budget_bytes)


HOST_FRACTION = 0.5
"""Default fraction of this machine's memory for offloading, without `host_memory`. A choice: other programs
cannot use pinned memory."""
DESCRIBED_HOST_FRACTION = 0.5
"""Default host memory for offloading from a GPU that is only named, as a fraction of the GPU's memory. A
choice: clouds rent a GPU of 24 GB with as little as 16 GiB of host memory (AWS g5.xlarge), of which this is
three quarters."""


def _implementation(
    job: Job, optimizer: str | None, asked: str | OptimizerImplementation | None
) -> OptimizerImplementation | None:
    """The implementation for every plan: the requested one, else fused if the optimizer leaves it open."""
    if asked is not None:
        return parse_implementation(asked)
    named = Settings(micro_batch_size=1, optimizer=optimizer)
    fused = OptimizerImplementation.FUSED
    stand_ins: list[Callable[[], nn.Module | list[nn.Parameter]]] = [
        partial(nn.Linear, 2, 2),
        partial(fake_model, job),  # whose layers a function may need; it has no values to read
    ]
    if isinstance(named.optimizer or job.optimizer, str | NamedOptimizer):
        stand_ins = [lambda: [nn.Parameter(torch.zeros(2, 2))]]
    for make_stand_in in stand_ins:
        try:
            example = make_optimizer(job, make_stand_in(), named)
        except UnknownNameError:
            raise
        except Exception:  # capturing the step raises the error, if it is one
            continue
        return fused if has_implementation(example, fused) else None
    return None


def _check_zero(job: Job, names: Iterable[str | None], parallelisms: Sequence[Parallelism]) -> None:
    """Check that ZeRO can step named optimizers; those that a function makes are checked in training."""
    own = job.optimizer if isinstance(job.optimizer, str) else None
    others = {name or own for name in names} - {None, *ZERO_OPTIMIZERS}
    if others and any(parallelism.is_zero for parallelism in parallelisms):
        other_way = "fsdp2" if others.isdisjoint(NOT_UNDER_FSDP2) else "ddp"
        raise UsageError(
            f"{', '.join(sorted(map(str, others)))} cannot be trained under DeepSpeed's ZeRO, which steps flat "
            f"parts of all parameters. Choose among {', '.join(ZERO_OPTIMIZERS)}, or parallelism='{other_way}'."
        )


def _offload_host_bytes(options: PlanOptions, target: Device, *, is_here: bool) -> int:
    """Host memory that offloading may take; of a machine that is only described, a part of its GPU's."""
    if not options.offload_activations:
        if options.host_memory is not None:
            raise UsageError(
                "host_memory is what offloading may take of the host, and offload_activations is False."
            )
        return 0
    permitted = None if options.host_memory is None else parse_bytes(options.host_memory)
    if target.kind == "cpu":
        return 0
    if permitted is not None:
        return permitted
    if is_here:
        return int(find_device("cpu").capacity_bytes * HOST_FRACTION)
    return int(target.capacity_bytes * DESCRIBED_HOST_FRACTION)


def _capacity_of_rank(request: Request) -> int:
    """Memory of a rank's device; CPU ranks on a machine have equal parts of its memory."""
    shared_by = request.world_size // request.num_nodes if request.device.kind == "cpu" else 1
    return request.device.capacity_bytes // shared_by


def check_budget(budget: str) -> None:
    """Raise UsageError for a text that is neither a size nor a share."""
    if budget.strip().endswith("%"):
        _share(budget)
    else:
        parse_bytes(budget)


_LARGEST_SHARE = 1000.0
"""Largest budget, as a multiple of what the baseline takes. A choice."""


def _share(budget: str) -> float:
    text = budget.strip()[:-1]
    try:
        share = float(text) / 100
    except ValueError:
        share = 0.0
    if not 0 < share <= _LARGEST_SHARE:  # NaN is neither
        shown = budget if len(budget) <= 60 else f"{budget[:60]}…"
        raise UsageError(
            f"{shown!r} is not a share of the baseline. Write a positive number of at most "
            f"{_LARGEST_SHARE:.0%}, such as 50%."
        )
    return share
