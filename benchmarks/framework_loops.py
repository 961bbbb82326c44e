"""The same training job in each framework, without brimful and with it: the code that `frameworks.py` runs.

Each pair of functions is compared line by line to count what a user adds. `run` stands for what is the user's
already: model, texts, arguments, and what a benchmark watches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning
import torch
from accelerate import Accelerator
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

if TYPE_CHECKING:
    from frameworks import Run

BATCH, RATE, NORM = 8, 1e-3, 1.0


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)


def transformers_alone(run: Run) -> None:
    trainer = Trainer(run.model(), TrainingArguments(**run.arguments), train_dataset=run.texts)
    trainer.add_callback(TrainerWatch(run))
    trainer.train()


def transformers_planned(run: Run) -> None:
    import brimful.integrations.transformers as bft

    trainer = Trainer(run.model(), TrainingArguments(**run.arguments), train_dataset=run.texts)
    trainer.add_callback(TrainerWatch(run))
    plan = bft.plan(trainer, **run.options)
    applied = bft.apply(plan, trainer)
    trainer.train()
    run.results(plan, applied)


def lightning_alone(run: Run) -> None:
    module = Module(run)
    loader = DataLoader(run.texts, batch_size=BATCH)
    trainer = lightning.Trainer(**run.trainer_options)
    trainer.fit(module, loader)


def lightning_planned(run: Run) -> None:
    import brimful.integrations.lightning as bfl

    module = Module(run)
    loader = DataLoader(run.texts, batch_size=BATCH)
    plan = bfl.plan(module, loader, **run.options)
    callback = bfl.PlanCallback(plan)
    trainer = lightning.Trainer(**run.trainer_options, **bfl.trainer_options(plan), callbacks=[callback])
    trainer.fit(module, bfl.loader(plan, loader))
    run.results(plan, callback)


def fabric_alone(run: Run) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    model = run.model()
    optimizer = adamw(model)
    loader = fabric.setup_dataloaders(DataLoader(run.texts, batch_size=BATCH))
    model, optimizer = fabric.setup(model, optimizer)
    for batch in loader:
        run.begin(model, optimizer)
        loss = loss_of(model, batch)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=NORM)
        optimizer.step()
        optimizer.zero_grad()
        run.end(loss, batch)


def fabric_planned(run: Run) -> None:
    import brimful as bf

    def forward_backward(batch: dict[str, Tensor]) -> Tensor:
        loss = loss_of(model, batch)
        fabric.backward(loss / plan.settings.gradient_accumulation_steps)
        return loss

    fabric = Fabric(accelerator="cpu", devices=1)
    plan = bf.plan(
        bf.Job(model=run.model, loss=loss_of, batch=run.batch), **run.options, global_batch_size=BATCH
    )
    model = run.model()
    optimizer = adamw(model)
    loader = fabric.setup_dataloaders(DataLoader(run.texts, batch_size=plan.settings.micro_batch_size))
    prepared = bf.prepare(plan, model, optimizer)
    model, optimizer = fabric.setup(model, optimizer)
    for number, batch in enumerate(loader, 1):
        run.begin(model, optimizer)
        loss = prepared.retry(forward_backward, batch)
        if number % plan.settings.gradient_accumulation_steps == 0:
            prepared.retry(lambda: fabric.clip_gradients(model, optimizer, max_norm=NORM))
            optimizer.step()
            optimizer.zero_grad()
        run.end(loss, batch)
    run.results(plan, prepared)


def accelerate_alone(run: Run) -> None:
    accelerator = Accelerator(cpu=True)
    model = run.model()
    optimizer = adamw(model)
    loader = DataLoader(run.texts, batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        run.begin(model, optimizer)
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), NORM)
            optimizer.step()
            optimizer.zero_grad()
        run.end(loss, batch)


def accelerate_planned(run: Run) -> None:
    import brimful as bf

    def forward_backward(batch: dict[str, Tensor]) -> Tensor:
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        return loss

    plan = bf.plan(
        bf.Job(model=run.model, loss=loss_of, batch=run.batch), **run.options, global_batch_size=BATCH
    )
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=plan.settings.gradient_accumulation_steps)
    model = run.model()
    optimizer = adamw(model)
    loader = DataLoader(run.texts, batch_size=plan.settings.micro_batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    prepared = bf.prepare(plan, model, optimizer)
    for batch in loader:
        run.begin(model, optimizer)
        with accelerator.accumulate(model):
            loss = prepared.retry(forward_backward, batch)
            if accelerator.sync_gradients:
                prepared.retry(lambda: accelerator.clip_grad_norm_(model.parameters(), NORM))
            optimizer.step()
            optimizer.zero_grad()
        run.end(loss, batch)
    run.results(plan, prepared)


def pytorch_alone(run: Run) -> None:
    model = run.model()
    optimizer = adamw(model)
    for batch in DataLoader(run.texts, batch_size=BATCH):
        run.begin(model, optimizer)
        loss = loss_of(model, batch)
        loss.backward()
        clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()
        run.end(loss, batch)


def pytorch_prepared(run: Run) -> None:
    import brimful as bf

    def forward_backward(batch: dict[str, Tensor]) -> Tensor:
        loss = loss_of(model, batch)
        (loss / plan.settings.gradient_accumulation_steps).backward()
        return loss

    plan = bf.plan(
        bf.Job(model=run.model, loss=loss_of, batch=run.batch), **run.options, global_batch_size=BATCH
    )
    model = run.model()
    optimizer = adamw(model)
    prepared = bf.prepare(plan, model, optimizer)
    for number, batch in enumerate(DataLoader(run.texts, batch_size=plan.settings.micro_batch_size), 1):
        run.begin(model, optimizer)
        loss = prepared.retry(forward_backward, batch)
        if number % plan.settings.gradient_accumulation_steps == 0:
            prepared.retry(lambda: clip_grad_norm_(model.parameters(), NORM))
            optimizer.step()
            optimizer.zero_grad()
        run.end(loss, batch)
    run.results(plan, prepared)


def pytorch_applied(run: Run) -> None:
    import brimful as bf

    job = bf.Job(model=run.model, loss=loss_of, batch=run.batch)
    plan = bf.plan(job, **run.options, global_batch_size=BATCH)
    model = run.model()
    optimizer = adamw(model)
    step = bf.apply(plan, job, model, optimizer, max_gradient_norm=NORM)
    for batch in DataLoader(run.texts, batch_size=BATCH):
        run.begin(model, optimizer)
        loss = step(batch).loss
        run.end(loss, batch)
    run.results(plan, step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A framework's loop without brimful and with it."""

    alone: Callable[[Run], None]
    planned: Callable[[Run], None]


FRAMEWORKS = {
    "Transformers Trainer": Pair(alone=transformers_alone, planned=transformers_planned),
    "Lightning Trainer": Pair(alone=lightning_alone, planned=lightning_planned),
    "Lightning Fabric": Pair(alone=fabric_alone, planned=fabric_planned),
    "Accelerate": Pair(alone=accelerate_alone, planned=accelerate_planned),
    "PyTorch, bf.prepare": Pair(alone=pytorch_alone, planned=pytorch_prepared),
    "PyTorch, bf.apply": Pair(alone=pytorch_alone, planned=pytorch_applied),
}


class TrainerWatch(TrainerCallback):
    """Reports a Transformers trainer's steps to a run."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run.begin(kwargs["model"], kwargs["optimizer"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run.end(None, self._run.batch)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        if "loss" in logs:
            self._run.losses.append(logs["loss"])


class Module(lightning.LightningModule):
    """The model as a Lightning module, which reports its steps to a run."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.model = run.model()
        self._run = run

    def training_step(self, batch: dict[str, Tensor], _index: int) -> Tensor:
        return loss_of(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)

    def on_train_batch_start(self, _batch: Any, _index: int) -> None:
        self._run.begin(self, self.trainer.optimizers[0])

    def on_train_batch_end(self, outputs: dict[str, Tensor], batch: Any, _index: int) -> None:
        self._run.end(outputs["loss"], batch, scale=self.trainer.accumulate_grad_batches)
