"""Updating each parameter in backward is the same training, or ends with the last save whole."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import brimful as bf
from brimful.errors import EquivalenceError, NonFiniteError, OutOfMemoryError, PartialUpdateError, UsageError
from brimful.job import Data, Job
from brimful.profiling import measure_step
from brimful.settings import Precision, Settings
from brimful.trainer import Trainer
from helpers import updates
from helpers.faults import OutOfMemoryAt
from helpers.models import GPT
from helpers.tiny_jobs import RECOMPUTE, Net, all_samples, make_job
from helpers.updates import Deep, assert_same

IN_BACKWARD = Settings(micro_batch_size=8, optimizer_in_backward=True)
NUMBERS_BYTES = 12
"""Tensors of one number that ops make inside of Python's numbers: `div_` by one takes three."""
OPTIMIZERS = {
    name: updates.OPTIMIZERS[name]
    for name in ("adamw", "adamw foreach", "adamw fused", "sgd", "adafactor", "muon")
}
deep_job = partial(updates.deep_job, model=partial(Deep, has_unused=True))


def trained(job: Job, settings: Settings, **options: Any) -> tuple[nn.Module, Any]:
    trainer = Trainer(job, settings, device="cpu", **{"show_progress": False, "steps": 4} | options)
    result = trainer.fit()
    return trainer.model, result


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_makes_the_same_parameters_to_the_last_bit(optimizer: str) -> None:
    job = make_job(optimizer=OPTIMIZERS[optimizer])
    options: dict[str, Any] = {"schedule": lambda of: torch.optim.lr_scheduler.StepLR(of, 1, gamma=0.5)}
    plain, expected = trained(job, replace(IN_BACKWARD, optimizer_in_backward=False), **options)
    model, result = trained(job, IN_BACKWARD, **options)
    assert_same(model, plain)
    assert result.losses == expected.losses
    norms = [step.gradient_norm for step in result.steps]
    assert norms == pytest.approx([step.gradient_norm for step in expected.steps], rel=1e-5)


def gpt_job(**changes: Any) -> Job:
    tokens = torch.randint(40, (24, 6), generator=torch.Generator().manual_seed(3))
    values: dict[str, Any] = {
        "model": GPT,  # its embedding and head share a weight
        "loss": lambda model, x: nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()),
        "batch": tokens,
        "optimizer": "adamw",
        "data": lambda: Data(train=tokens),
    }
    return Job(**values | changes)


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_a_shared_weight_is_updated_once_and_recomputing_reads_it_before(is_recomputed: bool) -> None:
    units = tuple(replace(unit, fqn=f"blocks.{i}") for i, unit in enumerate(RECOMPUTE)) if is_recomputed else ()
    plain, _ = trained(gpt_job(), Settings(micro_batch_size=8))
    model, _ = trained(gpt_job(), replace(IN_BACKWARD, units=units))
    assert_same(model, plain)


def in_bfloat16(settings: Settings) -> Settings:
    return replace(settings, precision=Precision.BF16)


def test_under_bf16_too() -> None:
    plain, _ = trained(gpt_job(), in_bfloat16(Settings(micro_batch_size=8)))
    model, _ = trained(gpt_job(), in_bfloat16(IN_BACKWARD))
    assert_same(model, plain)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw foreach", "adamw fused", "sgd", "adafactor"])
def test_the_peak_is_predicted_to_the_byte_and_spares_the_gradients(optimizer: str) -> None:
    job = deep_job(optimizer=OPTIMIZERS[optimizer])
    settings = replace(IN_BACKWARD, micro_batch_size=2)
    predicted = bf.estimate(job, "cpu", micro_batch_size=2, optimizer_in_backward=True)
    measured = measure_step(job, settings, steps=1)
    beyond = measured.measured_peak_allocated_bytes - predicted.predicted_peak_allocated_bytes
    assert 0 <= beyond <= NUMBERS_BYTES
    plain = bf.estimate(job, "cpu", micro_batch_size=2)
    gradients = 8 * (64 * 64 + 64) * 4
    spared = plain.predicted_peak_allocated_bytes - predicted.predicted_peak_allocated_bytes
    assert spared > 0.7 * gradients


def test_a_plan_with_it_keeps_its_word() -> None:
    job = deep_job()
    plain = bf.estimate(job, "cpu", micro_batch_size=2).predicted_peak_allocated_bytes
    plan = bf.plan(job, "cpu", global_batch_size=2, budget=int(0.9 * plain), optimizer_in_backward=True)
    assert plan.settings.optimizer_in_backward
    assert not plan.plain.settings.optimizer_in_backward
    assert "updated in backward" in plan.settings.describe()
    beyond = bf.measure(job, plan).measured_peak_allocated_bytes - plan.predicted_peak_allocated_bytes
    assert 0 <= beyond <= NUMBERS_BYTES


def test_what_a_plan_with_it_cannot_have_is_refused_or_left_out() -> None:
    plan = partial(bf.plan, deep_job(), "RTX 3090", global_batch_size=2, optimizer_in_backward=True)
    assert plan(precision=["fp16", "bf16"], recompute="none").settings.precision is Precision.BF16
    with pytest.raises(UsageError, match="takes the global batch of 2 at once"):
        plan(micro_batch_size=1)
    with pytest.raises(UsageError, match="loss scaler"):
        plan(precision="fp16")
    with pytest.raises(UsageError, match="averaged first"):
        plan(world_size=2)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"gradient_accumulation_steps": 2}, "only after the last micro-batch"),
        ({"precision": Precision.FP16}, "loss scaler"),
        ({"world_size": 2}, "averaged first"),
    ],
)
def test_what_needs_all_gradients_is_refused_with_the_reason(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        replace(IN_BACKWARD, **changes)


def test_clipping_larger_batches_and_other_optimizers_are_refused() -> None:
    model = Net()
    sgd = torch.optim.SGD(model.parameters())
    for run in (
        lambda: trained(make_job(), IN_BACKWARD, max_gradient_norm=1.0),
        lambda: bf.apply(IN_BACKWARD, make_job(), model, sgd, max_gradient_norm=1.0),
    ):
        with pytest.raises(UsageError, match=r"max_gradient_norm is 1\.0"):
            run()
    step = bf.apply(IN_BACKWARD, make_job(), model, sgd)
    with pytest.raises(UsageError, match="more samples than a micro-batch: it is in 7 parts"):
        step(all_samples())
    step.remove()
    with pytest.raises(UsageError, match="AcrossParameters may use all of them"):
        bf.apply(IN_BACKWARD, make_job(), model, AcrossParameters(model.parameters()))


class AcrossParameters(torch.optim.SGD):
    """Of unknown mathematics, as far as brimful can see."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def run_out(in_backward_of: str, counter: list[int]) -> Callable[[str, Any], bool]:
    """Memory runs out at the second op of a name, once."""

    def fails(name: str, _args: Any) -> bool:
        counter[0] += in_backward_of in name
        return in_backward_of in name and counter[0] == 2

    return fails


@pytest.mark.parametrize(("op", "is_survived"), [("aten.tanh.default", True), ("aten.tanh_backward", False)])
def test_memory_that_runs_out_before_the_first_update_is_survived_and_after_it_ends_the_run(
    op: str, is_survived: bool, tmp_path: Any
) -> None:
    expected, _ = trained(make_job(), IN_BACKWARD)
    trained(make_job(), IN_BACKWARD, steps=2, run_dir=tmp_path / "run")
    run = partial(trained, make_job(), IN_BACKWARD, run_dir=tmp_path / "run", resume=True)
    with OutOfMemoryAt(fails=run_out(op, [0])) as fault:
        if is_survived:
            model, result = run()
            assert len(result.recoveries) == 1
        else:
            with pytest.raises(PartialUpdateError, match="Resume from the last checkpoint"):
                run()
    assert fault.raised == 1
    if not is_survived:
        model, _ = run()  # from the save of the second step
    assert_same(model, expected)


def test_a_loss_that_is_no_number_changes_nothing() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"]) * float("nan")

    model = Net()
    before = copy.deepcopy(model)
    with pytest.raises(NonFiniteError):
        trained(make_job(model=model, loss=loss), IN_BACKWARD)
    assert_same(model, before)


class InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float("inf")


def test_a_gradient_that_is_no_number_is_not_saved(tmp_path: Any) -> None:
    class Bad(Net):
        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = super().forward(InfiniteGradient.apply(self.blocks[0](x)))
            return made

    with pytest.raises(PartialUpdateError, match="a gradient is NaN or infinite"):
        trained(make_job(model=Bad), IN_BACKWARD, run_dir=tmp_path / "run")
    assert not list((tmp_path / "run").rglob("*.safetensors"))


def test_a_gradient_in_parts_is_refused() -> None:
    class Reentrant(Net):
        def forward(self, x: Tensor) -> Tensor:
            with warnings.catch_warnings(action="ignore"):
                x = checkpoint(self.blocks, x.requires_grad_(), use_reentrant=True)
                x = checkpoint(self.blocks, x, use_reentrant=True)  # the same weights in another segment
            made: Tensor = self.head(x)
            return made

    with pytest.raises(PartialUpdateError, match="use_reentrant=False"):
        trained(make_job(model=Reentrant), IN_BACKWARD, verify=False)
    with pytest.raises(EquivalenceError, match="use_reentrant=False"):
        bf.verify(make_job(model=Reentrant), IN_BACKWARD)  # by the step that training runs


def test_it_is_certified_by_the_step_that_training_runs() -> None:
    (updating, *_) = [
        each for each in bf.verify(make_job(), IN_BACKWARD).comparisons if each.name == "updating in backward"
    ]
    assert updating.is_bitwise


def test_the_longest_batch_is_rehearsed_without_an_update() -> None:
    data = all_samples()
    job = make_job(data=lambda: Data(train=data, longest={name: value[:8] for name, value in data.items()}))
    plain, _ = trained(make_job(), IN_BACKWARD)
    model, _ = trained(job, IN_BACKWARD)
    assert_same(model, plain)


def test_where_memory_stays_short_nothing_smaller_is_tried_than_the_whole_batch() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if type(batch["x"]) is Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"])

    with pytest.raises(OutOfMemoryError, match="only after the last micro-batch"):
        trained(make_job(loss=loss), IN_BACKWARD, verify=False)


def test_what_does_not_fit_says_what_would_though_fp16_cannot_go_with_it() -> None:
    job = make_job()
    with pytest.raises(bf.InfeasibleError, match="would fit: a budget of") as found:
        bf.plan(job, "RTX 3090", global_batch_size=8, budget="100MiB", optimizer_in_backward=True)
    assert "fp16" not in str(found.value)


def test_frozen_parameters_are_left_alone_in_ones_own_loop_and_by_the_certificate() -> None:
    def frozen() -> nn.Module:
        model = Net()
        next(iter(model.parameters())).requires_grad_(False)
        return model

    job = make_job(model=frozen)
    assert bf.verify(job, IN_BACKWARD).holds
    model = frozen()
    before = next(iter(model.parameters())).clone()
    step = bf.apply(IN_BACKWARD, job, model, torch.optim.SGD(model.parameters(), 0.1))
    step({name: value[:8] for name, value in all_samples().items()})
    assert torch.equal(next(iter(model.parameters())), before)
