"""Launches of Triton kernels on fake tensors, which have no memory that a kernel could read.

A kernel writes to tensors that it is given and allocates none, so that memory is known without running it. In a
trace a launch is an op `triton_kernels.NAME` that reads and writes those tensors; its arithmetic is not known.
Kernels behind `torch.library.triton_op` are ops already, and are not launched on fake tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from brimful.torch_utils.replaced import replaced

NAMESPACE = "triton_kernels"
_library = torch.library.Library(NAMESPACE, "DEF")


@contextmanager
def triton_launches_recorded(note: Callable[[str], None]) -> Iterator[None]:
    """Let `kernel[grid](…)` run an op, if it is given fake tensors, while the context is open.

    `note` is called with what is not known of a kernel.

    Source: triton/runtime/jit.py, KernelInterface.__getitem__ (checked: 3.9).
    """
    module: Any = sys.modules.get("triton.runtime.jit")
    if module is None:
        yield
        return
    launcher_of: Callable[..., Any] = module.KernelInterface.__getitem__

    def stand_in(kernel: Any, grid: Any) -> Callable[..., Any]:
        launch = launcher_of(kernel, grid)

        def launched(*args: Any, **kwargs: Any) -> Any:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
                return launch(*args, **kwargs)
            op = _op(kernel)
            note(f"{op}: the arithmetic of this Triton kernel is not known, only what it reads and writes")
            op(tensors)
            return None

        return launched

    with replaced(module.KernelInterface, "__getitem__", stand_in):
        yield


def _op(kernel: Any) -> Any:
    """The op of a kernel, by its name."""
    while not hasattr(kernel, "__name__"):  # an autotuner or heuristics around a kernel
        kernel = kernel.fn
    name = kernel.__name__
    namespace = getattr(torch.ops, NAMESPACE)
    if not hasattr(namespace, name):
        _library.define(f"{name}(Tensor(a!)[] tensors) -> ()")
        _library.impl(name, _nothing, "CompositeExplicitAutograd")
    return getattr(namespace, name).default


def _nothing(tensors: list[Tensor]) -> None:
    del tensors
