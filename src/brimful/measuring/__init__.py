"""One real step → Measurement; a device's real rates and what its CUDA context takes."""

from brimful.measuring.calibrate import calibrate_cpu
from brimful.measuring.certify import certify, certify_model
from brimful.measuring.context import best_context, kept_context, measure_context
from brimful.measuring.peak import PeakMemory, peak_memory
from brimful.measuring.step import measure_step, repeated_step

__all__ = [
    "PeakMemory",
    "best_context",
    "calibrate_cpu",
    "certify",
    "certify_model",
    "kept_context",
    "measure_context",
    "measure_step",
    "peak_memory",
    "repeated_step",
]
