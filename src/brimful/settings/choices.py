"""The values of settings, and what they permit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from enum import StrEnum
from typing import Any

from brimful.errors import UsageError


class Precision(StrEnum):
    """Number format of the forward and backward pass; parameters stay float32.

    FP16 and BF16 run under autocast; FP16 adds loss scaling. TF32 only changes the rounding of matmuls.

    Names of dtypes are accepted too: `Precision("bfloat16")` is `Precision.BF16`.
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
        """Name of the torch dtype that autocast uses; None without autocast."""
        return {Precision.FP16: "float16", Precision.BF16: "bfloat16"}.get(self)


class OptimizerImplementation(StrEnum):
    """Implementation of a `torch.optim` optimizer; all compute the same formula.

    FUSED rounds in a different order, which changes the last digits of float32.
    """

    FOR_LOOP = "for-loop"
    """Updates one parameter after another; torch's default on a CPU."""
    FOREACH = "foreach"
    """Updates all parameters at once, with temporaries as large as all of them; torch's default on CUDA."""
    FUSED = "fused"
    """Updates all parameters in one kernel, without temporaries."""


class MemoryFormat(StrEnum):
    """Layout of the 4-d and 5-d tensors of a step: weights of convolutions, images and volumes.

    Values of `torch.memory_format` are accepted too: `MemoryFormat(torch.channels_last)`.
    """

    CONTIGUOUS = "contiguous"
    """Samples, channels, height, width in the order of memory (NCHW); torch's default."""
    CHANNELS_LAST = "channels_last"
    """Channels last in memory (NHWC), `torch.channels_last`; of 5-d tensors `torch.channels_last_3d`."""

    @classmethod
    def _missing_(cls, value: object) -> MemoryFormat | None:
        named = str(value).removeprefix("torch.")
        return {"contiguous_format": cls.CONTIGUOUS, "channels_last_3d": cls.CHANNELS_LAST}.get(
            named, next((each for each in cls if each.value == named), None)
        )


class Parallelism(StrEnum):
    """How several ranks train one model, each on its part of the global batch."""

    DDP = "ddp"
    """Each rank holds all parameters, gradients and optimizer state; gradients are averaged."""
    FSDP2 = "fsdp2"
    """Each rank holds a shard of them; the parameters of a unit are gathered while it runs."""
    ZERO1 = "zero1"
    """DeepSpeed: each rank holds all parameters and gradients, and a shard of the optimizer state."""
    ZERO2 = "zero2"
    """DeepSpeed: gradients are sharded too."""
    ZERO3 = "zero3"
    """DeepSpeed: parameters are sharded too."""

    @property
    def is_zero(self) -> bool:
        """Whether DeepSpeed shards the training state."""
        return self in (Parallelism.ZERO1, Parallelism.ZERO2, Parallelism.ZERO3)


def fp16_is_divided(parallelism: Parallelism) -> UsageError:
    """The error of fp16 where ranks share parameters or optimizer state."""
    engine = "DeepSpeed's ZeRO" if parallelism.is_zero else "FSDP2"
    return UsageError(
        f"fp16 is not trained under {engine}: its loss scaler would have to look at every rank's gradients. "
        "Take bf16, or DDP."
    )


class Compile(StrEnum):
    """What `torch.compile` compiles by Inductor; kernels that it fuses round otherwise in the last digits."""

    NONE = "none"
    UNITS = "units"
    """Each unit that is kept, by itself: blocks that repeat are compiled once."""
    MODEL = "model"
    """The whole model, where nothing is recomputed or offloaded."""


class Action(StrEnum):
    """How a unit's saved tensors are handled between its forward and its backward."""

    KEEP = "keep"
    SAVE = "save"
    """Save the results of chosen ops, recompute the rest (selective activation checkpointing)."""
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    """Move the saved tensors to host memory until backward; nothing is recomputed."""
    NEST = "nest"
    """Recompute the unit, and do not keep its input either: the unit before it, which is recomputed or nested
    too, runs once more to compute that input."""


def check_fsdp2_alone(asked: Any, parallelisms: Sequence[Parallelism]) -> None:
    """Check that what only FSDP2 does is not asked of other ways to train; UsageError if it is.

    `asked` is a record with fields of these names; their defaults ask for nothing.
    """
    for each in fields(asked):
        value = getattr(asked, each.name)
        if each.name not in _OF_FSDP2 or value == each.default or Parallelism.FSDP2 in parallelisms:
            continue
        on_host = " With one rank, offload_optimizer has the optimizer's state on the host."
        raise UsageError(
            f"{each.name}={value!r} is for FSDP2, which divides a model among several ranks, and the "
            f"parallelism is {' or '.join(parallelisms)}. Leave it out, or take fsdp2 on several ranks."
            + (on_host if each.name == "offload_parameters" else "")
        )


_OF_FSDP2 = ("reshard_after_forward", "param_dtype", "offload_parameters")
