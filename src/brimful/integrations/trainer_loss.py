"""How the losses of a trainer's micro-batches add up to that of a step, whatever micro-batches a plan chooses.

`Trainer.training_step` divides a loss by the number of micro-batches, unless `compute_loss` is given the count
of labels of the whole step. Models that accept this count need not use it: classifiers, BERT and T5 return a
mean over their own batch, so the trainer adds up means. The loss of a step then grows with the number of
micro-batches, and a plan that divides the batch would multiply it.

So each micro-batch gets the weight that it has in the user's own micro-batches. Where the loss is a mean over
labels, that is by its number of labels, else of samples.

Private API used here: `Trainer._loss_shifts_labels`. Checked with transformers 5.23, whose
`current_gradient_accumulation_steps` and `loss_is_scaled_for_ga` are set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import Trainer

from brimful.batches import BatchLayout
from brimful.integrations.trainer_modules import model_of
from brimful.planner import MEAN_OVER_SAMPLES_NOTE, Plan
from brimful.replaced import replace_attribute

IGNORED_LABEL = -100
"""Labels that do not count. Source: transformers 5.23, `Trainer._get_num_items_in_batch`."""

_uses_count: WeakKeyDictionary[Trainer, bool] = WeakKeyDictionary()
"""Whether `compute_loss` reads the count of labels, for trainers whose loss ran."""


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
    """What a plan says where a trainer adds up the means of its micro-batches."""
    accumulation = trainer.args.gradient_accumulation_steps
    if accumulation == 1 or not (may_ignore_count(trainer) and ignores_count(trainer)):
        return ()
    return (
        f"the loss ignores num_items_in_batch, so the trainer adds up the means of its {accumulation} "
        f"micro-batches: loss and gradient are {accumulation} times those of the whole batch, with a plan as "
        "without. trainer.loss_is_scaled_for_ga = False has it average them",
    )


def notes_for_trainer(plan: Plan, trainer: Trainer) -> tuple[str, ...]:
    """The notes of a plan, where the one about the mean of a loss is for a trainer's user, or needless.

    It is needless where the user's own micro-batches stay, and for the losses of the libraries, which are means
    over samples or labels where a plan may divide their batches.
    """
    size = int(trainer.args.train_batch_size)
    is_kept = plan.settings.micro_batch_size == size or not _loss_is_of_user(trainer)
    of_loss = (
        "Micro-batches weigh by their samples, or by their labels other than -100 where each token has one: "
        f"the loss must be such a mean. For a mean over something else, pass micro_batch_size={size} to plan()."
    )
    others = [note for note in plan.notes if note != MEAN_OVER_SAMPLES_NOTE]
    return (*others, *([] if is_kept or len(others) == len(plan.notes) else [of_loss]))


def _loss_is_of_user(trainer: Trainer) -> bool:
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
    """Within, note for `ignores_count` whether an op reads the count of labels."""
    watch = _Watch(items)
    with watch:
        yield
    _uses_count[trainer] = watch.is_used


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
    labels = batch.get("shift_labels")
    if labels is None:
        labels = batch["labels"]
        labels = labels[..., 1:] if getattr(trainer, "_loss_shifts_labels", False) else labels
    count: Tensor = labels.ne(IGNORED_LABEL).sum()
    return count


def items_counter(trainer: Trainer, layout: BatchLayout) -> Callable[[Any], float]:
    """Counts what a trainer's loss of a batch is a mean over: labels of tokens that count, else samples."""

    def count(batch: Any) -> float:
        labels = batch.get("labels")
        is_of_tokens = isinstance(labels, Tensor) and labels.dim() > 1 and not labels.is_floating_point()
        return float(counted_labels(trainer, batch) if is_of_tokens else layout.count(batch))

    return count


class LossDivision:
    """Weighs the losses of a trainer's micro-batches as in the micro-batches that its user set.

    Args:
        trainer: Before a plan is in force.
        layout: Of its batches.
        planned_size: The micro-batch of the plan.
    """

    def __init__(self, trainer: Trainer, layout: BatchLayout, planned_size: int) -> None:
        self._trainer, self._layout = trainer, layout
        self._count = items_counter(trainer, layout)
        self._size, self._planned_size = int(trainer.args.train_batch_size), planned_size
        self._batches: Sequence[Any] = ()
        self._adds_means = may_ignore_count(trainer) and bool(ignores_count(trainer))

    def begin(self) -> Callable[[], None]:
        """Weigh losses from now on; returns what ends that."""
        trainer, changes = self._trainer, ExitStack()
        if self._adds_means:
            changes.callback(replace_attribute(trainer, "loss_is_scaled_for_ga", False))
        fetch, train = trainer.get_batch_samples, trainer.training_step
        changes.callback(replace_attribute(trainer, "get_batch_samples", partial(self._fetch, fetch)))
        changes.callback(replace_attribute(trainer, "training_step", partial(self._train, train)))
        return changes.close

    def weigh(self, batch: Any, items: Any) -> None:
        """Have the trainer divide the next loss by the inverse of a micro-batch's weight.

        Args:
            batch: A micro-batch of the step; of another one, such as a part, the divisor stays.
            items: The count of labels that the trainer has for the whole step.
        """
        place = next((i for i, each in enumerate(self._batches) if each is batch), None)
        if place is None or self._is_weighed_by_trainer(items):
            return
        group, of_group = self._users_micro_batches(place)
        divisor = sum(group) / self._counts[place] / of_group if self._counts[place] else math.inf
        self._trainer.current_gradient_accumulation_steps = (
            divisor if self._adds_means else divisor * self._of_user
        )

    def _is_weighed_by_trainer(self, items: Any) -> bool:
        is_as_planned = self._planned_size == self._size or is_scaled_for_step(self._trainer, items)
        return is_as_planned and not self._adds_means

    def _users_micro_batches(self, place: int) -> tuple[list[float], int]:
        """Counts of the micro-batches with which one makes up the user's, and how many of those these are."""
        together, rest = divmod(self._size, self._planned_size)
        if rest or not together:
            return self._counts, self._of_user
        first = place - place % together
        return self._counts[first : first + together], 1

    @property
    def _of_user(self) -> int:
        """Micro-batches that the step has without a plan."""
        return math.ceil(sum(map(self._layout.count, self._batches)) / self._size)

    @cached_property
    def _counts(self) -> list[float]:
        return [self._count(batch) for batch in self._batches]

    def _fetch(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        self._batches = found[0]
        vars(self).pop("_counts", None)
        return found

    def _train(self, own: Callable[..., Any], model: Any, inputs: Any, *others: Any, **kwargs: Any) -> Any:
        self.weigh(inputs, others[0] if others else kwargs.get("num_items_in_batch"))
        return own(model, inputs, *others, **kwargs)


def is_scaled_for_step(trainer: Trainer, items: Any) -> bool:
    """Whether `training_step` leaves a loss as `compute_loss` returns it.

    Args:
        trainer: The trainer.
        items: The count of labels, as `training_step` gets it; None without one.

    Returns:
        Whether it does; otherwise it divides the loss by `current_gradient_accumulation_steps`.
    """
    if trainer.loss_is_scaled_for_ga is not None:
        return bool(trainer.loss_is_scaled_for_ga)
    return items is not None or trainer.compute_loss_func is not None
