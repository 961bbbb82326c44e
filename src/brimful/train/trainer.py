"""The training loop: epochs, validation, saving, and ending well."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from brimful.batches import count_samples
from brimful.certificate import Certificate
from brimful.coupled import check_coupled
from brimful.errors import (
    BrimfulError,
    CertificateError,
    DataError,
    HalfUpdatedError,
    NonFiniteError,
    ResumeError,
    UsageError,
)
from brimful.job import Batch, Data, Job
from brimful.local import build_model, choose_device, device_name, set_up_allocator
from brimful.measuring import certify_model
from brimful.optimizers import make_optimizer
from brimful.planning import Plan
from brimful.report.feeding import feeding_lines
from brimful.settings import Settings, settings_from_json, settings_to_json
from brimful.step import matmul_precision
from brimful.train.averaging import MovingAverage
from brimful.train.callbacks import Callback
from brimful.train.data import Batches, check_validation, data_loading, find_data
from brimful.train.interrupts import stops_on_signals
from brimful.train.journal import Journal
from brimful.train.lowering import Lowering
from brimful.train.not_finite import has_finite_parameters, step_not_finite, update_not_finite
from brimful.train.out_of_memory import RanOut, make_room, unless_out_of_memory
from brimful.train.parallel import DataParallel, data_parallel
from brimful.train.place import Place
from brimful.train.progress import make_progress, memory_text
from brimful.train.randomness import RandomState, RandomStream, seed_all
from brimful.train.ranks import ALONE, check_ranks, device_here, joined_ranks, rank_here
from brimful.train.relaunch import leave_settings, settings_left
from brimful.train.run_directory import JOB, check_run_directory, clear_begun_run
from brimful.train.saves import SAVES, Save, Saves, newest_save
from brimful.train.schedules import Schedule
from brimful.train.steps import MakeSchedule, NotFiniteStep, Steps
from brimful.train.utilisation import Utilisation
from brimful.train.validation import Validator
from brimful.training import DataLoading, Recovery, StepRecord, StopReason, TrainingResult
from brimful.updating import clipped_in_backward

MEASURED_UPDATE = 3
"""The update whose memory is measured: the first makes the optimizer's state, the second may still warm up."""

STEPS_BEFORE_ADVICE = 50
"""After which is told, once, how much training waits for its data: late enough to know, early enough to act."""


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
            there is none yet, so that a scheduler can give the same command each time.
        save_every: Save after so many steps, beside the end of each epoch and of the run. A run that is killed
            loses the steps since the last save.
        keep_saves: How many saves to keep, the newest.
        epochs: Passes over the training data; 1 if neither this nor `steps` is given.
        steps: Most optimizer steps.
        seed: At least 0.
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
        counts |= {"patience": patience}
        for name, value, least in (*((name, count, 1) for name, count in counts.items()), ("seed", seed, 0)):
            if value is not None and value < least:
                raise UsageError(f"{name} is {value}; it must be at least {least}.")
        for name, is_asked in (("resume", resume), ("save_every", save_every is not None)):
            if is_asked and run_dir is None:
                raise UsageError(f"{name} needs a run_dir, in which saves are.")
        if max_gradient_norm is not None and not max_gradient_norm > 0:
            raise UsageError(f"max_gradient_norm is {max_gradient_norm}; it must be positive.")
        self._job = job
        self._about = _as_read_again(job)
        self._plan = plan if isinstance(plan, Plan) else None
        self._settings = plan.settings if isinstance(plan, Plan) else plan
        check_coupled(job, self._settings)
        if self._settings.step_in_backward and max_gradient_norm is not None:
            raise clipped_in_backward(max_gradient_norm)
        self._data = data
        self._run_dir = None if run_dir is None else Path(run_dir)
        self._resumes = resume
        self._save_every = save_every
        self._keep_saves = keep_saves
        self._most_epochs = 1 if epochs is None and steps is None else epochs
        self._most_steps = steps
        self._seed = seed
        chosen = choose_device(device, None if self._plan is None else self._plan.device_kind)
        self._device = device_here(chosen)
        self._max_gradient_norm = max_gradient_norm
        self._schedule = schedule
        self._ema_decay = ema_decay
        self._corrects_batch_norm = correct_batch_norm
        self._patience = patience
        self._callbacks = tuple(callbacks)
        self._certifies = certifies
        self._shows_progress = show_progress and rank_here() == 0

        self._model: nn.Module | None = None
        self._optimizer: Optimizer | None = None
        self._average: MovingAverage | None = None
        self._certificate: Certificate | None = None
        self._stop_requested = False
        """By a signal or `stop`, at any moment, perhaps on this rank alone."""
        self._is_stopping = False
        """What all ranks have agreed on."""
        self._terminate_requested = self._is_terminated = False
        self._place: Place | None = None
        self._ranks = ALONE
        self._settings_of_save = self._settings
        """With which the run was saved last, or began; a launch may have lowered them since."""
        self._parallel = DataParallel(job)
        self._data_randomness = RandomStream()
        self._utilisation = Utilisation(None, job)
        self._data_loading: DataLoading | None = None
        self._asked_rates: list[Any] = []
        self._before_batch: RandomState | None = None
        """Random numbers of the data before the batch was read that is not trained on yet."""

    @property
    def model(self) -> nn.Module:
        """The model in training, and afterwards the trained one.

        Under FSDP2 and ZeRO's third stage each rank has its part of it, and after `fit` has let go of the other
        ranks the whole is in the run directory's `weights.safetensors` alone.

        Raises:
            UsageError: `fit` has not been called.
        """
        if self._model is None:
            raise UsageError("there is no model before fit() is called.")
        return self._model

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer over the model's parameters.

        Raises:
            UsageError: `fit` has not been called.
        """
        if self._optimizer is None:
            raise UsageError("there is no optimizer before fit() is called.")
        return self._optimizer

    def stop(self) -> None:
        """End the run after the step under way, as Ctrl-C does: the weights are saved, `fit` returns."""
        self._stop_requested = True

    def fit(self) -> TrainingResult:
        """Train until every epoch or step asked for is done, or the run is interrupted.

        Ctrl-C and SIGTERM finish the step under way, save the run and return; the second stops at once. At the
        end of each epoch the run is saved, the model validated and its weights written.

        Returns:
            Every step, every validation, and predicted beside measured.

        Raises:
            UsageError: There are no data, or they, the model or the loss are none.
            RunDirectoryError: The run directory is not empty or cannot be written to.
            ResumeError: No save is whole, or they are of another run.
            CertificateError: The plan does not compute what plain training does; nothing was trained.
            OutOfMemoryError: Memory ran out however little was taken; the run is saved.
            DataError: The training data raised; the run is saved.
            HalfUpdatedError: An error came in an update that could not be finished; the weights are not saved.
            NonFiniteError: The loss or a gradient is NaN or infinite; the step was not taken.
            SaveError: A file could not be written; what was there before stays.
        """
        check_ranks(self._settings.ranks)
        with joined_ranks(self._device) as self._ranks:
            return self._fit()

    def _fit(self) -> TrainingResult:
        self._ranks.wait()  # the first may still be writing what a run before this saved last
        saved = self._newest_save()
        if self._run_dir is not None and saved is None and self._ranks.is_first:
            if self._resumes:
                clear_begun_run(self._run_dir)
            check_run_directory(self._run_dir)
        settings = self._settings if saved is None else self._settings_to_resume(saved)
        self._settings_of_save = settings
        settings, lowered = self._lowered(settings)
        data = find_data(self._job, self._data)
        batches = Batches(
            data.train,
            global_batch_size=settings.global_batch_size,
            seed=self._seed,
            device=self._device,
        )
        if data.validation is not None:
            check_validation(data.validation)
        self._utilisation = Utilisation(self._plan, self._job)
        self._data_loading = data_loading(data.train)
        if self._ranks.is_first:
            batches.tell_small()
        seed_all(self._seed)
        set_up_allocator(settings, self._device)
        built_from = self._job if saved is None else replace(self._job, weights=None)
        self._model = build_model(built_from).to(self._device).train()
        self._certificate = self._certified_by_first(self._model) if saved is None else None
        self._data_randomness = RandomStream()
        if self._ranks.rank:
            seed_all(self._seed, self._ranks.rank)  # dropout is not to be the same on every rank
        parallel = data_parallel(self._job, self._model, settings, self._device, self._ranks)
        if parallel.is_sharded and self._ema_decay is not None:
            raise UsageError("ema_decay is not kept under FSDP2 and ZeRO. Leave it out, or train by DDP.")
        self._parallel = parallel
        if saved is not None:
            saved.load_model(self._model)
        self._average = None if self._ema_decay is None else MovingAverage(self._model, self._ema_decay)
        self._optimizer = parallel.divided(make_optimizer(self._job, self._model, settings))
        self._asked_rates = _rates(self._optimizer, self._schedule)
        self._stop_requested = self._is_stopping = self._terminate_requested = self._is_terminated = False
        self._place = self._before_batch = None
        journal = Journal(
            run_dir=self._run_dir if self._ranks.is_first else None,
            plan=self._plan or self._settings,
            job=self._job,
            progress=make_progress(
                self._total_steps(batches), show=self._shows_progress, counted=self._counted
            ),
            keep_saves=self._keep_saves,
            resumed=saved,
            saves=self._saves_of_parts() if parallel.saves_parts else None,
        )
        steps = Steps(
            job=self._job,
            settings=settings,
            model=self._model,
            optimizer=self._optimizer,
            scheduler=_make_scheduler(self._schedule, self._optimizer, self._total_steps(batches)),
            device=self._device,
            max_gradient_norm=self._max_gradient_norm,
            average=self._average,
            corrects_batch_norm=self._corrects_batch_norm,
            lower=Lowering(self._job, self._plan, self._device),
            on_recovery=journal.add_recovery,
            ranks=self._ranks,
            parallel=parallel,
            hand_over=self._hand_over,
        )
        result: TrainingResult | None = None
        try:
            if saved is not None:
                steps.load_state(saved.state_for(self._optimizer))
                self._check_rates(saved)
            result = self._train(steps, journal, batches, data, saved, lowered)
            return result
        finally:
            steps.close()
            for callback in self._callbacks:
                callback.on_end(self, result)

    def _newest_save(self) -> Save | None:
        if not self._resumes:
            return None
        assert self._run_dir is not None
        is_first = self._ranks.is_first
        return newest_save(
            self._run_dir,
            lambda reason: warnings.warn(reason, stacklevel=4) if is_first else None,
            ranks=self._ranks,
            maps=self._settings.divides_model,
        )

    def _saves_of_parts(self) -> Saves | None:
        """Every rank's own, as each writes what it has of the model and of the optimizer's state."""
        if self._run_dir is None:
            return None
        return Saves(self._run_dir, keep=self._keep_saves, ranks=self._ranks.apart())

    def _lowered(self, settings: Settings) -> tuple[Settings, Recovery | None]:
        """The settings to go on with, where memory ran out on one of the ranks of the launch before this."""
        if self._resumes and self._ranks.are_several:
            assert self._run_dir is not None
            left = settings_left(self._run_dir, settings)
            if left is not None:
                return left
        return settings, None

    def _hand_over(self, after: Settings, recovery: Recovery) -> str:
        """Let the next launch go on with settings that take less."""
        if self._run_dir is None:
            return f"Without a run directory nothing is saved. Train with {after.describe()}."
        leave_settings(self._run_dir, self._settings_of_save, after, recovery)
        return (
            "Launched again with resume, as `torchrun --max-restarts` does, the run goes on from its last save "
            f"in {self._run_dir} with {after.describe()}."
        )

    def _settings_to_resume(self, saved: Save) -> Settings:
        """Those in force when the run was saved, lowered perhaps, unless others are asked for now."""
        asked = settings_from_json(saved.state["asked_settings"])
        for name, before, now in (
            ("seed", saved.state["seed"], self._seed),
            ("global batch size", asked.global_batch_size, self._settings.global_batch_size),
        ):
            if before != now:
                raise ResumeError(
                    f"the run in {self._run_dir} has {name} {before}, and this one {now}: it would not be the "
                    f"same run. Resume with {before}, or begin another in a new run directory."
                )
        if saved.state.get("about") != self._about:
            raise ResumeError(
                f"the run in {self._run_dir} is of a job that says other things about itself in `about` (see "
                f"{JOB} there) than {self._job.name!r} does now; of ready tasks, their files or flags have "
                "changed. Give the same, or begin another run in a new run directory."
            )
        return settings_from_json(saved.state["settings"]) if asked == self._settings else self._settings

    def _check_rates(self, saved: Save) -> None:
        """The optimizer's rates are those that were saved; others that are asked for now would not be taken."""
        before, now = saved.state["asked_rates"], self._asked_rates
        if before != now:
            raise ResumeError(
                f"the run in {self._run_dir} was begun with learning rates and weight decays {before[0]} and "
                f"schedule {before[1]}, and is to go on with {now[0]} and {now[1]}: it would not be the same "
                "run. Resume it as it was begun, or begin another in a new run directory."
            )

    def _certified_by_first(self, model: nn.Module) -> Certificate | None:
        """What the first rank finds; the others wait for it, and end with it."""
        certificate, failure = None, None
        if self._ranks.is_first:
            try:
                certificate = self._certified(model)
            except CertificateError as error:
                failure = error
        told = self._ranks.of_first(None if failure is None else str(failure))
        if told is not None:
            raise failure or CertificateError(told)
        return certificate

    def _certified(self, model: nn.Module) -> Certificate | None:
        """That the plan is the same training; None if there is nothing to compare."""
        settings = self._settings
        is_plain = not settings.changed and settings.chunked_loss is None
        if not self._certifies or (is_plain and settings.gradient_accumulation_steps == 1):
            return None
        certificate = unless_out_of_memory(lambda: certify_model(self._job, settings, model, seed=self._seed))
        if isinstance(certificate, RanOut):
            make_room(self._device)
            warnings.warn(
                "the plan was not compared with plain training, as memory ran out in that: "
                f"{certificate.message}. `brimful plan --certify` compares them on a CPU.",
                stacklevel=3,
            )
            return None
        if not certificate.holds:
            raise CertificateError(
                f"{certificate}\nNothing was trained. If the difference is meant, pass certifies=False."
            )
        return certificate

    def _train(
        self,
        steps: Steps,
        journal: Journal,
        batches: Batches,
        data: Data,
        saved: Save | None,
        lowered: Recovery | None,
    ) -> TrainingResult:
        with journal, matmul_precision(steps.settings.precision), stops_on_signals(self._heed_signal):
            if saved is not None:
                journal.know(*self._ranks.of_first(journal.known()))
                journal.note(f"resumed after step {saved.step} from {saved.path}")
            if lowered is not None:
                journal.add_recovery(lowered)
            try:
                if data.longest is not None:
                    steps.rehearse(_longest(data.longest, steps.settings.global_batch_size))
                stopped_because = self._run_epochs(steps, batches, data.validation, journal, saved)
                self._save_weights(journal, steps)
            except NotFiniteStep as step:
                raise self._not_finite(step.record, journal, steps) from None
            except HalfUpdatedError:
                raise  # what is in the model is not to be saved
            except Exception as error:
                told = _as_data_error(error)
                self._save_what_there_is(told, steps, journal)
                if told is error:
                    raise
                raise told from error
            journal.wait_for_save()
            result = self._result(steps, journal, stopped_because)
            journal.write_result(result)
        return result

    def _run_epochs(
        self, steps: Steps, batches: Batches, validation: Any, journal: Journal, saved: Save | None
    ) -> StopReason:
        validator = None if validation is None else self._validator(validation, steps, journal)
        for place in self._places(saved):
            self._place = place
            if self._has_enough(steps) or self._is_past_the_end(place):
                return StopReason.FINISHED
            for batch, data_seconds in self._loaded(self._batches_from(place, batches, saved)):
                measure = self._is_to_be_measured(batch, steps, self._total_steps(batches))
                record = self._take(steps, place, batch, data_seconds, measure_memory=measure)
                journal.add_step(record, self._memory_text(steps))
                if len(journal.steps) == STEPS_BEFORE_ADVICE:
                    self._advise_on_data(journal)
                for callback in self._callbacks:
                    callback.on_step(self, record)
                self._agree_to_stop()
                if self._save_every is not None and steps.taken % self._save_every == 0:
                    self._save(steps, journal, place)
                if self._is_stopping or self._has_enough(steps):
                    break
            self._agree_to_stop()
            self._save(steps, journal, place)
            if not self._is_stopping and validator is not None:
                self._validate(validator, place.epoch, journal, steps)
                self._agree_to_stop()
            if self._is_stopping:
                return StopReason.TERMINATED if self._is_terminated else StopReason.INTERRUPTED
            self._save_weights(journal, steps)
            if self._patience is not None and journal.validations_without_improvement >= self._patience:
                return StopReason.NOT_IMPROVING
        raise AssertionError("epochs do not end by themselves")

    def _agree_to_stop(self) -> None:
        """Stop where any rank is asked to: all of them at the same point."""
        asked, terminated = self._ranks.sum(self._stop_requested, self._terminate_requested)
        self._is_stopping, self._is_terminated = asked > 0, terminated > 0

    def _take(
        self, steps: Steps, place: Place, batch: Batch, data_seconds: float, *, measure_memory: bool
    ) -> StepRecord:
        """Take a step, and move on in the data if it was taken, even where an error comes after it."""
        before = steps.taken
        try:
            record = steps.take(
                batch, epoch=place.epoch, data_seconds=data_seconds, measure_memory=measure_memory
            )
            return replace(record, mfu=self._utilisation.of(record, batch))
        finally:
            if steps.taken > before:
                place.batches += 1
                self._before_batch = None

    def _places(self, saved: Save | None) -> Iterator[Place]:
        """Where each epoch begins; a resumed one in its midst."""
        first = 1
        if saved is not None:
            place = Place.from_save(saved.state["place"])
            yield place
            first = place.epoch + 1
        for epoch in itertools.count(first):
            yield Place(epoch=epoch, random=self._data_randomness.state)

    def _has_enough(self, steps: Steps) -> bool:
        return self._most_steps is not None and steps.taken >= self._most_steps

    def _is_past_the_end(self, place: Place) -> bool:
        return self._most_epochs is not None and place.epoch > self._most_epochs

    def _batches_from(self, place: Place, batches: Batches, saved: Save | None) -> Iterator[Batch]:
        """The batches of an epoch from a place on."""
        if saved is None or place.epoch != saved.state["place"]["epoch"]:
            with self._data_randomness.drawn_from():
                return batches.epoch(place.epoch)
        self._data_randomness.state = place.random
        with self._data_randomness.drawn_from():
            rest = batches.epoch(place.epoch, skip=place.batches)
        self._data_randomness.state = RandomState.from_save(saved.state["data_random"])
        self._randomness_saved(saved).restore(self._device)
        return rest

    def _randomness_saved(self, saved: Save) -> RandomState:
        """This rank's, as the last step left it."""
        of_ranks = saved.state["random"]
        if self._ranks.count != len(of_ranks):
            warnings.warn(
                f"the run was saved by {len(of_ranks)} ranks and goes on with {self._ranks.count}: dropout "
                "draws other numbers than it would have.",
                stacklevel=2,
            )
        if self._ranks.rank >= len(of_ranks):
            seed_all(self._seed + saved.step, self._ranks.rank)
            return RandomState.now(self._device)
        return RandomState.from_save(of_ranks[self._ranks.rank])

    def _save_what_there_is(self, error: Exception, steps: Steps, journal: Journal) -> None:
        """Save the run as the last step left it, before an error ends it, and add to the error where it is."""
        if self._place is None or steps.taken == 0 or self._run_dir is None or self._ranks.are_several:
            return  # of several ranks one may not answer any more
        try:
            self._save(steps, journal, self._place)
            journal.wait_for_save()
            self._save_weights(journal, steps)
        except Exception as failure:  # not to take the place of the error that ends the run
            error.add_note(f"Saving after it failed as well: {type(failure).__name__}: {failure}")
        else:
            error.add_note(
                f"The run is saved after step {steps.taken}; resuming {self._run_dir} goes on there."
            )

    def _save(self, steps: Steps, journal: Journal, place: Place) -> None:
        """Save all that the run needs to go on, unless NaN or infinity is in it."""
        is_saved = self._run_dir is None or journal.saved_run_step == steps.taken
        if is_saved or not self._is_finite():
            return
        data_random = self._before_batch or self._data_randomness.state
        state = steps.state() | {
            "random": self._ranks.gather(RandomState.now(self._device).to_save()),
            "data_random": data_random.to_save(),
            "asked_settings": settings_to_json(self._settings),
            "seed": self._seed,
            "about": self._about,
            "asked_rates": self._asked_rates,
            "place": place.to_save(),
        }
        whole = self.model if self._parallel.saves_parts else self._whole_model()
        journal.save(whole, steps.taken, state)

    def _is_finite(self) -> bool:
        """Whether no rank has a parameter that is NaN or infinite."""
        return not self._ranks.any(not has_finite_parameters(self.model))

    def _whole_model(self) -> nn.Module:
        """The model, or what of it can be saved where each rank has a part; all ranks ask together."""
        folder = self._run_dir / SAVES if self._run_dir is not None and self._ranks.is_first else None
        return self._parallel.whole_model(self.model, folder)

    def _loaded(self, batches: Iterator[Batch]) -> Iterator[tuple[Batch, float]]:
        """The batches, until a stop is requested, each with the seconds that were waited for it.

        All ranks go on with a batch or none does: a signal reaches a DataLoader's workers too, and then one
        rank may miss its worker before the others have heard of it.
        """
        while True:
            start = time.perf_counter()
            self._before_batch = self._data_randomness.state
            batch, failure = None, None
            try:
                with self._data_randomness.drawn_from():
                    batch = next(batches, None)
            except Exception as error:
                failure = error
            failed, stopped, ended = self._ranks.sum(
                failure is not None, self._stop_requested, failure is None and batch is None
            )
            if stopped or ended == self._ranks.count:
                return
            if isinstance(failure, BrimfulError):
                raise failure
            if failure is not None:
                raise DataError(
                    f"the training data failed after {_of(self._place)}: {type(failure).__name__}: {failure}"
                ) from failure
            if failed or ended:
                raise DataError(
                    f"after {_of(self._place)} the training data failed on {failed:.0f} of {self._ranks.count} "
                    f"ranks, and ended on {ended:.0f}. Every rank must read the same batches."
                )
            yield batch, time.perf_counter() - start

    def _validator(self, validation: Any, steps: Steps, journal: Journal) -> Validator:
        return Validator(
            self.model,
            self._job,
            validation,
            micro_batch_size=steps.settings.micro_batch_size,
            global_batch_size=steps.settings.global_batch_size,
            device=self._device,
            on_recovery=journal.add_recovery,
            ranks=self._ranks,
            parallel=self._parallel,
            fetching=self._data_randomness.drawn_from,
        )

    def _validate(self, validator: Validator, epoch: int, journal: Journal, steps: Steps) -> None:
        self._ranks.take_buffers_of_first(self.model)
        with self._averaged():
            record = validator.run(
                steps.settings.precision,
                step=steps.taken,
                epoch=epoch,
                is_stopped=lambda: self._stop_requested,
            )
            if record is None:
                return
            is_saved = self._run_dir is not None and journal.is_best(record)
            journal.add_validation(record, self._whole_model() if is_saved else self.model)
        for callback in self._callbacks:
            callback.on_validation(self, record)

    def _averaged(self) -> AbstractContextManager[None]:
        """Within, the model has the average for its parameters, if one is kept."""
        return nullcontext() if self._average is None else self._average.in_place()

    def _save_weights(self, journal: Journal, steps: Steps) -> None:
        """Save the weights as the last step left them, unless it left NaN or infinity in them."""
        self._ranks.take_buffers_of_first(self.model)  # the others' are of their own samples
        if not self._is_finite():
            raise update_not_finite(steps.taken, self._settings, _saved_weights(journal))
        if self._run_dir is not None:
            journal.save_weights(self._whole_model(), steps.taken)
        if self._average is not None:
            with self._averaged():
                journal.save_average(self.model, steps.taken)

    def _not_finite(self, record: StepRecord, journal: Journal, steps: Steps) -> NonFiniteError:
        """Save the weights from before a step that was not taken, and say where they are."""
        if self._place is not None and steps.taken:
            self._save(steps, journal, self._place)  # before the step is told, which a resumed run takes anew
        journal.add_step(record, self._memory_text(steps))
        if self._is_finite():
            if self._run_dir is not None:
                journal.save_weights(self._whole_model(), steps.taken)
            written = journal.weights_path or "in the model (Trainer.model); without run_dir nothing is written"
            where = f"after step {steps.taken}, {written}"
        else:
            where = _saved_weights(journal)
        return step_not_finite(record, self._settings, self._ranks.of_first(where))  # which alone has written

    def _total_steps(self, batches: Batches) -> int | None:
        """Steps of the whole run; None if the data do not say."""
        by_epochs: float = math.inf
        if self._most_epochs is not None:
            if batches.steps_per_epoch is None:
                return self._most_steps  # the epochs may end the run earlier
            by_epochs = self._most_epochs * batches.steps_per_epoch
        least = min(by_epochs, math.inf if self._most_steps is None else self._most_steps)
        return None if math.isinf(least) else int(least)

    def _is_to_be_measured(self, batch: Batch, steps: Steps, total_steps: int | None) -> bool:
        """Whether the memory of the next step is measured: once, in a steady step on a full batch."""
        measured_update = MEASURED_UPDATE if total_steps is None else min(MEASURED_UPDATE, total_steps)
        is_steady = steps.updates >= max(measured_update - 1, 1)
        return steps.peak is None and is_steady and count_samples(batch) >= self._full_samples

    @property
    def _full_samples(self) -> int:
        """Samples that bring a step to its peak: a second micro-batch, run beside the gradients of a first; all
        where the loss couples them."""
        of_rank = self._settings.rank_batch_size
        if self._job.embed is None:
            of_rank = min(of_rank, 2 * self._settings.micro_batch_size)
        return of_rank * self._ranks.count

    def _memory_text(self, steps: Steps) -> str:
        budget_bytes = None if self._plan is None else self._plan.budget_bytes
        if self._device.type == "cuda":
            # what the process holds of the device, as the budget means it, but for the context
            return memory_text(torch.cuda.max_memory_reserved(self._device), budget_bytes)
        if steps.peak is not None:
            return memory_text(steps.peak.allocated_bytes, budget_bytes)
        predicted_bytes = None if self._plan is None else self._plan.predicted_peak_allocated_bytes
        return memory_text(predicted_bytes, budget_bytes, predicted=True)

    def _advise_on_data(self, journal: Journal) -> None:
        on_gpu = self._device.type == "cuda"
        for label, line in feeding_lines(journal.steps, self._data_loading, on_gpu=on_gpu):
            journal.note(f"{label}  {line}")

    @property
    def _counted(self) -> str | None:
        return None if self._job.count is None else self._job.counted

    def _heed_signal(self, number: signal.Signals) -> None:
        self._terminate_requested = number is signal.SIGTERM
        self.stop()
        if self._shows_progress:
            # not print: a signal may come in the middle of one
            os.write(2, b"\nEnding after this step; the weights are saved. Once more to stop at once.\n")

    def _result(self, steps: Steps, journal: Journal, stopped_because: StopReason) -> TrainingResult:
        plan, peak = self._plan, steps.peak
        return TrainingResult(
            job=self._job.name,
            device=device_name(self._device),
            settings=steps.settings,
            stopped_because=stopped_because,
            steps=tuple(journal.steps),
            validations=tuple(journal.validations),
            budget_bytes=None if plan is None else plan.budget_bytes,
            predicted_peak_allocated_bytes=None if plan is None else plan.predicted_peak_allocated_bytes,
            measured_peak_allocated_bytes=None if peak is None else peak.allocated_bytes,
            predicted_peak_reserved_bytes=None if plan is None else plan.predicted_peak_reserved_bytes,
            measured_peak_reserved_bytes=None if peak is None else peak.reserved_bytes,
            predicted_peak_device_bytes=None if plan is None else plan.predicted_peak_device_bytes,
            measured_peak_device_bytes=None if peak is None else peak.device_bytes,
            predicted_step_seconds=None if plan is None else plan.predicted_step_seconds,
            measured_step_seconds=_steady_seconds(journal.steps, self._settings.global_batch_size),
            temporaries_at_peak=() if peak is None else peak.temporaries_at_peak,
            certificate=self._certificate,
            recoveries=tuple(journal.recoveries),
            run_dir=self._run_dir,
            counted=self._counted,
            predicted_mfu=None if plan is None else plan.predicted_mfu,
            data_loading=self._data_loading,
        )


def _make_scheduler(
    schedule: Schedule | MakeSchedule | None, optimizer: Optimizer, total_steps: int | None
) -> LRScheduler | None:
    if isinstance(schedule, Schedule):
        if total_steps is None:
            raise UsageError(
                f"the schedule {schedule.name!r} is over the steps of the run, and the data do not say how "
                "many batches an epoch has. Say `steps`."
            )
        return schedule.make(optimizer, total_steps)
    scheduler = None if schedule is None else schedule(optimizer)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UsageError(
            "ReduceLROnPlateau is stepped with a metric, not once per optimizer step. "
            "Step it yourself in a Callback's on_validation."
        )
    return scheduler


def _as_data_error(error: Exception) -> Exception:
    """A dead DataLoader worker is told by a signal, in the middle of whatever runs; its error is one of the
    data."""
    if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker"):
        return DataError(f"the training data failed: {error}")
    return error


def _of(place: Place | None) -> str:
    return "none" if place is None else f"{place.batches} batches of epoch {place.epoch}"


def _as_read_again(job: Job) -> Any:
    """What a job says about itself, as it is in a file."""
    try:
        return json.loads(json.dumps(job.about))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{job.name}: `about` cannot be written as JSON: {error}.") from error


def _rates(optimizer: Optimizer, schedule: Schedule | MakeSchedule | None) -> list[Any]:
    """What was asked of the learning rate and the decay, before a schedule changes it."""
    of_groups = [
        [float(group[name]) for name in ("lr", "weight_decay") if group.get(name) is not None]
        for group in optimizer.param_groups
    ]
    return [of_groups, str(schedule) if isinstance(schedule, Schedule) else None]


def _longest(longest: Batch | Callable[[int], Batch], samples: int) -> Batch:
    return longest(samples) if callable(longest) else longest


def _saved_weights(journal: Journal) -> str:
    if journal.saved_step is None:
        return "none were saved before"
    return f"after step {journal.saved_step}, {journal.weights_path}"


def _steady_seconds(records: Sequence[StepRecord], global_batch_size: int) -> float | None:
    """Median over the steps with a full batch, but for the first and the one whose memory was measured."""
    steady = [record for record in records[1:] if record.updated and not record.memory_measured]
    full_samples = global_batch_size
    if all(record.samples != full_samples for record in steady):  # a DataLoader with batches of its own size
        full_samples = max((record.samples for record in steady), default=0)
    seconds = [record.seconds for record in steady if record.samples == full_samples]
    return statistics.median(seconds) if seconds else None
