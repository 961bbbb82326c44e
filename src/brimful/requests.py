"""A job, a device and `PlanOptions` → the planner's `Request`: names are parsed, the budget becomes bytes.

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
from brimful.job import DEFAULT_OPTIMIZER, Job
from brimful.memory import predict_memory
from brimful.optimizers import (
    NOT_UNDER_FSDP2,
    ZERO_OPTIMIZERS,
    NamedOptimizer,
    has_implementation,
    make_optimizer,
)
from brimful.options import RECOMPUTE_ACTIONS, MemoryFormatLike, PlanOptions, PrecisionLike, format_text
from brimful.planner import JobTraits, OptimizerChoice, Permits, Pins, RankOptions, Request
from brimful.prediction import MARGIN_FRACTION
from brimful.prediction.estimator import Capture
from brimful.quantities import format_bytes, parse_bytes
from brimful.settings import (
    Action,
    MemoryFormat,
    OptimizerImplementation,
    Parallelism,
    Precision,
    Settings,
)
from brimful.trace import per_rank_trace


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
    parallelisms = _parallelisms(options.parallelism, world_size)
    _check_zero(job, (options.optimizer, *options.allow_optimizers), parallelisms)
    return Request(
        permits=_permits(job, device, options, is_here=is_here),
        pins=_pins(job, options),
        job=job_traits(job, global_batch_size),  # last: it runs the job's own code
        device=device,
        budget_bytes=0,
        global_batch_size=global_batch_size,
        ranks=RankOptions(
            world_size=world_size,
            num_nodes=num_nodes,
            parallelisms=parallelisms,
            reshard_after_forward=_resharding(job, options, parallelisms),
            param_dtype=options.param_dtype,
            offload_parameters=options.offload_parameters,
        ),
    )


def _resharding(job: Job, options: PlanOptions, parallelisms: Sequence[Parallelism]) -> bool | None:
    """Whether FSDP2 frees gathered parameters after forward; None tries both, unless `Job.shard` decides."""
    if options.reshard_after_forward is None and job.shard is not None and Parallelism.FSDP2 in parallelisms:
        return True
    return options.reshard_after_forward


def _permits(job: Job, device: Device, options: PlanOptions, *, is_here: bool) -> Permits:
    return Permits(
        precisions=_precisions(options.precision, device),
        other_optimizers=tuple(
            OptimizerChoice(name=name, implementation=_implementation(job, name, None))
            for name in options.allow_optimizers
        ),
        chunked_loss=options.chunked_loss,
        expandable_segments=options.expandable_segments,
        offload_host_bytes=_offload_host_bytes(options, device, is_here=is_here),
        splits_coupled_batches=options.split_batch_norm,
        exceedance=_probability(options.max_exceedance),
        prefers_simplest=prefers_simplest(options.effort),
        memory_formats=parse_memory_formats(options.memory_format),
    )


def _pins(job: Job, options: PlanOptions) -> Pins:
    return Pins(
        micro_batch_size=options.micro_batch_size,
        recompute=parse_recompute(options.recompute),
        optimizer=options.optimizer,
        optimizer_implementation=_implementation(job, options.optimizer, options.optimizer_implementation),
        optimizer_in_backward=options.optimizer_in_backward,
        offload_optimizer=options.offload_optimizer,
        prefetch_inputs=options.prefetch_inputs,
        own_checkpointing=_keeps_own_checkpointing(options.own_checkpointing),
    )


def job_traits(job: Job, batch_size: int) -> JobTraits:
    """Properties of a job that the planner needs; `batch_size` is that of a whole batch."""
    return JobTraits(
        name=job.name,
        why_not_split=why_not_split(job, batch_size),
        weighs_by_count=job.count is not None or job.reduction == "sum",
        brings_own_loop=job.loop is not None,
        has_default_optimizer=job.optimizer == DEFAULT_OPTIMIZER,
    )


def with_budget(request: Request, budget: str | None, capture: Capture) -> Request:
    """The request with its budget; without one, what must not be exceeded is what the device has.

    `budget`, `capture` and errors are those of `budget_bytes`.
    """
    limit_bytes = _capacity_of_rank(request) if budget is None else None
    return replace(request, budget_bytes=budget_bytes(budget, capture, request), limit_bytes=limit_bytes)


def budget_bytes(budget: str | None, capture: Capture, request: Request) -> int:
    """Bytes permitted to each rank on its device, the CUDA context included.

    `budget` is a size such as "11GiB", a share of what the baseline takes such as "50%", for which `capture`
    captures the baseline, or None for the capacity, on a GPU less a margin for what the prediction may miss. A
    text that is not a size, or a size larger than the device has, raises UsageError.
    """
    if budget is None:
        device = request.device
        margin = MARGIN_FRACTION if device.kind == "cuda" else 0.0
        return int(_capacity_of_rank(request) / (1 + margin))
    if budget.strip().endswith("%"):
        share = _share(budget)
        plain = per_rank_trace(capture(request.baseline_settings()))
        asked = int(share * (predict_memory(plain).peak_reserved_bytes + request.device.context_bytes))
    else:
        asked = parse_bytes(budget)
    if asked > _capacity_of_rank(request):
        has = "has" if request.device.kind == "cuda" or request.ranks.world_size == 1 else "has for each rank"
        raise UsageError(
            f"a budget of {format_bytes(asked)} is more than {request.device.name} {has}, "
            f"{format_bytes(_capacity_of_rank(request))}. Use no budget, or a larger device."
        )
    return asked


def parse_precision(precision: PrecisionLike) -> Precision:
    """The precision meant by a member, its name ("bf16", "fp32", …), or a dtype (`torch.bfloat16`, "bfloat16").

    Any other name raises UnknownNameError.
    """
    try:
        return Precision(precision)  # type: ignore[arg-type]  # a dtype is understood by its name
    except ValueError:
        raise UnknownNameError("precision", str(precision), [str(p) for p in Precision]) from None


HOST_FRACTION = 0.5
"""Default fraction of this machine's memory for offloading, without `host_memory`. A choice: other programs
cannot use pinned memory."""
DESCRIBED_HOST_FRACTION = 0.5
"""Default host memory for offloading from a GPU that is only named, as a fraction of the GPU's memory. A
choice: clouds rent a GPU of 24 GB with as little as 16 GiB of host memory (AWS g5.xlarge), of which this is
three quarters."""


def _precisions(names: str, device: Device) -> tuple[Precision, ...]:
    if names == "auto":
        return tuple(p for p in Precision if device.supports(p))
    return tuple(parse_precision(name.strip()) for name in names.split(","))


def parse_recompute(recompute: str | Action | None, *, permits_auto: bool = True) -> Action | None:
    """The one action for all units, `Action.RECOMPUTE` or `Action.KEEP`; None lets the plan choose for each."""
    actions = {name: each for name, each in RECOMPUTE_ACTIONS.items() if permits_auto or each is not None}
    if recompute is None or (isinstance(recompute, Action) and recompute in actions.values()):
        return recompute
    if recompute not in actions:
        raise UnknownNameError("value of recompute", str(recompute), list(actions))
    return actions[recompute]


def _probability(value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= 1:  # type: ignore[operator]
        raise UsageError(f"max_exceedance is {value!r}; a probability is above 0 and at most 1. 0.01 is 1 %.")
    return float(value)  # type: ignore[arg-type]


def prefers_simplest(effort: object) -> bool:
    """Whether a value of the option `effort` asks for the simplest of plans that are equally fast."""
    known = {"normal": True, "max": False}
    if not isinstance(effort, str) or effort not in known:
        raise UnknownNameError("value of effort", str(effort), list(known))
    return known[effort]


_MEMORY_FORMATS: dict[str, tuple[MemoryFormat | None, ...]] = {
    "auto": (MemoryFormat.CONTIGUOUS, MemoryFormat.CHANNELS_LAST),
    **{str(each): (each,) for each in MemoryFormat},
    "preserve": (None,),
}
"""The memory formats to choose from, by value of the option."""


def parse_memory_formats(memory_format: MemoryFormatLike | None) -> tuple[MemoryFormat | None, ...]:
    """The memory formats to choose from, at least one, of which None leaves the layout as it is.

    The option is "auto", "contiguous", "channels_last", "preserve" or None, or one of torch's formats; any
    other name raises UnknownNameError.
    """
    name = format_text(memory_format) or "preserve"
    if name not in _MEMORY_FORMATS:
        raise UnknownNameError("memory format", name, list(_MEMORY_FORMATS))
    return _MEMORY_FORMATS[name]


def _keeps_own_checkpointing(value: str) -> bool:
    known = {"keep": True, "off": False}
    if value not in known:
        raise UnknownNameError("value of own_checkpointing", value, list(known))
    return known[value]


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
        partial(fake_model, job),
    ]
    if isinstance(named.optimizer or job.optimizer, str | NamedOptimizer):
        stand_ins = [lambda: [nn.Parameter(torch.zeros(2, 2))]]
    for make_stand_in in stand_ins:
        try:
            example = make_optimizer(job, make_stand_in(), named)
        except UnknownNameError:
            raise
        except Exception:  # the job's own function may ask for parameters that only the job's model has
            continue
        return fused if has_implementation(example, fused) else None
    return None  # capturing the step raises the error


def _parallelisms(name: str | Parallelism, world_size: int) -> tuple[Parallelism, ...]:
    if name == "auto":
        return (Parallelism.DDP, Parallelism.FSDP2) if world_size > 1 else (Parallelism.DDP,)
    try:
        asked = Parallelism(name)
    except ValueError:
        raise UnknownNameError("parallelism", str(name), ["auto", *map(str, Parallelism)]) from None
    if world_size == 1 and asked is not Parallelism.DDP:
        warnings.warn(
            f"there is one rank, which has the whole model: parallelism={str(asked)!r} divides nothing and is "
            "ignored. Train under torchrun --nproc-per-node N, or plan with world_size=N.",
            stacklevel=4,
        )
        return (Parallelism.DDP,)
    return (asked,)


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


def parse_implementation(name: str | OptimizerImplementation | None) -> OptimizerImplementation | None:
    """The implementation that has a name; None leaves it to the optimizer."""
    try:
        return None if name is None else OptimizerImplementation(name)
    except ValueError:
        known = [str(implementation) for implementation in OptimizerImplementation]
        raise UnknownNameError("optimizer implementation", str(name), known) from None


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
    shared_by = request.ranks.world_size // request.ranks.num_nodes if request.device.kind == "cpu" else 1
    return request.device.capacity_bytes // shared_by


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
