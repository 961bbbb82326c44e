"""A trace and a device → an `Estimate`: peak memory, step time, and whether it fits. It does not import torch.

Start reading at `estimate.estimate_trace`. `estimator.Estimator` predicts any micro-batch size
from two captures.
"""

from brimful.prediction.estimate import MARGIN_FRACTION, Estimate, Extremes, Verdict, estimate_trace
from brimful.prediction.estimator import AtSizes, Estimator
from brimful.prediction.generation import Generation, GenerationEstimate, predict_generation

__all__ = [
    "MARGIN_FRACTION",
    "AtSizes",
    "Estimate",
    "Estimator",
    "Extremes",
    "Generation",
    "GenerationEstimate",
    "Verdict",
    "estimate_trace",
    "predict_generation",
]
