"""Actions for one part of a model: a unit, or the layer that computes the logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from brimful.arguments import check_fields, checks_call
from brimful.codec import JsonForm, PositiveInt, json_form, omit_defaults
from brimful.errors import UsageError
from brimful.settings.choices import Action

_WITH_INPUT_OPS = "+"


def with_input_ops(unit: str) -> str:
    """The unit together with the ops right before it that make its input, written "+up.3".

    Such ops are concatenations with a skip connection and changes of resolution. If the unit is recomputed,
    they run again with it, so that their result is not held.
    """
    return _WITH_INPUT_OPS + module_part(unit)


def has_input_ops(unit: str) -> bool:
    """Whether the ops that make its input belong to a unit."""
    return unit.startswith(_WITH_INPUT_OPS)


def module_part(unit: str) -> str:
    """The module or the run of a unit, without the ops that make its input."""
    return unit.removeprefix(_WITH_INPUT_OPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A run of consecutive children of a plain `Sequential`, used as a unit where no single module can be one.

    It is written `parent[first..last]`, with the names of its first and last child.
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
        parent, bracket, inside = module_part(fqn).partition("[")
        first, dots, last = inside.rstrip("]").partition("..")
        return cls(parent=parent, first=first, last=last) if bracket and dots else None


def op_kind(name: str) -> str:
    """The name in `UnitAction.saved` of an op that is given with its overload: "addmm" of "aten.addmm.default".

    An op of a library other than aten has its name too, "torchvision.nms". All fused attention kernels, of
    which the device chooses one, are "attention".
    """
    library, _, rest = name.partition(".")
    kind = rest.partition(".")[0]
    if kind.startswith("_scaled_dot_product_") and not kind.endswith("_backward"):
        return "attention"
    return kind if library == "aten" else f"{library}.{kind}"


_MOST_DIGITS = 9
"""Digits in the number of an op within a unit's forward; Python refuses to convert thousands. A choice."""


@json_form(JsonForm(omitted=omit_defaults("saved", "most_offloaded_bytes")))
@checks_call
@dataclass(frozen=True, slots=True, kw_only=True)
class UnitAction:
    """The action for one unit of a model."""

    fqn: str
    """Dotted path of the unit's module, or a `Span`; with "+" before it, see `with_input_ops`."""
    action: Action
    saved: tuple[str, ...] = ()
    """Ops whose results are saved, by kind and number within the unit's forward: "addmm#2" is the third addmm.
    Ops that the forward does not have are ignored."""
    most_offloaded_bytes: PositiveInt | None = None
    """For an offloaded unit: the most bytes to offload per call, largest storages first. None offloads all."""

    def __post_init__(self) -> None:
        check_fields(self)
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


@checks_call
@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLoss:
    """A cross-entropy over many classes, computed for one chunk of the tokens at a time.

    The logits of all tokens are never in memory together; those of each chunk are computed twice, in forward
    and in backward.
    """

    layer: str
    """Dotted path of the `nn.Linear` that computes the logits."""
    chunks: PositiveInt
    """Number of chunks that the tokens of a micro-batch are divided into, at least 2."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.chunks < 2:
            raise UsageError(f"the loss is to be computed in {self.chunks} chunks; it takes at least 2.")
