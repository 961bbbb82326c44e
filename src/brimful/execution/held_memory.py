"""What holds the memory when it runs out, as far as it can be seen without having watched the run.

Live tensors are found through the garbage collector, saved tensors through the graphs of autograd. Names come
from the models, and from variables of the functions that the error came through; lines from what
`recorded_lines` noted at each node. Nothing here makes a tensor, and what is returned holds none.

Private torch APIs used here: `grad_fn._raw_saved_…`, `SavedTensor.data`, `Node._sequence_nr` (checked: torch
2.13).
"""

from __future__ import annotations

import gc
import inspect
import linecache
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from types import FrameType, TracebackType
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from brimful.batches import named_tensors, own_part, tensors_in
from brimful.devices.this_machine import memory_left_bytes
from brimful.errors import SizeError
from brimful.execution.setup import expands_segments
from brimful.memory import HeldStorage
from brimful.memory.at_error import KeptHistory, KeptResults, MemoryAtError
from brimful.optimizers import parameters_of
from brimful.torch_utils.forward_lines import line_of
from brimful.torch_utils.graphs import ages_of, grad_fn_of, nodes_of, saved_by
from brimful.torch_utils.held_names import locals_of, tensors_of_names
from brimful.torch_utils.lines import innermost_line, shown_file
from brimful.torch_utils.module_names import plain_namer
from brimful.torch_utils.wrapper_tensors import calls_ops_on_parts, inner_tensors
from brimful.trace import Category, Phase
from brimful.trace.modules import LOSS, OPTIMIZER
from brimful.utils.quantities import parse_bytes

_ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"
_VIEWS = frozenset(
    {
        *("View", "UnsafeView", "ReshapeAlias", "T", "Transpose", "Permute", "Expand", "Select", "Slice"),
        *("Unsqueeze", "Squeeze", "Unbind", "Split", "SplitWithSizes", "Detach", "Alias", "AsStrided"),
    }
)
"""Nodes of ops that make no memory."""
_SIZE = r"([\d.]+ ?[KMGT]?i?B|\d+ bytes)"
_CALL_CELLS = 60
"""Characters of the source of a call that are shown. A choice."""
_ADAM = ("Adam", "AdamW")
_ENGINE = "_engine_run_backward"
_MOST_CASTS = 3
"""Nodes between a parameter and what uses it, such as its cast and transposition. A choice."""
_OPERATIONS = ("__torch_dispatch__", "__torch_function__")
"""Functions of modes, which are called by ops of the code."""


def memory_at(error: BaseException, message: str, *, first_node: int = 0) -> MemoryAtError:
    """What holds the memory of the device on which an out-of-memory error was raised.

    `message` is the first line of its message. `first_node` is the number of the first autograd node of the
    running step, if it is known: what older graphs save is history.
    """
    text = str(error) or message
    is_host = "alloc_cpu" in text or "DefaultCPUAllocator" in text or isinstance(error, MemoryError)
    device = _device_of(text, is_host=is_host)
    frames = list(_frames(error.__traceback__))
    objects = _Objects.alive().with_those_in_use_first(frames)
    seen = _Seen(device, objects, frames, first_node)
    held, adam = seen.held(), seen.of_adam
    phase = _phase(frames)
    running = seen.running_node(frames) if phase is Phase.BACKWARD and frames else None
    allocated_bytes = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    return MemoryAtError(
        message=message,
        requested_bytes=size_after(text, r"[Tt]ried to allocate "),
        line=(running[1] if running else "")
        or innermost_line((frame, traceback.tb_lineno) for frame, traceback in frames),
        peak_op=f"backward of {running[0].kind}" if running else _call_of(frames),
        peak_module=running[0].module if running else seen.module_of(frames, phase),
        peak_phase=phase,
        held=held,
        module_classes=tuple((path, type(each).__name__) for path, each in seen.names.modules.items()),
        not_found_bytes=max(allocated_bytes - sum(each.held_bytes for each in held), 0),
        unused_bytes=size_after(text, r"allocated by PyTorch, (?:with .*? private pools.*?, )?and "),
        free_bytes=_free_on_host() if is_host else _free_bytes(text, device),
        others=_others(text),
        reached_fraction=seen.reached_fraction(phase),
        largest_saved_bytes=max(
            (each.held_bytes for each in held if each.category is Category.SAVED_TENSORS), default=0
        )
        if phase is Phase.FORWARD
        else 0,
        update_bytes=seen.update_bytes,
        makes_state=seen.makes_state,
        further_bytes=seen.further_bytes,
        recomputable_bytes=seen.recomputable_bytes,
        adam_bytes=2 * sum(each.nbytes for each in adam),
        adam_parameters=sum(each.numel() for each in adam),
        adam=seen.adam,
        samples=seen.samples,
        kept=seen.kept,
        kept_bytes=seen.kept_bytes,
        results=tuple(seen.results),
        evaluates_with_gradients=phase is Phase.EVALUATION and _builds_graph(frames),
        is_checkpointed=seen.is_checkpointed,
        expands_segments=expands_segments(),
    )


def size_after(text: str, words: str) -> int | None:
    """The size that follows some words of a message; None if there is none, or it is nothing."""
    found = re.search(words + _SIZE, text) or re.search(words + r"([\d.]+ ?\w+)", text)
    return None if found is None else _bytes_of(found[1])


def _bytes_of(text: str) -> int | None:
    """The size in a text; None for nothing, and for what a driver that knows no size makes torch write."""
    number = text.replace(" bytes", "B")
    try:
        return parse_bytes(number) if re.search(r"[1-9]", number) else None
    except SizeError:
        return None


def _device_of(text: str, *, is_host: bool) -> torch.device:
    """The device that a message is about."""
    if is_host or not torch.cuda.is_initialized():
        return torch.device("cpu")
    named = re.search(r"\bGPU (\d+)\b", text)
    return torch.device("cuda", torch.cuda.current_device() if named is None else int(named[1]))


def _free_on_host() -> int:
    """Free memory of the host, as far as this process may have it."""
    free = [psutil.virtual_memory().available, *memory_left_bytes()]
    if sys.platform != "win32":
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        used = psutil.Process().memory_info().vms
        free += [] if limit == resource.RLIM_INFINITY else [max(limit - used, 0)]
    return min(free)


def _free_bytes(text: str, device: torch.device) -> int | None:
    """Free memory of a GPU, as far as torch may reserve it."""
    free = size_after(text, r"of which ")
    fraction_of = getattr(torch.cuda.memory, "get_per_process_memory_fraction", None)  # from torch 2.8 on
    if free is None or fraction_of is None or device.type == "cpu":
        return free
    may_reserve = fraction_of(device) * torch.cuda.get_device_properties(device).total_memory
    return min(free, max(int(may_reserve) - torch.cuda.memory_reserved(device), 0))


def _others(text: str) -> tuple[tuple[int, int], ...]:
    """Other processes on the card, as torch's message lists them.

    Where it does not find this process among them, as in a container, the numbers are those of the host.
    """
    if "this process has" not in text:
        return ()
    listed = re.findall(rf"Process (\d+) has {_SIZE} memory in use", text)
    sizes = ((int(number), _bytes_of(size)) for number, size in listed)
    return tuple((number, size) for number, size in sizes if number != os.getpid() and size is not None)


# Where it was


def _frames(traceback: TracebackType | None) -> Iterator[tuple[FrameType, TracebackType]]:
    """The functions that an error came through, outermost first, up to the op."""
    while traceback is not None and traceback.tb_frame.f_code.co_name not in _OPERATIONS:
        yield traceback.tb_frame, traceback
        traceback = traceback.tb_next


_Frames = list[tuple[FrameType, TracebackType]]
_Named = list[tuple[str, str, list[Tensor]]]


def _call_of(frames: _Frames) -> str | None:
    """The innermost call, as its source writes it."""
    if not frames:
        return None
    frame, traceback = frames[-1]
    code = frame.f_code
    place = [*code.co_positions()][traceback.tb_lasti // 2]
    first, last, begin, end = place
    if first is None or first != last or begin is None or end is None:
        return code.co_name
    source = linecache.getline(code.co_filename, first).encode()[begin:end].decode(errors="replace")
    shown = re.sub(r"\s+", " ", source).strip() or code.co_name
    return shown if len(shown) <= _CALL_CELLS else f"{shown[: _CALL_CELLS - 1]}…"


def _phase(frames: _Frames) -> Phase:
    files = [(frame.f_code.co_filename.replace(os.sep, "/"), frame.f_code.co_name) for frame, _ in frames]
    if any("/torch/autograd/" in file and name == _ENGINE for file, name in files):
        return Phase.BACKWARD
    if any(isinstance(locals_of(frame).get("self"), Optimizer) for frame, _ in frames):
        return Phase.OPTIMIZER
    called = [each for frame, _ in frames if isinstance(each := locals_of(frame).get("self"), nn.Module)]
    return Phase.EVALUATION if called and not called[0].training else Phase.FORWARD


def _builds_graph(frames: _Frames) -> bool:
    """Whether a forward has a result with a graph."""
    called = [values for frame, _ in frames if isinstance((values := locals_of(frame)).get("self"), nn.Module)]
    return any(grad_fn_of(tensor) is not None for values in called for tensor in tensors_in(values))


# What is alive


@dataclass(frozen=True, slots=True)
class _Objects:
    tensors: list[Tensor]
    models: list[nn.Module]
    """Modules that are in no other."""
    optimizers: list[Optimizer]

    @classmethod
    def alive(cls) -> _Objects:
        found: dict[type | None, list[Any]] = {Tensor: [], nn.Module: [], Optimizer: [], None: []}
        kinds = _Kinds()
        for each in [each for each in gc.get_objects() if kinds[type(each)] is not None]:
            found[kinds[type(each)]].append(each)
        tensors, modules, optimizers = found[Tensor], found[nn.Module], found[Optimizer]
        modules = [each for each in modules if "_modules" in vars(each)]  # others are not built yet
        inner = {id(child) for each in modules for child in each._modules.values()}
        optimizers.sort(
            key=lambda each: hasattr(each, "optimizer"), reverse=True
        )  # wrappers, of the same groups
        optimizers = [*{id(each.param_groups): each for each in optimizers}.values()]
        return cls(tensors, [each for each in modules if id(each) not in inner], optimizers)

    def with_those_in_use_first(self, frames: _Frames) -> _Objects:
        """The same with the models first that variables on the stack hold, and only their optimizers.

        Others may be garbage, or wait for their turn. Without such a model all of them count.
        """
        held, frame = set[int](), frames[-1][0] if frames else None
        while frame is not None:
            values = [*locals_of(frame).values()]
            if shown_file(frame.f_code.co_filename):
                values += frame.f_globals.values()
            held |= {id(each) for each in values if issubclass(type(each), nn.Module)}
            frame = frame.f_back
        used = [
            each
            for each in sorted(self.models, key=_size, reverse=True)
            if any(id(module) in held for module in each.modules())
        ]
        parameters = {id(parameter) for each in used for parameter in each.parameters()}
        optimizers = [
            each
            for each in self.optimizers
            if any(id(parameter) in parameters for parameter in parameters_of(each))
        ]
        others = [each for each in self.models if each not in used]
        return _Objects(self.tensors, [*used, *others], optimizers if used else self.optimizers)


class _Kinds(dict[type, type | None]):
    """The kind of objects of a class that is looked for; None for all others. Objects may claim another."""

    def __missing__(self, kind: type) -> type | None:
        wanted = None if issubclass(kind, FakeTensor) else (Tensor, nn.Module, Optimizer)
        self[kind] = next((each for each in wanted or () if issubclass(kind, each)), None)
        return self[kind]


class _Names:
    """Paths of the modules of all models; the first one's have no prefix, others' begin with their class."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.paths: dict[int, str] = {}
        """By the module's id."""
        self.models: dict[str, str] = {}
        """The model that a module is in, by the module's path."""
        self.parameters: dict[str, Tensor] = {}
        """Parameters and buffers."""
        self.of_parameters: dict[int, str] = {}
        """By the parameter's id."""
        for place, model in enumerate(models):
            self._add(model, type(model).__name__ if place else "")

    def _add(self, model: nn.Module, prefix: str) -> None:
        plain_name = plain_namer(model)
        while prefix in self.modules:
            prefix += "'"
        for path, module in model.named_modules():
            name = _joined_path(prefix, plain_name(path))
            self.modules.setdefault(name, module)
            self.models.setdefault(name, prefix)
            self.paths.setdefault(id(module), name)
        for path, tensor in (*model.named_parameters(), *model.named_buffers()):
            name = _joined_path(prefix, plain_name(path))
            self.parameters.setdefault(name, tensor)
            self.of_parameters.setdefault(id(tensor), name)

    def owner(self, parameter: Tensor) -> str | None:
        """Path of the module that has a parameter."""
        name = self.of_parameters.get(id(parameter))
        return None if name is None else name.rpartition(".")[0]

    def repeated_block(self, path: str) -> str | None:
        """The outermost of modules that repeat in a list, in which a module is; None if it is in none."""
        parts = path.split(".")
        for count in range(1, len(parts) + 1):
            parent = self.modules.get(".".join(parts[: count - 1]))
            child = self.modules.get(".".join(parts[:count]))
            if isinstance(parent, nn.ModuleList | nn.Sequential) and child is not None:
                alike = [each for each in parent if type(each) is type(child)]
                if len(alike) > 1 and next(child.parameters(), None) is not None:
                    return ".".join(parts[:count])
        return None


def _joined_path(*parts: str) -> str:
    return ".".join(filter(None, parts))


@dataclass(frozen=True, slots=True)
class _Node:
    """A node of a graph of autograd."""

    itself: Any
    number: int
    kind: str
    """Such as "Gelu"."""
    module: str
    """The module whose parameters it uses, or the innermost one around the nodes before and after."""
    reached: str
    """The last module until here whose parameters a node uses."""
    saved: tuple[Tensor, ...] | None
    """None once backward has freed it."""
    is_packed: bool
    """Whether something else was saved in the place of a tensor, as by activation checkpointing."""


class _Seen:
    """The live storages of a device, each with what it holds."""

    def __init__(self, device: torch.device, objects: _Objects, frames: _Frames, first_node: int) -> None:
        self._device, self._objects, self._first_node = device, objects, first_node
        self._held: dict[int, HeldStorage] = {}
        self.names = _Names(objects.models)
        self._take_residents()
        self._owners = {
            key: name.rpartition(".")[0]
            for name, tensor in self.names.parameters.items()
            for key, _ in self._storages(tensor)
        }
        self.nodes = self._placed(nodes_of(objects.tensors))
        self._by_node = {node.itself: node for node in self.nodes}
        of_names = () if not frames else tensors_of_names(frames[-1][0])
        named = [(name, line, tensors) for name, line, _, tensors in of_names]
        self._rows: dict[int, int] = {}
        """First dimensions of what may be inputs, by storage."""
        self._inputs = self._storages_of((name, tensor) for name, _, each in named for tensor in each)
        passed = _passed(frames)
        self._inputs |= self._storages_of(passed)
        for name, tensor in passed:
            if not tensor.requires_grad:
                self._take(tensor, Category.INPUTS, name, None)
        self.results: list[KeptResults] = []
        """Names that hold results of earlier steps."""
        self.kept_bytes = self._take_saved()
        self.kept = tuple(self._keeping(named)) if self.kept_bytes else ()
        self._take_named(named)
        self._take_rest()

    def held(self) -> tuple[HeldStorage, ...]:
        """What is held, largest first."""
        return tuple(sorted(self._held.values(), key=lambda each: -each.held_bytes))

    def _storages(self, tensor: Tensor) -> Iterator[tuple[int, int]]:
        """The storages of a tensor on the device, each with its bytes."""
        for part in inner_tensors(own_part(tensor)):
            is_there = part.device == self._device and part.layout is torch.strided
            if is_there and not isinstance(part, FakeTensor) and not calls_ops_on_parts(type(part)):
                storage = part.untyped_storage()
                if size_bytes := storage.nbytes():
                    yield storage._cdata, size_bytes

    def _take(self, tensor: Tensor, category: Category, label: str, module: str | None, line: str = "") -> int:
        """Note what a tensor holds, unless that is known already; returns the bytes that are new."""
        taken = 0
        for key, size_bytes in self._storages(tensor):
            if key not in self._held:
                taken += size_bytes
                self._held[key] = HeldStorage(
                    label=label, category=category, module=module, held_bytes=size_bytes, line=line
                )
        return taken

    # What stays from step to step

    def _take_residents(self) -> None:
        for name, tensor in self.names.parameters.items():
            module = name.rpartition(".")[0]
            self._take(tensor, Category.PARAMETERS, name, module)
            if tensor.requires_grad and tensor.is_leaf and tensor.grad is not None:
                self._take(tensor.grad, Category.GRADIENTS, name, module)
        for optimizer in self._objects.optimizers:
            for parameter in parameters_of(optimizer):
                self._take(parameter, Category.PARAMETERS, "parameter", None)
                if parameter.grad is not None:
                    self._take(parameter.grad, Category.GRADIENTS, "parameter", None)
            for parameter, state in optimizer.state.items():
                name = self.names.of_parameters.get(id(parameter), "parameter")
                for key, value in named_tensors(state):
                    label = f"{name} {key.removeprefix('batch')}"
                    self._take(value, Category.OPTIMIZER_STATE, label, name.rpartition(".")[0])

    @property
    def further_bytes(self) -> int:
        """Gradients and optimizer state that are yet to make, and one gradient beside the accumulated one."""
        of_models = [each for each in self.names.parameters.values() if isinstance(each, nn.Parameter)]
        optimizers = self._objects.optimizers
        found = largest = 0
        for parameter in [p for each in optimizers for p in parameters_of(each)] if optimizers else of_models:
            size_bytes = sum(size for _, size in self._storages(parameter)) if parameter.requires_grad else 0
            largest = max(largest, size_bytes)
            found += size_bytes if parameter.grad is None else 0
        for optimizer in optimizers:
            without = [each for each in parameters_of(optimizer) if not optimizer.state.get(each)]
            found += sum(_states_of(optimizer) * size for each in without for _, size in self._storages(each))
        return found + largest

    @property
    def makes_state(self) -> bool:
        """Whether parameters with gradients have no optimizer state yet, or all that of the first update."""
        updates = [
            _updates(optimizer.state.get(parameter, {}))
            for optimizer in self._objects.optimizers
            for parameter in parameters_of(optimizer)
            if parameter.grad is not None and _states_of(optimizer)
        ]
        return bool(updates) and (min(updates) == 0 or max(updates) <= 1)

    @property
    def update_bytes(self) -> int:
        """Temporaries of an update: of all parameters with foreach, the default on CUDA, else of one."""
        found = 0
        for optimizer in self._objects.optimizers:
            for group in optimizer.param_groups:
                sizes = [size for each in group["params"] for _, size in self._storages(each)]
                if not group.get("fused") and sizes and _states_of(optimizer):
                    of_all = group.get("foreach") or (
                        group.get("foreach") is None and self._device.type == "cuda"
                    )
                    found = max(found, sum(sizes) if of_all else 2 * max(sizes))
        return found

    @property
    def adam(self) -> str:
        """Which of Adam and AdamW are there."""
        kinds = {type(each).__name__ for each in self._objects.optimizers if _has_8_bits(each)}
        return " and ".join(each for each in _ADAM if each in kinds)

    @property
    def of_adam(self) -> list[Tensor]:
        """Parts on the device of the parameters that Adam updates; its state has two tensors like each."""
        return [
            part
            for optimizer in self._objects.optimizers
            if _has_8_bits(optimizer)
            for parameter in parameters_of(optimizer)
            for part in inner_tensors(own_part(parameter))
            if part.device == self._device
        ]

    # Graphs

    def _placed(self, nodes: Iterable[Any]) -> list[_Node]:
        """The nodes in the order of the forward, each with the modules around it."""
        ordered = sorted(
            (each for each in nodes if each.name() != _ACCUMULATE_GRAD), key=lambda node: node._sequence_nr()
        )
        saved = [saved_by(node) for node in ordered]
        owners = [self._owner_of(node, found[0] or ()) for node, found in zip(ordered, saved, strict=True)]
        after = list(_last_known(reversed(owners)))[::-1]
        return [
            _Node(
                itself=node,
                number=node._sequence_nr(),
                kind=_kind(node),
                module=self._around(before, behind) if own is None else own,
                reached=before or "",
                saved=found[0],
                is_packed=found[1],
            )
            for node, found, own, before, behind in zip(
                ordered, saved, owners, _last_known(owners), after, strict=True
            )
        ]

    def _around(self, before: str | None, behind: str | None) -> str:
        """The module of a node without parameters: the repeated block that it ends, or what is around it."""
        if before is None or behind is None:
            return ""
        common = _common(before, behind)
        block = self.names.repeated_block(before)
        return common if block is None or f"{common}.".startswith(f"{block}.") else block

    def _owner_of(self, node: Any, saved: Iterable[Tensor]) -> str | None:
        """Path of the module whose parameters a node uses; None if it uses none."""
        for tensor in saved:
            for key, _ in self._storages(tensor):
                if key in self._owners:
                    return self._owners[key]
        for following, _ in node.next_functions:
            for _ in range(_MOST_CASTS):
                if following is None or following.name() == _ACCUMULATE_GRAD:
                    break
                inner = following.next_functions
                following = inner[0][0] if len(inner) == 1 else None
            if following is not None and following.name() == _ACCUMULATE_GRAD:
                return self.names.owner(following.variable)
        return None

    def _take_saved(self) -> int:
        """Note what graphs save; returns the bytes that those of earlier steps save."""
        kept_bytes = 0
        for node in self.nodes:
            for tensor in node.saved or ():
                names = [self._inputs[key] for key, _ in self._storages(tensor) if key in self._inputs]
                if names:
                    self._take(tensor, Category.INPUTS, names[0], None)
                    continue
                taken = self._take(tensor, Category.SAVED_TENSORS, *self._made(tensor, node))
                kept_bytes += taken if node.number < self._first_node else 0
        return kept_bytes

    def _made(self, tensor: Tensor, otherwise: _Node) -> tuple[str, str, str]:
        """The kind, the module and the line of the op that made a tensor."""
        maker = self._by_node.get(_maker(tensor), otherwise)
        return maker.kind, maker.module, line_of(maker.itself)

    @property
    def is_checkpointed(self) -> bool:
        """Whether something else is saved in the place of tensors."""
        return any(node.is_packed for node in self.nodes)

    @property
    def recomputable_bytes(self) -> int:
        """Saved tensors inside of repeated blocks, but for what one of them saves, and the others' inputs.

        The last that a block makes is what it returns: the input of what follows.
        """
        blocks = {self.names.repeated_block(path) for path in self.names.modules} - {None}
        last, found = dict[str, int](), 0
        for each in self._held.values():
            block = self.names.repeated_block(each.module or "")
            if each.category is Category.SAVED_TENSORS and block is not None:
                found += last.get(block, 0)
                last[block] = each.held_bytes
        return found * (len(blocks) - 1) // len(blocks) if blocks else 0

    def reached_fraction(self, phase: Phase) -> float:
        """How many modules with parameters a forward has called, of the models that it has; 1 if complete."""
        if phase is not Phase.FORWARD:
            return 1.0
        reached = {node.reached for node in self.nodes if node.number >= self._first_node}
        begun = {self.names.models[path] for path in reached if path in self.names.models}
        paths = {name.rpartition(".")[0] for name in self.names.parameters}
        count = sum(1 for path in paths if self.names.models.get(path) in begun)
        return min(max(len(reached - {""}), 1) / max(count, 1), 1.0)

    def running_node(self, frames: _Frames) -> tuple[_Node, str] | None:
        """The node in whose backward memory ran out, and its line: the last that is not freed yet."""
        frame = frames[-1][0]
        if frame.f_code.co_name != _ENGINE:
            return None  # its own code asked, which the frames show
        started = {node._sequence_nr() for node in nodes_of(locals_of(frame).get("t_outputs", ()))}
        left = [node for node in self.nodes if node.number in started and (node.saved or node.is_packed)]
        return (left[-1], line_of(left[-1].itself)) if left else None

    # Variables

    def _storages_of(self, named: Iterable[tuple[str, Tensor]]) -> dict[int, str]:
        """Names of tensors without gradient, which may be inputs, by storage."""
        found = {}
        for name, tensor in named:
            if not tensor.requires_grad and tensor.dim():
                for key, _ in self._storages(tensor):
                    found[key] = name
                    self._rows[key] = tensor.shape[0]
        return found

    @property
    def samples(self) -> int | None:
        """Samples of the micro-batch: the first dimension that most inputs have."""
        inputs = {key for key, each in self._held.items() if each.category is Category.INPUTS}
        rows = [rows for key, rows in self._rows.items() if key in inputs]
        return Counter(rows).most_common(1)[0][0] if rows else None

    def _keeping(self, named: _Named) -> Iterator[KeptHistory]:
        """The names whose graphs lead to nodes of earlier steps."""
        for name, line, tensors in named:
            ages = ages_of(tensors)
            if ages is not None and ages[0] < self._first_node:
                yield KeptHistory(name=name, line=line)

    def _take_named(self, named: _Named) -> None:
        for name, line, tensors in named:
            of_earlier = before = 0
            for tensor in tensors:
                node = self._by_node.get(_maker(tensor))
                if node is not None and node.number >= self._first_node:
                    _, module, made_in = self._made(tensor, node)
                    self._take(tensor, Category.SAVED_TENSORS, name, module, made_in or line)
                else:
                    taken = self._take(tensor, Category.OTHER_TENSORS, name, None, line)
                    of_earlier += taken if node is not None else 0
                    before += node is not None
            if before > 1:
                self.results.append(KeptResults(name=name, line=line, count=before, held_bytes=of_earlier))

    def _take_rest(self) -> None:
        for tensor in self._objects.tensors:
            if (node := self._by_node.get(_maker(tensor))) is not None:
                self._take(tensor, Category.SAVED_TENSORS, *self._made(tensor, node))
            else:
                label = "×".join(map(str, tensor.shape)) or "1"
                self._take(tensor, Category.TEMPORARIES, label, None)

    def module_of(self, frames: _Frames, phase: Phase) -> str:
        """Path of the module whose forward was running, or what else was."""
        for frame, _ in reversed(frames):
            if (path := self.names.paths.get(id(locals_of(frame).get("self")))) is not None:
                return path
        return OPTIMIZER if phase is Phase.OPTIMIZER else LOSS


def _passed(frames: _Frames) -> list[tuple[str, Tensor]]:
    """What the outermost model was called with, with the names of its arguments."""
    for frame, _ in frames:
        values = locals_of(frame)
        if isinstance(model := values.get("self"), nn.Module) and frame.f_code.co_name == "forward":
            names, several, by_name = inspect.getargs(frame.f_code)
            return [
                (f"{name} of {type(model).__name__}", tensor)
                for name in (*names, several, by_name)
                if name is not None
                for tensor in tensors_in(values.get(name))
            ]
    return []


def _size(model: nn.Module) -> int:
    return sum(1 for _ in model.parameters())


def _has_8_bits(optimizer: Optimizer) -> bool:
    """Whether bitsandbytes has a form of an Adam in 8 bits: it has none of AMSGrad."""
    return type(optimizer).__name__ in _ADAM and not optimizer.defaults.get("amsgrad")


def _states_of(optimizer: Optimizer) -> int:
    """States of a parameter's size that an optimizer makes at its first step, as far as its class says."""
    if type(optimizer).__name__ in _ADAM:
        return 2
    return int(any(group.get("momentum") for group in optimizer.param_groups))


def _updates(state: Mapping[str, Any]) -> float:
    """Updates that a parameter's state counts, with the running one; infinite if it counts none."""
    step = state.get("step") if state else 0
    if isinstance(step, Tensor) and step.device.type == "cpu" and step.numel() == 1:  # without synchronization
        return float(step)
    return float(step) if isinstance(step, int | float) else float("inf")


def _maker(tensor: Tensor) -> Any:
    """The node of the op that made the memory of a tensor."""
    node = grad_fn_of(tensor)
    while node is not None and _kind(node) in _VIEWS:
        node = node.next_functions[0][0]
    return node


def _kind(node: Any) -> str:
    """The kind of a node, such as "Gelu"."""
    name = str(node.name()).rpartition("::")[2]
    return re.sub(r"Backward\d*$", "", name) or name


def _last_known(paths: Iterable[str | None]) -> Iterator[str | None]:
    last = None
    for each in paths:
        last = last if each is None else each
        yield last


def _common(before: str, behind: str) -> str:
    """The innermost module around both."""
    return ".".join(
        a
        for a, b in takewhile(
            lambda pair: pair[0] == pair[1], zip(before.split("."), behind.split("."), strict=False)
        )
    )
