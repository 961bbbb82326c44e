"""What is trained: a model, its loss, its batch and its optimizer. Nothing about how."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from brimful.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

Batch = Any
"""Nested dicts, lists and tuples of tensors. Every tensor that has dimensions has samples first."""


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
    """`loss(model, batch)`: a scalar, the mean over what `count` counts. With `embed`, `loss(embeddings)`: a
    scalar of all samples of the global batch together, however they are split."""
    batch: Callable[[int], Batch] | Batch
    """`batch(n)`: a batch of n samples, for prediction; or one real batch, resized as needed."""
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | str = "adamw"
    """`optimizer(parameters)`, or the name of an optimizer with its usual defaults."""
    count: Callable[[Batch], Tensor | int] | None = None
    """How many terms the mean in `loss` is over (tokens, say); None means the batch's samples."""
    embed: Callable[[nn.Module, Batch], Any] | None = None
    """For a loss that couples the samples of a batch, such as a contrastive one: `embed(model, batch)` is all
    that the loss is made of, a nest of tensors as a `Batch` is, computed for each sample by itself. Samples are
    first; a tensor without dimensions (a temperature, a penalty) is a mean over the batch's samples."""
    loop: Callable[[nn.Module, Iterable[Batch]], object] | None = None
    """Your own training loop, `loop(model, batches)`, to estimate it as it is written: what it keeps alive,
    where it clears gradients, how many optimizers it steps. `loss` and `optimizer` are then not used. It is run
    over a few batches on fake tensors; planning and training use brimful's own loop."""
    data: Callable[[], Data] | None = None
    """What to train on; only training needs it."""
    metrics: Callable[[nn.Module, Batch], Mapping[str, Tensor | float]] | None = None
    """Means over a validation batch's samples, by name, such as `{"accuracy": …}`."""
    counted: str = "terms"
    """What `count` counts, as reports call it: "tokens", say."""
    name: str = "job"
    """What reports call this job."""
    about: Mapping[str, Any] | None = None
    """What is to be known wherever the weights go, such as the names of classes: plain containers, written to
    the run directory as `job.json`. A run is resumed only by a job of which it is the same."""

    def __post_init__(self) -> None:
        if self.embed is not None and self.count is not None:
            raise UsageError(
                f"{self.name!r} has both `embed` and `count`. A loss of all embeddings of the global batch is "
                "no mean over micro-batches, so nothing is weighted by a count. Leave `count` out."
            )
