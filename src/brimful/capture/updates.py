"""Captures of one job's optimizer, which candidates of a search share.

That forward and backward, joined to a shared update, show the whole step is checked for each job: under the
settings of the first whole capture they must give that trace exactly. If they do not, steps are captured whole.
"""

from __future__ import annotations

from dataclasses import replace

from brimful.capture.recording.update import Gradient, RecordedPart
from brimful.capture.repeats import Shortening, depends_on_ops_alone
from brimful.capture.step import CapturedModel, capture_model, capture_update
from brimful.capture.watched_device import CapturedUpdate, WatchedDevice
from brimful.errors import BrimfulError
from brimful.job import Job
from brimful.settings import Precision, Settings
from brimful.trace import Trace

_WHOLE_CAPTURES = 2
"""Whole captures of a job before the check of the next one: with fewer it takes longer than it saves."""


class SharedUpdates:
    """Captures forward and backward of steps, and the optimizer's update once for all that share it.

    The job has no loop of its own. `like` has the captures of this job on another device: updates are shared
    where the devices do not differ in what they depend on, and short captures need no whole capture before.
    """

    def __init__(self, job: Job, watched: WatchedDevice, like: SharedUpdates | None = None) -> None:
        self._job, self._watched = job, watched
        self._updates: dict[tuple[Settings, tuple[Gradient, ...]], list[CapturedUpdate]] = (
            {} if like is None else like._updates
        )
        self._not_apart: set[Settings] = set() if like is None else like._not_apart
        """Settings of updates that cannot be joined, each with fp32: the precision does not decide that."""
        self._models: dict[tuple[Settings, bool], CapturedModel] = {}
        """Forwards and backwards, by settings and whether all blocks ran."""
        self._first: tuple[Settings, Trace] | None = None
        self._count = 0
        self._permits_short = like is not None
        self._is_exact: bool | None = None
        """Whether a joined step is what a whole capture is; None before that is checked."""

    def learn(self, settings: Settings, trace: Trace) -> None:
        """Count a whole capture of one step, and keep the first to check against."""
        if _can_share(settings) and depends_on_ops_alone(trace):
            self._first = self._first or (settings, trace)
            self._count += 1

    def whole(self, settings: Settings) -> Trace | None:
        """The trace of one step with all blocks; None where the optimizer must run too."""
        if self._is_exact is None and self._first is not None and self._count >= _WHOLE_CAPTURES:
            first, trace = self._first
            self._is_exact = self._captured(first, None) == trace
        return self._captured(settings, None) if self._is_exact else None

    def short(self, settings: Settings, shortening: Shortening) -> Trace | None:
        """The trace of one step in which some blocks do not run; None where the optimizer must run too.

        The caller checks the trace.
        """
        return self._captured(settings, shortening)

    def _captured(self, settings: Settings, shortening: Shortening | None) -> Trace | None:
        is_known = self._first is not None or (shortening is not None and self._permits_short)
        if not is_known or not _can_share(settings) or self._is_not_apart(settings):
            return None
        try:
            model = self._model_of(settings, shortening)
            update = None if model is None else self._update(settings, model)
        except BrimfulError:  # the whole capture has the error to show
            return None
        return None if model is None or update is None else model.with_update(settings, update)

    def _model_of(self, settings: Settings, shortening: Shortening | None) -> CapturedModel | None:
        """Forward and backward; those captured before if only the optimizer differs."""
        key = self._of_model(settings), shortening is None
        if key not in self._models:
            model = capture_model(self._job, settings, self._watched.as_device(), shortening)
            if model is None:
                return None
            self._models[key] = model
        return self._models[key]

    def _of_model(self, settings: Settings) -> Settings:
        """The settings with one optimizer for all that are named; a function may refer to the model."""
        is_named = settings.optimizer is not None or isinstance(self._job.optimizer, str)
        named = "any" if is_named else None
        return replace(settings, optimizer=named, optimizer_implementation=None, offload_optimizer=False)

    def _is_not_apart(self, settings: Settings) -> bool:
        return replace(_of_update(settings), precision=Precision.FP32) in self._not_apart

    def _update(self, settings: Settings, model: CapturedModel) -> RecordedPart | None:
        """The update of a model's gradients; adapters have the same over weights of any type."""
        alone = _of_update(settings)
        known = self._updates.setdefault((alone, model.gradients), [])
        for update in known:
            part = update.on(self._watched.device)
            if part is not None and model.begins_as(part):
                self._watched.follow(update.watched)
                return part
        watched = WatchedDevice(self._watched.device, self._watched.others)
        part = capture_update(
            self._job,
            replace(alone, micro_batch_size=settings.micro_batch_size),
            watched.as_device(),
            model.gradients,
        )
        self._watched.follow(watched)
        if part is None or not model.begins_as(part):
            self._not_apart.add(replace(alone, precision=Precision.FP32))
            return None
        known.append(CapturedUpdate(part, watched))
        return part


def _of_update(settings: Settings) -> Settings:
    """The settings without those that are only the model's.

    Autocast to bf16 is the model's alone. fp16 is not: the update divides gradients by the loss scale.
    """
    return replace(
        settings,
        micro_batch_size=1,
        gradient_accumulation_steps=1,
        precision=Precision.FP32 if settings.precision is Precision.BF16 else settings.precision,
        units=(),
        chunked_loss=None,
        expandable_segments=False,
        prefetch_inputs=False,
    )


def _can_share(settings: Settings) -> bool:
    """Whether the optimizer runs after backward, on gradients of one rank."""
    return settings.world_size == 1 and not settings.optimizer_in_backward
