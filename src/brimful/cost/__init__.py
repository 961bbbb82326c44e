"""Seconds: what the ops of a trace take on a device.

A GPU's time is that of the kernels that ops launch, by class (`kernels`), in a queue that the host fills; a
CPU's follows measured curves, with the first touch of memory. `uncertainty` has intervals. Start reading at
`step.step_seconds`.
"""

from brimful.cost.by_module import work_seconds_by_module
from brimful.cost.model_flops import model_flops
from brimful.cost.recomputing import RecomputePrices
from brimful.cost.regions import region_seconds, saving_seconds
from brimful.cost.roofline import Roofline, op_seconds
from brimful.cost.step import StepTime, StepTimer, least_host_update_seconds, step_seconds
from brimful.cost.uncertainty import (
    bare_difference_interval,
    difference_interval,
    least_distinguished_seconds,
    time_interval,
)

__all__ = [
    "RecomputePrices",
    "Roofline",
    "StepTime",
    "StepTimer",
    "bare_difference_interval",
    "difference_interval",
    "least_distinguished_seconds",
    "least_host_update_seconds",
    "model_flops",
    "op_seconds",
    "region_seconds",
    "saving_seconds",
    "step_seconds",
    "time_interval",
    "work_seconds_by_module",
]
