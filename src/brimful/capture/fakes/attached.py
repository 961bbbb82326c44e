"""Quantised weights on fake tensors, with what their library attached to them.

Private torch APIs used here: `UntypedStorage._cdata` (checked: torch 2.13);
of bitsandbytes: `Params4bit._quantize`, `Int8Params._quantize` (checked: 0.50).
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from brimful.capture.fakes.wrapper import Wrapper, view_on_meta
from brimful.execution.attached import ATTRIBUTES, attached_views, is_of_library, public_attributes
from brimful.torch_utils.replaced import replaced
from brimful.torch_utils.wrapper_tensors import is_wrapper_tensor, remade


def add_attached(model: nn.Module, fakes: dict[int, Any], mode: FakeTensorMode, wrapper: Wrapper) -> None:
    """Add fakes of attached tensors to `fakes`; what shares a storage still does.

    `fakes` has the fakes of the model's parameters, by the id of the original.
    """
    storages = {
        parameter.untyped_storage()._cdata: fakes[id(parameter)].untyped_storage()
        for parameter in model.parameters()
        if is_of_library(parameter)
    }
    for _name, tensor in attached_views(model):
        if id(tensor) in fakes:
            continue
        fakes[id(tensor)] = wrapper.fake_view(mode, tensor, storages)


def attach_to_parameters(model: nn.Module, memo: dict[int, Any]) -> None:
    """Give fake parameters the attributes that a library gave the real ones.

    `model` is the original. `memo` is that of `copy.deepcopy`: fakes and modules of the copy, by the id of the
    original.
    """
    for parameter in model.parameters():
        if is_of_library(parameter):
            fake = memo[id(parameter)]
            for value in vars(parameter).values():
                if isinstance(value, nn.Module):  # one outside of the model, as after a copy, stays as it is
                    memo.setdefault(id(value), value)
            vars(fake).update(copy.deepcopy(vars(parameter), memo))
            setattr(fake, ATTRIBUTES, tuple(vars(parameter)))


def attach_in_place(model: nn.Module, fakes: dict[int, Any]) -> None:
    """Give parameters and modules of a model the fakes of attached tensors.

    The model does not have its fake parameters yet. `fakes` are those of parameters and attached tensors, by
    the id of the original.
    """
    owners = [module for module in model.modules() if any(map(is_of_library, module._parameters.values()))]
    if not owners:
        return
    memo = fakes | {id(module): module for module in model.modules()}
    attach_to_parameters(model, memo)
    for module in owners:
        for name, value in public_attributes(module).items():
            vars(module)[name] = copy.deepcopy(value, memo)


def on_meta(parameter: nn.Parameter) -> nn.Parameter:
    """A copy of a parameter on `meta`, of the same class and with the same attributes."""
    if is_wrapper_tensor(parameter):
        made: Any = remade(parameter, view_on_meta)
        return cast("nn.Parameter", made)
    with torch._C.DisableTorchFunctionSubclass():
        meta = torch.Tensor.to(parameter.detach(), "meta")
        if is_of_library(parameter):
            light = Tensor._make_subclass(type(parameter), meta, parameter.requires_grad)
        else:
            light = nn.Parameter(meta, requires_grad=parameter.requires_grad)
    light.__dict__.update(parameter.__dict__)
    return light


@contextmanager
def copied_on_meta(kind: type[nn.Parameter]) -> Iterator[None]:
    """Let `copy.deepcopy` copy parameters of a library's class on `meta` while the context is open."""
    copied_elsewhere: Any = kind.__deepcopy__

    def copied(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        if parameter.device.type != "meta":
            return copied_elsewhere(parameter, memo)
        twin = on_meta(parameter)
        memo[id(parameter)] = twin
        vars(twin).update(copy.deepcopy(vars(parameter), memo))
        return twin

    with replaced(kind, "__deepcopy__", copied):
        yield


def quantise(model: nn.Module, device: str) -> None:
    """Quantise the weights of bitsandbytes that are not yet: moving them to a device does.

    The model is on `meta`, or has fake parameters with their attributes inside of the fake mode. `device` is
    where its parameters are, or pretend to be.
    """
    library: Any = sys.modules.get("bitsandbytes")
    if library is None:
        return
    tables = library.functional.name2qmap
    for parameter in model.parameters():
        is_4bit = getattr(parameter, "bnb_quantized", None) is False
        is_8bit = getattr(parameter, "has_fp16_weights", None) is False and parameter.dtype is not torch.int8
        if is_4bit or is_8bit:
            before = dict(tables)  # it keeps a table of the first device for the whole process
            kind = library.nn.Params4bit if is_4bit else library.nn.Int8Params
            with torch.no_grad():
                kind._quantize(parameter, torch.device(device))
            tables.clear()
            tables.update(before)
