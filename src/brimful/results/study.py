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
    first_training_loss: float
    validation_loss: float
    """After training."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult(PrintedResult):
    """A study; prints as a table."""

    name: str
    title: str
    source: str
    device: str
    """What is predicted is for this device."""
    is_published_device: bool
    """Whether it is the article's; predictions of another are not compared with what was published."""
    rows: tuple[StudyRow, ...]
    conclusion: str
    """What to choose, and when."""
    notes: tuple[str, ...] = ()
    """What of the published experiment is not known, or differs."""

    def peak_errors(self) -> tuple[float | None, ...]:
        """For each row the predicted peak relative to the published one, less 1; None without both."""
        return tuple(
            self._error(row.predicted_peak_device_bytes, row.published.peak_device_bytes) for row in self.rows
        )

    def speed_errors(self) -> tuple[float | None, ...]:
        """For each row the predicted speed relative to the published one, less 1; None without both."""
        return tuple(
            self._error(row.predicted_samples_per_second, row.published.samples_per_second)
            if row.published.samples_per_second is not None
            else self._error(ratio, row.published.relative_speed)
            for row, ratio in zip(self.rows, self.speed_ratios(), strict=True)
        )

    def speed_ratios(self) -> tuple[float | None, ...]:
        """For each row the predicted speed beside the row that published ratios are of; None for that row."""
        base = next((row for row in self.rows if row.published.relative_speed is not None), None)
        base_speed = None if base is None else base.predicted_samples_per_second
        return tuple(
            None
            if row is base or base_speed is None or row.predicted_samples_per_second is None
            else row.predicted_samples_per_second / base_speed
            for row in self.rows
        )

    def _error(self, predicted: float | None, published: float | None) -> float | None:
        is_known = self.is_published_device and predicted is not None and published is not None
        return predicted / published - 1 if is_known else None  # type: ignore[operator]
