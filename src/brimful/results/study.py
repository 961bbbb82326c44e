"""A published comparison of techniques: predicted beside published, and a small scale of it that really ran."""

from __future__ import annotations

from dataclasses import dataclass

from brimful.utils.display import PrintedResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What an article reports of one row; None where it does not."""

    peak_device_bytes: int | None = None
    is_out_of_memory: bool = False
    samples_per_second: float | None = None
    relative_speed: float | None = None
    """Speed beside the first row that ran, where the article has times of an epoch of unknown size."""
    accuracy: float | None = None
    """Fraction of the validation samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallRun:
    """What training at a small scale on this machine measured."""

    measured_peak_allocated_bytes: int | None
    seconds: float
    """Of training, validation included."""
    first_loss: float
    last_loss: float
    accuracy: float
    """Fraction of the validation samples after training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRow:
    """One row of a study."""

    label: str
    published: Published
    predicted_peak_device_bytes: int | None = None
    """None where the row has no full scale, or cannot be predicted."""
    predicted_fits: bool | None = None
    predicted_samples_per_second: float | None = None
    small: SmallRun | None = None
    """None unless it was asked for."""
    why_not: str = ""
    """Why it could not be predicted or run."""

    @property
    def peak_error(self) -> float | None:
        """The predicted peak relative to the published one, less 1; None without both."""
        published = self.published.peak_device_bytes
        if published is None or self.predicted_peak_device_bytes is None:
            return None
        return self.predicted_peak_device_bytes / published - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult(PrintedResult):
    """A study; prints as a table."""

    name: str
    title: str
    source: str
    device: str
    """What is predicted is for this device."""
    rows: tuple[StudyRow, ...]
    conclusion: str
    """What to choose, and when."""
    notes: tuple[str, ...] = ()
    """What of the published experiment is not known, or differs."""

    def speed_errors(self) -> tuple[float | None, ...]:
        """For each row the predicted speed relative to the published one, less 1; None without both."""
        first = next((row for row in self.rows if row.published.relative_speed is not None), None)
        base = None if first is None else first.predicted_samples_per_second
        return tuple(_speed_error(row, base) for row in self.rows)


def _speed_error(row: StudyRow, base: float | None) -> float | None:
    predicted, published = row.predicted_samples_per_second, row.published
    if predicted is None:
        return None
    if published.samples_per_second is not None:
        return predicted / published.samples_per_second - 1
    if published.relative_speed is not None and base is not None:
        return predicted / base / published.relative_speed - 1
    return None
