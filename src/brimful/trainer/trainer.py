"""A job, a plan and options → a trained model and a `TrainingResult`."""

from __future__ import annotations

import json
from functools import partial
from typing import Any, Unpack

from torch import nn
from torch.optim import Optimizer

from brimful.distributed.ranks import Ranks, check_ranks, current_rank, init_distributed, local_device
from brimful.errors import OutOfMemoryError, UsageError
from brimful.execution.coupled_loss import check_coupled
from brimful.execution.out_of_memory import RanOut, make_room, unless_out_of_memory
from brimful.execution.setup import choose_device
from brimful.execution.update_in_backward import clipped_in_backward
from brimful.job import Job
from brimful.planner import Plan
from brimful.results import TrainingResult
from brimful.settings import Settings
from brimful.trainer.loop import Run
from brimful.trainer.monitor.callbacks import Callbacks
from brimful.trainer.options import RunConfig, TrainKeywords, TrainOptions, takes_train_options
from brimful.trainer.setup import set_up_run
from brimful.trainer.stop import Stop


class Trainer:
    """Trains a job as a plan says, and shows predicted beside measured.

    The seed decides the weights, the order of the samples and all randomness in the steps: two runs that differ
    in their plan alone start from the same weights and see the same batches.

    Launched on several ranks, by `torchrun` or `accelerate launch`, each gives the same arguments and reads the
    same global batches, of which it computes its share; the run directory is one that all of them see. The
    first rank writes and is shown.

    Args:
        job: What is trained. A `model` that is a module is trained in place.
        plan: The plan, or plain settings, which predict nothing.
        **options: Those of `TrainOptions`, by name.

    Raises:
        UsageError: An argument is invalid.
    """

    @takes_train_options
    def __init__(self, job: Job, plan: Plan | Settings, **options: Unpack[TrainKeywords]) -> None:
        asked = TrainOptions(**options)
        made = plan if isinstance(plan, Plan) else None
        settings = plan.settings if isinstance(plan, Plan) else plan
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
        """Not the whole state, which holds the data."""

    @property
    def model(self) -> nn.Module:
        """The model in training, and afterwards the trained one.

        Under FSDP2 and ZeRO's third stage each rank has a shard of it. After `fit` the whole model is only in
        the run directory, as `weights.safetensors`.

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
        """End the run after the step under way, as Ctrl-C does: the weights are saved, `fit` returns."""
        self._stop.request()

    def fit(self) -> TrainingResult:
        """Train until every epoch or step asked for is done, or the run is interrupted.

        Ctrl-C and SIGTERM finish the step under way, save the run and return; the second stops at once. At the
        end of each epoch the run is saved, the model validated and its weights written.

        Returns:
            Every step, every validation, and predicted beside measured.

        Raises:
            UsageError: There are no data, or they, the model or the loss are none.
            RunDirectoryError: The run directory is not empty or cannot be written to.
            ResumeError: No save is whole, or they are of another run; or weights are there without saves.
            EquivalenceError: The plan does not compute what plain training does; nothing was trained.
            OutOfMemoryError: Memory ran out however little was taken, or outside of a step; says what is saved.
            DataError: The training data raised; the run is saved.
            PartialUpdateError: An update raised and could not be finished; the weights are not saved.
            NonFiniteError: The loss or a gradient is NaN or infinite; the step was not taken.
            SaveError: A file could not be written; what was there before stays.
        """
        check_ranks(self._config.settings.world_size)
        with init_distributed(self._config.device) as ranks:
            found = unless_out_of_memory(partial(self._fit, ranks))
        if isinstance(found, RanOut):
            make_room(self._config.device)
            raise OutOfMemoryError(
                f"memory ran out before the first step or after the last ({found.place}): {found.message}. "
                "What was saved stays. Train where there is more memory, or a smaller model."
            )
        return found

    def _fit(self, ranks: Ranks) -> TrainingResult:
        """Apart from `fit`, so that a run is gone, with what speaks to the other ranks, before they part."""
        run = set_up_run(self._config, ranks)
        self._trained = run.state.model, run.state.optimizer
        self._stop.clear()
        return Run(run, stop=self._stop, callbacks=Callbacks(self, self._config.options.callbacks)).train()


def _as_read_again(job: Job) -> Any:
    """What a job says about itself, as it is in a file."""
    try:
        return json.loads(json.dumps(job.about, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{job.name}: `about` cannot be written as JSON: {error}.") from error
