"""The time of a step on a GPU, from hand-made events in the form of torch's profiler."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch._C._autograd import DeviceType
from torch.autograd import profiler_util

from brimful.cost.time_shares import ATTENTION, LOADING, MATMUL, OPTIMIZER, POINTWISE, TRANSFERS, time_shares
from brimful.doctor import Watch, watched_text
from brimful.doctor.gpu_times import GpuTimes, gpu_times, tears_down
from brimful.doctor.step_profile import StepProfile

profiled: Any = profiler_util


class Events:
    """Events of a step, in microseconds."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def host(self, name: str, begin: float, end: float, sequence_nr: int = -1) -> Any:
        return self._add(name, begin, end, DeviceType.CPU, thread=1, sequence_nr=sequence_nr)

    def kernel(self, name: str, begin: float, end: float, by: Any = None) -> None:
        self._add(name, begin, end, DeviceType.CUDA, thread=7)
        if by is not None:
            by.append_kernel(name, 0, end - begin)

    def _add(self, name: str, begin: float, end: float, device: DeviceType, **facts: int) -> Any:
        number = len(self.events)
        event = profiled.FunctionEvent(
            number, name, start_us=begin, end_us=end, use_device="cuda", device_type=device, **facts
        )
        self.events.append(event)
        return event

    def times(self) -> GpuTimes:
        found = profiled.EventList(self.events, use_device="cuda")
        found._build_tree()
        return gpu_times(found)


def microseconds(times: GpuTimes) -> dict[str, float]:
    return {kind: round(each * 1e6, 3) for kind, each in times.class_seconds.items()}


def test_kernels_count_by_the_op_that_launches_them_and_the_rest_is_idle() -> None:
    step = Events()
    linear = step.host("aten::linear", 0, 12)
    product = step.host("aten::addmm", 2, 10, sequence_nr=0)
    assert product is not linear
    step.kernel("ampere_sgemm_128x64_tn", 10, 60, product)
    step.kernel("void gelu_kernel", 60, 70, step.host("aten::gelu", 12, 20, sequence_nr=1))
    step.kernel("flash_fwd_kernel", 70, 90, step.host("flash_attn::_flash_attn_forward", 20, 30))
    step.host("cudaStreamSynchronize", 30, 90)
    step.host("Optimizer.step#AdamW.step", 100, 130)
    step.kernel("multi_tensor_apply_kernel", 110, 125, step.host("aten::_foreach_add_", 102, 112))
    step.host("cudaDeviceSynchronize", 140, 200)  # the profile's own, which is no part of the step
    times = step.times()
    assert microseconds(times) == {"matmul": 50, "activation": 10, ATTENTION: 20, OPTIMIZER: 15}
    assert times.idle_seconds * 1e6 == pytest.approx(10 + 20 + 5)  # to 10, from 90 to 110, and from 125 to 130
    assert times.waiting_seconds * 1e6 == pytest.approx(60)
    assert (times.launches, times.loading_seconds) == (4, 0)
    shares = dict(time_shares(times.class_seconds.items()))
    assert max(shares, key=lambda kind: shares[kind]) == MATMUL
    assert shares[POINTWISE] == pytest.approx(10 / 95)


def test_a_forward_that_an_optimizer_calls_is_no_update() -> None:
    step = Events()
    step.host("Optimizer.step#LBFGS.step", 0, 100)
    step.kernel("sgemm", 10, 40, step.host("aten::mm", 5, 9, sequence_nr=3))
    step.kernel("dot", 50, 60, step.host("aten::dot", 45, 49))
    assert microseconds(step.times()) == {"matmul": 30, OPTIMIZER: 10}


def test_idle_time_while_a_loader_is_read_is_of_the_data() -> None:
    step = Events()
    step.host("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 40)
    step.kernel("Memcpy HtoD (Pageable -> Device)", 50, 60, step.host("aten::copy_", 45, 70))
    step.kernel("sgemm", 70, 100, step.host("aten::mm", 65, 69, sequence_nr=1))
    times = step.times()
    assert microseconds(times) == {"input_copy": 10, "matmul": 30}
    assert times.loading_seconds * 1e6 == pytest.approx(40)
    assert times.idle_seconds * 1e6 == pytest.approx(20)
    assert times.launches == 1


def test_communication_counts_as_far_as_nothing_else_runs() -> None:
    step = Events()
    step.kernel("sgemm", 0, 100, step.host("aten::mm", 0, 5, sequence_nr=1))
    step.kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 60, 130, step.host("c10d::allreduce_", 50, 55))
    assert microseconds(step.times()) == {"matmul": 100, "communication": 30}


def test_kernels_of_compiled_code_and_of_no_op_have_their_kind_by_name() -> None:
    step = Events()
    step.kernel("triton_poi_fused_add_relu_0", 0, 10)
    step.kernel("triton_red_fused_native_layer_norm_1", 10, 20)
    step.kernel("my_kernel", 20, 30)
    step.kernel("Memset (Device)", 30, 31)
    assert microseconds(step.times()) == {"elementwise": 10, "reduction": 10, "unknown": 10, "copy": 1}


def test_a_step_without_kernels_is_idle() -> None:
    step = Events()
    step.host("aten::mm", 0, 10)
    times = step.times()
    assert (times.class_seconds, times.launches) == ({}, 0)
    assert times.idle_seconds * 1e6 == pytest.approx(10)


def test_the_host_has_what_kernels_omit_of_a_step_that_is_not_profiled() -> None:
    profile = StepProfile("cuda")
    profile.gpu = GpuTimes(
        class_seconds={"matmul": 0.06, "input_copy": 0.01},
        loading_seconds=0.01,
        idle_seconds=0.12,
        launches=1834,
        waiting_seconds=0.02,
    )
    assert profile.seconds_by_class(None)["host"] == pytest.approx(0.12)
    seconds = profile.seconds_by_class(0.1)  # launches are shorter without a profiler
    assert seconds["host"] == pytest.approx(0.02)
    shares = dict(time_shares(seconds.items()))
    assert shares[MATMUL] == pytest.approx(0.6)
    assert (shares[LOADING], shares[TRANSFERS]) == pytest.approx((0.1, 0.1))


def test_the_report_has_launches_and_waiting() -> None:
    with Watch() as watch:
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight])
        for _ in range(8):
            torch.autograd.backward(weight.sum())
            optimizer.step()
            optimizer.zero_grad()
    watch._profile.gpu = GpuTimes({"matmul": 0.06}, 0.0, 0.01, 1834, 0.0032)
    assert "launches        1,834 kernels a step; the host waits 3.2 ms for the GPU" in watched_text(
        watch.evidence()
    )


@pytest.mark.parametrize("version", ["11.8", "12.4", None])
def test_cupti_stays_where_unloading_it_is_unsafe(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    with tears_down():
        assert "TEARDOWN_CUPTI" not in os.environ


def test_cupti_is_unloaded_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with tears_down():
        assert os.environ["TEARDOWN_CUPTI"] == "1"
    assert "TEARDOWN_CUPTI" not in os.environ
    monkeypatch.setenv("TEARDOWN_CUPTI", "0")
    with tears_down():
        assert os.environ["TEARDOWN_CUPTI"] == "0"
