"""One real step → Measurement; a device's real rates."""

from brimful.measuring.calibrate import calibrate_cpu
from brimful.measuring.peak import PeakMemory, peak_memory
from brimful.measuring.step import measure_step

__all__ = ["PeakMemory", "calibrate_cpu", "measure_step", "peak_memory"]
