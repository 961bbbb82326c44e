"""What a study is: rows of options for `brimful.estimate`, with what an article published of them."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from brimful.api import estimate, fit
from brimful.devices import Device, find_device
from brimful.errors import BrimfulError, InterruptedRunError
from brimful.job import Job
from brimful.prediction import Estimate, Verdict
from brimful.profiling.named_device import DeviceLike, resolve_device
from brimful.results import (
    Published,
    SmallRun,
    StopReason,
    StudyFigure,
    StudyPrediction,
    StudyResult,
    StudyRow,
    median_step_seconds,
)
from brimful.settings import Parallelism
from brimful.studies.published_loops import Recipe, job_as_published
from brimful.utils.status import busy, report

SMALL_DEVICE = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A further figure of a row."""

    name: str
    unit: str
    of: Callable[[Estimate], float]
    published: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Processes that train the small scale of a row together, over gloo."""

    count: int
    parallelism: Parallelism


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row: a model and how it trains, at full scale and at a small one."""

    label: str
    group: str = ""
    """Speeds are relative within a group."""
    device: str | None = None
    """A name from the hardware table. Default: that of the study."""
    job: Callable[[], Job] | None = None
    """None for a row that only has a small scale."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """As for `brimful.estimate`."""
    as_published: Recipe | None = None
    """How the article's software trained."""
    loop_batch: int = 1
    """Samples of each batch there."""
    published: Published = field(default_factory=Published)
    figures: tuple[Figure, ...] = ()
    small_job: Callable[[], Job] | None = None
    small_options: Mapping[str, Any] = field(default_factory=dict)
    small_ranks: Ranks | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A published comparison."""

    name: str
    title: str
    source: str
    """The article, and its address where that is known."""
    device: str
    """A name from the hardware table."""
    find_published_device: Callable[[str], Device] = find_device
    """The device of a name with the CUDA context of the article's software."""
    cases: tuple[Case, ...]
    conclusion: str
    epochs: int
    """Of the small scale."""
    notes: tuple[str, ...] = ()


@busy("study")
def run_study(study: Study, device: DeviceLike | None = None, *, runs_small: bool = False) -> StudyResult:
    """Predict the rows of a study at full scale, and with `runs_small` train each at a small scale on the CPU.

    Default of `device`: those of the article, for which predictions are compared with what was published.
    """
    given = None if device is None else resolve_device(device)
    rows = tuple(_row(case, study, given, runs_small=runs_small) for case in study.cases)
    return StudyResult(
        name=study.name,
        title=study.title,
        source=study.source,
        device=(given or find_device(study.device)).name,
        is_published_device=given is None,
        rows=rows,
        conclusion=study.conclusion,
        notes=study.notes,
    )


def _row(case: Case, study: Study, given: Device | None, *, runs_small: bool) -> StudyRow:
    """One row; `given` replaces the article's device."""
    is_as_published = case.as_published is not None and given is None
    found: dict[str, Any] = {"is_compared_as_published": is_as_published}
    name = case.device or study.device
    try:
        predicted = None
        if case.job is not None:
            report(f"predicting {case.label}")
            predicted = estimate(case.job(), given or find_device(name), suggest=False, **case.options)
            found |= {"today": _prediction(predicted), "uncertain": predicted.uncertain}
        if case.as_published is not None and is_as_published:
            report(f"predicting {case.label} as published")
            device = study.find_published_device(name)
            predicted = estimate(
                job_as_published(case.as_published), device, micro_batch_size=case.loop_batch, suggest=False
            )
            found["as_published"] = _prediction(predicted)
        if predicted is not None:
            found["figures"] = tuple(_figure(figure, predicted) for figure in case.figures)
        if runs_small and case.small_job is not None:
            report(f"training {case.label}")
            found["small"] = _small_run(case, study.epochs)
    except InterruptedRunError:
        raise
    except BrokenProcessPool:
        found["why_not"] = "a process that trained it ended, as one that runs out of memory does"
    except BrimfulError as error:
        found["why_not"] = str(error)
    return StudyRow(label=case.label, group=case.group, published=case.published, **found)


def _prediction(predicted: Estimate) -> StudyPrediction:
    return StudyPrediction(
        predicted_peak_device_bytes=predicted.predicted_peak_device_bytes,
        predicted_fits=predicted.verdict is not Verdict.DOES_NOT_FIT,
        predicted_samples_per_second=predicted.predicted_samples_per_second,
    )


def _figure(figure: Figure, predicted: Estimate) -> StudyFigure:
    return StudyFigure(
        name=figure.name, unit=figure.unit, predicted=figure.of(predicted), published=figure.published
    )


def _small_run(case: Case, epochs: int) -> SmallRun:
    assert case.small_job is not None
    if case.small_ranks is None:
        return _trained(case.small_job, case.small_options, epochs)
    count = case.small_ranks.count
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(count, mp_context=context) as pool:
        training = [
            pool.submit(
                _on_rank, rank, Path(folder), case.small_ranks, case.small_job, case.small_options, epochs
            )
            for rank in range(count)
        ]
        first, *_others = [each.result() for each in training]
        return first


def _on_rank(
    rank: int,
    folder: Path,
    ranks: Ranks,
    make_job: Callable[[], Job],
    options: Mapping[str, Any],
    epochs: int,
) -> SmallRun:
    """Train in a process of its own, beside those of the other ranks."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks.count
    )
    try:
        return _trained(make_job, options, epochs, ranks)
    finally:
        torch.distributed.destroy_process_group()


def _trained(
    make_job: Callable[[], Job], options: Mapping[str, Any], epochs: int, ranks: Ranks | None = None
) -> SmallRun:
    job = make_job()
    settings = estimate(job, SMALL_DEVICE, suggest=False, **options).settings
    if ranks is not None:
        settings = replace(settings, world_size=ranks.count, parallelism=ranks.parallelism)
    start = time.perf_counter()
    result, _ = fit(job, settings, epochs=epochs, device=SMALL_DEVICE, show_progress=False, verify=False)
    seconds = time.perf_counter() - start
    if result.stopped_because is not StopReason.FINISHED:
        raise InterruptedRunError(f"interrupted while training {job.name}; a study keeps nothing.")
    return SmallRun(
        measured_peak_allocated_bytes=result.measured_peak_allocated_bytes,
        seconds=seconds,
        median_step_seconds=median_step_seconds(result.steps, result.steps[0].samples),
        first_training_loss=result.steps[0].loss,
        validation_loss=result.validations[-1].loss,
        accuracy=result.validations[-1].metrics["accuracy"],
    )
