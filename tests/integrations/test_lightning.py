"""A plan in Lightning's Trainer: the same training in other micro-batches and with recomputation."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import brimful as bf
from brimful.errors import UsageError
from brimful.integrations.division import Division
from brimful.profiling.peak import peak_memory
from helpers.faults import OutOfMemoryAt
from helpers.torchrun import result_of_two_ranks

L = pytest.importorskip("lightning.pytorch")
bfl = pytest.importorskip("brimful.integrations.lightning")

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own advice


class Classifier(L.LightningModule):
    def __init__(self, blocks: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.0)) for _ in range(blocks)]
        self.net = nn.Sequential(*layers, nn.Linear(64, 10))
        self.seen: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        self.seen.append(float(loss.detach()) if not hasattr(loss, "fake_mode") else 0.0)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer)}


def samples(shuffle: bool = True) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(256, 64, generator=generator), torch.randint(0, 10, (256,), generator=generator)
    )
    return DataLoader(data, batch_size=64, shuffle=shuffle, generator=torch.Generator().manual_seed(1))


def fitted(module: Any, loader: Any, folder: Path, **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        default_root_dir=str(folder),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"devices": 1, **options},
    )
    trainer.fit(module, loader)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def planned(module: Any, loader: Any, **options: Any) -> bf.Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bfl.plan(module, loader, "cpu", budget="1GiB", **options)


@pytest.mark.parametrize(("size", "exactly"), [(64, True), (16, False)])
def test_the_module_trains_as_without_the_plan(tmp_path: Path, size: int, exactly: bool) -> None:
    alone = fitted(Classifier(), samples(), tmp_path)
    module, loader = Classifier(), samples()
    plan = planned(module, loader, recompute="all", micro_batch_size=size, optimizer_implementation="for-loop")
    assert plan.settings.gradient_accumulation_steps == 64 // size
    callback = bfl.PlanCallback(plan)
    found = fitted(
        module, bfl.loader(plan, loader), tmp_path, callbacks=[callback], **bfl.trainer_options(plan)
    )
    for name, value in alone.items():
        same = torch.equal(value, found[name]) if exactly else torch.allclose(value, found[name], atol=1e-4)
        assert same, name
    assert not any("forward" in vars(block) for block in module.modules())


def test_the_predicted_peak_is_the_measured_one() -> None:
    module, loader = Classifier(), samples()
    plan = planned(module, loader)
    measured = bf.measure(bfl.job(module, loader), plan.settings, "cpu").measured_peak_allocated_bytes
    assert plan.predicted_peak_allocated_bytes == pytest.approx(measured, rel=0.01)


def test_the_peak_of_lightning_s_own_step_is_the_predicted_one(tmp_path: Path) -> None:
    """Its gradients would be held in the next forward."""
    measured = []

    class Profiled(Classifier):
        def on_train_batch_start(self, batch: Any, index: int) -> None:
            self.peak = peak_memory(self, self.trainer.optimizers[0], "cpu") if index == 2 else nullcontext()
            measured.append(self.peak.__enter__())

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            self.peak.__exit__(None, None, None)

    module, loader = Profiled(), samples()
    plan = planned(module, loader, micro_batch_size=64)
    fitted(module, loader, tmp_path, callbacks=[bfl.PlanCallback(plan)])
    assert plan.predicted_peak_allocated_bytes == pytest.approx(measured[2].allocated_bytes, rel=0.01)


class Faulty(Classifier):
    """With dropout and BatchNorm; a context is in force in the second step of two micro-batches."""

    def __init__(self, context: Any) -> None:
        super().__init__(blocks=4)
        for block in list(self.net)[:-1]:
            block[2].p = 0.2
            block.append(nn.BatchNorm1d(64))
        self.context = context

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if index in (2, 3) and self.current_epoch == 0:
            self.context.__enter__()

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if index in (2, 3) and self.current_epoch == 0:  # the loader is not in it
            self.context.__exit__(None, None, None)


@cache
def recomputing_plan() -> bf.Plan:
    return planned(Classifier(blocks=4), samples(), recompute="all", micro_batch_size=32)


def fitted_with(fault: OutOfMemoryAt, folder: Path, **options: Any) -> tuple[dict[str, Tensor], Any]:
    module, loader, plan = Faulty(fault), samples(), recomputing_plan()
    callback = bfl.PlanCallback(plan, **options)
    options = {**bfl.trainer_options(plan), "gradient_clip_val": 0.1}
    return fitted(module, bfl.loader(plan, loader), folder, callbacks=[callback], **options), callback


MADE_BETWEEN = ("profiler.", "aten.detach", "aten._local_scalar_dense", "aten.lift_fresh", "aten.fill_")
"""Ops of one number each that Lightning makes between the functions of a step, to report the loss."""


@pytest.mark.slow
def test_memory_may_run_out_at_any_point_of_a_step(tmp_path: Path) -> None:
    counting = OutOfMemoryAt()
    expected, _ = fitted_with(counting, tmp_path)
    for number in range(0, len(counting.ops), len(counting.ops) // 30):
        if counting.ops[number].startswith(MADE_BETWEEN):
            continue
        fault = OutOfMemoryAt(number)
        found, callback = fitted_with(fault, tmp_path)
        assert fault.raised == 1
        assert all(torch.equal(found[name], value) for name, value in expected.items()), counting.ops[number]
        assert len(callback.recoveries) <= 1


def test_without_recovery_the_error_is_raised(tmp_path: Path) -> None:
    fault = OutOfMemoryAt(30)
    with pytest.raises(torch.OutOfMemoryError) as error:
        fitted_with(fault, tmp_path, recover=False)
    fault.__exit__(None, None, None)
    assert "the plan predicts" in error.value.__notes__[0]


def test_a_plan_for_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    module, loader = Classifier(), samples()
    plan = planned(module, loader, world_size=2, micro_batch_size=64)
    assert plan.settings.global_batch_size == 128
    with pytest.raises(UsageError, match=r"for 2 processes, and the trainer has 1"):
        fitted(module, bfl.loader(plan, loader), tmp_path, callbacks=[bfl.PlanCallback(plan)])


RANK = """
import sys
from pathlib import Path

import brimful.integrations.lightning as bfl
from integrations.test_lightning import Classifier, fitted, planned, samples


def weights(size):
    module, loader, options = Classifier(), samples(), {}
    if size is not None:
        plan = planned(
            module, loader, world_size=2, recompute="all", micro_batch_size=size,
            optimizer_implementation="for-loop",
        )
        options = {**bfl.trainer_options(plan), "callbacks": [bfl.PlanCallback(plan)]}
        loader = bfl.loader(plan, loader)
    found = fitted(module, loader, Path(sys.argv[1]), devices=2, strategy="ddp", **options)
    return {name: value.tolist() for name, value in found.items()}


report([weights(size) for size in (None, 64, 32)])
"""


@pytest.mark.slow
def test_two_processes_train_the_same_batch(tmp_path: Path) -> None:
    alone, planned, divided = result_of_two_ranks(tmp_path, RANK, str(tmp_path))
    assert planned == alone
    for name, value in alone.items():
        assert torch.allclose(torch.tensor(divided[name]), torch.tensor(value), atol=1e-4), name


def test_a_trainer_whose_steps_have_other_samples_is_refused(tmp_path: Path) -> None:
    module, loader = Classifier(), samples()
    plan = planned(module, loader, micro_batch_size=16, global_batch_size=128)
    with pytest.raises(UsageError, match=r"Pass lightning\.Trainer\(accumulate_grad_batches=2\)"):
        fitted(module, loader, tmp_path, callbacks=[bfl.PlanCallback(plan)])
    callback = bfl.PlanCallback(planned(module, loader, micro_batch_size=16))
    with pytest.raises(UsageError, match="for 64 samples a step, and the trainer's steps have 128"):
        fitted(module, loader, tmp_path, callbacks=[callback], accumulate_grad_batches=2)


def test_the_check_of_a_divided_batch_leaves_the_module_as_it_was() -> None:
    module = Classifier()
    module.trainer = bfl.PlanningTrainer(samples())
    module.train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    settings = bf.Settings(micro_batch_size=16, gradient_accumulation_steps=4)
    assert bfl._check_first(module, settings, Division(whole=64, whose="loader"), next(iter(samples())))
    assert module.training
    assert module.seen == []
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_batches_are_not_joined() -> None:
    with pytest.raises(UsageError, match="micro_batch_size=128 is larger than the loader's batches of 64"):
        planned(Classifier(), samples(), micro_batch_size=128, global_batch_size=128)
    assert planned(Classifier(), samples(), global_batch_size=128).settings.micro_batch_size <= 64


def test_a_stream_is_divided_in_each_batch(tmp_path: Path) -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter(samples(shuffle=False).dataset)

    stream = DataLoader(Stream(), batch_size=60)
    alone = fitted(Classifier(), stream, tmp_path)
    module = Classifier()
    plan = planned(module, stream, micro_batch_size=15)
    found = fitted(module, stream, tmp_path, callbacks=[bfl.PlanCallback(plan)])
    assert all(torch.allclose(value, found[name], atol=1e-4) for name, value in alone.items())


def test_several_optimizers_are_refused() -> None:
    class Two(Classifier):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.net.parameters(), lr=0.1) for _ in range(2)]

    with pytest.raises(UsageError, match="has 2 optimizers"):
        planned(Two(), samples())


def test_planning_shows_no_warnings_of_lightning() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = bfl.plan(Classifier(), samples(), "cpu", micro_batch_size=16)
    assert not [warning for warning in caught if "self.log" in str(warning.message)]
    assert not any("mean over samples" in note for note in plan.notes)


def test_a_loss_that_planning_cannot_check_is_noted() -> None:
    class Unchecked(Classifier):
        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            if not self.training:
                raise RuntimeError("this loss is for training")
            return super().training_step(batch, index)

    plan = planned(Unchecked(), samples(), micro_batch_size=16)
    assert any("micro_batch_size=64 to plan()" in note for note in plan.notes)
    assert not any("Job(" in note for note in plan.notes)


def test_a_loader_of_fewer_samples_than_a_step_is_noted_or_refused() -> None:
    data = TensorDataset(torch.randn(12, 64), torch.randint(0, 10, (12,)))
    plan = planned(Classifier(), DataLoader(data, batch_size=16), micro_batch_size=16)
    assert any("12 samples, fewer than a step's 16" in note for note in plan.notes)
    with pytest.raises(UsageError, match=r"batch_size=16, drop_last=True\) of 12 samples gives no batch"):
        planned(Classifier(), DataLoader(data, batch_size=16, drop_last=True))
