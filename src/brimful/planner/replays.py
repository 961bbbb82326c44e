"""A choice of actions → what the allocator reserves: predicted in a tenth of a capture's time, or captured."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from brimful.devices import Device
from brimful.memory import replay_allocations
from brimful.planner.candidate import Candidate
from brimful.planner.problem.build import NESTED
from brimful.planner.problem.splice import Splicer
from brimful.prediction.estimate import Estimate, estimate_unlimited
from brimful.prediction.estimator import Capture
from brimful.settings import Settings
from brimful.trace import own_checkpointed_units, unit_of_each_op
from brimful.trace.ddp import per_rank_trace


class Replays:
    """Choices of one candidate, each replayed through the allocator once."""

    def __init__(self, candidate: Candidate, capture: Capture) -> None:
        self.candidate = candidate
        self.capture = capture
        self._captured: dict[tuple[int, ...], Estimate] = {}
        self._reserved_bytes: dict[tuple[int, ...], int] = {}

    def captured(self, choice: tuple[int, ...]) -> Estimate:
        """The estimate of a capture with the choice applied; CaptureError or BatchError if there is none."""
        if choice not in self._captured:
            settings = self.candidate.settings_of(choice)
            self._captured[choice] = estimate_of(settings, self.capture, self.candidate.device)
        return self._captured[choice]

    def reserved_bytes(self, choice: tuple[int, ...]) -> int:
        """Expected reserved bytes of a choice; from a capture only if splicing cannot predict them."""
        if choice not in self._reserved_bytes:
            self._reserved_bytes[choice] = self._expected_reserved_bytes(choice)
        return self._reserved_bytes[choice]

    def _expected_reserved_bytes(self, choice: tuple[int, ...]) -> int:
        candidate = self.candidate
        if NESTED in choice:
            return self.captured(choice).predicted_peak_reserved_bytes
        if not any(choice):
            return replay_allocations(candidate.kept).peak_reserved_bytes
        if not self._splicer.can_splice():
            return self.captured(choice).predicted_peak_reserved_bytes
        spliced = self._splicer.spliced(candidate.problem.chosen(choice))
        return replay_allocations(spliced).peak_reserved_bytes

    @cached_property
    def _splicer(self) -> Splicer:
        candidate = self.candidate
        return Splicer(
            candidate.recomputed,
            candidate.kept,
            unit_of_each_op(candidate.recomputed, candidate.units),
            len(candidate.units),
            own_checkpointed_units(candidate.kept, candidate.units),
        )


def estimate_of(settings: Settings, capture: Capture, device: Device) -> Estimate:
    """The estimate of settings as a plan has it: of the second of two steps, from a capture with them applied.

    A step that cannot be captured raises CaptureError; a batch that cannot be made or split raises BatchError.
    """
    # A second step finds memory as the allocator was left by the first.
    captured = capture(replace(settings, expandable_segments=False))
    return estimate_unlimited(
        per_rank_trace(replace(captured, settings=settings)).with_last_step_again(), device
    )
