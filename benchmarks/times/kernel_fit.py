"""The model of step times that `fit.py` fits: factors of kernel classes, fractions of GPUs' peaks.

A step takes the sum over its kernels of

    max(computing · slowdown / fraction, moving · passes / fraction) + the least time of a kernel

or what the host takes, if that is longer. The fit minimises robust relative errors, with a pull to what the
kernels are known to do (`PASSES`, `SLOWDOWNS`), so that a class with few rows stays near it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from brimful.cost.kernels.classes import CONVOLUTION, FUSED_ATTENTION
from brimful.cost.kernels.constants import ELEMENT_LOADING_FLOPS, L2_SPEEDUP, integers_per_second
from brimful.cost.kernels.factors import reached_by
from brimful.devices import find_device
from times.archive import Step
from times.kernel_classes import AtPeak

Numbers = NDArray[np.float64]

PASSES = {
    "batch_norm": 1.5,
    "batch_norm_channels_last": 1.5,
    "batch_norm_backward": 1.67,
    "batch_norm_backward_channels_last": 1.67,
    "layer_norm": 1.5,
    "layer_norm_backward": 2.0,
    "group_norm": 1.5,
    "group_norm_backward": 2.0,
    "softmax": 1.1,
    "softmax_backward": 1.1,
    "softmax_long": 2.0,
    "softmax_backward_long": 1.67,
    "transposing_copy": 1.5,
    "pooling": 1.7,
    "reduction_of_columns": 1.3,
    "gather": 1.3,
    "scatter": 2.5,
}
"""Known before the fit: a norm reads its input twice (3 instead of 2 amounts), the gradient of one two inputs
twice (5 instead of 3); a pass that transposes reads or writes parts of sectors; others are near 1."""
OTHER_PASSES = 1.1
SLOWDOWNS = {"grouped_fallback": 15.0, "grouped": 2.5, "depthwise": 4.0}
"""By the beginning of a class's name; kernels of grouped convolutions fill tiles in part, those of depthwise
ones load an operand per operation."""
UNALIGNED_SLOWDOWN, OTHER_SLOWDOWN = 1.4, 1.2

PASSES_WIDTH, SLOWDOWN_WIDTH, BANDWIDTH_WIDTH, ARITHMETIC_WIDTH = 0.25, 0.4, 0.04, 0.12
KERNEL_WIDTH, CACHED_WIDTH, PLACE_WIDTH = 0.15, 0.5, 0.5
"""Standard deviations of the logarithms around what is known before."""
BANDWIDTH, ARITHMETIC, ATTENTION = 0.88, 1.0, 0.6
"""Fractions of peaks before the fit: an H100 SXM copies at 87 % (aigatech/vpbenchmarking), others at 83 to 94
%; fused attention reaches 50 to 73 % of an A100's peak (Dao, "FlashAttention-2", arXiv 2307.08691)."""
FRACTIONS_ONLY = {"matmul", *FUSED_ATTENTION}
"""Classes without a slowdown: what they reach is a fraction of each GPU."""
OLD_ATTENTION = ("llm",)
"""Sources measured with the first version of FlashAttention, which has fractions of its own: about half of
today's."""
PRIOR_PLACE_OPERATIONS = 10.0
"""Integer operations to compute where an element lies in an operand, before the fit: some five per dimension,
of which most operands have two or three, shared by the operands, and two of each operand."""
OFFSET_WIDTH = 0.15
OFFSET_SOURCES = ("gpus",)
"""Sources whose steps contain what is not modelled (input pipelines, clipping, kernels of NVIDIA's own,
logging): each of their models has a factor of its own on all GPUs, which no prediction uses. So these rows say
how GPUs compare, not how long a step takes."""
LEAST_PASSES, LEAST_SLOWDOWN = 1.0, 0.9
PRIOR_KERNEL_SECONDS, PRIOR_CACHED = 4e-6, 0.5
ERROR = 0.05
"""Relative error of a row from which it counts linearly, not squared."""


class Parameters(NamedTuple):
    """What is fitted."""

    passes: Numbers
    """(C,)"""
    slowdowns: Numbers
    """(C,)"""
    kernel_seconds: float
    """The least time of a kernel."""
    cached: float
    """Fraction of the L2 cache that has bytes of a kernel."""
    place_operations: float
    """To compute where an element lies in an operand that is not contiguous."""
    bandwidth: Numbers
    """Fraction of the peak that each GPU reaches, (G,)."""
    arithmetic: Numbers
    """The same of products, by GPU and type, (A,)."""
    offsets: Numbers
    """Factor of each model of `OFFSET_SOURCES`, (O,)."""


class Table:
    """All kernels of all steps as arrays, and the parameters that explain their times."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps
        flat = [
            (row, kernel, count) for row, step in enumerate(steps) for kernel, count in step.kernels.items()
        ]
        self.classes = sorted({kernel.name for _, kernel, _ in flat})
        arithmetics = sorted(
            {
                (steps[row].gpu, _arithmetic(steps[row], kernel))
                for row, kernel, _ in flat
                if kernel.computing_seconds
            }
        )
        self.arithmetics = [each for each in arithmetics if each[1] not in ("scalar", "integer")]
        self.gpus = sorted({step.gpu for step in steps})
        class_of = {name: index for index, name in enumerate(self.classes)}
        arithmetic_of = {each: index for index, each in enumerate(self.arithmetics)}
        self._row = np.array([row for row, _, _ in flat])
        self._class = np.array([class_of[kernel.name] for _, kernel, _ in flat])
        self._gpu = np.array([self.gpus.index(step.gpu) for step in steps])[self._row]
        none = len(self.arithmetics)  # index of those without products: a fraction of 1
        self._arithmetic = np.array(
            [
                arithmetic_of.get((steps[row].gpu, _arithmetic(steps[row], kernel)), none)
                for row, kernel, _ in flat
            ]
        )
        computing_seconds = np.array(
            [kernel.computing_seconds / _convolution(steps[row], kernel) for row, kernel, _ in flat]
        )
        places = np.array([kernel.arithmetic == "integer" for _, kernel, _ in flat])
        self._places = np.where(places, computing_seconds, 0.0)
        self._computing = np.where(places, 0.0, computing_seconds)
        least = [_least_computing_seconds(steps[row], kernel) for row, kernel, _ in flat]
        self._least_computing = np.array(least)
        self._moving = np.array([kernel.moving_seconds for _, kernel, _ in flat])
        self._count = np.array([count for _, _, count in flat], dtype=float)
        devices = [find_device(gpu) for gpu in self.gpus]
        cache_seconds = [each.l2_bytes / each.memory_bandwidth_bytes_per_second for each in devices]
        self._cache_seconds = np.array(cache_seconds)[self._gpu]
        self.measured = np.array([step.measured_seconds for step in steps])
        self._host = np.array([step.host_seconds for step in steps])
        self.families = np.array([step.family for step in steps])
        computing = {self.classes[index] for index in np.unique(self._class[self._computing > 0])}
        self.moved = [name for name in self.classes if name != "elementwise"]
        self.computed = [name for name in self.classes if name in computing and name not in FRACTIONS_ONLY]
        self._moved = np.array([class_of[name] for name in self.moved])
        self._computed = np.array([class_of[name] for name in self.computed])
        offsets = [(step.model, _half(step)) if step.source in OFFSET_SOURCES else None for step in steps]
        self.offsets = sorted({each for each in offsets if each})
        none = len(self.offsets)
        self._offset = np.array([none if each is None else self.offsets.index(each) for each in offsets])
        self._prior, self._width, self._bounds = self._priors()

    def _priors(self) -> tuple[Numbers, Numbers, tuple[Numbers, Numbers]]:
        sizes = (
            len(self.moved),
            len(self.computed),
            1,
            1,
            1,
            len(self.gpus),
            len(self.arithmetics),
            len(self.offsets),
        )
        prior = [PASSES.get(name, OTHER_PASSES) for name in self.moved]
        prior += [_slowdown(name) for name in self.computed]
        prior += [
            PRIOR_KERNEL_SECONDS,
            PRIOR_CACHED,
            PRIOR_PLACE_OPERATIONS,
            *[BANDWIDTH] * len(self.gpus),
            *(_fraction(name) for _, name in self.arithmetics),
            *[1.0] * len(self.offsets),
        ]
        widths = (
            PASSES_WIDTH,
            SLOWDOWN_WIDTH,
            KERNEL_WIDTH,
            CACHED_WIDTH,
            PLACE_WIDTH,
            BANDWIDTH_WIDTH,
            ARITHMETIC_WIDTH,
            OFFSET_WIDTH,
        )
        least = (LEAST_PASSES, LEAST_SLOWDOWN, 1e-6, 0.01, 1.0, 0.5, 0.1, 0.5)
        most = (9.0, 80.0, 8e-6, 1.0, 60.0, 1.0, 1.4, 2.0)
        return (
            np.log(prior),
            np.repeat(widths, sizes),
            (np.log(np.repeat(least, sizes)) - 1e-6, np.log(np.repeat(most, sizes))),
        )

    def unpack(self, parameters: Numbers) -> Parameters:
        """The parameters by name."""
        values = np.exp(parameters)
        passes, slowdowns = np.ones(len(self.classes)), np.ones(len(self.classes))
        moved, rest = np.split(values, [len(self.moved)])
        computed, rest = np.split(rest, [len(self.computed)])
        passes[self._moved], slowdowns[self._computed] = moved, computed
        bandwidth, arithmetic, offsets = np.split(rest[3:], np.cumsum([len(self.gpus), len(self.arithmetics)]))
        return Parameters(passes, slowdowns, *map(float, rest[:3]), bandwidth, arithmetic, offsets)

    def with_fractions(self, parameters: Numbers, gpu: str, fractions: Mapping[str, float]) -> Numbers:
        """The parameters with other fractions of a GPU's peaks.

        Args:
            parameters: Their logarithms, (P,).
            gpu: Its name.
            fractions: Of the bandwidth, and of arithmetic by type.
        """
        found = parameters.copy()
        first = len(self.moved) + len(self.computed) + 3
        found[first + self.gpus.index(gpu)] = np.log(fractions["bandwidth"])
        for index, (name, arithmetic) in enumerate(self.arithmetics):
            if name == gpu:
                fraction = fractions.get(arithmetic) or _fraction(arithmetic)
                found[first + len(self.gpus) + index] = np.log(fraction)
        return found

    def kernel_seconds(self, parameters: Numbers) -> Numbers:
        """Of all launches of each kernel, (N,)."""
        found = self.unpack(parameters)
        fraction = np.append(found.arithmetic, 1.0)[self._arithmetic]
        computing = np.maximum(self._computing / fraction, self._least_computing)
        computing = computing * found.slowdowns[self._class]
        cached = np.minimum(found.cached * self._cache_seconds, self._moving)
        moving = self._moving - cached * (1 - 1 / L2_SPEEDUP)
        moving = moving * found.passes[self._class] / found.bandwidth[self._gpu]
        computing = np.maximum(computing, self._places * found.place_operations)
        return (np.maximum(computing, moving) + found.kernel_seconds) * self._count

    def predict(self, parameters: Numbers) -> Numbers:
        """Seconds of each step, (S,)."""
        return np.maximum(self.work(parameters), self._host)

    def work(self, parameters: Numbers) -> Numbers:
        """Seconds of each step's kernels, (S,)."""
        return np.bincount(self._row, self.kernel_seconds(parameters), minlength=len(self.steps))

    def offset(self, parameters: Numbers) -> Numbers:
        """The factor of what is not modelled in each step, (S,)."""
        return np.append(self.unpack(parameters).offsets, 1.0)[self._offset]

    def shares(self, parameters: Numbers) -> Numbers:
        """The part of each class in each step's predicted time, (S, C)."""
        found = np.zeros((len(self.steps), len(self.classes)))
        np.add.at(found, (self._row, self._class), self.kernel_seconds(parameters))
        return found / found.sum(1, keepdims=True)

    def fit(self, chosen: NDArray[np.bool_] | None = None, start: Numbers | None = None) -> Numbers:
        """The logarithms of the parameters that explain the chosen steps.

        Args:
            chosen: Steps that count, (S,); default: all.
            start: Parameters to begin with, (P,); default: what is known before.
        """
        rows = np.ones(len(self.steps), dtype=bool) if chosen is None else chosen

        def residuals(parameters: Numbers) -> Numbers:
            predicted = self.predict(parameters) * self.offset(parameters)
            errors = np.log(predicted / self.measured)[rows] / ERROR
            robust = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))
            return np.concatenate([robust, (parameters - self._prior) / self._width])

        least, most = self._bounds
        first = np.clip(self._prior if start is None else start, least + 1e-6, most - 1e-6)
        found: Numbers = least_squares(residuals, first, bounds=self._bounds, max_nfev=80).x
        return found


def _convolution(step: Step, kernel: AtPeak) -> float:
    """The rate of a convolution relative to products on the GPU, as a calibration found it; 1 for others."""
    if not kernel.name.startswith(CONVOLUTION):
        return 1.0
    dtype = "float16" if kernel.arithmetic == "half" else "float32"
    return reached_by(find_device(step.gpu)).convolution(dtype, is_tf32=kernel.arithmetic == "tf32")


def _least_computing_seconds(step: Step, kernel: AtPeak) -> float:
    """What a misaligned product takes to load its operands element by element."""
    if not kernel.loads_elements:
        return 0.0
    device = find_device(step.gpu)
    flops = kernel.computing_seconds * (device.flops_per_second("float16") or device.fp32_flops_per_second)
    return flops / ELEMENT_LOADING_FLOPS / integers_per_second(device)


def _arithmetic(step: Step, kernel: AtPeak) -> str:
    """What a kernel's rate is a fraction of: products of a type, or fused attention, whose kernels differ."""
    if kernel.name in FUSED_ATTENTION:
        return "old_attention" if step.source in OLD_ATTENTION else "attention"
    return kernel.arithmetic


def _fraction(arithmetic: str) -> float:
    """The fraction of a peak before the fit."""
    return {"attention": ATTENTION, "old_attention": ATTENTION / 2}.get(arithmetic, ARITHMETIC)


def _half(step: Step) -> str:
    """Precision of a step without how it was reached, which differs between GPUs."""
    return "half" if "16" in step.variant else "single"


def _slowdown(name: str) -> float:
    for beginning, slowdown in SLOWDOWNS.items():
        if name.startswith(beginning):
            return slowdown
    return UNALIGNED_SLOWDOWN if "unaligned" in name else OTHER_SLOWDOWN
