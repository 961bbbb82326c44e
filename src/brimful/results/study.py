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
    """Speed beside the first row of the same group that ran, where the article has times of runs of unknown
    size."""
    accuracy: float | None = None
    """Fraction of the validation samples, or the article's other measure of quality."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyPrediction:
    """What is predicted of one row at full scale."""

    predicted_peak_device_bytes: int
    predicted_fits: bool
    predicted_samples_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyFigure:
    """A further figure of a row, such as the bytes of one kind of tensor."""

    name: str
    unit: str
    """"bytes", or of what else it is a number."""
    predicted: float
    published: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallRun:
    """What training at a small scale on this machine measured."""

    measured_peak_allocated_bytes: int | None
    seconds: float
    """Of training, validation included."""
    median_step_seconds: float | None
    first_training_loss: float
    validation_loss: float
    """After training."""
    accuracy: float
    """Fraction of the validation samples after training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRow:
    """One row of a study."""

    label: str
    group: str = ""
    """Speeds are relative within a group."""
    published: Published
    today: StudyPrediction | None = None
    """By brimful's own loop and the software of today. None where the row has no full scale, or cannot be
    predicted."""
    as_published: StudyPrediction | None = None
    """By a loop as the article's software ran it, on the article's device."""
    is_compared_as_published: bool = False
    """Whether errors and figures are of `as_published`. They are of `today` where the article's software is not
    known or not needed."""
    figures: tuple[StudyFigure, ...] = ()
    small: SmallRun | None = None
    """None unless it was asked for."""
    uncertain: tuple[str, ...] = ()
    """What the prediction of `today` does not know, as estimates say it."""
    why_not: str = ""
    """Why it could not be predicted or run."""

    @property
    def compared(self) -> StudyPrediction | None:
        """The prediction that is compared with what was published."""
        return self.as_published if self.is_compared_as_published else self.today


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult(PrintedResult):
    """A study; prints as a table."""

    name: str
    title: str
    source: str
    device: str
    """What is predicted is for this device, unless the label of a row names another."""
    is_published_device: bool
    """Whether it is the article's, as by default; predictions for a device that the user gives are not compared
    with what was published."""
    rows: tuple[StudyRow, ...]
    conclusion: str
    """What to choose, and when."""
    notes: tuple[str, ...] = ()
    """What of the published experiment is not known, or differs."""

    def peak_errors(self) -> tuple[float | None, ...]:
        """For each row the predicted peak relative to the published one, less 1; None without both."""
        return tuple(
            self._error(None if row.compared is None else row.compared.predicted_peak_device_bytes, published)
            for row in self.rows
            for published in [row.published.peak_device_bytes]
        )

    def speed_errors(self) -> tuple[float | None, ...]:
        """For each row the predicted speed relative to the published one, less 1; None without both."""
        return tuple(
            self._error(_speed(row), row.published.samples_per_second)
            if row.published.samples_per_second is not None
            else self._error(ratio, row.published.relative_speed)
            for row, ratio in zip(self.rows, self.speed_ratios(), strict=True)
        )

    def speed_ratios(self) -> tuple[float | None, ...]:
        """For each row the predicted speed beside its group's row that published ratios are of; None for that
        row."""
        return tuple(self._ratio(row) for row in self.rows)

    def _ratio(self, row: StudyRow) -> float | None:
        of_group = (each for each in self.rows if each.group == row.group)
        base = next((each for each in of_group if each.published.relative_speed is not None), None)
        speed, base_speed = _speed(row), None if base is None else _speed(base)
        return None if row is base or base_speed is None or speed is None else speed / base_speed

    def _error(self, predicted: float | None, published: float | None) -> float | None:
        is_known = self.is_published_device and predicted is not None and published is not None
        return predicted / published - 1 if is_known else None  # type: ignore[operator]


def _speed(row: StudyRow) -> float | None:
    return None if row.compared is None else row.compared.predicted_samples_per_second
