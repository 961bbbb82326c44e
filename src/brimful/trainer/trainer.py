"""A job, a plan and options → a trained model and a `TrainingResult`."""

from __future__ import annotations

import json
from contextlib import ExitStack
from functools import partial
from typing import Any, Unpack

from torch import nn
from torch.optim import Optimizer

from brimful.distributed.ranks import Ranks, check_ranks, current_rank, init_distributed, local_device
from brimful.errors import OutOfMemoryError, UsageError
from brimful.execution.coupled_loss import check_coupled
from brimful.execution.explained import Expected
from brimful.execution.out_of_memory import RanOut, make_room, unless_out_of_memory
from brimful.execution.random_state import undisturbed
from brimful.execution.setup import choose_device, limit_reserved
from brimful.execution.update_in_backward import clipped_in_backward
from brimful.job import Job
from brimful.options import takes_options
from brimful.planner import Plan, settings_of
from brimful.results import EpochRecord, StepRecord, TrainingResult, ValidationRecord
from brimful.settings import Settings
from brimful.trainer.monitor.callbacks import Hook
from brimful.trainer.options import RunConfig, TrainKeywords, TrainOptions
from brimful.trainer.run.loop import Run
from brimful.trainer.run.stop import Stop
from brimful.trainer.setup import set_up_run


@takes_options(TrainOptions, TrainKeywords)
class Trainer:
    """Trains a job under a plan, and reports predicted beside measured.

    The seed determines the weights, the order of the samples and all random numbers in the steps: two runs that
    differ only in their plan start from the same weights and see the same batches.

    To train on several ranks, launch the script with `torchrun` or `accelerate launch`. Every rank passes the
    same arguments, reads the same global batches and computes its share of each. All ranks must see the run
    directory; the first one writes to it and shows progress.

    Args:
        job: The job to train. A `model` that is a module is trained in place.
        plan: The plan, or plain settings, which come without predictions.
        **options: The fields of `TrainOptions`.

    Raises:
        UsageError: An argument is invalid.
    """

    def __init__(self, job: Job, plan: Plan | Settings, **options: Unpack[TrainKeywords]) -> None:
        asked = TrainOptions(**options)
        made = plan if isinstance(plan, Plan) else None
        settings = settings_of(plan)
        about = _as_read_again(job)
        check_coupled(job, settings)
        if settings.optimizer_in_backward and asked.max_gradient_norm is not None:
            raise clipped_in_backward(asked.max_gradient_norm)
        chosen = choose_device(asked.device, None if made is None else made.device_kind)
        self._config = RunConfig(
            job=job,
            about=about,
            plan=made,
            settings=settings,
            device=local_device(chosen),
            options=asked,
            shows_progress=asked.show_progress and current_rank() == 0,
        )
        self._stop = Stop()
        self._trained: tuple[nn.Module, Optimizer] | None = None
        """Model and optimizer alone: the whole state would keep the data alive."""

    @property
    def model(self) -> nn.Module:
        """The model in training, and afterwards the trained one.

        Under FSDP2 and ZeRO stage 3 each rank has a shard of it. After `fit` the whole model is only in the run
        directory, as `weights.safetensors`.

        Raises:
            UsageError: `fit` has not been called.
        """
        if self._trained is None:
            raise UsageError("there is no model before fit() is called.")
        return self._trained[0]

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer over the model's parameters.

        Raises:
            UsageError: `fit` has not been called.
        """
        if self._trained is None:
            raise UsageError("there is no optimizer before fit() is called.")
        return self._trained[1]

    def stop(self) -> None:
        """End the run after the current step, as Ctrl-C does: the run is saved, and `fit` returns."""
        self._stop.request()

    @undisturbed()
    def fit(self) -> TrainingResult:
        """Train for the requested epochs or steps, or until the run is interrupted.

        At the end of each epoch this saves the run, validates the model and writes its weights. Ctrl-C and
        SIGTERM finish the current step, save the run and return; a second one stops at once.

        Returns:
            Every step, every validation, and predicted beside measured.

        Raises:
            UsageError: There is no data, or the data, the model or the loss cannot be used.
            RunDirectoryError: The run directory is not empty or cannot be written to.
            ResumeError: There is no complete checkpoint, the checkpoints are of another run, or there are
                weights without checkpoints.
            EquivalenceError: The plan does not compute what the baseline does; nothing was trained.
            InfeasibleError: The plan's budget has no room for the average of the weights (`ema_decay`).
            OutOfMemoryError: Memory ran out even with the smallest settings, or outside of a step. The message
                reports what is saved.
            DataError: The training data raised; the run is saved.
            PartialUpdateError: An update raised and could not be completed; the weights are not saved.
            NonFiniteError: The loss or a gradient is NaN or infinite; the step was undone.
            SaveError: A file could not be written; the one before it stays.
        """
        check_ranks(self._config.settings.world_size)
        with init_distributed(self._config.device) as ranks:
            found = unless_out_of_memory(partial(self._fit, ranks))
        if isinstance(found, RanOut):
            make_room(self._config.device)
            raise found.explained(
                OutOfMemoryError(
                    f"memory ran out before the first step or after the last ({found.place}): {found.message}. "
                    "What was saved stays. Train where there is more memory, or a smaller model."
                ),
                Expected.of(self._config.plan),
            )
        return found

    def _fit(self, ranks: Ranks) -> TrainingResult:
        """Set up and train. On return the run is freed, with its process groups, before `fit` closes them."""
        run = set_up_run(self._config, ranks)
        self._trained = run.state.model, run.state.optimizer
        self._stop = Stop()  # one that was requested before does not end this run
        with ExitStack() as ends:
            if (expected := Expected.of(self._config.plan)) is not None:
                ends.callback(limit_reserved(expected.reserved_limit_bytes, run.state.device))
            return Run(run, stop=self._stop, call=self._call_callbacks).train()

    def _call_callbacks(
        self, hook: Hook, record: StepRecord | EpochRecord | ValidationRecord | TrainingResult | None
    ) -> None:
        for callback in self._config.options.callbacks:
            getattr(callback, hook)(self, record)


def _as_read_again(job: Job) -> Any:
    """`Job.about` as it is when read back from JSON."""
    try:
        return json.loads(json.dumps(job.about, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{job.name}: `about` cannot be written as JSON: {error}.") from error
