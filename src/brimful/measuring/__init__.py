"""One real step → Measurement; a device's real rates and what its CUDA context takes."""

from brimful.measuring.calibrate import (
    THOROUGH_SWEEPS,
    Progress,
    cache_path,
    calibrate_cpu,
    calibrate_gpu,
    with_kept_calibration,
)
from brimful.measuring.certify import certify, certify_model
from brimful.measuring.context import best_context, kept_context, measure_context
from brimful.measuring.here import device_record
from brimful.measuring.peak import PeakMemory, peak_memory
from brimful.measuring.splitting import (
    LayerSplitWarning,
    SplitWarning,
    check_may_split,
    check_split,
    split_changes_layers,
    split_not_compared,
)
from brimful.measuring.step import measure_step, repeated_step

__all__ = [
    "THOROUGH_SWEEPS",
    "LayerSplitWarning",
    "PeakMemory",
    "Progress",
    "SplitWarning",
    "best_context",
    "cache_path",
    "calibrate_cpu",
    "calibrate_gpu",
    "certify",
    "certify_model",
    "check_may_split",
    "check_split",
    "device_record",
    "kept_context",
    "measure_context",
    "measure_step",
    "peak_memory",
    "repeated_step",
    "split_changes_layers",
    "split_not_compared",
    "with_kept_calibration",
]
