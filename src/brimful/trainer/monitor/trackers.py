"""Callbacks that hand a run's records to TensorBoard or Weights & Biases, on the first rank alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brimful.distributed.ranks import current_rank
from brimful.errors import UsageError
from brimful.results import StepRecord, TrainingResult, ValidationRecord
from brimful.trainer.monitor.callbacks import Callback

if TYPE_CHECKING:
    from brimful.trainer.trainer import Trainer


class _Tracker(Callback):
    """Logs the numbers of each record. A tracker that fails ends with a warning, and training continues."""

    _has_failed = False

    def on_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Log a step's loss, gradient norm, learning rate, times and speed."""
        if current_rank() == 0:
            self._try(record.step, lambda: self._track(_of_step(trainer, record), record.step))

    def on_validation(self, trainer: Trainer, record: ValidationRecord) -> None:
        """Log the validation loss and the job's metrics."""
        if current_rank() == 0:
            values = {"loss": record.loss, **record.metrics}
            named = {f"validation/{name}": value for name, value in values.items()}
            self._try(record.step, lambda: self._track(named, record.step))

    def on_end(self, trainer: Trainer, result: TrainingResult | None) -> None:
        """Write what is not written yet, and close the log."""
        if self._has_failed:
            with suppress(Exception):  # which may work, and was reported if not
                self._close(result)
        self._try(None, lambda: self._close(result))

    def _track(self, values: Mapping[str, float], step: int) -> None:
        raise NotImplementedError

    def _close(self, result: TrainingResult | None) -> None:
        raise NotImplementedError

    def _try(self, step: int | None, log: Callable[[], None]) -> None:
        """Log, unless an earlier try failed; `metrics.jsonl` has the same numbers."""
        if self._has_failed:
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
    """Writes event files that `tensorboard --logdir` shows. Needs the package tensorboard.

    A run that is resumed with the same directory takes the place of what was written after the save.

    Args:
        log_dir: Where to; is made if it is not there.

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
    """Logs to Weights & Biases. Needs the package wandb and, but for `mode="offline"`, an account.

    To go on with the same run there after resuming, give `id` and `resume="allow"`.

    Args:
        project: The project's name.
        **options: For `wandb.init`: name, mode, config, id, resume, …

    Raises:
        UsageError: The package is not installed.
    """

    def __init__(self, project: str, **options: Any) -> None:
        self._init = _find("wandb", "wandb").init
        self._options = {"project": project} | options
        self._run: Any = None

    def _close(self, result: TrainingResult | None) -> None:
        """Finish the run there, as failed where an error ended this one."""
        if self._run is not None:
            self._run.finish(exit_code=int(result is None))
            self._run = None

    def _track(self, values: Mapping[str, float], step: int) -> None:
        if self._run is None:
            self._run = self._init(**self._options)
        self._run.log(dict(values), step=step)


def _of_step(trainer: Trainer, record: StepRecord) -> dict[str, float]:
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    values: dict[str, float | None] = {
        "loss": record.loss,
        "gradient_norm": record.gradient_norm,
        "epoch": record.epoch,
        "step_seconds": record.seconds,
        "data_seconds": record.data_seconds,
        "samples_per_second": record.samples / record.total_seconds,
        "terms_per_second": record.terms / record.total_seconds,
        "mfu": record.mfu,
    }
    if len(set(rates)) == 1:
        values["learning_rate"] = float(rates[0])
    else:
        values |= {f"learning_rate_{group}": float(rate) for group, rate in enumerate(rates)}
    return {f"train/{name}": value for name, value in values.items() if value is not None}


def _find(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(
            f"{package} cannot be imported ({error}). Install it: pip install 'brimful[{package}]'."
        ) from error
