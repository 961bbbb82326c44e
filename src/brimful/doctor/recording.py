"""The dispatch mode of a watched run: ops run as they are, and are recorded with the memory that they make.

Private torch APIs used here: `torch._C._current_autograd_node`, `torch._C._autograd._get_sequence_nr`,
`Node._sequence_nr`, `torch.utils._python_dispatch._get_current_dispatch_mode`,
`_get_current_dispatch_mode_stack` (checked: torch 2.13, 2.11).
"""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from msgspec import structs
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _get_current_dispatch_mode_stack,
)

from brimful.batches import own_part, tensors_in
from brimful.capture.recording.blocks import Block, BlockEvent
from brimful.capture.recording.facts import StepFacts
from brimful.capture.recording.ledger import StorageLedger
from brimful.capture.recording.modules import ModuleCalls
from brimful.capture.recording.op_info import OpInfo, describe_op
from brimful.capture.recording.op_log import OpLog
from brimful.capture.recording.position import StepPosition
from brimful.capture.recording.work import work_of
from brimful.doctor.evidence import Failure
from brimful.doctor.host_copies import HostCopies
from brimful.execution.held_memory import size_after
from brimful.execution.out_of_memory import out_of_memory
from brimful.torch_utils.graphs import grad_fn_of, saved_by, storage_key
from brimful.torch_utils.held_names import variable_of
from brimful.torch_utils.lines import calling_line
from brimful.torch_utils.wrapper_tensors import calls_ops_on_parts, inner_tensors
from brimful.trace import Category, Phase
from brimful.trace.ddp import BUCKET

_DIVISIONS = frozenset(
    {
        torch.ops.aten.div_.Tensor,
        torch.ops.aten.div_.Scalar,
        torch.ops.aten._foreach_div_.Scalar,
        torch.ops.aten._foreach_div_.Tensor,
        torch.ops.aten.div.Tensor,
        torch.ops.aten.div.Scalar,
        torch.ops.aten._foreach_div.Scalar,
        torch.ops.aten._foreach_div.Tensor,
    }
)
"""Ops that divide tensors, in place or not."""


_OF_PARAMETERS = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)
"""Categories of blocks that have the name of a parameter."""
_DDP = "torch.nn.parallel.distributed"
"""Functions of this module call the reducer, which makes the buckets as empty tensors."""
_DISPATCHING = (__name__, "torch.utils._python_dispatch")
_MOST_OPS = 300_000
"""Ops that are recorded. A choice: 200 MB of records, and a hundred steps of a large model."""


class CalledModules(ModuleCalls):
    """Follows the module calls of all models, each of which is named when it is called for the first time.

    The paths of one model have no prefix. Where others that share no parameters with it are called too, the
    paths of each begin with the variable that holds it, or else with its class. `on_call` is called with each
    model before it runs, `on_return` after it did.
    """

    def __init__(self, mode: TorchDispatchMode) -> None:
        super().__init__()
        self._mode = mode
        self.on_call: Callable[[nn.Module], None] = lambda _model: None
        self.on_return: Callable[[nn.Module, Any], None] = lambda _model, _inputs: None
        self.on_rename: Callable[[nn.Module, str, dict[str, str]], None] = lambda _model, _prefix, _paths: None
        """Called with the first model once it gets a prefix, and its new paths by those before."""
        self.on_error: Callable[[Exception], None] = _raise
        """Called with an error of naming modules: those of the run are its own."""
        self.is_paused = False
        self.called: list[str] = []
        """Classes of the models that were called, in the order of their first calls."""
        self.batch_norms: dict[str, None] = {}
        """Paths of the BatchNorm modules that ran in training mode."""
        self._models: dict[str, weakref.ref[nn.Module]] = {}
        self._first_name = ""
        """The prefix that the paths of the first model get if there are others."""

    def alive(self) -> list[tuple[str, nn.Module]]:
        """The models that were called and are there, each with the prefix of its paths."""
        models = ((prefix, reference()) for prefix, reference in self._models.items())
        return [(prefix, model) for prefix, model in models if model is not None]

    @property
    def is_in_call(self) -> bool:
        """Whether a module's forward runs."""
        return bool(self._stack)

    def name_of(self, model: nn.Module) -> str:
        """The prefix of a model's paths, or else the variable that holds it, or else its class."""
        known = (prefix for prefix, each in self.alive() if prefix and each is model)
        return next(known, "") or variable_of(model, sys._getframe()) or type(model).__name__

    def _is_followed(self) -> bool:
        # Threads that autograd begins have the mode too: on CUDA they call modules again that are recomputed.
        return not self.is_paused and any(each is self._mode for each in _get_current_dispatch_mode_stack())

    def _enter(self, module: nn.Module, args: Any) -> None:
        try:
            self._name(module)
        except Exception as error:
            self.on_error(error)
        super()._enter(module, args)
        if module.training and type(module).__name__.startswith("BatchNorm"):
            self.batch_norms.setdefault(self._top())

    def _name(self, module: nn.Module) -> None:
        """Name the modules of a model that is called."""
        if not self._stack:
            known = self._models.get(self._names.get(id(module), "?"))
            if id(module) not in self._names or (known is not None and known() is not module):
                prefix = self.name_of(module)
                if not self.called:
                    self._first_name, prefix = prefix, ""
                self._prefix_first_beside(module)
                prefix = self._unused(prefix)
                self.called.append(type(module).__name__)
                self._models[prefix] = weakref.ref(module)
                self.add(module, prefix)
            self.on_call(module)

    def _unused(self, prefix: str) -> str:
        while prefix in self._models:
            prefix += "'"
        return prefix

    def _prefix_first_beside(self, other: nn.Module) -> None:
        """Give the paths of the first model their prefix, where another one is called."""
        first = self._models[""]() if "" in self._models else None
        if first is None:
            return
        own, others = ({id(each) for each in model.parameters()} for model in (first, other))
        if not (own and others and own.isdisjoint(others)):
            return
        prefix = self._unused(self._first_name)
        self._models = {name or prefix: model for name, model in self._models.items()}
        before = {id(each): self._names[id(each)] for each in first.modules() if id(each) in self._names}
        self.add(first, prefix)
        paths = {path: self._names[key] for key, path in before.items()}
        self._called = {paths.get(path, path): None for path in self._called}
        self._owners = [paths.get(path, path) for path in self._owners]
        self._last_backward = paths.get(self._last_backward, self._last_backward)
        self.batch_norms = {paths.get(path, path): None for path in self.batch_norms}
        self.on_rename(first, prefix, paths)

    def _leave(self, module: nn.Module, inputs: Any) -> None:
        super()._leave(module, inputs)
        if not self._stack:
            self.on_return(module, inputs)


class WatchedOps(TorchDispatchMode):
    """Records ops and blocks of memory of running code while it is entered.

    `device_type` is "cuda" or "cpu": only its memory is followed. A block holds a parameter, an input and so on
    as `mark` says; else the phases in which it is made and freed decide.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type, self._process = device_type, os.getpid()
        self.modules, self.facts = CalledModules(self), StepFacts()
        self.modules.on_rename = self._rename
        self.position = StepPosition(host_is_device=device_type == "cpu")
        self.log = OpLog(self.modules, self.position, located_bytes=0)
        self.ledger = StorageLedger(self.log.ops, self.facts)
        self.in_optimizer = self.is_evaluating = False
        """Whether an optimizer steps, and whether a model runs in evaluation mode without gradients."""
        self.is_paused = self.is_skipping = False
        """Whether ops run unseen, and whether they are not recorded but for running out of memory."""
        self.failed: Failure | None = None
        self.caught: dict[str, None] = {}
        """Lines at which memory ran out, and after which the run went on."""
        self.host_reads: dict[str, int] = {}
        """How often lines of code wait for a value from the device, as `.item()` does, within steps."""
        self.host_copies = HostCopies(StorageLedger(self.log.ops, self.facts))
        self.blocks, self.events = self.ledger.blocks, self.ledger.events
        """Until memory ran out, if it did."""
        self.last_reads: dict[int, int] = {}
        """The op that read each block last."""
        self.divides_gradients = False
        self.softmax_twice: dict[str, None] = {}
        """Lines that call a softmax whose result another one reads."""
        self.on_error: Callable[[Exception], None] = _raise
        """Called with an error of recording itself."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called when memory has run out, before what is held is noted."""
        self.on_full: Callable[[], None] = lambda: None
        """Called after each op once no more are to be recorded."""
        self._infos: dict[Any, OpInfo] = {}
        self.nodes: list[int] = []
        """For each op, how many autograd nodes there were when it ran, its own included."""
        self._seen_nodes: set[int] = set()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing while the context is open."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def follow_host(self) -> None:
        """Follow the host's memory from now on: on a machine with a GPU, a model trains on the host."""
        self.device_type, self.position = "cpu", StepPosition(host_is_device=True)
        self.log = OpLog(self.modules, self.position, located_bytes=0)
        self.ledger = StorageLedger(self.log.ops, self.facts)
        self.blocks, self.events = self.ledger.blocks, self.ledger.events
        self.nodes.clear()
        self.last_reads.clear()

    def _rename(self, model: nn.Module, prefix: str, paths: dict[str, str]) -> None:
        """Give what is recorded of a model the names that it has from now on."""
        ops, names = self.log.ops, {name for name, _ in model.named_parameters()}
        ops[:] = [structs.replace(op, module=paths.get(op.module, op.module)) for op in ops]
        for block in self.ledger.blocks:
            if block.category in _OF_PARAMETERS and block.label.partition(" ")[0] in names:
                block.label = f"{prefix}.{block.label}"

    def forget_failure(self) -> None:
        """Note that the run went on after memory ran out."""
        if self.failed is not None:
            self.caught.setdefault(self.failed.line)
        self.failed = None
        self.blocks, self.events = self.ledger.blocks, self.ledger.events

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def leave(self) -> None:
        """Leave the stack of modes, if nothing else is above; not in backward, which restores it."""
        if _get_current_dispatch_mode() is self and torch._C._current_autograd_node() is None:
            self.__exit__(None, None, None)

    def begin(self) -> None:
        """Begin the first step: what is there already is the model, or was made before training."""
        if self.position.phase is Phase.SETUP:
            for index in self.ledger.live.values():
                block = self.ledger.blocks[index]
                block.category = block.category or Category.OTHER_TENSORS
            self.position.enter(Phase.FORWARD, 0)

    def mark(self, tensor: Tensor, category: Category, label: str) -> None:
        """Set what a tensor on the watched device holds, and its name."""
        for part in inner_tensors(own_part(tensor)):
            if self._is_followed(part) and not calls_ops_on_parts(type(part)):
                index = self.ledger.live.get(storage_key(part) or 0)
                is_bucket = index is not None and self.ledger.blocks[index].label == BUCKET
                self.ledger.mark(part, category, BUCKET if is_bucket else label)

    def mark_unseen(self) -> None:
        """Count the tensors that were made while ops were not recorded, and are still there."""
        for each in gc.get_objects():
            kind = type(each)
            is_tensor = issubclass(kind, Tensor) and not (
                issubclass(kind, FakeTensor) or calls_ops_on_parts(kind)
            )
            if is_tensor and self._is_followed(each) and self.ledger.index_of(each) is None:
                self._note_read(each)

    def mark_saved(self, tensors: Iterable[Tensor]) -> None:
        """Note what the graphs of tensors save: it is there for backward, also where a name holds it longer."""
        left = [grad_fn_of(each) for each in tensors]
        while left:
            node = left.pop()
            if node is None or (number := node._sequence_nr()) in self._seen_nodes:
                continue
            saved, _ = saved_by(node)
            if saved is None:  # backward has freed them
                continue
            self._seen_nodes.add(number)
            left += [following for following, _ in node.next_functions]
            for tensor in saved:
                index = self.ledger.live.get(storage_key(tensor) or 0)
                if index is not None:
                    block = self.ledger.blocks[index]
                    block.category = block.category or Category.SAVED_TENSORS

    def bytes_made(self, storages: Iterable[int]) -> int:
        """Bytes of those storages, by their names, that ops in steps have made."""
        blocks = (self.ledger.blocks[self.ledger.live[each]] for each in storages if each in self.ledger.live)
        made = ((each.size_bytes, each.op) for each in blocks)
        return sum(size for size, op in made if op is not None and self.log.ops[op].phase is not Phase.SETUP)

    def is_read(self, tensor: Tensor) -> bool:
        """Whether something other than backward has read a tensor."""
        index = self.ledger.index_of(tensor)
        read = None if index is None else self.last_reads.get(index)
        return read is not None and (
            read == len(self.log.ops) or self.log.ops[read].phase is not Phase.BACKWARD
        )

    @property
    def live_bytes(self) -> int:
        """Bytes of the blocks that live now."""
        return sum(self.ledger.blocks[index].size_bytes for index in self.ledger.live.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(calls_ops_on_parts, types)):
            return NotImplemented  # the ops on the parts come here again
        if self.is_paused or os.getpid() != self._process:  # a worker that reads data
            return func(*args, **kwargs)
        if isinstance(func, HigherOrderOperator):  # `Watch` stops before torch's own are compiled
            self.on_error(NotImplementedError(f"the operator {func.name()} calls functions"))
            return func(*args, **kwargs)
        info = self._infos.get(func)
        if info is None:
            info = self._infos[func] = describe_op(func, ())
        try:
            out = func(*args, **kwargs)
        except Exception as error:
            try:
                if self.failed is None and (message := out_of_memory(error, error.__context__)):
                    self._note_failure(info.name, message)
            except Exception as own:
                self.on_error(own)
            raise
        if not (info.is_metadata or self.is_skipping):
            try:
                with torch._C.DisableTorchFunction():
                    self._record(info, func, args, kwargs, out)
            except Exception as error:
                self.on_error(error)
        return out

    def _note_failure(self, op: str, message: str) -> None:
        """Keep what is there as memory runs out, with what was asked for: frames that unwind free it."""
        size_bytes = size_after(message, r"[Tt]ried to allocate ")
        self.on_failure()
        is_backward = torch._C._current_autograd_node() is not None
        phase = Phase.BACKWARD if is_backward else self.position.phase
        self.failed = Failure(
            op=op, phase=phase, line=calling_line(), message=message, requested_bytes=size_bytes
        )
        self.blocks, self.events = [*self.ledger.blocks], [*self.ledger.events]
        if size_bytes is not None:
            self.events.append(BlockEvent(True, len(self.blocks), len(self.log.ops) - 1))
            asked = Block(size_bytes, None, self.failed.asked_label, category=Category.TEMPORARIES)
            self.blocks.append(asked)

    def _record(self, info: OpInfo, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        inputs = [each for each in tensors_in((args, kwargs)) if self._is_followed(each)]
        self._enter_phase(inputs)
        for tensor in inputs:
            index = self.ledger.index_of(tensor)
            if index is None:  # nothing here made it
                self._note_read(tensor)
            elif not (info.is_view and self.position.phase is Phase.BACKWARD):
                self.last_reads[index] = len(self.log.ops)
        is_forward = self.position.phase is Phase.FORWARD and torch.is_grad_enabled()
        if is_forward and func is not torch.ops.aten.detach.default:  # autograd calls it as it makes a node
            self.mark_saved(inputs)
        is_in_step = self.position.phase in (Phase.FORWARD, Phase.BACKWARD) or self._is_after_backward
        if info.reads_values and inputs and is_in_step and not _is_of_scaler():
            line = calling_line()
            self.host_reads[line] = self.host_reads.get(line, 0) + 1
        if self.device_type != "cpu" and is_in_step:
            if self.modules.is_in_call:
                self.host_copies.follow(info, args, kwargs, out)
            self.host_copies.note(func, args, out, self.device_type)
        if info.has_no_cost:
            return
        outputs = list(tensors_in(out))
        if func is torch.ops.aten._log_softmax.default:
            made = self._made_by(args[0])
            if made is not None and self.log.ops[made].name == "aten._softmax.default":
                self.softmax_twice.setdefault(self.log.ops[made].line)
        is_of_script = not self.in_optimizer and torch._C._current_autograd_node() is None
        if func in _DIVISIONS and is_of_script and inputs:
            made = self._made_by(inputs[0])
            self.divides_gradients |= made is not None and self.log.ops[made].phase is Phase.BACKWARD
        if len(self.log.ops) >= _MOST_OPS:
            self.on_full()
            return
        op = self.log.add(info, work_of(info, func, args, kwargs, out, inputs, outputs), 0)
        self.nodes.append(torch._C._autograd._get_sequence_nr())
        for tensor in outputs:
            if self._is_followed(tensor):
                self.ledger.track(tensor, info.name, op)
                is_empty = func is torch.ops.aten.empty.memory_format
                if is_empty and tensor.is_floating_point() and _is_called_by(_DDP):
                    self.ledger.mark(tensor, Category.OTHER_TENSORS, BUCKET)

    def _made_by(self, tensor: Tensor) -> int | None:
        """Index of the op that made a tensor's memory; None if none did."""
        index = self.ledger.index_of(tensor) if self._is_followed(tensor) else None
        return None if index is None else self.ledger.blocks[index].op

    @property
    def _is_after_backward(self) -> bool:
        return self.position.phase is Phase.OPTIMIZER and not self.in_optimizer

    def _is_followed(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.device_type and tensor.layout is torch.strided

    def _note_read(self, tensor: Tensor) -> None:
        shape = "×".join(map(str, tensor.shape)) or "1"
        line = calling_line()
        label = f"{shape} {str(tensor.dtype).removeprefix('torch.')}" + (f" read in {line}" if line else "")
        is_parameter = isinstance(tensor, nn.Parameter)
        self.ledger.mark(tensor, Category.PARAMETERS if is_parameter else Category.OTHER_TENSORS, label)

    def _enter_phase(self, inputs: list[Tensor]) -> None:
        """Find the phase: backward runs under an autograd node, clipping after it without gradients.

        An optimizer's step may call a closure, which runs forward and backward with gradients.
        """
        at, is_backward = self.position, torch._C._current_autograd_node() is not None
        is_update = self.in_optimizer and not (
            torch.is_grad_enabled() and any(each.requires_grad for each in inputs)
        )
        if is_backward:
            self.begin()
            at.phase = Phase.BACKWARD
        elif at.phase is Phase.SETUP:
            return
        elif self.is_evaluating:
            at.phase = Phase.EVALUATION
        elif is_update or (at.phase in (Phase.BACKWARD, Phase.OPTIMIZER) and not torch.is_grad_enabled()):
            at.phase = Phase.OPTIMIZER
        else:
            at.micro_batch += at.phase is Phase.BACKWARD
            at.phase = Phase.FORWARD


def _raise(error: Exception) -> None:
    raise error


def _is_called_by(module: str) -> bool:
    """Whether the innermost function outside of this module and of torch's dispatch is one of a module."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") in _DISPATCHING:
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == module


def _is_of_scaler() -> bool:
    """Whether a `GradScaler` reads whether gradients are finite, as it does before each step."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != "torch.amp.grad_scaler":
        frame = frame.f_back
    return frame is not None
