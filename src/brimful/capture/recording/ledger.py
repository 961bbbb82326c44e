"""The blocks of memory that live while code runs: the storages of tensors, and blocks that no tensor owns.

A storage is known by its address while it lives; its finalizer runs when the last owner, Python's or
autograd's, drops it. So saved tensors, views, in-place ops, stolen gradients and recomputation come out right
without being modelled.

Private torch API used here: `UntypedStorage._cdata` (checked: torch 2.13, 2.11).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from brimful.capture.recording.blocks import Block, BlockEvent
from brimful.capture.recording.facts import StepFacts
from brimful.trace import Category, Kernel, Op


class _StorageEnd(weakref.ref[Any]):
    """Calls back when a storage is dropped, and knows its address."""

    __slots__ = ("address",)

    address: int


class StorageLedger:
    """Records when blocks of memory are allocated and freed.

    `ops` are the ops recorded so far, the latest last. `facts` gets a note of tensors without a storage.
    """

    def __init__(self, ops: Sequence[Op], facts: StepFacts) -> None:
        self.blocks: list[Block] = []
        self.events: list[BlockEvent] = []
        self._ops, self._facts = ops, facts
        self.live: dict[int, int] = {}
        """Indices of the blocks that tensors hold now, by the addresses of their storages."""
        self._ends: dict[int, _StorageEnd] = {}
        self._temporaries: list[tuple[Block, bool]] = []
        """Temporaries of the op that is being recorded, each with whether it is alone."""

    def track(self, tensor: Tensor, label: str, op: int | None = None) -> int | None:
        """Record the storage of a tensor until it is dropped, and return the index of its block.

        The storage is allocated now, unless it is tracked already and as large as it was. `op` is the index of
        the op that made it; None if no op did. Where the layout has no single storage, None is returned.
        """
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # sparse and others
            self._facts.note(f"a {tensor.layout} tensor made by {label}")
            return None
        address, size_bytes = storage._cdata, storage.nbytes()
        index = self.live.get(address)
        if index is None:
            fresh = self._add(Block(size_bytes, op, label))
            end = self._ends[address] = _StorageEnd(storage, self._drop)
            end.address = address
        else:
            block = self.blocks[index]
            if block.size_bytes == size_bytes:
                return index
            self.free(index)  # resized: another block from now on
            fresh = self._add(Block(size_bytes, block.op, block.label, category=block.category))
        self.live[address] = fresh
        return fresh

    def mark(self, tensor: Tensor, category: Category, label: str | None = None) -> None:
        """Set what a tensor holds, and its name; one that is not tracked yet is allocated now."""
        index = self.track(tensor, str(category))
        if index is not None:
            block = self.blocks[index]
            block.category = category
            block.label = block.label if label is None else label

    def index_of(self, tensor: Tensor) -> int | None:
        """Index of the block of a tensor's storage; None if it is not tracked."""
        return self.live.get(tensor.untyped_storage()._cdata)

    def allocate(self, size_bytes: int, label: str, *, most_bytes: int | None = None) -> int:
        """Record a block that no tensor owns, such as a library's workspace, and return its index.

        `size_bytes` is the likely size, and `most_bytes` the largest, where the size is not known for sure.
        Unless the block is freed by its index, it stays to the end.
        """
        return self._add(Block(size_bytes, None, label, most_bytes))

    def free(self, index: int) -> None:
        """Record that a block is free from now on."""
        self.events.append(BlockEvent(False, index, len(self._ops) - 1))

    def free_tensor(self, tensor: Tensor) -> int:
        """Record that the storage of a tensor is free from now on; return its bytes, 0 if it is not tracked."""
        index = self.live.pop(tensor.untyped_storage()._cdata, None)
        if index is None:
            return 0
        self.free(index)
        return self.blocks[index].size_bytes

    def discard(self, tensors: Iterable[Tensor]) -> None:
        """Give tensors no bytes: they were recorded, but a real step never makes them."""
        for tensor in tensors:
            index = self.index_of(tensor)
            if index is not None:
                self.blocks[index].size_bytes = 0

    def add_temporary(
        self,
        size_bytes: int,
        label: str,
        *,
        most_bytes: int | None = None,
        kernel: Kernel | None = None,
        is_alone: bool = False,
    ) -> None:
        """Record memory that the op just run took beside its outputs and freed before it ended.

        `size_bytes` is the likely size, and `most_bytes` the largest, where the size is not known for sure.
        `kernel` is what decides the size, where it is not affine in the micro-batch. `is_alone` says that the
        memory is freed before the op's next temporary is allocated.
        """
        self._temporaries.append((Block(size_bytes, None, label, most_bytes, kernel), is_alone))

    def record_temporaries(self) -> None:
        """Record the temporaries of the op just recorded: those that are alone in turn, the others at once."""
        together = []
        for block, is_alone in self._temporaries:
            index = self._add(block)
            if is_alone:
                self.free(index)
            else:
                together.append(index)
        for index in together:
            self.free(index)
        self._temporaries.clear()

    def _add(self, block: Block) -> int:
        index = len(self.blocks)
        self.blocks.append(block)
        self.events.append(BlockEvent(True, index, len(self._ops) - 1))
        return index

    def _drop(self, end: _StorageEnd) -> None:
        self._ends.pop(end.address, None)
        index = self.live.pop(end.address, None)
        if index is not None:
            self.free(index)
