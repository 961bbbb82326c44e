"""Records: measurements of a step, of a training run, of a plan beside the baseline, and what would help.

They do not import torch. `bf.fit` returns `training_run.TrainingResult`, `bf.measure` returns
`measurement.Measurement`.
"""

from brimful.results.equivalence import Comparison, EquivalenceReport
from brimful.results.measurement import Measurement, OpTemporary
from brimful.results.sample_size import SampleSize, describe_growth, larger_entries
from brimful.results.self_correction import JobCalibration, SelfCorrection
from brimful.results.study import Published, SmallRun, StudyFigure, StudyPrediction, StudyResult, StudyRow
from brimful.results.suggestion import Probability, Suggestion
from brimful.results.training_run import (
    WAITING_FRACTION,
    DataLoading,
    EpochRecord,
    Recovery,
    StepRecord,
    StopReason,
    TrainingResult,
    ValidationRecord,
    median_step_seconds,
    steady_steps,
    waiting_fraction,
)
from brimful.results.whole_run import SECONDS_PER_HOUR, PredictsRuns, WholeRun, whole_run

__all__ = [
    "SECONDS_PER_HOUR",
    "WAITING_FRACTION",
    "Comparison",
    "DataLoading",
    "EpochRecord",
    "EquivalenceReport",
    "JobCalibration",
    "Measurement",
    "OpTemporary",
    "PredictsRuns",
    "Probability",
    "Published",
    "Recovery",
    "SampleSize",
    "SelfCorrection",
    "SmallRun",
    "StepRecord",
    "StopReason",
    "StudyFigure",
    "StudyPrediction",
    "StudyResult",
    "StudyRow",
    "Suggestion",
    "TrainingResult",
    "ValidationRecord",
    "WholeRun",
    "describe_growth",
    "larger_entries",
    "median_step_seconds",
    "steady_steps",
    "waiting_fraction",
    "whole_run",
]
