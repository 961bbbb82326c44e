"""A trace and a device → an `Estimate`: peak memory, step time, and whether it fits. It does not import torch.

Start reading at `estimate.estimate_trace`. `estimator.Estimator` predicts any micro-batch size
from two captures.
"""

from brimful.prediction.estimate import MARGIN_FRACTION, Estimate, Extremes, Verdict, estimate_trace
from brimful.prediction.estimator import AtSizes, Estimator

__all__ = [
    "MARGIN_FRACTION",
    "AtSizes",
    "Estimate",
    "Estimator",
    "Extremes",
    "Verdict",
    "estimate_trace",
]
