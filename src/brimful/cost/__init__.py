"""Seconds: what the ops of a trace take on a device.

Measured curves where the device was calibrated, else a roofline; what the host takes per op; on a CPU the
first touch of memory; on CUDA a queue that the host fills.
"""

from brimful.cost.model_flops import model_flops
from brimful.cost.recomputing import RecomputePrices
from brimful.cost.regions import region_seconds, saving_seconds
from brimful.cost.roofline import Roofline, op_seconds
from brimful.cost.step import StepTime, least_host_update_seconds, step_seconds

__all__ = [
    "RecomputePrices",
    "Roofline",
    "StepTime",
    "least_host_update_seconds",
    "model_flops",
    "op_seconds",
    "region_seconds",
    "saving_seconds",
    "step_seconds",
]
