"""A training step that is recorded as it runs on fake tensors: what is there before it, and the step itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes  # private; checked: torch 2.13

from brimful.batches import InputMover, named_tensors, own_part
from brimful.capture.compiled import CompiledCode
from brimful.capture.coupling import Coupling
from brimful.capture.marks import mark_batch, mark_gradients, mark_model, mark_state
from brimful.capture.recorder import Recorder
from brimful.distributed.fsdp import Sharded, check_optimizer
from brimful.execution.executor import StepExecutor
from brimful.execution.hooks import StepHooks
from brimful.execution.host_optimizer import state_bytes
from brimful.job import Batch, Job
from brimful.memory import pinned_bytes
from brimful.module_names import plain_namer
from brimful.optimizers import make_optimizer
from brimful.settings import Settings
from brimful.trace import Category, Phase

DISTINCT_MICRO_BATCHES = 2
"""The first micro-batch makes the gradients, the second adds to them; all further ones repeat the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepObservers:
    """What follows a captured step."""

    recorder: Recorder
    compiled: CompiledCode
    coupling: Coupling


def captured_micro_batches(settings: Settings) -> int:
    """How many micro-batches of a step are captured."""
    return min(settings.gradient_accumulation_steps, DISTINCT_MICRO_BATCHES)


class CapturedStep:
    """Records what is there before training when it is made; `run` runs and records one step.

    The optimizer makes its state here, by one step with gradients that are never written, so every captured
    step is a steady one. State of parameters that no loss reaches is dropped in the first step: optimizers skip
    parameters without a gradient, so it would never be made.

    Args:
        job: Its optimizer is made here.
        settings: Applied to the model already.
        model: On fake tensors, in training mode.
        batch: A micro-batch on fake tensors.
        observers: Recording.
        move: Brings the micro-batch to the device.
        sharded: The model as this rank has it under FSDP2; None where it is whole.
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
    ) -> None:
        self._job, self._settings, self._model, self._batch, self._sharded = (
            job,
            settings,
            model,
            batch,
            sharded,
        )
        self._observers = observers
        self._recorder = recorder = observers.recorder
        self._shards_on_host = settings.offload_parameters and not recorder.host_is_device
        self._is_on_host = settings.offload_optimizer or self._shards_on_host
        plain_name = plain_namer(model)
        self._names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
        self._reached: set[int] = set()
        """Parameters, by id, that were updated in backward."""

        mark_model(model, recorder, with_parameters=not self._shards_on_host)
        if recorder.host_is_device:
            mark_batch(batch, recorder)
        with recorder.on_host() if self._is_on_host else nullcontext():  # some make state at once
            self._optimizer = _make_optimizer(job, model, settings)
        if sharded is not None:
            check_optimizer(self._optimizer)
        self._executor = StepExecutor(
            job,
            settings,
            model,
            self._optimizer,
            device=torch.device("cpu"),
            move=move,
            prefetch=None if recorder.host_is_device else partial(_prefetch, move),
            around_host=recorder.on_host,
        )
        self._mark_staging()
        with recorder.on_host() if self._shards_on_host else nullcontext():
            self._made_early = self._create_state()

    def run(self, step: int) -> None:
        """Run and record one step.

        Args:
            step: Its number, from 0.
        """
        self._recorder.is_on_host = False
        self._recorder.at(Phase.FORWARD, 0, step)
        steps, count = self._settings.gradient_accumulation_steps, captured_micro_batches(self._settings)
        hooks = StepHooks(
            observe=self._observe,
            around_parameter_update=self._around_update,
            loss=None if self._sharded is None else self._sharded_loss,
        )  # made here, as kept ones would be a cycle that holds every fake tensor
        self._executor([self._batch] * count, [1 / steps] * count, hooks=hooks, last_repeats=steps - count + 1)
        if self._settings.optimizer_in_backward:
            self._drop_state_of_unused(lambda parameter: id(parameter) in self._reached)
        self._mark_state()

    def _sharded_loss(self, _model: nn.Module, batch: Batch) -> Tensor:
        assert self._sharded is not None
        return self._sharded.computed(lambda model: self._job.loss(model, batch))

    def _observe(self, phase: Phase, micro_batch: int) -> None:
        recorder, compiled, coupling = self._recorder, self._observers.compiled, self._observers.coupling
        if phase is Phase.FORWARD:
            coupling.begin_forward()
        elif phase is Phase.BACKWARD:
            coupling.end_forward()
        recorder.is_on_host = self._shards_on_host and phase is Phase.OPTIMIZER
        compiled.end_backward(recorder)
        if phase is Phase.BACKWARD:
            compiled.begin_backward(self._model, recorder, are_kept_apart=self._settings.optimizer_in_backward)
        if phase is Phase.OPTIMIZER:
            if not self._shards_on_host:
                mark_gradients(self._model, recorder)
            self._drop_state_of_unused(lambda parameter: parameter.grad is not None)
        recorder.at(phase, micro_batch)

    @contextmanager
    def _around_update(self, parameter: nn.Parameter) -> Iterator[None]:
        assert parameter.grad is not None
        self._reached.add(id(parameter))
        self._recorder.mark([parameter.grad], Category.GRADIENTS, [self._names[id(parameter)]])
        with self._recorder.updating():
            yield

    def _mark_staging(self) -> None:
        """What is on its way between device and host, where the optimizer is on the host."""
        if self._executor.on_host is None:
            return
        staging = self._executor.on_host.staging
        self._recorder.host_staging_bytes = sum(pinned_bytes(each.nbytes) for each in staging)
        if self._recorder.host_is_device:
            self._recorder.mark(staging, Category.OPTIMIZER_STATE, ["on the way to the host"] * 2)

    def _mark_state(self) -> None:
        if self._recorder.host_is_device or not self._is_on_host:
            mark_state(self._optimizer, self._model, self._recorder)
            return
        self._recorder.host_state_bytes = state_bytes(self._optimizer)
        if self._shards_on_host:  # parameters, and gradients of those that are trained
            parameters = list(self._model.parameters())
            self._recorder.host_state_bytes += sum(own_part(p).nbytes for p in parameters)
            self._recorder.host_state_bytes += sum(own_part(p).nbytes for p in parameters if p.requires_grad)

    def _create_state(self) -> list[nn.Parameter]:
        """Let the optimizer make its state; for which parameters it did."""
        if not self._settings.optimizer_in_backward:
            return self._create_state_of_all()
        optimizer, made = self._optimizer, []
        whole = optimizer.param_groups
        for group in whole:  # there is never more than one gradient
            for parameter in group["params"]:
                optimizer.param_groups = [group | {"params": [parameter]}]
                made += self._create_state_of_all()
        optimizer.param_groups = whole
        return made

    def _create_state_of_all(self) -> list[nn.Parameter]:
        """Among ranks the gradients are marked as such: in training they are in DDP's buckets then."""
        optimizer, recorder = self._optimizer, self._recorder
        recorder.at(Phase.SETUP, 0)
        there_before = set(optimizer.state)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.empty_like(parameter)
        if self._settings.world_size > 1 and not self._shards_on_host:
            mark_gradients(self._model, recorder)
        self._executor.call_update(optimizer.step)
        optimizer.zero_grad(set_to_none=True)
        self._mark_state()
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        return [parameter for parameter in parameters if parameter not in there_before]

    def _drop_state_of_unused(self, is_used: Callable[[nn.Parameter], bool]) -> None:
        """Drop the state of parameters that no loss reaches; in the first step, later there is none."""
        for parameter in self._made_early:
            if not is_used(parameter):
                state = self._optimizer.state.pop(parameter, {})
                self._recorder.never_made(value for _name, value in named_tensors(state))
        self._made_early.clear()


def _prefetch(move: InputMover, batch: Batch) -> Callable[[], Batch]:
    coming = [move(batch)]
    return coming.pop


def _make_optimizer(job: Job, model: nn.Module, settings: Settings) -> Optimizer:
    """The optimizer; one that looks at values of tables it makes (bitsandbytes) makes them as real tensors."""
    try:
        return make_optimizer(job, model, settings)
    except DataDependentOutputException:
        with _disable_current_modes():
            return make_optimizer(job, model, settings)
