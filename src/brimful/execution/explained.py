"""The explanation of an out-of-memory error: found where the error passes through, added where attempts end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, TypeVar

from brimful.execution.held_memory import memory_at
from brimful.memory.at_error import MemoryAtError
from brimful.planner import Plan
from brimful.report.out_of_memory import HEADING, out_of_memory_text
from brimful.utils.quantities import format_bytes

LESS = 0.9
"""The most of a budget that is suggested after memory ran out in it: what `trainer/step/fallback.py` plans."""

_Error = TypeVar("_Error", bound=BaseException)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a plan predicted."""

    peak_allocated_bytes: int
    budget_bytes: int
    context_bytes: int
    """What the process takes of the budget besides the allocator."""
    global_batch_size: int

    @classmethod
    def of(cls, plan: object) -> Self | None:
        """What a plan predicted; None for settings alone, which predict nothing."""
        if not isinstance(plan, Plan):
            return None
        return cls(
            peak_allocated_bytes=plan.predicted_peak_allocated_bytes,
            budget_bytes=plan.budget_bytes,
            context_bytes=plan.predicted_peak_device_bytes - plan.predicted_peak_reserved_bytes,
            global_batch_size=plan.settings.global_batch_size,
        )

    @property
    def reserved_limit_bytes(self) -> int:
        """What torch may reserve within the budget."""
        return self.budget_bytes - self.context_bytes

    def compared(self, found: MemoryAtError) -> tuple[str, ...]:
        """The prediction beside what happened, and the budget to plan for next."""
        taken_bytes = found.peak_allocated_bytes + (found.requested_bytes or 0)
        predicted, taken = format_bytes(self.peak_allocated_bytes), format_bytes(taken_bytes)
        if taken_bytes > self.peak_allocated_bytes:
            what = f"{taken} with what was asked for, where the plan predicts a peak of {predicted}"
            less_bytes = self.budget_bytes * self.peak_allocated_bytes // taken_bytes
        else:
            what = f"{taken} with what was asked for: within the peak of {predicted} that the plan predicts"
            less_bytes = found.limit_bytes + self.context_bytes
        budget = format_bytes(min(less_bytes, int(LESS * self.budget_bytes))).replace(" ", "")
        return (
            f"{what}.",
            f'plan for less: bf.plan(…, global_batch_size={self.global_batch_size}, budget="{budget}"), or '
            f"brimful plan … --global-batch-size {self.global_batch_size} --budget {budget}",
        )


@dataclass(frozen=True, slots=True)
class Explanation:
    """What held the memory when it ran out; it holds no tensor."""

    found: MemoryAtError | None
    failure: str = ""
    """Why there is no explanation: an error of its own."""

    @classmethod
    def of(cls, error: BaseException, *, first_node: int = 0) -> Self:
        """What held the memory; an error in finding it never takes the place of the one that is explained."""
        message = (str(error) or type(error).__name__).splitlines()[0]
        try:
            return cls(memory_at(error, message, first_node=first_node))
        except Exception as failure:
            return cls(None, f"{type(failure).__name__}: {failure}")

    def added_to(self, error: _Error, expected: Expected | None = None) -> _Error:
        """The error with the explanation as a note, once."""
        if not any(note.startswith(HEADING) for note in getattr(error, "__notes__", ())):
            try:
                error.add_note(self._text(expected))
            except Exception as failure:
                error.add_note(_no_explanation(f"{type(failure).__name__}: {failure}"))
        return error

    def _text(self, expected: Expected | None) -> str:
        if self.found is None:
            return _no_explanation(self.failure)
        return out_of_memory_text(self.found, () if expected is None else expected.compared(self.found))


def _no_explanation(failure: str) -> str:
    return f"{HEADING}: brimful could not find what held the memory, please report it: {failure}"
