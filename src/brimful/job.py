"""What is trained: a model, its loss, its batch and its optimizer. Nothing about how."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

Batch = Any
"""Nested dicts, lists and tuples of tensors. Every tensor that has dimensions has samples first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The samples to train on and those to validate with.

    Each is either one `Batch` that holds every sample (brimful shuffles it and cuts it into global
    batches), or an iterable of batches, such as a DataLoader, that can be iterated once per epoch.
    """

    train: Batch | Iterable[Batch]
    validation: Batch | Iterable[Batch] | None = None
    longest: Batch | None = None
    """The global batch of `train` that takes most memory, such as that with the longest texts. It is tried
    before the first step, so that memory does not run out hours later. Not needed where all batches are of one
    shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training job.

    The mathematics of a step are: the mean of `loss` over the global batch, its gradient, one step of
    `optimizer`. Whatever brimful does to memory leaves them as they are.
    """

    model: Callable[[], nn.Module] | nn.Module
    """The model, or a function that builds it. A module is never changed by estimating or planning."""
    loss: Callable[[nn.Module, Batch], Tensor]
    """`loss(model, batch)`: a scalar, the mean over what `count` counts."""
    batch: Callable[[int], Batch] | Batch
    """`batch(n)`: a batch of n samples, for prediction; or one real batch, resized as needed."""
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | str = "adamw"
    """`optimizer(parameters)`, or the name of an optimizer with its usual defaults."""
    count: Callable[[Batch], Tensor | int] | None = None
    """How many terms the mean in `loss` is over (tokens, say); None means the batch's samples."""
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
