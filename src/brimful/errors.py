"""Every error brimful raises on purpose.

* BrimfulError
  + UsageError (also ValueError)       invalid input: exit status 2
    - CallError (also TypeError)       a call with arguments that the function does not take
    - SizeError                        text that is not a valid size
    - UnknownNameError                 no such device, model, optimizer …; says the nearest
    - MultipleError                    an option of a model that is not a multiple of a number
    - BatchError                       a batch that cannot be split or resized
    - LossError                        a loss that is not a scalar or has no gradient
    - RunDirectoryError                the run directory cannot be used
    - FileFormatError                  a file is not what it should be; names the file and the field
  + CaptureError                       the step cannot be run on fake tensors
  + JobExitError                       the job called sys.exit
  + InfeasibleError                    nothing fits the budget; says by how much and what would
  + TrainingError
    - NonFiniteError                   the loss or a gradient is NaN or infinite
    - EquivalenceError                 a plan does not compute what the baseline does
    - OutOfMemoryError                 memory ran out, and nothing that takes less is left to try
    - PartialUpdateError               an error came in an update that can be neither finished nor undone
    - DataError                        the training data raised
    - ResumeError                      a run cannot be resumed from what it saved
    - SaveError                        a file could not be written; what was there before stays
    - InterruptedRunError              stopped on request before there was anything to save

A message says what was requested, what was found, why, and the nearest way out.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from brimful.results import Suggestion


class BrimfulError(Exception):
    """Base class of all errors that brimful raises on purpose."""

    def __reduce__(self) -> tuple[Callable[..., BrimfulError], tuple[object, ...]]:
        return _restored, (type(self), self.args, dict(vars(self)))


def _restored(
    kind: type[BrimfulError], arguments: tuple[object, ...], fields: dict[str, object]
) -> BrimfulError:
    """A pickled error, whose `__init__` takes other arguments than its message."""
    error = kind.__new__(kind, *arguments)
    vars(error).update(fields)
    return error


class UsageError(BrimfulError, ValueError):
    """An invalid argument."""


class CallError(UsageError, TypeError):
    """A call with arguments that the function does not take."""


class SizeError(UsageError):
    """Text that is not a valid size."""


_FEW_NAMES = 6
"""Number of names shown of a table; larger tables are shortened if no name is near."""


def nearest_names(name: str, known: Iterable[str], *, likeness: float = 0.4) -> list[str]:
    """At most three known names that are like a name in any case, nearest first; `likeness` is from 0 to 1."""
    lowered = {candidate.lower(): candidate for candidate in known}
    return [lowered[each] for each in difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=likeness)]


class UnknownNameError(UsageError):
    """A name that is not in its table.

    Args:
        kind: Kind of the name: "device", "model", …
        name: The unknown name.
        known: All names of the table.
        hint: Other valid input, as a full sentence.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        names = sorted(known)
        nearest = nearest_names(name, names)
        few = len(names) <= _FEW_NAMES
        shown = ", ".join(names[:_FEW_NAMES]) + ("" if few else f", … ({len(names)} in all)")
        said = f"Nearest: {', '.join(nearest)}." if nearest and not few else f"Known: {shown}."
        super().__init__(f"unknown {kind} {name!r}. {said}" + (f" {hint}" if hint else ""))
        self.nearest = tuple(nearest)


class MultipleError(UsageError):
    """An option of a model that is not a multiple of a number.

    Args:
        message: The model, the option and the nearest valid value.
        divisor: The number.
    """

    def __init__(self, message: str, divisor: int) -> None:
        super().__init__(message)
        self.divisor = divisor


class BatchError(UsageError):
    """A batch that cannot be split or resized."""


class LossError(UsageError):
    """A loss that is not a scalar or has no gradient."""


class RunDirectoryError(UsageError):
    """The run directory cannot be used."""


class FileFormatError(UsageError):
    """A file is not what it should be: another kind of file, too large, damaged, or a field out of range."""


class CaptureError(BrimfulError):
    """The step cannot be run on fake tensors."""


class JobExitError(BrimfulError):
    """The job called `sys.exit`, which would end the command with the job's exit status."""


class InfeasibleError(BrimfulError):
    """Nothing that is permitted fits the budget.

    Args:
        message: What was requested, what was found, why, and the nearest way out.
        budget_bytes: The budget.
        smallest_peak_bytes: The smallest predicted peak found, measured like the budget. Where parameters,
            gradients and optimizer state alone are over the budget, no smaller one was searched for.
        suggestions: Changes of what is computed with which a plan would fit, the fastest first.
    """

    def __init__(
        self,
        message: str,
        *,
        budget_bytes: int,
        smallest_peak_bytes: int,
        suggestions: Sequence[Suggestion] = (),
    ) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.smallest_peak_bytes = smallest_peak_bytes
        self.suggestions = tuple(suggestions)

    @property
    def shortfall_bytes(self) -> int:
        """Bytes by which the smallest plan exceeds the budget."""
        return self.smallest_peak_bytes - self.budget_bytes


class TrainingError(BrimfulError):
    """Training stopped; the message says where the last good weights are."""


class NonFiniteError(TrainingError):
    """The loss or a gradient is NaN or infinite."""


class InterruptedRunError(TrainingError):
    """Training was stopped on request before there was anything to save."""


class EquivalenceError(TrainingError):
    """A plan does not compute what the baseline does."""


class OutOfMemoryError(TrainingError):
    """Memory ran out, and nothing that takes less is left to try."""


class PartialUpdateError(TrainingError):
    """An error came in an update that can be neither finished nor undone."""


class DataError(TrainingError):
    """The training data raised while a run read them."""


class ResumeError(TrainingError):
    """A run cannot be resumed from what it saved."""


class SaveError(TrainingError):
    """A file could not be written; what was there before stays."""
