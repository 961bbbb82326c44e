"""A Transformers `Trainer`, as its user wrote it, read as a job.

Private API of transformers 5.23 used here: `_remove_unused_columns`, `_get_collator_with_removed_columns`,
`_signature_columns` through both, and `_loss_shifts_labels`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from typing import Any

from accelerate.utils import DistributedType, convert_outputs_to_fp32
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Trainer

from brimful.errors import UsageError
from brimful.job import Batch, Job

MOST_SAMPLES_READ = 10_000
"""Of a dataset, to find the longest: a choice."""
_ALIKE_SAMPLES = 64
"""This number of samples of one size in a row, such as images after a transform, stands for all: a choice."""

IGNORED_LABEL = -100
"""Labels that do not count. Source: transformers 5.23, `Trainer._get_num_items_in_batch`."""


def effective_batch_size(trainer: Trainer) -> int:
    """Samples per optimizer step, of all processes."""
    args = trainer.args
    return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)


def precision_of(trainer: Trainer) -> str:
    """The precision that the trainer's arguments choose."""
    args = trainer.args
    if args.bf16 or args.fp16:
        return "bf16" if args.bf16 else "fp16"
    return "tf32" if args.tf32 else "fp32"


def job_of_trainer(trainer: Trainer, *, longest: Any | None = None) -> Job:
    """See `integrations.transformers.job`."""
    _check_supported(trainer)
    _checkpoint_as_asked(trainer)
    batch = _batches_of_longest(trainer, longest)
    counts = _counts_labels(trainer, batch(1))
    count = _label_counter(trainer) if counts else None

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        inputs = dict(batch)  # the trainer takes the labels out
        items = None if count is None else count(inputs)
        found: Tensor = trainer.compute_loss(_as_prepared(trainer, model), inputs, **_items(trainer, items))
        return found

    return Job(
        model=trainer.model,
        loss=loss,
        batch=batch,
        optimizer=lambda model: _make_optimizer(trainer, model),
        count=count,
        counted="tokens" if counts else "counted",
        name=type(trainer.model).__name__,
    )


def _check_supported(trainer: Trainer) -> None:
    if trainer.args.n_gpu > 1:
        raise UsageError(
            f"the trainer would use torch.nn.DataParallel on {trainer.args.n_gpu} GPUs in one process. Start "
            "one process per GPU with torchrun, or set CUDA_VISIBLE_DEVICES to one GPU."
        )
    kind = trainer.accelerator.distributed_type
    if kind not in (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU):
        raise UsageError(
            f"the trainer runs with {kind.value}; plans for trainers are made for one process and for DDP. "
            "For FSDP2 and DeepSpeed use `bf.plan` with `parallelism`."
        )


def _checkpoint_as_asked(trainer: Trainer) -> None:
    """Turn on the model's own checkpointing if the arguments ask for it, as `train()` will."""
    args, model = trainer.args, trainer.model
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        enable = getattr(model, f"{name}_enable", None)
        if getattr(args, name, False) and enable is not None:
            options = getattr(args, f"{name}_kwargs", None)
            enable(**{f"{name}_kwargs": dict(options)} if options else {})
            return


def _as_prepared(trainer: Trainer, model: nn.Module) -> Any:
    """The model as Accelerate prepares it: under mixed precision its outputs are float32 copies."""
    return _Float32Outputs(model) if trainer.args.bf16 or trainer.args.fp16 else model


class _Float32Outputs:
    """Calls a model and converts its outputs; all else is the model's."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._call = convert_outputs_to_fp32(model.__call__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _items(trainer: Trainer, items: Tensor | None) -> dict[str, Tensor]:
    """The count of labels as an argument of `compute_loss`; older overrides do not take it."""
    takes = "num_items_in_batch" in inspect.signature(trainer.compute_loss).parameters
    return {"num_items_in_batch": items} if takes and items is not None else {}


def _counts_labels(trainer: Trainer, batch: Batch) -> bool:
    """Whether the trainer divides the loss by the number of labels of the whole step."""
    is_counted = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    return bool(is_counted and isinstance(batch.get("labels"), Tensor))


def _label_counter(trainer: Trainer) -> Callable[[Batch], Tensor]:
    shifts = bool(getattr(trainer, "_loss_shifts_labels", False))

    def count(batch: Batch) -> Tensor:
        labels = batch.get("shift_labels")
        if labels is None:
            labels = batch["labels"][..., 1:] if shifts else batch["labels"]
        return labels.ne(IGNORED_LABEL).sum()

    return count


def _make_optimizer(trainer: Trainer, model: nn.Module) -> Optimizer:
    """The trainer's optimizer over another copy of its model; the trainer keeps its own."""
    own = trainer.optimizer
    if own is not None:
        return _rebuilt(own, trainer.model, model)
    own_model = trainer.model
    try:
        trainer.model = model  # for overrides that take no model
        made = trainer.create_optimizer()
    finally:
        trainer.optimizer, trainer.model = own, own_model
    return made


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


def _batches_of_longest(trainer: Trainer, longest: Any | None) -> Callable[[int], Batch]:
    """Makes batches of the longest samples, with the trainer's collator."""
    samples, collate = _samples_and_collator(trainer)
    chosen = [longest] if longest is not None else _longest(samples)

    def batch(n: int) -> Batch:
        return dict(collate([chosen[index % len(chosen)] for index in range(n)]))

    return batch


def _samples_and_collator(trainer: Trainer) -> tuple[Any, Callable[[list[Any]], Mapping[str, Any]]]:
    dataset, collate = trainer.train_dataset, trainer.data_collator
    if dataset is None:
        raise UsageError("the trainer has no train_dataset, from which a plan takes its longest sample.")
    if type(dataset).__module__.startswith("datasets."):
        return trainer._remove_unused_columns(dataset, description="training"), collate
    return dataset, trainer._get_collator_with_removed_columns(collate, description="training")


def _longest(samples: Any) -> list[Any]:
    """The samples that are longest in some field, the one that is longest in all first."""
    total, best = (-1, None), {}  # type: tuple[int, Any], dict[str, tuple[int, Any]]
    alike = 0
    seen: dict[str, int] | None = None
    for sample in _some_of(samples):
        lengths = _lengths(sample)
        if sum(lengths.values()) > total[0]:
            total = sum(lengths.values()), sample
        for name, length in lengths.items():
            if length > best.get(name, (-1, None))[0]:
                best[name] = length, sample
        alike = alike + 1 if lengths == seen else 0
        seen = lengths
        if alike >= _ALIKE_SAMPLES:
            break
    if seen is None:
        raise UsageError("the train_dataset of the trainer is empty.")
    first, first_lengths = total[1], _lengths(total[1])
    others = [sample for name, (length, sample) in best.items() if length > first_lengths.get(name, 0)]
    return [first, *others]


def _some_of(samples: Any) -> Iterator[Any]:
    if isinstance(samples, Sized) and hasattr(samples, "__getitem__"):
        step = max(len(samples) // MOST_SAMPLES_READ, 1)
        return (samples[index] for index in range(0, len(samples), step))
    return islice(iter(samples), MOST_SAMPLES_READ)


def _lengths(sample: Any) -> dict[str, int]:
    """The number of elements of each field of a sample."""
    fields = sample.items() if isinstance(sample, Mapping) else [("", sample)]
    return {str(name): _size(value) for name, value in fields}


def _size(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, str | bytes):
        return len(value)
    if hasattr(value, "size") and not callable(value.size) and not isinstance(value.size, tuple):
        return int(value.size)  # NumPy
    if isinstance(value, Sequence):
        return sum(map(_size, value)) if value and isinstance(value[0], Sequence) else len(value)
    return 1
