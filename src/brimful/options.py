"""What a user asks of a plan, declared once: the command line's flags and help, and what a plan's file keeps.

Each field's docstring is its help on the command line (`cli/options.py`). `brimful.plan` takes the same names
with the same defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from brimful.codec import JsonForm, PositiveInt, json_form
from brimful.quantities import parse_bytes
from brimful.settings import Action


def _flag(flag: str, **how: Any) -> dict[str, Any]:
    """Metadata of a field whose flag on the command line is not its name."""
    return {"flag": flag, **how}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What is asked of a plan: settings that are pinned, and what may be chosen."""

    budget: str | None = None
    """Bytes permitted on the device, such as 11GiB, or a share of what plain training takes, such as 50%.
    Default: device capacity, minus 5 % on a GPU."""
    precision: str = "fp32"
    """fp32, tf32, fp16 or bf16; several with commas between to choose from; auto for all that the device has.
    The first is that of plain training."""
    micro_batch_size: PositiveInt | None = None
    """Samples in one forward and backward pass. Default: the plan chooses."""
    recompute: str = "auto"
    """Activation checkpointing: all or none of the units; auto chooses for each."""
    optimizer: str | None = None
    """Replaces the job's own: adamw, sgd, adafactor, …"""
    optimizer_implementation: str | None = None
    """for-loop, foreach or fused: the same formula. Default: fused where the optimizer has it."""
    allow_optimizers: tuple[str, ...] = field(default=(), metadata=_flag("--allow-optimizer"))
    """Another optimizer that may be chosen, although it changes the mathematics: adafactor, adamw8bit,
    adamw4bit; may be repeated."""
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
    """Prefetch: copy the next micro-batch of a step to the GPU while one is computed, for the memory of one
    more."""
    own_checkpointing: str = "keep"
    """off turns off the model's own activation checkpointing (gradient_checkpointing), so that the plan alone
    decides what is recomputed; keep leaves it on."""
    parallelism: str = "auto"
    """Several ranks: ddp keeps the model on each, fsdp2 shards it, auto takes the faster; zero1, zero2 and
    zero3 are DeepSpeed's."""
    reshard_after_forward: bool | None = field(default=None, metadata=_flag("--reshard/--no-reshard"))
    """Under FSDP2, free gathered parameters between forward and backward. Default: the faster that fits."""
    param_dtype: str | None = None
    """Under FSDP2 and bf16, bfloat16 gathers parameters in half the bytes, which rounds more than autocast
    does."""
    offload_parameters: bool = False
    """Under FSDP2, keep each rank's shards of parameters, gradients and optimizer state in host memory, and
    update them there."""

    @classmethod
    def of(cls, **given: Any) -> Self:
        """The options as text, as the command line and a plan's file have them.

        Args:
            **given: By the names of the fields, as `brimful.plan` takes them: sizes also as numbers of bytes,
                precisions also as dtypes and in lists, `recompute` also as an `Action` or None.

        Returns:
            The record.
        """
        for name in ("budget", "host_memory"):
            given[name] = _size_text(given[name])
        given["precision"] = _names_text(given["precision"])
        recompute = given["recompute"]
        is_named = recompute is not None and not isinstance(recompute, Action)
        given["recompute"] = recompute if is_named else _RECOMPUTE_TEXT.get(recompute, str(recompute))
        given["parallelism"] = str(given["parallelism"])
        if given["optimizer_implementation"] is not None:
            given["optimizer_implementation"] = str(given["optimizer_implementation"])
        others = given["allow_optimizers"]
        given["allow_optimizers"] = (others,) if isinstance(others, str) else tuple(others)
        return cls(**given)


_RECOMPUTE_TEXT: dict[str | None, str] = {None: "auto", Action.RECOMPUTE: "all", Action.KEEP: "none"}


def _size_text(size: str | float | None) -> str | None:
    return size if size is None or isinstance(size, str) else f"{parse_bytes(size)}B"


def _names_text(precision: object) -> str:
    several = precision if isinstance(precision, Sequence) and not isinstance(precision, str) else [precision]
    return ",".join(str(each).removeprefix("torch.") for each in several)


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
