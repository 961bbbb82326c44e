"""What is done with one part of a model: a unit, or the layer that makes the logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from brimful.codec import PositiveInt
from brimful.errors import UsageError
from brimful.settings.choices import Action


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
