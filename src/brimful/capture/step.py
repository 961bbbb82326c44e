"""One training step on fake tensors → `Trace`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes  # private; checked: torch 2.13

from brimful.applying import apply_units
from brimful.applying.sharding import Sharded, check_optimizer
from brimful.batches import map_tensors, named_tensors, own_part
from brimful.capture.compiled import CompiledCode
from brimful.capture.corrections import CorrectedFunctions, rules_for
from brimful.capture.corrections.device_calls import HOST_MARK
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
from brimful.capture.marks import input_mover, mark_batch, mark_gradients, mark_model, mark_state
from brimful.capture.modules import ModuleCalls
from brimful.capture.outside import OutsideTensors
from brimful.capture.recorder import Recorder
from brimful.capture.sharding import fake_ranks, sharding_seen
from brimful.capture.values import KnownValues
from brimful.collecting import without_garbage_collection
from brimful.coupled import CoupledLoss, check_coupled, gather_embeddings, loss_of
from brimful.errors import BatchError, BrimfulError, CaptureError
from brimful.execution.executor import StepExecutor, StepHooks
from brimful.execution.host_optimizer import state_bytes
from brimful.hardware import Device
from brimful.inputs import InputMover
from brimful.job import Batch, Job
from brimful.layout import layout_of, make_micro_batch
from brimful.module_tree import own_checkpoints
from brimful.optimizers import make_optimizer
from brimful.settings import Settings
from brimful.status import report
from brimful.step import CallAction, autocast, loss_counts
from brimful.timeline import pinned_bytes
from brimful.trace import Category, Guess, Phase, Trace
from brimful.wrappers import plain_namer

_ASSUMED = "conditions on numbers that are not known, such as a loss: answered as if they were 1"
DISTINCT_MICRO_BATCHES = 2
"""The first micro-batch makes the gradients, the second adds to them; all further ones repeat the second."""


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
            captured_micro_batches = _captured_micro_batches(settings)
            if job.loop is not None:
                steps, captured_micro_batches = run_loop(
                    job, model, batch, recorder, functions, compiled, steps=steps, begin_step=begin_step
                )
                settings = replace(settings, gradient_accumulation_steps=captured_micro_batches)
            else:
                move.written = written_inputs
                run = _prepare(job, settings, model, batch, recorder, compiled, sharded, move, coupling)
                for step in range(steps):
                    begin_step()
                    run(step)
                if evaluates:
                    recorder.at(Phase.EVALUATION, 0, steps)
                    _evaluate(job, settings, model, batch, recorder)
        trace = Trace(
            job=job.name,
            settings=settings,
            device_kind=device.kind,
            torch_version=torch.__version__,
            captured_steps=steps,
            captured_micro_batches=captured_micro_batches,
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


def _captured_micro_batches(settings: Settings) -> int:
    return min(settings.gradient_accumulation_steps, DISTINCT_MICRO_BATCHES)


def _prepare(
    job: Job,
    settings: Settings,
    model: nn.Module,
    batch: Batch,
    recorder: Recorder,
    compiled: CompiledCode,
    sharded: Sharded | None,
    move: InputMover,
    coupling: Coupling,
) -> Callable[[int], None]:
    """Record what is there before training; what it returns runs and records the step of a number."""
    parts_on_host = settings.cpu_offload and not recorder.host_is_device
    mark_model(model, recorder, with_parameters=not parts_on_host)
    if recorder.host_is_device:
        mark_batch(batch, recorder)
    is_on_host = settings.optimizer_on_host or parts_on_host
    with recorder.on_host() if is_on_host else nullcontext():  # some make state at once
        optimizer = _make_optimizer(job, model, settings)
    if sharded is not None:
        check_optimizer(optimizer)
    make_state = _create_state_one_by_one if settings.step_in_backward else _create_optimizer_state

    def mark() -> None:
        if recorder.host_is_device or not is_on_host:
            mark_state(optimizer, model, recorder)
            return
        recorder.host_state_bytes = state_bytes(optimizer)
        if parts_on_host:
            trainable = sum(own_part(p).nbytes for p in model.parameters() if p.requires_grad)
            recorder.host_state_bytes += trainable + sum(own_part(p).nbytes for p in model.parameters())

    plain_name = plain_namer(model)
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    reached: set[int] = set()

    @contextmanager
    def around_update(parameter: nn.Parameter) -> Iterator[None]:
        assert parameter.grad is not None
        reached.add(id(parameter))
        recorder.mark([parameter.grad], Category.GRADIENTS, [names[id(parameter)]])
        with recorder.updating():
            yield

    count = _captured_micro_batches(settings)

    def prefetch(host_batch: Batch) -> Callable[[], Batch]:
        coming = [move(host_batch)]
        return coming.pop

    def observe(phase: Phase, micro_batch: int) -> None:
        if phase is Phase.FORWARD:
            coupling.begin_forward()
        elif phase is Phase.BACKWARD:
            coupling.end_forward()
        recorder.is_on_host = parts_on_host and phase is Phase.OPTIMIZER
        compiled.end_backward(recorder)
        if phase is Phase.BACKWARD:
            compiled.begin_backward(model, recorder, are_kept_apart=settings.step_in_backward)
        if phase is Phase.OPTIMIZER:
            if not parts_on_host:
                mark_gradients(model, recorder)
            _drop_state_of_unused(optimizer, [p for p in made_early if p.grad is None], recorder)
            made_early.clear()
        recorder.at(phase, micro_batch)

    def loss(_model: nn.Module, batch: Batch) -> Tensor:
        assert sharded is not None
        return sharded.computed(lambda model: job.loss(model, batch))

    executor = StepExecutor(
        job,
        settings,
        model,
        optimizer,
        device=torch.device("cpu"),
        move=move,
        prefetch=None if recorder.host_is_device else prefetch,
        around_host=recorder.on_host,
    )
    hooks = StepHooks(
        observe=observe, around_parameter_update=around_update, loss=None if sharded is None else loss
    )
    if executor.on_host is not None:
        staging = executor.on_host.staging
        recorder.host_staging_bytes = sum(pinned_bytes(each.nbytes) for each in staging)
        if recorder.host_is_device:
            recorder.mark(staging, Category.OPTIMIZER_STATE, ["on the way to the host"] * 2)
    with recorder.on_host() if parts_on_host else nullcontext():
        made_early = make_state(
            optimizer,
            model,
            recorder,
            among_ranks=settings.ranks > 1 and not parts_on_host,
            call_update=executor.call_update,
            mark=mark,
        )

    def run(step: int) -> None:
        recorder.is_on_host = False
        recorder.at(Phase.FORWARD, 0, step)
        weights = [1 / settings.gradient_accumulation_steps] * count
        executor(
            [batch] * count, weights, hooks=hooks, stands_for=settings.gradient_accumulation_steps - count + 1
        )
        if settings.step_in_backward:
            _drop_state_of_unused(optimizer, [p for p in made_early if id(p) not in reached], recorder)
            made_early.clear()
        mark()

    return run


def _make_optimizer(job: Job, model: nn.Module, settings: Settings) -> Optimizer:
    """The optimizer; one that looks at values of tables it makes (bitsandbytes) makes them as real tensors."""
    try:
        return make_optimizer(job, model, settings)
    except DataDependentOutputException:
        with _disable_current_modes():
            return make_optimizer(job, model, settings)


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
                stands_for=max(steps - 1, 1),
            )
            loss.of_embeddings(gathered)
        else:
            loss(model, move(batch))
    model.train()


def _create_optimizer_state(
    optimizer: Optimizer,
    model: nn.Module,
    recorder: Recorder,
    *,
    among_ranks: bool,
    call_update: CallAction,
    mark: Callable[[], None],
) -> list[nn.Parameter]:
    """Let the optimizer make its state by one step with gradients that are never written; whose it made.

    Among ranks those gradients are told as such: in training they are in DDP's buckets then. `mark` is called
    once the state is there.
    """
    recorder.at(Phase.SETUP, 0)
    there_before = set(optimizer.state)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    if among_ranks:
        mark_gradients(model, recorder)
    call_update(optimizer.step)
    optimizer.zero_grad(set_to_none=True)
    mark()
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return [parameter for parameter in parameters if parameter not in there_before]


def _create_state_one_by_one(
    optimizer: Optimizer, model: nn.Module, recorder: Recorder, **how: Any
) -> list[nn.Parameter]:
    """The same where there is never more than one gradient."""
    whole, made = optimizer.param_groups, []
    for group in whole:
        for parameter in group["params"]:
            optimizer.param_groups = [group | {"params": [parameter]}]
            made += _create_optimizer_state(optimizer, model, recorder, **how)
    optimizer.param_groups = whole
    return made


def _drop_state_of_unused(optimizer: Optimizer, unused: list[nn.Parameter], recorder: Recorder) -> None:
    """Optimizers pass over parameters without a gradient, so those that no loss reaches never had a state."""
    for parameter in unused:
        state = optimizer.state.pop(parameter, {})
        recorder.never_made(value for _name, value in named_tensors(state))


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
