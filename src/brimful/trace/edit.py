"""A trace → the same with storages of other sizes, added storages, and releases at other times."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from brimful.trace.records import Category, Event, EventKind, Storage, Trace

BEFORE, _WITHIN, AFTER = range(3)
"""Places of an event: before the events of an op, among them, after them."""


class TraceEdit:
    """Collects changes of a trace, which itself stays as it is.

    The labels of added storages begin with `maker`.
    """

    def __init__(self, trace: Trace, maker: str) -> None:
        self._trace, self._maker = trace, maker
        self._storages = list(trace.storages)
        self._dropped: set[tuple[EventKind, int]] = set()
        self._added: list[tuple[int, int, Event]] = []

    def resize(self, storage: int, size_bytes: int) -> None:
        """Give a storage another size."""
        self._storages[storage] = structs.replace(
            self._storages[storage], size_bytes=size_bytes, most_bytes=None
        )

    def hold(
        self,
        size_bytes: int,
        category: Category,
        label: str,
        since: tuple[int, int],
        until: tuple[int, int] | None,
        *,
        most_bytes: int | None = None,
    ) -> None:
        """Add a storage that lives from before or after an op to before or after another; None: to the end."""
        op, place = since
        storage = len(self._storages)
        self._storages.append(
            Storage(
                size_bytes=size_bytes,
                category=category,
                op=op if op >= 0 else None,
                label=f"{self._maker} {label}",
                most_bytes=most_bytes,
            )
        )
        self._added.append((op, place, Event(kind=EventKind.ALLOCATE, storage=storage, op=op)))
        if until is not None:
            op, place = until
            self._added.append((op, place, Event(kind=EventKind.FREE, storage=storage, op=op)))

    def free(self, storage: int, op: int) -> None:
        """Free a storage after an op instead of when it was freed."""
        self._dropped.add((EventKind.FREE, storage))
        self._added.append((op, AFTER, Event(kind=EventKind.FREE, storage=storage, op=op)))

    def result(self) -> Trace:
        """The trace with all changes."""
        kept = [
            (event.op, _WITHIN, event)
            for event in self._trace.events
            if (event.kind, event.storage) not in self._dropped
        ]
        ordered = sorted([*kept, *self._added], key=lambda each: each[:2])
        return replace(
            self._trace, storages=tuple(self._storages), events=tuple(event for *_place, event in ordered)
        )
