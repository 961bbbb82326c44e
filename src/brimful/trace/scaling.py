"""Two traces of a step at different micro-batch sizes → the trace at any size.

Bytes and FLOPs of an op are affine in the micro-batch as long as the ops stay the same, unless an op relates
samples with one another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from msgspec import structs

from brimful.errors import UsageError
from brimful.trace.records import Op, Storage, Trace


class TraceLine:
    """One step at every micro-batch size: the line through the captures at two.

    Traces that run different ops, or have the same micro-batch size, raise UsageError.
    """

    def __init__(self, small: Trace, large: Trace) -> None:
        self.small, self.large = small, large
        self._sizes = at_small, at_large = small.settings.micro_batch_size, large.settings.micro_batch_size
        if at_small == at_large or not small.has_same_shape_as(large):
            raise UsageError(
                f"cannot scale {small.job!r} from micro-batches of {at_small} and {at_large} samples: "
                "the captures run different ops, or have one size."
            )
        works = [(_work(a), _work(b)) for a, b in zip(small.ops, large.ops, strict=True)]
        self.changing_ops = tuple(i for i, (a, b) in enumerate(works) if a != b)
        """Indices of the ops whose work depends on the size."""
        self._works = tuple(works[i] for i in self.changing_ops)
        self.changing_storages = tuple(
            i
            for i, (a, b) in enumerate(zip(small.storages, large.storages, strict=True))
            if (a.size_bytes, a.most_bytes, a.kernel) != (b.size_bytes, b.most_bytes, b.kernel)
        )
        """Indices of the storages whose bytes depend on the size."""
        self._latest: Trace | None = None

    @property
    def may_bend(self) -> bool:
        """Whether some bytes may grow faster than the micro-batch: their line is below 0 at no samples.

        Similarities of all samples with all do, which grow with its square. So do bytes of n - 1 samples, whose
        line is exact; only a capture at a third size shows which it is.
        """
        at_small, at_large = self._sizes
        pairs = ((self.small.storages[i], self.large.storages[i]) for i in self.changing_storages)
        return any(a.size_bytes * at_large < b.size_bytes * at_small for a, b in pairs if a.kernel is None)

    def passes_through(self, third: Trace) -> bool:
        """Whether a capture at another size has the ops and bytes that the line predicts."""
        scaled = self.at(third.settings.micro_batch_size)
        return scaled.has_same_shape_as(third) and all(
            a.size_bytes == b.size_bytes
            for a, b in zip(scaled.storages, third.storages, strict=True)
            if a.kernel is None
        )

    def at(self, micro_batch_size: int) -> Trace:
        """The trace at a micro-batch size; see `Trace.at_micro_batch_size`."""
        if self._latest is None or self._latest.settings.micro_batch_size != micro_batch_size:
            self._latest = self._at(micro_batch_size)
        return self._latest

    def _at(self, micro_batch_size: int) -> Trace:
        at_small, at_large = self._sizes

        def line(a: int, b: int) -> int:
            return a + (b - a) * (micro_batch_size - at_small) // (at_large - at_small)

        # Blocks of a model are alike, so there are few different works.
        # An op may have a problem size at the larger size alone: one row has no layout to transpose.
        scaled = {(a, b): (*map(line, a, b), *b[len(a) :]) for a, b in set(self._works)}
        ops, storages = list(self.small.ops), list(self.small.storages)
        for i, work in zip(self.changing_ops, self._works, strict=True):
            flops, read_bytes, written_bytes, *extents = scaled[work]
            ops[i] = structs.replace(
                ops[i],
                flops=flops,
                read_bytes=read_bytes,
                written_bytes=written_bytes,
                extents=tuple(extents),
            )
        for i in self.changing_storages:
            storages[i] = _scaled_storage(storages[i], self.large.storages[i], line)
        corrections = zip(self.small.corrections, self.large.corrections, strict=True)
        return replace(
            self.small,
            settings=replace(self.small.settings, micro_batch_size=micro_batch_size),
            ops=tuple(ops),
            storages=tuple(storages),
            corrections=tuple(
                replace(a, changed_bytes=line(a.changed_bytes, b.changed_bytes)) for a, b in corrections
            ),
        )


def _work(op: Op) -> tuple[int, ...]:
    return op.flops, op.read_bytes, op.written_bytes, *op.extents


def _scaled_storage(a: Storage, b: Storage, line: Callable[[int, int], int]) -> Storage:
    """A storage on the line through its sizes in two traces."""
    most_bytes = None
    if a.most_bytes is not None and b.most_bytes is not None:
        most_bytes = line(a.most_bytes, b.most_bytes)
    if a.kernel is not None and b.kernel is not None:
        kernel = a.kernel.scaled(b.kernel, line)
        size_bytes = kernel.size_bytes()
        if most_bytes is not None:
            most_bytes = max(most_bytes, size_bytes)
        return structs.replace(a, size_bytes=size_bytes, most_bytes=most_bytes, kernel=kernel)
    size_bytes = line(a.size_bytes, b.size_bytes)
    if (size_bytes, most_bytes) == (a.size_bytes, a.most_bytes):
        return a
    return structs.replace(a, size_bytes=size_bytes, most_bytes=most_bytes)
