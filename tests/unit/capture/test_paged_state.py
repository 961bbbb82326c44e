"""State in CUDA's managed memory: which tensors it is, in brimful's step and in a loop of the user's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import brimful as bf
from brimful.capture import capture_step
from brimful.devices import find_device
from brimful.prediction import estimate_trace
from brimful.settings import Settings
from brimful.utils.quantities import format_seconds

optim = pytest.importorskip("bitsandbytes.optim")

WIDTH = 512
STATE_BYTES = 8 * WIDTH * WIDTH


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))


def own_loop(model: nn.Module, batches: Iterator[Tensor]) -> None:
    optimizer = optim.PagedAdamW(model.parameters())
    for batch in batches:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def batch(samples: int) -> Tensor:
    return torch.zeros(samples, WIDTH)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return torch.as_tensor(model(batch).square().mean())


@pytest.mark.parametrize(
    "job",
    [
        bf.Job(model=model, loss=loss, batch=batch, optimizer=lambda params: optim.PagedAdamW(params)),
        bf.Job(model=model, loss=loss, batch=batch, loop=own_loop),
    ],
    ids=["optimizer", "loop"],
)
def test_large_states_are_in_managed_memory_from_the_first_step_on(job: bf.Job) -> None:
    found = bf.estimate(job, "T4", micro_batch_size=8)
    parameter_bytes = 4 * (WIDTH + 8) * WIDTH
    assert found.predicted_paged_state_bytes == STATE_BYTES
    for phase in found.phases[:2]:
        assert phase.predicted_peak_allocated_bytes < 2 * parameter_bytes + 17 * 2**20  # cuBLAS's workspaces


def test_the_state_of_a_parameter_that_no_loss_reaches_is_never_made() -> None:
    unused = bf.Job(
        model=lambda: nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]),
        loss=lambda model, batch: loss(model[0], batch),
        batch=batch,
        optimizer=lambda params: optim.PagedAdamW(params),
    )
    assert bf.estimate(unused, "T4", micro_batch_size=8).predicted_paged_state_bytes == STATE_BYTES


def test_a_state_for_which_the_device_has_no_room_moves_and_its_time_is_named() -> None:
    job = bf.Job(model=model, batch=batch, loss=loss, optimizer=lambda params: optim.PagedAdamW(params))
    device = find_device("T4")
    trace = capture_step(job, Settings(micro_batch_size=8), device)
    taken_bytes = estimate_trace(trace, device).predicted_peak_device_bytes
    (note,) = estimate_trace(trace, replace(device, capacity_bytes=taken_bytes + 2**20)).uncertain
    link = device.host_link_bytes_per_second
    assert link is not None
    assert "leaves only 1 MiB of the device free" in note
    assert note.endswith(f"{format_seconds(2 * STATE_BYTES / link)} if all of it moves")


def test_a_cpu_has_no_managed_memory() -> None:
    job = bf.Job(model=model, batch=batch, loss=loss, optimizer=lambda params: optim.PagedAdamW(params))
    with pytest.warns(UserWarning, match="not supported on CPU"):
        assert bf.estimate(job, "cpu", micro_batch_size=8).predicted_paged_state_bytes == 0
