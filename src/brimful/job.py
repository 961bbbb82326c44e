"""The job to train: a model, its loss, its batch and its optimizer, independent of how it is trained."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from brimful.arguments import check_fields, checks_call
from brimful.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

Batch = Any
"""Nested dicts, lists and tuples of tensors; also dataclasses and objects with a `to` method. To split a batch,
its samples are found in the first dimension of every tensor, in lists with one entry per sample, or in a batch
of graphs; `Job.batch_dim` or `Job.split` override this."""


@runtime_checkable
class Samples(Protocol):
    """Samples that are read on demand, for example from files, in a different order for each epoch.

    The same arguments must return the same batches, so that a run can be repeated and resumed exactly.
    """

    def __len__(self) -> int:
        """The number of samples in an epoch."""

    def batches(self, size: int, *, seed: int, epoch: int, skip: int = 0) -> Iterable[Batch]:
        """The batches of an epoch, on the host.

        Args:
            size: Samples per batch; the last batch may have fewer.
            seed: Decides the order, together with the epoch.
            epoch: At least 1.
            skip: Number of batches to skip at the start.

        Returns:
            Nested tensors with samples in the first dimension.
        """


@checks_call
@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The samples for training and for validation.

    Each is either one `Batch` that holds every sample (brimful shuffles it and splits it into global
    batches), or an iterable of batches, such as a DataLoader, that is iterated once per epoch. Training
    samples may also be `Samples`, which receive the global batch size.
    """

    train: Batch | Iterable[Batch] | Samples
    validation: Batch | Iterable[Batch] | None = None
    training_sample: Batch | Iterable[Batch] | None = None
    """Some of the training samples, without augmentation: each validation computes loss and metrics of them
    too, and reports them as `training_loss`, `training_accuracy` and so on."""
    longest: Batch | Callable[[int], Batch] | None = None
    """The global batch of `train` with the highest peak memory, such as the one with the longest texts; or a
    function that makes it for a number of samples. It is predicted, and is run before the first step, so that
    memory does not run out hours later. Not needed if all batches have the same shape."""


DEFAULT_NAME = "job"


class DefaultOptimizer(str):
    """The name of an optimizer that nobody chose."""

    __slots__ = ()


DEFAULT_OPTIMIZER = DefaultOptimizer("adamw")
DEFAULT_OPTIMIZER_NOTE = (
    "The optimizer is AdamW, which a Job without an optimizer has. Job(optimizer=…) or optimizer=… "
    "(--optimizer) predicts another."
)
"""For results of a job without an optimizer of its own."""

_REQUIRED = ("model", "loss")
_FUNCTIONS = {
    "model": "model(), or an nn.Module",
    "loss": "loss(model, batch)",
    "weights": "weights(model)",
    "count": "count(batch)",
    "embed": "embed(model, batch)",
    "loop": "loop(model, batches)",
    "metrics": "metrics(model, batch)",
    "summarize": "summarize(means)",
    "split": "split(batch)",
    "collate": "collate(samples)",
    "shard": "shard(model, mesh)",
}
"""Fields of a job that are functions, and how they are called."""


@checks_call
@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training job: a model, its loss, a batch and an optimizer.

    One step computes `loss` of the global batch (the mean over samples, unless `count` or `reduction` say
    otherwise), its gradient, and one step of `optimizer`. Memory techniques do not change these mathematics;
    another precision or optimizer does, and is used only if it is asked for.
    """

    model: Callable[[], nn.Module] | nn.Module
    """The model, or a function that builds it. Estimating and planning never change a given module."""
    weights: Callable[[nn.Module], object] | None = None
    """`weights(model)`: loads weights into the built model before training, for example from a file. It is not
    called to estimate or plan, which need no values. None keeps the weights that the model was built with."""
    loss: Callable[..., Tensor]
    """`loss(model, batch)`: a scalar tensor, a mean over what `count` counts or a sum (see `reduction`). With
    `embed`, `loss(embeddings)`: a scalar of all samples of the global batch, however the batch is split."""
    batch: Callable[[int], Batch] | Batch
    """`batch(n)`: a batch of n samples, for prediction; or one real batch, which is resized as needed. A real
    batch that cannot be split counts as one sample. Where batches differ in more than their samples, the
    longest batch of several draws, and of `data`, is predicted."""
    batch_dim: int | None = None
    """The batch dimension of tensors; tensors with too few dimensions for it use their first. Use 1 for
    sequences of shape (time, batch, …). None finds the samples; see `Batch`."""
    split: Callable[[Batch], Sequence[Any]] | None = None
    """`split(batch)`: the list of samples of a batch, if they cannot be found automatically."""
    collate: Callable[[list[Any]], Batch] | None = None
    """`collate(samples)`: a batch from samples that `split` returned, like the `collate_fn` of a DataLoader.
    Required if `split` is given."""
    optimizer: Callable[[Any], Optimizer] | str = DEFAULT_OPTIMIZER
    """A function that makes the optimizer, or the name of one with its usual defaults. The function receives a
    list of the trainable parameters; if its argument is called `named_parameters`, pairs of name and parameter;
    if it is called `model`, the model: `lambda model: AdamW(decay_groups(model))`."""
    count: Callable[[Batch], Tensor | float] | None = None
    """`count(batch)`: the number of what `loss` averages over, such as the tokens that are not padding; None
    means samples."""
    embed: Callable[[nn.Module, Batch], Any] | None = None
    """`embed(model, batch)`: the inputs of `loss`, for a loss that couples the samples of a batch, such as a
    contrastive loss. They are nested tensors like a `Batch`, computed for each sample independently, with
    samples first; a 0-dimensional tensor (a temperature, a penalty) is a mean over the batch's samples."""
    loop: Callable[[nn.Module, Iterable[Batch]], object] | None = None
    """`loop(model, batches)`: your own training loop, to estimate it as it is written: which tensors it keeps
    alive, where it clears gradients, which optimizers it steps. It runs over a few batches of fake tensors to
    estimate, of real ones to measure, and then `loss` and `optimizer` are not used. Planning and training use
    them, in brimful's own loop."""
    shard: Callable[[nn.Module, DeviceMesh], object] | None = None
    """`shard(model, mesh)`: your own calls of `fully_shard` under FSDP2, the last one on the model itself,
    which the loss then has to call. It decides types and resharding too. None shards the model's repeated
    blocks."""
    data: Callable[[], Data] | Data | None = None
    """Returns the training and validation data, or is them; only training needs it. Predictions read some of
    the training data, for at most two seconds, to find its longest batch."""
    metrics: Callable[..., Mapping[str, Tensor | float]] | None = None
    """`metrics(model, batch)`: means over a validation batch by name, such as ``{"accuracy": …}``. With `embed`
    it may be `metrics(embeddings)`, of all samples of a validation batch, such as a retrieval accuracy."""
    summarize: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor | float]] | None = None
    """`summarize(means)`: the metrics to report, from the means of `metrics` over the validation data, which
    may then be tensors of any shape. For metrics that are not means over samples, such as F1, which follows
    from the means of true and false positives. None reports the means."""
    reduction: Literal["mean", "sum"] = "mean"
    """"mean" if `loss` is a mean over what `count` counts, "sum" if it is a sum over the samples: the losses of
    micro-batches are averaged or added."""
    counted: str = "counted"
    """Name of what `count` counts, for reports, such as "tokens": then they show tokens/s beside samples/s."""
    name: str = DEFAULT_NAME
    """Name of this job in reports and errors. On the command line a job without one has the NAME of
    `file.py:NAME`."""
    about: Mapping[str, Any] | None = None
    """Metadata to keep with the weights, such as class names: plain containers, written to the run directory as
    `job.json`. A run can be resumed only by a job with the same metadata."""

    def __post_init__(self) -> None:
        for name, call in _FUNCTIONS.items():
            part = getattr(self, name)
            if not callable(part) and (part is not None or name in _REQUIRED):
                raise _wrong_part(name, part, f"a function, called as {call}")
        if not isinstance(self.optimizer, str) and not callable(self.optimizer):
            what = "a name, or a function that makes one: lambda parameters: torch.optim.AdamW(parameters)"
            raise _wrong_part("optimizer", self.optimizer, what)
        if self.data is not None and not isinstance(self.data, Data) and not callable(self.data):
            raise _wrong_part("data", self.data, "a function that returns a Data(train=…)")
        check_fields(self, shown="Job({}=…)")
        if self.reduction == "sum" and (self.embed is not None or self.count is not None):
            other, why, unused = "count", "Sums are just added", "count"
            if self.embed is not None:
                other, why, unused = "embed", "The loss is computed once of all embeddings", "reduction"
            raise UsageError(
                f'{self.name!r} has both `reduction="sum"` and `{other}`. {why}, so `{unused}` has no effect. '
                "Remove one of the two."
            )
        if (self.split is None) != (self.collate is None):
            has, lacks = ("collate", "split") if self.split is None else ("split", "collate")
            raise UsageError(
                f"{self.name!r} has `{has}` and not `{lacks}`. `split(batch)` returns a list of samples, and "
                "`collate(samples)` makes a batch of some of them. Give both."
            )
        if self.batch_dim is not None:
            self._check_batch_dim(self.batch_dim)
        if self.embed is not None and self.count is not None:
            raise UsageError(
                f"{self.name!r} has both `embed` and `count`. A loss of all embeddings of the global batch is "
                "not a mean over micro-batches, so nothing is weighted by a count. Omit `count`."
            )
        if self.summarize is not None and self.metrics is None:
            raise UsageError(
                f"{self.name!r} has `summarize` and not `metrics`, whose means it takes. Give both or none."
            )
        self._check_loss()

    @property
    def measures_embeddings(self) -> bool:
        """Whether `metrics` is called with the embeddings of a batch, not with the model and a batch."""
        return (
            self.embed is not None and self.metrics is not None and not _takes(self.metrics, "model", "batch")
        )

    def _check_loss(self) -> None:
        """Refuse a loss that cannot be called as it will be."""
        arguments = ("model", "batch") if self.embed is None else ("embeddings",)
        if self.loop is None and not _takes(self.loss, *arguments):
            raise UsageError(
                f"the loss of {self.name!r}{_defined_at(self.loss)} is called as loss({', '.join(arguments)}), "
                f"and takes other arguments{_parameters_of(self.loss)}."
            )

    def _check_batch_dim(self, batch_dim: int) -> None:
        if batch_dim < 0:
            raise UsageError(
                f"Job(batch_dim=…) is {self.batch_dim}; it must be at least 0. Tensors of a batch may have "
                "different numbers of dimensions, so it is counted from the first."
            )
        if self.split is not None:
            raise UsageError(
                f"{self.name!r} has both `batch_dim` and `split`, and each says where the samples are. Remove "
                "one of the two."
            )


def _defined_at(function: Callable[..., Any]) -> str:
    """Where a Python function is defined, as " (file.py:12)"; "" for any other callable."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return ""
    path, here = Path(code.co_filename), Path.cwd()
    return f" ({path.relative_to(here) if path.is_relative_to(here) else path}:{code.co_firstlineno})"


def _parameters_of(function: Callable[..., Any]) -> str:
    """The parameters of a function for which `_takes` is false, as ": (output, target)"."""
    return f": ({', '.join(inspect.signature(function).parameters)})"


def _takes(function: Callable[..., Any], *arguments: object) -> bool:
    """Whether a function can be called with these arguments; true if its signature is unknown."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # one written in C
        return True
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def _wrong_part(name: str, found: object, expected: str) -> UsageError:
    return UsageError(f"Job({name}=…) is of type {type(found).__name__}; it must be {expected}.")
