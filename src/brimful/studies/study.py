"""What a study is: rows of options for `brimful.estimate`, with what an article published of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from brimful.api import estimate, fit
from brimful.devices import Device, find_device
from brimful.errors import BrimfulError, InterruptedRunError
from brimful.job import Job
from brimful.prediction import Verdict
from brimful.profiling.named_device import DeviceLike, resolve_device
from brimful.results import Published, SmallRun, StopReason, StudyResult, StudyRow
from brimful.utils.status import busy, report

SMALL_DEVICE = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row: a model and how it trains, at full scale and at a small one."""

    label: str
    job: Callable[[], Job] | None = None
    """None for a row that only has a small scale."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """As for `brimful.estimate`."""
    published: Published = field(default_factory=Published)
    small_job: Callable[[], Job] | None = None
    small_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A published comparison."""

    name: str
    title: str
    source: str
    device: str
    """A name from the hardware table."""
    cases: tuple[Case, ...]
    conclusion: str
    epochs: int
    """Of the small scale."""
    notes: tuple[str, ...] = ()


@busy("study")
def run_study(study: Study, device: DeviceLike | None = None, *, runs_small: bool = False) -> StudyResult:
    """Predict the rows of a study at full scale, and with `runs_small` train each at a small scale on the CPU.

    Default of `device`: that of the article.
    """
    target = resolve_device(study.device if device is None else device)
    rows = tuple(_row(case, study, target, runs_small=runs_small) for case in study.cases)
    return StudyResult(
        name=study.name,
        title=study.title,
        source=study.source,
        device=target.name,
        is_published_device=target.name == find_device(study.device).name,
        rows=rows,
        conclusion=study.conclusion,
        notes=study.notes,
    )


def _row(case: Case, study: Study, device: Device, *, runs_small: bool) -> StudyRow:
    found: dict[str, Any] = {}
    try:
        if case.job is not None:
            report(f"predicting {case.label}")
            predicted = estimate(case.job(), device, **case.options)
            found["predicted_peak_device_bytes"] = predicted.predicted_peak_device_bytes
            found["predicted_fits"] = predicted.verdict is not Verdict.DOES_NOT_FIT
            found["predicted_samples_per_second"] = predicted.predicted_samples_per_second
        if runs_small and case.small_job is not None:
            report(f"training {case.label}")
            found["small"] = _small_run(case.small_job(), case.small_options, study.epochs)
    except InterruptedRunError:
        raise
    except BrimfulError as error:
        found["why_not"] = str(error)
    return StudyRow(label=case.label, published=case.published, **found)


def _small_run(job: Job, options: Mapping[str, Any], epochs: int) -> SmallRun:
    settings = estimate(job, SMALL_DEVICE, **options).settings
    start = time.perf_counter()
    result, _ = fit(job, settings, epochs=epochs, device=SMALL_DEVICE, show_progress=False, verify=False)
    seconds = time.perf_counter() - start
    if result.stopped_because is not StopReason.FINISHED:
        raise InterruptedRunError(f"interrupted while training {job.name}; a study keeps nothing.")
    return SmallRun(
        measured_peak_allocated_bytes=result.measured_peak_allocated_bytes,
        seconds=seconds,
        first_training_loss=result.steps[0].loss,
        validation_loss=result.validations[-1].loss,
        accuracy=result.validations[-1].metrics["accuracy"],
    )
