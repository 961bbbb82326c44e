"""Memory that grows with every step: losses kept with their graphs, a buffer that outputs are added to."""

from __future__ import annotations

from brimful.capture.recording.recorder import Recorder
from brimful.utils.quantities import format_bytes

_LEAST_FRACTION = 1 / 1000
"""Growth by a smaller fraction of the memory held is not reported: a list of numbers for a plot, say."""


class Growth:
    """Compares the memory that tensors hold from step to step."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._held_bytes: list[int] = []
        self._latest: frozenset[int] = frozenset()
        self._new: frozenset[int] = frozenset()

    def note_step(self) -> None:
        """Note the memory that is held; to be called before each step and after the last."""
        self._held_bytes.append(self._recorder.places.device_bytes)
        live = frozenset(self._recorder.ledger.live.values())
        self._new, self._latest = live - self._latest, live

    def report(self, advice: str) -> None:
        """Add a note to the estimate, which ends with `advice`, if each of the last two steps kept more.

        The first step creates the optimizer's state, and so keeps at least as much as grows with each.
        """
        if len(self._held_bytes) < 3:
            return
        first, second, third = self._held_bytes[-3:]
        grown_bytes = min(third - second, second - first)
        if grown_bytes > third * _LEAST_FRACTION:
            self._recorder.facts.note(
                f"memory that grows by {format_bytes(grown_bytes)} with every step{self._line()}: "
                f"{len(self._held_bytes) - 1} steps are predicted. {advice}"
            )

    def _line(self) -> str:
        """The line that made the largest tensor that the latest step kept, in words; "" if not known."""
        blocks = [self._recorder.ledger.blocks[index] for index in self._new]
        largest = max(blocks, key=lambda block: block.size_bytes, default=None)
        maker = None if largest is None else largest.op
        line = "" if maker is None else self._recorder.ops[maker].line
        return f" (the largest tensor kept was made in {line})" if line else ""
