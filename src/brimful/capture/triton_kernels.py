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

_NAMESPACE = "triton_kernels"


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
            op = kernel_op(_NAMESPACE, _name(kernel), "Tensor(a!)[] tensors")
            note(f"{op}: the arithmetic of this Triton kernel is not known, only what it reads and writes")
            op(tensors)
            return None

        return launched

    with replaced(module.KernelInterface, "__getitem__", stand_in):
        yield


def _name(kernel: Any) -> str:
    while not hasattr(kernel, "__name__"):  # an autotuner or heuristics around a kernel
        kernel = kernel.fn
    name: str = kernel.__name__
    return name


def kernel_op(namespace: str, name: str, arguments: str) -> Any:
    """An op that computes nothing and returns nothing: the launch of a kernel, as a recorder sees it.

    `arguments` are written as in an op's schema. An op stays for as long as the process.
    """
    ops = getattr(torch.ops, namespace)
    if not hasattr(ops, name):
        library = _libraries.get(namespace)
        if library is None:
            library = _libraries[namespace] = torch.library.Library(namespace, "DEF")
        library.define(f"{name}({arguments}) -> ()")
        library.impl(name, _nothing, "CompositeExplicitAutograd")
    return getattr(ops, name).default


_libraries: dict[str, torch.library.Library] = {}


def _nothing(*arguments: list[Tensor] | int | None) -> None:
    del arguments
