"""One training step on fake tensors → `Trace`."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from brimful.batches import layout_of, make_micro_batch, map_tensors
from brimful.capture.captured_step import CapturedStep, StepObservers, captured_micro_batches
from brimful.capture.compiled import CompiledCode
from brimful.capture.corrections.base import CorrectedFunctions
from brimful.capture.corrections.device_calls import HOST_MARK
from brimful.capture.corrections.rules import rules_for
from brimful.capture.coupling import Coupling
from brimful.capture.fakes import (
    build_fake_model,
    fakes_behave,
    fakes_can_be_copied,
    no_gradient_overflows,
    to_fake,
)
from brimful.capture.libraries import answers_of_a_real_step, nothing_is_saved
from brimful.capture.lines import raising_line
from brimful.capture.loop import run_loop
from brimful.capture.marks import input_mover
from brimful.capture.modules import ModuleCalls
from brimful.capture.outside import OutsideTensors
from brimful.capture.recorder import Recorder
from brimful.capture.sharding import fake_ranks, sharding_seen
from brimful.capture.values import KnownValues
from brimful.devices import Device
from brimful.distributed.fsdp import Sharded
from brimful.errors import BatchError, BrimfulError, CaptureError
from brimful.execution.coupled_loss import CoupledLoss, check_coupled, gather_embeddings, loss_of
from brimful.execution.losses import loss_counts
from brimful.execution.precision import autocast
from brimful.gc_pause import without_garbage_collection
from brimful.job import Batch, Job
from brimful.settings import Settings
from brimful.status import report
from brimful.trace import Guess, Phase, Trace, own_checkpoints
from brimful.transforms import apply_units

_ASSUMED = "conditions on numbers that are not known, such as a loss: answered as if they were 1"


def capture_step(
    job: Job,
    settings: Settings,
    device: Device,
    *,
    steps: int = 2,
    evaluates: bool = False,
    without: Collection[str] = (),
    guess: Guess = Guess.EXPECTED,
    written_inputs: frozenset[str] = frozenset(),
) -> Trace:
    """Run training steps on fake tensors and record what they do.

    No weights are made and no GPU is needed. Optimizer state is created before the first step, so that every
    step is a steady one; more steps only add to the history that the allocator has seen. A job's own loop is
    run as it is.

    Args:
        job: Its model, loss, batch and optimizer are used as they are, or its loop.
        settings: Their unit actions are applied to the model.
        device: The device whose decisions are followed.
        steps: Optimizer steps to run, at least 1.
        evaluates: Run the loss once more afterwards, without gradients and in evaluation mode.
        without: Names of corrections to leave out.
        guess: What is assumed of values that decide sizes and are not known, such as a router's choices.
        written_inputs: Tensors of the batch that the loss writes to in place, which are copied on a CPU. Others
            are found, and then the step is captured again.

    Returns:
        The trace. Of the micro-batches of a step it has at most two, but all of a job's own loop, which says
        how many there are.

    Raises:
        CaptureError: The step cannot be run on fake tensors; the message names the line where it stopped.
        UnknownNameError: There is no correction of a name in `without`.
        BrimfulError: The job is wrong in another way: its loss, its batch, its model.
    """
    report(f"capturing {settings.describe()}")
    rules = rules_for(device, settings, without)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    known = KnownValues(guess)
    compiled = CompiledCode()

    def begin_step() -> None:
        for rule in rules:
            rule.begin_step()

    if job.loop is None:
        check_coupled(job, settings)
    with _told_clearly(job, settings), without_garbage_collection(), compiled.runs_eagerly():
        is_there = device.kind == "cpu" and job.loop is None
        real_batch = make_micro_batch(job, settings.micro_batch_size, settings.rank_batch_size)
        parts = settings.global_batch_size // settings.micro_batch_size if is_there else 1
        if parts > 1 and layout_of(job).copies(real_batch):
            parts *= 2  # the batch, and its parts
        _check_count(job, real_batch)
        batch = _fake_batch(real_batch, mode, known, parts=parts)
        model = build_fake_model(job, mode, known)
        modules = ModuleCalls(model)
        outside = OutsideTensors(mode, known)
        recorder = Recorder(modules, known, rules, outside=outside, host_is_device=device.kind == "cpu")
        move = input_mover(recorder)
        coupling = Coupling(model, outside)
        with ExitStack() as stack:
            for rule in rules:
                rule.recorder = recorder
                stack.enter_context(rule.context())
            stack.enter_context(answers_of_a_real_step())
            stack.enter_context(nothing_is_saved())
            stack.enter_context(fakes_behave())
            stack.enter_context(no_gradient_overflows())
            stack.enter_context(fakes_can_be_copied())
            mesh = stack.enter_context(fake_ranks(settings)) if settings.divides_model else None
            sharded = None
            if mesh is not None:
                stack.enter_context(sharding_seen(recorder, settings))
                with mode:
                    sharded = Sharded(model, mesh, settings)
            applied = apply_units(model, settings)
            stack.enter_context(modules.follow())
            stack.enter_context(outside.left_alone(model))
            stack.enter_context(mode)
            functions = stack.enter_context(CorrectedFunctions(rules))
            stack.enter_context(recorder)
            micro_batches = captured_micro_batches(settings)
            if job.loop is not None:
                steps, micro_batches = run_loop(
                    job, model, batch, recorder, functions, compiled, steps=steps, begin_step=begin_step
                )
                settings = replace(settings, gradient_accumulation_steps=micro_batches)
            else:
                move.written = written_inputs
                observers = StepObservers(recorder=recorder, compiled=compiled, coupling=coupling)
                captured = CapturedStep(job, settings, model, batch, observers, move, sharded)
                for step in range(steps):
                    begin_step()
                    captured.run(step)
                if evaluates:
                    recorder.at(Phase.EVALUATION, 0, steps)
                    _evaluate(job, settings, model, batch, recorder)
        trace = Trace(
            job=job.name,
            settings=settings,
            device_kind=device.kind,
            torch_version=torch.__version__,
            captured_steps=steps,
            captured_micro_batches=micro_batches,
            ops=tuple(recorder.ops),
            storages=recorder.storages(),
            events=recorder.event_records(),
            module_classes=modules.classes,
            corrections=tuple(rule.record() for rule in rules),
            uncertain_ops=(*recorder.uncertain, *([_ASSUMED] if known.has_assumed else [])),
            compiled_lines=compiled.lines,
            batch_coupled_modules=(*coupling.batch_norms(), *coupling.stateful()),
            stateful_modules=coupling.stateful(),
            is_own_loop=job.loop is not None,
            sizes_are_guessed=recorder.sizes_are_guessed,
            guess=guess,
            sizes_depend_on_values=recorder.sizes_depend_on_values,
            parameter_count=sum(p.numel() for p in model.parameters()),
            trainable_parameter_count=sum(p.numel() for p in model.parameters() if p.requires_grad),
            couples_samples=job.embed is not None and job.loop is None,
            global_batch=recorder.global_batch,
            host_state_bytes=recorder.host_state_bytes,
            host_staging_bytes=0 if recorder.host_is_device else recorder.host_staging_bytes,
        )
        applied.remove()
    trace = replace(trace, own_checkpoints=own_checkpoints(trace))
    if move.written != written_inputs:
        return capture_step(
            job,
            settings,
            device,
            steps=steps,
            evaluates=evaluates,
            without=without,
            guess=guess,
            written_inputs=move.written,
        )
    return trace


def _fake_batch(batch: Batch, mode: FakeTensorMode, known: KnownValues, *, parts: int = 1) -> Batch:
    """A micro-batch on fake tensors.

    Args:
        batch: The micro-batch.
        mode: The fake mode.
        known: Is told its values.
        parts: How many such micro-batches the memory holds that it is in.

    Returns:
        The same nest.
    """
    fakes: dict[int, Tensor] = {}

    def with_values(tensor: Tensor) -> Tensor:
        if id(tensor) in fakes:
            return fakes[id(tensor)]
        fake = fakes[id(tensor)] = to_fake(tensor, mode, parts=parts if tensor.dim() else 1)
        known.remember(fake, tensor)
        setattr(fake, HOST_MARK, True)
        return fake

    return map_tensors(batch, with_values)


def _check_count(job: Job, batch: Batch) -> None:
    """Nothing of a captured step depends on what a batch counts, but a real step would fail."""
    if job.count is None or job.loop is not None:
        return
    try:
        loss_counts(job, [batch])
    except BrimfulError:
        raise
    except Exception as error:
        raise BatchError(
            f"{job.name}: count(batch) raised {type(error).__name__}: {error}, on a batch that Job.batch made."
        ) from error


def _evaluate(job: Job, settings: Settings, model: nn.Module, batch: Batch, recorder: Recorder) -> None:
    """One micro-batch as validation runs it; all of the global batch where the loss couples them."""
    loss, move = loss_of(job), input_mover(recorder, repeats=True)
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


@contextmanager
def _told_clearly(job: Job, settings: Settings) -> Iterator[None]:
    try:
        yield
    except BrimfulError:
        raise
    except Exception as error:
        line = raising_line(error)
        raise CaptureError(
            f"one step of {job.name!r} cannot be run on fake tensors (micro_batch_size="
            f"{settings.micro_batch_size}): {type(error).__name__}: {error}{f' ({line})' if line else ''}. "
            f"{_hint(error)}"
        ) from error


_JAGGED = "Jagged nested tensors cannot be captured. Pad the samples and mask them."
_HINTS = {
    "Params4bit": "4-bit weights of bitsandbytes cannot be captured. Plan with bf16 weights and LoRA.",
    "FlexAttention": "flex_attention cannot be captured. Take F.scaled_dot_product_attention with a mask.",
    "shape_env must not be None": _JAGGED,
    "nested_view_from_jagged": _JAGGED,
}
"""By what an error says: what cannot be captured, and what to take in its place."""


def _hint(error: Exception) -> str:
    """What to do about an error of a captured step."""
    known = (hint for said, hint in _HINTS.items() if said in str(error))
    real = "If a real step fails too, which brimful.measure runs, the error is the job's own."
    return next(known, real)
