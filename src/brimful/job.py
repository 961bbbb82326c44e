"""What is trained: a model, its loss, its batch and its optimizer. Nothing about how."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from brimful.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

Batch = Any
"""Nested dicts, lists and tuples of tensors, also dataclasses and objects with a method `to`. Where its samples
are matters only where it is split: in the first dimension of every tensor, in lists with an entry for each
sample, in a batch of graphs, or where `Job.batch_dim` or `Job.split` says."""


@runtime_checkable
class Samples(Protocol):
    """Samples that are read when training comes to them, from files say, in another order for each epoch.

    The same arguments must give the same batches: then a run can be repeated and resumed exactly.
    """

    def __len__(self) -> int:
        """Samples in an epoch."""

    def batches(self, size: int, *, seed: int, epoch: int, skip: int = 0) -> Iterable[Batch]:
        """The batches of an epoch, on the host.

        Args:
            size: Samples in each; the last one may have fewer.
            seed: Decides the order, with the epoch.
            epoch: At least 1.
            skip: Batches to leave out at the start.

        Returns:
            Nests of tensors, samples first.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The samples to train on and those to validate with.

    Each is either one `Batch` that holds every sample (brimful shuffles it and cuts it into global
    batches), or an iterable of batches, such as a DataLoader, that can be iterated once per epoch. Those to
    train on may be `Samples`, which are told how large a global batch is.
    """

    train: Batch | Iterable[Batch] | Samples
    validation: Batch | Iterable[Batch] | None = None
    longest: Batch | Callable[[int], Batch] | None = None
    """The global batch of `train` that takes most memory, such as that with the longest texts; or a function
    that makes it from how many samples it has. It is tried before the first step, so that memory does not run
    out hours later. Not needed where all batches are of one shape."""


_REQUIRED = ("model", "loss")
_FUNCTIONS = {
    "model": "model(), or an nn.Module",
    "loss": "loss(model, batch)",
    "weights": "weights(model)",
    "count": "count(batch)",
    "embed": "embed(model, batch)",
    "loop": "loop(model, batches)",
    "metrics": "metrics(model, batch)",
    "split": "split(batch)",
    "collate": "collate(samples)",
}
"""Parts of a job that are functions, and how they are called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training job.

    The mathematics of a step are: the mean of `loss` over the global batch, its gradient, one step of
    `optimizer`. Whatever brimful does to memory leaves them as they are.
    """

    model: Callable[[], nn.Module] | nn.Module
    """The model, or a function that builds it. A module is never changed by estimating or planning."""
    weights: Callable[[nn.Module], object] | None = None
    """Gives the model that was built its weights, from a file say, before it is trained. It is not called to
    estimate or plan, for which weights have no values. None leaves those that the model was built with."""
    loss: Callable[..., Tensor]
    """`loss(model, batch)`: a scalar, a mean over what `count` counts or a sum (`reduction`). With `embed`,
    `loss(embeddings)`: a scalar of all samples of the global batch together, however they are split."""
    batch: Callable[[int], Batch] | Batch
    """`batch(n)`: a batch of n samples, for prediction; or one real batch, resized as needed. A real one that
    cannot be split counts as one sample."""
    batch_dim: int | None = None
    """The dimension of tensors that is the samples; tensors with fewer dimensions have them first. 1 is for
    sequences with time first. None finds the samples; see `Batch`."""
    split: Callable[[Batch], Sequence[Any]] | None = None
    """`split(batch)`: the list of the samples of a batch, for a batch whose samples are not found otherwise."""
    collate: Callable[[list[Any]], Batch] | None = None
    """`collate(samples)`: a batch of some samples that `split` returned, as a DataLoader's `collate_fn` makes
    it. Needed if `split` is given."""
    optimizer: Callable[[Any], Optimizer] | str = "adamw"
    """A function that makes the optimizer, or the name of one with its usual defaults. The function gets a list
    of the trainable parameters; one whose argument is called `named_parameters` gets pairs of name and
    parameter, one whose argument is called `model` the model: `lambda model: AdamW(decay_groups(model))`."""
    count: Callable[[Batch], Tensor | int] | None = None
    """How many terms the mean in `loss` is over (tokens, say); None means the batch's samples."""
    embed: Callable[[nn.Module, Batch], Any] | None = None
    """For a loss that couples the samples of a batch, such as a contrastive one: `embed(model, batch)` is all
    that the loss is made of, a nest of tensors as a `Batch` is, computed for each sample by itself. Samples are
    first; a tensor without dimensions (a temperature, a penalty) is a mean over the batch's samples."""
    loop: Callable[[nn.Module, Iterable[Batch]], object] | None = None
    """Your own training loop, `loop(model, batches)`, to estimate it as it is written: what it keeps alive,
    where it clears gradients, how many optimizers it steps. `loss` and `optimizer` are then not used. It is run
    over a few batches on fake tensors, and on real ones to measure; planning and training use brimful's own
    loop."""
    data: Callable[[], Data] | None = None
    """What to train on; only training needs it."""
    metrics: Callable[[nn.Module, Batch], Mapping[str, Tensor | float]] | None = None
    """Means over a validation batch's samples, by name, such as ``{"accuracy": …}``."""
    reduction: Literal["mean", "sum"] = "mean"
    """Whether `loss` is a "mean" over what `count` counts, or a "sum" over the samples: the losses of
    micro-batches are averaged or added."""
    counted: str = "terms"
    """What `count` counts, as reports call it: "tokens", say."""
    name: str = "job"
    """What reports call this job."""
    about: Mapping[str, Any] | None = None
    """What is to be known wherever the weights go, such as the names of classes: plain containers, written to
    the run directory as `job.json`. A run is resumed only by a job of which it is the same."""

    def __post_init__(self) -> None:
        for name, call in _FUNCTIONS.items():
            part = getattr(self, name)
            if not callable(part) and (part is not None or name in _REQUIRED):
                raise _wrong_part(name, part, f"a function, called as {call}")
        for name in ("name", "counted"):
            if not isinstance(getattr(self, name), str):
                raise _wrong_part(name, getattr(self, name), "text")
        if not isinstance(self.optimizer, str) and not callable(self.optimizer):
            what = "a name, or a function that makes one: lambda parameters: torch.optim.AdamW(parameters)"
            raise _wrong_part("optimizer", self.optimizer, what)
        if self.data is not None and not isinstance(self.data, Data) and not callable(self.data):
            raise _wrong_part("data", self.data, "a function that returns a Data(train=…)")
        if self.about is not None and not isinstance(self.about, Mapping):
            raise _wrong_part("about", self.about, "a dict of plain containers")
        if self.reduction not in ("mean", "sum"):
            raise UsageError(f'Job(reduction=…) is {self.reduction!r}; it must be "mean" or "sum".')
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
            self._check_batch_dim()
        if self.embed is not None and self.count is not None:
            raise UsageError(
                f"{self.name!r} has both `embed` and `count`. A loss of all embeddings of the global batch is "
                "not a mean over micro-batches, so nothing is weighted by a count. Omit `count`."
            )

    def _check_batch_dim(self) -> None:
        if isinstance(self.batch_dim, bool) or not isinstance(self.batch_dim, int):
            raise _wrong_part("batch_dim", self.batch_dim, "an int: 0, 1, …")
        if self.batch_dim < 0:
            raise UsageError(
                f"Job(batch_dim=…) is {self.batch_dim}; it must be at least 0. Tensors of a batch may have "
                "different numbers of dimensions, so it is counted from the first."
            )
        if self.split is not None:
            raise UsageError(
                f"{self.name!r} has both `batch_dim` and `split`, and each says where the samples are. Remove "
                "one of the two."
            )


def _wrong_part(name: str, found: object, expected: str) -> UsageError:
    return UsageError(f"Job({name}=…) is of type {type(found).__name__}; it must be {expected}.")
