"""The public functions: a trainer's job, a plan for it, and the plan applied to it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Unpack, cast

import torch
from transformers import Trainer

from brimful.api.plans import plan_of_trainer
from brimful.capture.sharding import permitted_in_process_group
from brimful.distributed.ranks import init_distributed
from brimful.errors import BrimfulError, InfeasibleError, UsageError
from brimful.execution.random_state import RandomState
from brimful.integrations.suggestions import for_trainer, infeasible_for_trainer
from brimful.integrations.transformers.applied_plan import AppliedPlan
from brimful.integrations.transformers.batches import few_samples_notes, reading_notes
from brimful.integrations.transformers.coupling import why_not_divided
from brimful.integrations.transformers.evaluation import evaluation_notes
from brimful.integrations.transformers.kinds import check_kind
from brimful.integrations.transformers.loss import division_notes, notes_for_trainer
from brimful.integrations.transformers.sharding import (
    parallelism_of,
    reshards_after_forward,
    sharding_notes,
    shards,
)
from brimful.integrations.transformers.trainer_job import (
    check_planned_division,
    effective_batch_size,
    job,
    precision_of,
)
from brimful.options import PlanKeywords
from brimful.planner import Plan
from brimful.profiling.named_device import DeviceLike

_OF_THE_TRAINER = {
    "precision": "bf16 or fp16 in TrainingArguments",
    "optimizer": "optim in TrainingArguments",
    "allow_optimizers": "optim in TrainingArguments",
    "global_batch_size": "per_device_train_batch_size and gradient_accumulation_steps in TrainingArguments",
    "world_size": "the number of processes of torchrun",
    "parallelism": "fsdp in TrainingArguments, and torchrun, which starts DDP without it",
    "param_dtype": "bf16 in TrainingArguments, which FSDP2 gathers parameters in",
    "reshard_after_forward": "fsdp_config in TrainingArguments",
    "offload_parameters": "fsdp_config in TrainingArguments",
}
"""Options of a plan that the trainer decides, and where."""

_SUGGESTED = {
    "--precision bf16": "TrainingArguments(bf16=True)",
    "--precision fp16": "TrainingArguments(fp16=True)",
    "--precision tf32": "TrainingArguments(tf32=True)",
    "--optimizer adamw8bit": 'TrainingArguments(optim="adamw_bnb_8bit")',
    "--optimizer adafactor": 'TrainingArguments(optim="adafactor")',
    "--optimizer sgd": 'TrainingArguments(optim="sgd")',
    "--split-batch-norm": "split_batch_norm=True",
    "--world-size 2": "torchrun --nproc-per-node 2",
}
"""What asks a trainer for each suggestion."""


def plan(
    trainer: Trainer,
    device: DeviceLike = "auto",
    *,
    longest: Any | None = None,
    **options: Unpack[PlanKeywords],
) -> Plan:
    """Find the fastest way to run a trainer's steps inside a memory budget.

    The trainer's batches, steps and learning rates stay: a plan divides each batch of
    `per_device_train_batch_size` samples into micro-batches, and joins none. So do precision and optimizer.
    Where the loss compares the samples of a batch, as with in-batch negatives, it is not divided.

    **Several processes.** Each calls this; the first plans, and all get its plan. DDP and FSDP2 are read from
    the trainer, and the prediction is for each process.

    Args:
        trainer: As it is before `train()`.
        device: As for `brimful.plan`.
        longest: As for `job`.
        **options: As for `brimful.plan`, except those that the trainer decides.

    Returns:
        The plan, for `apply`.

    Raises:
        UsageError: An option is the trainer's to decide, `micro_batch_size` is larger than the trainer's
            batches or would divide one whose samples the loss compares, or as `job`.
        InfeasibleError: Nothing permitted fits.
        CaptureError: The step cannot be run on fake tensors.
    """
    check_kind(trainer)
    for name in options:
        if name in _OF_THE_TRAINER:
            raise UsageError(f"{name} is decided by the trainer: set {_OF_THE_TRAINER[name]}.")
    for name in ("offload_optimizer", "optimizer_in_backward", "prefetch_inputs"):
        if options.get(name):
            raise UsageError(f"{name}={options[name]!r} is not supported in a Trainer.")  # type: ignore[literal-required]
    asked: PlanKeywords = {**options, "precision": precision_of(trainer), "offload_optimizer": False}
    if trainer.args.world_size > 1:
        asked["parallelism"] = parallelism_of(trainer)
    if shards(trainer):
        asked["reshard_after_forward"] = reshards_after_forward(trainer)
    reason = why_not_divided(trainer)
    _check_size(trainer, options.get("micro_batch_size"), reason)
    if reason is not None:
        asked["micro_batch_size"] = int(trainer.args.train_batch_size)
    size, of_batch = effective_batch_size(trainer), int(trainer.args.train_batch_size)
    notes = (*reading_notes(trainer, longest), *few_samples_notes(trainer, size), *sharding_notes(trainer))
    if reason is not None:
        notes += (f"the batch is not divided: {reason}",)

    def planned() -> Plan:
        with permitted_in_process_group(), RandomState.kept():  # the trainer was seeded when it was made
            own = job(trainer, longest=longest)
            make = partial(
                plan_of_trainer,
                own,
                device,
                check=partial(check_planned_division, trainer),
                global_batch_size=size,
                world_size=trainer.args.world_size,
            )
            found = make(**asked)
            joining = found.settings.micro_batch_size
            if joining > of_batch:
                asked["micro_batch_size"] = of_batch
                found = make(**asked)
            evaluated = evaluation_notes(trainer, own) if found.device_kind == "cuda" else ()
        of_trainer = (*notes_for_trainer(found, trainer), *notes, *division_notes(trainer))
        return replace(
            found,
            suggestions=tuple(for_trainer(found.suggestions, _SUGGESTED)),
            notes=(*of_trainer, *_joining_notes(trainer, joining), *evaluated),
        )

    try:
        return _of_the_first_process(trainer, planned)
    except InfeasibleError as infeasible:
        error = infeasible_for_trainer(infeasible, _SUGGESTED)
        if reason is None:
            raise error from None
        raise InfeasibleError(
            f"{_without_asked_size(str(error), options)}\n  the batch is not divided: {reason}",
            budget_bytes=error.budget_bytes,
            smallest_peak_bytes=error.smallest_peak_bytes,
            suggestions=error.suggestions,
        ) from None


def _of_the_first_process(trainer: Trainer, planned: Callable[[], Plan]) -> Plan:
    """One plan for all processes, which the first makes: what is free or measured may differ between them."""
    found: Plan | BrimfulError | None = None
    with init_distributed(torch.device(trainer.args.device)) as ranks:
        if ranks.is_first:
            try:
                found = planned()
            except BrimfulError as error:
                found = error
            except BaseException as error:
                ranks.broadcast(BrimfulError(f"the first process cannot plan: {error!r}"))
                raise
        shared = cast(Plan | BrimfulError, ranks.broadcast(found))
    if isinstance(shared, BrimfulError):
        raise shared
    return shared


def _without_asked_size(message: str, options: PlanKeywords) -> str:
    """The message of an `InfeasibleError` without the micro-batch size that the loss decided, not the user."""
    if options.get("micro_batch_size") is not None:
        return message
    whole = re.sub(r"\n  you asked for: micro-batches of \d+;[^\n]*", "", message)
    return re.sub(r"(you asked for: [^\n]*?)(, )?micro-batches of \d+(?(2)|, )", r"\1", whole)


def _check_size(trainer: Trainer, asked: int | None, reason: str | None) -> None:
    """Refuse to join a trainer's batches, and to divide those that have a `reason` to stay whole."""
    size = int(trainer.args.train_batch_size)
    if reason is not None and asked not in (None, size):
        raise UsageError(
            f"micro_batch_size={asked} would change what is trained; the trainer has "
            f"per_device_train_batch_size={size}. {reason[0].upper()}{reason[1:]}"
        )
    if asked is not None and asked > size:
        raise UsageError(
            f"micro_batch_size={asked} is larger than the trainer's batches of {size}. A plan divides them, "
            f"and joins none. Set per_device_train_batch_size={asked} in TrainingArguments, and fewer "
            "gradient_accumulation_steps."
        )


def _joining_notes(trainer: Trainer, joining: int) -> tuple[str, ...]:
    """A note that micro-batches larger than the trainer's batches would be faster, by the first search."""
    args = trainer.args
    if joining <= args.train_batch_size:
        return ()
    return (
        f"micro-batches of {joining} would be faster, and the trainer's batches have {args.train_batch_size}: "
        "a plan divides them, and joins none. To let it choose, set "
        f"per_device_train_batch_size={args.train_batch_size * args.gradient_accumulation_steps} and "
        "gradient_accumulation_steps=1 in TrainingArguments",
    )


def apply(
    plan: Plan, trainer: Trainer, *, recover: bool = True, report: bool = True, verify: bool = True
) -> AppliedPlan:
    """Put a plan in force on a trainer.

    From `train()` on, the trainer's batches are divided into the plan's micro-batches, and the plan's unit
    actions, memory format, optimizer implementation and allocator settings are in force. The trainer's loader,
    arguments and steps stay as they are.

    **Out of memory.** A training step in which memory runs out is undone and taken again: once unchanged, then
    with micro-batches of half the size, which stay in use. Samples, gradients, random numbers and buffers are
    those of an undisturbed run. Evaluation and prediction are retried too, then with a batch in halves. With
    several processes nothing is retried.

    Args:
        plan: Of `plan`, or read with `Plan.load`.
        trainer: Before `train()`.
        recover: Whether steps in which memory runs out are retried.
        report: Print predicted beside measured at the end of training.
        verify: If the plan divides batches, compare the loss of a few samples with that of their parts before
            the first step: `train()` raises EquivalenceError if they differ, and warns if that cannot be
            checked. Under FSDP2 it is not checked.

    Returns:
        What was applied: `remove()` undoes it, `recoveries` lists the attempts of steps that were repeated.

    Raises:
        UsageError: The plan is for another effective batch, number of processes or precision, or has settings
            that a trainer cannot carry out.
    """
    return AppliedPlan(plan, trainer, recovers=recover, reports=report, verifies=verify)
