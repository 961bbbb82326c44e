"""How one optimizer step is carried out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

from brimful.arguments import check_fields, checks_call
from brimful.codec import ALWAYS_WRITTEN, JsonForm, PositiveInt, json_form, omit_defaults
from brimful.errors import UsageError
from brimful.settings.choices import (
    Action,
    Compile,
    MemoryFormat,
    OptimizerImplementation,
    Parallelism,
    Precision,
    check_fsdp2_alone,
)
from brimful.settings.units import ChunkedLoss, UnitAction

_RUN_AGAIN = frozenset({Action.RECOMPUTE, Action.SAVE, Action.NEST})
"""Actions that run ops a second time."""

_DONE = ("recomputed", "recomputed in part", "nested", "offloaded", "offloaded in part")
"""Descriptions of units, in the order of `Settings.describe`."""


def _done(unit: UnitAction) -> str:
    if unit.action is Action.OFFLOAD:
        return "offloaded" if unit.most_offloaded_bytes is None else "offloaded in part"
    said = {Action.RECOMPUTE: "recomputed", Action.SAVE: "recomputed in part", Action.NEST: "nested"}
    return said.get(unit.action, "kept")


_unset = omit_defaults(
    *("optimizer_in_backward", "offload_optimizer", "prefetch_inputs"),
    *("memory_format", "own_checkpointing", "offload_parameters", "compile"),
)


def _left_out(settings: Settings) -> set[str]:
    """Fields that a file lacks: those that are not set, and what is for FSDP2 under another way to train."""
    of_fsdp2 = () if settings.parallelism is Parallelism.FSDP2 else ("reshard_after_forward", "param_dtype")
    return {*_unset(settings), *of_fsdp2}


@json_form(
    JsonForm(
        order=("precision",),
        omitted=_left_out,
        keys={
            "world_size": "ranks",
            "num_nodes": "nodes",
            "optimizer_in_backward": "step_in_backward",
            "offload_optimizer": "optimizer_on_host",
            "prefetch_inputs": "copies_ahead",
            "param_dtype": "gathered_dtype",
            "offload_parameters": "cpu_offload",
        },
    )
)
@checks_call
@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How one optimizer step is carried out.

    One optimizer step trains on a global batch of `micro_batch_size × gradient_accumulation_steps × world_size`
    samples. The user chooses its size; planning chooses the factors.
    """

    micro_batch_size: PositiveInt
    """Samples in one forward and backward pass."""
    gradient_accumulation_steps: PositiveInt = field(default=1, metadata=ALWAYS_WRITTEN)
    """Micro-batches per optimizer step and rank."""
    precision: Precision = field(default=Precision.FP32, metadata=ALWAYS_WRITTEN)
    optimizer: str | None = field(default=None, metadata=ALWAYS_WRITTEN)
    """Name of an optimizer that replaces the job's own; None keeps the job's own."""
    optimizer_implementation: OptimizerImplementation | None = None
    """None keeps the optimizer's own choice, by default torch's."""
    units: tuple[UnitAction, ...] = field(default=(), metadata=ALWAYS_WRITTEN)
    """Actions by unit, in execution order; modules that are not named are kept."""
    chunked_loss: ChunkedLoss | None = None
    """None computes the loss of all tokens at once, as the job's own code does."""
    expandable_segments: bool = False
    """Let PyTorch's CUDA allocator grow its segments, which reduces fragmentation, as the environment variable
    PYTORCH_ALLOC_CONF=expandable_segments:True does."""
    world_size: PositiveInt = 1
    """Number of processes (ranks) that train one model together, each with its own device."""
    parallelism: Parallelism = Parallelism.DDP
    """How several ranks train one model; no effect with a single rank."""
    num_nodes: PositiveInt = 1
    """Number of machines, among which the ranks are divided evenly."""
    optimizer_in_backward: bool = False
    """Update each parameter in backward, as soon as its gradient is complete, so that the gradients of all
    parameters are never in memory together. An error during such a backward cannot be undone."""
    offload_optimizer: bool = False
    """Keep the optimizer state in host memory and compute the update there, for some parameters at a time,
    whose gradients are copied to the host."""
    prefetch_inputs: bool = False
    """Copy the next micro-batch of a step to the device while the current one is computed."""
    memory_format: MemoryFormat | None = None
    """Layout of 4-d and 5-d parameters, buffers and inputs; None leaves them as the model and the batch are."""
    own_checkpointing: bool = True
    """Leave the model's own activation checkpointing as it is; False turns off the switches of its modules:
    `gradient_checkpointing` of Transformers and Diffusers, `grad_checkpointing` of timm."""
    reshard_after_forward: bool = True
    """Under FSDP2, free a unit's gathered parameters after its forward and gather them again for its backward;
    False keeps them until its backward."""
    param_dtype: str | None = None
    """Under FSDP2 and bf16, "bfloat16" gathers parameters in half the bytes. The shards stay float32, and
    gradients are averaged in float32. It rounds more than autocast does: all parameters, including those of
    norms and embeddings, and the inputs of each unit. None gathers parameters in their own type."""
    offload_parameters: bool = False
    """Under FSDP2, keep each rank's shards of parameters, gradients and optimizer state in host memory and
    update them there; parameters are copied to the device to be gathered."""
    compile: Compile = Compile.NONE
    """What `torch.compile` compiles: "units", each kept unit of `units`; "model", all of it; or "none". What
    breaks the graph or does not compile runs eagerly, with a note."""

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_compile()
        self._check_gathering()
        if self.world_size % self.num_nodes:
            raise UsageError(f"{self.world_size} ranks cannot be divided evenly among {self.num_nodes} nodes.")
        self._check_optimizer_in_backward()
        if self.offload_optimizer and self.parallelism.is_zero and self.world_size > 1:
            raise UsageError(
                f"offload_optimizer is for an optimizer that brimful steps, and under {self.parallelism} "
                "DeepSpeed does. Take fsdp2, or leave it out."
            )
        for before, unit in pairwise((None, *self.units)):
            is_linked = before is not None and before.action in (Action.RECOMPUTE, Action.NEST)
            if unit is not None and unit.action is Action.NEST and not is_linked:
                linked = (
                    "there is none" if before is None else f"{before.fqn!r} has action {str(before.action)!r}"
                )
                raise UsageError(
                    f"unit {unit.fqn!r} is nested, so the unit before it must be recomputed or nested too, but "
                    f"{linked}. Recompute it instead."
                )

    def _check_gathering(self) -> None:
        check_fsdp2_alone(self, (self.parallelism,))
        if self.offload_parameters and self.offload_optimizer:
            raise UsageError(
                "offload_parameters keeps the optimizer on the host already. Do not set offload_optimizer."
            )
        if self.param_dtype is None:
            return
        if self.param_dtype != "bfloat16" or self.precision is not Precision.BF16:
            raise UsageError(
                f"parameters are to be gathered in {self.param_dtype!r} under {self.precision}; it can be "
                "'bfloat16' under bf16. Leave param_dtype out to gather them as they are."
            )

    def _check_compile(self) -> None:
        is_of_deepspeed = self.world_size > 1 and self.parallelism.is_zero
        ranks = f"one of {self.world_size} ranks under {self.parallelism}"
        reasons = {
            f"{ranks}, where DeepSpeed calls the model": is_of_deepspeed,
            f"with {len(self.offloaded)} units offloaded, whose copies are between units": self.offloaded,
        }
        if self.compile is Compile.MODEL:
            reasons |= {
                f"as a whole on {self.world_size} ranks, which is not compared yet": self.world_size > 1,
                f"as a whole with {len(self.changed)} units recomputed, which break its graph": self.changed,
                "as a whole with the loss computed in chunks, which begins inside of it": self.chunked_loss,
            }
        for reason, holds in reasons.items():
            if self.compile is not Compile.NONE and holds:
                way_out = ', or take compile="units"' if "as a whole" in reason else ""
                raise UsageError(
                    f"compile={str(self.compile)!r} does not compile a model {reason}. Leave compile "
                    f"out{way_out}."
                )

    def _check_optimizer_in_backward(self) -> None:
        reasons = {
            f"gradient_accumulation_steps is {self.gradient_accumulation_steps}, and a gradient is whole only "
            "after the last micro-batch": self.gradient_accumulation_steps > 1,
            "fp16's loss scaler has to see every gradient before any parameter changes": self.precision
            is Precision.FP16,
            f"the gradients of {self.world_size} ranks have to be averaged first": self.world_size > 1,
            "offload_optimizer updates all of them after backward": self.offload_optimizer,
        }
        for reason, holds in reasons.items():
            if self.optimizer_in_backward and holds:
                raise UsageError(
                    f"optimizer_in_backward updates each parameter as soon as its gradient is complete, but "
                    f"{reason}. "
                    "Leave optimizer_in_backward out; recomputing units spares memory, too."
                )

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step."""
        return self.rank_batch_size * self.world_size

    @property
    def rank_batch_size(self) -> int:
        """Samples per optimizer step on one rank."""
        return self.micro_batch_size * self.gradient_accumulation_steps

    @property
    def divides_model(self) -> bool:
        """Whether parameters are sharded over several ranks by FSDP2."""
        return self.world_size > 1 and self.parallelism is Parallelism.FSDP2

    @property
    def divides_state(self) -> bool:
        """Whether the optimizer state is sharded over several ranks."""
        return self.world_size > 1 and self.parallelism is not Parallelism.DDP

    @property
    def changed(self) -> tuple[str, ...]:
        """Paths of the units that are not kept."""
        return tuple(unit.fqn for unit in self.units if unit.action is not Action.KEEP)

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Paths of the units that are recomputed, wholly or in part, or nested."""
        return tuple(unit.fqn for unit in self.units if unit.action in _RUN_AGAIN)

    @property
    def offloaded(self) -> tuple[str, ...]:
        """Paths of the units whose saved tensors go to the host."""
        return tuple(unit.fqn for unit in self.units if unit.action is Action.OFFLOAD)

    @property
    def nested(self) -> tuple[str, ...]:
        """Paths of the units that are nested."""
        return tuple(unit.fqn for unit in self.units if unit.action is Action.NEST)

    def describe(self) -> str:
        """The settings in one line: "bf16, micro-batch 4 × 8, 12 of 24 units recomputed"."""
        parts = [str(self.precision), f"micro-batch {self.micro_batch_size}"]
        if self.gradient_accumulation_steps > 1:
            parts[-1] += f" × {self.gradient_accumulation_steps}"
        if self.world_size > 1:
            parts[-1] += f" on each of {self.world_size} ranks ({self.parallelism})"
            parts[-1] += f" of {self.num_nodes} nodes" if self.num_nodes > 1 else ""
        others = {
            "gathered parameters held until backward": not self.reshard_after_forward,
            f"gathered in {self.param_dtype}": self.param_dtype,
            "parts on the host": self.offload_parameters,
            f"{self.memory_format}": self.memory_format,
            f"{self.optimizer}": self.optimizer,
            f"{self.optimizer_implementation} optimizer": self.optimizer_implementation,
            f"loss in {self.chunked_loss and self.chunked_loss.chunks} chunks": self.chunked_loss,
            "expandable segments": self.expandable_segments,
            "updated in backward": self.optimizer_in_backward,
            "optimizer on the host": self.offload_optimizer,
            "micro-batches copied ahead": self.prefetch_inputs,
            "own checkpointing off": not self.own_checkpointing,
            f"{self.compile} compiled": self.compile is not Compile.NONE,
        }
        parts += [text for text, is_said in others.items() if is_said]
        if not self.changed:
            return ", ".join([*parts, "everything kept"])
        dones = [_done(unit) for unit in self.units]
        for how in _DONE:
            count = dones.count(how)
            if count == len(self.units):
                parts.append(f"all {count} units {how}")
            elif count:
                parts.append(f"{count} of {len(self.units)} units {how}")
        return ", ".join(parts)

    def with_micro_batch_size(self, micro_batch_size: int) -> Settings:
        """The same global batch with another micro-batch size.

        Args:
            micro_batch_size: Samples in one forward and backward pass.

        Returns:
            These settings with the number of accumulation steps that keeps the global batch.

        Raises:
            UsageError: `micro_batch_size` does not divide the global batch.
        """
        steps, rest = divmod(self.rank_batch_size, micro_batch_size)
        if rest:
            whose = "the global batch size" if self.world_size == 1 else "a rank's part of the global batch,"
            raise UsageError(
                f"micro_batch_size {micro_batch_size} does not divide {whose} {self.rank_batch_size}."
            )
        return replace(self, micro_batch_size=micro_batch_size, gradient_accumulation_steps=steps)
