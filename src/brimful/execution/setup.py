"""Set up a run on this machine: choose its device, build the model, configure the allocator."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn

from brimful.errors import UsageError
from brimful.execution.attached import copied_model, stay_trainable
from brimful.execution.host_allocator import keep_freed_memory
from brimful.job import Job
from brimful.settings import Settings
from brimful.torch_utils.built_modules import noting_built_modules
from brimful.torch_utils.module_names import check_runs_on_one_device

_IN_TORCH = re.compile(r"auto|(cpu|cuda)(:\d+)?")


def is_of_this_machine(device: object) -> bool:
    """Whether a device is named as in torch, which means this machine, and not by a GPU's name.

    Names of this machine are a `torch.device`, an index, and "auto", "cpu" or "cuda" with or without an index.
    """
    if isinstance(device, torch.device | int):
        return True
    return isinstance(device, str) and _IN_TORCH.fullmatch(device.strip().lower()) is not None


def choose_device(asked: torch.device | str | int | None, planned_kind: str | None) -> torch.device:
    """The device of this machine to run on.

    Args:
        asked: The user's choice, such as "cpu", "cuda:1", 1 or a `torch.device`; None and "auto" choose a
            device.
        planned_kind: The kind of device a plan is for, "cuda" or "cpu"; None without a plan.

    Returns:
        The user's choice, else a device of the planned kind, else the GPU if there is one.

    Raises:
        UsageError: The device is neither a CPU nor a CUDA device, or this machine has none.
    """
    has_cuda = torch.cuda.is_available()
    if isinstance(asked, str):
        asked = asked.strip().lower()
    if asked is None or asked == "auto":
        if planned_kind == "cuda" and not has_cuda:
            raise UsageError(
                "the plan is for a GPU, and this machine has no CUDA GPU that torch can use. "
                "Plan for the cpu to train here."
            )
        return torch.device(planned_kind or ("cuda" if has_cuda else "cpu"))
    try:
        device = torch.device(f"cuda:{asked}" if isinstance(asked, int) else asked)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"{asked!r} is not a torch device. Write cpu, cuda or cuda:1.") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"brimful runs on a CPU or a CUDA device, not on {device.type!r}.")
    if device.type == "cuda" and not has_cuda:
        raise UsageError(
            "this machine has no CUDA GPU that torch can use. Use cpu; to plan for a GPU elsewhere, name it, "
            'such as "RTX 3090".'
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"{device} does not exist: this machine has {torch.cuda.device_count()} CUDA GPUs, from cuda:0 on."
        )
    return device


_expands_segments = False
"""Whether `set_up_allocator` has enabled expandable segments."""


def set_up_allocator(settings: Settings, device: torch.device) -> None:
    """Configure the device's allocator for the whole process: PyTorch's as settings require, or a CPU's malloc.

    On a CPU, malloc keeps freed memory; `host_allocator` says why. On CUDA other options stay: settings without
    expandable segments keep the user's own configuration, but revert that of this function.
    Existing segments do not change, so call it before the model is on the device, to reserve the least.

    Source: torch.cuda.memory._set_allocator_settings, deprecated for the private call used here (torch 2.13).
    """
    global _expands_segments
    if device.type == "cpu":
        keep_freed_memory()
    if device.type != "cuda" or settings.expandable_segments == _expands_segments:
        return
    wanted = f"expandable_segments:{settings.expandable_segments}"
    if not hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        _expands_segments = settings.expandable_segments
        torch.cuda.memory._set_allocator_settings(wanted)
        return
    others = _allocator_settings().split(",")
    if wanted in others:
        return  # the user set it
    _expands_segments = settings.expandable_segments
    kept = [option for option in others if option.strip() and "expandable_segments" not in option]
    torch._C._accelerator_setAllocatorSettings(",".join([*kept, wanted]))


def expands_segments() -> bool:
    """Whether PyTorch's CUDA allocator uses expandable segments in this process."""
    given = re.findall(r"expandable_segments\s*:\s*(\w+)", _allocator_settings())
    return _expands_segments or given[-1:] == ["True"]


def _allocator_settings() -> str:
    """PyTorch's allocator options; only the user's where torch cannot report later ones (before 2.12)."""
    if hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        reported: str = torch._C._accelerator_getAllocatorSettings()
        return reported
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def limit_reserved(limit_bytes: int, device: torch.device) -> Callable[[], object]:
    """Limit what torch may reserve on a CUDA device; returns what restores the limit of before.

    Past the limit torch raises an out-of-memory error, from which a step recovers, also where the driver would
    use the host's memory, as on Windows and WSL. A lower limit of the user's stays. Other devices have none.
    """
    if device.type != "cuda":
        return lambda: None
    index = torch.cuda.current_device() if device.index is None else device.index
    limits = _limits.setdefault(index, {})
    if not limits:
        reported = getattr(torch.cuda.memory, "get_per_process_memory_fraction", None)  # from torch 2.8 on
        limits[_USERS] = 1.0 if reported is None else float(reported(index))
    own = object()
    limits[own] = limit_bytes / torch.cuda.get_device_properties(index).total_memory
    _set_limit(index)

    def restore() -> None:
        if limits.pop(own, None) is not None:
            _set_limit(index)
            if limits.keys() == {_USERS}:
                limits.clear()

    return restore


_USERS = object()
_limits: dict[int, dict[object, float]] = {}
"""Limits in force by GPU: the user's own, and one of each plan. The last plan's counts: it is what trains."""


def _set_limit(index: int) -> None:
    limits = _limits[index]
    last = next(reversed(limits.values()))
    torch.cuda.set_per_process_memory_fraction(min(limits[_USERS], last), index)


def device_name(device: torch.device) -> str:
    """The GPU's own name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _copy_of(model: nn.Module, job: Job) -> nn.Module:
    if any(module._compiled_call_impl is not None for module in model.modules()):
        warnings.warn(
            f"what runs is a copy of the model of {job.name!r}, and torch copies modules that `compile()` "
            "compiled in place without that: it runs eagerly. Give a function that builds and compiles it.",
            stacklevel=5,
        )
    return copied_model(model)


def build_model(job: Job, *, is_copied: bool = False) -> nn.Module:
    """The job's model, with real weights, where it was built.

    `is_copied` returns a copy of a module that existed before: of one that is given, and of one that the
    function returns without building it. Raises `UsageError` if the function builds something else or leaves
    tensors on the meta device, or if quantised weights are packed so that they cannot be trained.
    """
    if isinstance(job.model, nn.Module):
        check_runs_on_one_device(job.model, job=job.name)
        if job.weights is not None:
            raise UsageError(
                f"{job.name!r} has `weights` to load and a model that is built already. Give a function that "
                "builds it, or load them into it and leave `weights` out."
            )
        chosen = _copy_of(job.model, job) if is_copied else job.model
        stay_trainable(chosen)
        return chosen
    with noting_built_modules(with_tensors=True) if is_copied else nullcontext(lambda _model: True) as is_built:
        model = job.model()
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model of {job.name!r} is built as a {type(model).__name__}, not an nn.Module.")
    check_runs_on_one_device(model, job=job.name)
    if not is_built(model):
        model = _copy_of(model, job)
    stay_trainable(model)
    if job.weights is not None:
        job.weights(model)
    without_values = [name for name, tensor in model.state_dict().items() if getattr(tensor, "is_meta", False)]
    if without_values:
        raise UsageError(
            f"{without_values[0]} of {job.name!r} is on the meta device, where it has a shape and no values. "
            "Build the model on the CPU (torch.set_default_device is process-wide), or pass Job(weights=…)."
        )
    return model
