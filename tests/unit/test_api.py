"""The public functions on small models: what is pinned stays, what is asked is kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import brimful as bf
from brimful.devices import find_device
from brimful.errors import InfeasibleError, UnknownNameError, UsageError
from brimful.settings import Action, OptimizerImplementation

DEVICE = "RTX 3090"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, width: int = 64, depth: int = 8, norm: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.flatten(0, -2)))


def stack_job(norm: bool = False) -> bf.Job:
    return bf.Job(
        model=lambda: Stack(norm=norm),
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda n: torch.randn(n, 256, 64),
        optimizer="sgd",
        name="stack",
    )


def cpu_like() -> bf.devices.Device:
    """A device without a context, so that small models make a difference."""
    return replace(bf.devices.find_device("cpu"), capacity_bytes=1 << 40)


def test_a_plan_is_within_its_budget_and_its_prediction_is_an_estimate_of_its_settings() -> None:
    job, device = stack_job(), cpu_like()
    plan = bf.plan(job, device, global_batch_size=32, budget="40%")
    again = bf.api.capture_trace(job, plan.settings, device)
    peak = bf.estimate(job, device, micro_batch_size=32).predicted_peak_allocated_bytes
    assert plan.budget_bytes == int(0.4 * peak)
    assert plan.predicted_peak_device_bytes <= plan.budget_bytes
    assert plan.settings.global_batch_size == 32
    from brimful.memory import predict_memory

    assert predict_memory(again).peak_allocated_bytes == plan.predicted_peak_allocated_bytes


def test_more_budget_never_gives_a_slower_plan() -> None:
    job, device = stack_job(), cpu_like()
    seconds = [
        bf.plan(
            job, device, global_batch_size=16, budget=f"{share}%", micro_batch_size=16
        ).predicted_step_seconds
        for share in (40, 60, 80, 100)
    ]
    assert seconds == sorted(seconds, reverse=True)


def test_what_is_pinned_stays() -> None:
    plan = bf.plan(
        stack_job(),
        DEVICE,
        global_batch_size=8,
        precision="bf16",
        micro_batch_size=2,
        recompute="all",
        optimizer="adamw",
    )
    assert plan.settings.precision is bf.settings.Precision.BF16
    assert plan.settings.micro_batch_size == 2
    assert plan.settings.gradient_accumulation_steps == 4
    assert plan.settings.optimizer == "adamw"
    assert len(plan.settings.recomputed) == len(plan.settings.units) > 0


def test_a_batch_that_batch_norm_couples_is_split_only_when_permitted() -> None:
    job, device = stack_job(norm=True), cpu_like()
    whole = bf.plan(job, device, global_batch_size=16, budget="60%")
    assert whole.settings.micro_batch_size == 16
    with pytest.raises(InfeasibleError, match="split_batch_norm"):
        bf.plan(job, device, global_batch_size=16, budget="15%")
    split = bf.plan(job, device, global_batch_size=16, budget="15%", split_batch_norm=True)
    assert split.settings.micro_batch_size < 16
    assert any("BatchNorm" in note for note in split.notes)


def test_an_infeasible_budget_says_by_how_much_and_what_would_fit() -> None:
    job, device = stack_job(), cpu_like()
    with pytest.raises(InfeasibleError) as caught:
        bf.plan(job, device, global_batch_size=4, budget="1MiB")
    error = caught.value
    assert error.budget_bytes == 1 << 20
    assert error.shortfall_bytes > 0
    feasible = bf.plan(job, device, global_batch_size=4, budget=error.smallest_peak_bytes)
    assert feasible.predicted_peak_device_bytes <= error.smallest_peak_bytes


def test_near_its_capacity_a_step_fits_as_the_allocator_gives_back_its_cache() -> None:
    job = stack_job()
    free = bf.estimate(job, DEVICE, micro_batch_size=32)
    device = replace(find_device(DEVICE), capacity_bytes=free.predicted_peak_device_bytes)
    assert bf.estimate(job, device, micro_batch_size=32).verdict == "tight"
    context = find_device(DEVICE).context_bytes
    short = bf.estimate(
        job, DEVICE, micro_batch_size=32, budget=context + free.predicted_peak_allocated_bytes // 2
    )
    assert short.verdict == "does not fit"
    assert short.out_of_memory_at is not None
    assert short.predicted_peak_allocated_bytes == free.predicted_peak_allocated_bytes


def test_a_split_batch_without_a_count_comes_with_a_note_where_the_loss_could_not_be_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = stack_job()
    compared = bf.plan(job, DEVICE, global_batch_size=8, micro_batch_size=2)
    assert not any("Job(count=" in note for note in compared.notes)
    monkeypatch.setattr("brimful.profiling.splitting._PLANNED_FLOPS", 0)
    without = bf.plan(job, DEVICE, global_batch_size=8, micro_batch_size=2)
    assert any("Job(count=" in note for note in without.notes)
    counted = replace(job, count=lambda batch: batch.shape[0])
    assert not any(
        "count" in note for note in bf.plan(counted, DEVICE, global_batch_size=8, micro_batch_size=2).notes
    )


@pytest.mark.parametrize("budget", ["64GiB", "100000%"])
def test_a_budget_above_what_the_device_has_is_refused(budget: str) -> None:
    with pytest.raises(UsageError, match=r"more than .*T4.* has"):
        bf.plan(stack_job(), "T4", global_batch_size=8, budget=budget)


def test_what_was_planned_for_a_gpu_is_not_set_beside_a_measurement_on_a_cpu() -> None:
    plan = bf.plan(stack_job(), DEVICE, global_batch_size=4)
    assert bf.measure(stack_job(), plan, "cpu").predicted_peak_allocated_bytes is None


def test_an_optimizer_that_is_made_already_is_refused() -> None:
    with pytest.raises(UsageError, match="of type SGD; it must be a name, or a function that makes one"):
        replace(stack_job(), optimizer=torch.optim.SGD(Stack().parameters(), lr=0.1))  # type: ignore[arg-type]


def test_what_cudnn_keeps_for_recurrent_layers_widens_the_interval() -> None:
    job = bf.Job(
        model=lambda: nn.GRU(8, 8),
        loss=lambda model, batch: model(batch)[0].mean(),
        batch=lambda n: torch.randn(n, 4, 8),
        optimizer="sgd",
    )
    trace = bf.api.capture_trace(job, bf.Settings(micro_batch_size=64), DEVICE)
    assert "aten._cudnn_rnn.default" in {op.name for op in trace.ops}
    assert any(storage.most_bytes is not None for storage in trace.storages)
    assert not bf.estimate(job, cpu_like()).uncertain_ops


def test_by_default_a_plan_leaves_a_margin_on_a_gpu() -> None:
    plan = bf.plan(stack_job(), DEVICE, global_batch_size=8)
    assert plan.budget_bytes == int(find_device(DEVICE).capacity_bytes / 1.05)


def test_a_job_that_makes_batches_of_some_sizes_only_is_planned_all_the_same() -> None:
    def batch(samples: int) -> torch.Tensor:
        return torch.randn(max(samples // 4, 1) * 4, 256, 64)

    plan = bf.plan(replace(stack_job(), batch=batch), DEVICE, global_batch_size=8)
    assert plan.settings.micro_batch_size in (4, 8)
    assert any("not considered" in note for note in plan.notes)


def test_settings_for_another_optimizer_warn() -> None:
    model = Stack()
    with pytest.warns(UserWarning, match="'adafactor'.*SGD"):
        step = bf.apply(
            bf.Settings(micro_batch_size=2, optimizer="adafactor"),
            stack_job(),
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
        )
    step.remove()


def test_a_batch_of_more_samples_than_are_planned_for_warns() -> None:
    model = Stack()
    step = bf.apply(
        bf.Settings(micro_batch_size=2), stack_job(), model, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    with pytest.warns(UserWarning, match="has 3 samples, and the plan is for 2"):
        step(torch.randn(3, 256, 64))
    step.remove()


def test_estimating_leaves_a_given_module_as_it_was() -> None:
    model = Stack()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    job = replace(stack_job(), model=model)
    bf.estimate(job, DEVICE, micro_batch_size=4, recompute="all")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_plan_in_ones_own_loop_gives_the_gradient_of_the_whole_batch() -> None:
    job = stack_job()
    torch.manual_seed(0)
    model, plain = Stack(), Stack()
    plain.load_state_dict(model.state_dict())
    batch = torch.randn(8, 256, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    units = tuple(bf.settings.UnitAction(fqn=f"blocks.{i}", action="recompute") for i in range(8))
    step = bf.apply(
        bf.Settings(micro_batch_size=2, gradient_accumulation_steps=4, units=units), job, model, optimizer
    )
    outcome = step(batch)
    step.remove()
    loss = job.loss(plain, batch)
    loss.backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    # Four partial sums instead of one: equal up to the order of summation in float32.
    torch.testing.assert_close(outcome.loss, loss.detach(), rtol=1e-6, atol=0)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"budget": "50"}, UsageError, "50GiB"),
        ({"budget": "-5%"}, UsageError, "50%"),
        ({"budget": "nan%"}, UsageError, "'nan%' is not a share"),
        ({"budget": "1e400%"}, UsageError, "of at most 100000%"),
        ({"budget": "9" * 5000 + "%"}, UsageError, "9…' is not a share"),
        ({"budget": "9" * 5000 + "GiB"}, UsageError, "which no device has"),
        ({"recompute": "some"}, UnknownNameError, "all"),
        ({"precision": ["fp32", "bf61"]}, UnknownNameError, "bf16"),
        ({"recompute": Action.OFFLOAD}, UnknownNameError, "all"),
        ({"global_batch_size": 0}, UsageError, "global_batch_size is 0; it must be at least 1"),
        ({"global_batch_size": 2.5}, UsageError, "global_batch_size is 2.5, .* a whole number"),
        ({"micro_batch_size": 0}, UsageError, "micro_batch_size is 0; it must be at least 1"),
        ({"micro_batch_size": -2}, UsageError, "micro_batch_size is -2; it must be at least 1"),
        ({"micro_batch_size": 2.0}, UsageError, "micro_batch_size is 2.0, .* a whole number"),
        ({"world_size": 0}, UsageError, "world_size is 0; it must be at least 1"),
        ({"num_nodes": 0}, UsageError, "num_nodes is 0; it must be at least 1"),
    ],
)
def test_bad_arguments_are_told(arguments: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        bf.plan(stack_job(), DEVICE, **({"global_batch_size": 4} | arguments))  # type: ignore[arg-type]


def test_a_precision_the_device_lacks_is_refused() -> None:
    with pytest.raises(UsageError, match="bf16"):
        bf.estimate(stack_job(), "GTX 1080 Ti", precision="bf16")


def test_a_plan_for_a_job_with_a_loop_of_its_own_says_that_it_is_not_used() -> None:
    noted = bf.plan(replace(stack_job(), loop=lambda model, batches: None), DEVICE, global_batch_size=8)
    assert any("own training loop is not used" in note for note in noted.notes)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).abs()


def test_complex_parameters_are_one_note_and_no_fused_optimizer() -> None:
    job = bf.Job(model=Complex, loss=lambda model, x: model(x).mean(), batch=lambda n: torch.randn(n, 64))
    plan = bf.plan(job, DEVICE, global_batch_size=32)
    assert plan.settings.optimizer_implementation is None
    (note,) = [note for note in plan.notes if "not considered" in note]
    assert note.startswith("The fused optimizer is not considered: fused kernels update real floating-point")


def test_micro_batches_that_fail_for_one_reason_are_one_note() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        if len(x) < 8:
            raise ValueError("pairs of four are compared")
        return model(x).mean()

    job = bf.Job(model=lambda: nn.Linear(64, 1), loss=loss, batch=lambda n: torch.randn(n, 64))
    plan = bf.plan(job, DEVICE, global_batch_size=32)
    (note,) = [note for note in plan.notes if "not considered" in note]
    assert note.startswith("Micro-batches of 4, 2, 1 are not considered:")
    assert "pairs of four are compared" in note


def test_an_optimizer_for_parameters_of_the_jobs_model_alone_may_be_fused_too() -> None:
    def by_name(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        named = dict(named_parameters)
        return torch.optim.AdamW(
            [{"params": [named["head.weight"]], "lr": 1e-3}, {"params": [named["head.bias"]]}]
        )

    job = bf.Job(
        model=lambda: nn.Sequential(OrderedDict(head=nn.Linear(8, 8))),
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda n: torch.randn(n, 8),
        optimizer=by_name,
    )
    plan = bf.plan(job, "cpu", budget="1GiB", global_batch_size=4)
    assert plan.settings.optimizer_implementation is OptimizerImplementation.FUSED


def flags_of(optimizer: torch.optim.Optimizer) -> list[tuple[object, object]]:
    return [(group["fused"], group["foreach"]) for group in (optimizer.defaults, *optimizer.param_groups)]


def test_a_step_that_is_removed_leaves_the_optimizer_in_its_own_implementation() -> None:
    job, model = stack_job(), Stack()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    fused = bf.Settings(micro_batch_size=2, optimizer_implementation=OptimizerImplementation.FUSED)
    before = flags_of(optimizer)
    step = bf.apply(fused, job, model, optimizer)
    assert flags_of(optimizer) == [(True, False)] * 2
    assert repr(step) == "PlannedStep(fp32, micro-batch 2, fused optimizer, everything kept)"
    step(job.batch(2))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    step.remove()
    assert flags_of(optimizer) == [*before, before[0]]
    optimizer.param_groups[0]["foreach"] = True
    step.remove()
    assert optimizer.param_groups[0]["foreach"] is True


def test_a_plan_that_cannot_be_applied_leaves_the_optimizer_alone() -> None:
    job, model = stack_job(), Stack()
    optimizer = torch.optim.AdamW(model.parameters())
    before = flags_of(optimizer)
    absent = bf.settings.UnitAction(fqn="absent", action=bf.settings.Action.RECOMPUTE)
    with pytest.raises(UnknownNameError):
        bf.apply(
            bf.Settings(
                micro_batch_size=2, units=(absent,), optimizer_implementation=OptimizerImplementation.FUSED
            ),
            job,
            model,
            optimizer,
        )
    assert flags_of(optimizer) == before


def test_the_path_of_a_plan_is_told_from_a_plan() -> None:
    job, model = stack_job(), Stack()
    optimizer = torch.optim.AdamW(model.parameters())
    calls: list[Callable[[Any], object]] = [
        lambda plan: bf.fit(job, plan),
        lambda plan: bf.trainer.Trainer(job, plan),
        lambda plan: bf.measure(job, plan),
        lambda plan: bf.verify(job, plan),
        lambda plan: bf.apply(plan, job, model, optimizer),
    ]
    for call in calls:
        with pytest.raises(UsageError, match=r'plan is .*, of type str.*Plan\.load\("p\.json"\)'):
            call("p.json")
        with pytest.raises(UsageError, match=r'plan is .*, of type PosixPath.*Plan\.load\("p\.json"\)'):
            call(Path("p.json"))


def test_arguments_in_another_order_are_told() -> None:
    job, model, settings = stack_job(), Stack(), bf.Settings(micro_batch_size=2)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(
        UsageError, match=r"plan is .*, of type Job.*apply\(\) takes \(plan, job, model, optimizer,"
    ):
        bf.apply(job, settings, model, optimizer)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"fit\(\) takes \(job, plan,"):
        bf.fit(settings, job)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_static", [False, True])
def test_under_ddp_a_step_reduces_gradients_once(tmp_path: Path, is_static: bool) -> None:
    """With a static graph, in which DDP refuses `no_sync`, once for each micro-batch; the weights are equal."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        job = stack_job()
        settings = bf.Settings(micro_batch_size=4, gradient_accumulation_steps=3)
        trained = [job.model(), job.model()]
        trained[1].load_state_dict(trained[0].state_dict())
        wrapped = nn.parallel.DistributedDataParallel(trained[1], static_graph=is_static)
        reduced = []

        def note(_state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations, not their text
            reduced.append(bucket.is_last())
            done = torch.futures.Future[Tensor]()
            done.set_result(bucket.buffer())
            return done

        wrapped.register_comm_hook(None, note)
        batch = job.batch(12)
        for model in (trained[0], wrapped):
            step = bf.apply(settings, job, model, torch.optim.SGD(model.parameters(), lr=0.1))
            for _ in range(2):
                step(batch)
        assert sum(reduced) == 2 * (3 if is_static else 1)
        torch.testing.assert_close(trained[1].state_dict(), trained[0].state_dict())
    finally:
        distributed.destroy_process_group()
