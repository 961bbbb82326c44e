"""Seconds: what the ops of a trace take on a device.

A roofline for each op, with the time to launch it as the floor.
"""

from brimful.cost.regions import region_seconds, saving_seconds
from brimful.cost.roofline import Roofline, op_seconds
from brimful.cost.step import StepTime, step_seconds

__all__ = ["Roofline", "StepTime", "op_seconds", "region_seconds", "saving_seconds", "step_seconds"]
