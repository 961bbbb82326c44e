"""Watching a run: its first optimizer steps are recorded, the next ones only timed, then it is left alone.

Private torch APIs used here: `torch.utils.data.dataloader._BaseDataLoaderIter`,
`torch._dynamo.eval_frame._callback_from_stance` (checked: torch 2.13).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Self

import torch
from msgspec import structs
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from brimful.batches import named_tensors, tensors_in
from brimful.capture.libraries import checkpoints_without_gradient_noted
from brimful.capture.recording.blocks import to_events, to_storages
from brimful.capture.recording.lines import calling_line
from brimful.doctor.evaluation import FirstEvaluation
from brimful.doctor.evidence import Backward, Evaluation, Evidence, StepEnd
from brimful.doctor.names import Holding, held_by_names, leaves_of
from brimful.doctor.recording import WatchedOps
from brimful.settings import Settings
from brimful.torch_utils.replaced import replaced
from brimful.trace import Category, Phase, Trace

STEPS = 3
"""Optimizer steps that are recorded by default; as many are timed after them. A choice."""


class Watch:
    """Watches a run while it is entered; `evidence` is what it saw.

    Ops run as they are: what the run computes, draws and prints stays the same. So nothing is recorded once it
    calls compiled code, unless `eager` runs compiled code eagerly in the recorded steps, which rounds
    otherwise.
    """

    def __init__(self, steps: int = STEPS, *, eager: bool = False) -> None:
        self._device_type = "cuda" if torch.cuda.is_available() else "cpu"
        self._ops = WatchedOps(self._device_type)
        self._ops.modules.on_call, self._ops.modules.on_return = self._before_call, self._after_call
        self._asked, self._recording, self._hooks = steps, ExitStack(), ExitStack()
        self._is_recording, self._eager, self._compiled = False, eager, ""
        self._first_evaluation: FirstEvaluation | None = None
        self._optimizers: dict[int, Optimizer] = {}
        self._stepped: set[int] = set()
        self._ends: list[StepEnd] = []
        self._after: list[tuple[float, float]] = []
        """Seconds of each step that is timed, and those of them that it waited for data."""
        self._waited = 0.0
        self._began: float | None = None
        self._backwards: list[Backward] = []
        self._evaluations: dict[str, Evaluation] = {}
        self._bytes_before_call = 0
        self._calls: list[tuple[str, bool]] = []
        """Forwards since the last backward that build a graph: the line, and whether the model trains."""
        self._graphs: list[tuple[Evaluation, nn.Module]] = []
        """Forwards of this step in training mode that build a graph, each with its model."""
        self._unused_graphs: dict[str, Evaluation] = {}
        self._in_evaluation_mode: dict[str, None] = {}
        self._not_optimized: dict[str, int] = {}
        self._cache_flushes: dict[str, int] = {}
        self._held_in_forward: dict[str, Holding] = {}
        self._is_first_call = False
        """Whether the next training forward is the first after a step."""
        self._reached: set[int] = set()
        """Parameters that a backward of this step has reached."""
        self._ever_reached: set[int] = set()
        self._workers: dict[int, int] = {}
        self._flags: dict[str, None] = {}
        self._shapes: set[tuple[tuple[int, ...], ...]] = set()
        self._without_gradient: dict[str, None] = {}
        self._first_node = 0

    def __enter__(self) -> Self:
        self._hooks.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._hooks.callback(register_optimizer_step_post_hook(self._after_step).remove)
        self._hooks.enter_context(self._timing_data())
        stack = self._recording
        stack.enter_context(self._ops.modules.follow())
        stack.enter_context(self._noting_backwards())
        stack.enter_context(self._noting_cache_flushes())
        stack.enter_context(self._heeding_compilation())
        stack.enter_context(checkpoints_without_gradient_noted(self._ops.facts))
        self._ops.__enter__()
        self._is_recording = True
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop()
        self._hooks.close()
        if self._first_evaluation is not None:
            self._first_evaluation.remove()

    def evidence(self) -> Evidence:
        """What was seen so far."""
        ops = self._ops
        late = () if self._first_evaluation is None else self._first_evaluation.found
        trace = Trace(
            job="",
            settings=Settings(micro_batch_size=1),
            device_kind="cuda" if self._device_type == "cuda" else "cpu",
            torch_version=torch.__version__,
            captured_steps=max(len(self._ends), 1),
            captured_micro_batches=1,
            ops=tuple(ops.log.ops),
            storages=to_storages(ops.blocks, ops.events, ops.log.ops),
            events=to_events(ops.blocks, ops.events),
            module_classes=ops.modules.classes,
            uncertain_ops=ops.facts.all_uncertain,
            is_own_loop=True,
            without_gradient=tuple(self._without_gradient),
            checkpoints_without_gradient=ops.facts.checkpoints_without_gradient,
        )
        return Evidence(
            trace=trace,
            steps=tuple(self._ends),
            seconds_after=tuple(seconds for seconds, _ in self._after),
            data_seconds_after=tuple(waited for _, waited in self._after),
            evaluations=(*self._evaluations.values(), *late),
            trained_in_evaluation_mode=tuple(self._in_evaluation_mode),
            unused_graphs=tuple(self._unused_graphs.values()),
            untrained_bytes=self._untrained_bytes,
            models=tuple(type(each).__name__ for each in ops.modules.models.values()),
            not_optimized=dict(self._not_optimized),
            cache_flushes=dict(self._cache_flushes),
            loader_workers=tuple(self._workers.values()),
            flags=tuple(self._flags),
            input_shapes=len(self._shapes),
            backwards=tuple(self._backwards),
            host_reads=dict(ops.host_reads),
            held_in_forward=self._held_in_forward,
            compiled=self._compiled,
            failed=ops.failed,
            measured_peak_bytes=torch.cuda.max_memory_allocated() if self._device_type == "cuda" else None,
        )

    def _stop(self) -> None:
        """Record no more, but for the first evaluation."""
        if self._is_recording and self._ops.leave():
            self._is_recording = False
            self._recording.close()
            if not self._in_evaluation_mode and not self._evaluations and not self._compiled:
                self._first_evaluation = FirstEvaluation()

    # What models do

    def _before_call(self, model: nn.Module, args: Any) -> None:
        trains = torch.is_grad_enabled() and any(each.requires_grad for each in model.parameters())
        self._ops.is_evaluating = not (model.training or torch.is_grad_enabled())
        if not trains:
            return
        self._ops.begin()
        self._bytes_before_call = self._ops.live_bytes
        if self._is_first_call:
            self._is_first_call = False
            self._held_in_forward = held_by_names(sys._getframe(), self._first_node)
        inputs = [
            each for each in tensors_in(args) if not isinstance(each, nn.Parameter) and not each.requires_grad
        ]
        for tensor in inputs:
            self._ops.mark(tensor, Category.INPUTS, f"input of {type(model).__name__}")
        self._shapes.add(tuple(tuple(each.shape[1:]) for each in inputs))

    def _after_call(self, model: nn.Module) -> None:
        self._ops.is_evaluating = False
        if not torch.is_grad_enabled() or not any(each.requires_grad for each in model.parameters()):
            return
        line, saved_bytes = calling_line(), max(self._ops.live_bytes - self._bytes_before_call, 0)
        found = Evaluation(line=line, saved_bytes=saved_bytes)
        self._calls.append((line, model.training))
        if model.training:
            self._graphs.append((found, model))
        elif line not in self._evaluations or self._evaluations[line].saved_bytes < saved_bytes:
            self._evaluations[line] = found

    @contextmanager
    def _noting_backwards(self) -> Iterator[None]:
        backward = torch.autograd.backward

        def noted(tensors: Any, *args: Any, **named: Any) -> None:
            self._ops.begin()
            self._note_backward(
                list(tensors_in(tensors)), bool(named.get("retain_graph") or (args[1:2] or [0])[0])
            )
            backward(tensors, *args, **named)

        with replaced(torch.autograd, "backward", noted):
            yield

    def _note_backward(self, losses: list[Any], retains_graph: bool) -> None:
        models = self._ops.modules.models.values()
        node = losses[0].grad_fn if losses else None
        reached = leaves_of(node)
        leaves = [leaf for leaf in reached if id(leaf) not in self._reached]
        loses = any(id(leaf) in self._reached and leaf.grad is None for leaf in reached)
        self._reached.update(map(id, leaves))
        self._ever_reached.update(map(id, leaves))
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        self._ops.is_paused = True
        adds_gradients = any(bool(each.any()) for each in gradients)
        self._ops.is_paused = False
        self._backwards.append(
            Backward(
                line=calling_line(),
                step=self._ops.position.step,
                last_node="" if node is None else node.name(),
                retains_graph=retains_graph,
                syncs=any(getattr(model, "require_backward_grad_sync", False) for model in models),
                gradient_bytes=sum(each.nbytes for each in gradients),
                adds_gradients=adds_gradients,
                loses_gradients=loses and not self._stepped,
            )
        )
        if self._calls and not any(trains for _, trains in self._calls):
            for line, _ in self._calls:
                self._in_evaluation_mode.setdefault(line)
                self._evaluations.pop(line, None)
        self._calls.clear()

    @contextmanager
    def _heeding_compilation(self) -> Iterator[None]:
        """Run compiled code eagerly, or record no more when some is called."""
        with ExitStack() as stack:
            if self._eager:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            else:
                stack.callback(_calling_before_compiled_code(self._stop_before_compiled_code))
            yield

    def _stop_before_compiled_code(self) -> None:
        if self._is_recording:
            self._compiled = calling_line() or "the script"
            self._stop()

    @contextmanager
    def _noting_cache_flushes(self) -> Iterator[None]:
        flush = torch.cuda.empty_cache

        def noted() -> None:
            if self._ops.position.phase is not Phase.SETUP:
                line = calling_line()
                self._cache_flushes[line] = self._cache_flushes.get(line, 0) + 1
            flush()

        with replaced(torch.cuda, "empty_cache", noted):
            yield

    @contextmanager
    def _timing_data(self) -> Iterator[None]:
        read: Callable[[Any], Any] = _BaseDataLoaderIter.__next__

        def timed(loader: Any) -> Any:
            began = time.perf_counter()
            self._workers[id(loader)] = loader._num_workers
            try:
                return read(loader)
            finally:
                self._waited += time.perf_counter() - began

        with replaced(_BaseDataLoaderIter, "__next__", timed):
            yield

    # What optimizers do

    def _before_step(self, optimizer: Optimizer, _args: Any, _named: Any) -> None:
        if not self._is_recording:
            return
        ops = self._ops
        if self._ends and len(self._ends) == 1 and id(optimizer) not in self._optimizers:
            self._join_first_steps()
        self._optimizers.setdefault(id(optimizer), optimizer)
        ops.begin()
        names = self._names
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter), "parameter")
                ops.mark(parameter, Category.PARAMETERS, name)
                if parameter.grad is not None and parameter.grad.layout is torch.strided:
                    ops.mark(parameter.grad, Category.GRADIENTS, name)
                elif parameter.grad is None and parameter.requires_grad:
                    self._without_gradient.setdefault(name)
        ops.in_optimizer = True

    def _after_step(self, optimizer: Optimizer, _args: Any, _named: Any) -> None:
        now = time.perf_counter()
        if not self._is_recording:
            self._note_time(optimizer, now)
            return
        ops = self._ops
        ops.in_optimizer = False
        names = self._names
        for parameter, state in optimizer.state.items():
            for key, value in named_tensors(state):
                name = f"{names.get(id(parameter), 'parameter')} {key.removeprefix('batch')}"
                ops.mark(value, Category.OPTIMIZER_STATE, name)
        self._stepped.add(id(optimizer))
        if self._stepped >= self._optimizers.keys():
            self._end_step(now)

    def _end_step(self, now: float) -> None:
        ops, at = self._ops, self._ops.position
        self._ends.append(
            StepEnd(
                seconds=None if self._began is None else now - self._began,
                live_bytes=ops.live_bytes,
                op=len(ops.log.ops),
                held=held_by_names(sys._getframe(), self._first_node),
            )
        )
        self._first_node = torch._C._autograd._get_sequence_nr()
        self._stepped.clear()
        self._note_not_optimized()
        for found, model in self._graphs:
            if not any(id(each) in self._reached for each in model.parameters()):
                self._unused_graphs[found.line] = found
        self._graphs.clear()
        flags = {"anomaly": torch.is_anomaly_enabled(), "cudnn.benchmark": torch.backends.cudnn.benchmark}
        self._flags |= dict.fromkeys(name for name, is_on in flags.items() if is_on)
        self._calls.clear()
        self._waited = 0.0
        self._reached.clear()
        self._is_first_call = True
        at.step, at.micro_batch, at.phase = at.step + 1, 0, Phase.OPTIMIZER
        self._began = time.perf_counter()
        if len(self._ends) >= self._asked:
            self._stop()

    def _note_not_optimized(self) -> None:
        stepped = {
            id(p) for each in self._optimizers.values() for group in each.param_groups for p in group["params"]
        }
        for prefix, model in self._ops.modules.models.items():
            for name, parameter in model.named_parameters():
                if parameter.grad is not None and id(parameter) not in stepped:
                    self._not_optimized[".".join(filter(None, (prefix, name)))] = parameter.grad.nbytes

    def _join_first_steps(self) -> None:
        """Take what seemed the end of the first step for a part of it: another optimizer steps too."""
        end, ops = self._ends.pop(), self._ops.log.ops
        self._backwards = [replace(each, step=0) for each in self._backwards]
        self._stepped = {*self._optimizers}
        self._held_in_forward = {}
        self._unused_graphs.clear()
        self._began = None
        self._ops.position.step = 0
        for place in range(end.op, len(ops)):
            ops[place] = structs.replace(ops[place], step=0)

    def _note_time(self, optimizer: Optimizer, now: float) -> None:
        """Time a step that is not recorded, from the end of the one before."""
        if id(optimizer) != next(iter(self._optimizers), None):
            return
        if self._began is not None:
            self._after.append((now - self._began, self._waited))
        self._began, self._waited = now, 0.0
        if len(self._after) > self._asked:  # the first has the end of recording in it
            self._after.pop(0)
            self._hooks.close()

    @property
    def _untrained_bytes(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for model in self._ops.modules.models.values():
            parameters = list(model.parameters())
            if parameters and not any(id(each) in self._ever_reached for each in parameters):
                name = type(model).__name__
                found[name] = found.get(name, 0) + sum(each.nbytes for each in parameters)
        return found

    @property
    def _names(self) -> dict[int, str]:
        models = self._ops.modules.models.items()
        return {
            id(parameter): ".".join(filter(None, (prefix, name)))
            for prefix, model in reversed([*models])
            for name, parameter in model.named_parameters()
        }


def _calling_before_compiled_code(function: Callable[[], None]) -> Callable[[], None]:
    """Call a function before compiled code is called; returns what ends that.

    Where torch's compiler is not loaded yet, `torch.compile` loads it. Its code calls `_callback_from_stance`
    before each call of compiled code, and with None or False for what is not to be compiled.
    """
    ends = ExitStack()

    def follow() -> None:
        from torch._dynamo import eval_frame

        chosen: Callable[[Any], Any] = eval_frame._callback_from_stance

        def noted(callback: Any) -> Any:
            if callback is not None and callback is not False:
                function()
            return chosen(callback)

        ends.enter_context(replaced(eval_frame, "_callback_from_stance", noted))

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
