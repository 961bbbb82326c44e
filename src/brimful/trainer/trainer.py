"""What a user says of a run, and what it is told."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from brimful.distributed.ranks import Ranks, check_ranks, current_rank, init_distributed, local_device
from brimful.errors import OutOfMemoryError, UsageError
from brimful.execution.coupled_loss import check_coupled
from brimful.execution.out_of_memory import RanOut, make_room, unless_out_of_memory
from brimful.execution.setup import choose_device
from brimful.execution.update_in_backward import clipped_in_backward
from brimful.job import Data, Job
from brimful.planner import Plan
from brimful.results import LARGEST_SEED, TrainingResult
from brimful.settings import Settings
from brimful.trainer.loop import Run
from brimful.trainer.monitor.callbacks import Callback, Callbacks, check_callbacks
from brimful.trainer.options import Length, Options, Saving, Updating
from brimful.trainer.setup import set_up_run
from brimful.trainer.step.schedules import MakeSchedule, Schedule
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
        data: What to train on; None means the job's own.
        run_dir: A new or empty directory for weights, records and saves; None writes nothing.
        resume: Go on from the newest whole save in `run_dir`, exactly where it was made; from the start if
            there is none yet, so that a scheduler can give the same command each time. Nothing that was trained
            is deleted: weights without saves are refused.
        save_every: Save after so many steps, beside the end of each epoch and of the run. A run that is killed
            loses the steps since the last save.
        keep_saves: How many saves to keep, the newest.
        epochs: Passes over the training data; 1 if neither this nor `steps` is given.
        steps: Most optimizer steps.
        seed: From 0 to 2**64 - 1.
        device: A torch device; None means the GPU if there is one, unless the plan is for a CPU.
        max_gradient_norm: Gradients are scaled down to this norm; None leaves them.
        schedule: A `Schedule` over the steps of the run, which its data or `steps` must say; or what makes one
            from the optimizer. It is stepped once per optimizer step, and not when fp16 gradients overflowed
            and the step was skipped.
        ema_decay: Keep an exponential moving average of the parameters, which an update leaves this part of
            (0.999, say). It is what is validated, and written to `average.safetensors`. It takes as much memory
            as the parameters, which a plan does not count; None keeps none.
        correct_batch_norm: Under accumulation, let running statistics go as far in a step as with one
            micro-batch; what they are over, a micro-batch, stays as it is.
        patience: End the run after so many validations without a lower loss; None ends it at no loss.
        callbacks: Told of each step, each validation and the end.
        certifies: Before the first step, compare loss, gradients and buffers of a few samples under the plan
            with those of plain training, if the plan recomputes or splits anything.
        show_progress: Show how far the run is, on standard error.

    Raises:
        UsageError: An argument is invalid.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan | Settings,
        *,
        data: Data | None = None,
        run_dir: Path | str | None = None,
        resume: bool = False,
        save_every: int | None = None,
        keep_saves: int = 2,
        epochs: int | None = None,
        steps: int | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
        max_gradient_norm: float | None = None,
        schedule: Schedule | MakeSchedule | None = None,
        ema_decay: float | None = None,
        correct_batch_norm: bool = False,
        patience: int | None = None,
        callbacks: Sequence[Callback] = (),
        certifies: bool = True,
        show_progress: bool = True,
    ) -> None:
        counts = {"epochs": epochs, "steps": steps, "save_every": save_every, "keep_saves": keep_saves}
        _check_counts(counts | {"patience": patience}, least=1)
        _check_counts({"seed": seed}, least=0)
        if seed > LARGEST_SEED:
            raise UsageError(f"seed is {seed}; it must be at most {LARGEST_SEED}.")
        for name, is_asked in (("resume", resume), ("save_every", save_every is not None)):
            if is_asked and run_dir is None:
                raise UsageError(f"{name} needs a run_dir, in which saves are.")
        if max_gradient_norm is not None and not max_gradient_norm > 0:
            raise UsageError(f"max_gradient_norm is {max_gradient_norm}; it must be positive.")
        about = _as_read_again(job)
        made = plan if isinstance(plan, Plan) else None
        settings = plan.settings if isinstance(plan, Plan) else plan
        check_coupled(job, settings)
        if settings.optimizer_in_backward and max_gradient_norm is not None:
            raise clipped_in_backward(max_gradient_norm)
        if epochs is None and steps is None:
            epochs = 1
        chosen = choose_device(device, None if made is None else made.device_kind)
        self._options = Options(
            job=job,
            about=about,
            plan=made,
            settings=settings,
            data=data,
            seed=seed,
            device=local_device(chosen),
            length=Length(epochs=epochs, steps=steps, patience=patience),
            saving=Saving(
                run_dir=None if run_dir is None else Path(run_dir),
                resumes=resume,
                every=save_every,
                keep=keep_saves,
            ),
            updating=Updating(
                max_gradient_norm=max_gradient_norm,
                schedule=schedule,
                ema_decay=ema_decay,
                corrects_batch_norm=correct_batch_norm,
            ),
            certifies=certifies,
            shows_progress=show_progress and current_rank() == 0,
        )
        self._callbacks = check_callbacks(callbacks)
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
            CertificateError: The plan does not compute what plain training does; nothing was trained.
            OutOfMemoryError: Memory ran out however little was taken, or outside of a step; says what is saved.
            DataError: The training data raised; the run is saved.
            PartialUpdateError: An update raised and could not be finished; the weights are not saved.
            NonFiniteError: The loss or a gradient is NaN or infinite; the step was not taken.
            SaveError: A file could not be written; what was there before stays.
        """
        check_ranks(self._options.settings.world_size)
        with init_distributed(self._options.device) as ranks:
            found = unless_out_of_memory(partial(self._fit, ranks))
        if isinstance(found, RanOut):
            make_room(self._options.device)
            raise OutOfMemoryError(
                f"memory ran out before the first step or after the last ({found.place}): {found.message}. "
                "What was saved stays. Train where there is more memory, or a smaller model."
            )
        return found

    def _fit(self, ranks: Ranks) -> TrainingResult:
        """Apart from `fit`, so that a run is gone, with what speaks to the other ranks, before they part."""
        run = set_up_run(self._options, ranks)
        self._trained = run.state.model, run.state.optimizer
        self._stop.clear()
        return Run(run, stop=self._stop, callbacks=Callbacks(self, self._callbacks)).train()


def _check_counts(counts: Mapping[str, int | None], *, least: int) -> None:
    for name, count in counts.items():
        if count is not None and count < least:
            raise UsageError(f"{name} is {count}; it must be at least {least}.")


def _as_read_again(job: Job) -> Any:
    """What a job says about itself, as it is in a file."""
    try:
        return json.loads(json.dumps(job.about, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{job.name}: `about` cannot be written as JSON: {error}.") from error
