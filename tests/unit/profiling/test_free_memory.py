"""On a GPU of this machine the default budget is what is free now, and who holds the rest is named."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import brimful as bf
from brimful.devices import find_device
from brimful.errors import InfeasibleError
from brimful.profiling import free_memory
from brimful.profiling.free_memory import device_memory
from brimful.profiling.nvml import has_own_process_numbers
from brimful.utils.quantities import GIB, MIB
from helpers.fake_gpu import FakeNvml, put_gpu

GPU = torch.device("cuda")
TOTAL = 24_123
OTHER = 99_999_999
"""The number of no process here."""


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture(autouse=True)
def host_where_properties_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.cuda.get_device_properties` initializes torch's CUDA, and creates no context."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(free_memory, "has_own_process_numbers", lambda: False)


@pytest.fixture
def notebook_kernel() -> Iterator[int]:
    """The number of a process that looks like the kernel of a notebook."""
    waiting = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()", "ipykernel_launcher"]
    with subprocess.Popen(waiting, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


def wide_job() -> bf.Job:
    """64 MiB of parameters, the same of gradients, and twice as much of AdamW's state."""
    return bf.Job(
        model=lambda: nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16))),
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda n: torch.randn(n, 1024),
    )


def test_a_notebook_kernel_that_holds_memory_is_named_with_user_and_bytes(
    monkeypatch: pytest.MonkeyPatch, notebook_kernel: int
) -> None:
    put_gpu(monkeypatch, FakeNvml(TOTAL, {notebook_kernel: 9_000}, {OTHER: 400}))
    memory = device_memory(GPU)
    assert memory.available_bytes == (TOTAL - 9_400) * MIB
    kernel, other = memory.holders
    assert (kernel.pid, kernel.held_bytes) == (notebook_kernel, 9_000 * MIB)
    assert kernel.user
    text = memory.describe()
    assert (
        f"8.79 GiB by {kernel.process}, a notebook kernel (pid {notebook_kernel}, user {kernel.user})" in text
    )
    assert "a notebook kernel" in text
    assert (other.pid, other.process) == (OTHER, None)
    assert f"400 MiB by a process that cannot be seen from here (pid {OTHER})" in text


def test_a_process_that_computes_and_draws_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    put_gpu(monkeypatch, FakeNvml(TOTAL, {OTHER: 1_000}, {OTHER: 1_000}))
    (holder,) = device_memory(GPU).holders
    assert holder.held_bytes == 1_000 * MIB


def test_what_the_driver_lists_for_no_process_is_said_too(monkeypatch: pytest.MonkeyPatch) -> None:
    put_gpu(monkeypatch, FakeNvml(TOTAL, {}, unlisted_mib=5_000))
    memory = device_memory(GPU)
    assert memory.available_bytes == (TOTAL - 5_000) * MIB
    assert memory.unlisted_bytes == 5_000 * MIB
    assert "4.88 GiB by what the driver does not list" in memory.describe()


def test_what_this_process_holds_is_available_but_for_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """3000 MiB of the process: the context, a cache that the allocator may use again, and 700 of tensors."""
    put_gpu(monkeypatch, FakeNvml(TOTAL, {os.getpid(): 3_000}))
    assert device_memory(GPU).available_bytes == TOTAL * MIB
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 700 * MIB)
    memory = device_memory(GPU)
    assert memory.available_bytes == (TOTAL - 700) * MIB
    assert f"700 MiB by tensors of this process (pid {os.getpid()})" in memory.describe()


def test_a_model_that_is_on_the_device_already_is_not_left_over() -> None:
    model = nn.Linear(256, 256, bias=False)
    job = replace(wide_job(), model=model)
    assert free_memory._model_bytes(job, torch.device("cpu")) == 256 * 256 * 4
    assert free_memory._model_bytes(job, GPU) == free_memory._model_bytes(wide_job(), GPU) == 0


def test_without_nvml_torch_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    put_gpu(monkeypatch, None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10_000 * MIB, TOTAL * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500 * MIB)
    memory = device_memory(GPU)
    assert memory.available_bytes == 10_500 * MIB + find_device("RTX 3090").context_bytes
    assert memory.holders == ()


def test_in_a_container_that_lists_no_process_the_own_context_and_cache_are_available(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A budget includes the context of the process that plans, which exists already in a notebook."""
    context_bytes = find_device("RTX 3090").context_bytes
    put_gpu(monkeypatch, FakeNvml(TOTAL, {}, unlisted_mib=5_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1_000 * MIB)
    assert device_memory(GPU).available_bytes == (TOTAL - 4_000) * MIB + context_bytes


def test_a_process_without_a_context_has_only_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    put_gpu(monkeypatch, FakeNvml(TOTAL, {}, unlisted_mib=5_000))
    assert device_memory(GPU).available_bytes == (TOTAL - 5_000) * MIB


def test_where_the_driver_lists_this_process_without_its_size_cache_and_context_are_available(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context_bytes = find_device("RTX 3090").context_bytes
    put_gpu(monkeypatch, FakeNvml(TOTAL, {os.getpid(): None}, unlisted_mib=5_000))
    assert device_memory(GPU).available_bytes == (TOTAL - 5_000) * MIB + context_bytes


@pytest.mark.parametrize("sign", ["another namespace", "memory of this process that is not listed"])
def test_in_a_container_a_number_of_the_host_is_not_taken_for_a_process_here(
    monkeypatch: pytest.MonkeyPatch, notebook_kernel: int, sign: str
) -> None:
    put_gpu(monkeypatch, FakeNvml(TOTAL, {notebook_kernel: 9_000}))
    if sign == "another namespace":
        monkeypatch.setattr(free_memory, "has_own_process_numbers", lambda: True)
    else:
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1 * MIB)
    assert "a process that cannot be seen from here" in device_memory(GPU).describe()


def test_a_container_has_a_namespace_of_process_numbers_that_is_not_the_hosts(tmp_path: Path) -> None:
    (tmp_path / "host").symlink_to("pid:[4026531836]")
    (tmp_path / "container").symlink_to("pid:[4026532769]")
    found = {name: has_own_process_numbers(tmp_path / name) for name in ("host", "container", "windows")}
    assert found == {"host": False, "container": True, "windows": False}


def test_the_default_budget_of_a_plan_is_what_is_free_and_its_note_names_the_holder(
    monkeypatch: pytest.MonkeyPatch, notebook_kernel: int
) -> None:
    put_gpu(monkeypatch, FakeNvml(TOTAL, {notebook_kernel: 20_000}))
    plan = bf.plan(wide_job(), "cuda", global_batch_size=8)
    assert plan.device == "RTX 3090"
    assert plan.budget_bytes == int((TOTAL - 20_000) * MIB / 1.05)
    assert any(f"pid {notebook_kernel}" in note and "19.5 GiB" in note for note in plan.notes)
    elsewhere = bf.plan(wide_job(), "RTX 3090", global_batch_size=8)
    assert elsewhere.budget_bytes > 20 * GIB
    assert not any("pid" in note for note in elsewhere.notes)


def test_a_budget_beyond_what_is_free_is_kept_and_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    put_gpu(monkeypatch, FakeNvml(TOTAL, {OTHER: 20_000}))
    plan = bf.plan(wide_job(), "cuda", global_batch_size=8, budget="10GiB")
    assert plan.budget_bytes == 10 * GIB
    assert any("10 GiB is more than can be used now" in note and str(OTHER) in note for note in plan.notes)


def test_an_idle_gpu_adds_no_note(monkeypatch: pytest.MonkeyPatch) -> None:
    put_gpu(monkeypatch, FakeNvml(TOTAL, {}))
    plan = bf.plan(wide_job(), "cuda", global_batch_size=8)
    assert plan.budget_bytes == int(TOTAL * MIB / 1.05)
    assert not any("used now" in note for note in plan.notes)


def test_where_nothing_fits_in_what_is_free_the_error_names_the_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    put_gpu(monkeypatch, FakeNvml(TOTAL, {OTHER: TOTAL - 400}))
    with pytest.raises(InfeasibleError) as caught:
        bf.plan(wide_job(), "cuda", global_batch_size=8, offload_activations=False)
    assert any(str(OTHER) in note for note in caught.value.__notes__)


def test_an_estimate_is_judged_against_what_is_free_and_warns_of_the_holder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_gpu(monkeypatch, FakeNvml(TOTAL, {OTHER: TOTAL - 400}))
    with pytest.warns(UserWarning, match=f"can be used now; held: .*pid {OTHER}"):
        estimate = bf.estimate(wide_job(), "cuda")
    assert estimate.capacity_bytes == 400 * MIB
    assert estimate.verdict.value == "does not fit"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert bf.estimate(wide_job(), "cuda", budget="10GiB").capacity_bytes == 10 * GIB


def test_ranks_are_planned_for_the_gpu_with_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = put_gpu(monkeypatch, FakeNvml(TOTAL, {OTHER: 5_000}))
    idle = type(reported)(**{**vars(reported), "uuid": "idle"})  # without NVML's handle
    by_index = {0: idle, 1: reported}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: by_index[torch.device(device).index or 0]
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (TOTAL * MIB, TOTAL * MIB))
    alone = bf.plan(wide_job(), "cuda:0", global_batch_size=8)
    both = bf.plan(wide_job(), "cuda:0", global_batch_size=8, world_size=2, parallelism="ddp")
    assert alone.budget_bytes == int(TOTAL * MIB / 1.05)
    assert both.budget_bytes == int((TOTAL - 5_000) * MIB / 1.05)
