"""A step of `bf.apply` that raises, at whichever op, leaves everything as it was before the call."""

from __future__ import annotations

import gc
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import brimful as bf
from brimful.errors import PartialUpdateError
from brimful.execution.buffers import BufferSnapshot
from brimful.execution.planned_step import PlannedStep
from brimful.settings import Action, ChunkedLoss, Precision, Settings, UnitAction
from helpers.faults import OutOfMemoryAt, out_of_memory

# B batch, D width

WIDTH, CLASSES, BATCH, MICRO_BATCHES = 6, 4, 4, 2
PLAIN = Settings(micro_batch_size=BATCH // MICRO_BATCHES, gradient_accumulation_steps=MICRO_BATCHES)
RECOMPUTED = (
    UnitAction(fqn="blocks.0", action=Action.RECOMPUTE),
    UnitAction(fqn="head", action=Action.SAVE, saved=("addmm#0",)),
)
STEADY = 2
"""A step, from 0, in which parameters and state are not copied to the host any more."""


class Net(nn.Module):
    """Statistics, masks, and a parameter that few batches reach."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)), nn.Tanh()
        )
        self.head = nn.Linear(WIDTH, CLASSES)
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", None)

    def forward(self, x: Tensor) -> Tensor:
        self.calls = torch.ones(()) if self.calls is None else self.calls + 1  # another tensor each time
        return self.head(self.blocks(x))


def noisy_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    noise = random.random() + float(np.random.rand())
    return F.cross_entropy(model(batch["x"] + 0.01 * noise), batch["y"])


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": partial(torch.optim.Adam, lr=0.1, foreach=False),
    "adamw foreach": partial(torch.optim.AdamW, lr=0.1, foreach=True, amsgrad=True),
    "adamw fused": partial(torch.optim.AdamW, lr=0.1, fused=True),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False),
    "sgd without momentum": partial(torch.optim.SGD, lr=0.1, foreach=False),
    "muon": bf.optimizers.named_optimizer("muon", learning_rate=0.1),
}


@dataclass
class Run:
    """A model in a loop of one's own."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: PlannedStep
    batches: list[dict[str, Tensor]]

    def state(self) -> dict[str, Any]:
        """A copy of all that is to be as before."""
        scaler = self.step._executor.scaler
        found: dict[str, Any] = {
            "model": dict(self.model.state_dict()),
            "gradients": [parameter.grad for parameter in self.model.parameters()],
            "optimizer": self.optimizer.state_dict(),
            "attributes of the optimizer": sorted(vars(self.optimizer)),
            "scaler": None if scaler is None else scaler.state_dict(),
            "random": (torch.get_rng_state(), random.getstate(), torch.from_numpy(np.random.get_state()[1])),
        }
        return tree_map_only(Tensor, in_bytes, found)


def in_bytes(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.detach().numpy().tobytes()


def begun(
    how: Settings = PLAIN,
    optimizer: str = "adam",
    *,
    loss: Callable[..., Tensor] = noisy_loss,
    make_model: Callable[[], nn.Module] = Net,
    steps: int = 0,
    recover: bool = False,
) -> Run:
    """A run after some steps."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    model = make_model()
    made = OPTIMIZERS[optimizer](model.parameters())
    job = bf.Job(model=make_model, loss=loss, batch={})
    generator = torch.Generator().manual_seed(5)
    run = Run(
        model,
        made,
        bf.apply(
            how,
            job,
            model,
            made,
            max_gradient_norm=None if how.optimizer_in_backward else 0.1,
            verify=False,
            recover=recover,
        ),
        [
            {
                "x": torch.randn(BATCH, WIDTH, generator=generator),
                "y": torch.randint(CLASSES, (BATCH,), generator=generator),
            }
            for _ in range(STEADY + 2)
        ],
    )
    for batch in run.batches[:steps]:
        run.step(batch)
    return run


def ops_of(run: Run, number: int) -> list[str]:
    with OutOfMemoryAt() as counted:
        run.step(run.batches[number])
    return counted.ops


def first_of_update(ops: list[str]) -> int:
    """Where the optimizer's step begins, which the profiler is told of."""
    return ops.index("profiler._record_function_enter_new.default")


AFTER_UPDATE = 2
"""Ops after it: the profiler is told of `zero_grad`."""

ERRORS: tuple[Callable[[str], BaseException], ...] = (out_of_memory, RuntimeError, KeyboardInterrupt)


def assert_as_before(run: Run, number: int, op: int, error: Callable[[str], BaseException]) -> None:
    """A step that raises at an op changes nothing."""
    before = run.state()
    with pytest.raises(type(error(""))), OutOfMemoryAt(op, error=error) as fault:
        run.step(run.batches[number])
    assert fault.raised == 1
    assert run.state() == before


def undisturbed(begin: Callable[[], Run], number: int) -> tuple[list[str], dict[str, Any]]:
    """The ops of a step, and everything after it and the next; the run to disturb is begun afterwards."""
    return ops_of(begin(), number), after_two_steps(begin(), number)


def after_two_steps(run: Run, number: int) -> dict[str, Any]:
    for batch in run.batches[number : number + 2]:
        run.step(batch)
    return run.state()


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """One thread is enough for tiny ops; garbage is looked for after each fault, among new objects only."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(before)


HOW = {
    "plain": PLAIN,
    "one micro-batch": Settings(micro_batch_size=BATCH),
    "recomputed": replace(PLAIN, units=RECOMPUTED),
    "chunked loss": replace(PLAIN, chunked_loss=ChunkedLoss(layer="head", chunks=2)),
    "fp16": replace(PLAIN, precision=Precision.FP16),
    "bf16": replace(PLAIN, precision=Precision.BF16),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", HOW)
def test_an_error_at_any_op_before_the_update_leaves_everything_as_it_was(name: str) -> None:
    begin = partial(begun, HOW[name], steps=STEADY)
    ops, expected = undisturbed(begin, STEADY)
    run = begin()
    for op in range(first_of_update(ops)):
        assert_as_before(run, STEADY, op, ERRORS[op % len(ERRORS)])
    assert after_two_steps(run, STEADY) == expected


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "step"),
    [(name, step) for step in (0, 1) for name in OPTIMIZERS if (name, step) != ("sgd without momentum", 1)],
)
def test_an_error_at_any_op_of_the_first_updates_leaves_everything_as_it_was(name: str, step: int) -> None:
    begin = partial(begun, PLAIN, name, steps=step)
    ops, expected = undisturbed(begin, step)
    run = begin()
    for op in range(first_of_update(ops), len(ops) - AFTER_UPDATE):
        assert_as_before(run, step, op, ERRORS[1 + op % 2])
    assert after_two_steps(run, step) == expected


@pytest.mark.sweep
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_error_in_a_later_update_leaves_everything_as_it_was_or_says_that_it_cannot(name: str) -> None:
    begin = partial(begun, PLAIN, name, steps=STEADY)
    ops = ops_of(begin(), STEADY)
    raised: list[type[BaseException]] = []
    for op in range(first_of_update(ops), len(ops)):
        run = begin()
        before = run.state()
        with pytest.raises((ValueError, PartialUpdateError)) as error, OutOfMemoryAt(op, error=ValueError):
            run.step(run.batches[STEADY])
        raised.append(error.type)
        if error.type is ValueError:
            assert run.state() == before
        assert run.state()["gradients"] == before["gradients"]
    assert raised[0] is ValueError
    assert raised[-1] is PartialUpdateError


@pytest.mark.sweep
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_later_update_is_finished_where_memory_runs_out(name: str) -> None:
    begin = partial(begun, PLAIN, name, steps=STEADY)
    ops, expected = undisturbed(begin, STEADY)
    for op in range(first_of_update(ops), len(ops)):
        run = begin()
        with OutOfMemoryAt(op) as fault:
            run.step(run.batches[STEADY])
        assert fault.raised == 1
        run.step(run.batches[STEADY + 1])
        assert run.state() == expected


@pytest.mark.sweep
@pytest.mark.parametrize("name", HOW)
def test_a_step_is_taken_once_wherever_memory_runs_out(name: str) -> None:
    begin = partial(begun, HOW[name], steps=STEADY, recover=True)
    ops, expected = undisturbed(begin, STEADY)
    first = first_of_update(ops)
    for op in range(len(ops)):
        run = begin()
        with OutOfMemoryAt(op) as fault:
            outcome = run.step(run.batches[STEADY])
        assert fault.raised == 1
        assert len(outcome.recoveries) == (op < first)  # a later one is finished, not run again
        for recovery in outcome.recoveries:
            assert (recovery.step, recovery.during) == (STEADY + 1, "step")
            assert recovery.before == recovery.after
        run.step(run.batches[STEADY + 1])
        assert run.state() == expected


def short_of_memory(samples: int) -> Callable[..., Tensor]:
    """A loss for which memory runs out with more samples than so many; without gradients it takes less."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if len(batch["x"]) > samples and (torch.is_grad_enabled() or not samples):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return F.cross_entropy(model(batch["x"]), batch["y"])

    return loss


WHOLE = Settings(micro_batch_size=BATCH)


def test_micro_batches_become_smaller_where_memory_stays_short() -> None:
    def make_model() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))

    plain = begun(WHOLE, "sgd", loss=short_of_memory(BATCH), make_model=make_model, recover=True)
    short = begun(WHOLE, "sgd", loss=short_of_memory(1), make_model=make_model, recover=True)
    expected = plain.step(plain.batches[0])
    with pytest.warns(UserWarning, match="From now on batches are split into micro-batches of") as warned:
        outcome = short.step(short.batches[0])
    assert len(warned) == 1
    assert [each.after for each in outcome.recoveries] == [
        "fp32, micro-batch 4, everything kept",
        "fp32, micro-batch 2 × 2, everything kept",
        "fp32, micro-batch 1 × 4, everything kept",
    ]
    assert short.step.settings.micro_batch_size == 1
    assert float(outcome.loss) == pytest.approx(float(expected.loss), rel=1e-6)
    assert not short.step(short.batches[1]).recoveries
    plain.step(plain.batches[1])
    for own, other in zip(short.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(own, other)


def summed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return short_of_memory(2)(model, batch) * len(batch["x"])


@pytest.mark.parametrize(
    ("make_model", "loss", "reason"),
    [
        (Net, short_of_memory(2), "1 BatchNorm layer normalises over micro-batches of 2"),
        (lambda: nn.Linear(WIDTH, CLASSES), summed, "which is a sum"),
        (lambda: nn.Linear(WIDTH, CLASSES), short_of_memory(0), "could not be checked: memory ran out"),
    ],
)
def test_a_batch_that_may_not_be_split_ends_in_an_error_that_changes_nothing(
    make_model: Callable[[], nn.Module], loss: Callable[..., Tensor], reason: str
) -> None:
    run = begun(WHOLE, "sgd", loss=loss, make_model=make_model, recover=True)
    before = run.state()
    with pytest.raises(torch.OutOfMemoryError, match=reason) as error:
        run.step(run.batches[0])
    assert isinstance(error.value, bf.errors.OutOfMemoryError)
    assert run.state() == before


def test_updates_in_backward_cannot_run_with_less_and_the_error_says_what_ran_out() -> None:
    whole = replace(WHOLE, optimizer_in_backward=True)
    run = begun(
        whole, "sgd", loss=short_of_memory(0), make_model=lambda: nn.Linear(WIDTH, CLASSES), recover=True
    )
    before = run.state()
    with pytest.raises(
        torch.OutOfMemoryError, match=r"(?s)allocate 2 GiB.*cannot run with less.*optimizer_in_"
    ):
        run.step(run.batches[0])
    assert run.state() == before


def test_a_plan_that_permits_splitting_batch_norm_permits_it_after_an_out_of_memory_error_too() -> None:
    job = bf.Job(
        model=Net,
        loss=short_of_memory(2),
        batch=lambda n: {"x": torch.randn(n, WIDTH), "y": torch.zeros(n, dtype=torch.long)},
        optimizer="sgd",
    )
    asked = {
        "global_batch_size": BATCH,
        "micro_batch_size": BATCH,
        "recompute": "none",
        "split_batch_norm": True,
    }
    plan = bf.plan(replace(job, loss=short_of_memory(BATCH)), "cpu", **asked)  # type: ignore[arg-type]
    model = Net()
    step = bf.apply(plan, job, model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.warns(UserWarning, match="From now on"):
        assert len(step(job.batch(BATCH)).recoveries) == 2  # type: ignore[operator]


def test_a_recovery_says_how_much_time_was_lost() -> None:
    calls = []

    def slow(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        calls.append(None)
        if len(calls) == 1:
            time.sleep(0.2)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return noisy_loss(model, batch)

    run = begun(WHOLE, "sgd", loss=slow, recover=True)
    (recovery,) = run.step(run.batches[0]).recoveries
    assert recovery.seconds >= 0.2


def test_what_an_earlier_step_wrote_to_its_batch_does_not_keep_a_later_one_from_a_retry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        batch["x"].add_(1)
        return noisy_loss(model, batch)

    run = begun(WHOLE, "sgd", loss=loss, recover=True)
    run.step(run.batches[0])
    take, failures = BufferSnapshot.take, [torch.OutOfMemoryError("CUDA out of memory.")]

    def fails_once(self: BufferSnapshot, modules: Any = None) -> None:
        if failures:
            raise failures.pop()
        take(self, modules)

    monkeypatch.setattr(BufferSnapshot, "take", fails_once)
    assert len(run.step(run.batches[1]).recoveries) == 1


def test_nothing_is_tried_again_where_the_loss_has_changed_its_batch() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        batch["x"].mul_(2)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    run = begun(WHOLE, "sgd", loss=loss, recover=True)
    with pytest.raises(torch.OutOfMemoryError, match=r"changed its batch in place \(batch\[\"x\"\]\)"):
        run.step(run.batches[0])


def test_an_error_of_the_users_loss_in_the_second_micro_batch_leaves_everything_as_it_was() -> None:
    calls = []

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        calls.append(None)
        if len(calls) == 2:
            raise LookupError("the user's")
        return noisy_loss(model, batch)

    run = begun(Settings(micro_batch_size=2, gradient_accumulation_steps=3), loss=loss)
    batch = {"x": torch.randn(6, WIDTH), "y": torch.zeros(6, dtype=torch.long)}
    before = run.state()
    with pytest.raises(LookupError, match="the user's"):
        run.step(batch)
    assert len(calls) == 2
    assert run.state() == before


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16])
def test_gradients_that_were_there_before_a_step_that_raised_are_there_after_it(precision: Precision) -> None:
    how = replace(PLAIN, precision=precision)
    run = begun(how, steps=STEADY)
    run.model(run.batches[0]["x"]).square().mean().backward()
    run.model.unused.grad = torch.ones(2)
    gradients = [parameter.grad for parameter in run.model.parameters()]
    ops = ops_of(begun(how, steps=STEADY), STEADY)
    for op in range(0, first_of_update(ops), 5):
        assert_as_before(run, STEADY, op, RuntimeError)
    for parameter, gradient in zip(run.model.parameters(), gradients, strict=True):
        assert parameter.grad is gradient


def test_gradients_that_are_there_before_a_step_are_added_to_those_of_the_batch() -> None:
    def by_hand() -> Run:
        run = begun(Settings(micro_batch_size=BATCH), "sgd without momentum")
        run.model(run.batches[0]["x"]).square().mean().backward()
        return run

    run, expected = by_hand(), by_hand()
    torch.manual_seed(2)
    run.step(run.batches[0])
    torch.manual_seed(2)
    random.seed(1)
    np.random.seed(1)
    noisy_loss(expected.model, expected.batches[0]).backward()
    nn.utils.clip_grad_norm_(expected.model.parameters(), 0.1)
    expected.optimizer.step()
    expected.optimizer.zero_grad()
    assert run.state()["model"] == expected.state()["model"]


def test_gradients_that_are_there_before_a_step_count_as_much_under_a_loss_scale() -> None:
    def moved(precision: Precision) -> Tensor:
        torch.manual_seed(1)
        model = nn.Linear(WIDTH, CLASSES)
        job = bf.Job(
            model=model,
            loss=lambda model, batch: model(batch).square().mean(),
            batch=lambda n: torch.randn(n, WIDTH),
        )
        step = bf.apply(
            replace(PLAIN, precision=precision), job, model, torch.optim.SGD(model.parameters(), 0.1)
        )
        batch = torch.randn(BATCH, WIDTH)
        while True:
            before = model.weight.detach().clone()
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            if step(batch).updated:  # at first the scale is too large
                return before - model.weight.detach()

    torch.testing.assert_close(moved(Precision.FP16), moved(Precision.FP32), rtol=1e-3, atol=1e-4)


class Limited(nn.Module):
    """A table whose rows are scaled down in the forward pass to a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, CLASSES, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x.argmax(dim=1))


def test_a_parameter_that_the_forward_pass_writes_to_is_as_before_from_the_second_step_on() -> None:
    begin = partial(begun, PLAIN, "sgd", make_model=Limited)
    ops, expected = undisturbed(begin, 0)
    run = begin()
    with (
        pytest.raises(PartialUpdateError, match=r"wrote to a parameter of shape \(6, 4\)"),
        OutOfMemoryAt(first_of_update(ops) - 1),
    ):
        run.step(run.batches[0])
    run = begin()
    run.step(run.batches[0])
    for op in range(first_of_update(ops)):
        assert_as_before(run, 1, op, RuntimeError)
    run.step(run.batches[1])
    assert run.state() == expected


def assert_undone(make_model: Callable[[], nn.Module], number: int) -> None:
    """A step changes nothing where one of its ops before the update raises; each third op is tried."""
    begin = partial(begun, make_model=make_model, steps=number)
    ops, expected = undisturbed(begin, number)
    run = begin()
    for op in range(0, first_of_update(ops), 3):
        assert_as_before(run, number, op, RuntimeError)
    assert after_two_steps(run, number) == expected


class WritesThroughData(nn.Module):
    """Moves state through `.data`, which raises no version: a codebook, teachers that are equal at first."""

    def __init__(self, *, codes: bool, holds: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("codes", torch.ones(WIDTH))
        self.register_buffer("teacher", self.head.weight.detach().clone())
        self.held = holds(self.head.weight.detach().clone())
        self.writes_codes = codes

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(x * self.codes) + x @ (self.teacher + self.held).detach().clone().T
        if self.writes_codes:
            self.codes.data.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        self.teacher.data.lerp_(self.head.weight.data, 0.5)
        self.held.data.lerp_(self.head.weight.data, 0.5)
        return y

    def state_dict(self, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        return super().state_dict(**options) | {"held": self.held}


@pytest.mark.sweep
@pytest.mark.parametrize("codes", [True, False])
@pytest.mark.parametrize(
    "holds", [lambda weight: weight, partial(nn.Parameter, requires_grad=False)], ids=["attribute", "frozen"]
)
@pytest.mark.parametrize("number", [0, 1, STEADY])
def test_what_a_forward_writes_through_data_is_as_before(
    number: int, holds: Callable[[Tensor], Tensor], codes: bool
) -> None:
    assert_undone(partial(WritesThroughData, codes=codes, holds=holds), number)


class HasGenerators(nn.Module):
    """Draws from generators of its own, and keeps an array."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)
        self.of_torch = torch.Generator().manual_seed(1)
        self.of_python, self.of_numpy = random.Random(1), np.random.default_rng(1)
        self.codes = np.zeros(WIDTH, dtype=np.float32)

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.rand(WIDTH, generator=self.of_torch) + self.of_python.random() + self.of_numpy.random()
        x = x * drawn.float() + torch.from_numpy(self.codes.copy())
        self.codes += x.detach().mean(0).numpy()
        return self.head(x)


@pytest.mark.parametrize("number", [0, 1, STEADY])
def test_generators_and_arrays_of_a_model_are_as_before(number: int) -> None:
    assert_undone(HasGenerators, number)


class Caching(nn.Module):
    """Makes a buffer in its first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "shift"):
            self.register_buffer("shift", torch.ones(CLASSES))
        return self.head(x) + self.shift


def test_a_buffer_that_a_step_made_is_gone_where_it_raised() -> None:
    begin = partial(begun, make_model=Caching)
    ops, expected = undisturbed(begin, 0)
    run = begin()
    assert_as_before(run, 0, first_of_update(ops) - 1, RuntimeError)
    assert not hasattr(run.model, "shift")
    assert after_two_steps(run, 0) == expected


def test_an_error_of_a_hook_before_the_update_leaves_everything_as_it_was() -> None:
    run = begun(steps=STEADY)
    before = run.state()

    def refuse(*_: object) -> None:
        raise LookupError("a hook of mine")

    hook = run.optimizer.register_step_pre_hook(refuse)
    with pytest.raises(LookupError, match="a hook of mine"):
        run.step(run.batches[STEADY])
    hook.remove()
    assert run.state() == before
    assert after_two_steps(run, STEADY) == after_two_steps(begun(steps=STEADY), STEADY)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Python's own handler of Ctrl-C, which a process in the background does without."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def interrupted_at(op: int) -> OutOfMemoryAt:
    """Ctrl-C, as the kernel sends it, before an op."""

    def interrupt(_name: str, _args: object) -> bool:
        if len(mode.ops) - 1 == op:
            signal.raise_signal(signal.SIGINT)
        return False

    mode = OutOfMemoryAt(fails=interrupt)
    return mode


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_before_the_update_leaves_everything_as_it_was() -> None:
    run = begun(steps=STEADY)
    update = first_of_update(ops_of(begun(steps=STEADY), STEADY))
    run = begun(steps=STEADY)
    before = run.state()
    for op in range(0, update - 6, 7):
        with pytest.raises(KeyboardInterrupt), interrupted_at(op):
            run.step(run.batches[STEADY])
        assert run.state() == before


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_during_the_update_is_raised_once_the_step_is_complete() -> None:
    begin = partial(begun, steps=STEADY)
    ops, expected = undisturbed(begin, STEADY)
    for op in range(first_of_update(ops), len(ops), 9):
        run = begin()
        with pytest.raises(KeyboardInterrupt), interrupted_at(op):
            run.step(run.batches[STEADY])
        run.step(run.batches[STEADY + 1])
        assert run.state() == expected


def test_a_signal_whose_handler_takes_a_note_does_not_disturb_a_step() -> None:
    noted = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: noted.append(number))
    try:
        expected = after_two_steps(begun(steps=STEADY), STEADY)
        run = begun(steps=STEADY)
        ops = ops_of(begun(steps=STEADY), STEADY)
        run = begun(steps=STEADY)
        for op, batch in ((3, run.batches[STEADY]), (first_of_update(ops) + 3, run.batches[STEADY + 1])):
            with interrupted_at(op):
                run.step(batch)
        assert run.state() == expected
        assert noted == [signal.SIGINT] * 2
    finally:
        signal.signal(signal.SIGINT, before)


def test_with_updates_in_backward_all_is_as_before_until_the_first_of_them() -> None:
    how = Settings(micro_batch_size=BATCH, optimizer_in_backward=True)
    begin = partial(begun, how, "sgd", steps=STEADY)
    ops, expected = undisturbed(begin, STEADY)
    first = ops.index("aten.linalg_vector_norm.default")
    run = begin()
    for op in range(first + 1):
        assert_as_before(run, STEADY, op, ERRORS[op % 3])
    assert after_two_steps(run, STEADY) == expected
    for op in range(first_of_update(ops) + 2, len(ops) - 2, 5):
        run = begin()
        with pytest.raises(PartialUpdateError, match="last checkpoint"), OutOfMemoryAt(op):
            run.step(run.batches[STEADY])
        assert run.state()["gradients"] == [None] * 7


def test_with_the_optimizer_on_the_host_all_is_as_before_until_it_begins() -> None:
    how = replace(PLAIN, offload_optimizer=True)
    begin = partial(begun, how, "adam", steps=STEADY)
    ops, expected = undisturbed(begin, STEADY)
    first = first_of_update(ops)
    run = begin()
    for op in range(first):
        assert_as_before(run, STEADY, op, ERRORS[op % 3])
    assert after_two_steps(run, STEADY) == expected
    run = begin()
    with pytest.raises(PartialUpdateError, match="last checkpoint"), OutOfMemoryAt(first + 4):
        run.step(run.batches[STEADY])
