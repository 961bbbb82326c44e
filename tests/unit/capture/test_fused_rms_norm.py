"""RMS norm on CUDA: one kernel in each direction."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brimful.memory import predict_memory
from brimful.settings import Precision
from brimful.trace import Category, Kernel, Trace
from brimful.trace.extents import Rows, extents_of
from brimful.utils.quantities import MIB
from helpers.captured_jobs import A100, CPU, H100, HIDDEN, INPUTS, SAMPLES, capture, job, made_by, ops

FORWARD, BACKWARD = "aten._fused_rms_norm.default", "aten._fused_rms_norm_backward.default"


def normed(*, weight: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.RMSNorm(HIDDEN, elementwise_affine=weight))


def captured(model: Any = normed, device: Any = A100, **settings: Any) -> Trace:
    return capture(job(model, loss=lambda m, b: m(b["x"]).square().mean()), device, **settings)


@pytest.mark.parametrize("weight", [True, False])
def test_it_runs_as_one_op_forward_and_one_backward_on_cuda_alone(weight: bool) -> None:
    cuda = captured(lambda: normed(weight=weight))
    (forward,), (backward,) = ops(cuda, FORWARD), ops(cuda, BACKWARD)
    assert forward.module == backward.module == "1"
    assert extents_of(forward.extents) == extents_of(backward.extents) == Rows(SAMPLES, HIDDEN, 1)
    assert [op.name for op in ops(cuda, "") if op.module == "1"] == [FORWARD, BACKWARD]
    assert not ops(captured(device=CPU), FORWARD)


def test_it_saves_one_float32_of_each_row_beside_its_input() -> None:
    made = made_by(captured(precision=Precision.BF16), FORWARD)
    assert [s.size_bytes for s in made] == [SAMPLES * HIDDEN * 4, SAMPLES * 4]  # autocast runs it in float32
    assert made[1].category is Category.SAVED_TENSORS


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_it_falls_back_to_single_ops_where_input_and_weight_differ_in_type() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inputs = nn.Linear(INPUTS, HIDDEN, dtype=torch.bfloat16)
            self.weight = nn.Parameter(torch.ones(HIDDEN))

        def forward(self, x: Tensor) -> Tensor:
            return F.rms_norm(self.inputs(x.bfloat16()), (HIDDEN,), self.weight)

    trace = captured(Mixed)
    assert not ops(trace, FORWARD)
    assert ops(trace, "aten.rsqrt")


def test_a_gradient_that_is_expanded_is_copied_and_the_peak_is_the_measured_one() -> None:
    """40.0225 MiB on an H100: input, output, the output's copied gradient, the input's new and earlier one.

    Each is of 8 MiB. Measured: linkedin/Liger-Kernel, benchmark/data/all_benchmark_data.csv, megatron_rms_norm
    of torch, H = 1024.
    """

    def loop(placeholder: nn.Module, batches: Iterable[Any]) -> None:
        norm = nn.RMSNorm(1024, dtype=torch.bfloat16)
        x = torch.randn(4096, 1, 1024, dtype=torch.bfloat16, requires_grad=True)
        steps_nothing = torch.optim.SGD(placeholder.parameters())
        for _batch in batches:
            y = norm(x)  # held during backward, as the measured script does
            y.sum().backward()
            steps_nothing.step()

    trace = capture(job(lambda: nn.Linear(1, 1), lambda _m, b: b, lambda n: torch.zeros(n, 1), loop=loop), H100)
    (copy,) = {s.size_bytes for s in trace.storages if s.label == f"copy inside {BACKWARD}"}
    assert copy == 8 * MIB
    others = 2 * 512  # the placeholder's parameters
    assert predict_memory(trace).steady_peak_allocated_bytes - others == round(40.0224609375 * MIB)


def test_the_gradient_of_a_weight_is_added_up_in_parts_where_many_rows_are_narrow() -> None:
    trace = captured(samples=70_000)
    inside = {s.size_bytes for s in trace.storages if s.label == f"inside {BACKWARD}"}
    numbers = (108, 2048, 70_000, HIDDEN, 4)
    kernels = ("layer norm backward", "layer norm backward sums")
    assert inside == {Kernel(name=kernel, numbers=numbers).size_bytes() for kernel in kernels}
    assert Kernel(name=kernels[0], numbers=numbers).size_bytes() > 0


def test_torch_is_left_as_it_was() -> None:
    captured()
    x = torch.ones(2, 3, requires_grad=True)
    assert "RmsNorm" not in str(torch.rms_norm(x, (3,)).grad_fn)
