"""A step recorded in two parts, the model's and the optimizer's → the whole step.

What an optimizer does depends on its parameters and on the shapes of their gradients, not on what computed
them. So a search captures the optimizer once and joins it to the forward and backward of every candidate, and a
comparison of GPUs to those of every GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from msgspec import structs

from brimful.capture.recording.blocks import Block, BlockEvent
from brimful.trace import CUBLAS_WORKSPACE, Category, Op, Phase


class Gradient(NamedTuple):
    """The name and layout of a gradient, which is all that an optimizer can see of it."""

    parameter: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Mark(NamedTuple):
    """A moment of a recording: how many ops, blocks and events were recorded before."""

    ops: int
    blocks: int
    events: int


class Recorded(NamedTuple):
    """The ops and blocks of memory that a capture recorded."""

    ops: Sequence[Op]
    blocks: Sequence[Block]
    events: Sequence[BlockEvent]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPart:
    """The recording of a part of one step."""

    recorded: Recorded
    forward: Mark
    """When the first forward began."""
    update: Mark
    """When the gradients were complete."""
    updated: Mark
    """When the optimizer's step ended, and the gradients were there still."""
    gradients: tuple[Gradient, ...]
    host_state_bytes: int
    """Optimizer state in the host's memory."""
    host_staging_bytes: int
    """Pinned memory between the device and an optimizer on the host."""
    paged_state_bytes: int
    """Optimizer state in CUDA's managed memory."""
    counts: Mapping[str, Sequence[tuple[int, int, int]]]
    """By correction: the index of the next op, occurrences and changed bytes, for all that it counted."""


class PartsDifferError(Exception):
    """The two parts are not of the same step, or one depends on the other."""


def with_update(model: RecordedPart, update: RecordedPart) -> Recorded:
    """Join the two parts of a step: the result is what a capture of the whole step records.

    `model` is forward and backward, recorded without an optimizer state, as `after_setup` returns them.
    `update` is the optimizer's part, recorded with the same gradients. Raises `PartsDifferError` if the parts
    do not show the whole step.
    """
    if model.gradients != update.gradients or not begin_alike(model, update):
        raise PartsDifferError
    first, last, ahead = model.forward, model.update, update.forward
    of_model, of_update = later_ops(model, update)
    last_micro_batch = model.recorded.ops[last.ops - 1].micro_batch
    ops = [
        *update.recorded.ops[: ahead.ops],
        *model.recorded.ops[first.ops : last.ops],
        *_in_micro_batch(last_micro_batch, update.recorded.ops[update.update.ops :]),
    ]
    blocks = [
        *model.recorded.blocks[: first.blocks],
        *update.recorded.blocks[first.blocks : ahead.blocks],
        *(_later(block, of_model) for block in model.recorded.blocks[first.blocks : last.blocks]),
        *(_later(block, of_update) for block in update.recorded.blocks[update.update.blocks :]),
    ]
    numbers = _BlockNumbers(model, update)
    last_op = last.ops - 1 + of_model
    events = [
        *update.recorded.events[: ahead.events],
        *numbers.model_events(model.recorded.events[first.events : last.events], of_model),
        *numbers.unused_state(update.recorded.events[ahead.events : update.update.events], last_op),
        *numbers.remaining_frees(model.recorded.events[last.events : model.updated.events], last_op),
        *numbers.update_events(update.recorded.events[update.update.events :], of_update),
        *numbers.remaining_frees(model.recorded.events[model.updated.events :], len(ops) - 1),
    ]
    return Recorded(ops, blocks, events)


def after_setup(model: RecordedPart, update: RecordedPart) -> RecordedPart:
    """The model's part as it runs after the setup of an update, whose matmuls may have made cuBLAS's workspace.

    The part stays the same where the setup makes no workspace; else it has none of the workspace that forward
    made. Raises `PartsDifferError` if backward makes none of its own, so that forward's may be that of
    autograd's thread.
    """
    if not _workspaces(update.recorded, range(update.forward.events)):
        return model
    ops, _, events = model.recorded
    made = _workspaces(model.recorded, range(model.forward.events, model.updated.events))
    of_forward = [index for index in made if ops[events[index].op + 1].phase is not Phase.BACKWARD]
    if not of_forward:
        return model
    if len(of_forward) == len(made):  # perhaps of autograd's thread, in forward: a penalty on gradients
        raise PartsDifferError
    return _without_allocation(model, of_forward[0])


def _workspaces(recorded: Recorded, events: range) -> list[int]:
    """The indices among `events` of those that allocate a workspace of cuBLAS."""
    return [
        index
        for index in events
        if recorded.events[index].is_allocation
        and recorded.blocks[recorded.events[index].block].label == CUBLAS_WORKSPACE
    ]


def _without_allocation(part: RecordedPart, index: int) -> RecordedPart:
    """A part without the block that one of its events allocates, and that is never freed."""
    ops, blocks, events = part.recorded
    gone = events[index]
    others = tuple(
        event if event.block < gone.block else event._replace(block=event.block - 1)
        for event in (*events[:index], *events[index + 1 :])
    )
    count = gone.op + 1, 1, blocks[gone.block].size_bytes
    counts = {name: tuple(each for each in counted if each != count) for name, counted in part.counts.items()}

    def moved(mark: Mark) -> Mark:
        return Mark(mark.ops, mark.blocks - (mark.blocks > gone.block), mark.events - (mark.events > index))

    return replace(
        part,
        recorded=Recorded(ops, (*blocks[: gone.block], *blocks[gone.block + 1 :]), others),
        forward=moved(part.forward),
        update=moved(part.update),
        updated=moved(part.updated),
        counts=counts,
    )


def later_ops(model: RecordedPart, update: RecordedPart) -> tuple[int, int]:
    """Op index shifts of the two parts in the whole step: of forward and backward, and of the update."""
    of_model = update.forward.ops - model.forward.ops
    return of_model, model.update.ops + of_model - update.update.ops


class _BlockNumbers:
    """The numbers of both parts' blocks in the whole step."""

    def __init__(self, model: RecordedPart, update: RecordedPart) -> None:
        self._model, self._update = model, update
        self._model_shift = update.forward.blocks - model.forward.blocks
        self._update_shift = self._model_shift + model.update.blocks - update.update.blocks
        self._gradients = dict(self._same_gradients())
        """The block of each gradient: in the update's part, and in the whole step."""

    def model_events(self, events: Sequence[BlockEvent], shift: int) -> Iterator[BlockEvent]:
        """Events of forward and backward."""
        for event in events:
            yield BlockEvent(event.is_allocation, self._of_model(event.block), event.op + shift)

    def unused_state(self, events: Sequence[BlockEvent], op: int) -> Iterator[BlockEvent]:
        """Releases of the state of parameters without a gradient, before the update."""
        for event in events:
            if not event.is_allocation and event.block < self._update.forward.blocks:
                yield BlockEvent(False, event.block, op)

    def remaining_frees(self, events: Sequence[BlockEvent], op: int) -> Iterator[BlockEvent]:
        """Releases of what is not the optimizer's, such as the loss, while the optimizer runs."""
        gradients = set(self._gradients.values())
        for event in events:
            block = self._of_model(event.block)
            if event.is_allocation:
                raise PartsDifferError
            if block not in gradients:
                yield BlockEvent(False, block, op)

    def update_events(self, events: Sequence[BlockEvent], shift: int) -> Iterator[BlockEvent]:
        """Events of the update."""
        made: set[int] = set()
        for event in events:
            block = self._of_update(event.block)
            if block is None:
                continue  # freed here, and by the model's part in the whole step
            if event.is_allocation:
                made.add(block)
            else:
                made.discard(block)
            yield BlockEvent(event.is_allocation, block, event.op + shift)
        if made:  # such as the workspace of a library, which forward would have made
            raise PartsDifferError

    def _of_model(self, block: int) -> int:
        return block if block < self._model.forward.blocks else block + self._model_shift

    def _of_update(self, block: int) -> int | None:
        if block < self._update.forward.blocks:
            return block
        if block >= self._update.update.blocks:
            return block + self._update_shift
        return self._gradients.get(block)

    def _same_gradients(self) -> Iterator[tuple[int, int]]:
        made = _gradients_of(self._model)
        given = _gradients_of(self._update)
        if made.keys() != given.keys() or len(made) != len(self._model.gradients):
            raise PartsDifferError
        for label, block in given.items():
            yield block, self._of_model(made[label])


def _gradients_of(part: RecordedPart) -> dict[str, int]:
    """The blocks of gradients, by parameter."""
    found: dict[str, int] = {}
    for index in range(part.forward.blocks, part.update.blocks):
        block = part.recorded.blocks[index]
        if block.category is Category.GRADIENTS:
            if block.label in found:
                raise PartsDifferError
            found[block.label] = index
    return found


def begin_alike(model: RecordedPart, update: RecordedPart) -> bool:
    """Whether the model's part begins as the update's does, except for the size of its batch."""
    ours, others, count = model.recorded, update.recorded, model.forward
    return (
        ours.ops[: count.ops] == others.ops[: count.ops]
        and ours.events[: count.events] == others.events[: count.events]
        and all(
            (mine.size_bytes == other.size_bytes or mine.category is Category.INPUTS)
            and (mine.label, mine.category) == (other.label, other.category)
            for mine, other in zip(ours.blocks[: count.blocks], others.blocks, strict=False)
        )
    )


def _in_micro_batch(micro_batch: int, ops: Sequence[Op]) -> Iterator[Op]:
    """The ops of an update, set to the micro-batch that it follows."""
    for op in ops:
        yield op if op.micro_batch == micro_batch else structs.replace(op, micro_batch=micro_batch)


def _later(block: Block, ops: int) -> Block:
    """A block as recorded after more ops."""
    return block if block.op is None else replace(block, op=block.op + ops)
