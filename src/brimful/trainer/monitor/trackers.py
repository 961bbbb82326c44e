"""Callbacks that log a run to TensorBoard or Weights & Biases, on the first rank only."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brimful.distributed.ranks import current_rank
from brimful.errors import UsageError
from brimful.results import EpochRecord, StepRecord, TrainingResult, ValidationRecord
from brimful.trainer.monitor.callbacks import Callback

if TYPE_CHECKING:
    from brimful.trainer.trainer import Trainer


class _Tracker(Callback):
    """Logs the numbers of each record. If a tracker fails, it warns and stops; training continues."""

    _has_failed = False
    _next_rates: tuple[float | None, ...] = ()
    """The learning rates of the groups after the latest step, which are those of the next."""

    def on_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Log the loss, gradient norm, learning rates, times and speed of a step."""
        self._try(record.step, lambda: self._track_step(trainer.optimizer.param_groups, record))

    def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
        """Log the time and the peak memory of an epoch, as far as they are known."""
        self._try(record.step, lambda: self._track(_of_epoch(record), record.step))

    def on_validation(self, trainer: Trainer, record: ValidationRecord) -> None:
        """Log the validation loss and the job's metrics."""
        values = {"loss": record.loss, **record.metrics}
        named = {f"validation/{name}": value for name, value in values.items()}
        self._try(record.step, lambda: self._track(named, record.step))

    def on_end(self, trainer: Trainer, result: TrainingResult | None) -> None:
        """Flush and close the log."""
        self._next_rates = ()
        if self._has_failed:
            with suppress(Exception):  # the failure is reported already
                self._close(result)
        self._try(None, lambda: self._close(result))

    def _track_step(self, groups: Sequence[Mapping[str, Any]], record: StepRecord) -> None:
        rates = _rates(groups, record, self._next_rates)
        self._next_rates = tuple(_rate(group) for group in groups)
        self._track(_of_step(record, rates), record.step)

    def _track(self, values: Mapping[str, float], step: int) -> None:
        raise NotImplementedError

    def _close(self, result: TrainingResult | None) -> None:
        raise NotImplementedError

    def _try(self, step: int | None, log: Callable[[], None]) -> None:
        """Log on the first rank, unless that failed before; `metrics.jsonl` has the same numbers."""
        if self._has_failed or current_rank() != 0:
            return
        try:
            log()
        except Exception as error:  # a full disk, a server that does not answer, a key that is missing
            self._has_failed = True
            reason = str(error).partition("\n")[0]
            since = "at the end of the run" if step is None else f"from step {step} on"
            warnings.warn(
                f"{type(self).__name__} failed, so nothing is logged to it {since}; training continues. "
                f"{type(error).__name__}: {reason}",
                stacklevel=4,
            )


class TensorBoard(_Tracker):
    """Writes event files for `tensorboard --logdir`. Needs the package tensorboard.

    A run resumed with the same directory replaces the events after its save.

    Args:
        log_dir: The directory of the event files; created if it does not exist.

    Raises:
        UsageError: The package is not installed.
    """

    def __init__(self, log_dir: Path | str) -> None:
        self._make_writer = _find("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._log_dir = str(log_dir)
        self._writer: Any = None

    def _close(self, result: TrainingResult | None) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _track(self, values: Mapping[str, float], step: int) -> None:
        if self._writer is None:
            self._writer = self._make_writer(self._log_dir, purge_step=step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)


class WandB(_Tracker):
    """Logs to Weights & Biases. Needs the package wandb and, unless `mode="offline"`, an account.

    To continue the same W&B run after resuming, pass `id` and `resume="allow"`.

    Args:
        project: The name of the project.
        **options: Options of `wandb.init`: name, mode, config, id, resume, …

    Raises:
        UsageError: The package is not installed.
    """

    def __init__(self, project: str, **options: Any) -> None:
        self._init = _find("wandb", "wandb").init
        self._options = {"project": project} | options
        self._run: Any = None

    def _close(self, result: TrainingResult | None) -> None:
        """Finish the W&B run, as failed if an error ended this one."""
        if self._run is not None:
            self._run.finish(exit_code=int(result is None))
            self._run = None

    def _track(self, values: Mapping[str, float], step: int) -> None:
        if self._run is None:
            self._run = self._init(**self._options)
        self._run.log(dict(values), step=step)


def _rates(
    groups: Sequence[Mapping[str, Any]], record: StepRecord, before: tuple[float | None, ...]
) -> dict[str, float | None]:
    """The learning rates of a step, by name; None for one that is not known.

    There is one name if all groups have the same rate. The rates in `groups` are those of the next step: a
    scheduler has stepped. `record` has the rate of the first group. `before` has the rates of the groups before
    the step, and is empty in the first step of a launch: then the rates of further groups are known only
    without a scheduler, which sets `initial_lr`.
    """
    initial = {_rate(group, "initial_lr" if "initial_lr" in group else "lr") for group in groups}
    if len(initial) == 1 and len(set(before)) <= 1 and len({_rate(group) for group in groups}) == 1:
        return {"learning_rate": record.learning_rate}
    if len(before) != len(groups):
        before = tuple(None if "initial_lr" in group else _rate(group) for group in groups)
    return {f"learning_rate_{number}": rate for number, rate in enumerate((record.learning_rate, *before[1:]))}


def _rate(group: Mapping[str, Any], name: str = "lr") -> float | None:
    rate = group.get(name)
    return None if rate is None else float(rate)


def _of_step(record: StepRecord, rates: Mapping[str, float | None]) -> dict[str, float]:
    values: dict[str, float | None] = {
        "loss": record.loss,
        "gradient_norm": record.gradient_norm,
        "epoch": record.epoch,
        "step_seconds": record.seconds,
        "data_seconds": record.data_seconds,
        "samples_per_second": record.samples / record.total_seconds,
        "terms_per_second": record.terms / record.total_seconds,
        "mfu": record.mfu,
        **rates,
    }
    return {f"train/{name}": value for name, value in values.items() if value is not None}


def _of_epoch(record: EpochRecord) -> dict[str, float]:
    values = {
        "seconds": record.seconds,
        "peak_allocated_bytes": record.measured_peak_allocated_bytes,
        "peak_reserved_bytes": record.measured_peak_reserved_bytes,
        "peak_device_bytes": record.measured_peak_device_bytes,
    }
    return {f"epoch/{name}": value for name, value in values.items() if value is not None}


def _find(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(
            f"{package} cannot be imported ({error}). Install it: pip install {package}."
        ) from error
