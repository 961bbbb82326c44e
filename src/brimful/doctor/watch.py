"""Watching a run: its first optimizer steps are recorded, the next ones only timed, then it is left alone.

Private torch APIs used here: `torch.utils.data.dataloader._BaseDataLoaderIter`,
`torch._dynamo.eval_frame._is_skip_guard_eval_unsafe_stance`,
`torch._higher_order_ops.utils._in_hop_compile` (checked: torch 2.13).
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import accumulate
from statistics import median
from typing import Any, Self

import torch
from msgspec import structs
from torch import Tensor, nn
from torch._higher_order_ops import utils as _hop_utils
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data.dataloader import _BaseDataLoaderIter

from brimful.batches import named_tensors, tensors_in
from brimful.capture.libraries import checkpoints_without_gradient_noted
from brimful.capture.recording.blocks import to_events, to_storages
from brimful.cost.time_shares import time_shares
from brimful.distributed.ranks import trains_with_ranks
from brimful.doctor.backwards import Backwards
from brimful.doctor.evaluation import FORWARDS, FirstEvaluation, HeldResults
from brimful.doctor.evidence import Evidence, NotOptimized, StepEnd, UnusedGraph
from brimful.doctor.recording import WatchedOps
from brimful.doctor.step_profile import StepProfile
from brimful.execution.out_of_memory import out_of_memory
from brimful.execution.random_state import PAUSED
from brimful.execution.setup import expands_segments
from brimful.optimizers import parameters_of
from brimful.profiling.timing import WaitsForCores
from brimful.settings import Settings
from brimful.torch_utils.forward_lines import lines_are_recorded
from brimful.torch_utils.graphs import MOST_NODES
from brimful.torch_utils.held_names import Holding, held_by_names
from brimful.torch_utils.lines import calling_line, calling_lines
from brimful.torch_utils.replaced import replaced
from brimful.trace import Category, EventKind, Phase, Trace
from brimful.utils.deep_stack import deep_stack
from brimful.utils.first_rank import srun_task

STEPS = 3
"""Optimizer steps that are recorded by default; as many are timed after them. A choice."""


@dataclass(frozen=True, slots=True)
class _Graph:
    """A forward of this step that builds a graph."""

    lines: tuple[str, ...]
    """The line that calls it, and lines of the user's code around it."""
    model: int
    """Id of the model."""
    ops: range
    has_inputs_with_graph: bool
    """Whether gradients may run through to what its inputs come from."""
    saved_bytes: int
    """Bytes that it holds when it returns."""
    parameters: frozenset[int]
    """Ids of the model's trainable parameters."""
    nodes: range
    """Numbers of its autograd nodes; none for a recomputation, whose nodes no backward needs."""
    trains: bool
    """Whether the model is in training mode."""
    backwards: int
    """How often backward had run before it."""


@dataclass(slots=True)
class _Forwards:
    """Forwards of a line, whose graphs hold memory."""

    saved_bytes: int = 0
    """The most bytes that one of them holds when it returns."""
    ops: set[int] = field(default_factory=set)
    """Their ops; of forwards that no backward uses also those that follow and that none uses either."""

    def found(self, line: str, trace: Trace) -> UnusedGraph:
        """The line, with the most bytes that all of its graphs hold at once."""
        saved = {
            index: each.size_bytes
            for index, each in enumerate(trace.storages)
            if each.op in self.ops and each.category is Category.SAVED_TENSORS
        }
        changes = (
            saved.get(each.storage, 0) * (1 if each.kind is EventKind.ALLOCATE else -1) for each in trace.events
        )
        return UnusedGraph(line=line, saved_bytes=max(self.saved_bytes, *accumulate(changes, initial=0)))


def _guarded(method: Callable[..., None]) -> Callable[..., None]:
    """A callback of the watched thread whose own errors end recording, not the run."""

    @wraps(method)
    def guarded(watch: Watch, *args: Any) -> None:
        if watch.sees and not watch.error:
            try:
                method(watch, *args)
            except Exception as error:
                watch.end_by(error)

    return guarded


class Watch:
    """Watches a run while it is entered; `evidence` is what it saw.

    Ops run as they are: what the run computes, draws and prints stays the same. So nothing is recorded once it
    calls compiled code, unless `eager` runs compiled code eagerly in the recorded steps, which rounds
    otherwise. Only the thread that enters it is watched. An error of watching itself ends recording.

    Args:
        steps: Optimizer steps that are recorded; as many are timed after them.
        eager: Whether compiled code runs eagerly in the recorded steps.
    """

    def __init__(self, steps: int = STEPS, *, eager: bool = False) -> None:
        # By NVML: `is_available` begins to use CUDA, and then CUDA_VISIBLE_DEVICES and forks are too late.
        self._ops = WatchedOps("cuda" if torch.cuda.device_count() else "cpu")
        self._backwards = Backwards(self._ops)
        self._asked, self._recording, self._hooks = steps, ExitStack(), ExitStack()
        self._evaluation_hooks = ExitStack()
        """What follows backward for the first evaluation too; closed before compiled code runs."""
        self._is_recording, self._eager, self._compiled = False, eager, ""
        self.error = ""
        self.on_step: Callable[[], None] = lambda: None
        """Called after each recorded step, and after the last one that is timed."""
        self._has_ranks = False
        self._thread = threading.get_ident()
        self._first_evaluation: FirstEvaluation | None = None
        self._optimizers: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
        """Those that have stepped."""
        self._made: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
        """Those that are there."""
        self._optimized: set[int] = set()
        """Parameters of those that step or are there when a step ends, by id: those may step more seldom."""
        self._timed_optimizer = 0
        self._with_squares: set[str] = set()
        """Classes of the optimizers whose state has running means of squares, as Adam's; AMSGrad has more."""
        self._stepped: set[int] = set()
        self._ends: list[StepEnd] = []
        self._first_nodes: list[int] = []
        """Number of the first autograd node after each step."""
        self._after: list[tuple[float, float]] = []
        """Seconds of each step that is timed, and those of them that it waited for data."""
        self._core_waits: WaitsForCores | None = None
        self._core_wait_fraction: float | None = None
        """How much of the timed steps a thread waited for a processor."""
        self._waited = 0.0
        self._waited_at: dict[str, tuple[float, int]] = {}
        """Seconds by the line that waits for a DataLoader, in recorded and timed steps, and its workers."""
        self._profile = StepProfile(self._ops.device_type)
        self._profiled_seconds: float | None = None
        """Time of the first step after those that are recorded, with the end of recording and the profile."""
        self._began: float | None = None
        self._bytes_before_call = self._first_node_of_call = self._first_op_of_call = 0
        self._held_results = HeldResults(self._ops.device_type)
        self._evaluated = 0
        """Forwards of the running evaluation without gradients, of which the first are recorded."""
        self._graphs: list[_Graph] = []
        self._evaluations: dict[str, _Forwards] = {}
        self._unused_graphs: dict[str, _Forwards] = {}
        """Those in training mode."""
        self._unused_calls = Counter[tuple[str, int]]()
        """How many there are, by line and by how often backward had run."""
        self._training_lines = set[str]()
        self._in_evaluation_mode: dict[str, None] = {}
        self._models_in_steps: dict[int, tuple[str, int, set[int]]] = {}
        """Models that run in steps after the first, by id: name, bytes, ids of parameters."""
        self._not_optimized: dict[str, int] = {}
        self._not_optimized_models: dict[int, tuple[_Graph, _Forwards, int]] = {}
        """Models of whose gradients no optimizer has any, by id: a forward, all of them, bytes of gradients."""
        self._cache_flushes: dict[str, int] = {}
        self._held_in_forward: dict[str, Holding] = {}
        self._is_first_call = False
        """Whether the next training forward is the first after a step."""
        self._flags: dict[str, None] = {}
        self._shapes: dict[int, set[tuple[tuple[int, ...], ...]]] = {}
        self._without_gradient: dict[int, tuple[str, int]] = {}
        """Names of parameters, and in how many steps an optimizer finds no gradient, by id."""

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        hooks, stack, ops = self._hooks, self._recording, self._ops
        ops.modules.on_call, ops.modules.on_return = self._before_call, self._after_call
        ops.on_error = ops.modules.on_error = self.end_by
        ops.on_full, ops.on_failure = self._stop_when_full, self._mark_states
        self._made.update((id(each), each) for each in gc.get_objects() if issubclass(type(each), Optimizer))
        hooks.enter_context(deep_stack())  # Python sees the nodes that it records
        hooks.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        hooks.callback(register_optimizer_step_post_hook(self._after_step).remove)
        hooks.enter_context(self._timing_data())
        hooks.callback(self._evaluation_hooks.close)
        self._evaluation_hooks.enter_context(self._backwards.following(self._before_backward))
        hooks.callback(_calling_before_compiled_code(self._stop_before_compiled_code))
        PAUSED.append(self.paused)
        hooks.callback(PAUSED.remove, self.paused)
        _entered.append(self)
        hooks.callback(_entered.remove, self)
        stack.enter_context(ops.modules.follow())
        stack.enter_context(self._noting_optimizers())
        stack.enter_context(self._noting_cache_flushes())
        if self._eager:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(checkpoints_without_gradient_noted(ops.facts))
        ops.__enter__()
        self._is_recording = True
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        is_whole = error is None or isinstance(error, SystemExit)
        if self._is_recording and is_whole:
            self._end_without_step()
        elif self._is_recording:
            self._mark_parameters()
        self._stop()
        self._profile.stop()
        self._ops.leave()
        self._hooks.close()
        if self._first_evaluation is not None:
            self._first_evaluation.end(is_whole=is_whole)
        if error is None or out_of_memory(error) is None:
            self._ops.forget_failure()

    @_guarded
    def _end_without_step(self) -> None:
        """Note graphs that no backward has used when the run ends, and the models if no optimizer has stepped.

        In training mode they count where no backward ever ran.
        """
        self._note_graphs(counts_training=not self._backwards.ever_reached)
        self._mark_parameters()

    @_guarded
    def _mark_parameters(self) -> None:
        """Mark the models' parameters before the first step, which marks those of its optimizer."""
        for prefix, model in self._ops.modules.alive() if not self._ends else ():
            for name, parameter in model.named_parameters():
                self._ops.mark(parameter, Category.PARAMETERS, ".".join(filter(None, (prefix, name))))

    def leave_in_fork(self) -> None:
        """Neither record nor profile what a fork runs, such as a worker that reads data all along."""
        if threading.get_ident() == self._thread:
            self._profile.stop()
            self._ops.leave()

    @property
    def sees(self) -> bool:
        """Whether what happens now is watched: in this thread, and not while watching is paused."""
        return threading.get_ident() == self._thread and not self._ops.modules.is_paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        """See nothing in this thread while the context is open, such as the steps by which a plan is made."""
        ops = self._ops
        if not self.sees:
            yield
            return
        is_on_top = self._is_recording and _get_current_dispatch_mode() is ops
        ops.modules.is_paused = True
        if is_on_top:
            ops.__exit__(None, None, None)
        try:
            with ops.paused():
                yield
        finally:
            ops.modules.is_paused = False
            if is_on_top:
                ops.__enter__()

    @property
    def own_task(self) -> str:
        """The number of a task of `srun` after the first, if it trains by itself; else ""."""
        return "" if self._has_ranks or trains_with_ranks() else srun_task()

    def end_by(self, error: Exception) -> None:
        """End recording by an error of its own."""
        self.error = self.error or f"{type(error).__name__}: {error}"
        self._stop()

    def evidence(self) -> Evidence:
        """What was seen so far."""
        ops, backwards, steps = self._ops, self._backwards, len(self._ends)
        evaluation = self._first_evaluation
        usual = median(seconds for seconds, _ in self._after) if self._after else None
        line = max(self._waited_at, key=lambda line: self._waited_at[line], default="")
        never = [name for name, count in self._without_gradient.values() if count == steps > 1]
        unused = {
            op for each in (self._evaluations, self._often_unused) for line in each.values() for op in line.ops
        }
        trace = Trace(
            job="",
            settings=Settings(micro_batch_size=1),
            device_kind="cuda" if self._ops.device_type == "cuda" else "cpu",
            torch_version=torch.__version__,
            captured_steps=max(steps, 1),
            captured_micro_batches=1,
            ops=tuple(
                structs.replace(op, phase=Phase.EVALUATION) if index in unused else op
                for index, op in enumerate(ops.log.ops)
            ),
            storages=to_storages(ops.blocks, ops.events, ops.log.ops),
            events=to_events(ops.blocks, ops.events),
            module_classes=ops.modules.classes,
            uncertain_ops=ops.facts.all_uncertain,
            is_own_loop=True,
            without_gradient=tuple(never),
            checkpoints_without_gradient=ops.facts.checkpoints_without_gradient,
        )
        evaluations, unused_graphs = (
            {line: each.found(line, trace) for line, each in lines.items()}
            for lines in (self._evaluations, self._often_unused)
        )
        for late in () if evaluation is None else evaluation.unused:
            (unused_graphs if late.trains else evaluations).setdefault(late.found.line, late.found)
        return Evidence(
            trace=trace,
            steps=tuple(self._ends),
            held_in_forward=self._held_in_forward,
            time_shares=time_shares(self._profile.seconds_by_class(usual).items()),
            launches=None if self._profile.gpu is None else self._profile.gpu.launches,
            host_waiting_seconds=None if self._profile.gpu is None else self._profile.gpu.waiting_seconds,
            profiled_seconds=self._profiled_seconds,
            seconds_after=tuple(seconds for seconds, _ in self._after),
            core_wait_fraction=self._core_wait_fraction,
            data_seconds_after=tuple(waited for _, waited in self._after),
            backwards=tuple(backwards.noted),
            evaluations=tuple(evaluations.values()),
            gathered=self._held_results.gathered or (() if evaluation is None else evaluation.gathered),
            trained_in_evaluation_mode=tuple(self._in_evaluation_mode),
            unused_graphs=tuple(unused_graphs.values()),
            gradients_added=tuple(backwards.adding),
            adam="" if self._with_squares - {"Adam", "AdamW"} else " and ".join(sorted(self._with_squares)),
            frozen_bytes=dict(backwards.frozen_bytes),
            divides_gradients=ops.divides_gradients,
            softmax_twice=tuple(ops.softmax_twice),
            untrained_bytes=self._untrained_bytes,
            models=tuple(ops.modules.called),
            batch_norms=tuple(ops.modules.batch_norms),
            not_optimized=dict(self._not_optimized),
            not_optimized_models=tuple(self._found_not_optimized(trace)),
            host_reads=dict(ops.host_reads),
            last_reads={
                index: op for index, op in ops.last_reads.items() if ops.ledger.blocks[index].category is None
            },
            pageable_bytes=dict(ops.host_copies.pageable_bytes),
            made_on_the_host=dict(ops.host_copies.made),
            cache_flushes=dict(self._cache_flushes),
            loader_workers=self._waited_at[line][1] if line else None,
            loading_line=line,
            flags=tuple(self._flags),
            input_shapes=max(map(len, self._shapes.values()), default=0),
            error=self.error,
            compiled=self._compiled,
            failed=ops.failed,
            caught=tuple(ops.caught),
            measured_peak_bytes=torch.cuda.max_memory_allocated() if self._ops.device_type == "cuda" else None,
        )

    def _stop(self) -> None:
        """Record no more, but for the first evaluation."""
        if not self._is_recording:
            return
        self._is_recording = False
        self._ops.is_paused = True  # where another mode is above, this one cannot be left yet
        self._ops.leave()
        self._recording.close()
        self._graphs.clear()
        has_evaluated = self._in_evaluation_mode or self._evaluations
        if not has_evaluated and not self._compiled and not self.error:
            self._first_evaluation = FirstEvaluation(lambda: self.sees, self._ops.device_type)

    # What models do

    @_guarded
    def _before_call(self, model: nn.Module) -> None:
        self._ops.is_evaluating = not (model.training or torch.is_grad_enabled())
        self._note_evaluation(model)
        if self._ends and id(model) not in self._models_in_steps:
            weights = [each for each in model.parameters() if not isinstance(each, FakeTensor)]  # of an export
            parameters = [each for each in weights if each.layout is torch.strided]
            size_bytes = sum(each.nbytes for each in parameters)
            if any(isinstance(each, DTensor) for each in parameters):
                self._flags["sharded"] = None
                self._backwards.is_sharded = True  # backward reaches the gathered weights, not the shards
            elif all(each.is_leaf for each in parameters):  # others are computed from the weights of a model
                name = self._ops.modules.name_of(model)
                self._models_in_steps[id(model)] = name, size_bytes, {*map(id, parameters)}
        if not torch.is_grad_enabled() or not any(each.requires_grad for each in model.parameters()):
            return
        is_of_gpu = self._ops.device_type == "cuda" and self._ops.position.phase is Phase.SETUP
        if is_of_gpu and _is_on_host(model):
            self._ops.follow_host()
        self._ops.begin()
        self._bytes_before_call, self._first_op_of_call = self._ops.live_bytes, len(self._ops.log.ops)
        self._first_node_of_call = torch._C._autograd._get_sequence_nr()
        if self._is_first_call:
            self._is_first_call = False
            self._held_in_forward = held_by_names(
                sys._getframe(), self._start_of_step_before, [*self._own_tensors]
            )

    @property
    def _own_tensors(self) -> Iterator[Tensor]:
        """Parameters, their gradients and buffers of the models and optimizers."""
        models = [model for _, model in self._ops.modules.alive()]
        for parameters in (
            *(each.parameters() for each in models),
            *map(parameters_of, self._optimizers.values()),
        ):
            for parameter in parameters:
                yield parameter
                if parameter.grad is not None:
                    yield parameter.grad
        for each in models:
            yield from each.buffers()

    def _note_evaluation(self, model: nn.Module) -> None:
        """Skip the forwards of an evaluation without gradients after the first ones, but not what it leaves."""
        ops = self._ops
        if not ops.is_evaluating:
            self._end_evaluation()
            return
        self._evaluated += 1
        if any(each.requires_grad for each in model.parameters()):
            if self._evaluated == 1 and not self._held_results.gathered:
                self._held_results = HeldResults(ops.device_type)
            self._held_results.note(model)
        ops.is_skipping = self._evaluated > FORWARDS

    def _end_evaluation(self) -> None:
        """Record again, with what the forwards that were not recorded have left."""
        ops, self._evaluated = self._ops, 0
        if ops.is_skipping:
            ops.is_skipping = False
            self._flags["evaluation"] = None
            ops.mark_unseen()

    @_guarded
    def _after_call(self, model: nn.Module, given: Any) -> None:
        self._ops.is_evaluating = False
        parameters = frozenset(id(each) for each in model.parameters() if each.requires_grad)
        if torch.is_grad_enabled() and parameters:
            inputs = [
                each
                for each in tensors_in(given)
                if not isinstance(each, nn.Parameter) and not each.requires_grad
            ]
            for tensor in inputs:
                self._ops.mark(tensor, Category.INPUTS, f"input of {type(model).__name__}")
            self._shapes.setdefault(id(model), set()).add(tuple(tuple(each.shape[1:]) for each in inputs))
            is_recomputed = torch._C._current_autograd_node() is not None
            first, end = self._first_node_of_call, torch._C._autograd._get_sequence_nr()
            self._graphs.append(
                _Graph(
                    lines=calling_lines(),
                    model=id(model),
                    ops=range(self._first_op_of_call, len(self._ops.log.ops)),
                    has_inputs_with_graph=any(each.requires_grad for each in tensors_in(given)),
                    saved_bytes=max(self._ops.live_bytes - self._bytes_before_call, 0),
                    parameters=parameters,
                    nodes=range(first, first if is_recomputed else end),
                    trains=model.training,
                    backwards=len(self._backwards.noted),
                )
            )

    def _before_backward(self) -> bool:
        """Whether a backward is to be noted."""
        if self._first_evaluation is not None and self.sees:
            self._first_evaluation.note_backward()
        is_noted = self._is_recording and self.sees
        if is_noted:
            self._ops.begin()
        elif self.sees:
            self._ops.leave()  # a mode was above when recording ended
        return is_noted

    def _stop_before_compiled_code(self) -> None:
        """Record no more, unless compiled code runs eagerly."""
        # Operators such as torch.cond compile themselves: eagerly, functions that they call get no gradients.
        runs_eagerly = self._eager and not getattr(_hop_utils, "_in_hop_compile", bool)()
        if self._is_recording and self.sees and not runs_eagerly:
            self._compiled = calling_line() or "the script"
            self._stop()
        if not self._is_recording:  # what is replaced, and hooks of all modules, would be compiled too
            self._evaluation_hooks.close()
            if self._first_evaluation is not None:
                self._first_evaluation.end()

    def _stop_when_full(self) -> None:
        """Record no more, where no optimizer's step ends the recording."""
        self._flags["full"] = None
        self._stop()

    def _noting_cache_flushes(self) -> AbstractContextManager[None]:
        flush = torch.cuda.empty_cache

        def noted() -> None:
            if self._ops.position.phase is not Phase.SETUP:
                line = calling_line()
                self._cache_flushes[line] = self._cache_flushes.get(line, 0) + 1
            flush()

        return replaced(torch.cuda, "empty_cache", noted)

    @contextmanager
    def _timing_data(self) -> Iterator[None]:
        read: Callable[[Any], Any] = _BaseDataLoaderIter.__next__

        def timed(loader: Any) -> Any:
            began = time.perf_counter()
            try:
                return read(loader)
            finally:
                waited, line = time.perf_counter() - began, calling_line()
                self._waited += waited
                if self._began is not None and len(self._after) < self._asked:
                    before, _ = self._waited_at.get(line, (0.0, 0))
                    self._waited_at[line] = before + waited, loader._num_workers

        begin: Callable[..., None] = _BaseDataLoaderIter.__init__

        def begun(loader: Any, *args: Any, **named: Any) -> None:
            if self.sees:
                self._profile.note_loader()
            begin(loader, *args, **named)

        with (
            replaced(_BaseDataLoaderIter, "__next__", timed),
            replaced(_BaseDataLoaderIter, "__init__", begun),
        ):
            yield

    # What optimizers do

    def _noting_optimizers(self) -> AbstractContextManager[None]:
        add: Callable[..., None] = Optimizer.add_param_group

        def noted(optimizer: Optimizer, *args: Any, **named: Any) -> None:
            add(optimizer, *args, **named)
            self._made[id(optimizer)] = optimizer

        return replaced(Optimizer, "add_param_group", noted)

    @_guarded
    def _before_step(self, optimizer: Optimizer, _args: Any, _named: Any) -> None:
        if not self._is_recording:
            self._ops.leave()  # a mode was above when recording ended
            return
        ops = self._ops
        if len(self._ends) == 1 and id(optimizer) not in self._optimizers:
            self._join_first_steps()
        self._optimizers[id(optimizer)] = optimizer
        self._optimized |= _ids_of_parameters([optimizer])
        ops.begin()
        self._end_evaluation()
        ops.divides_gradients |= bool(optimizer._optimizer_step_pre_hooks)  # which may do so
        names, parameters = self._names, parameters_of(optimizer)
        for parameter in parameters:
            ops.mark(parameter, Category.PARAMETERS, names.get(id(parameter), "parameter"))
        self._mark_gradients(parameters, names)
        self._backwards.stepping(parameters)
        ops.in_optimizer = True

    @_guarded
    def _after_step(self, optimizer: Optimizer, _args: Any, _named: Any) -> None:
        now = time.perf_counter()
        self._has_ranks = self._has_ranks or trains_with_ranks()
        if not self._is_recording:
            self._note_time(optimizer, now)
            return
        ops, names = self._ops, self._names
        ops.in_optimizer = False
        parameters = parameters_of(optimizer)
        self._mark_gradients(parameters, names)  # of a closure that the step has called
        for parameter in parameters:
            if parameter.requires_grad and parameter.grad is None and id(parameter) in names:
                _, count = self._without_gradient.get(id(parameter), ("", 0))
                self._without_gradient[id(parameter)] = names[id(parameter)], count + 1
        self._mark_state(optimizer, names)
        self._stepped.add(id(optimizer))
        if self._stepped >= {*self._optimizers.keys()}:
            self._end_step(now)

    def _mark_states(self) -> None:
        self._mark_parameters()
        for optimizer in self._optimizers.values():
            self._mark_state(optimizer, self._names)

    def _mark_state(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        for parameter, state in optimizer.state.items():
            if "exp_avg_sq" in state:
                is_amsgrad = "max_exp_avg_sq" in state
                self._with_squares.add("AMSGrad" if is_amsgrad else type(optimizer).__name__)
            for key, value in named_tensors(state):
                name = f"{names.get(id(parameter), 'parameter')} {key.removeprefix('batch')}"
                self._ops.mark(value, Category.OPTIMIZER_STATE, name)

    def _mark_gradients(self, parameters: list[Tensor], names: Mapping[int, str]) -> None:
        for each in parameters:
            if each.grad is not None and each.grad.layout is torch.strided:
                self._ops.mark(each.grad, Category.GRADIENTS, names.get(id(each), "parameter"))

    def _end_step(self, now: float) -> None:
        ops, at = self._ops, self._ops.position
        self._ends.append(
            StepEnd(
                seconds=None if self._began is None else now - self._began,
                live_bytes=ops.live_bytes,
                op=len(ops.log.ops),
                held=held_by_names(sys._getframe(), self._start_of_step_before),
                line=calling_line(),
            )
        )
        self._first_nodes.append(torch._C._autograd._get_sequence_nr())
        self._optimized |= _ids_of_parameters(self._made.values())
        self._note_not_optimized(self._note_graphs())
        flags = {
            "anomaly": torch.is_anomaly_enabled() and not lines_are_recorded(),
            "cudnn.benchmark": torch.backends.cudnn.benchmark,
            "expandable segments": expands_segments(),
        }
        self._flags |= dict.fromkeys(name for name, is_on in flags.items() if is_on)
        self._stepped.clear()
        self._backwards.end_step()
        self._waited = 0.0
        self._is_first_call = True
        self._timed_optimizer = next(iter(self._optimizers.keys()), 0)
        at.step, at.micro_batch, at.phase = at.step + 1, 0, Phase.OPTIMIZER
        ops.forget_failure()
        self.on_step()
        if len(self._ends) >= self._asked:
            self._stop()
            if self._ops.device_type == "cuda":
                torch.cuda.synchronize()
            self._profile.begin()
        self._began = time.perf_counter()

    @property
    def _start_of_step_before(self) -> int:
        """Number of the first autograd node of the step before this one; 0 until there are two before it."""
        return self._first_nodes[-2] if len(self._first_nodes) > 1 else 0

    def _note_graphs(self, *, counts_training: bool = True) -> list[_Graph]:
        """Note which graphs of this step no backward has used, and models that train in evaluation mode.

        Returns those that a backward has used.
        """
        used = [each for each in self._graphs if self._is_used(each)]
        self._training_lines.update(each.lines[0] for each in used)
        lines = {line for each in used for line in each.lines}
        ends = [*(each.ops.start for each in self._graphs[1:]), len(self._ops.log.ops)]
        for each, end in zip(self._graphs, ends, strict=False):
            if each not in used and (counts_training or not each.trains):
                line = next((line for line in each.lines if line not in lines), each.lines[0])
                found = (self._unused_graphs if each.trains else self._evaluations).setdefault(
                    line, _Forwards()
                )
                found.saved_bytes = max(found.saved_bytes, each.saved_bytes)
                self._unused_calls[line, each.backwards] += each.trains
                found.ops.update(self._ops_without_backward(each.ops.start, end))
        if used and not any(each.trains for each in used):
            self._in_evaluation_mode |= dict.fromkeys(each.lines[0] for each in used)
        self._graphs.clear()
        return used

    def _is_used(self, graph: _Graph) -> bool:
        """Whether backward has run through a graph of this step."""
        leaves, nodes = self._backwards.reached, self._backwards.reached_nodes
        # Parameters in a functional call may be no leaves.
        by_nodes = len(nodes) < MOST_NODES and bool(graph.nodes)
        return not (nodes.isdisjoint(graph.nodes) if by_nodes else leaves.isdisjoint(graph.parameters))

    def _ops_without_backward(self, first: int, end: int) -> Iterator[int]:
        """Ops of the forward from an unused call on, up to one that backward uses."""
        ops, numbers, used = self._ops.log.ops, self._ops.nodes, self._backwards.reached_nodes
        for index in range(first, end):
            made = range(numbers[index - 1] if index else 0, numbers[index])
            if ops[index].phase is Phase.BACKWARD or not used.isdisjoint(made):
                return
            if ops[index].phase is Phase.FORWARD:
                yield index

    @property
    def _often_unused(self) -> dict[str, _Forwards]:
        """Lines whose graphs no backward has used, by more than one call; of one that trains, in a row."""
        calls = dict[str, list[int]]()
        for (line, _), count in self._unused_calls.items():
            calls.setdefault(line, []).append(count)
        return {
            line: found
            for line, found in self._unused_graphs.items()
            if (max if line in self._training_lines else sum)(calls[line]) > 1
        }

    def _note_not_optimized(self, used: list[_Graph]) -> None:
        stepped = _ids_of_parameters(self._optimizers.values())
        if not stepped & self._names.keys():  # master weights are stepped in the place of the model's
            return
        gradients = {
            id(parameter): (".".join(filter(None, (prefix, name))), parameter.grad.nbytes)
            for prefix, model in self._ops.modules.alive()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
            and parameter.grad.layout is torch.strided
            and id(parameter) not in self._optimized
        }
        self._not_optimized_models.clear()
        in_models = set[int]()
        for each in used:
            own = each.parameters & gradients.keys()
            if own and each.model in self._models_in_steps and each.parameters.isdisjoint(self._optimized):
                first = each, _Forwards(), sum(gradients[key][1] for key in own)
                _, found, _ = self._not_optimized_models.setdefault(each.model, first)
                found.ops.update(() if each.has_inputs_with_graph else each.ops)
                in_models |= own
        self._not_optimized = dict(each for key, each in gradients.items() if key not in in_models)

    def _found_not_optimized(self, trace: Trace) -> Iterator[NotOptimized]:
        for key, (graph, forwards, gradient_bytes) in self._not_optimized_models.items():
            yield NotOptimized(
                name=self._models_in_steps[key][0],
                line=graph.lines[0],
                size_bytes=gradient_bytes + forwards.found("", trace).saved_bytes,
                passes_gradients_on=graph.has_inputs_with_graph,
            )

    def _join_first_steps(self) -> None:
        """Take what seemed the end of the first step for a part of it: another optimizer steps too."""
        end, ops = self._ends.pop(), self._ops.log.ops
        self._first_nodes.clear()
        self._backwards.noted = [replace(each, step=0) for each in self._backwards.noted]
        self._stepped = {*self._optimizers.keys()}
        self._held_in_forward, self._began = {}, None
        for seen in (
            self._evaluations,
            self._in_evaluation_mode,
            self._without_gradient,
            self._models_in_steps,
        ):
            seen.clear()
        self._unused_graphs.clear()
        self._unused_calls.clear()
        self._ops.position.step = 0
        for place in range(end.op, len(ops)):
            ops[place] = structs.replace(ops[place], step=0)

    def _note_time(self, optimizer: Optimizer, now: float) -> None:
        """Time a step that is not recorded, from the end of the one before."""
        if id(optimizer) != self._timed_optimizer or len(self._after) == self._asked:
            return
        if self._began is not None and self._profiled_seconds is None:
            if self._profile.end():
                self._profile.begin()
            else:
                self._profiled_seconds = time.perf_counter() - self._began
                self._core_waits = WaitsForCores()
        elif self._began is not None:
            self._after.append((now - self._began, self._waited))
            if len(self._after) == self._asked:
                self._await_device()
                assert self._core_waits is not None
                self._core_wait_fraction = self._core_waits.fraction()
                self.on_step()
        self._began, self._waited = time.perf_counter(), 0.0

    def _await_device(self) -> None:
        """Count the work that the timed steps have launched and the device has yet to do.

        The host may be ahead of the device by steps: what it waited for data meanwhile did not delay them.
        """
        if self._ops.device_type == "cuda":
            began, count = time.perf_counter(), len(self._after)
            torch.cuda.synchronize()
            ahead = time.perf_counter() - began
            seconds, waited = (sum(each) for each in zip(*self._after, strict=True))
            self._after = [((seconds + ahead) / count, max(waited - ahead, 0.0) / count)] * count

    @property
    def _untrained_bytes(self) -> dict[str, int]:
        """Bytes of models that run in steps and that no backward has reached, by name.

        Frozen parts of a model that is trained, which a recomputation may call by themselves, are none.
        """
        found: dict[str, int] = {}
        # What an optimizer has that steps less often than others is trained too.
        reached = self._backwards.ever_reached | self._optimized
        models = self._models_in_steps.values()
        trained = [parameters for _, _, parameters in models if not parameters.isdisjoint(reached)]
        for name, size_bytes, parameters in models:
            is_part = any(parameters <= each for each in trained)
            if parameters and parameters.isdisjoint(reached) and not is_part:
                found[name] = found.get(name, 0) + size_bytes
        return found

    @property
    def _names(self) -> dict[int, str]:
        return {
            id(parameter): ".".join(filter(None, (prefix, name)))
            for prefix, model in reversed(self._ops.modules.alive())
            for name, parameter in model.named_parameters()
        }


_entered: list[Watch] = []


def _leave_in_fork() -> None:
    for each in reversed(_entered):
        each.leave_in_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_in_fork)


def _ids_of_parameters(optimizers: Iterable[Optimizer]) -> set[int]:
    return {id(parameter) for each in optimizers for parameter in parameters_of(each)}


def _is_on_host(model: nn.Module) -> bool:
    """Whether a model has parameters, all of them on the host."""
    return {each.device.type for each in model.parameters()} == {"cpu"}


def _calling_before_compiled_code(function: Callable[[], None]) -> Callable[[], None]:
    """Call a function before compiled code is called; returns what ends that.

    Where torch's compiler is not loaded yet, `torch.compile` loads it. Before each call of compiled code it
    calls `_is_skip_guard_eval_unsafe_stance`, and then keeps whether modes are entered until the call returns.
    Before that, a compiled module asks whether there are hooks of all modules, and warns of them.
    """
    ends = ExitStack()

    def after_function(asked: Callable[[], bool]) -> Callable[[], bool]:
        def noted() -> bool:
            function()
            return asked()

        return noted

    def follow() -> None:
        from torch._dynamo import eval_frame

        for where, name in (
            (eval_frame, "_is_skip_guard_eval_unsafe_stance"),
            (torch.nn.modules.module, "_has_any_global_hook"),
        ):
            ends.enter_context(replaced(where, name, after_function(getattr(where, name))))

    def loading(*args: Any, **named: Any) -> Any:
        found = compile_(*args, **named)
        if not is_followed and "torch._dynamo.eval_frame" in sys.modules:
            is_followed.append(True)
            follow()
        return found

    compile_, is_followed = torch.compile, list[bool]()
    if "torch._dynamo.eval_frame" in sys.modules:
        follow()
    else:
        ends.enter_context(replaced(torch, "compile", loading))
    return ends.close
