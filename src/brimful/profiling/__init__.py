"""A real device → what it does: a measured step, a verified plan, calibrated rates, the CUDA context's memory.

Start reading at `measure.measure_step`.

| module | input → output |
|---|---|
| `measure`, `measure_loop`, `peak` | a job → `Measurement`: peak memory and time of real steps |
| `equivalence`, `splitting`, `coupled_layers` | a plan → whether it computes what the baseline computes |
| `calibrate`, `probes`, `timing`, `dispatch` | a device → rates by kind of work and size |
| `local_device`, `cuda_context` | this machine's device → its `Device` record |
"""

from brimful.profiling.calibrate import (
    THOROUGH_SWEEPS,
    cache_path,
    calibrate_cpu,
    calibrate_gpu,
    with_kept_calibration,
)
from brimful.profiling.cuda_context import best_context, measure_context
from brimful.profiling.equivalence import verify, verify_model
from brimful.profiling.local_device import device_record
from brimful.profiling.measure import measure_step, repeated_step
from brimful.profiling.peak import PeakMemory, larger_peak, peak_memory
from brimful.profiling.rates import Progress
from brimful.profiling.splitting import (
    LayerSplitWarning,
    SplitWarning,
    check_labels,
    check_may_split,
    check_planned_split,
    check_split,
    compare_planned_split,
    split_changes_layers,
    split_not_compared,
)

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
    "check_labels",
    "check_may_split",
    "check_planned_split",
    "check_split",
    "compare_planned_split",
    "device_record",
    "larger_peak",
    "measure_context",
    "measure_step",
    "peak_memory",
    "repeated_step",
    "split_changes_layers",
    "split_not_compared",
    "verify",
    "verify_model",
    "with_kept_calibration",
]
