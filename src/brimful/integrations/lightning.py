"""A plan for a Lightning module, carried out by Lightning's `Trainer`.

    import brimful.integrations.lightning as bfl

    plan = bfl.plan(module, loader, budget="11GiB")
    trainer = lightning.Trainer(**bfl.trainer_options(plan), callbacks=[bfl.PlanCallback(plan)])
    trainer.fit(module, loader)

Private API of Lightning used here: `_AutomaticOptimization._make_closure`, whose closure runs a micro-batch
(checked: lightning 2.6).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any, Unpack

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from brimful.api.plans import plan_of_trainer
from brimful.batches import BatchLayout, layout_of
from brimful.errors import InfeasibleError, UsageError
from brimful.execution.explained import Expected
from brimful.execution.in_force import Prepared
from brimful.execution.length_watch import LengthWatch
from brimful.execution.longest_batch import read_notes
from brimful.execution.longest_data import longest_of_data
from brimful.execution.out_of_memory import explaining
from brimful.execution.random_state import RandomState
from brimful.integrations.division import Division
from brimful.integrations.lightning_step import DividedBatches
from brimful.integrations.suggestions import for_trainer, infeasible_for_trainer
from brimful.job import Batch, Job
from brimful.options import PlanKeywords
from brimful.planner import MEAN_OVER_SAMPLES_NOTE, Plan
from brimful.profiling.named_device import DeviceLike, resolve_device
from brimful.results import Recovery
from brimful.settings import Settings
from brimful.torch_utils.replaced import replace_attribute, replaced

__all__ = ["PlanCallback", "job", "loader", "plan", "trainer_options"]

_PRECISIONS = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
"""Lightning's names of precisions. TF32 is a setting of torch: `torch.set_float32_matmul_precision("high")`."""
_PLANNED_PRECISIONS = {"32-true": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16"}
_EPOCHS = 1000
"""Epochs of a trainer without max_epochs. Source: lightning 2.6, `Trainer.__init__`."""


_MEAN_NOTE = (
    "Micro-batches weigh by their samples: training_step's loss must be a mean over samples, which "
    "PlanCallback checks in the first step. For a mean over something else, such as tokens that are not "
    "ignored, pass micro_batch_size={size} to plan()."
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
    return _job_and_lengths(module, loader)[0]


def _job_and_lengths(module: LightningModule, loader: DataLoader[Any]) -> tuple[Job, tuple[str, ...]]:
    """The job of a loader's longest batch, and a note on its sizes where batches differ."""
    if not module.automatic_optimization:
        raise UsageError(
            f"{type(module).__name__} optimizes manually. Use `bf.prepare` in its own loop, and `Job(loop=…)` "
            "to estimate it."
        )

    batch, lengths = _longest_batch(loader)
    return _job(module, batch, lambda: PlanningTrainer(loader)), lengths


def _job(module: LightningModule, batch: Batch, trainer: Callable[[], Trainer]) -> Job:
    """The job of a module; where no trainer trains the module, it is attached to one that `trainer` makes."""
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    attached = cache(trainer)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(model, LightningModule)
        with _attached(model, attached), _without_logging(model):
            found: Any = model.training_step(batch, 0) if takes_index else model.training_step(batch)
        return found["loss"] if isinstance(found, dict) else found

    def optimizer(model: nn.Module) -> Optimizer:
        assert isinstance(model, LightningModule)
        with _attached(model, attached):
            return _one_optimizer(model.configure_optimizers(), type(module).__name__)

    return Job(model=module, loss=loss, batch=batch, optimizer=optimizer, name=type(module).__name__)


_SUGGESTED = {
    "--precision bf16": 'Trainer(precision="bf16-mixed")',
    "--precision fp16": 'Trainer(precision="16-mixed")',
    "--precision tf32": 'torch.set_float32_matmul_precision("high")',
    "--split-batch-norm": "split_batch_norm=True",
    "--world-size 2": "Trainer(devices=2)",
}
"""What asks Lightning for each suggestion; optimizers are the module's own."""


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

    A plan divides each batch of the loader into micro-batches, and joins none.

    Args:
        module: As for `job`.
        loader: As for `job`.
        device: As for `brimful.plan`.
        global_batch_size: Samples per optimizer step: of `accumulate_grad_batches` batches in each process.
            Default: of one batch in each.
        world_size: Processes that train together with DDP: the trainer's devices × nodes.
        **options: As for `brimful.plan`.

    Returns:
        The plan, for `trainer_options` and `PlanCallback`.

    Raises:
        UsageError: As `job`, or an option is not supported in Lightning.
        InfeasibleError: Nothing permitted fits.
        CaptureError: The step cannot be run on fake tensors.
    """
    for name in ("offload_optimizer", "optimizer_in_backward", "prefetch_inputs"):
        if options.get(name):
            raise UsageError(f"{name}={options[name]!r} is not supported in Lightning.")
    own, of_lengths = _job_and_lengths(module, loader)
    of_batch = _batch_size(loader) or layout_of(own).count(own.batch)
    size = global_batch_size or of_batch * world_size
    if size % (of_batch * world_size):
        raise UsageError(
            f"global_batch_size={size} is not a multiple of the loader's batches of {of_batch} samples in "
            f"{world_size} processes, of which a step has accumulate_grad_batches."
        )
    if (options.get("micro_batch_size") or 0) > of_batch:
        raise UsageError(
            f"micro_batch_size={options['micro_batch_size']} is larger than the loader's batches of "
            f"{of_batch}. A plan divides them, and joins none. Give the loader a larger batch_size."
        )
    asked: PlanKeywords = {**options, "offload_optimizer": False}
    if world_size > 1:
        asked["parallelism"] = "ddp"
    check = Division(whole=of_batch, whose="loader").check_planned
    make = partial(plan_of_trainer, own, device, check=check, global_batch_size=size, world_size=world_size)
    try:
        with RandomState.kept():
            found = make(**asked)
            if found.settings.micro_batch_size > of_batch:
                asked["micro_batch_size"] = of_batch
                found = make(**asked)
    except InfeasibleError as error:
        raise infeasible_for_trainer(error, _SUGGESTED) from None
    of_loss = _MEAN_NOTE.format(size=of_batch)
    notes = (of_loss if note == MEAN_OVER_SAMPLES_NOTE else note for note in found.notes)
    suggestions = tuple(for_trainer(found.suggestions, _SUGGESTED))
    all_notes = (*of_lengths, *notes, *_notes_of_few_samples(loader, size))
    return replace(found, suggestions=suggestions, notes=all_notes)


def trainer_options(plan: Plan) -> dict[str, Any]:
    """Keyword arguments of `lightning.Trainer` that carry out a plan: its precision."""
    return {"precision": _PRECISIONS[plan.settings.precision.value]}


def loader(plan: Plan, loader: DataLoader[Any]) -> DataLoader[Any]:  # noqa: ARG001
    """The loader itself, whose batches `PlanCallback` divides where they are trained on.

    Args:
        plan: The plan.
        loader: The loader that was planned for.

    Returns:
        The same loader: its sampler, batches, `drop_last` and length decide the steps with a plan as without.
    """
    return loader


class PlanCallback(Callback):
    """Divides batches into a plan's micro-batches, and puts its unit actions, memory format and optimizer
    implementation in force while Lightning trains.

    A batch of the loader stays one batch for Lightning: `training_step` runs once for each micro-batch, with
    the same `batch_idx`, and what it logs is logged once, as of the whole batch.

    Gradients are cleared before forward. Lightning clears them after it, when they would add to the peak.

    **Out of memory.** A step in which memory runs out is undone and taken again, once: with the same samples,
    random numbers and buffers. `training_step` runs again for its micro-batches. Nothing is retried with fp16,
    with several processes, and in the update of LBFGS or of another library's optimizer, which may call
    Lightning's closure several times.

    Args:
        plan: The plan.
        recover: Whether steps in which memory runs out are retried.
        verify: If the plan divides batches, compare the loss of a few samples with that of their parts before
            the first step: EquivalenceError if they differ, a warning if that cannot be checked.
    """

    def __init__(self, plan: Plan, *, recover: bool = True, verify: bool = True) -> None:
        self.plan = plan
        self.recoveries: tuple[Recovery, ...] = ()
        """Steps in which memory ran out and that were taken again."""
        self._recovers, self._verifies = recover, verify
        self._prepared: Prepared | None = None
        self._lengths = LengthWatch((), BatchLayout())
        self._changes = ExitStack()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the trainer, and apply the plan."""
        if trainer.world_size != self.plan.settings.world_size:
            raise UsageError(
                f"the plan is for {self.plan.settings.world_size} processes, and the trainer has "
                f"{trainer.world_size}. Pass world_size={trainer.world_size} to plan()."
            )
        _check_samples(self.plan, trainer)
        optimizer = _one_optimizer(trainer.optimizers, type(pl_module).__name__)
        self._lengths = LengthWatch(self.plan.sample_sizes, BatchLayout(), advice=_LONGER)
        self._prepared = Prepared(
            self.plan.settings,
            pl_module,
            optimizer,
            watches=self._recovers,
            expected=Expected.of(self.plan),
        )
        self._changes.callback(self._prepared.remove)
        self._divide(trainer, pl_module, self._prepared)

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

    def _divide(self, trainer: Trainer, module: LightningModule, prepared: Prepared) -> None:
        """Run batches in micro-batches; retry forward and backward of each batch, and clipping."""
        loop, settings = trainer.fit_loop.epoch_loop.automatic_optimization, self.plan.settings
        whole = settings.rank_batch_size // trainer.accumulate_grad_batches
        check = partial(_check_first, module, settings, Division(whole=whole, whose="loader"))
        batches = DividedBatches(
            trainer,
            module,
            BatchLayout(),
            size=settings.micro_batch_size,
            whole=whole,
            check=check if self._verifies else None,
        )
        make_closure, precision = loop._make_closure, trainer.strategy.precision_plugin
        clip = precision.clip_gradients

        def make_divided(kwargs: Any, *args: Any) -> Any:
            closure = make_closure(kwargs, *args)
            run: Callable[[], Any] = partial(batches.run, closure, closure.closure, kwargs)
            run = partial(prepared.retry, run) if self._recovers else explaining(Expected.of(self.plan))(run)
            setattr(closure, "closure", run)  # noqa: B010  # a method
            return closure

        def clip_retried(*args: Any, **kwargs: Any) -> None:
            prepared.retry(partial(clip, *args, **kwargs))

        self._changes.callback(replace_attribute(loop, "_make_closure", make_divided))
        if self._recovers:
            self._changes.callback(replace_attribute(precision, "clip_gradients", clip_retried))

    def _remove(self) -> None:
        if self._prepared is not None:
            self.recoveries += self._prepared.recoveries
            self._prepared = None
        self._changes.close()


class PlanAtStart(Callback):
    """Applies a plan that `make` makes of the trainer and its module when they begin to train."""

    def __init__(self, make: Callable[[Trainer, LightningModule], Plan]) -> None:
        self._make = make
        self.applied: PlanCallback | None = None

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Add the callback of the plan, which Lightning then calls too: it goes through the list as it is."""
        self.applied = PlanCallback(self._make(trainer, pl_module))
        trainer.callbacks.append(self.applied)

    def remove(self, trainer: Any) -> None:
        """Remove both callbacks from the trainer."""
        trainer.callbacks[:] = [each for each in trainer.callbacks if each not in (self, self.applied)]


def plan_as_set_up(trainer: Trainer, module: LightningModule, device: str | None, budget: str | None) -> Plan:
    """The plan of what a trainer, which begins to train, is set up for, on its own device or another.

    Raises `UsageError` where a plan cannot take that over.
    """
    if trainer.world_size > 1:
        raise UsageError(
            f"the trainer has {trainer.world_size} processes, each of which would plan by itself. Plan in the "
            f"script: bfl.plan(module, loader, world_size={trainer.world_size})."
        )
    if (precision := _PLANNED_PRECISIONS.get(str(trainer.precision))) is None:
        raise UsageError(
            f'the trainer has precision="{trainer.precision}". Plans are made for '
            f"{', '.join(_PLANNED_PRECISIONS)}."
        )
    loader: Any = trainer.train_dataloader
    if not isinstance(loader, DataLoader):
        raise UsageError(f"the trainer reads a {type(loader).__name__}; a plan is made of one DataLoader.")
    device = device or str(trainer.strategy.root_device)
    is_cuda = resolve_device(device).kind == "cuda"
    if precision == "fp32" and is_cuda and torch.get_float32_matmul_precision() != "highest":
        precision = "tf32"
    of_batch = _batch_size(loader) or BatchLayout().count(_first_batch(loader))
    size = of_batch * trainer.accumulate_grad_batches
    return plan(module, loader, device, budget=budget, precision=precision, global_batch_size=size)


def _batch_size(loader: Any) -> int | None:
    """Samples of a loader's batches; None if only the batches show it."""
    size = getattr(loader, "batch_size", None) or getattr(
        getattr(loader, "batch_sampler", None), "batch_size", None
    )
    return size if isinstance(size, int) else None


def _check_samples(plan: Plan, trainer: Trainer) -> None:
    """Refuse a trainer whose steps have other samples than were planned."""
    size, planned = _batch_size(trainer.train_dataloader), plan.settings.global_batch_size
    wanted, found = trainer.accumulate_grad_batches, (size or 0) * trainer.world_size
    if size is None or found * wanted == planned:
        return
    accumulating, rest = divmod(planned, found)
    way_out = "Plan again with this loader"
    if accumulating and not rest:
        way_out = f"Pass lightning.Trainer(accumulate_grad_batches={accumulating})"
    raise UsageError(
        f"the plan is for {planned} samples a step, and the trainer's steps have {found * wanted}: batches of "
        f"{size} in {trainer.world_size} processes, accumulate_grad_batches={wanted}. {way_out}."
    )


def _check_first(module: LightningModule, settings: Settings, division: Division, batch: Batch) -> bool:
    """Refuse a loss of a batch that is not the mean of the losses of its parts."""
    return division.check_first(_job(module, batch, lambda: module.trainer), module, settings, batch)


class PlanningTrainer(Trainer):
    """Stands for the trainer of a planned module: `configure_optimizers` may read how long it trains.

    It trains for as many epochs as Lightning does by default. A plan does not depend on it.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        said, before = logging.getLogger("lightning.pytorch"), logging.getLogger("lightning.pytorch").level
        said.setLevel(logging.WARNING)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                super().__init__(
                    max_epochs=_EPOCHS,
                    accelerator="cpu",
                    devices=1,
                    logger=False,
                    enable_checkpointing=False,
                    enable_progress_bar=False,
                    enable_model_summary=False,
                )
        finally:
            said.setLevel(before)
        self._loader = loader
        self.datamodule = LightningDataModule()
        self.datamodule.train_dataloader = lambda: loader  # type: ignore[method-assign]

    @property
    def train_dataloader(self) -> DataLoader[Any]:
        """The loader."""
        return self._loader

    @property
    def num_training_batches(self) -> int:
        """Batches of an epoch; of a stream, which has no end, one."""
        try:
            return max(len(self._loader), 1)
        except TypeError:
            return 1

    @property
    def estimated_stepping_batches(self) -> int:
        """Optimizer steps of all epochs."""
        return self.num_training_batches * _EPOCHS


@contextmanager
def _attached(module: LightningModule, trainer: Callable[[], Trainer]) -> Iterator[None]:
    """Attach a trainer to a module that no trainer trains, within the context."""
    if module._trainer is not None or module._fabric is not None:
        yield
        return
    module.trainer = trainer()
    try:
        yield
    finally:
        module.trainer = None


@contextmanager
def _without_logging(module: nn.Module) -> Iterator[None]:
    """Make `self.log` do nothing within the context: without a trainer it would only warn of that."""
    if not isinstance(module, LightningModule) or type(module).log is not LightningModule.log:
        yield
        return
    with replaced(module, "log", lambda *_args, **_options: None):
        yield


def _notes_of_few_samples(loader: DataLoader[Any], size: int) -> tuple[str, ...]:
    """A note that no step of an epoch is as large as planned, if the data have too few samples."""
    found = len(loader.dataset) if isinstance(loader.dataset, Sized) else size
    if found >= size:
        return ()
    return (
        f"the loader has {found} samples, fewer than a step's {size}: each epoch is one smaller step. Give the "
        "loader a smaller batch_size, or pass a smaller global_batch_size",
    )


def _longest_batch(loader: DataLoader[Any]) -> tuple[Batch, tuple[str, ...]]:
    """A batch of a loader's largest samples, and a note on its sizes where batches differ."""
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
    """The only optimizer in what `configure_optimizers` returned; raises `UsageError` without exactly one."""
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
