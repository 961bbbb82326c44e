"""A Transformers `Trainer`, as its user wrote it, read as a job.

Checked with trl 1.16 and sentence-transformers 6.2.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Trainer

from brimful.capture import capture_step
from brimful.devices import find_device
from brimful.errors import UsageError
from brimful.integrations.division import Division
from brimful.integrations.transformers.batches import batches_of_longest, layout_of_trainer
from brimful.integrations.transformers.kinds import check_kind
from brimful.integrations.transformers.loss import (
    adds_up,
    counted_labels,
    ignores_count,
    items_counter,
    loss_is_of_user,
    noticing_use,
    passes_count,
)
from brimful.integrations.transformers.modules import StandIns, model_of, trained_module
from brimful.integrations.transformers.sharding import check_parallelism, shard_of, shards
from brimful.job import Batch, Job
from brimful.settings import Settings
from brimful.torch_utils.replaced import replaced
from brimful.trace import Trace


def effective_batch_size(trainer: Trainer) -> int:
    """Samples per optimizer step, of all processes."""
    args = trainer.args
    return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)


def precision_of(trainer: Trainer) -> str:
    """The precision that the trainer's arguments choose; under FSDP2 that of its ops without autocast."""
    args = trainer.args
    if (args.bf16 or args.fp16) and not shards(trainer):
        return "bf16" if args.bf16 else "fp16"
    return "tf32" if args.tf32 else "fp32"


def job(trainer: Trainer, *, longest: Any | None = None) -> Job:
    """The training job of a `Trainer`, for `bf.estimate`, `bf.measure` and `bf.verify`.

    Model, loss (with label smoothing and `compute_loss_func`), collator, optimizer, precision and the count of
    tokens are the trainer's. A batch is made of the longest samples of the training data, so that what is
    predicted is the largest step.

    Args:
        trainer: As it is before `train()`.
        longest: The sample with the highest memory use, as the dataset returns it. Default: searched for in the
            dataset, of which at most 10,000 samples are read, from all its parts, for at most two seconds; of a
            stream the first ones.

    Returns:
        The job; its model is the trainer's, which estimating and planning do not change.

    Raises:
        UsageError: The trainer has no model yet, no samples, or trains in a way that is not supported.
    """
    _check_supported(trainer)
    _checkpoint_as_asked(trainer)
    batch = batches_of_longest(trainer, longest)
    counts = passes_count(trainer) and isinstance(batch(1).get("labels"), Tensor)
    count = partial(counted_labels, trainer) if counts else None
    stand_ins, layout = StandIns(trainer), layout_of_trainer(trainer)

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        inputs = dict(batch)  # the trainer takes the labels out
        items = None if count is None else count(inputs)
        own = stand_ins.with_module(module)
        with _as_prepared(own), noticing_use(trainer, items), _naming_missing_labels(trainer, batch):
            found: Tensor = own.compute_loss(own.model, inputs, **_items(own, items))
        return found

    return Job(
        model=trained_module(trainer),
        loss=loss,
        batch=batch,
        split=layout.to_samples,
        collate=layout.collate,
        optimizer=lambda model: _make_optimizer(trainer, stand_ins, model),
        shard=shard_of(trainer),
        count=count,
        counted="tokens" if counts else "counted",
        name=type(trainer.model).__name__,
    )


def find_use_of_count(trainer: Trainer) -> None:
    """Run a trainer's loss on fake tensors, unless it ran, to find how it counts labels."""
    if ignores_count(trainer) is None:
        any_gpu = find_device("T4")  # of the table, so that nothing is measured; the loss is the same on all
        capture_step(job(trainer), Settings(micro_batch_size=1), any_gpu, steps=1)


def check_planned_division(trainer: Trainer, job: Job, settings: Settings, baseline: Trace) -> bool:
    """Check while planning that a user's loss may be divided; losses of libraries are not checked."""
    if not loss_is_of_user(trainer):
        return False
    adds = adds_up(trainer, job.count)
    if not adds:
        job = replace(job, count=items_counter(trainer, layout_of_trainer(trainer)))
    elif job.count is None:  # else each part is divided by the count of its labels, and weighs by it
        job = replace(job, reduction="sum")
    return _division(trainer, adds=adds).check_planned(job, settings, baseline)


def check_first_division(trainer: Trainer, settings: Settings, batch: Batch, items: Any) -> bool:
    """Check, on a few samples of a real batch, that its loss is made of those of its micro-batches.

    The trainer's model is in training; neither it nor random generators are changed. `settings` are those of a
    plan that divides the trainer's batches, `items` is the count of labels of the whole step, as `compute_loss`
    gets it. Returns whether that is decided: a batch of few samples decides nothing. Raises `EquivalenceError`
    if the loss is not made of those of the micro-batches.
    """
    stand_ins, layout, adds = StandIns(trainer), layout_of_trainer(trainer), adds_up(trainer, items)

    def loss(module: nn.Module, part: Batch) -> Tensor:
        own = stand_ins.with_module(module)
        with _without_autocast(own.model):
            found: Tensor = own.compute_loss(own.model, dict(part), **_items(own, items))
        return found

    job = Job(
        model=trained_module(trainer),
        loss=loss,
        batch=batch,
        split=layout.to_samples,
        collate=layout.collate,
        count=None if adds else items_counter(trainer, layout),
        reduction="sum" if adds else "mean",  # each part is divided by the count of the whole step
        name=type(trainer.model).__name__,
    )
    return _division(trainer, adds=adds).check_first(job, trained_module(trainer), settings, batch)


def _division(trainer: Trainer, *, adds: bool) -> Division:
    by_labels = not adds and loss_is_of_user(trainer)  # what libraries divide by is theirs, and made for this
    return Division(whole=int(trainer.args.train_batch_size), whose="trainer", weighs_labels=by_labels)


@contextmanager
def _without_autocast(model: Any) -> Iterator[None]:
    """Give a model that Accelerate prepared for mixed precision its own forward, within the context."""
    own = getattr(model, "_original_forward", None)  # accelerate 1.15, `Accelerator.prepare_model`
    with nullcontext() if own is None else replaced(model, "forward", own):
        yield


def _check_supported(trainer: Trainer) -> None:
    check_kind(trainer)
    if trainer.args.n_gpu > 1:
        raise UsageError(
            f"the trainer would use torch.nn.DataParallel on {trainer.args.n_gpu} GPUs in one process, "
            "with the outputs of the whole batch on the first. Start one process per GPU with torchrun, as is "
            "predicted with world_size=N (--world-size N), or set CUDA_VISIBLE_DEVICES to one GPU."
        )
    check_parallelism(trainer)


def _checkpoint_as_asked(trainer: Trainer) -> None:
    """Turn on the model's own checkpointing if the arguments ask for it, as `train()` will."""
    args, model = trainer.args, trainer.model
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        enable = getattr(model, f"{name}_enable", None)
        if getattr(args, name, False) and enable is not None:
            options = getattr(args, f"{name}_kwargs", None)
            enable(**{f"{name}_kwargs": dict(options)} if options else {})
            return


@contextmanager
def _naming_missing_labels(trainer: Trainer, batch: Mapping[str, Any]) -> Iterator[None]:
    """Name the labels in an error that the loss of a batch without them raises within the context."""
    wanted = trainer.label_names or ["labels"]
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if any(name in batch for name in wanted):
            raise
        raise UsageError(
            f"the loss of {type(trainer.model).__name__} needs labels. It raised {type(error).__name__}: "
            f"{str(error).rstrip('.')}, on a batch with {', '.join(batch)} and without {' or '.join(wanted)}. "
            "Add the column to the train_dataset, or have the data_collator make it, as "
            "DataCollatorForLanguageModeling(tokenizer, mlm=False) does."
        ) from error


@contextmanager
def _as_prepared(trainer: Trainer) -> Iterator[None]:
    """Give the model the outputs of one that Accelerate prepared: float32 copies under mixed precision."""
    model: Any = trainer.model
    if shards(trainer) or not (trainer.args.bf16 or trainer.args.fp16):
        yield
        return
    has_own, before = "forward" in vars(model), model.forward
    model.forward = convert_outputs_to_fp32(before)
    try:
        yield
    finally:
        if has_own:
            model.forward = before
        else:
            del model.forward


def _items(trainer: Trainer, items: Tensor | None) -> dict[str, Tensor]:
    """The count of labels as an argument of `compute_loss`; older overrides do not take it."""
    takes = "num_items_in_batch" in inspect.signature(trainer.compute_loss).parameters
    return {"num_items_in_batch": items} if takes and items is not None else {}


def _make_optimizer(trainer: Trainer, stand_ins: StandIns, module: nn.Module) -> Optimizer:
    """The trainer's optimizer over another copy of the trained module; the trainer keeps its own."""
    if trainer.optimizer is not None:
        return _rebuilt(trainer.optimizer, trained_module(trainer), module)
    own = stand_ins.with_module(module)
    own.model = model_of(module)  # for overrides that take no model
    with _naming_optim(trainer):
        made: Optimizer = own.create_optimizer()
    return made


@contextmanager
def _naming_optim(trainer: Trainer) -> Iterator[None]:
    """Refuse optimizers of `optim` that a captured step would not show, or that the context cannot make.

    Layerwise ones and LOMO update during backward, and the optimizer that the trainer steps does nothing.
    Source: transformers/trainer_optimizer.py, `LayerWiseDummyOptimizer`, `_get_lomo_optimizer` (checked: 5.23).
    """
    if trainer.optimizer_cls_and_kwargs is not None or type(trainer).create_optimizer is not _OWN_OPTIMIZER:
        yield
        return
    name = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    if name.endswith("_layerwise") or name in ("lomo", "adalomo"):
        raise _optim_error(name, "updates parameters during backward, which is neither predicted nor planned")
    if name in ("adamw_torch_4bit", "adamw_torch_8bit"):
        raise _optim_error(name, "keeps its state in tensors of torchao's own class, which is not predicted")
    try:
        yield
    except (ImportError, ValueError) as error:
        raise _optim_error(name, f"cannot be made here: {str(error).rstrip('.')}") from error


_OWN_OPTIMIZER = Trainer.create_optimizer
"""What makes the optimizer of `optim`, unless a trainer overrides it."""


def _optim_error(name: str, why: str) -> UsageError:
    return UsageError(
        f'TrainingArguments(optim="{name}") {why}. Take "adamw_bnb_8bit" or "adafactor", which take less '
        'memory than "adamw_torch".'
    )


def _rebuilt(optimizer: Optimizer, own_model: nn.Module, model: nn.Module) -> Optimizer:
    """An optimizer of the same class and options, over the parameters of the same names."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper
    names = {id(parameter): name for name, parameter in own_model.named_parameters()}
    parameters = dict(model.named_parameters())
    groups = [
        {**group, "params": [parameters[names[id(parameter)]] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    taken = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in taken}
    return type(optimizer)(groups, **options)
