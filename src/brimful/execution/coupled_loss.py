"""Losses that couple the samples of a batch, such as contrastive ones, computed a micro-batch at a time.

Such a loss L is a function of the embeddings e of all samples, not a mean over samples: computed for each
micro-batch, it would contrast that micro-batch with itself alone. But only L needs all samples at once. By the
chain rule

    dL/dw = Σ over samples  dL/de · de/dw

so a step first computes all embeddings without gradients, micro-batch by micro-batch; then L and dL/de, which
are small; then each micro-batch's forward once more, with the same random numbers and buffers, and its backward
from dL/de. The result is that of the whole batch at once, for one forward more.

Source: Gao, Zhang, Han, Callan, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup"
(2021), arXiv:2101.06983.

Private torch API used here: `Tensor._version`, `Module._buffers`, and `_NormBase`, the class of all layers with
running statistics (checked: torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from brimful.batches import BatchLayout, layout_of, map_leaves, map_tensors, named_tensors
from brimful.errors import LossError, UsageError
from brimful.execution.hooks import StepHooks
from brimful.execution.losses import check_loss
from brimful.execution.random_state import RandomState
from brimful.job import Batch, Job
from brimful.settings import Settings
from brimful.torch_utils.held_values import have_same_values
from brimful.trace import Phase


@dataclass(frozen=True, slots=True)
class CoupledLoss:
    """A loss of the embeddings of all samples; a call computes it for one batch at once."""

    embed: Callable[[nn.Module, Batch], Any]
    of_embeddings: Callable[[Any], Tensor]
    layout: BatchLayout
    """Finds the samples of its batches."""

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of a batch at once, a scalar; `batch` is on the model's device."""
        return self.of_embeddings(self.embed(model, batch))


def loss_of(job: Job) -> Callable[[nn.Module, Batch], Tensor]:
    """A job's loss as `loss(model, batch)`; a `CoupledLoss` if the job has `embed`."""
    return job.loss if job.embed is None else CoupledLoss(job.embed, job.loss, layout_of(job))


def loss_parts(job: Job) -> dict[str, Callable[..., Any]]:
    """The functions that compute a job's loss, by name."""
    return {"loss": job.loss} | ({} if job.embed is None else {"embed": job.embed})


def embeds_twice(job: Job, micro_batches: Sequence[Batch]) -> bool:
    """Whether a step embeds each of its micro-batches twice: for the loss, and for its gradient."""
    return job.embed is not None and len(micro_batches) > 1


def check_coupled(job: Job, settings: Settings) -> None:
    """Raise `UsageError` if a job's coupled loss cannot be trained under some settings; other jobs pass."""
    if job.embed is None:
        return
    if settings.world_size > 1:
        raise UsageError(
            f"the loss of {job.name!r} is one of all samples together (`embed`), and "
            f"{settings.world_size} ranks would each have the embeddings of their own samples only: "
            "they are not gathered. Train on one rank; its micro-batches may be as small as they have to be."
        )
    if settings.chunked_loss is not None:
        raise UsageError(
            f"the loss of {job.name!r} is one of embeddings (`embed`), which has no logits of "
            f"{settings.chunked_loss.layer!r} to compute it from in chunks. Plan with chunked_loss=False."
        )


def accumulate_coupled(
    loss: CoupledLoss,
    model: nn.Module,
    micro_batches: Sequence[Batch],
    *,
    autocast: Callable[[], AbstractContextManager[object]],
    backward: Callable[[Tensor], None],
    move: Callable[[Batch], Batch],
    hooks: StepHooks,
    last_repeats: int,
) -> Tensor:
    """Add the gradients of a coupled loss of a global batch to those of the parameters.

    Args:
        loss: The loss of all embeddings.
        model: In training mode; its buffers change as by one forward of each micro-batch.
        micro_batches: The global batch in parts.
        autocast: The context in which embeddings and loss are computed.
        backward: Runs backward from the loss, scaled perhaps.
        move: Brings a micro-batch to the device.
        hooks: `observe` and `synchronising` are called.
        last_repeats: Number of micro-batches that the last one stands for.

    Returns:
        The loss, detached.

    Raises:
        LossError: The embeddings are not one row a sample, differ between micro-batches, or have no gradient.
    """

    def embed(batch: Batch) -> Any:
        with autocast():
            return loss.embed(model, batch)

    def loss_of_embeddings(embeddings: Any) -> Tensor:
        with autocast():
            value = loss.of_embeddings(embeddings)
        check_loss(value)
        return value

    device = next(iter(model.parameters())).device
    buffers = _Buffers(model)
    gathered, states = Gathered(), []
    for index, micro_batch in enumerate(micro_batches):
        hooks.observe(Phase.EMBEDDING, index)
        if index == len(micro_batches) - 1:
            states += [RandomState.now(device) for _ in range(last_repeats - 1)]
            gathered.add_stand_ins(last_repeats - 1)
        states.append(RandomState.now(device))
        gathered.add(_embedded(embed, move(micro_batch)), loss.layout.count(micro_batch))
    hooks.observe(Phase.EMBEDDING, 0)
    total, gradients = _loss_and_gradients(gathered, loss_of_embeddings, backward)
    buffers.restore()
    del buffers
    afterwards = RandomState.now(device)
    for index, micro_batch in enumerate(micro_batches):
        hooks.observe(Phase.FORWARD, index)
        states[index].restore(device)
        with hooks.synchronising(index == len(micro_batches) - 1):
            pairs = list(gathered.with_gradients(index, embed(move(micro_batch)), gradients))
            hooks.observe(Phase.BACKWARD, index)
            _backward_from(pairs)
            del pairs
    afterwards.restore(device)
    return total


def gather_embeddings(
    embed: Callable[[Batch], Any],
    micro_batches: Sequence[Batch],
    move: Callable[[Batch], Batch],
    *,
    count: Callable[[Batch], int],
    last_repeats: int = 1,
) -> Any:
    """The embeddings of a batch that is embedded in micro-batches, without gradients, as the loss takes them.

    `move` brings a micro-batch to the device, `count` counts the samples of one on the host, and `last_repeats`
    is the number of micro-batches that the last one stands for. Raises `LossError` if the embeddings are not
    one row a sample, or differ between micro-batches.
    """
    gathered = Gathered()
    for index, micro_batch in enumerate(micro_batches):
        if index == len(micro_batches) - 1:
            gathered.add_stand_ins(last_repeats - 1)
        gathered.add(_embedded(embed, move(micro_batch)), count(micro_batch))
    return gathered.nest(gathered.join())


class Gathered:
    """Collects embeddings of micro-batches, and joins them into those of the global batch."""

    def __init__(self) -> None:
        self._form: Any = None
        """The nest, with places for its tensors."""
        self._columns: list[list[Tensor]] = []
        """For each tensor in the nest, the parts of the micro-batches."""
        self._samples: list[int] = []

    def add(self, embeddings: Any, samples: int) -> None:
        """Add the embeddings of the next micro-batch, a nest of tensors without gradients.

        `samples` is the micro-batch's number of samples. Raises `LossError` if there is no tensor, not one row
        a sample, or another nest than before.
        """
        tensors = [tensor for _path, tensor in named_tensors(embeddings)]
        for path, tensor in named_tensors(embeddings, "embed(…)"):
            if tensor.ndim > 0 and tensor.shape[0] != samples:
                raise LossError(
                    f"{path} has shape {tuple(tensor.shape)} for a batch of {samples} samples. What `embed` "
                    "returns has one row for each sample; a tensor without dimensions is their mean. What "
                    "belongs to no sample (a queue of negatives) cannot be put together from micro-batches."
                )
        if not self._samples:
            self._form = map_tensors(embeddings, lambda _tensor: _Place())
            self._columns = [[] for _ in tensors]
        if not tensors or len(tensors) != len(self._columns):
            raise LossError(
                f"`embed` returned {len(tensors)} tensors for a micro-batch, and {len(self._columns)} for the "
                "first. It returns a tensor, or a dict, list or tuple of tensors, alike for each micro-batch."
            )
        for column, tensor in zip(self._columns, tensors, strict=True):
            column.append(_own_memory(tensor.detach()))  # a parameter may be among them
        self._samples.append(samples)

    def add_stand_ins(self, count: int) -> None:
        """Add `count` micro-batches shaped like the first, without computing their embeddings."""
        for _ in range(count):
            for column in self._columns:
                column.append(torch.empty_like(column[0]))
            self._samples.append(self._samples[0])

    def join(self) -> list[Tensor]:
        """The tensors of the global batch; parts are freed one after another as they are joined."""
        joined = []
        for column in self._columns:
            if column[0].ndim > 0:
                joined.append(torch.cat(column))
            else:
                weighted = [part * self._share(index) for index, part in enumerate(column)]
                joined.append(torch.stack(weighted).sum())
            column.clear()
        return joined

    def nest(self, tensors: Sequence[Tensor]) -> Any:
        """Put tensors into the nest that `embed` returns."""
        each = iter(tensors)
        return map_leaves(self._form, _Place, lambda _place: next(each))

    def with_gradients(
        self, index: int, embeddings: Any, gradients: Sequence[Tensor | None]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Embeddings of micro-batch `index` that need a gradient, each with its gradient of the same shape.

        `embeddings` have a graph. `gradients` are those of the global batch's tensors; None where the loss does
        not depend on a tensor.
        """
        start = sum(self._samples[:index])
        tensors = [tensor for _path, tensor in named_tensors(embeddings)]
        for tensor, gradient in zip(tensors, gradients, strict=True):
            if gradient is not None and tensor.requires_grad:
                if tensor.ndim > 0:
                    yield tensor, gradient[start : start + self._samples[index]]
                else:
                    yield tensor, gradient * self._share(index)

    def _share(self, index: int) -> float:
        return self._samples[index] / sum(self._samples)


class _Place:
    """Marks the place of a tensor in a nest."""


class _Buffers:
    """A copy of a model's buffers, to restore them."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (module, name, buffer, buffer._version, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def restore(self) -> None:
        """Restore the buffers, and the values of those that changed."""
        with torch.no_grad():
            for module, name, buffer, version, values in self._kept:
                is_written = buffer._version != version or isinstance(module, _NormBase)
                if is_written or not have_same_values(buffer, values):  # what backward reads stays as it is
                    buffer.copy_(values)
                module._buffers[name] = buffer


def _embedded(embed: Callable[[Batch], Any], batch: Batch) -> Any:
    with torch.no_grad():
        return embed(batch)


def _own_memory(tensor: Tensor) -> Tensor:
    """A tensor whose storage holds nothing else; a view, as of a hidden state, is cloned."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _loss_and_gradients(
    gathered: Gathered, loss: Callable[[Any], Tensor], backward: Callable[[Tensor], None]
) -> tuple[Tensor, list[Tensor | None]]:
    """The loss of all embeddings, detached, and its gradients; None for tensors that it does not depend on."""
    leaves = gathered.join()
    for leaf in leaves:
        leaf.requires_grad_(leaf.is_floating_point() or leaf.is_complex())
    value = loss(gathered.nest(leaves))
    backward(value)
    return value.detach(), [leaf.grad for leaf in leaves]


def _backward_from(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    if not pairs:
        raise LossError(
            "the embeddings have no gradient. They were computed under no_grad, detached, or from frozen "
            "parameters only."
        )
    tensors, gradients = zip(*pairs, strict=True)
    torch.autograd.backward(tensors, gradients)
