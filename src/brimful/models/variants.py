"""A job with another type of its weights, or with LoRA adapters over them; its loss and batch stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from brimful.errors import UnknownNameError, UsageError
from brimful.job import Batch, Job
from brimful.models.adapters import LoraOptions, adapted, add_adapters, check_quantization
from brimful.torch_utils.built_modules import noting_built_modules

DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
"""Types of weights, by name."""


def with_dtype(job: Job, dtype: str) -> Job:
    """The job with its floating-point parameters and buffers in another type, as `model.to(dtype)` makes them.

    Gradients and optimizer state have the type too, and so have floating-point tensors of a batch that the job
    makes. UnknownNameError if no type has the name.
    """
    if dtype not in DTYPES:
        raise UnknownNameError("type of weights", dtype, DTYPES)
    made, make = _rebuilt(job, "dtype", partial(_moved, DTYPES[dtype])), job.batch
    if not callable(make):
        return made

    @wraps(make)
    def in_type(samples: int) -> Batch:
        return tree_map(partial(_in_type, DTYPES[dtype]), make(samples))

    return replace(made, batch=in_type)


def _moved(dtype: torch.dtype, model: Any) -> nn.Module:
    # diffusers warns of modules to keep in float32 even where there are none (0.42)
    warns_of_none = _is_of_diffusers(model) and not model._keep_in_fp32_modules
    moved: nn.Module = nn.Module.to(model, dtype) if warns_of_none else model.to(dtype)
    return moved


def _in_type(dtype: torch.dtype, value: Any) -> Any:
    is_floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if is_floating else value


def with_adapters(job: Job, lora: str, quantize: str | None = None) -> Job:
    """The job that trains LoRA adapters over frozen weights, quantised if `quantize` is given.

    `lora` is as for `LoraOptions.parse`, `quantize` one of `QUANTIZATIONS`. The model must be of transformers,
    or of diffusers without `quantize`; the new head of a classifier is trained too. UsageError if it is not, or
    if peft is not installed.
    """
    options = LoraOptions.parse(lora)
    check_quantization(quantize, has_adapters=True)

    def adapt(model: nn.Module) -> nn.Module:
        if _is_of_diffusers(model) and quantize is None:
            return add_adapters(model, options)
        if not is_of_transformers(model):
            kinds = "transformers and diffusers" if quantize is None else "transformers with --quantize"
            raise UsageError(
                f"{job.name}: adapters are added to models of {kinds}, and this is a "
                f"{type(model).__name__}. Add them in Job(model=…), with peft.get_peft_model."
            )
        return adapted(model, options, quantize, is_classifier=_is_classifier(model))

    return _rebuilt(job, "lora", adapt)


def with_variant(job: Job, *, dtype: str | None, lora: str | None, quantize: str | None) -> Job:
    """The job with the options that are given."""
    check_quantization(quantize, has_adapters=lora is not None)
    if dtype is not None:
        job = with_dtype(job, dtype)
    return job if lora is None else with_adapters(job, lora, quantize)


def is_of_architecture(job: Job) -> bool:
    """Whether the batches of a job are those of an architecture, whose options change them."""
    return getattr(job.batch, "__module__", "").startswith("brimful.models.")


def is_of_transformers(model: Any) -> bool:
    """Whether a model is a `PreTrainedModel`; transformers is not imported for that."""
    return _is_a(model, "PreTrainedModel", "transformers")


def _is_of_diffusers(model: Any) -> bool:
    return _is_a(model, "ModelMixin", "diffusers")


def _is_a(model: Any, name: str, package: str) -> bool:
    """Whether a model's class is, or inherits, the class of a package that need not be installed."""
    return any(
        kind.__name__ == name and kind.__module__.startswith(f"{package}.") for kind in type(model).__mro__
    )


def _is_classifier(model: Any) -> bool:
    return "For" in type(model).__name__ and "Classification" in type(model).__name__


def _rebuilt(job: Job, option: str, change: Callable[[Any], nn.Module]) -> Job:
    """The job whose model is changed after it is built."""
    build = job.model
    refusal = (
        f"{job.name}: {option} would change the module that Job(model=…) {{}}. Give a function that builds it."
    )
    if isinstance(build, nn.Module):
        raise UsageError(refusal.format("was given"))

    def changed() -> nn.Module:
        with noting_built_modules() as is_built:
            model = build()
        if not is_built(model):
            raise UsageError(refusal.format("returns and did not build"))
        return change(model)

    return replace(job, model=changed)
