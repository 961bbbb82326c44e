"""A job's model on fake tensors: its structure without its weights.

Private torch APIs used here: `torch._subclasses.fake_tensor`, `torch.utils._foreach_utils` (checked: 2.13).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.optim import optimizer as optimizer_module
from torch.utils import _foreach_utils

from brimful.capture.values import KnownValues
from brimful.errors import CaptureError, UsageError
from brimful.job import Job


def build_fake_model(job: Job, mode: FakeTensorMode, known: KnownValues) -> nn.Module:
    """The job's model with fake CPU parameters and buffers of the same shapes and types.

    A model that is given as a module is copied, sharing nothing that training changes. One that is given as a
    function is built for real, each parameter moved to `meta` as it registers, so that constructors may compute
    while no memory is taken for weights.

    Args:
        job: Its `model` is a module or builds one.
        mode: The fake mode the tensors will belong to.
        known: Is told the values of the buffers.

    Returns:
        The model in training mode.

    Raises:
        UsageError: `job.model` is or returns something else.
        CaptureError: The model cannot be built without its weights.
    """
    if isinstance(job.model, nn.Module):
        fakes = {id(tensor): to_fake(tensor, mode) for tensor in _tensors(job.model)}
        for tensor in job.model.buffers():
            known.remember(fakes[id(tensor)], tensor)
        return copy.deepcopy(job.model, fakes).train()
    try:
        with _parameters_on_meta():
            model = job.model()
    except RuntimeError as error:
        if "meta" not in str(error):
            raise
        raise CaptureError(
            f"the model of {job.name!r} reads its weights while it is built, and there are none to read: "
            f"{error}. Build it yourself and give the module instead of the function."
        ) from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model of {job.name!r} is built as a {type(model).__name__}, not an nn.Module.")
    _replace_tensors(model, mode, known)
    return model.train()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None and not _is_lazy(param) and param.device.type != "meta":
            light = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            light.__dict__.update(param.__dict__)
            module._parameters[name] = light

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _is_lazy(tensor: Tensor) -> bool:
    return isinstance(tensor, UninitializedTensorMixin)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _replace_tensors(model: nn.Module, mode: FakeTensorMode, known: KnownValues) -> None:
    """Put fakes in the place of all parameters and buffers; what was shared stays shared."""
    fakes: dict[int, Any] = {}
    for module in list(model.modules()):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                if id(tensor) not in fakes:
                    fakes[id(tensor)] = to_fake(tensor, mode)
                    known.remember(fakes[id(tensor)], tensor)
                # By setattr, not through `_parameters`: an RNN keeps a second list of its weights.
                setattr(module, name, fakes[id(tensor)])


@contextmanager
def fakes_in_lists() -> Iterator[None]:
    """Let torch's choice of foreach kernels take fake tensors for the plain ones they stand for."""
    lists: list[list[Any]] = [
        _foreach_utils._foreach_supported_types,
        optimizer_module._foreach_supported_types,
    ]
    for supported in lists:
        supported.append(FakeTensor)
    try:
        yield
    finally:
        for supported in lists:
            supported.remove(FakeTensor)


def to_fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake CPU tensor or parameter of the same shape, layout and type.

    Args:
        tensor: On any device, `meta` too.
        mode: The fake mode it will belong to.

    Returns:
        A tensor without memory, which requires a gradient if `tensor` does.

    Raises:
        CaptureError: `tensor` has no shape yet.
    """
    if _is_lazy(tensor):
        raise CaptureError("a lazy parameter has no shape yet. Run one forward pass first, or give the sizes.")
    with mode:
        fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)
