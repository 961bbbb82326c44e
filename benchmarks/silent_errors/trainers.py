"""Trainers of other libraries: samples, steps, rates and losses with a plan are those without, or refused.

The oracle is the same program without a plan.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

import brimful as bf
from silent_errors.case import Case, Verdict, WrongError

SAMPLES, FEATURES, CLASSES = 108, 16, 4
ROUNDING = 2e-3
"""Of losses and weights after a few steps of AdamW with float32 sums in another order."""


class Rows(Dataset):
    """Features and classes; the first classes are much more frequent."""

    def __init__(self, samples: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(samples, FEATURES, generator=generator)
        self.y = (torch.rand(samples, generator=generator) ** 2 * CLASSES).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.y[index]}


class Stream(IterableDataset):
    """The same rows as a stream."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        rows = Rows()
        return (rows[index] for index in range(len(rows)))


def _texts() -> list[dict[str, list[int]]]:
    """Tokens of unequal numbers."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 17, (SAMPLES,), generator=generator).tolist()
    texts = [torch.randint(1, 32, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": text, "labels": text} for text in texts]


def _pad(samples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)

    def padded(name: str, value: int) -> Tensor:
        return torch.tensor([each[name] + [value] * (longest - len(each[name])) for each in samples])

    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100)}


class Network(nn.Module):
    """A classifier whose forward takes further arguments, as those of transformers do."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(FEATURES, 32), nn.GELU(), nn.Linear(32, CLASSES))
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor | None = None, **_: Any) -> dict[str, Tensor]:
        logits = self.layers(x)
        return {"logits": logits} if labels is None else {"loss": self.loss(logits, labels), "logits": logits}


class Tokens(nn.Module):
    """A model of each next token, whose loss is a sum over the labels of the step divided by their count."""

    def __init__(self, auxiliary: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.auxiliary = nn.Embedding(32, 16), nn.Linear(16, 32), auxiliary

    def forward(
        self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None, **_: Any
    ) -> dict[str, Tensor]:
        logits = self.head(self.embed(input_ids).cumsum(1))
        summed = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        counted = labels.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": summed / counted + self.auxiliary * logits.square().mean(), "logits": logits}


def _trainer(
    model: Callable[[], nn.Module] = Network,
    data: Any = None,
    *,
    kind: Any = None,
    more: Any = None,
    **args: Any,
) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    options: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 16,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    return (kind or transformers.Trainer)(
        model=model(),
        args=transformers.TrainingArguments(**{**options, **args}),
        train_dataset=Rows() if data is None else data,
        **(more or {}),
    )


def _seen(own: Any, **options: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    own.train(**options)
    logged = [each for each in own.state.log_history if "loss" in each]
    return (
        own.state.global_step,
        [each["learning_rate"] for each in logged],
        [each["loss"] for each in logged],
        torch.cat([parameter.detach().flatten() for parameter in own.model.parameters()]),
    )


def _compare(alone: tuple[Any, ...], planned: tuple[Any, ...]) -> None:
    for name, one, other in zip(("steps", "learning rates"), alone, planned, strict=False):
        if one != other:
            raise WrongError(f"{name}: {one} without a plan, {other} with it")
    difference = max((abs(a - b) for a, b in zip(alone[2], planned[2], strict=True)), default=0.0)
    weights = float((alone[3] - planned[3]).abs().max())
    if difference > ROUNDING or weights > 10 * ROUNDING:
        raise WrongError(f"losses differ by {difference:.2g}, weights by {weights:.2g}")


def _as_without(
    make: Callable[[], Any], *, micro: int = 4, must_train: bool = False, **options: Any
) -> Verdict:
    """Train with and without a plan."""
    import brimful.integrations.transformers as bft

    warnings.simplefilter("ignore")
    alone, own = make(), make()
    try:
        plan = bft.plan(own, "cpu", micro_batch_size=micro)
        bft.apply(plan, own, report=False)
        found = _seen(own, **options)
    except bf.BrimfulError as error:
        if must_train:
            raise WrongError(f"refused, though the loss is a mean over samples: {error}") from error
        return Verdict.REFUSED
    _compare(_seen(alone, **options), found)
    return Verdict.RIGHT


# losses


def _weighted(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    return F.cross_entropy(logits, labels, weight=torch.tensor([0.1, 1.0, 5.0, 20.0]))


def _of_outputs(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:  # noqa: ARG001
    return _weighted(outputs["logits"], labels)


def _contrast(logits: Tensor, labels: Tensor) -> Tensor:  # noqa: ARG001
    unit = F.normalize(logits, dim=1)
    return F.cross_entropy(unit @ unit.T / 0.1, torch.arange(len(unit)))


def _focal(logits: Tensor, labels: Tensor) -> Tensor:
    each = F.cross_entropy(logits, labels, reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).sum() / labels.gt(0).sum().clamp(min=1)


def _summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum")


def _centred(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels) + (logits - logits.mean(0)).square().mean()


def _hardest(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none").topk(max(len(labels) // 4, 1)).values.mean()


def _with_loss(loss: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """A trainer class whose `compute_loss` computes this loss."""
    import transformers

    class Own(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            outputs = model(x=inputs["x"])
            found = loss(outputs["logits"], inputs["labels"])
            return (found, outputs) if return_outputs else found

    return Own


def _with_own(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Any]:
    return lambda: _trainer(kind=_with_loss(loss), max_steps=3)


def _of_model(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Any]:
    return lambda: _trainer(partial(Network, loss), max_steps=3)


def _by_function() -> Any:
    return _trainer(more={"compute_loss_func": _of_outputs}, max_steps=3)


def _tokens(auxiliary: float = 0.0) -> Any:
    return _trainer(partial(Tokens, auxiliary), _texts(), more={"data_collator": _pad}, max_steps=3)


LOSSES: dict[str, tuple[Callable[[], Any], bool]] = {
    "class weights in compute_loss": (_with_own(_weighted), False),
    "class weights in compute_loss_func": (_by_function, False),
    "class weights in the model": (_of_model(_weighted), False),
    "in-batch contrast": (_with_own(_contrast), False),
    "focal loss divided by its positives": (_with_own(_focal), False),
    "an auxiliary mean beside a counted sum": (partial(_tokens, 0.5), False),
    "the batch's mean in the loss": (_of_model(_centred), False),
    "the hardest quarter": (_with_own(_hardest), False),
    "control: a plain mean": (_of_model(F.cross_entropy), True),
    "control: a plain mean in compute_loss": (_with_own(F.cross_entropy), True),
    "control: tokens divided by their count": (_tokens, True),
}


def _certificate(make: Callable[[], Any], is_mean: bool) -> Verdict:
    """`bf.verify` of a trainer's job."""
    import brimful.integrations.transformers as bft

    warnings.simplefilter("ignore")
    settings = bf.Settings(micro_batch_size=4, gradient_accumulation_steps=4)
    holds = bf.verify(bft.job(make()), settings, device="cpu").holds
    if holds is not is_mean:
        raise WrongError(
            f"the certificate says {holds}, and the loss of a batch is that of its parts: {is_mean}"
        )
    return Verdict.RIGHT if is_mean else Verdict.REFUSED


# which samples form a step


class Backwards(Sampler):
    """From the last sample, without every fifth."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return (index for index in reversed(range(self.count)) if index % 5)

    def __len__(self) -> int:
        return sum(1 for index in range(self.count) if index % 5)


class OfOneClass(Sampler):
    """Batches of unequal sizes."""

    def __init__(self, labels: Tensor) -> None:
        self.batches = [
            index.tolist() for label in labels.unique() for index in labels.eq(label).nonzero()[:, 0].split(16)
        ]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def _with_sampler() -> Any:
    import transformers

    class Own(transformers.Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return Backwards(SAMPLES)

    return _trainer(kind=Own, dataloader_drop_last=True)


def _with_loader() -> Any:
    import transformers

    class Own(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return DataLoader(
                self.train_dataset,
                batch_sampler=OfOneClass(self.train_dataset.y),
                collate_fn=self.data_collator,
            )

    return _trainer(kind=Own)


def _grouped() -> Any:
    return _trainer(
        Tokens,
        _texts(),
        more={"data_collator": _pad},
        train_sampling_strategy="group_by_length",
        num_train_epochs=1,
    )


def _resumed() -> Verdict:
    """From a checkpoint in the middle of an epoch, which was written without a plan."""
    folder = Path(tempfile.mkdtemp())
    options: dict[str, Any] = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 4}
    first = _trainer(output_dir=str(folder), **options)
    torch.manual_seed(0)
    first.train()
    return _as_without(
        partial(_trainer, **options), must_train=True, resume_from_checkpoint=str(folder / "checkpoint-4")
    )


def _saved_arguments() -> Verdict:
    """`training_args.bin` has the batch size of the user."""
    import brimful.integrations.transformers as bft

    warnings.simplefilter("ignore")
    own = _trainer(max_steps=1)
    bft.apply(bft.plan(own, "cpu", micro_batch_size=4), own, report=False)
    own.train()
    own.save_model()
    saved = torch.load(Path(own.args.output_dir) / "training_args.bin", weights_only=False)
    found = saved.per_device_train_batch_size, saved.gradient_accumulation_steps
    if found != (16, 1):
        raise WrongError(f"saved sizes {found}")
    return Verdict.RIGHT


def _with_plan(make: Callable[[], Any], **options: Any) -> Callable[[], Verdict]:
    return partial(_as_without, make, must_train=True, **options)


SAMPLES_OF_A_STEP: dict[str, Callable[[], Verdict]] = {
    "drop_last": _with_plan(partial(_trainer, dataloader_drop_last=True)),
    "drop_last and accumulation": _with_plan(
        partial(
            _trainer,
            dataloader_drop_last=True,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            num_train_epochs=1,
        ),
        micro=2,
    ),
    "a fraction of an epoch": _with_plan(partial(_trainer, num_train_epochs=1.4, dataloader_drop_last=True)),
    "a stream": _with_plan(partial(_trainer, data=Stream(), max_steps=10)),
    "groups by length": _with_plan(_grouped),
    "a sampler of its own": _with_plan(_with_sampler),
    "a loader with a batch sampler": _with_plan(_with_loader),
    "workers": _with_plan(
        partial(_trainer, dataloader_num_workers=2, dataloader_drop_last=True, num_train_epochs=1)
    ),
    "resumed within an epoch": _resumed,
    "uneven last batches": _with_plan(partial(_trainer, per_device_train_batch_size=10), micro=5),
    "max_steps": _with_plan(partial(_trainer, max_steps=9, dataloader_drop_last=True)),
    "a size that does not divide the last batch": _with_plan(
        partial(_trainer, per_device_train_batch_size=30, dataloader_drop_last=True), micro=10
    ),
    "saved arguments": _saved_arguments,
}


# Lightning


def _module(
    optimizers: Callable[[Any], Any] | None = None, loss: Callable[..., Tensor] = F.cross_entropy
) -> Any:
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(FEATURES, 32), nn.GELU(), nn.Linear(32, CLASSES))
            self.rates: list[float] = []
            self.norms: list[float] = []
            self.validated: list[int] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            found = loss(self.net(batch[0]), batch[1])
            self.log("loss", found, on_step=True, on_epoch=True)
            return found

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("validation", loss(self.net(batch[0]), batch[1]))

        def on_validation_end(self) -> None:
            self.validated.append(self.trainer.global_step)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.rates.append(optimizer.param_groups[0]["lr"])
            self.norms.append(float(self.net[0].weight.grad.norm()))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return optimizer if optimizers is None else optimizers(self, optimizer)

    return Module()


def _loader(**options: Any) -> Any:
    rows = Rows()
    sizes = {} if "batch_sampler" in options else {"batch_size": 16, "shuffle": "sampler" not in options}
    if "generator" not in options and "batch_sampler" not in options:
        options["generator"] = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(rows.x, rows.y), **{**sizes, **options})


class Written:
    """What a logger was given."""

    def __init__(self) -> None:
        from lightning.pytorch.loggers import Logger

        rows: list[Any] = []

        class Keeps(Logger):
            name = version = "kept"

            def log_metrics(self, metrics: Any, step: int | None = None) -> None:
                rows.append((step, {name: round(value, 3) for name, value in metrics.items()}))

            def log_hyperparams(self, *_: Any, **__: Any) -> None:
                pass

        self.rows, self.logger = rows, Keeps()


def _fitted(module: Any, loader: Any, own: dict[str, Any], asked: dict[str, Any]) -> tuple[Any, ...]:
    import lightning

    torch.manual_seed(0)
    written = Written()
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False if asked.get("fast_dev_run") else written.logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 2, **asked, **own},
    )
    rows = Rows(40)
    trainer.fit(module, loader, DataLoader(TensorDataset(rows.x, rows.y), batch_size=20))
    weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    return trainer.global_step, module.rates, module.norms, weights, module.validated, written.rows


def _lightning(
    *,
    micro: int = 4,
    module: Callable[[], Any] = _module,
    loader: Callable[[], Any] = _loader,
    must_train: bool = True,
    **asked: Any,
) -> Verdict:
    import brimful.integrations.lightning as bfl

    warnings.simplefilter("ignore")
    alone = _fitted(module(), loader(), {}, asked)
    own, samples = module(), loader()
    accumulated = asked.get("accumulate_grad_batches", 1)
    more = {} if accumulated == 1 else {"global_batch_size": 16 * accumulated}
    try:
        plan = bfl.plan(own, samples, "cpu", micro_batch_size=micro, **more)
        options = {**bfl.trainer_options(plan), "callbacks": [bfl.PlanCallback(plan)]}
        found = _fitted(own, bfl.loader(plan, samples), options, asked)
    except bf.BrimfulError as error:
        if must_train:
            raise WrongError(f"refused: {error}") from error
        return Verdict.REFUSED
    _compare(alone, found)
    if alone[4] != found[4]:
        raise WrongError(f"validated at {alone[4]} without a plan, at {found[4]} with it")
    if [step for step, _ in alone[5]] != [step for step, _ in found[5]]:
        raise WrongError(
            f"logged at {[row[0] for row in alone[5]]} without a plan, {[row[0] for row in found[5]]}"
        )
    for (_, one), (_, other) in zip(alone[5], found[5], strict=True):
        if one.keys() != other.keys() or any(abs(one[name] - other[name]) > ROUNDING for name in one):
            raise WrongError(f"logged {one} without a plan, {other} with it")
    return Verdict.RIGHT


def _one_cycle(module: Any, optimizer: Any) -> Any:
    steps = int(module.trainer.estimated_stepping_batches)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _by_epochs(module: Any, optimizer: Any) -> Any:
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=module.trainer.max_epochs)
    return [optimizer], [schedule]


def _by_batches(module: Any, optimizer: Any) -> Any:
    steps = module.trainer.num_training_batches
    return {
        "optimizer": optimizer,
        "lr_scheduler": {
            "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / steps)),
            "interval": "step",
        },
    }


def _of_datamodule() -> Verdict:
    """The schedule reads the datamodule's loader."""
    import lightning

    import brimful.integrations.lightning as bfl

    class Data(lightning.LightningDataModule):
        def train_dataloader(self) -> Any:
            return _loader()

    def schedule(module: Any, optimizer: Any) -> Any:
        steps = len(module.trainer.datamodule.train_dataloader()) * 2
        found = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": found, "interval": "step"}}

    warnings.simplefilter("ignore")
    rates = []
    for is_planned in (False, True):
        module, options = _module(schedule), {}
        if is_planned:
            plan = bfl.plan(module, Data().train_dataloader(), "cpu", micro_batch_size=4)
            options = {**bfl.trainer_options(plan), "callbacks": [bfl.PlanCallback(plan)]}
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            **options,
        )
        trainer.fit(module, datamodule=Data())
        rates.append(module.rates)
    if rates[0] != rates[1]:
        raise WrongError(f"learning rates {rates[0]} without a plan, {rates[1]} with it")
    return Verdict.RIGHT


LAST_BATCHES: dict[str, Callable[[], Verdict]] = {
    "drop_last": partial(_lightning, loader=partial(_loader, drop_last=True)),
    "a smaller last batch": _lightning,
    "a smaller last batch, one sample at a time": partial(_lightning, micro=1, max_epochs=1),
    "a batch sampler": partial(
        _lightning, loader=lambda: _loader(batch_sampler=BatchSampler(Backwards(SAMPLES), 16, drop_last=True))
    ),
    "batches of unequal sizes": partial(
        _lightning, loader=lambda: _loader(batch_sampler=OfOneClass(Rows().y)), must_train=False
    ),
    "accumulation and drop_last": partial(
        _lightning, accumulate_grad_batches=2, loader=partial(_loader, drop_last=True), micro=8
    ),
    "class weights": partial(_lightning, module=partial(_module, loss=_weighted), must_train=False),
    "in-batch contrast": partial(_lightning, module=partial(_module, loss=_contrast), must_train=False),
}

COUNTS: dict[str, Callable[[], Verdict]] = {
    "limit_train_batches": partial(_lightning, limit_train_batches=3),
    "a fraction in limit_train_batches": partial(_lightning, limit_train_batches=0.5),
    "overfit_batches": partial(_lightning, overfit_batches=2),
    "val_check_interval": partial(_lightning, val_check_interval=3),
    "a fraction in val_check_interval": partial(_lightning, val_check_interval=0.5),
    "log_every_n_steps": partial(_lightning, log_every_n_steps=2),
    "max_steps": partial(_lightning, max_steps=5, max_epochs=-1),
    "check_val_every_n_epoch": partial(_lightning, check_val_every_n_epoch=2, log_every_n_steps=1),
    "fast_dev_run": partial(_lightning, fast_dev_run=3),
    "clipping": partial(_lightning, gradient_clip_val=0.1),
    "OneCycleLR of estimated_stepping_batches": partial(_lightning, module=partial(_module, _one_cycle)),
    "CosineAnnealingLR of max_epochs": partial(_lightning, module=partial(_module, _by_epochs)),
    "a schedule of num_training_batches": partial(_lightning, module=partial(_module, _by_batches)),
    "a schedule of the datamodule": _of_datamodule,
}


# own loops


def _make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)], nn.Linear(16, CLASSES)
    )


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _own_loop(
    schedule: Callable[[Any, int], Any], *, accelerate: bool, each_part: bool = False, divides: bool = False
) -> Verdict:
    """Compare the learning rates of the updates with those of whole batches, or expect a warning.

    Args:
        schedule: Made of the optimizer and the length of the loader.
        accelerate: Whether the loop is Accelerate's, which steps the schedule with the optimizer.
        each_part: Whether the schedule is stepped after each micro-batch.
        divides: Whether the loop divides batches by brimful.
    """
    data = TensorDataset(torch.randn(128, 16), torch.randint(0, CLASSES, (128,)))
    job = bf.Job(model=_make, loss=_loss, batch=data[:32])

    def rates(plan: Any) -> list[float]:
        model, found = _make(), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer.register_step_pre_hook(lambda own, *_: found.append(round(own.param_groups[0]["lr"], 7)))
        loads_parts = plan is not None and not divides
        loader = DataLoader(data, batch_size=8 if loads_parts else 32)
        own, together = schedule(optimizer, len(loader)), 4 if loads_parts else 1
        if accelerate:
            from accelerate import Accelerator
            from accelerate.state import AcceleratorState, GradientState

            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=together)
            model, optimizer, loader, own = accelerator.prepare(model, optimizer, loader, own)
        prepared = None if plan is None else bf.prepare(plan, model, optimizer)
        for number, batch in enumerate(loader, 1):
            if accelerate and not divides:
                with accelerator.accumulate(model):
                    accelerator.backward(_loss(model, batch))
                    optimizer.step()
                    own.step()
                    optimizer.zero_grad()
                continue
            parts = (
                [(batch, 1 / together)] if prepared is None or not divides else prepared.micro_batches(batch)
            )
            for part, share in parts:
                loss = _loss(model, part) * share
                accelerator.backward(loss) if accelerate else loss.backward()
            if number % together == 0:
                optimizer.step()
                optimizer.zero_grad()
            if number % together == 0 or each_part:
                own.step()
        return found

    plan = bf.plan(job, "cpu", global_batch_size=32, micro_batch_size=8)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = rates(plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = rates(None)
    is_said = any("micro-batch" in str(each.message) for each in said)
    if divides and is_said:
        raise WrongError("a warning, though brimful divides the batches")
    if found == alone:
        return Verdict.RIGHT
    if is_said:
        return Verdict.STATED
    raise WrongError(f"learning rates {alone} without a plan, {found} with it")


def _linear(optimizer: Any, length: int) -> Any:
    from transformers import get_linear_schedule_with_warmup

    return get_linear_schedule_with_warmup(optimizer, 0, length)


def _cosine(optimizer: Any, length: int) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=length)


def _steps(optimizer: Any, length: int) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=max(length // 2, 1))


def _multiplied(optimizer: Any, length: int) -> Any:  # noqa: ARG001
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


SCHEDULES: dict[str, Callable[[], Verdict]] = {
    "linear in Accelerate": partial(_own_loop, _linear, accelerate=True),
    "cosine in Accelerate": partial(_own_loop, _cosine, accelerate=True),
    "linear, stepped with the optimizer": partial(_own_loop, _linear, accelerate=False),
    "cosine, stepped after each micro-batch": partial(_own_loop, _cosine, accelerate=False, each_part=True),
    "StepLR": partial(_own_loop, _steps, accelerate=False),
    "an inverse, stepped after each micro-batch": partial(
        _own_loop, _multiplied, accelerate=False, each_part=True
    ),
    "control: batches divided by brimful": partial(_own_loop, _linear, accelerate=False, divides=True),
    "control: batches divided by brimful in Accelerate": partial(
        _own_loop, _cosine, accelerate=True, divides=True
    ),
}

CASES: tuple[Case, ...] = (
    *(Case("certificates of trainers", name, partial(_certificate, *each)) for name, each in LOSSES.items()),
    *(
        Case("losses of trainers", name, partial(_as_without, make, must_train=is_mean))
        for name, (make, is_mean) in LOSSES.items()
    ),
    Case("losses of trainers", "a sum in compute_loss", partial(_as_without, _with_own(_summed))),
    *(Case("samples of a trainer's step", name, run) for name, run in SAMPLES_OF_A_STEP.items()),
    *(Case("samples of Lightning's step", name, run) for name, run in LAST_BATCHES.items()),
    *(Case("counts of Lightning", name, run) for name, run in COUNTS.items()),
    *(Case("schedules of own loops", name, run) for name, run in SCHEDULES.items()),
)
