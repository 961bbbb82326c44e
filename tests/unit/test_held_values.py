"""What a model holds beside its parameters is found, and held again after it was replaced."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from brimful.capture import capture_step
from brimful.devices import find_device
from brimful.errors import PartialUpdateError
from brimful.execution.buffers import BufferSnapshot
from brimful.held_values import HeldSnapshot, HeldValues
from brimful.job import Job
from brimful.profiling.coupled_layers import restoring_state
from brimful.settings import Settings
from helpers.faults import OutOfMemoryAt, is_within


class Queue:
    def __init__(self) -> None:
        self.entries: deque[Tensor] = deque(maxlen=4)
        self.seen = 0


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.queue, self.history = Queue(), {"losses": [1.0]}
        counted = [0]

        def hook(*_: Any) -> None:
            counted[0] += 1

        self.register_forward_hook(hook)
        self.counted = lambda: counted[0]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        self.queue.seen += len(x)
        self.queue.entries.append(out)
        self.history["losses"].append(2.0)
        self.last = out
        return out


def test_what_a_forward_changes_is_held_again() -> None:
    model = Holder()
    held = HeldValues(model)
    assert {"queue.seen", "history.losses.0", "layer.weight"} <= held.values.keys()
    model(torch.zeros(3, 2))
    held.restore()
    assert (model.queue.seen, list(model.queue.entries), model.history) == (0, [], {"losses": [1.0]})
    assert model.counted() == 0
    assert not hasattr(model, "last")


def test_state_that_torch_keeps_in_objects_of_users_is_left_alone() -> None:
    """A mode notes in itself which modes it is entered in: with that lost, it could not be left."""

    class Counting(TorchDispatchMode):
        ops = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.ops += 1
            return func(*args, **(kwargs or {}))

    model, mode = Holder(), Counting()
    model.mode = mode
    held = HeldValues(model)
    with mode:
        model(torch.zeros(3, 2))
        held.restore()
    assert mode.ops


@pytest.mark.parametrize("failures", [1, 2])
def test_memory_may_run_out_once_while_a_model_is_restored_after_a_check(failures: int) -> None:
    model, left = nn.BatchNorm1d(2), iter(range(failures))
    job = Job(model=model, loss=lambda model, batch: model(batch).sum(), batch=torch.randn(4, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def fails(name: str, _args: Any) -> bool:
        return name == "aten.copy_.default" and is_within("restore") and next(left, None) is not None

    refused = pytest.raises(PartialUpdateError, match=r"twice in a row.*Build the model again")
    expected = refused if failures == 2 else nullcontext()
    with OutOfMemoryAt(fails=fails) as short, expected, restoring_state(job, model):
        model(torch.randn(4, 2))
    assert short.raised == failures
    assert failures == 2 or all(map(torch.equal, model.state_dict().values(), before.values()))


class Remembering(nn.Module):
    """Keeps the result of a forward, with its graph, and reads it in the next one."""

    def __init__(self, read: Callable[[Tensor], Any] | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.kept: dict[str, Tensor] = {}
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        if self.read is not None and self.kept:
            self.read(self.kept["last"])
        self.kept["last"] = self.last = self.layer(x)
        return self.last


READS = {
    "detach": lambda last: last.detach(),
    "data": lambda last: last.data,
    "clone": lambda last: last.clone(),
    "item": lambda last: last[0, 0].item(),
    "size": lambda last: last.shape,
    "stack": lambda last: torch.stack([last]),
    "by keyword": lambda last: torch.add(torch.zeros(2), other=last),
    "on the right": lambda last: 1 - last,
    "no gradients": torch.no_grad()(lambda last: last.mul(2)),
    "an op": lambda last: torch.ops.aten.neg(last),
    "linear": lambda last: nn.functional.linear(torch.zeros(1, 2), last.detach()),
    "in place": lambda last: torch.zeros(last.size()).copy_(last),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_a_result_that_the_next_step_reads_is_held_again(read: Callable[[Tensor], Any]) -> None:
    model = Remembering(read)
    steps = BufferSnapshot(model)
    for _ in range(4):
        last = model.kept.get("last")
        steps.take()
        with steps.watch():
            model(torch.randn(1, 2)).sum().backward()
        steps.restore()
        assert model.kept.get("last") is last  # the step is undone, and taken again
        steps.take()
        with steps.watch():
            model(torch.randn(1, 2)).sum().backward()
        steps.release()


@pytest.mark.parametrize("used_before", [False, True])
def test_a_result_that_no_step_reads_is_gone_when_the_next_makes_it_anew(used_before: bool) -> None:
    """Weights under weight normalisation are such results: held, they would take as much as the model."""
    model = Remembering()
    if used_before:
        model(torch.randn(1, 2))
    steps = BufferSnapshot(model)
    for _ in range(4):
        last = weakref.ref(model.last) if hasattr(model, "last") else None
        steps.take()
        with steps.watch():
            model(torch.randn(1, 2)).sum().backward()
        assert last is None or last() is None
        steps.release()


def test_results_in_a_list_stay_in_their_places() -> None:
    class Listing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.Linear(2, 2), deque[Tensor](maxlen=2)

        def forward(self, x: Tensor) -> Tensor:
            self.last.append(self.layer(x))
            return self.last[-1]

    model = Listing()
    for _ in range(2):
        model(torch.randn(1, 2))
    before = list(model.last)
    snapshot = HeldSnapshot(model)
    with snapshot.watch():
        model(torch.randn(1, 2))
    snapshot.restore()
    assert all(now is then for now, then in zip(model.last, before, strict=True))


def test_what_a_snapshot_asks_of_tensors_is_no_read() -> None:
    model = Remembering()
    model(torch.randn(1, 2))
    outer = HeldSnapshot(model)
    with outer.watch():
        HeldSnapshot(model).changed()
        outer.changed()
    assert not any(outer.results_read().values())


def test_a_capture_leaves_a_result_that_a_hook_keeps_for_the_user() -> None:
    kept: dict[str, Tensor] = {}
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(lambda _module, _inputs, output: kept.update(last=output))
    model(torch.randn(1, 2))
    last = kept["last"]
    job = Job(model=model, loss=lambda model, batch: model(batch).sum(), batch=torch.randn(4, 2))
    capture_step(job, Settings(micro_batch_size=4), find_device("cpu"))
    assert kept["last"] is last
