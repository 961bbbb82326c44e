"""How an optimizer iterates over its parameters: one by one, lists of them, or one fused kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from brimful.errors import UsageError
from brimful.settings import OptimizerImplementation


def has_implementation(optimizer: Optimizer, implementation: OptimizerImplementation) -> bool:
    """Whether an optimizer supports an implementation and its user has not chosen another."""
    has_choice = all(name in optimizer.defaults for name in _flags(implementation))
    is_open = all(not group.get(name) for group in optimizer.param_groups for name in ("foreach", "fused"))
    is_explicit = any(group.get("foreach") is False for group in optimizer.param_groups)
    is_right = implementation is not OptimizerImplementation.FUSED or not _with_gaps(optimizer)
    return has_choice and is_open and not is_explicit and is_right


_SCALES_ITSELF = "_step_supports_amp_scaling"
"""Private attribute of torch's fused optimizers (2.13): a loss scaler leaves the check for infinity to them."""


def set_implementation(optimizer: Optimizer, implementation: OptimizerImplementation) -> None:
    """Make an optimizer use an implementation from now on, in place of the chosen one; its state stays.

    Raises `UsageError` if the optimizer has no such implementation, or it would update a parameter wrongly.
    """
    if implementation is OptimizerImplementation.FUSED:
        _refuse_gaps(optimizer)
        _refuse_complex(optimizer)
    flags = _flags(implementation)
    missing = [name for name, value in flags.items() if value and name not in optimizer.defaults]
    if missing:
        raise UsageError(f"{type(optimizer).__name__} has no {implementation} implementation.")
    for group in (optimizer.defaults, *optimizer.param_groups):
        group.update({name: value for name, value in flags.items() if name in group})
    if implementation is not OptimizerImplementation.FUSED:
        vars(optimizer).pop(_SCALES_ITSELF, None)
    else:
        for parameter, state in optimizer.state.items():
            if isinstance(state.get("step"), Tensor):  # a fused kernel reads the step count on its device
                state["step"] = state["step"].to(parameter.device, torch.float32)


def kept_implementation(optimizer: Optimizer) -> Callable[[], None]:
    """Return a function that restores an optimizer's implementation after `set_implementation`.

    Groups that were added since then get the optimizer's defaults.
    """
    names = tuple(_flags(OptimizerImplementation.FUSED))
    defaults, *groups = (
        {name: group[name] for name in names if name in group}
        for group in (optimizer.defaults, *optimizer.param_groups)
    )

    scales_itself = {name: value for name, value in vars(optimizer).items() if name == _SCALES_ITSELF}

    def restore() -> None:
        vars(optimizer).update(scales_itself)
        optimizer.defaults.update(defaults)
        for number, group in enumerate(optimizer.param_groups):
            was_fused = group.get("fused")
            group.update(groups[number] if number < len(groups) else defaults)
            if not was_fused or group.get("fused") or group.get("capturable"):
                continue
            for state in (optimizer.state[p] for p in group["params"] if p in optimizer.state):
                if isinstance(state.get("step"), Tensor):  # read on the host at each step
                    state["step"] = state["step"].cpu()

    return restore


def has_gaps(tensor: Tensor) -> bool:
    """Whether there is memory between a tensor's numbers that is not its own, as in a slice of columns."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1 and stride != expected:
            return True
        expected *= size
    return False


def _with_gaps(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if has_gaps(p)]


def _refuse_complex(optimizer: Optimizer) -> None:
    """Refuse parameters that are not real floats, as torch does at the first step.

    Source: torch/optim/optimizer.py, `_get_fused_kernels_supported_devices`.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    others = [parameter for parameter in parameters if not parameter.is_floating_point()]
    if others:
        dtype = str(others[0].dtype).removeprefix("torch.")
        raise UsageError(
            f"fused kernels update real floating-point parameters, and {len(others)} of {len(parameters)} are "
            f"{dtype}."
        )


def check_gaps(optimizer: Optimizer) -> None:
    """Raise `UsageError` if a fused kernel would update a parameter with gaps.

    On a CPU the kernel takes a parameter's memory for a row and updates what is between its numbers (torch
    2.13).
    """
    if any(group.get("fused") for group in optimizer.param_groups):
        _refuse_gaps(optimizer)


def _refuse_gaps(optimizer: Optimizer) -> None:
    for parameter in _with_gaps(optimizer):
        raise UsageError(
            f"a parameter of shape {tuple(parameter.shape)} is a part of a larger tensor, with gaps between "
            "its numbers: torch's fused kernels (on a CPU; on a GPU it was not tried) update others in its "
            "place. Make it of a copy, nn.Parameter(part.clone()), or take another optimizer_implementation."
        )


def _flags(implementation: OptimizerImplementation) -> dict[str, bool]:
    return {
        "foreach": implementation is OptimizerImplementation.FOREACH,
        "fused": implementation is OptimizerImplementation.FUSED,
    }
