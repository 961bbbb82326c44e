"""Captures of offloaded units: what is on the device when, what is on the host, and the copies as ops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from msgspec import structs
from torch import Tensor, nn

from brimful.capture import capture_step
from brimful.devices import Device, find_device
from brimful.job import Job
from brimful.memory import TO_DEVICE, TO_HOST, live_profile, pinned_host_bytes, rounding_bytes_of
from brimful.settings import Action, Precision, Settings, UnitAction
from brimful.trace import Phase, Trace, find_units
from helpers.planned_jobs import JOBS, vector_job

A100 = find_device("A100 80GB SXM")
N, WIDTH = 64, 1024
SIZE = N * WIDTH * 4
"""Of one activation: 256 KiB."""


class Sigmoids(nn.Module):
    """Two sigmoids, of which each saves what it returns: one storage inside, one handed on."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(torch.sigmoid(x))


class First(nn.Module):
    """A weight of its own, so that there is a gradient; saves the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


JOB = Job(
    model=lambda: nn.Sequential(First(), Sigmoids(), Sigmoids(), Sigmoids(), Sigmoids()),
    loss=lambda model, batch: model(batch["x"]).sum(),
    batch=lambda n: {"x": torch.zeros(n, WIDTH)},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
)


def settings(*actions: Action, **others: int) -> Settings:
    units = tuple(UnitAction(fqn=str(i + 1), action=action) for i, action in enumerate(actions))
    return Settings(micro_batch_size=N, units=units, **others)


def capture(actions: str, device: Device = A100, **others: int) -> Trace:
    named = {"k": Action.KEEP, "o": Action.OFFLOAD, "r": Action.RECOMPUTE}
    return capture_step(JOB, settings(*(named[each] for each in actions), **others), device, steps=1)


def activations(trace: Trace, phase: Phase, micro_batch: int = 0) -> list[tuple[str, int]]:
    """Ops of a phase, and how many activations the device holds once they have run."""
    profile = live_profile(trace, rounding_bytes_of(trace.device_kind))
    after: dict[int, int] = {}
    for position, op in enumerate(profile.ops.tolist()):
        after[op] = int(profile.live_bytes[position]) // SIZE
    held, listed = 0, []
    for index, op in enumerate(trace.ops):
        held = after.get(index, held)
        if (op.phase, op.micro_batch) == (phase, micro_batch):
            listed.append((op.name.split(".")[1], held))
    return listed


def test_forward_holds_what_a_unit_saved_until_the_next_one_ends() -> None:
    """There are the batch, what a unit is given, and what its sigmoids return; the second is handed on.
    Offloaded, the first leaves when the next unit has ended."""
    assert activations(capture("oook"), Phase.FORWARD) == [
        *(("empty_like", 1), ("mul", 2)),
        *(("sigmoid", 3), ("sigmoid", 4), ("to_host", 3)),
        *(("sigmoid", 4), ("sigmoid", 5), ("to_host_done", 4), ("to_host", 4)),
        *(("sigmoid", 5), ("sigmoid", 6), ("to_host_done", 5), ("to_host", 5)),
        *(("sigmoid", 6), ("sigmoid", 7), ("to_host_done", 6)),
        ("sum", 6),
    ]


def test_backward_holds_what_a_unit_saved_from_the_beginning_of_the_next_ones_backward() -> None:
    """6 at the end of forward; a sigmoid's backward makes a gradient, and drops what it needed and, but for the
    first, another gradient."""
    listed = activations(capture("oook"), Phase.BACKWARD)
    assert listed[:9] == [
        ("ones_like", 6),
        *(("to_device", 7), ("sigmoid_backward", 7), ("sigmoid_backward", 6)),
        *(("to_device_done", 6), ("to_device", 7), ("sigmoid_backward", 6), ("sigmoid_backward", 5)),
        ("to_device_done", 5),
    ]


def test_the_peak_by_hand() -> None:
    """The first sigmoid's backward makes a gradient while the batch and 8 results of sigmoids are there. With
    three units offloaded, three of the results are not there, but one has come back by then."""
    peaks = {
        actions: live_profile(capture(actions), rounding_bytes_of("cuda")).peak_bytes // SIZE
        for actions in ("kkkk", "oook")
    }
    assert peaks == {"kkkk": 1 + 8 + 1, "oook": 1 + 8 - 3 + 1 + 1}


def test_copies_are_ops_with_their_bytes_and_in_the_order_of_the_schedule() -> None:
    trace = capture("okok")
    assert [(op.name, op.phase, op.written_bytes) for op in trace.ops if op.name.startswith("brimful")] == [
        (TO_HOST, Phase.FORWARD, SIZE),
        ("brimful.to_host_done.default", Phase.FORWARD, 0),
        (TO_HOST, Phase.FORWARD, SIZE),
        ("brimful.to_host_done.default", Phase.FORWARD, 0),
        (TO_DEVICE, Phase.BACKWARD, SIZE),
        ("brimful.to_device_done.default", Phase.BACKWARD, 0),
        (TO_DEVICE, Phase.BACKWARD, SIZE),
        ("brimful.to_device_done.default", Phase.BACKWARD, 0),
    ]


def test_a_copy_back_begins_before_it_is_waited_for_by_the_unit_that_needs_it() -> None:
    """3, kept, begins: 2 comes back; 2 begins: it is waited for, 1 comes back."""
    listed = [name for name, _held in activations(capture("ookk"), Phase.BACKWARD)]
    backward = [name for name in listed if name in ("sigmoid_backward", "to_device", "to_device_done")]
    assert backward == [
        *("sigmoid_backward", "sigmoid_backward"),  # of 4
        *("to_device", "sigmoid_backward", "sigmoid_backward"),  # 3
        *("to_device_done", "to_device", "sigmoid_backward", "sigmoid_backward"),  # 2
        *("to_device_done", "sigmoid_backward", "sigmoid_backward"),  # 1
    ]


def test_pinned_memory_of_the_host_is_that_of_one_micro_batch_in_powers_of_two() -> None:
    assert pinned_host_bytes(capture("kkkk")) == 0
    assert pinned_host_bytes(capture("oook")) == 3 * SIZE
    assert pinned_host_bytes(capture("oook", gradient_accumulation_steps=2)) == 3 * SIZE
    trace = capture("oook")
    larger = tuple(
        structs.replace(op, written_bytes=op.written_bytes + 1) if op.name == TO_HOST else op
        for op in trace.ops
    )
    assert pinned_host_bytes(replace(trace, ops=larger)) == 2 * 3 * SIZE


def test_on_a_cpu_the_host_is_the_device() -> None:
    """So offloading frees nothing there: copies take as much as what they are copies of."""

    def held(actions: str, device: Device) -> int:
        trace = capture(actions, device)
        last = max(i for i, op in enumerate(trace.ops) if op.phase is Phase.FORWARD)
        profile = live_profile(trace, 1)
        return int(profile.live_bytes[profile.ops <= last][-1]) // SIZE

    cpu = find_device("cpu")
    assert held("oook", cpu) >= held("kkkk", cpu) == held("kkkk", A100)
    assert held("oook", A100) == held("kkkk", A100) - 3


def test_the_next_micro_batch_finds_nothing_of_the_one_before() -> None:
    trace = capture("oook", gradient_accumulation_steps=2)
    first, second = (activations(trace, Phase.FORWARD, i) for i in (0, 1))
    assert [name for name, _ in first[1:-1]] == [name for name, _ in second[1:-1]]
    assert first[-2][1] - first[1][1] == second[-2][1] - second[1][1]


@pytest.mark.parametrize("name", ["gpt", "post-norm", "resnet", "unet", "vgg", "inception", "returning"])
@pytest.mark.filterwarnings("ignore:Warning only once for all operators:UserWarning")
def test_the_small_jobs_can_be_captured_with_units_offloaded(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As much comes back as was sent, and less is there when backward begins."""
    monkeypatch.setattr("brimful.memory.pinned_host.LEAST_OFFLOADED_BYTES", 512)
    plain = Settings(micro_batch_size=8, precision=Precision.BF16)
    kept = capture_step(JOBS[name], plain, A100, steps=1)
    units = [
        UnitAction(fqn=unit, action=Action.OFFLOAD if i % 3 < 2 else Action.RECOMPUTE)
        for i, unit in enumerate(find_units(kept))
    ]
    units[-1] = replace(units[-1], action=Action.KEEP)
    trace = capture_step(JOBS[name], replace(plain, units=tuple(units)), A100, steps=1)
    moved = {
        each: sum(op.written_bytes for op in trace.ops if op.name == each) for each in (TO_HOST, TO_DEVICE)
    }
    assert 0 < moved[TO_DEVICE] <= moved[TO_HOST]


def test_what_is_offloaded_scales_with_the_micro_batch() -> None:
    job = vector_job(
        lambda: nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Tanh()) for _ in range(2))
        ),
        WIDTH,
    )
    units = (UnitAction(fqn="0", action=Action.OFFLOAD), UnitAction(fqn="1", action=Action.KEEP))
    at = {n: capture_step(job, Settings(micro_batch_size=n, units=units), A100, steps=1) for n in (32, 48, 64)}
    assert pinned_host_bytes(at[64]) == SIZE
    scaled = at[32].at_micro_batch_size(at[48], 64)
    assert scaled.ops == at[64].ops
    assert scaled.storages == at[64].storages
