"""One training step on fake tensors → `Trace`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from traceback import walk_tb
from typing import Any

from torch import nn

from brimful.capture.compiled import CompiledCode
from brimful.capture.corrections import Rule, rules_for
from brimful.capture.libraries import meta_errors_unlogged
from brimful.capture.loss_signature import signature_hint
from brimful.capture.loss_terms import LossTerms
from brimful.capture.missing_kernels import kernel_hint
from brimful.capture.recording.recorder import Recorder
from brimful.capture.recording.update import (
    Gradient,
    PartsDifferError,
    Recorded,
    RecordedPart,
    begin_alike,
)
from brimful.capture.repeats import Shortening
from brimful.capture.session import CaptureSession
from brimful.capture.step_part import StepPart
from brimful.devices import Device
from brimful.errors import BrimfulError, CaptureError
from brimful.execution.coupled_loss import check_coupled
from brimful.job import Batch, Job
from brimful.settings import Settings
from brimful.torch_utils.lines import innermost_line
from brimful.torch_utils.replaced import replaced
from brimful.trace import Guess, Trace, own_checkpoints
from brimful.utils.gc_pause import without_garbage_collection
from brimful.utils.status import report


def capture_step(
    job: Job,
    settings: Settings,
    device: Device,
    *,
    steps: int = 2,
    evaluates: bool = False,
    without: Collection[str] = (),
    guess: Guess = Guess.EXPECTED,
) -> Trace:
    """Run training steps on fake tensors and record their ops and allocations.

    No weights are made and no GPU is needed. Optimizer state is created before the first step, so that every
    step is a steady one; more steps only extend the history of the allocator. A job's own loop runs as it is.

    Args:
        job: Its model, loss, batch and optimizer are used as they are, or its loop.
        settings: Settings of the step; their unit actions are applied to the model.
        device: The target device, whose choice of kernels the capture follows.
        steps: Optimizer steps to run, at least 1.
        evaluates: Also run the loss after the last step, without gradients and in evaluation mode.
        without: Names of corrections to disable.
        guess: Assumption about unknown values that decide sizes, such as a router's choices.

    Returns:
        The trace. It has at most two micro-batches per step, but all micro-batches of a job's own loop, which
        decides their number.

    Raises:
        CaptureError: The step cannot be run on fake tensors; the message names the line where it stopped.
        UnknownNameError: There is no correction of a name in `without`.
        BrimfulError: The job has another error, in its loss, batch or model.
    """
    # On a CPU, tensors of the batch that the loss changes in-place are copied. A first capture finds them, and
    # then the step is captured again.
    written_inputs: frozenset[str] = frozenset()
    cpu_is_device = False
    while True:
        report(f"capturing {settings.describe()}")
        rules = rules_for(device, settings, without)
        if job.loop is None:
            check_coupled(job, settings)
        with _capturing(job, settings) as compiled:
            session = CaptureSession(job, settings, device, rules, guess, compiled, cpu_is_device=cpu_is_device)
            trace, written = session.run(steps, evaluates=evaluates, written_inputs=written_inputs)
        if written == written_inputs and not session.cpu_is_device_after_all:
            return replace(trace, own_checkpoints=own_checkpoints(trace))
        written_inputs, cpu_is_device = written, cpu_is_device or session.cpu_is_device_after_all


def capture_short_step(
    job: Job, settings: Settings, device: Device, shortening: Shortening, *, guess: Guess = Guess.EXPECTED
) -> Trace | None:
    """The trace of one step, from a capture in which some repeated blocks do not run.

    The job has no loop of its own. `settings` are those of the whole step, and `shortening` is used once. The
    trace is what `capture_step` returns for one step; None where the short step does not show it. Raises
    `CaptureError` if the short step cannot be run on fake tensors.
    """
    report(f"capturing {settings.describe()}")
    reduced = shortening.reduced(settings)
    rules = rules_for(device, reduced, ())
    with _capturing(job, settings) as compiled:
        session = CaptureSession(job, reduced, device, rules, guess, compiled, shortening)
        trace, written = session.run(1, evaluates=False, written_inputs=frozenset())
    is_unsure = written or session.cpu_is_device_after_all
    return None if is_unsure else _whole(trace, settings, shortening, rules)


def capture_inference(
    job: Job, settings: Settings, device: Device, run: Callable[[nn.Module, Batch, Recorder], Recorded]
) -> Trace:
    """Record `run(model, batch, recorder)` with the model in evaluation mode, without gradients.

    It returns the part of the record to keep. Raises `CaptureError` if it cannot run on fake tensors.
    """
    report(f"capturing {settings.describe()}")
    rules = rules_for(device, settings, ())
    with _capturing(job, settings) as compiled:
        return CaptureSession(job, settings, device, rules, Guess.EXPECTED, compiled).run_inference(run)


def loss_terms(job: Job, samples: int, device: Device) -> tuple[str, ...]:
    """Descriptions of a loss that is a mean over something other than samples; empty if nothing shows that.

    The loss runs on fake tensors, with the labels of a batch of `samples` samples. Raises `CaptureError` if it
    cannot.
    """
    settings = Settings(micro_batch_size=samples)
    terms = LossTerms(device, settings)
    with _capturing(job, settings) as compiled:
        rules = [*rules_for(device, settings, ()), terms]
        part = StepPart(has_update=False)
        job = replace(job, loop=None)
        CaptureSession(job, settings, device, rules, Guess.EXPECTED, compiled, part=part).run_part()
    return terms.found()


class CapturedModel:
    """Forward and backward of one step, to which the update of any optimizer can be joined.

    `part` is what `session` recorded, and `shortening` has the blocks that did not run.
    """

    def __init__(
        self, session: CaptureSession, part: RecordedPart, rules: list[Rule], shortening: Shortening | None
    ) -> None:
        self._session, self._part, self._rules, self._shortening = session, part, rules, shortening

    @property
    def gradients(self) -> tuple[Gradient, ...]:
        """The gradients that backward made."""
        return self._part.gradients

    def begins_as(self, update: RecordedPart) -> bool:
        """Whether the model before the first forward is that for which an update was captured."""
        return begin_alike(self._part, update)

    def with_update(self, settings: Settings, update: RecordedPart) -> Trace | None:
        """The trace of the whole step, as `capture_step` returns it; None where the two parts do not show it.

        `settings` are those of the whole step. `update` is what the optimizer does under them with these
        gradients.
        """
        shortening = self._shortening
        reduced = settings if shortening is None else shortening.reduced(settings)
        try:
            trace = self._session.joined(reduced, self._part, update)
        except PartsDifferError:
            return None
        if shortening is None:
            return replace(trace, own_checkpoints=own_checkpoints(trace))
        return _whole(trace, settings, shortening, self._rules)


def capture_model(
    job: Job, settings: Settings, device: Device, shortening: Shortening | None = None
) -> CapturedModel | None:
    """Capture forward and backward of one step; None where they depend on the optimizer.

    The job has no loop of its own. `settings` are those of the whole step, and `shortening` is used once.
    Raises `CaptureError` if the step cannot be run on fake tensors.
    """
    report(f"capturing {settings.describe()}")
    reduced = settings if shortening is None else shortening.reduced(settings)
    rules = rules_for(device, reduced, ())
    with _capturing(job, settings) as compiled:
        part = StepPart(has_update=False)
        session = CaptureSession(job, reduced, device, rules, Guess.EXPECTED, compiled, shortening, part)
        recorded = session.run_part()
    return None if recorded is None else CapturedModel(session, recorded, rules, shortening)


def capture_update(
    job: Job, settings: Settings, device: Device, gradients: tuple[Gradient, ...]
) -> RecordedPart | None:
    """Capture the optimizer's part of one step; None where it depends on more than the gradients.

    The job has no loop of its own, and the units of `settings` run nothing here. Raises `CaptureError` if the
    step cannot be run on fake tensors.
    """
    rules = rules_for(device, settings, ())
    with _capturing(job, settings) as compiled:
        part = StepPart(has_model=False, gradients=gradients)
        session = CaptureSession(job, settings, device, rules, Guess.EXPECTED, compiled, part=part)
        return session.run_part()


def _whole(trace: Trace, settings: Settings, shortening: Shortening, rules: list[Rule]) -> Trace | None:
    """The trace with the blocks that did not run; None where the short one does not show that."""
    shortening.counts = {rule.name: rule.counted for rule in rules}
    whole = shortening.whole(trace, settings)
    return None if whole is None else replace(whole, own_checkpoints=own_checkpoints(whole))


@contextmanager
def _capturing(job: Job, settings: Settings) -> Iterator[CompiledCode]:
    """Put in force what every capture needs, and yield what notes compiled code."""
    compiled = CompiledCode()
    with (
        _as_capture_error(job, settings),
        without_garbage_collection(),
        compiled.runs_eagerly(),
        meta_errors_unlogged(),
        _without_deprecation_warnings(),
    ):
        yield compiled


@contextmanager
def _without_deprecation_warnings() -> Iterator[None]:
    """Show no warnings about deprecated code: a real step shows them, and a plan runs the code several times.

    Private Python API used here: `warnings._showwarnmsg` (checked: 3.11).
    """
    shown: Any = warnings._showwarnmsg  # type: ignore[attr-defined]

    def show_others(message: Any) -> None:
        if not issubclass(message.category, (FutureWarning, DeprecationWarning, PendingDeprecationWarning)):
            shown(message)

    try:
        with replaced(warnings, "_showwarnmsg", show_others):
            yield
    finally:
        with warnings.catch_warnings():  # so that Python forgets which it has shown
            pass


@contextmanager
def _as_capture_error(job: Job, settings: Settings) -> Iterator[None]:
    try:
        yield
    except BrimfulError:
        raise
    except Exception as error:
        line = innermost_line(walk_tb(error.__traceback__))
        raise CaptureError(
            f"one step of {job.name!r} cannot be run on fake tensors (micro_batch_size="
            f"{settings.micro_batch_size}): {type(error).__name__}: {error}{f' ({line})' if line else ''}. "
            f"{_hint(job, error)}"
        ) from error


_JAGGED = "Jagged nested tensors cannot be captured. Pad the samples and mask them."
_HINTS = {
    "FlexAttention": "flex_attention cannot be captured. Take F.scaled_dot_product_attention with a mask.",
    "shape_env must not be None": _JAGGED,
    "nested_view_from_jagged": _JAGGED,
}
"""Advice by text of an error: what cannot be captured, and what to use instead."""


def _hint(job: Job, error: Exception) -> str:
    """Advice for an error in a captured step."""
    missing = kernel_hint(error)
    if missing is not None:
        return missing
    if isinstance(error, StopIteration):
        return (
            "Job.batch is called several times, and must give one each time it is called: restart an iterator "
            "that is exhausted, or pass one batch."
        )
    known = (hint for said, hint in _HINTS.items() if said in str(error))
    real = signature_hint(job, error) or (
        "If a real step fails too, which brimful.measure runs, the error is the job's own."
    )
    return next(known, real)
