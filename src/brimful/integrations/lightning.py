"""A plan for a Lightning module, carried out by Lightning's `Trainer`.

    import brimful.integrations.lightning as bfl

    plan = bfl.plan(module, loader, budget="11GiB")
    trainer = lightning.Trainer(**bfl.trainer_options(plan), callbacks=[bfl.PlanCallback(plan)])
    trainer.fit(module, bfl.loader(plan, loader))

Private API of Lightning used here: `_AutomaticOptimization._make_closure`, whose closure runs a micro-batch
(checked: lightning 2.6).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from brimful.api import plan as plan_job
from brimful.batches import BatchLayout
from brimful.errors import UsageError
from brimful.execution.in_force import Prepared
from brimful.execution.length_watch import LengthWatch
from brimful.execution.longest_batch import read_notes
from brimful.execution.longest_data import longest_of_data
from brimful.execution.random_state import RandomState
from brimful.job import Batch, Job
from brimful.options import PlanKeywords
from brimful.planner import MEAN_OVER_SAMPLES_NOTE, Plan
from brimful.profiling.named_device import DeviceLike
from brimful.replaced import replace_attribute, replaced
from brimful.results import Recovery

__all__ = ["PlanCallback", "job", "loader", "plan", "trainer_options"]

_PRECISIONS = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
"""Lightning's names. TF32 is a setting of torch: `torch.set_float32_matmul_precision("high")`."""


_MEAN_NOTE = (
    "Lightning averages the losses of micro-batches evenly: training_step's must be a mean over samples. For a "
    "mean over something else, such as tokens that are not ignored, pass micro_batch_size={size} to plan()."
)


_LONGER = "If training has longer ones, plan with a loader of the longest samples"


def job(module: LightningModule, loader: DataLoader[Any]) -> Job:
    """The training job of a module with automatic optimization.

    Args:
        module: Its `training_step` gives the loss, its `configure_optimizers` the optimizer.
        loader: A batch of its largest samples is what is predicted. They are searched for in its dataset, of
            which at most 10,000 samples are read, for at most two seconds; of a stream the first ones.

    Returns:
        The job, for `bf.estimate`, `bf.measure` and `bf.verify`.

    Raises:
        UsageError: The module optimizes manually, or has several optimizers.
    """
    return _job_of(module, _longest_batch(loader)[0])


def _job_of(module: LightningModule, batch: Batch) -> Job:
    if not module.automatic_optimization:
        raise UsageError(
            f"{type(module).__name__} optimizes manually. Use `bf.prepare` in its own loop, and `Job(loop=…)` "
            "to estimate it."
        )

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with _without_logging(model):
            found = model.training_step(batch, 0)  # type: ignore[operator]
        return found["loss"] if isinstance(found, dict) else found

    return Job(
        model=module,
        loss=loss,
        batch=batch,
        optimizer=lambda model: _one_optimizer(model.configure_optimizers(), type(module).__name__),
        name=type(module).__name__,
    )


def plan(
    module: LightningModule,
    loader: DataLoader[Any],
    device: DeviceLike = "auto",
    *,
    global_batch_size: int | None = None,
    world_size: int = 1,
    **options: Unpack[PlanKeywords],
) -> Plan:
    """Find the fastest way to run a module's steps inside a memory budget.

    Args:
        module: As for `job`.
        loader: As for `job`.
        device: As for `brimful.plan`.
        global_batch_size: Samples per optimizer step. Default: those of a batch of the loader in each process.
        world_size: Processes that train together with DDP: the trainer's devices × nodes.
        **options: As for `brimful.plan`.

    Returns:
        The plan, for `trainer_options`, `loader` and `PlanCallback`.

    Raises:
        UsageError: As `job`, or an option is not supported in Lightning.
        InfeasibleError: Nothing permitted fits.
        CaptureError: The step cannot be run on fake tensors.
    """
    for name in ("offload_optimizer", "optimizer_in_backward", "prefetch_inputs"):
        if options.get(name):
            raise UsageError(f"{name}={options[name]!r} is not supported in Lightning.")
    if loader.batch_size is None and global_batch_size is None:
        raise UsageError("the loader has no batch_size of its own. Pass global_batch_size=….")
    size = global_batch_size or (loader.batch_size or 0) * world_size
    asked: PlanKeywords = {**options, "offload_optimizer": False}
    if world_size > 1:
        asked["parallelism"] = "ddp"
    batch, of_lengths = _longest_batch(loader)
    with RandomState.kept():
        found = plan_job(_job_of(module, batch), device, global_batch_size=size, world_size=world_size, **asked)
    of_loss = _MEAN_NOTE.format(size=size // world_size)
    notes = (of_loss if note == MEAN_OVER_SAMPLES_NOTE else note for note in found.notes)
    return replace(found, notes=(*of_lengths, *notes, *_notes_of_few_samples(loader, size)))


def trainer_options(plan: Plan) -> dict[str, Any]:
    """Keyword arguments of `lightning.Trainer` that carry out a plan: accumulation and precision."""
    settings = plan.settings
    return {
        "accumulate_grad_batches": settings.gradient_accumulation_steps,
        "precision": _PRECISIONS[settings.precision.value],
    }


def loader(plan: Plan, loader: DataLoader[Any]) -> DataLoader[Any]:
    """A loader of the same samples in the same order, in the plan's micro-batches.

    Args:
        plan: The plan.
        loader: A loader with a batch size.

    Returns:
        A new loader with the sampler, the collate function and the workers of the given one.
    """
    if not isinstance(loader.batch_sampler, BatchSampler):
        raise UsageError("the loader has no batch_size of its own: make its micro-batches yourself.")
    return DataLoader(
        loader.dataset,
        batch_size=plan.settings.micro_batch_size,
        sampler=None if isinstance(loader.dataset, IterableDataset) else loader.sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


class PlanCallback(Callback):
    """Puts a plan's unit actions, memory format and optimizer implementation in force while Lightning trains.

    Gradients are cleared before forward. Lightning clears them after it, when they would add to the peak.

    **Out of memory.** A step in which memory runs out is undone and taken again, once: with the same samples,
    random numbers and buffers. `training_step` runs again for its micro-batches, and logs again. Nothing is
    retried with fp16, with several processes, and in the update of LBFGS or of another library's optimizer,
    which may call Lightning's closure several times.

    Args:
        plan: The plan.
        recover: Whether steps in which memory runs out are retried.
    """

    def __init__(self, plan: Plan, *, recover: bool = True) -> None:
        self.plan = plan
        self.recoveries: tuple[Recovery, ...] = ()
        """Steps in which memory ran out and that were taken again."""
        self._recovers = recover
        self._prepared: Prepared | None = None
        self._lengths = LengthWatch((), BatchLayout())
        self._changes = ExitStack()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the trainer, and apply the plan."""
        wanted = self.plan.settings.gradient_accumulation_steps
        if trainer.accumulate_grad_batches != wanted:
            raise UsageError(
                f"the plan accumulates {wanted} micro-batches, and the trainer "
                f"{trainer.accumulate_grad_batches}. Pass lightning.Trainer(**trainer_options(plan))."
            )
        if trainer.world_size != self.plan.settings.world_size:
            raise UsageError(
                f"the plan is for {self.plan.settings.world_size} processes, and the trainer has "
                f"{trainer.world_size}. Pass world_size={trainer.world_size} to plan()."
            )
        _check_batch_size(self.plan, trainer.train_dataloader)
        optimizer = _one_optimizer(trainer.optimizers, type(pl_module).__name__)
        self._lengths = LengthWatch(self.plan.sample_sizes, BatchLayout(), advice=_LONGER)
        self._prepared = Prepared(self.plan.settings, pl_module, optimizer, watches=self._recovers)
        self._changes.callback(self._prepared.remove)
        if self._recovers:
            self._watch(trainer, self._prepared)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, index: int
    ) -> None:
        """Warn of the first batch that is larger than planned, and clear the last step's gradients."""
        if (larger := self._lengths.larger(batch)) is not None:
            warnings.warn(larger, stacklevel=2)
        if index % trainer.accumulate_grad_batches == 0:
            pl_module.optimizer_zero_grad(trainer.current_epoch, index, trainer.optimizers[0])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore module and optimizer."""
        self._remove()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore module and optimizer."""
        self._remove()

    def _watch(self, trainer: Trainer, prepared: Prepared) -> None:
        """Retry forward and backward of each micro-batch, and clipping."""
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        make_closure, precision = loop._make_closure, trainer.strategy.precision_plugin
        clip = precision.clip_gradients

        def make_retried(*args: Any, **kwargs: Any) -> Any:
            closure = make_closure(*args, **kwargs)
            setattr(closure, "closure", partial(prepared.retry, closure.closure))  # noqa: B010  # a method
            return closure

        def clip_retried(*args: Any, **kwargs: Any) -> None:
            prepared.retry(partial(clip, *args, **kwargs))

        self._changes.callback(replace_attribute(loop, "_make_closure", make_retried))
        self._changes.callback(replace_attribute(precision, "clip_gradients", clip_retried))

    def _remove(self) -> None:
        if self._prepared is not None:
            self.recoveries += self._prepared.recoveries
            self._prepared = None
        self._changes.close()


def _check_batch_size(plan: Plan, loader: Any) -> None:
    """Refuse a loader of other batches than the plan's micro-batches."""
    size, planned = getattr(loader, "batch_size", None), plan.settings.micro_batch_size
    if isinstance(size, int) and size != planned:
        raise UsageError(
            f"the plan runs {planned} samples at a time, and the training loader has batches of {size}. Pass "
            "trainer.fit(module, loader(plan, train_loader))."
        )


@contextmanager
def _without_logging(module: nn.Module) -> Iterator[None]:
    """Within, `self.log` does nothing: without a trainer it would only warn that there is none."""
    if not isinstance(module, LightningModule) or type(module).log is not LightningModule.log:
        yield
        return
    with replaced(module, "log", _log_nothing):
        yield


def _log_nothing(*_args: Any, **_options: Any) -> None:
    """Stands for `self.log`."""


def _notes_of_few_samples(loader: DataLoader[Any], size: int) -> tuple[str, ...]:
    """That no step of an epoch is as large as planned, if the data have too few samples."""
    found = len(loader.dataset) if isinstance(loader.dataset, Sized) else size
    if found >= size:
        return ()
    return (
        f"the loader has {found} samples, fewer than a step's {size}: each epoch is one smaller step. Give the "
        "loader a smaller batch_size, or pass a smaller global_batch_size",
    )


def _longest_batch(loader: DataLoader[Any]) -> tuple[Batch, tuple[str, ...]]:
    """A batch of the largest samples of a loader, and of which sizes it is where they differ."""
    read = longest_of_data(loader, loader.batch_size or 1, BatchLayout())
    if read is None:
        return _first_batch(loader), ()
    return read.batch, read_notes(read, read.high, _LONGER)


def _first_batch(loader: DataLoader[Any]) -> Batch:
    """The first batch; the next iteration has the same order as without this."""
    generator = loader.generator
    state = None if generator is None else generator.get_state()
    try:
        with RandomState.kept():
            return next(iter(loader))
    except StopIteration:
        size = f"batch_size={loader.batch_size}" + (", drop_last=True" if loader.drop_last else "")
        samples = f" of {len(loader.dataset)} samples" if isinstance(loader.dataset, Sized) else ""
        raise UsageError(
            f"the loader ({size}){samples} gives no batch, of which a plan is made. Give it samples, or a "
            "smaller batch_size."
        ) from None
    finally:
        if generator is not None and state is not None:
            generator.set_state(state)


def _one_optimizer(configured: Any, module: str) -> Optimizer:
    """The optimizer of what `configure_optimizers` may return."""
    found = configured
    if isinstance(found, dict):
        found = found["optimizer"]
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], list):
        found = found[0]  # optimizers and schedulers
    if isinstance(found, list | tuple):
        if len(found) != 1:
            raise UsageError(
                f"{module} has {len(found)} optimizers; a plan is for one. Plan each part as a job of its own, "
                "or use `Job(loop=…)` to estimate the whole."
            )
        (found,) = found
    if not isinstance(found, Optimizer):
        raise UsageError(f"configure_optimizers of {module} returned {type(found).__name__}, not an optimizer.")
    return found
