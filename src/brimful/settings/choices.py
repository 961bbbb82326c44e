"""The values that settings choose from, and checks of what a user gives for them."""

from __future__ import annotations

from enum import StrEnum
from numbers import Integral
from typing import TypeVar

from brimful.errors import UsageError


class Precision(StrEnum):
    """Number format of the forward and backward pass; parameters stay float32.

    FP16 and BF16 run under autocast; FP16 adds loss scaling. TF32 only changes how matmuls round.

    Names of dtypes are understood too: `Precision("bfloat16")` is `Precision.BF16`.
    """

    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    BF16 = "bf16"

    @classmethod
    def _missing_(cls, value: object) -> Precision | None:
        dtype = str(value).lower().removeprefix("torch.")
        return {
            "float32": cls.FP32,
            "float": cls.FP32,
            "tensorfloat32": cls.TF32,
            "float16": cls.FP16,
            "half": cls.FP16,
            "bfloat16": cls.BF16,
        }.get(dtype)

    @property
    def autocast_dtype(self) -> str | None:
        """Name of the torch dtype autocast uses; None without autocast."""
        return {Precision.FP16: "float16", Precision.BF16: "bfloat16"}.get(self)


class OptimizerImplementation(StrEnum):
    """How an optimizer of `torch.optim` goes over its parameters; each computes the same formula.

    FUSED rounds in another order than the others, in the last digits of float32.
    """

    FOR_LOOP = "for-loop"
    """One after another; torch's default on a CPU."""
    FOREACH = "foreach"
    """All at once, with temporaries as large as all parameters; torch's default on CUDA."""
    FUSED = "fused"
    """All at once in one kernel, without temporaries."""


class Parallelism(StrEnum):
    """How several ranks, each with its share of the global batch, train one model."""

    DDP = "ddp"
    """Each holds all parameters, gradients and optimizer state; gradients are averaged."""
    FSDP2 = "fsdp2"
    """Each holds its part of them; a unit's parameters are gathered while it runs."""
    ZERO1 = "zero1"
    """DeepSpeed: each holds all parameters and gradients, and its part of the optimizer state."""
    ZERO2 = "zero2"
    """DeepSpeed: each holds its part of the gradients too."""
    ZERO3 = "zero3"
    """DeepSpeed: each holds its part of the parameters too."""

    @property
    def is_zero(self) -> bool:
        """Whether DeepSpeed divides the model."""
        return self in (Parallelism.ZERO1, Parallelism.ZERO2, Parallelism.ZERO3)


class Action(StrEnum):
    """What becomes of a unit's saved tensors between its forward and its backward."""

    KEEP = "keep"
    SAVE = "save"
    """Save what chosen ops return, recompute the rest."""
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    """Keep it in the host's memory meanwhile; nothing is recomputed."""
    NEST = "nest"
    """Recompute it, and do not hold its input either: the unit before it, which is recomputed or nested too, is
    run once more to make it."""


def check_counts(record: object, *names: str) -> None:
    """Check that fields of a record are whole numbers.

    Args:
        record: Has the fields.
        *names: Theirs.

    Raises:
        UsageError: One is a float, a text or a bool.
    """
    for name in names:
        check_count(name, getattr(record, name))


def check_count(name: str, value: object) -> None:
    """Check that an argument is a whole number.

    Args:
        name: Of the argument.
        value: Its value.

    Raises:
        UsageError: It is a float, a text or a bool.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UsageError(f"{name} is {value!r}, of type {type(value).__name__}; it must be a whole number.")


_Kind = TypeVar("_Kind", bound=StrEnum)


def member(kind: type[_Kind], name: str, value: str) -> _Kind:
    """The member of an enumeration that a value names, as "bf16" and `torch.bfloat16` name a precision."""
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(kind)
        raise UsageError(f"{name} is {value!r}; it must be one of {known}.") from None
