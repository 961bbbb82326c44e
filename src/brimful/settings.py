"""How a job is trained: the one record that planning chooses, capture predicts and training obeys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from numbers import Integral
from typing import Any, TypeVar

from brimful.codec import ALWAYS_WRITTEN, JsonForm, PositiveInt, from_json_document, json_form
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A run of consecutive children of a plain `Sequential`: a unit where no single module is one.

    Written `parent[first..last]` with the names of its first and last child.
    """

    parent: str
    first: str
    last: str

    def __str__(self) -> str:
        return f"{self.parent}[{self.first}..{self.last}]"

    @classmethod
    def of(cls, children: Sequence[str]) -> Span:
        """The run of children of one parent, given their paths in order."""
        parent, _, first = children[0].rpartition(".")
        return cls(parent=parent, first=first, last=children[-1].rpartition(".")[2])

    @classmethod
    def parse(cls, fqn: str) -> Span | None:
        """The run that `fqn` names; None if it names a module."""
        parent, bracket, inside = fqn.partition("[")
        first, dots, last = inside.rstrip("]").partition("..")
        return cls(parent=parent, first=first, last=last) if bracket and dots else None


def op_kind(name: str) -> str:
    """By what an op is called in `UnitAction.saved`.

    Args:
        name: Of an op with its overload, such as "aten.addmm.default".

    Returns:
        Its name alone, "addmm"; of another library with that, "torchvision.nms"; "attention" for all kernels
        of fused attention, of which the device chooses one.
    """
    library, _, rest = name.partition(".")
    kind = rest.partition(".")[0]
    if kind.startswith("_scaled_dot_product_") and not kind.endswith("_backward"):
        return "attention"
    return kind if library == "aten" else f"{library}.{kind}"


_MOST_DIGITS = 9
"""Of the number of an op within a unit's forward; Python refuses to convert thousands. A choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitAction:
    """The action for one unit."""

    fqn: str
    """Dotted path of the unit's module, or a `Span`."""
    action: Action
    saved: tuple[str, ...] = ()
    """Ops whose results are saved, by kind and number within the unit's forward: "addmm#2" is the third addmm.
    One that the forward does not have is no error: there is nothing of it to save."""
    most_offloaded_bytes: PositiveInt | None = None
    """Of an offloaded unit: what leaves at most of each call, the largest storages first. None: all."""

    def __post_init__(self) -> None:
        if bool(self.saved) != (self.action is Action.SAVE):
            raise UsageError(
                f"unit {self.fqn!r} has action {str(self.action)!r} and {len(self.saved)} saved ops; "
                "'save' names at least one, every other action none."
            )
        limit = self.most_offloaded_bytes
        if limit is not None and (self.action is not Action.OFFLOAD or limit < 1):
            raise UsageError(
                f"unit {self.fqn!r} has action {str(self.action)!r} and most_offloaded_bytes={limit}; "
                "'offload' may have a positive number of bytes, every other action none."
            )
        for name in self.saved:
            kind, _, number = name.partition("#")
            if not (kind and number.isdecimal() and len(number) <= _MOST_DIGITS):
                raise UsageError(
                    f"unit {self.fqn!r}: {name!r} names no op; write its kind and number, addmm#2."
                )


_RUN_AGAIN = frozenset({Action.RECOMPUTE, Action.SAVE, Action.NEST})
"""Actions of which something runs a second time."""

_DONE = ("recomputed", "recomputed in part", "nested", "offloaded", "offloaded in part")
"""What is said of units."""


def _done(unit: UnitAction) -> str:
    if unit.action is Action.OFFLOAD:
        return "offloaded" if unit.most_offloaded_bytes is None else "offloaded in part"
    said = {Action.RECOMPUTE: "recomputed", Action.SAVE: "recomputed in part", Action.NEST: "nested"}
    return said.get(unit.action, "kept")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLoss:
    """A cross-entropy over many classes that is computed a part of the tokens at a time.

    So there are never logits of all tokens; those of each chunk are computed twice, in forward and backward.
    """

    layer: str
    """Dotted path of the `nn.Linear` that makes the logits."""
    chunks: PositiveInt
    """Into how many parts the tokens of a micro-batch are divided, at least 2."""

    def __post_init__(self) -> None:
        if self.chunks < 2:
            raise UsageError(f"the loss is to be computed in {self.chunks} chunks; it takes at least 2.")


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


def _member(kind: type[_Kind], name: str, value: str) -> _Kind:
    """The member of an enumeration that a value names, as "bf16" and `torch.bfloat16` name a precision."""
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(kind)
        raise UsageError(f"{name} is {value!r}; it must be one of {known}.") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How one optimizer step is carried out.

    `micro_batch_size × gradient_accumulation_steps` samples of each of the data-parallel ranks make one
    optimizer step. Their product, the global batch, is the user's.
    """

    micro_batch_size: PositiveInt
    """Samples in one forward and backward pass."""
    gradient_accumulation_steps: PositiveInt = field(default=1, metadata=ALWAYS_WRITTEN)
    """Forward and backward passes per optimizer step."""
    precision: Precision = field(default=Precision.FP32, metadata=ALWAYS_WRITTEN)
    optimizer: str | None = field(default=None, metadata=ALWAYS_WRITTEN)
    """Name of the optimizer that replaces the job's own; None keeps the job's own."""
    optimizer_implementation: OptimizerImplementation | None = None
    """None leaves it to the optimizer, and so to torch."""
    units: tuple[UnitAction, ...] = field(default=(), metadata=ALWAYS_WRITTEN)
    """Actions by unit, in execution order; a module that is not named is kept."""
    chunked_loss: ChunkedLoss | None = None
    """None computes the loss of all tokens at once, as the job does."""
    expandable_segments: bool = False
    """Let PyTorch's CUDA allocator grow its segments, which leaves less memory unused between tensors; as the
    environment variable PYTORCH_ALLOC_CONF=expandable_segments:True does."""
    optimizer_in_backward: bool = False
    """Update each parameter in backward, as soon as its gradient is complete, so that the gradients of all are
    never there together. An error in the midst of it cannot be taken back."""
    prefetch_inputs: bool = False
    """Copy the next micro-batch of a step to the device while one is computed."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in the host's memory and compute the update there, for some parameters at a
    time, whose gradients go there."""
    own_checkpointing: bool = True
    """Leave the model's own activation checkpointing as it is; False turns off the switches of its modules:
    `gradient_checkpointing` of Transformers and Diffusers, `grad_checkpointing` of timm."""
    world_size: PositiveInt = 1
    """Processes, each with a device of its own, that train one model together."""
    parallelism: Parallelism = Parallelism.DDP
    """How; nothing to a single one."""
    num_nodes: PositiveInt = 1
    """Machines among which the ranks are divided evenly."""
    reshard_after_forward: bool = True
    """Under FSDP2, let go of a unit's gathered parameters after its forward, and gather them again for its
    backward; else they are held from the one to the other."""
    param_dtype: str | None = None
    """Under FSDP2 and bf16: "bfloat16" gathers parameters in half the bytes. They stay float32 where they are
    divided, and gradients are averaged in float32. It is not quite what autocast computes: every parameter is
    rounded, those of norms and embeddings too, and so is what comes into a unit. None gathers what there is."""
    offload_parameters: bool = False
    """Under FSDP2, keep a rank's parts of parameters, gradients and optimizer state in the host's memory, and
    update them there; parameters go to the device to be gathered."""

    def __post_init__(self) -> None:
        for name, kind in (("precision", Precision), ("parallelism", Parallelism)):
            object.__setattr__(self, name, _member(kind, name, getattr(self, name)))
        if self.optimizer_implementation is not None:
            way = _member(OptimizerImplementation, "optimizer_implementation", self.optimizer_implementation)
            object.__setattr__(self, "optimizer_implementation", way)
        check_counts(self, "micro_batch_size", "gradient_accumulation_steps", "world_size", "num_nodes")
        self._check_gathering()
        for name in ("micro_batch_size", "gradient_accumulation_steps", "world_size", "num_nodes"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least 1.")
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
        for name, plain in (
            ("reshard_after_forward", True),
            ("param_dtype", None),
            ("offload_parameters", False),
        ):
            if getattr(self, name) != plain and self.parallelism is not Parallelism.FSDP2:
                raise UsageError(
                    f"{name}={getattr(self, name)!r} is for FSDP2, and the parallelism is "
                    f"{str(self.parallelism)!r}, under which nothing is gathered. Leave it out, or take fsdp2."
                )
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
        """Samples per optimizer step of one rank."""
        return self.micro_batch_size * self.gradient_accumulation_steps

    @property
    def divides_model(self) -> bool:
        """Whether each of several ranks holds a part of every parameter as torch divides it."""
        return self.world_size > 1 and self.parallelism is Parallelism.FSDP2

    @property
    def divides_state(self) -> bool:
        """Whether each of several ranks holds a part of the optimizer's state."""
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
        """The settings in a line: "bf16, micro-batch 4 × 8, 12 of 24 units recomputed"."""
        parts = [str(self.precision), f"micro-batch {self.micro_batch_size}"]
        if self.gradient_accumulation_steps > 1:
            parts[-1] += f" × {self.gradient_accumulation_steps}"
        if self.world_size > 1:
            parts[-1] += f" on each of {self.world_size} ranks ({self.parallelism})"
            parts[-1] += f" of {self.num_nodes} nodes" if self.num_nodes > 1 else ""
        if not self.reshard_after_forward:
            parts.append("gathered parameters held until backward")
        if self.param_dtype:
            parts.append(f"gathered in {self.param_dtype}")
        if self.offload_parameters:
            parts.append("parts on the host")
        if self.optimizer:
            parts.append(self.optimizer)
        if self.optimizer_implementation:
            parts.append(f"{self.optimizer_implementation} optimizer")
        if self.chunked_loss:
            parts.append(f"loss in {self.chunked_loss.chunks} chunks")
        if self.expandable_segments:
            parts.append("expandable segments")
        if self.optimizer_in_backward:
            parts.append("updated in backward")
        if self.offload_optimizer:
            parts.append("optimizer on the host")
        if self.prefetch_inputs:
            parts.append("micro-batches copied ahead")
        if not self.own_checkpointing:
            parts.append("own checkpointing off")
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
        """The same global batch in other micro-batches.

        Args:
            micro_batch_size: Samples in one forward and backward pass.

        Returns:
            These settings with as many accumulation steps as that takes.

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


_JSON_KEYS = {
    "world_size": "ranks",
    "num_nodes": "nodes",
    "optimizer_in_backward": "step_in_backward",
    "offload_optimizer": "optimizer_on_host",
    "prefetch_inputs": "copies_ahead",
    "param_dtype": "gathered_dtype",
    "offload_parameters": "cpu_offload",
}
"""Fields whose key in JSON is another: files and scripts use the keys."""


def settings_to_json(settings: Settings) -> dict[str, Any]:
    """Settings as a JSON object; options of FSDP2 only under FSDP2, and some others only where they are set."""
    document: dict[str, Any] = {
        "precision": str(settings.precision),
        "micro_batch_size": settings.micro_batch_size,
        "gradient_accumulation_steps": settings.gradient_accumulation_steps,
        "optimizer": settings.optimizer,
        "optimizer_implementation": settings.optimizer_implementation
        and str(settings.optimizer_implementation),
        "units": [_unit_to_json(unit) for unit in settings.units],
        "chunked_loss": settings.chunked_loss and asdict(settings.chunked_loss),
        "expandable_segments": settings.expandable_segments,
        "world_size": settings.world_size,
        "parallelism": str(settings.parallelism),
        "num_nodes": settings.num_nodes,
    }
    for name in ("optimizer_in_backward", "offload_optimizer", "prefetch_inputs"):
        if getattr(settings, name):
            document[name] = True
    if not settings.own_checkpointing:
        document["own_checkpointing"] = False
    if settings.parallelism is Parallelism.FSDP2:
        document["reshard_after_forward"] = settings.reshard_after_forward
        document["param_dtype"] = settings.param_dtype
        if settings.offload_parameters:
            document["offload_parameters"] = True
    return {_JSON_KEYS.get(name, name): value for name, value in document.items()}


def _unit_to_json(unit: UnitAction) -> dict[str, Any]:
    document: dict[str, Any] = {"fqn": unit.fqn, "action": str(unit.action)}
    if unit.saved:
        document["saved"] = list(unit.saved)
    if unit.most_offloaded_bytes is not None:
        document["most_offloaded_bytes"] = unit.most_offloaded_bytes
    return document


def settings_from_json(document: Any, *, where: str = "the settings") -> Settings:
    """The settings that `settings_to_json` wrote.

    Args:
        document: As read from JSON.
        where: Names them in errors.

    Returns:
        Settings equal to those written.

    Raises:
        FileFormatError: A field is unknown, missing, of another type or out of range.
    """
    return from_json_document(document, Settings, where=where)


json_form(JsonForm(write=settings_to_json, keys=_JSON_KEYS))(Settings)
