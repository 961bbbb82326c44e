"""Intervals of predicted times, and of the difference between two of them.

The error of a step is the sum of those of its kernel classes and one of the device, each independent and
proportional to its time. Two plans of one model on one device share these errors, so that most of them cancel
in their difference: only time that one has and the other has not is uncertain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist

from brimful.cost.input_copies import INPUT_COPY
from brimful.cost.kernels import FactorTable
from brimful.cost.kernels.constants import DIFFERENCE_WIDENING
from brimful.cost.step import StepTime
from brimful.devices import Device

COVERAGE = 0.9
"""Probability that the interval claims."""
DEVIATIONS = NormalDist().inv_cdf((1 + COVERAGE) / 2)
"""Standard deviations on either side that cover it in a normal distribution."""

STEP_SPREAD = 0.01
"""Standard deviation of a difference, relative to the step, beside those of classes. Repeated measurements of a
step vary by about as much. Assumed."""

SPREADS = {"host": 0.5, "communication": 0.4, "host_copy": 0.3, INPUT_COPY: 0.5}
"""Standard deviations of the logarithms of what no kernel takes. Assumed: hosts differ by a factor of 2 in the
time of a launch and of copying memory, and links reach 60 to 90 % of their peaks."""

CPU_SPREAD, UNCALIBRATED_SPREAD, BUSY_SPREAD = 0.15, 0.5, 0.35
"""Standard deviations of the logarithm of a step on a CPU: calibrated, with default rates, and calibrated while
other work kept it busy. 15 models on two kinds of machines: medians 6 and 15 %, largest 34 %
(benchmarks/results/step_time*.json); the others are assumed."""

CPU_CLASS_SPREAD = 0.15
"""Standard deviation of the logarithm of each kind of work on a CPU, in addition. Assumed."""


def time_interval(time: StepTime, device: Device) -> tuple[float, float]:
    """Lower and upper end, in seconds, of a step's predicted time on a device, which cover `COVERAGE`."""
    total = time.total_seconds
    if not total:
        return 0.0, 0.0
    variance = _variance(dict(time.kernel_seconds), device) / total**2 + _device_spread(device) ** 2
    factor = math.exp(DEVIATIONS * math.sqrt(variance))
    return total / factor, total * factor


def difference_interval(one: StepTime, other: StepTime, device: Device) -> tuple[float, float]:
    """Lower and upper end, in seconds, of `one` − `other`, two steps of one model on one device."""
    ones, others = dict(one.kernel_seconds), dict(other.kernel_seconds)
    more = {name: ones.get(name, 0.0) - others.get(name, 0.0) for name in dict.fromkeys((*ones, *others))}
    difference = one.total_seconds - other.total_seconds
    variance = _variance(more, device) + (_device_spread(device) * difference) ** 2
    if difference or any(more.values()):
        variance += (STEP_SPREAD * other.total_seconds) ** 2
    margin = DIFFERENCE_WIDENING * DEVIATIONS * math.sqrt(variance)
    return difference - margin, difference + margin


def least_distinguished_seconds(step_seconds: float) -> float:
    """The least difference in seconds between two steps whose interval may exclude 0.

    `step_seconds` is the time of one of the steps.
    """
    return DIFFERENCE_WIDENING * DEVIATIONS * STEP_SPREAD * step_seconds


_BARE_SPREAD = 0.5
"""Standard deviation of a difference of which only the sum is known, relative to it: that of the least certain
classes."""


def bare_difference_interval(seconds: float, step_seconds: float) -> tuple[float, float]:
    """Lower and upper end, in seconds, of a difference between two steps whose kernels are not known.

    `seconds` is the predicted difference, `step_seconds` the time of one of the steps.
    """
    deviation = math.hypot(_BARE_SPREAD * seconds, STEP_SPREAD * step_seconds)
    margin = DIFFERENCE_WIDENING * DEVIATIONS * deviation
    return seconds - margin, seconds + margin


def _variance(seconds: Mapping[str, float], device: Device) -> float:
    """The variance of a sum of times of classes, in seconds²."""
    table = None if device.kind == "cpu" else FactorTable.of(device)
    variance = 0.0
    for name, each in seconds.items():
        spread = SPREADS.get(name)
        if spread is None:
            spread = CPU_CLASS_SPREAD if table is None else table.factors(name).spread
        variance += (spread * each) ** 2
    return variance


def _device_spread(device: Device) -> float:
    """The standard deviation of what all classes share, relative to a step."""
    if device.kind == "cuda":  # what was measured does not depend on the peaks
        return math.hypot(FactorTable.of(device).reached.spread, 0.0 if device.curves else device.rates_spread)
    if device.was_measured_busy:
        return BUSY_SPREAD
    return CPU_SPREAD if device.curves else UNCALIBRATED_SPREAD
