"""Traces written by hand, one line per op, allocation and release."""

from __future__ import annotations

from brimful.settings import Settings
from brimful.trace import Category, Event, EventKind, Op, Phase, Storage, Trace


class TraceWriter:
    """Collects ops and events in the order they happen."""

    def __init__(self, device_kind: str = "cuda") -> None:
        self.device_kind = device_kind
        self.ops: list[Op] = []
        self.storages: list[Storage] = []
        self.events: list[Event] = []

    def op(self, name: str, *, module: str = "", phase: Phase = Phase.FORWARD, step: int = 0) -> None:
        self.ops.append(
            Op(
                name=name,
                module=module,
                phase=phase,
                step=step,
                micro_batch=0,
                flops=0,
                read_bytes=0,
                written_bytes=0,
                dtype="float32",
            )
        )

    def allocate(
        self, size_bytes: int, label: str, category: Category = Category.TEMPORARIES, *, by_op: bool = True
    ) -> int:
        latest = len(self.ops) - 1
        op = latest if by_op and latest >= 0 else None
        self.storages.append(Storage(size_bytes=size_bytes, category=category, op=op, label=label))
        storage = len(self.storages) - 1
        self.events.append(Event(kind=EventKind.ALLOCATE, storage=storage, op=latest))
        return storage

    def free(self, storage: int) -> None:
        self.events.append(Event(kind=EventKind.FREE, storage=storage, op=len(self.ops) - 1))

    def trace(self) -> Trace:
        return Trace(
            job="by hand",
            settings=Settings(micro_batch_size=1),
            device_kind=self.device_kind,
            torch_version="none",
            captured_steps=max((op.step for op in self.ops), default=0) + 1,
            captured_micro_batches=1,
            ops=tuple(self.ops),
            storages=tuple(self.storages),
            events=tuple(self.events),
            module_classes=(("", "Net"),),
        )


def two_steps(device_kind: str = "cuda", *, mib: int = 1 << 20) -> Trace:
    """Two steps of a net with one layer; the peak of each is in `aten.mm_backward`.

    In MiB after each event: setup 8; step 0: 16, 19 | peak 27 | 24, 16 | state 24 | gradient kept 24;
    step 1: 32 | peak 40 | 32, 24.
    """
    writer = TraceWriter(device_kind)
    writer.allocate(8 * mib, "layer.weight", Category.PARAMETERS)
    writer.op("aten.mm", module="layer")
    saved = writer.allocate(8 * mib, "aten.mm", Category.SAVED_TENSORS)
    writer.op("aten.relu", module="act")
    loss = writer.allocate(3 * mib, "aten.relu")
    writer.op("aten.mm_backward", module="layer", phase=Phase.BACKWARD)
    writer.allocate(8 * mib, "layer.weight", Category.GRADIENTS)
    writer.free(loss)
    writer.free(saved)
    writer.op("aten.add_", phase=Phase.OPTIMIZER)
    writer.allocate(8 * mib, "layer.weight", Category.OPTIMIZER_STATE)
    writer.op("aten.mm", module="layer", step=1)
    saved = writer.allocate(8 * mib, "aten.mm", Category.SAVED_TENSORS)
    writer.op("aten.mm_backward", module="layer", phase=Phase.BACKWARD, step=1)
    gradient = writer.allocate(8 * mib, "aten.mm_backward")
    writer.free(gradient)
    writer.free(saved)
    return writer.trace()
