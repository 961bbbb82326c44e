"""`bf.prepare` in loops of other frameworks and of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import brimful as bf
from brimful.errors import PartialUpdateError, UsageError
from brimful.execution import in_force
from brimful.execution.in_force import Prepared
from brimful.settings import Action, Precision, Settings, UnitAction
from helpers.faults import OutOfMemoryAt
from helpers.torchrun import result_of_two_ranks

SAMPLES, MICRO = 16, 4


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)), nn.Linear(32, 5))


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(SAMPLES, 32), torch.randint(0, 5, (SAMPLES,))) for _ in range(3)]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def settings(**changes: Any) -> Settings:
    units = tuple(UnitAction(fqn=str(place), action=Action.RECOMPUTE) for place in range(4))
    options = {"gradient_accumulation_steps": SAMPLES // MICRO, "units": units, **changes}
    return Settings(micro_batch_size=MICRO, **options)


def trained_plainly() -> dict[str, Tensor]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x, y in batches():
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def assert_alike(found: dict[str, Tensor]) -> None:
    for name, value in trained_plainly().items():
        assert torch.allclose(value, found[name], atol=1e-5), name


def test_a_loop_of_one_s_own() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepared = bf.prepare(settings(optimizer_implementation="fused"), model, optimizer)
    assert isinstance(prepared, Prepared)
    assert optimizer.param_groups[0]["fused"]
    for x, y in batches():
        for part_x, part_y in zip(x.split(MICRO), y.split(MICRO), strict=True):
            (loss_of(model, part_x, part_y) * len(part_x) / len(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    prepared.remove()
    assert not optimizer.param_groups[0]["fused"]
    assert not any("forward" in vars(module) for module in model.modules())
    assert_alike(model.state_dict())


def test_an_accelerate_loop() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=SAMPLES // MICRO)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parts = [part for x, y in batches() for part in zip(x.split(MICRO), y.split(MICRO), strict=True)]
    model, optimizer = accelerator.prepare(model, optimizer)
    prepared = bf.prepare(settings(optimizer_implementation="fused"), model, optimizer)
    assert optimizer.param_groups[0]["fused"]
    for x, y in parts:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, x, y))
            optimizer.step()
            optimizer.zero_grad()
    prepared.remove()
    assert_alike(accelerator.unwrap_model(model).state_dict())


def test_a_loop_of_fabric() -> None:
    fabric_of = pytest.importorskip("lightning.fabric")
    fabric = fabric_of.Fabric(accelerator="cpu", devices=1)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    own = model
    model, optimizer = fabric.setup(model, optimizer)
    prepared = bf.prepare(settings(optimizer_implementation="fused"), own, optimizer)
    assert optimizer.optimizer.param_groups[0]["fused"]
    for x, y in batches():
        for part_x, part_y in zip(x.split(MICRO), y.split(MICRO), strict=True):
            fabric.backward(loss_of(model, part_x, part_y) * len(part_x) / len(x))
        optimizer.step()
        optimizer.zero_grad()
    prepared.remove()
    assert_alike(own.state_dict())


@pytest.mark.parametrize("what", ["offload_optimizer", "prefetch_inputs"])
def test_what_only_the_step_carries_out_is_refused(what: str) -> None:
    with pytest.raises(UsageError, match=f"{what} is carried out by the step of `bf.apply`"):
        bf.prepare(settings(**{what: True}), net())


def test_a_loop_is_estimated_with_its_plan_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """It recomputes, and the allocator of this process stays as it is."""
    configured: list[Settings] = []
    monkeypatch.setattr(in_force, "set_up_allocator", lambda settings, _device: configured.append(settings))

    def loop(units: tuple[UnitAction, ...]) -> Callable[[nn.Module, Iterable[tuple[Tensor, Tensor]]], None]:
        def train(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
            optimizer = torch.optim.SGD(model.parameters())
            bf.prepare(settings(units=units), model, optimizer)
            for batch in batches:
                loss_of(model, *batch).backward()
                optimizer.step()
                optimizer.zero_grad()

        return train

    batch = (torch.randn(4096, 32), torch.randint(0, 5, (4096,)))
    peaks = [
        bf.estimate(
            bf.Job(model=noisy, loss=loss_of, batch=batch, loop=loop(units)), "cpu", micro_batch_size=4096
        ).predicted_peak_allocated_bytes
        for units in (settings().units, ())
    ]
    assert peaks[0] < 0.9 * peaks[1]
    assert not configured
    bf.prepare(settings(), net())
    assert configured


def noisy() -> nn.Module:
    """With dropout, and a buffer that each forward writes."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.2)) for _ in range(4))
    return nn.Sequential(*blocks, nn.Linear(32, 5))


def trained_with_retries(fault: OutOfMemoryAt, *, at: int = 2) -> tuple[dict[str, Tensor], Prepared]:
    """Train three steps; the fault is in force from the first micro-batch of one to the end of its update."""
    model = noisy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prepared = bf.prepare(settings(), model, optimizer)

    def forward_backward(part: tuple[Tensor, Tensor]) -> None:
        (loss_of(model, *part) / (SAMPLES // MICRO)).backward()

    for number, (x, y) in enumerate(batches()):
        parts = list(zip(x.split(MICRO), y.split(MICRO), strict=True))
        if number == at:
            fault.__enter__()
        for part in parts:
            prepared.retry(forward_backward, part)
        prepared.retry(lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        if number == at:
            fault.__exit__(None, None, None)
        optimizer.zero_grad()
    prepared.remove()
    assert "step" not in vars(optimizer)
    return model.state_dict(), prepared


@pytest.mark.parametrize("at", [0, 2])
def test_memory_may_run_out_at_any_point_of_a_step_that_is_retried(at: int) -> None:
    counting = OutOfMemoryAt()
    expected, _ = trained_with_retries(counting, at=at)
    assert len(counting.ops) > 200
    for number in range(0, len(counting.ops), len(counting.ops) // 50):
        if counting.ops[number].startswith("profiler."):
            continue
        fault = OutOfMemoryAt(number)
        found, prepared = trained_with_retries(fault, at=at)
        assert fault.raised == 1
        assert all(torch.equal(found[name], value) for name, value in expected.items()), counting.ops[number]
        assert len(prepared.recoveries) <= 1  # an update is completed, not taken again


class Loop:
    """A model, its optimizer and a plan in force."""

    def __init__(self, **changes: Any) -> None:
        self.model = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.prepared = bf.prepare(settings(**changes), self.model, self.optimizer)
        self.x, self.y = batches()[0]
        self.calls = 0

    def failing(self, times: int) -> Callable[[], None]:
        """Forward and backward in which memory runs out some times, at the end."""

        def forward_backward() -> None:
            loss_of(self.model, self.x, self.y).backward()
            self.calls += 1
            if self.calls <= times:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        return forward_backward

    def gradients(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self.model.parameters()]


def test_a_step_in_which_memory_runs_out_twice_is_undone() -> None:
    loop = Loop()
    with pytest.raises(torch.OutOfMemoryError, match="Model and optimizer are as before the step"):
        loop.prepared.retry(loop.failing(2))
    assert loop.gradients() == [None] * 10
    loop.prepared.retry(loop.failing(0))
    assert None not in loop.gradients()


def test_an_action_that_stepped_the_optimizer_is_not_run_again() -> None:
    loop = Loop()

    def trains() -> None:
        loop.failing(0)()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(PartialUpdateError, match=r"optimizer\.step\(\) outside"):
        loop.prepared.retry(trains)
    assert loop.calls == 1


def test_earlier_gradients_are_not_lost() -> None:
    loop = Loop()
    loss_of(loop.model, loop.x, loop.y).backward()
    before = [grad.clone() for grad in loop.gradients() if grad is not None]

    def fails() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError, match="gradients before its first action"):
        loop.prepared.retry(fails)
    assert all(torch.equal(a, b) for a, b in zip(before, loop.gradients(), strict=True) if b is not None)


def test_an_action_that_reads_the_loop_s_variable_is_not_run_again_on_another_batch() -> None:
    loop = Loop()
    first, second, *_ = loop.x.split(MICRO)
    part = first

    def forward_backward() -> None:
        loop.model(part).sum().backward()

    loop.prepared.retry(forward_backward)
    part = second
    with pytest.raises(UsageError, match="Pass the micro-batch as an argument"):
        loop.prepared.retry(loop.failing(1))
    assert loop.gradients() == [None] * 10


@pytest.mark.parametrize("clears", ["optimizer", "model"])
def test_a_step_that_the_loop_skipped_is_not_run_again(clears: str) -> None:
    loop = Loop()
    loop.prepared.retry(loop.failing(0))
    (loop.model if clears == "model" else loop.optimizer).zero_grad()
    loop.calls = 0
    loop.prepared.retry(loop.failing(1))
    assert loop.calls == 2


def test_an_optimizer_that_calls_its_closure_several_times_is_not_retried() -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    prepared = bf.prepare(settings(), model, optimizer)
    x, y = batches()[0]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        return loss

    prepared.retry(closure)  # from its first call on, steps are watched
    optimizer.step(lambda: prepared.retry(closure))
    assert prepared.recoveries == ()

    def fails() -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError, match=r"memory\.$"):
        optimizer.step(lambda: prepared.retry(fails))


def trained_scaled(fault: OutOfMemoryAt, kind: str) -> tuple[dict[str, Tensor], float, Prepared]:
    """As `trained_with_retries`, in fp16: the loop unscales and clips, or the scaler alone unscales.

    "outside" unscales outside `retry` what is clipped inside.
    """
    model = noisy()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=kind == "fused")
    own, scaler = optimizer, torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    if kind == "accelerate":
        accelerate = pytest.importorskip("accelerate")
        accelerate.Accelerator(cpu=True)
        optimizer = accelerate.optimizer.AcceleratedOptimizer(optimizer, scaler=scaler)
    prepared = bf.prepare(
        settings(precision=Precision.FP16, units=()),
        model,
        optimizer,
        scaler=None if kind == "accelerate" else scaler,
    )

    def forward_backward(part: tuple[Tensor, Tensor]) -> None:
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(model, *part)
        scaler.scale(loss / (SAMPLES // MICRO)).backward()

    def clip() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    def unscale_and_clip() -> None:
        scaler.unscale_(own)
        clip()

    for number, (x, y) in enumerate(batches()):
        parts = list(zip(x.split(MICRO), y.split(MICRO), strict=True))
        if number == 2:
            fault.__enter__()
        for part in parts:
            prepared.retry(forward_backward, part)
        if kind == "clipped":
            prepared.retry(unscale_and_clip)
        if kind == "outside":
            scaler.unscale_(own)
            prepared.retry(clip)
        if kind == "accelerate":
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        if number == 2:
            fault.__exit__(None, None, None)
        optimizer.zero_grad()
    prepared.remove()
    assert not {"unscale_", "step", "update"} & set(vars(scaler))
    return model.state_dict(), scaler.get_scale(), prepared


@pytest.mark.parametrize("kind", ["clipped", "outside", "plain", "fused", "accelerate"])
def test_memory_may_run_out_in_a_step_of_fp16(kind: str) -> None:
    """At ops spread over the step, and at each near those of the scaler."""
    counting = OutOfMemoryAt()
    expected, scale, _ = trained_scaled(counting, kind)
    assert scale == 2.0**9  # it grew, so the scaler was in force
    ops = counting.ops
    of_scaler = [place for place, name in enumerate(ops) if name.startswith("aten._amp")]
    assert len(of_scaler) == 2
    near = {place + shift for place in of_scaler for shift in range(-3, 4)}
    for number in sorted(near | set(range(0, len(ops), len(ops) // 8))):
        if number >= len(ops) or ops[number].startswith("profiler."):
            continue
        fault = OutOfMemoryAt(number)
        found, its_scale, prepared = trained_scaled(fault, kind)
        assert fault.raised == 1
        assert its_scale == scale
        assert all(torch.equal(found[name], value) for name, value in expected.items()), ops[number]
        assert len(prepared.recoveries) <= 1


class Scaled:
    """One weight, whose gradient is 2, in a loop with a loss scaler; a plain step takes 0.5 from it."""

    def __init__(self, **options: Any) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, **options)
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.norms: list[float] = []

    def prepared(self, precision: Precision) -> Prepared:
        plain = settings(precision=precision, units=())
        return bf.prepare(plain, self.model, self.optimizer, scaler=self.scaler)

    def forward_backward(self, x: Tensor) -> None:
        self.scaler.scale(self.model(x).sum()).backward()

    def clip_at_second(self) -> None:
        """Clips to a norm of 1; memory runs out in the first call."""
        self.norms.append(float(nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)))
        if len(self.norms) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def train(self, prepared: Prepared) -> None:
        prepared.retry(self.forward_backward, torch.full((1, 1), 2.0))
        self.scaler.unscale_(self.optimizer)
        prepared.retry(self.clip_at_second)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def test_gradients_unscaled_outside_retry_are_unscaled_again() -> None:
    """Clipped while scaled they had a norm of 2048, and the update was 0.0005."""
    loop = Scaled()
    prepared = loop.prepared(Precision.FP16)
    loop.train(prepared)
    assert len(prepared.recoveries) == 1
    assert loop.norms == [2.0, 2.0]
    assert loop.model.weight.item() == pytest.approx(-0.5)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_a_disabled_scaler_is_none(precision: Precision) -> None:
    loop = Scaled(enabled=False)
    prepared = loop.prepared(precision)
    loop.train(prepared)
    assert len(prepared.recoveries) == 1
    assert loop.norms == [2.0, 2.0]
    assert loop.model.weight.item() == pytest.approx(-0.5)


def test_a_disabled_scaler_retries_no_step_of_fp16() -> None:
    loop = Scaled(enabled=False)
    with pytest.raises(torch.OutOfMemoryError) as error:
        loop.prepared(Precision.FP16).retry(loop.clip_at_second)
    assert str(error.value).endswith("memory.")


def test_a_step_that_the_scaler_skipped_is_not_run_again() -> None:
    """Its zeroed gradients are there before the next step, so that one is not retried either."""
    loop = Scaled()
    prepared = loop.prepared(Precision.FP16)
    prepared.retry(loop.forward_backward, torch.full((1, 1), torch.inf))
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    loop.model.zero_grad(set_to_none=False)
    prepared.retry(loop.forward_backward, torch.full((1, 1), 2.0))
    with pytest.raises(torch.OutOfMemoryError, match="gradients before its first action"):
        prepared.retry(loop.clip_at_second)


def test_with_fp16_and_without_the_scaler_nothing_is_retried() -> None:
    loop = Loop(precision=Precision.FP16)
    with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\."):
        loop.prepared.retry(loop.failing(1))
    assert "step" not in vars(loop.optimizer)


def test_retry_needs_the_optimizer() -> None:
    prepared = bf.prepare(settings(), net())
    with pytest.raises(UsageError, match=r"bf\.prepare\(plan, model, optimizer\)"):
        prepared.retry(lambda: None)


def test_a_learning_rate_scheduler_sees_the_steps(recwarn: pytest.WarningsRecorder) -> None:
    loop = Loop()
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 1)
    loop.prepared.retry(loop.failing(1))
    loop.optimizer.step()
    scheduler.step()
    assert not [str(each.message) for each in recwarn if "lr_scheduler" in str(each.message)]


RANKS = """
import sys

import torch
from torch.nn.parallel import DistributedDataParallel

import brimful as bf
from integrations.test_prepare import MICRO, batches, loss_of, net, settings

kind, is_planned = sys.argv[1], sys.argv[2] == "planned"
model = net()
own = model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if kind == "accelerate":
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(model, optimizer)
else:
    torch.distributed.init_process_group("gloo")
    model = DistributedDataParallel(model)
rank = torch.distributed.get_rank()
assert torch.distributed.get_world_size() == 2
if is_planned:
    prepared = bf.prepare(settings(gradient_accumulation_steps=2, world_size=2), model, optimizer)
    retry = prepared.retry
else:
    def retry(action, *arguments):
        action(*arguments)

def forward_backward(part):
    loss = loss_of(model, *part)
    accelerator.backward(loss) if kind == "accelerate" else (loss / 2).backward()

for x, y in batches():
    mine = list(zip(x.split(MICRO), y.split(MICRO)))[rank::2]
    for part in mine:
        if kind == "accelerate":
            with accelerator.accumulate(model):
                retry(forward_backward, part)
                optimizer.step()
                optimizer.zero_grad()
        else:
            retry(forward_backward, part)
    if kind == "ddp":
        optimizer.step()
        optimizer.zero_grad()
report({name: value.tolist() for name, value in own.state_dict().items()})
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "accelerate"])
def test_two_processes_train_the_same_batch(tmp_path: Path, kind: str) -> None:
    if kind == "accelerate":
        pytest.importorskip("accelerate")
    alone = result_of_two_ranks(tmp_path, RANKS, kind, "alone")
    planned = result_of_two_ranks(tmp_path, RANKS, kind, "planned")
    assert planned == alone  # recomputation alone, bit for bit
    assert_alike({name: torch.tensor(value) for name, value in planned.items()})


def test_ignored_labels_that_are_not_counted_give_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    model = nn.Linear(4, 3)
    prepared = bf.prepare(Settings(micro_batch_size=2, gradient_accumulation_steps=2), model)
    batch = {"x": torch.randn(4, 4), "labels": torch.tensor([0, -100, 2, 1])}

    def kept(part: dict[str, Tensor]) -> Tensor:
        return (part["labels"] != -100).sum()

    assert [share for _, share in prepared.micro_batches(batch, count=kept)] == pytest.approx([1 / 3, 2 / 3])
    assert not recwarn.list
    with pytest.warns(
        UserWarning, match=r"(?s)labels of -100, 0 to 1 in a sample.*micro_batches\(batch, count="
    ):
        assert [share for _, share in prepared.micro_batches(batch)] == [0.5, 0.5]


class _Raises:
    """An object whose attributes raise, as those of a broken proxy do."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)


def test_an_optimizer_whose_attributes_raise_is_refused_by_its_name() -> None:
    with pytest.raises(UsageError, match=r"optimizer is .* it must be an Optimizer"):
        bf.prepare(settings(), net(), optimizer=_Raises())
