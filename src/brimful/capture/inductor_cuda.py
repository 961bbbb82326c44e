"""Inductor lowers a graph for a GPU on a machine without CUDA and Triton, up to the text of its wrapper.

Graphs are traced with fake tensors on the CPU, as a capture is, and their devices are rewritten before Inductor
lowers them; the wrapper then runs on the capture's own tensors. Inductor asks for properties of the GPU, for
Triton, and for CUDA's device guard; while a graph is lowered it finds stand-ins.

Private torch APIs used here: `torch._dynamo.device_interface`, `torch._inductor.scheduler.has_triton`,
`torch.utils._triton.triton_hash_with_backend`, `CUDADeviceOpOverrides`, `DeviceProperties.create`, the table of
device guards `c10::impl::device_guard_impl_registry` in libc10.so, `torch._C._ensureCUDADeviceGuardSet`
(checked: torch 2.13).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from brimful.devices import Device
from brimful.torch_utils.replaced import replaced

_CPU, _CUDA = torch.device("cpu"), torch.device("cuda", 0)
_CUDA_TYPE, _META_TYPE, _TYPES = 1, 14, 21
"""Numbers of device types, and how many there are. Source: c10/core/DeviceType.h."""
_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
"""The table of device guards, `c10::impl::device_guard_impl_registry`, by device type."""


def on_gpu(graph: torch.fx.GraphModule, inputs: list[Any]) -> list[Any]:
    """Move a graph from the CPU to a GPU, in place, by rewriting its fake tensors; return its inputs there."""
    moved: dict[int, tuple[Tensor, Tensor]] = {}
    """By id of the tensor on the CPU, which is held so that no other takes its id."""

    def move(value: Any) -> Any:
        if isinstance(value, torch.device):
            return _CUDA if value == _CPU else value
        if not isinstance(value, FakeTensor) or value.device != _CPU:
            return value
        if id(value) not in moved:
            # Without autograd: the engine of a build without CUDA ends the process.
            with value.fake_mode, torch.no_grad():
                made = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=_CUDA)
                moved[id(value)] = value, made
        return moved[id(value)][1]

    for node in graph.graph.nodes:
        for key in ("val", "example_value", "eager_input_vals"):
            if key in node.meta:
                node.meta[key] = tree_map(move, node.meta[key])
        node.args, node.kwargs = tree_map(move, node.args), tree_map(move, node.kwargs)
    return [move(each) for each in inputs]


@contextmanager
def lowering_for(device: Device) -> Iterator[None]:
    """Let Inductor find one GPU like `device`, with Triton, while the context is open."""
    from torch._dynamo import device_interface
    from torch._inductor import scheduler
    from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides
    from torch._inductor.runtime.hints import DeviceProperties

    properties = _properties_of(device)
    device_interface.get_registered_device_interfaces()  # which registers torch's own
    with ExitStack() as stack:
        known = dict(device_interface.device_interfaces)
        stack.callback(device_interface.device_interfaces.update, known)
        stack.callback(DeviceProperties.create.cache_clear)
        stand_in = _interface(properties)
        device_interface.device_interfaces.update({"cuda": stand_in, "cuda:0": stand_in})
        DeviceProperties.create.cache_clear()
        for owner, name, instead in (
            (torch.cuda, "get_device_properties", lambda *_: properties),
            (torch._C, "_conv_determine_backend_memory_format", _convolution_layout),
            (scheduler, "has_triton", lambda: True),
            (torch.utils._triton, "triton_hash_with_backend", lambda: "none"),
            *((CUDADeviceOpOverrides, name, line) for name, line in _LINES.items()),
        ):
            stack.enter_context(replaced(owner, name, instead))
        stack.enter_context(device_guard())
        yield


_LINES: Mapping[str, Callable[..., str]] = {
    "device_guard": lambda *_: "torch.no_grad()",
    "set_device": lambda *_: "pass",
    "import_get_raw_stream_as": lambda _, name: f"{name} = lambda index: 0",
}
"""What a wrapper does with the device and its stream, in Python, by the method that writes it."""


def _convolution_layout(images: Tensor, weight: Tensor, _backend: Any) -> torch.memory_format:
    """The layout in which cuDNN convolves: channels-last if the images or the weights lie so.

    A build without CUDA answers as if cuDNN were missing. Source: torch aten/src/ATen/native/ConvUtils.h,
    cudnn_conv_suggest_memory_format.
    """
    found = {suggest_memory_format(each) for each in (images, weight)} - {torch.contiguous_format}
    return found.pop() if found else torch.contiguous_format


@contextmanager
def triton_importable() -> Iterator[None]:
    """Let a wrapper import Triton, of which it uses nothing, while the context is open."""
    names = [name for name in ("triton", "triton.language") if name not in sys.modules]
    sys.modules.update({name: ModuleType(name) for name in names})
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def can_lower() -> bool:
    """Whether a graph can be lowered for a GPU here: CUDA has a device guard, or can be given one."""
    with device_guard() as is_there:
        return is_there


@contextmanager
def device_guard() -> Iterator[bool]:
    """Give CUDA a device guard, without which fake tensors on a GPU cannot be indexed; yield whether it has it.

    A build of torch without CUDA has none. It gets that of the meta device, which does nothing, while the
    context is open.
    """
    if torch.version.cuda is not None:
        torch._C._ensureCUDADeviceGuardSet()
        yield True
        return
    guards = _guards()
    if guards is None or guards[_CUDA_TYPE] or not guards[_META_TYPE]:
        yield guards is not None and bool(guards[_CUDA_TYPE])
        return
    guards[_CUDA_TYPE] = guards[_META_TYPE]
    try:
        yield True
    finally:
        guards[_CUDA_TYPE] = None


def _guards() -> Any:
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        return (ctypes.c_void_p * _TYPES).in_dll(ctypes.CDLL(str(library)), _GUARDS)
    except (OSError, ValueError):  # no such library or no such symbol: not Linux
        return None


def _properties_of(device: Device) -> Any:
    """What Inductor reads of a GPU's properties."""
    assert device.compute_capability is not None
    major, minor = device.compute_capability
    return SimpleNamespace(
        name=device.name,
        major=major,
        minor=minor,
        multi_processor_count=device.sm_count,
        warp_size=32,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=device.threads_per_multiprocessor,
        max_threads_per_block=1024,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=227 << 10,
        total_memory=device.capacity_bytes,
    )


def _interface(properties: Any) -> Any:
    """The interface of dynamo to a GPU with these properties."""
    from torch._dynamo.device_interface import CudaInterface

    capability = 10 * properties.major + properties.minor
    worker: dict[str, Callable[..., Any]] = {
        "current_device": lambda: 0,
        "get_device_properties": lambda *_: properties,
    }
    functions = worker | {
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "get_compute_capability": lambda *_: capability,
        "is_bf16_supported": lambda *_args, **_kwargs: properties.major >= 8,
        "is_triton_capable": lambda *_: True,
        "raise_if_triton_unavailable": lambda *_: None,
    }
    members: dict[str, Any] = {name: staticmethod(each) for name, each in functions.items()}
    members["Worker"] = type("Worker", (), {name: staticmethod(each) for name, each in worker.items()})
    return type("Interface", (CudaInterface,), members)
