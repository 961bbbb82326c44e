"""Compiled modules in a capture: Inductor compiles them, and what it made runs on fake tensors.

All of it is Inductor's own: the graph, what it saves for backward, fusion, reuse of buffers, and the wrapper
in Python that allocates, launches kernels and frees. Only the kernels are replaced, by ops that compute
nothing. So a recorder sees the blocks of memory that a compiled step makes, and when each is freed.

Nothing of it stays in the process: torch keeps compiled code with code objects that are made for one capture,
the wrapper is a module that no cache of Inductor's knows, and its caches of graphs are off.

Private torch APIs used here: `torch._inductor.compile_fx`, `GraphLowering._compile_to_module_lines`,
`async_compile.AsyncCompile`, `cpu_vec_isa.valid_vec_isa_list`, names in a generated wrapper,
`torch.utils._python_dispatch._disable_current_modes`, `torch.utils._pytree`,
`torch._C.DisableTorchFunction` (checked: torch 2.13).
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from brimful.capture.corrections import CorrectedFunctions
from brimful.capture.inductor_cuda import can_lower, lowering_for, on_gpu, triton_importable
from brimful.capture.recording.modules import ModuleCalls
from brimful.capture.recording.recorder import Recorder
from brimful.capture.recording.traffic import COMPILED_KERNELS
from brimful.capture.triton_kernels import kernel_op
from brimful.devices import Device
from brimful.torch_utils.replaced import originals_in_place, replaced, stand_ins_in_place
from brimful.transforms.compiled import Compiled, CompiledCall, CompiledModules

_CONFIG = {"force_disable_caches": True, "compile_threads": 1, "profile_bandwidth": True}
"""Of Inductor: no caches on disk or in the process, no processes that would compile kernels, and in the text of
kernels how much they read and write."""


_LOWERED_FOR_CPU = (
    "compiled code: predicted as Inductor makes it for a CPU, as this build of torch has no device guard for "
    "CUDA; convolutions may have other layouts and temporaries"
)
"""Note where a graph cannot be lowered for its GPU."""


class CapturedInductor(CompiledModules):
    """Compiles modules of fake tensors, whose ops `recorder` records; `modules` says whose ops they are.

    It is made before rules change torch's table of decompositions: Inductor copies that as it is imported, and
    would keep what is for fakes alone for all that the process compiles. `functions` are in force while the
    compiler traces functions that they replace.
    """

    def __init__(
        self,
        device: Device,
        mode: FakeTensorMode,
        recorder: Recorder,
        modules: ModuleCalls,
        functions: CorrectedFunctions,
    ) -> None:
        import torch._inductor.decomposition  # noqa: F401

        super().__init__(self._compile)
        self._device, self._corrected = device, functions
        self._mode, self.recorder, self._modules = mode, recorder, modules
        self._records = True

    def call_of(self, module: nn.Module, fqn: str) -> CompiledCall:
        """What is called in the module's place."""
        return _CapturedCall(module, fqn, self.function_for(module), self)

    @contextmanager
    def calling(self, module: nn.Module, *, records: bool = True) -> Iterator[None]:
        """Let torch compile the module and call it as in a real step while the context is open.

        Without `records` nothing of it is recorded. Torch does not compile under dispatch modes, and would
        compile what a capture has replaced.
        """
        with (
            self._modules.inside(module),
            originals_in_place(),
            torch.compiler.set_stance("default"),
            torch._C.DisableTorchFunction(),
            _disable_current_modes(),
        ):
            self._records = records
            yield

    def _compile(self, graph: Any, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        for node in graph.graph.nodes:
            if node.target in self._corrected.names or node.target is F.multi_head_attention_forward:
                node.target = self._as_on_device(node.target)
        graph.recompile()
        return compile_fx(graph, inputs, inner_compile=self._lower, config_patches=_CONFIG)

    def _as_on_device(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of a graph that is traced under the rules, as in a capture, and not the compiler."""

        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            with torch._C._EnableTorchFunction(), self._corrected, stand_ins_in_place():
                return function(*args, **kwargs)

        return called

    def _lower(self, graph: Any, inputs: Any, **options: Any) -> Any:
        """The wrapper of one graph, forward or backward, as Inductor calls it with a list that it empties."""
        from torch._inductor import cpu_vec_isa
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.graph import GraphLowering

        with ExitStack() as stack:
            stack.enter_context(torch._C.DisableTorchFunction())  # backward is lowered inside of a recorded one
            stack.enter_context(replaced(GraphLowering, "_compile_to_module_lines", _loaded))
            # Vectors change the text of kernels alone; which there are, the C++ compiler would find out.
            stack.enter_context(replaced(cpu_vec_isa, "valid_vec_isa_list", list))
            stack.enter_context(_disable_current_modes())
            if self._device.kind == "cuda" and can_lower():
                inputs = on_gpu(graph, inputs)
                stack.enter_context(lowering_for(self._device))
            elif self._device.kind == "cuda":
                self.recorder.facts.note(_LOWERED_FOR_CPU)
            stack.callback(sys.setrecursionlimit, sys.getrecursionlimit())  # which Inductor raises
            made: Any = compile_fx_inner(graph, inputs, **options)
        wrapper = made.current_callable

        def run(args: list[Any]) -> Any:
            with self._modes(), self.recorder.position.compiled():
                return wrapper(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    @contextmanager
    def _modes(self) -> Iterator[None]:
        """Put fakes and the recorder in force, which `calling` hid; in backward they are in force already."""
        active = _get_current_dispatch_mode_stack()
        with ExitStack() as stack:
            for mode in (self._mode, *([self.recorder] if self._records else [])):
                if mode not in active:
                    stack.enter_context(mode)
            yield


class _CapturedCall(CompiledCall):
    """Compiles a module with copies of its arguments first: the compiler would keep those of the step."""

    def __init__(self, module: nn.Module, fqn: str, compiled: Compiled, inductor: CapturedInductor) -> None:
        super().__init__(module, fqn, compiled)
        self._inductor = inductor
        self._seen: set[Hashable] = set()

    def _run(self, compiled: Compiled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = self._key(args, kwargs)
        if key not in self._seen:
            with self._inductor.recorder.paused():
                copies = _copied((args, kwargs))
            with self._inductor.calling(self._module, records=False):
                super()._run(compiled, *copies)
            self._seen.add(key)
        with self._inductor.calling(self._module):
            return super()._run(compiled, args, kwargs)

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """What decides whether torch compiles again."""
        tensors = (each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
        shapes = tuple((each.shape, each.stride(), each.dtype, each.requires_grad) for each in tensors)
        return shapes, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), self._module.training

    def _note(self, text: str) -> None:
        self._inductor.recorder.facts.note(text)


def _copied(value: Any) -> Any:
    """A copy of arguments, with new tensors in the place of theirs, parameters apart."""
    memo = {
        id(each): each if isinstance(each, nn.Parameter) else _like(each)
        for each in tree_leaves(value)
        if isinstance(each, Tensor)
    }
    return copy.deepcopy(value, memo)


def _like(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.requires_grad_(tensor.requires_grad)


class _FakeKernels:
    """Stands in for Inductor's compiler of kernels in a generated wrapper."""

    def cpp_pybinding(self, argument_types: list[str], _source: str) -> _FakeKernel:
        """A kernel for a CPU."""
        return _FakeKernel(["const" in each for each in argument_types])

    def triton(self, name: str, source: str, **_options: Any) -> _FakeKernel:
        """A kernel for a GPU."""
        declared = re.search(rf"def {name}\(([^)]*)\)", source)
        moved = re.search(r"'kernel_num_gb': ([\d.e+-]+)", source)
        assert declared is not None, source
        assert moved is not None, source
        is_read = [each.strip().startswith("in_ptr") for each in declared[1].split(",")]
        return _FakeKernel(is_read, moved_bytes=round(float(moved[1]) * 1e9))

    def wait(self, scope: dict[str, Any]) -> None:
        """Give each kernel its name; called when all are there."""
        for name, value in scope.items():
            if isinstance(value, _FakeKernel):
                value.name = name


class _FakeKernel:
    """A kernel that computes nothing: its launch is an op that reads and writes its tensors."""

    def __init__(self, is_read: list[bool], moved_bytes: int | None = None) -> None:
        self.name = ""
        self._is_read, self._moved_bytes = is_read, moved_bytes

    def run(self, *args: Any, **_stream: Any) -> None:
        """Launch it."""
        tensors = [each for each in zip(self._is_read, args, strict=False) if isinstance(each[1], Tensor)]
        read, written = ([tensor for reads, tensor in tensors if reads is way] for way in (True, False))
        arguments = "Tensor[] read, Tensor(a!)[] written, int? moved_bytes"
        kernel_op(COMPILED_KERNELS, self.name, arguments)(read, written, self._moved_bytes)

    __call__ = run


def _loaded(lowering: Any, wrapper_code: Any) -> ModuleType:
    """The generated wrapper as a module that no cache has, with what it calls in C++ replaced by ops."""
    from torch._inductor import async_compile

    module = ModuleType("torch._inductor.wrapper_on_fakes")  # as torch's own, so that no line in it is noted
    module.__file__ = "<Inductor's wrapper>"
    vars(module).update(lowering.constants)
    vars(module).update(lowering.torchbind_constants)
    with replaced(async_compile, "AsyncCompile", _FakeKernels), triton_importable():
        exec(compile(wrapper_code.value, module.__file__, "exec"), vars(module))
    vars(module).update(_ON_FAKES)
    lowering.cache_key, lowering.cache_path, lowering.cache_linemap = "", None, []
    return module


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def _reinterpreted(tensor: Tensor, size: Any, stride: Any, offset: int) -> Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


_ON_FAKES: Mapping[str, Callable[..., Any]] = {
    "empty_strided_cpu": _empty_strided,
    "empty_strided_cuda": _empty_strided,
    "device": lambda *_args, **_kwargs: torch.device("cpu"),
    "reinterpret_tensor": _reinterpreted,
    "assert_alignment": lambda *_args: None,
    "copy_if_misaligned": lambda tensor: tensor,
}
"""What a wrapper calls in C++, which takes real tensors and looks at addresses, and its `device`, by name."""
