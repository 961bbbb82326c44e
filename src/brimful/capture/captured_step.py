"""A training step that is recorded as it runs on fake tensors: what is there before it, and the step itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from brimful.batches import InputMover
from brimful.capture.captured_optimizer import CapturedOptimizer
from brimful.capture.compiled import CompiledCode
from brimful.capture.coupling import Coupling
from brimful.capture.marks import mark_batch, mark_gradients, mark_input, mark_model
from brimful.capture.recording.recorder import Recorder
from brimful.capture.repeats import Shortening
from brimful.capture.step_part import ALL_OF_STEP, Seams, StepPart
from brimful.distributed.fsdp import Sharded, check_optimizer
from brimful.execution.executor import StepExecutor, Transfers
from brimful.execution.hooks import StepHooks
from brimful.job import Batch, Job
from brimful.memory import pinned_bytes
from brimful.settings import Settings
from brimful.torch_utils.module_names import plain_namer
from brimful.trace import Category, Phase

DISTINCT_MICRO_BATCHES = 2
"""The first micro-batch makes the gradients, the second adds to them; all further ones repeat the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepObservers:
    """The recorder of a captured step, and what else observes the step."""

    recorder: Recorder
    compiled: CompiledCode
    coupling: Coupling
    shortening: Shortening | None = None
    """Blocks of the model that do not run."""
    part: StepPart = ALL_OF_STEP
    """The part of the step that runs."""


def captured_micro_batches(settings: Settings) -> int:
    """Number of micro-batches of a step that are captured: at most `DISTINCT_MICRO_BATCHES`."""
    return min(settings.gradient_accumulation_steps, DISTINCT_MICRO_BATCHES)


class CapturedStep:
    """A step on fake tensors: making it records what is there before training; `run` records one step.

    `model` is in training mode, with `settings` applied. `move` brings `batch`, one micro-batch, to the device.
    `sharded` is the model as this rank has it under FSDP2; None where it is whole. With `makes_state_first` the
    optimizer makes its state before the first step, so that each step is a steady one; otherwise it makes it in
    the first step, as in training.
    """

    def __init__(
        self,
        job: Job,
        settings: Settings,
        model: nn.Module,
        batch: Batch,
        observers: StepObservers,
        move: InputMover,
        sharded: Sharded | None,
        *,
        makes_state_first: bool,
    ) -> None:
        self._job, self._settings, self._model = job, settings, model
        self._batch, self._sharded = batch, sharded
        self._observers = observers
        self._recorder = recorder = observers.recorder
        self._shards_on_host = settings.offload_parameters and not recorder.host_is_device
        plain_name = plain_namer(model)
        self._names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
        self._reached: set[int] = set()
        """Parameters, by id, that were updated in backward."""

        mark_model(model, recorder, with_parameters=not self._shards_on_host)
        if recorder.host_is_device:
            mark_batch(batch, recorder)
        self._optimizer = CapturedOptimizer(job, settings, model, recorder, shards_on_host=self._shards_on_host)
        if sharded is not None:
            check_optimizer(self._optimizer.optimizer)
        self._executor = StepExecutor(
            job,
            settings,
            model,
            self._optimizer.optimizer,
            device=torch.device("cpu"),
            transfers=Transfers(
                move=move,
                prefetch=None if recorder.host_is_device else partial(_prefetch, move),
                around_host_update=recorder.position.on_host,
                converted=partial(mark_input, recorder),
            ),
        )
        self._mark_staging()
        if observers.part.has_update and makes_state_first:
            self._optimizer.create_state(self._executor.call_update)
        self.seams = Seams(observers.part, model, recorder, self._names)
        """Where the parts of the step meet."""

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, with its state."""
        return self._optimizer.optimizer

    def run(self, step: int) -> None:
        """Run and record one step, whose number counts from 0."""
        self.seams.step_began()
        self._recorder.position.is_on_host = False
        self._recorder.position.enter(Phase.FORWARD, 0, step)
        steps, count = self._settings.gradient_accumulation_steps, captured_micro_batches(self._settings)
        hooks = StepHooks(
            observe=self._observe,
            around_parameter_update=self._around_update,
            loss=None if self._sharded is None else self._sharded_loss,
        )
        # Hooks are made here, as kept ones would be a cycle that holds every fake tensor.
        hooks = self.seams.hooks(hooks)
        self._executor([self._batch] * count, [1 / steps] * count, hooks=hooks, last_repeats=steps - count + 1)
        if self._settings.optimizer_in_backward:
            self._optimizer.drop_state_of_unused(lambda parameter: id(parameter) in self._reached)
        self._optimizer.mark_state()

    def _sharded_loss(self, _model: nn.Module, batch: Batch) -> Tensor:
        assert self._sharded is not None
        return self._sharded.computed(lambda model: self._job.loss(model, batch))

    def _observe(self, phase: Phase, micro_batch: int) -> None:
        with torch._C.DisableTorchFunction():  # modes need not see what is asked of tensors here
            self._enter(phase, micro_batch)

    def _enter(self, phase: Phase, micro_batch: int) -> None:
        """Note what is held where a phase begins."""
        recorder, compiled, coupling = self._recorder, self._observers.compiled, self._observers.coupling
        self._shorten(phase, micro_batch)
        if phase is Phase.FORWARD:
            coupling.begin_forward()
        elif phase is Phase.BACKWARD:
            coupling.end_forward()
        recorder.position.is_on_host = self._shards_on_host and phase is Phase.OPTIMIZER
        compiled.end_backward(recorder)
        if phase is Phase.BACKWARD:
            compiled.begin_backward(self._model, recorder, are_kept_apart=self._settings.optimizer_in_backward)
        if phase is Phase.OPTIMIZER:
            self._note_without_gradient()
            if not self._shards_on_host:
                mark_gradients(self._model, recorder)
            self._optimizer.drop_state_of_unused(lambda parameter: parameter.grad is not None)
            self.seams.backward_ended()
        recorder.position.enter(phase, micro_batch)

    def _note_without_gradient(self) -> None:
        """Note the trainable parameters without a gradient: the optimizer skips them silently."""
        self._recorder.facts.without_gradient = tuple(
            self._names[id(parameter)]
            for parameter in self._model.parameters()
            if parameter.requires_grad and parameter.grad is None and id(parameter) not in self._reached
        )

    def _shorten(self, phase: Phase, micro_batch: int) -> None:
        shortening = self._observers.shortening
        if shortening is not None and phase is Phase.FORWARD and micro_batch == 0:
            shortening.begin(self._model)
        if shortening is not None and phase is Phase.OPTIMIZER:
            shortening.end(self._model, self._recorder)

    @contextmanager
    def _around_update(self, parameter: nn.Parameter) -> Iterator[None]:
        assert parameter.grad is not None
        self._reached.add(id(parameter))
        self._recorder.mark([parameter.grad], Category.GRADIENTS, [self._names[id(parameter)]])
        with self._recorder.position.updating():
            yield

    def _mark_staging(self) -> None:
        """Note the staging memory between device and host, where the optimizer is on the host."""
        if self._executor.on_host is None:
            return
        staging = self._executor.on_host.staging
        self._recorder.facts.host_staging_bytes = sum(pinned_bytes(each.nbytes) for each in staging)
        if self._recorder.host_is_device:
            self._recorder.mark(staging, Category.OPTIMIZER_STATE, ["on the way to the host"] * 2)


def _prefetch(move: InputMover, batch: Batch) -> Callable[[], Batch]:
    coming = [move(batch)]
    return coming.pop
