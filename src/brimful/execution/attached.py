"""Tensors that libraries attach to their own classes of parameters, such as the scales of quantised weights.

Attached tensors are neither parameters nor buffers, but are on the device as long as the model is. In
bitsandbytes 0.50, these are `Params4bit.quant_state`, `Int8Params.SCB` and, from the first forward on,
`Linear8bitLt.state`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from brimful.errors import UsageError
from brimful.torch_utils.wrapper_tensors import is_wrapper_tensor, remade, with_inner_tensors

ATTRIBUTES = "_brimful_attributes"
"""Attribute of a fake parameter: names of the attributes that it has from the real one."""


def is_of_library(parameter: Tensor | None) -> bool:
    """Whether a parameter is of a class that a library derives from `nn.Parameter`."""
    kind = type(parameter)
    return (
        kind is not nn.Parameter
        and issubclass(kind, nn.Parameter)
        and not issubclass(kind, UninitializedTensorMixin)
    )


def attached_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Attached tensors of a model, real or fake, by name of parameter or module and the path from there.

    Each storage is there once, and none that is a parameter's or a buffer's.
    """
    known = {
        tensor.untyped_storage()._cdata
        for tensor in (*model.parameters(), *model.buffers())
        if _attributes_of(tensor) is not None
    }
    found: dict[str, Tensor] = {}
    for name, tensor in attached_views(model):
        address = tensor.untyped_storage()._cdata
        if address not in known:
            known.add(address)
            found[name] = tensor
    return found


def attached_views(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `attached_tensors`, and those that share a storage too."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        owned = {
            name: attributes
            for name, parameter in module._parameters.items()
            if parameter is not None and (attributes := _attributes_of(parameter)) is not None
        }
        for name, attributes in owned.items():
            yield from _tensors_of(attributes.items(), f"{prefix}.{name}".lstrip("."), seen)
        if owned:
            yield from _tensors_of(public_attributes(module).items(), prefix, seen)


def copied_model(model: nn.Module) -> nn.Module:
    """A deep copy of a model and its quantised weights; torchao's `NF4Tensor` would quantise again (0.18)."""
    tensors = filter(is_wrapper_tensor, (*model.parameters(), *model.buffers()))
    copied = copy.deepcopy(
        model, {id(tensor): remade(tensor, lambda inner: inner.detach().clone()) for tensor in tensors}
    )
    _share_attached(model, copied)
    return copied


def _share_attached(original: nn.Module, copied: nn.Module) -> None:
    """Share attached objects between parameters and modules of a copy as the original does.

    bitsandbytes' parameters copy what is attached to them by themselves, so that modules have a second one.
    """
    for module, twin in zip(original.modules(), copied.modules(), strict=True):
        for name, parameter in module._parameters.items():
            if not is_of_library(parameter):
                continue
            attributes = vars(twin._parameters[name])
            for key, value in vars(parameter).items():
                if isinstance(value, bool | int | float | str | None):  # equal ones are one object by chance
                    continue
                if value is module:
                    attributes[key] = twin
                for own, attribute in public_attributes(module).items():
                    if attribute is value:
                        vars(twin)[own] = attributes[key]


def stay_trainable(model: nn.Module) -> None:
    """Keep layers with 4-bit weights trainable after they are evaluated on a CPU, by a change of the layers.

    On CPUs with AVX512-BF16, an evaluation in bitsandbytes packs their weights for a kernel without a gradient,
    and leaves them so. Then training has no gradients, without an error. Here they are not packed. Raises
    `UsageError` if weights are packed already.

    Source: bitsandbytes/nn/modules.py, Linear4bit.forward; autograd/_functions.py, matmul_4bit (0.50.2).
    """
    for name, module in model.named_modules():
        if getattr(module, "support_avx512bf16_for_cpu", False):
            state = getattr(module, "quant_state", None)
            if getattr(state, "packing_format_for_cpu", False):
                raise UsageError(
                    f"{name}: bitsandbytes packed its 4-bit weights in an evaluation on this CPU, and "
                    "packed weights have no gradient. Load the model again and train it before you evaluate it."
                )
            vars(module)["support_avx512bf16_for_cpu"] = False


def parameter_count(parameters: Iterable[Tensor]) -> int:
    """Number of parameters before quantisation; a 4-bit weight packs two or more into one element."""
    return sum(math.prod(getattr(getattr(p, "quant_state", None), "shape", p.shape)) for p in parameters)


def is_quantization_metadata(name: str) -> bool:
    """Whether an entry of `state_dict` is JSON of 4-bit weights, whose length depends on its numbers."""
    return ".quant_state.bitsandbytes__" in name


def load_state(model: nn.Module, state: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """`model.load_state_dict(state, strict=False)`, which also loads the parts of quantised weights.

    bitsandbytes' `Linear4bit` writes scales into `state_dict` and does not read them (0.50.2). The model's
    weights are quantised already. `state` has the names of `model.state_dict`, with the inner tensors of those
    that are made of others. Returns the missing and the unexpected names; raises `RuntimeError` if a tensor has
    another shape.
    """
    own = model.state_dict()
    made = {name: value for name, value in own.items() if is_wrapper_tensor(value)}
    inner = with_inner_tensors(made)
    _copy_alike(inner, state)
    others = {name: value for name, value in state.items() if name not in inner}
    missing, unexpected = model.load_state_dict(others, strict=False)
    missing = [name for name in missing if name not in made] + [name for name in inner if name not in state]
    loaded = set[str]()
    for prefix, module in model.named_modules():
        weight: Any = module._parameters.get("weight")
        quant_state = getattr(weight, "quant_state", None)
        start = f"{prefix}.weight.".lstrip(".")
        of_weight = [name for name in unexpected if name.startswith(start)]
        if quant_state is None or not of_weight:
            continue
        parts = {name.removeprefix(start): state[name] for name in of_weight}
        read = type(quant_state).from_dict(parts, weight.device)
        weight.quant_state = read
        vars(module)["quant_state"] = read
        loaded.update(of_weight)
    return missing, [name for name in unexpected if name not in loaded]


def _copy_alike(targets: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Copy the entries of `state` that have a target, if all of them have its shape."""
    found = {name: state[name] for name in targets if name in state}
    for name, value in found.items():
        if value.shape != targets[name].shape:
            raise RuntimeError(
                f"size mismatch for {name}: {tuple(value.shape)} was saved, and the model has "
                f"{tuple(targets[name].shape)}"
            )
    with torch.no_grad():
        for name, value in found.items():
            targets[name].copy_(value)


def public_attributes(module: nn.Module) -> dict[str, Any]:
    """Attributes of a module, other than parameters, buffers, modules and hooks."""
    return {name: value for name, value in vars(module).items() if not name.startswith("_")}


def _attributes_of(parameter: Tensor) -> dict[str, Any] | None:
    """Attributes that a library attached to a parameter; None for a parameter of torch's own class."""
    if is_of_library(parameter):
        return vars(parameter)
    names = getattr(parameter, ATTRIBUTES, None)
    return None if names is None else {name: getattr(parameter, name) for name in names}


def _tensors_of(items: Iterable[tuple[Any, Any]], path: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    for name, value in items:
        if id(value) in seen or isinstance(value, (type, nn.Module, nn.Parameter)):
            continue
        inner = f"{path} {name}" if " " not in path else f"{path}.{name}"
        if isinstance(value, Tensor):
            seen.add(id(value))
            yield inner, value
        elif isinstance(value, (dict, list, tuple)):
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            yield from _tensors_of(pairs, inner, seen)
        elif hasattr(value, "__dict__") and not callable(value):
            seen.add(id(value))
            yield from _tensors_of(vars(value).items(), inner, seen)
