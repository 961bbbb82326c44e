"""What a user asks of a plan and of a training run, declared once, each option with its help.

These are derived from a record: the keyword arguments of the Python functions (`takes_options`), the flags and
help of the command line (`cli/options.py`) and what a plan's file keeps. To add an option, add a field with its
docstring, its type below for type checkers (a test compares the two), and the code that uses it.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypedDict, TypeVar

from brimful.arguments import check_fields, checks_arguments
from brimful.codec import JsonForm, PositiveInt, json_form
from brimful.errors import UnknownNameError, UsageError
from brimful.settings import (
    Action,
    Compile,
    MemoryFormat,
    OptimizerImplementation,
    Parallelism,
    Precision,
)
from brimful.utils.field_docs import field_docstrings
from brimful.utils.quantities import parse_bytes

if TYPE_CHECKING:
    import torch

PrecisionLike: TypeAlias = "str | torch.dtype | Precision"
"""What names a precision: "bf16", `torch.bfloat16`, or one of `Precision`."""

MemoryFormatLike: TypeAlias = "str | torch.memory_format | MemoryFormat"
"""What names a memory format: "channels_last", `torch.channels_last`, or one of `MemoryFormat`."""

Member = TypeVar("Member", bound=Enum)
Value = TypeVar("Value")

VARIANT_OPTIONS = ("dtype", "lora", "quantize")
"""Options of every model that is named; see `models.variants`."""

LARGEST_SEED = 2**64 - 1
"""Source: torch.manual_seed (torch 2.13)."""


def _flag(flag: str, **how: Any) -> dict[str, Any]:
    """Metadata of a field whose flag on the command line is not its name."""
    return {"flag": flag, **how}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What is asked of a plan: settings that are pinned, and what may be chosen."""

    budget: str | None = None
    """Memory permitted on the device, the CUDA context included: a size such as 11GiB, or a share of the
    baseline's peak, such as 50%. The baseline is the whole batch in one micro-batch, nothing recomputed.
    Default: device capacity; on a GPU 5 % less, and on one of this machine of what is free now."""
    max_exceedance: float = 0.01
    """Largest probability of exceeding the budget, by how far past predictions were off; 1 permits any. Where
    nothing is as safe, the plan is the fastest at the least of 3, 10, 30 and 100 % that is possible, and a note
    has its probability."""
    effort: str = "normal"
    """normal chooses the simplest of plans whose times predictions cannot distinguish: accumulation before
    recomputation before offloading. max chooses the fastest, however little faster it is."""
    precision: str = "fp32"
    """fp32, tf32, fp16 or bf16. Several, separated by commas, let the plan choose; auto permits all that the
    device supports. The baseline uses the first."""
    micro_batch_size: PositiveInt | None = None
    """Samples in one forward and backward pass. Default: the plan chooses."""
    recompute: str = "auto"
    """Activation checkpointing: all recomputes every unit, none recomputes none, auto chooses for each."""
    optimizer: str | None = None
    """Replaces the job's own: adamw, sgd, adafactor, …"""
    optimizer_implementation: str | None = None
    """for-loop, foreach or fused: the same formula. Default: fused where the optimizer has it."""
    allow_optimizers: tuple[str, ...] = field(default=(), metadata=_flag("--allow-optimizer"))
    """Another optimizer that may be chosen, although it changes the mathematics: adafactor, adamw8bit;
    may be repeated."""
    chunked_loss: bool = True
    """Permit chunked cross-entropy for a large vocabulary: the same sums in another order."""
    expandable_segments: bool = True
    """Permit expandable segments of PyTorch's CUDA allocator, which leave less memory unused."""
    offload_activations: bool = True
    """Permit offloading activations to host memory."""
    host_memory: str | None = None
    """Host memory for offloading and an optimizer on the host, such as 64GiB. Default: half of this machine's
    if the GPU is in it, half of the GPU's memory if it is only named."""
    split_batch_norm: bool = False
    """Permit splitting a batch that BatchNorm couples, or a layer that each forward changes; statistics are
    then those of micro-batches."""
    optimizer_in_backward: bool = False
    """Update each parameter in backward and free its gradient. A step that fails then cannot be undone. Not
    with accumulation, clipping, fp16 or several ranks."""
    offload_optimizer: bool | None = None
    """Keep the optimizer state in host memory and update there. Default: where it makes the step faster, or
    nothing else fits, on one GPU."""
    prefetch_inputs: bool = False
    """Copy the next micro-batch to the GPU while the current one is computed; takes the memory of one more
    micro-batch."""
    own_checkpointing: str = "keep"
    """off turns off the model's own activation checkpointing (gradient_checkpointing), so that the plan alone
    decides what is recomputed; keep leaves it on."""
    memory_format: str | None = None
    """Layout of 4-d and 5-d parameters and inputs: channels_last, contiguous, preserve (as model and batch
    are), or auto: the faster by prediction, where the model has 2-d or 3-d convolutions. Default: auto for the
    images recipe, else preserve."""
    compile: str = "none"
    """What torch.compile compiles: none, units (blocks that are kept), model, or auto: units, where that is
    faster by prediction. Fused kernels round otherwise, and dropout draws other numbers. Not with several
    ranks."""
    parallelism: str = "auto"
    """Several ranks: ddp replicates the model on each rank, fsdp2 shards it, auto takes the faster; zero1,
    zero2 and zero3 are DeepSpeed's."""
    reshard_after_forward: bool | None = field(default=None, metadata=_flag("--reshard/--no-reshard"))
    """Under FSDP2, free gathered parameters between forward and backward. Default: the faster that fits."""
    param_dtype: str | None = None
    """Under FSDP2 and bf16, bfloat16 gathers parameters in half the bytes, which rounds more than autocast
    does."""
    offload_parameters: bool = False
    """Under FSDP2, keep each rank's shards of parameters, gradients and optimizer state in host memory, and
    update them there."""
    job_calibration: bool = True
    """On a device of this machine, multiply predictions by what an earlier training run of the same job
    measured there, with one precision and one optimizer; a note has the factors."""

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def of(cls, given: PlanKeywords) -> Self:
        """The options as text, as the command line and a plan's file have them.

        The keywords of `brimful.plan` also give sizes as numbers of bytes, precisions as dtypes and in lists,
        and `recompute` as an `Action`, None or "auto".
        """
        return cls(**{name: _AS_TEXT.get(name, _same)(value) for name, value in given.items()})


class PlanKeywords(TypedDict, total=False):
    """What `brimful.plan` takes by keyword, for type checkers."""

    budget: str | float | None
    max_exceedance: float
    effort: str
    precision: PrecisionLike | Sequence[PrecisionLike]
    micro_batch_size: int | None
    recompute: str | Action | None
    optimizer: str | None
    optimizer_implementation: str | OptimizerImplementation | None
    allow_optimizers: str | Sequence[str]
    chunked_loss: bool
    expandable_segments: bool
    offload_activations: bool
    host_memory: str | float | None
    split_batch_norm: bool
    optimizer_in_backward: bool
    offload_optimizer: bool | None
    prefetch_inputs: bool
    own_checkpointing: str
    memory_format: MemoryFormatLike | None
    compile: str | Compile
    parallelism: str | Parallelism
    reshard_after_forward: bool | None
    param_dtype: str | None
    offload_parameters: bool
    job_calibration: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """What is asked of a training run in Python and on the command line."""

    epochs: PositiveInt | None = None
    """Total passes over the training data. Default: 1, unless a number of steps is given."""
    steps: PositiveInt | None = None
    """Maximum total optimizer steps."""
    seed: int = field(default=0, metadata={"min": 0, "max": LARGEST_SEED})
    """Random seed of weights, order of samples and dropout, from 0 to 2**64 - 1."""
    max_gradient_norm: float | None = None
    """Clip gradients to this norm. Default: no clipping."""
    ema_decay: float | None = None
    """Keep an exponential moving average of the weights with this decay, such as 0.999; validation uses it, and
    it is written to average.safetensors. It takes the memory of the parameters again, which a plan does not
    count: a plan whose budget has no room for it is refused before training."""
    correct_batch_norm: bool = False
    """Correct BatchNorm's momentum for gradient accumulation: running statistics move in a step as with one
    micro-batch. They remain those of micro-batches."""
    patience: PositiveInt | None = None
    """Early stopping: end after this many validations in a row without a lower loss. Needs validation data."""
    validate_every: PositiveInt | None = None
    """Validate every N steps, besides the end of each epoch. Needs validation data."""
    save_every: PositiveInt | None = None
    """Save a checkpoint every N steps, besides the end of each epoch and of the run. A run that is killed loses
    the steps since the last one."""
    keep_saves: PositiveInt = 2
    """Number of most recent checkpoints to keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingOptions:
    """How the job's DataLoaders read, where that is not as the job has it."""

    workers: int | None = field(default=None, metadata={"min": 0})
    """Processes that read the training data, for a DataLoader. Default: as the job has it."""
    prefetch_factor: PositiveInt | None = None
    """Batches that each of these processes reads ahead. Default: as the job has it, or 2."""
    pin_memory: bool = False
    """Read into pinned memory, from which copies to a GPU go on beside other work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLength:
    """The length of a whole training run that is predicted; `check` refuses all but one length."""

    epochs: PositiveInt | None = None
    """Predict a whole run of this number of epochs; needs the dataset size."""
    dataset_size: PositiveInt | None = None
    """Samples in the training data, which is one epoch."""
    samples: PositiveInt | None = None
    """Predict a whole run of this number of samples, over all epochs."""
    tokens: PositiveInt | None = None
    """Predict a whole run of this number of tokens, padding included, for models of texts."""

    @property
    def is_given(self) -> bool:
        """Whether any field is given."""
        return any(getattr(self, each.name) is not None for each in fields(self))

    def check(self) -> None:
        """Refuse several lengths or none, and epochs without the size of the data.

        Raises:
            UsageError: The fields are not one length, or a number is out of range.
        """
        check_fields(self)
        lengths = [name for name in ("epochs", "samples", "tokens") if getattr(self, name) is not None]
        if self.dataset_size is not None and lengths in ([], ["samples"], ["tokens"]):
            found = f"beside {lengths[0]}" if lengths else "without epochs"
            raise UsageError(
                f"the dataset size (--dataset-size) is given {found}; it is the length of an epoch."
            )
        if len(lengths) != 1:
            found = f"{' and '.join(lengths)} are given" if lengths else "none is given"
            raise UsageError(
                f"a run has one length, and {found}. Give epochs with dataset_size, or samples, or tokens "
                "(--epochs with --dataset-size, --samples, --tokens)."
            )
        if self.epochs is not None and self.dataset_size is None:
            raise UsageError(
                f"a run of {self.epochs} epochs needs the number of samples in the data: dataset_size=… "
                "(--dataset-size)."
            )


class RunLengthKeywords(TypedDict, total=False):
    """What `predict_run` takes by keyword, for type checkers."""

    epochs: int | None
    dataset_size: int | None
    samples: int | None
    tokens: int | None


RECOMPUTE_ACTIONS: Mapping[str, Action | None] = {"all": Action.RECOMPUTE, "none": Action.KEEP, "auto": None}
"""The action for all units by value of the option `recompute`; None lets the plan choose for each."""
_RECOMPUTE_TEXT: dict[object, str] = {action: name for name, action in RECOMPUTE_ACTIONS.items()}
_MEMORY_FORMATS: dict[str, tuple[MemoryFormat | None, ...]] = {
    "auto": (MemoryFormat.CONTIGUOUS, MemoryFormat.CHANNELS_LAST),
    **{str(each): (each,) for each in MemoryFormat},
    "preserve": (None,),
}
"""The memory formats to choose from, by value of the option; None leaves the layout as it is."""


def parse_precision(precision: PrecisionLike) -> Precision:
    """The precision meant by a member, its name ("bf16", "fp32", …), or a dtype (`torch.bfloat16`, "bfloat16").

    Any other name raises UnknownNameError.
    """
    return _member(Precision, precision, "precision")


def parse_implementation(name: str | OptimizerImplementation | None) -> OptimizerImplementation | None:
    """The implementation that has a name; None leaves it to the optimizer."""
    return None if name is None else _member(OptimizerImplementation, name, "optimizer implementation")


def parse_compile(name: str | Compile) -> Compile:
    """What is compiled, by name."""
    return _member(Compile, name, "value of compile")


def parse_compiles(name: str | Compile) -> tuple[Compile, ...]:
    """What may be compiled, to choose from."""
    return (
        (Compile.NONE, Compile.UNITS)
        if name == "auto"
        else (_member(Compile, name, "value of compile", "auto"),)
    )


def parse_parallelisms(name: str, world_size: int) -> tuple[Parallelism, ...]:
    """The ways to train on some ranks, of which the first is that of the baseline."""
    if name == "auto":
        return (Parallelism.DDP, Parallelism.FSDP2) if world_size > 1 else (Parallelism.DDP,)
    return (_member(Parallelism, name, "parallelism", "auto"),)


def parse_recompute(recompute: str | Action | None, *, permits_auto: bool = True) -> Action | None:
    """The one action for all units, `Action.RECOMPUTE` or `Action.KEEP`; None lets the plan choose for each."""
    actions = {name: each for name, each in RECOMPUTE_ACTIONS.items() if permits_auto or each is not None}
    if recompute is None or (isinstance(recompute, Action) and recompute in actions.values()):
        return recompute
    return _named("value of recompute", recompute, actions)


def parse_memory_formats(memory_format: MemoryFormatLike | None) -> tuple[MemoryFormat | None, ...]:
    """The memory formats to choose from, at least one, of which None leaves the layout as it is.

    The option is "auto", "contiguous", "channels_last", "preserve" or None, or one of torch's formats; any
    other name raises UnknownNameError.
    """
    return _named("memory format", format_text(memory_format) or "preserve", _MEMORY_FORMATS)


def prefers_simplest(effort: str) -> bool:
    """Whether a value of the option `effort` asks for the simplest of plans that are equally fast."""
    return _named("value of effort", effort, {"normal": True, "max": False})


def keeps_own_checkpointing(value: str) -> bool:
    """Whether a value of the option `own_checkpointing` leaves the model's own as it is."""
    return _named("value of own_checkpointing", value, {"keep": True, "off": False})


def _member(kind: type[Member], value: Any, what: str, *others: str) -> Member:
    try:
        return kind(value)
    except ValueError:
        raise UnknownNameError(what, str(value), [*others, *map(str, kind)]) from None


def _named(what: str, name: str, known: Mapping[str, Value]) -> Value:
    if name not in known:
        raise UnknownNameError(what, str(name), known)
    return known[name]


def _same(value: Any) -> Any:
    return value


def _size_text(size: str | float | None) -> str | None:
    return size if size is None or isinstance(size, str) else f"{parse_bytes(size)}B"


def _names_text(precision: object) -> str:
    several = precision if isinstance(precision, Sequence) and not isinstance(precision, str) else [precision]
    return ",".join(str(each).removeprefix("torch.") for each in several)


def _recompute_text(recompute: str | Action | None) -> str:
    is_named = isinstance(recompute, str) and not isinstance(recompute, Action)
    return str(recompute) if is_named else _RECOMPUTE_TEXT.get(recompute, str(recompute))


def format_text(memory_format: MemoryFormatLike | None) -> str | None:
    """The option `memory_format` as text, such as "channels_last" of torch's; None if it was not given."""
    if memory_format is None:
        return None
    return str(memory_format).removeprefix("torch.").removesuffix("_format").removesuffix("_3d")


_AS_TEXT: dict[str, Callable[[Any], Any]] = {
    "budget": _size_text,
    "host_memory": _size_text,
    "precision": _names_text,
    "recompute": _recompute_text,
    "memory_format": format_text,
    "parallelism": str,
    "optimizer_implementation": lambda name: None if name is None else str(name),
    "allow_optimizers": lambda names: (names,) if isinstance(names, str) else tuple(names),
}


json_form(
    JsonForm(
        keys={
            "offload_activations": "offload",
            "optimizer_in_backward": "step_in_backward",
            "offload_optimizer": "optimizer_on_host",
            "prefetch_inputs": "copies_ahead",
            "param_dtype": "gathered_dtype",
            "offload_parameters": "cpu_offload",
        }
    )
)(PlanOptions)


Target = TypeVar("Target", bound=Callable[..., Any])


def takes_options(record: type, keywords: type) -> Callable[[Target], Target]:
    """Show a record's fields in the signature and docstring of what takes them as `**options`; a decorator.

    The decorated function or class has `**options` as its last parameter. The record has defaults and a
    docstring below each field; `keywords` is the TypedDict of what a caller may give for the fields. Other
    names and types are refused by `checks_arguments`.
    """

    def decorate(target: Target) -> Target:
        *named, options = inspect.signature(target).parameters.values()
        shown = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=keywords.__annotations__[field.name].__forward_arg__,  # as it is written
            )
            for field in fields(record)
        ]
        target.__signature__ = inspect.Signature([*named, *shown])  # type: ignore[attr-defined]
        with suppress(OSError):  # there is no source to read
            target.__doc__ = _with_options(target.__doc__, f"**{options.name}:", field_docstrings(record))
        return checks_arguments(target, vars(sys.modules[keywords.__module__]))

    return decorate


def _with_options(docstring: str | None, entry: str, descriptions: dict[str, str]) -> str | None:
    """The docstring with a line for each option in place of the one line of all."""
    if docstring is None:  # python -OO
        return None
    lines = docstring.splitlines()
    place = next(number for number, line in enumerate(lines) if line.strip().startswith(entry))
    indent = lines[place][: -len(lines[place].lstrip())]
    described = [
        textwrap.fill(f"{name}: {text}", 108, initial_indent=indent, subsequent_indent=indent + "    ")
        for name, text in descriptions.items()
    ]
    return "\n".join([*lines[:place], *described, *lines[place + 1 :]])
