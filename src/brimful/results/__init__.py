"""Records of what was measured: one step, a training run, a comparison of a plan with plain training.

They do not import torch. `training_run.TrainingResult` is what `bf.fit` returns, `measurement.Measurement` what
`bf.measure` returns.
"""

from brimful.results.equivalence import Comparison, EquivalenceReport
from brimful.results.measurement import Measurement, OpTemporary
from brimful.results.training_run import (
    LARGEST_SEED,
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
    "LARGEST_SEED",
    "WAITING_FRACTION",
    "Comparison",
    "DataLoading",
    "EquivalenceReport",
    "Measurement",
    "OpTemporary",
    "Recovery",
    "StepRecord",
    "StopReason",
    "TrainingResult",
    "ValidationRecord",
    "steady_steps",
    "waiting_fraction",
]
