"""Advice on what to register for an op of `torch.library` that cannot run on fake tensors."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch._subclasses.fake_tensor import UnsupportedOperatorException

_NO_FAKE = re.compile(r"no fake impl registered for <CustomOpDef\(([\w.]+::[\w.]+)\)>")
_NO_BACKWARD = re.compile(r"backward through ([\w.]+) but no autograd formula was registered")
_NO_MEMORY = (
    "Cannot access data pointer",
    "Accessing the data pointer of FakeTensor",
    "doesn't have storage",
    "libcuda.so cannot found",
)
"""Errors of kernels that are called on tensors themselves. The last is Triton's, as it looks for a GPU."""


def kernel_hint(error: Exception) -> str | None:
    """Advice on what to register, for an error of a captured step; None if it is another error.

    Source: torch/_library/custom_ops.py, torch/_library/autograd.py, torch/_subclasses/fake_tensor.py (checked:
    2.13).
    """
    message = str(error)
    if isinstance(error, UnsupportedOperatorException):
        return _fake_hint(error.func._schema.name)
    if found := _NO_FAKE.search(message):
        return _fake_hint(found.group(1))
    if found := _NO_BACKWARD.search(message):
        name = found.group(1).removesuffix(".default").replace(".", "::", 1)
        return (
            "A real step fails too. Register the gradient: "
            f"torch.library.register_autograd({name!r}, backward, setup_context=…)."
        )
    if any(part in message for part in _NO_MEMORY):
        return (
            "A kernel is called on the memory of fake tensors, which have none. Put the call into an op of "
            "torch.library.custom_op, with a fake kernel by register_fake that returns empty tensors of the "
            "result's shapes."
        )
    return None


def _fake_hint(name: str) -> str:
    arguments = ", ".join(_arguments(name))
    return (
        f"The op {name!r} has no fake kernel, which would say what it returns. Register one that returns empty "
        f"tensors of the result's shapes and types: torch.library.register_fake({name!r}) of a function of "
        f"({arguments})."
    )


def _arguments(name: str) -> list[str]:
    """Names of an op's arguments."""
    namespace, _, op = name.partition("::")
    packet: Any = getattr(getattr(torch.ops, namespace), op.partition(".")[0])
    return [argument.name for argument in packet.default._schema.arguments]
