"""The bound of a captured step is at most the time of everything that brimful captures in the same memory."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from brimful import Job, Precision
from brimful.devices import find_device
from brimful.errors import InfeasibleError
from brimful.memory import live_profile, rounding_bytes_of
from brimful.settings import Action
from brimful.trace import Phase
from plan.bench import Bench, Outcome
from plan.dataflow import Dataflow, capture_dataflow, step_of
from plan.recompute_bound import Step, lower_bound

GPU = "RTX 3090"
CHOICES = 6
"""Random choices of actions, beside plans."""


class Skipping(nn.Module):
    """Convolutions with BatchNorm, an in-place ReLU and a skip from the first to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.block(4, 16)
        self.inner = nn.Sequential(*(self.block(16, 16) for _ in range(3)))
        self.last = self.block(32, 16)
        self.head = nn.Conv2d(16, 1, 1)

    @staticmethod
    def block(channels: int, out: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        return self.head(self.last(torch.cat([first, self.inner(first)], 1)))


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(5)))


def encoder() -> nn.Module:
    layers = (nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1 * (i > 0), batch_first=True) for i in range(3))
    return nn.Sequential(*layers)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layers": (layers, (256,)),
    "skipping": (Skipping, (4, 64, 64)),
    "encoder": (encoder, (128, 64)),
}
BATCH_SIZES = {"layers": 65536, "skipping": 64, "encoder": 128}
CASES = [
    (name, device, precision)
    for name in MODELS
    for device, precision in ((GPU, Precision.FP32), (GPU, Precision.BF16), ("cpu", Precision.FP32))
]


@cache
def bench_of(name: str, device: str, precision: Precision) -> Bench:
    model, shape = MODELS[name]
    job = Job(
        name=name,
        model=model,
        loss=lambda model, batch: model(batch).float().square().mean(),
        batch=lambda n: torch.randn(n, *shape),
        optimizer="adamw",
    )
    return Bench(job, find_device(device), BATCH_SIZES[name], precision, splits_batch=False)


@cache
def captured(name: str, device: str, precision: Precision) -> tuple[Dataflow, Step]:
    bench = bench_of(name, device, precision)
    dataflow = capture_dataflow(bench.job, bench.plain, bench.device)
    return dataflow, step_of(dataflow, bench.device)


def outcomes(bench: Bench) -> list[Outcome]:
    """Plans for some budgets, and random choices of what is recomputed."""
    plain, chosen = bench.plain_outcome(), random.Random(0)
    found = [plain]
    asked = replace(bench.request.asked, chunked_loss=False)
    for fraction in (0.55, 0.7, 0.85, 1.0):
        try:
            found.append(bench.searched(int(fraction * plain.peak_device_bytes), asked=asked))
        except InfeasibleError:
            continue
    for _ in range(CHOICES):
        actions = [
            replace(action, action=chosen.choice((Action.KEEP, Action.RECOMPUTE)))
            for action in bench.all_units(Action.KEEP)
        ]
        found.append(bench.outcome(replace(bench.plain, units=tuple(actions))))
    return found


@pytest.mark.parametrize(("name", "device", "precision"), CASES)
def test_no_captured_schedule_is_faster_than_the_bound_in_its_memory(
    name: str, device: str, precision: Precision
) -> None:
    bench, (_, step) = bench_of(name, device, precision), captured(name, device, precision)
    bounds = []
    for outcome in outcomes(bench):
        bound = lower_bound(step, outcome.peak_allocated_bytes, limit_seconds=20)
        assert not bound.is_impossible
        assert bound.seconds <= outcome.step_seconds * (1 + 1e-6), outcome.settings.describe()
        bounds.append(bound.seconds)
    assert max(bounds) > step.seconds, "no budget binds: the test says nothing"


@pytest.mark.parametrize(("name", "device", "precision"), CASES)
def test_without_a_limit_the_bound_is_the_time_of_the_baseline(
    name: str, device: str, precision: Precision
) -> None:
    bench, (_, step) = bench_of(name, device, precision), captured(name, device, precision)
    plain = bench.plain_outcome()
    for budget_bytes in (plain.peak_allocated_bytes, 1 << 40):
        assert lower_bound(step, budget_bytes).seconds == pytest.approx(plain.step_seconds, rel=1e-6)


@pytest.mark.parametrize(("name", "device", "precision"), CASES)
def test_no_op_of_the_problem_takes_more_than_the_trace_has_live_there(
    name: str, device: str, precision: Precision
) -> None:
    dataflow, step = captured(name, device, precision)
    trace = dataflow.trace
    profile = live_profile(trace, rounding_bytes_of(trace.device_kind))
    levels: dict[int, list[int]] = defaultdict(list)
    for op, live_bytes in zip(profile.ops.tolist(), profile.live_bytes.tolist(), strict=True):
        levels[op].append(live_bytes)
    first = next(index for index, op in enumerate(trace.ops) if op.phase is not Phase.SETUP)
    last_read = {value: index for index, op in enumerate(step.ops) for value in op.holds}
    before = max(level for op in range(-1, first) for level in levels[op][-1:])
    for index, (op, group) in enumerate(zip(step.ops, dataflow.groups, strict=True)):
        held = sum(
            value.size_bytes
            for number, value in enumerate(step.values)
            if value.op <= index <= last_read.get(number, -1) and number not in op.overwrites
        )
        there = [before, *(level for each in group for level in levels[each])]
        assert held + op.other_bytes <= max(there), trace.ops[group[0]].name
        before = there[-1]


def test_ops_of_the_problem_read_what_forward_made() -> None:
    """A matmul's backward reads its input; a product that nothing but the next op reads is not saved."""
    dataflow, step = captured("layers", GPU, Precision.FP32)
    forward = [op for op in step.ops if op.again_seconds is not None and op.makes]
    backward = [op for op in step.ops if op.again_seconds is None]
    assert [op.reads for op in forward[:3]] == [(), (0,), (1,)]
    read_again = {value for op in backward for value in op.reads}
    assert {0, 1, 2} <= read_again  # linear, gelu, linear: gelu's input and the next linear's
    nodes = [group for group in dataflow.groups if dataflow.trace.ops[group[0]].phase is Phase.BACKWARD]
    names = [[dataflow.trace.ops[op].name for op in group] for group in nodes]
    assert ["aten.mm.default", "aten.mm.default", "aten.sum.dim_IntList"] in names  # a linear layer's node
