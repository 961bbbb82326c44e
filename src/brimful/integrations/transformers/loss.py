"""How the losses of a trainer's micro-batches add up to those of the batches that its loader gives.

A loss that is divided by the count of labels of the whole step, which `compute_loss` is given, is a sum: those
of micro-batches are added. Models that accept this count need not use it: classifiers, BERT and T5 return a
mean over their own batch. Then each micro-batch has a weight: its share of the labels if each token has one,
else of the samples.

Private API used here: `Trainer._loss_shifts_labels`, `LOSS_MAPPING`. Checked with transformers 5.23, whose
`loss_is_scaled_for_ga` is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import Trainer
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.trainer_pt_utils import nested_concat

from brimful.batches import BatchLayout
from brimful.errors import BatchError
from brimful.integrations.transformers.modules import model_of
from brimful.integrations.transformers.sharding import shards
from brimful.planner import MEAN_OVER_SAMPLES_NOTE, Plan
from brimful.torch_utils.replaced import replace_attribute

IGNORED_LABEL = -100
"""Labels that do not count. Source: transformers 5.23, `Trainer._get_num_items_in_batch`."""
_uses_count: WeakKeyDictionary[Trainer, bool] = WeakKeyDictionary()
"""Whether `compute_loss` reads the count of labels, for trainers whose loss ran."""
_shifts_labels: WeakKeyDictionary[Trainer, bool] = WeakKeyDictionary()
"""Whether `compute_loss` compares each token with the label of the next one, for trainers whose loss ran.

`Trainer._loss_shifts_labels` leaves out models whose class has no loss type, such as GPT-2, and does not know
losses of users."""


def passes_count(trainer: Trainer) -> bool:
    """Whether a trainer passes the count of labels of the whole step to its loss."""
    return bool(trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None)


def may_ignore_count(trainer: Trainer) -> bool:
    """Whether a trainer leaves losses undivided, because it takes them to be divided by the count of labels."""
    return trainer.loss_is_scaled_for_ga is None and passes_count(trainer)


def ignores_count(trainer: Trainer) -> bool | None:
    """Whether a trainer's loss is not divided by the count of labels; None before its loss ran once."""
    uses = _uses_count.get(trainer)
    return None if uses is None else not uses


def division_notes(trainer: Trainer) -> tuple[str, ...]:
    """A note for a plan, if the trainer adds up the means of its micro-batches."""
    accumulation = trainer.args.gradient_accumulation_steps
    if accumulation == 1 or not (may_ignore_count(trainer) and ignores_count(trainer)):
        return ()
    return (
        f"the loss ignores num_items_in_batch, so the trainer adds up the means of its {accumulation} "
        f"micro-batches: loss and gradient are {accumulation} times those of the whole batch, with a plan as "
        "without. trainer.loss_is_scaled_for_ga = False has it average them",
    )


def notes_for_trainer(plan: Plan, trainer: Trainer) -> tuple[str, ...]:
    """The notes of a plan; the one about the mean of a loss is rewritten for trainers, or dropped.

    The note is needless where planning checked the loss, where the user's own micro-batches stay, and for the
    losses of the libraries, which are means over samples or labels where a plan may divide their batches.
    """
    size = int(trainer.args.train_batch_size)
    others = [note for note in plan.notes if note != MEAN_OVER_SAMPLES_NOTE]
    is_known = len(others) == len(plan.notes)
    if is_known or plan.settings.micro_batch_size == size or not loss_is_of_user(trainer):
        return tuple(others)
    of_loss = (
        "Micro-batches weigh by their samples, or by their labels other than -100 where each token has one: "
        "the loss must be such a mean, which `apply` checks in the first step. For a mean over something else, "
        f"pass micro_batch_size={size} to plan()."
    )
    return (*others, of_loss)


def loss_is_of_user(trainer: Trainer) -> bool:
    """Whether the loss is computed by code of the user: a function, a trainer's class, or the model's."""
    of_loss = next(each for each in type(trainer).__mro__ if "compute_loss" in vars(each))
    if trainer.compute_loss_func is not None or not _is_of_library(of_loss):
        return True
    model: Any = model_of(trainer.model)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # under adapters of peft
    return not _is_of_library(type(base))


def _is_of_library(made: type) -> bool:
    return made.__module__.partition(".")[0] in ("transformers", "trl", "sentence_transformers")


@contextmanager
def noticing_use(trainer: Trainer, items: Tensor | None) -> Iterator[None]:
    """Note within the context whether an op reads the count of labels, and whether the loss shifts labels."""
    watch, shifting = _Watch(items), []

    def shifts(*args: Any, **kwargs: Any) -> Any:
        shifting.append(kwargs.get("shift_labels") is None)
        return ForCausalLMLoss(*args, **kwargs)

    names = [name for name, loss in LOSS_MAPPING.items() if loss is ForCausalLMLoss]
    LOSS_MAPPING.update(dict.fromkeys(names, shifts))
    try:
        with watch:
            yield
    finally:
        LOSS_MAPPING.update(dict.fromkeys(names, ForCausalLMLoss))
    _uses_count[trainer], _shifts_labels[trainer] = watch.is_used, any(shifting)


class _Watch(TorchFunctionMode):
    """Notes whether one tensor is an argument of an op."""

    def __init__(self, tensor: Tensor | None) -> None:
        super().__init__()
        self._tensor = tensor
        self.is_used = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._tensor is not None and getattr(func, "__name__", "") != "__get__":  # not of its device or type
            self.is_used |= any(each is self._tensor for each in (*args, *kwargs.values()))
        return func(*args, **kwargs)


def counted_labels(trainer: Trainer, batch: Mapping[str, Any]) -> Tensor:
    """The number of labels of a batch that count, as the trainer counts them."""
    return _counted(batch, shifts=getattr(trainer, "_loss_shifts_labels", False))


def _counted(batch: Mapping[str, Any], *, shifts: bool) -> Tensor:
    labels = batch.get("shift_labels")
    if labels is None:
        labels = batch["labels"][..., 1:] if shifts else batch["labels"]
    count: Tensor = labels.ne(IGNORED_LABEL).sum()
    return count


def items_counter(trainer: Trainer, layout: BatchLayout) -> Callable[[Any], float]:
    """A function that counts what a trainer's loss is a mean over: labels of tokens that count, else samples.

    Labels are counted as the trainer does where its loss is divided by that, as in evaluation, else as the loss
    does.
    """

    def count(batch: Any) -> float:
        labels = batch.get("labels")
        if not isinstance(labels, Tensor) or labels.dim() < 2 or labels.is_floating_point():
            return float(layout.count(batch))
        is_divided = passes_count(trainer) and ignores_count(trainer) is False
        if is_divided:
            return float(counted_labels(trainer, batch))
        return float(_counted(batch, shifts=_shifts_labels.get(trainer, False)))

    return count


def shares_of_loss(parts: list[Any], count: Callable[[Any], float]) -> list[float]:
    """Each part's share in the mean loss of all parts of a batch; the shares add up to 1.

    `count` is one of `items_counter`. Raises `BatchError` if no label counts.
    """
    counts = [count(part) for part in parts]
    total = sum(counts)
    if not total:
        raise BatchError("a micro-batch has no labels that count, so its loss cannot be divided among parts.")
    return [each / total for each in counts]


def joined_results(found: list[Any], shares: list[float]) -> tuple[Any, Any, Any]:
    """Join what `prediction_step` returns for the parts of a batch: loss, logits and labels of each.

    `shares` are those of each part's loss. Loss, logits or labels are None if a part lacks them.
    """
    losses = [loss for loss, _, _ in found]
    loss = None
    if all(each is not None for each in losses):
        loss = sum(each * share for each, share in zip(losses, shares, strict=True))
    joined = []
    for place in (1, 2):
        values = [each[place] for each in found]
        whole = values[0]
        for value in values[1:]:
            whole = None if whole is None else nested_concat(whole, value, padding_index=IGNORED_LABEL)
        joined.append(whole)
    return loss, joined[0], joined[1]


class DividedLoss:
    """Runs a trainer's batches in micro-batches, whose losses add up to those of the batches.

    The trainer's loader, accumulation and counts stay as its user set them: a batch is divided inside
    `training_step`, which runs once for each micro-batch.

    Construct this before a plan is in force. `check` is called with the first batch that is divided and the
    count of labels of its step, and with the next ones until it returns True.
    """

    def __init__(
        self, trainer: Trainer, layout: BatchLayout, check: Callable[[Any, Any], bool] | None = None
    ) -> None:
        self._trainer, self._layout, self._check = trainer, layout, check
        self._count = items_counter(trainer, layout)

    def train(
        self, size: int, own: Callable[..., Tensor], model: nn.Module, inputs: Any, *others: Any, **kwargs: Any
    ) -> Tensor:
        """Run `own`, the trainer's `training_step`, on the micro-batches of a batch; returns the batch's loss.

        `size` is the most samples of a micro-batch; the model may be in a wrapper. Raises `BatchError` if the
        batch has to be divided and cannot be, or no label of it counts.
        """
        if size >= self._trainer.args.train_batch_size:
            return own(model, inputs, *others, **kwargs)
        if (reason := self._layout.why_whole(inputs)) is not None:
            raise BatchError(f"a batch is to be divided into micro-batches of {size}: {reason}")
        parts = self._layout.split(inputs, size)
        items = others[0] if others else kwargs.get("num_items_in_batch")
        if self._check is not None and len(parts) > 1:
            self._check = None if self._check(inputs, items) else self._check
        if adds_up(self._trainer, items) or len(parts) == 1:
            weights = [1.0] * len(parts)
        else:
            weights = shares_of_loss(parts, self._count)
        counted = [(part, weight) for part, weight in zip(parts, weights, strict=True) if weight]
        losses = []
        for number, (part, weight) in enumerate(counted, 1):
            with self._synchronising(model, number == len(counted)), self._weighing(weight):
                losses.append(own(model, part, *others, **kwargs))
        return torch.stack(losses).sum()

    @contextmanager
    def _weighing(self, weight: float) -> Iterator[None]:
        """Multiply what `compute_loss` returns within the context by a part's share in the batch's loss."""
        compute = self._trainer.compute_loss

        def weighed(*args: Any, **kwargs: Any) -> Any:
            found = compute(*args, **kwargs)
            return (found[0] * weight, *found[1:]) if isinstance(found, tuple) else found * weight

        restore = replace_attribute(self._trainer, "compute_loss", weighed) if weight != 1 else lambda: None
        try:
            yield
        finally:
            restore()

    def _synchronising(self, model: nn.Module, is_last: bool) -> AbstractContextManager[object]:
        """Context of a micro-batch: DDP averages gradients once in a batch, FSDP2 in each micro-batch."""
        if is_last or shards(self._trainer):
            return nullcontext()
        found: AbstractContextManager[object] = self._trainer.accelerator.no_sync(model)
        return found


def adds_up(trainer: Trainer, items: Any) -> bool:
    """Whether the losses of the parts of a batch add up to its own, each divided by the count of a whole step.

    Otherwise each is a mean over its own part. The trainer's loss has run. `items` is the count of labels, as
    `training_step` gets it; None without one.
    """
    ignores = may_ignore_count(trainer) and bool(ignores_count(trainer))
    return is_scaled_for_step(trainer, items) and not ignores


def is_scaled_for_step(trainer: Trainer, items: Any) -> bool:
    """Whether `training_step` leaves a loss as `compute_loss` returns it.

    Otherwise it divides the loss by `current_gradient_accumulation_steps`. `items` is the count of labels, as
    `training_step` gets it; None without one.
    """
    if trainer.loss_is_scaled_for_ga is not None:
        return bool(trainer.loss_is_scaled_for_ga)
    return items is not None or trainer.compute_loss_func is not None
