"""Records of measurements: one step, a training run, a comparison of a plan with the baseline.

They do not import torch. `bf.fit` returns `training_run.TrainingResult`, `bf.measure` returns
`measurement.Measurement`.
"""

from brimful.results.equivalence import Comparison, EquivalenceReport
from brimful.results.measurement import Measurement, OpTemporary
from brimful.results.sample_size import SampleSize, describe_growth, larger_entries
from brimful.results.self_correction import JobCalibration, SelfCorrection
from brimful.results.training_run import (
    WAITING_FRACTION,
    DataLoading,
    Recovery,
    StepRecord,
    StopReason,
    TrainingResult,
    ValidationRecord,
    steady_steps,
    waiting_fraction,
)

__all__ = [
    "WAITING_FRACTION",
    "Comparison",
    "DataLoading",
    "EquivalenceReport",
    "JobCalibration",
    "Measurement",
    "OpTemporary",
    "Recovery",
    "SampleSize",
    "SelfCorrection",
    "StepRecord",
    "StopReason",
    "TrainingResult",
    "ValidationRecord",
    "describe_growth",
    "larger_entries",
    "steady_steps",
    "waiting_fraction",
]
