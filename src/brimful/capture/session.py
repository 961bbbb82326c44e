"""One capture: a model and a batch on fake tensors, the contexts in which steps run, and their trace."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from brimful.batches import layout_of, named_tensors
from brimful.capture.captured_step import CapturedStep, StepObservers, captured_micro_batches
from brimful.capture.compiled import CompiledCode
from brimful.capture.corrections import CorrectedFunctions, Rule
from brimful.capture.coupling import Coupling
from brimful.capture.fakes.batch import make_fake_batch
from brimful.capture.fakes.model import (
    build_fake_model,
    fakes_behave,
    fakes_can_be_copied,
    no_gradient_overflows,
)
from brimful.capture.fakes.outside import OutsideTensors
from brimful.capture.inductor import CapturedInductor
from brimful.capture.libraries import (
    answers_of_a_real_step,
    checkpoints_without_gradient_noted,
    nothing_is_saved,
    quantised_weights_known,
)
from brimful.capture.marks import input_mover, mark_batch, mark_input, mark_model
from brimful.capture.own_loop import run_loop
from brimful.capture.recording.blocks import to_events, to_storages
from brimful.capture.recording.modules import ModuleCalls
from brimful.capture.recording.places import Place, devices_told
from brimful.capture.recording.recorder import Recorder
from brimful.capture.recording.update import Recorded, RecordedPart, after_setup, with_update
from brimful.capture.repeats import Shortening
from brimful.capture.sharding import fake_ranks, sharding_recorded
from brimful.capture.step_part import ALL_OF_STEP, StepPart, join_counts, recorded_by, scaler_without_update
from brimful.capture.triton_kernels import triton_launches_recorded
from brimful.capture.values.known import KnownValues
from brimful.devices import Device
from brimful.distributed.fsdp import Sharded
from brimful.execution.attached import parameter_count
from brimful.execution.coupled_loss import CoupledLoss, gather_embeddings, loss_of, loss_parts
from brimful.execution.precision import autocast
from brimful.execution.random_state import unseen
from brimful.job import Batch, Job
from brimful.settings import Compile, Settings
from brimful.torch_utils.held_values import HeldValues
from brimful.torch_utils.module_names import runs_on_one_device
from brimful.trace import Guess, Op, Phase, Trace
from brimful.trace.extents import Convolution, extents_of
from brimful.transforms import AppliedFormat, apply_memory_format, apply_units, batch_in_format
from brimful.utils.deep_stack import deep_stack

_SEQUENCES = 3
"""Dimensions of the weight of a convolution over sequences; those over images and volumes have more."""

_ASSUMED = "conditions on numbers that are not known, such as a loss: answered as if they were 1"


class CaptureSession:
    """One capture: making it builds the model and the batch on fake tensors; `run` runs and records steps.

    The capture follows the choice of kernels of `device`, and `rules` are the corrections for it. `guess` is
    the assumption about unknown values that decide sizes. `compiled` notes code for `torch.compile`, and is in
    force. `shortening` has the blocks of the model that do not run; `settings` have no actions for them. `part`
    is what runs of a step. `cpu_is_device` says that the job's code is known to call its device "cpu".
    """

    def __init__(
        self,
        job: Job,
        settings: Settings,
        device: Device,
        rules: list[Rule],
        guess: Guess,
        compiled: CompiledCode,
        shortening: Shortening | None = None,
        part: StepPart = ALL_OF_STEP,
        *,
        cpu_is_device: bool = False,
    ) -> None:
        self._job, self._settings, self._device, self._rules = job, settings, device, rules
        self._mode = mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._known = known = KnownValues(guess)
        is_cpu = device.kind == "cpu"
        self._batch = make_fake_batch(job, settings, mode, known, host_is_device=is_cpu)
        self._model = build_fake_model(job, mode, known)
        self._modules = ModuleCalls(self._model)
        self._outside = OutsideTensors(mode, known)
        self._held = HeldValues(self._model, loss_parts(job)).outside_of(self._model)
        self._observers = StepObservers(
            recorder=Recorder(
                self._modules,
                known,
                rules,
                outside=self._outside,
                host_is_device=is_cpu,
                runs_own_loop=job.loop is not None,
                cpu_is_device=cpu_is_device,
            ),
            compiled=compiled,
            coupling=Coupling(self._model, loss_parts(job), self._outside),
            shortening=shortening,
            part=part,
        )
        self._observers.recorder.carried = self._observers.coupling.carried
        self._functions = CorrectedFunctions(rules, self._observers.recorder.places)
        self._inductor: CapturedInductor | None = None
        if settings.compile is not Compile.NONE:
            self._inductor = CapturedInductor(
                device, mode, self._observers.recorder, self._modules, self._functions
            )
        self._format = AppliedFormat(self._model, None)
        self._captured: CapturedStep | None = None
        """Kept until the trace is made: what it holds is not freed by a step."""

    def run(
        self, steps: int, *, evaluates: bool, written_inputs: frozenset[str]
    ) -> tuple[Trace, frozenset[str]]:
        """Run optimizer steps and record them; with `evaluates`, then run the loss in evaluation mode too.

        `written_inputs` are tensors of the batch that the loss is known to write to in place. Beside the trace,
        these are returned with the ones that were found.
        """
        with self._holding():
            return self._run(steps, evaluates=evaluates, written_inputs=written_inputs)

    def _run(
        self, steps: int, *, evaluates: bool, written_inputs: frozenset[str]
    ) -> tuple[Trace, frozenset[str]]:
        observers, settings = self._observers, self._settings
        micro_batches, written = captured_micro_batches(settings), written_inputs
        with self._patched() as sharded:
            applied = apply_units(self._model, settings, self._inductor)
            with self._recording() as functions:
                recorded: Recorded | None = None
                if self._job.loop is not None:
                    steps, micro_batches = run_loop(
                        self._job,
                        self._model,
                        self._batch,
                        observers,
                        functions,
                        steps=steps,
                        begin_step=partial(_begin_step, self._rules),
                    )
                    settings = replace(settings, gradient_accumulation_steps=micro_batches)
                else:
                    written = self._run_steps(steps, sharded, written_inputs)
                    if evaluates:
                        observers.recorder.position.enter(Phase.EVALUATION, 0, steps)
                        _evaluate(self._job, settings, self._model, self._batch, observers.recorder)
                    if not observers.coupling.carried.is_settled:
                        recorded = self._settled()
        recorded = recorded or recorded_by(observers.recorder)
        trace = self._trace(settings, steps, micro_batches, recorded)
        applied.remove()
        return trace, written

    @property
    def cpu_is_device_after_all(self) -> bool:
        """Whether code calls its device "cpu", while what it moved there was put on the host."""
        return self._observers.recorder.places.is_wrong

    def run_inference(self, run: Callable[[nn.Module, Batch, Recorder], Recorded]) -> Trace:
        """Run code on the model and a batch, in evaluation mode and without gradients.

        The trace has what `run(model, batch, recorder)` returns of what was recorded, at least one op.
        """
        recorder = self._observers.recorder
        with self._holding():
            with self._patched(), self._recording():
                apply_units(self._model, self._settings, self._inductor)
                mark_model(self._model, recorder)
                if recorder.host_is_device:
                    mark_batch(self._batch, recorder)
                _begin_step(self._rules)
                recorder.position.enter(Phase.EVALUATION, 0, 0)
                batch = input_mover(recorder)(self._batch)
                self._model.eval()
                with torch.no_grad(), autocast(self._model, self._settings.precision):
                    recorded = run(self._model, batch, recorder)
            return self._trace(self._settings, recorded.ops[-1].step + 1, 1, recorded)

    def run_part(self) -> RecordedPart | None:
        """Run a part of one step; None if it cannot be joined to the other part."""
        with self._holding():
            return self._run_part()

    @contextmanager
    def _holding(self) -> Iterator[None]:
        """Restore what closures and globals held when the context closes, also where the step raised.

        Who watches a script sees nothing of a capture, which may check the script's own step.
        """
        try:
            with unseen(), deep_stack():
                yield
        finally:
            self._held.restore()
            _drop_results(self._model)

    def _run_part(self) -> RecordedPart | None:
        with self._patched() as sharded:
            applied = apply_units(self._model, self._settings, self._inductor)
            with self._recording():
                written = self._run_steps(1, sharded, frozenset())
        step = self._captured
        assert step is not None
        is_unsure = (
            written
            or self.cpu_is_device_after_all
            or not self._observers.coupling.carried.is_settled
            or (not self._observers.part.has_model and self._known.has_assumed)
        )
        recorded = None if is_unsure else step.seams.recorded(step.optimizer, self._rules)
        applied.remove()
        return recorded

    def joined(self, settings: Settings, model: RecordedPart, update: RecordedPart) -> Trace:
        """The trace of the whole step, as a capture of it would give, from its two parts.

        `model` is what `run_part` returned here, and `update` is the optimizer's part with the same gradients.
        `settings` are those of the step, which may have another optimizer than the session. Raises
        `PartsDifferError` if the two parts do not show the whole step.
        """
        model = after_setup(model, update)
        recorded = with_update(model, update)
        facts = self._observers.recorder.facts
        facts.host_state_bytes, facts.paged_state_bytes = update.host_state_bytes, update.paged_state_bytes
        facts.host_staging_bytes = update.host_staging_bytes
        join_counts(self._rules, model, update)
        return self._trace(settings, 1, captured_micro_batches(settings), recorded)

    @contextmanager
    def _patched(self) -> Iterator[Sharded | None]:
        """Let torch and libraries treat fakes as real tensors; yield the model as FSDP2 divides it, or None."""
        recorder, settings = self._observers.recorder, self._settings
        with ExitStack() as stack:
            for rule in self._rules:
                rule.recorder = recorder
                stack.enter_context(rule.context())
            stack.enter_context(runs_on_one_device(job=self._job.name))
            stack.enter_context(answers_of_a_real_step())
            stack.enter_context(quantised_weights_known())
            stack.enter_context(triton_launches_recorded(recorder.facts.note))
            stack.enter_context(nothing_is_saved())
            stack.enter_context(checkpoints_without_gradient_noted(recorder.facts))
            stack.enter_context(fakes_behave())
            stack.enter_context(no_gradient_overflows())
            stack.enter_context(fakes_can_be_copied())
            if not self._observers.part.has_update:
                stack.enter_context(scaler_without_update())
            self._format = apply_memory_format(self._model, settings)
            sharded = None
            if settings.divides_model:
                mesh = stack.enter_context(fake_ranks(settings))
                stack.enter_context(sharding_recorded(recorder, settings))
                with self._mode:
                    sharded = Sharded(self._model, mesh, settings, self._job.shard)
            yield sharded

    @contextmanager
    def _recording(self) -> Iterator[CorrectedFunctions]:
        """Put the modes of a capture in force while the context is open."""
        recorder = self._observers.recorder
        if recorder.places.are_two:
            for _, tensor in named_tensors(self._batch):
                recorder.places.put(tensor, Place.BATCH)
        with (
            self._modules.follow(),
            self._outside.left_alone(self._model),
            self._mode,
            devices_told(recorder.places) if recorder.places.are_two else nullcontext(),
            self._functions,
            recorder,
        ):
            yield self._functions
        recorder.places.settle()

    def _run_steps(self, steps: int, sharded: Sharded | None, written_inputs: frozenset[str]) -> frozenset[str]:
        """Run brimful's own step; return the tensors of the batch, by name, that the loss wrote to."""
        move = input_mover(self._observers.recorder)
        move.written = written_inputs
        self._captured = CapturedStep(
            self._job,
            self._settings,
            self._model,
            self._batch,
            self._observers,
            move,
            sharded,
            makes_state_first=steps == 1 or self._settings.parallelism.is_zero,
        )
        self._format.follow(self._captured.optimizer)
        for step in range(steps):
            _begin_step(self._rules)
            self._captured.run(step)
        return move.written

    def _settled(self) -> Recorded:
        """Run other forwards to find which new values are state, and return what was recorded before them."""
        recorder = self._observers.recorder
        recorded, facts = recorded_by(recorder), copy.copy(recorder.facts)
        noted = dict(facts.uncertain)
        batch = input_mover(recorder, repeats=True)(self._batch)  # a model may hold the last one

        def forward() -> None:
            random.seed(0)
            np.random.seed(0)
            with autocast(self._model, self._settings.precision):
                loss_of(self._job)(self._model, batch)

        python, numpy = random.getstate(), np.random.get_state(legacy=False)
        self._observers.coupling.carried.settle(forward)
        random.setstate(python)
        np.random.set_state(numpy)
        for name in facts.__dataclass_fields__:
            setattr(recorder.facts, name, noted if name == "uncertain" else getattr(facts, name))
        return recorded

    def _trace(self, settings: Settings, steps: int, micro_batches: int, recorded: Recorded) -> Trace:
        recorder, coupling = self._observers.recorder, self._observers.coupling
        facts, parameters = recorder.facts, list(self._model.parameters())
        return Trace(
            job=self._job.name,
            settings=settings,
            device_kind=self._device.kind,
            torch_version=torch.__version__,
            captured_steps=steps,
            captured_micro_batches=micro_batches,
            ops=tuple(recorded.ops),
            storages=to_storages(recorded.blocks, recorded.events, recorded.ops),
            events=to_events(recorded.blocks, recorded.events),
            module_classes=self._modules.classes,
            corrections=tuple(rule.record() for rule in self._rules),
            uncertain_ops=(
                *facts.all_uncertain,
                *([_ASSUMED] if self._known.has_assumed else []),
            ),
            compiled_lines=self._observers.compiled.lines,
            batch_coupled_modules=(*coupling.batch_norms(), *coupling.stateful()),
            stateful_modules=coupling.stateful(),
            is_own_loop=self._job.loop is not None,
            sizes_are_guessed=facts.sizes_are_guessed,
            guess=self._known.guess,
            sizes_depend_on_values=facts.sizes_depend_on_values,
            convolves_images=_convolves(recorded.ops) and any(p.dim() > _SEQUENCES for p in parameters),
            parameter_count=parameter_count(parameters),
            trainable_parameter_count=parameter_count(p for p in parameters if p.requires_grad),
            couples_samples=self._job.embed is not None and self._job.loop is None,
            global_batch=facts.global_batch,
            without_gradient=facts.without_gradient,
            checkpoints_without_gradient=facts.checkpoints_without_gradient,
            host_state_bytes=facts.host_state_bytes,
            paged_state_bytes=facts.paged_state_bytes,
            host_staging_bytes=0 if recorder.host_is_device else facts.host_staging_bytes,
        )


def _drop_results(model: nn.Module) -> None:
    """Put None in the place of fake tensors that forwards computed with a graph.

    The graph of a checkpointed module leads back to the module, which the garbage collector does not see: both
    would stay in memory.
    """
    held = HeldValues(model)
    for name, value in held.values.items():
        if isinstance(value, FakeTensor) and value.grad_fn is not None and name in held.puts:
            held.puts[name](None)


def _begin_step(rules: Iterable[Rule]) -> None:
    for rule in rules:
        rule.begin_step()


def _evaluate(job: Job, settings: Settings, model: nn.Module, batch: Batch, recorder: Recorder) -> None:
    """Run one micro-batch as validation does, or all of the global batch where the loss couples samples."""
    loss, to_device = loss_of(job), input_mover(recorder, repeats=True)

    def move(micro_batch: Batch) -> Batch:
        return batch_in_format(to_device(micro_batch), settings.memory_format, partial(mark_input, recorder))

    model.eval()
    with torch.no_grad(), autocast(model, settings.precision):
        if isinstance(loss, CoupledLoss):
            embed = partial(loss.embed, model)
            steps = settings.gradient_accumulation_steps
            gathered = gather_embeddings(
                embed,
                [batch] * min(steps, 2),
                move,
                count=layout_of(job, whole=settings.micro_batch_size).count,
                last_repeats=max(steps - 1, 1),
            )
            loss.of_embeddings(gathered)
        else:
            loss(model, move(batch))
    model.train()


def _convolves(ops: Iterable[Op]) -> bool:
    return any(isinstance(extents_of(op.extents), Convolution) for op in ops)
