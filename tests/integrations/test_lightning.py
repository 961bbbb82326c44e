"""A plan in Lightning's Trainer: the same training in other micro-batches and with recomputation."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import brimful as bf
from brimful.errors import UsageError

L = pytest.importorskip("lightning.pytorch")
bfl = pytest.importorskip("brimful.integrations.lightning")

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own advice


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.0)) for _ in range(8)]
        self.net = nn.Sequential(*blocks, nn.Linear(64, 10))
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
        devices=1,
        default_root_dir=str(folder),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
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


def test_a_trainer_without_the_plan_s_accumulation_is_refused(tmp_path: Path) -> None:
    module, loader = Classifier(), samples()
    plan = planned(module, loader, micro_batch_size=16)
    with pytest.raises(UsageError, match=r"accumulates 4 micro-batches, and the trainer 1"):
        fitted(module, loader, tmp_path, callbacks=[bfl.PlanCallback(plan)])


def test_several_optimizers_are_refused() -> None:
    class Two(Classifier):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.net.parameters(), lr=0.1) for _ in range(2)]

    with pytest.raises(UsageError, match="has 2 optimizers"):
        planned(Two(), samples())
