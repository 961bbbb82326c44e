"""Temporary memory of gloo in a collective of CPU ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from brimful.capture.corrections.rule import Rule

_GATHERS = "c10d::_allgather_base_"
_REDUCES = "c10d::_reduce_scatter_base_"


class GlooTemporaries(Rule):
    """Add the flat copies that gloo works on: of what is gathered, and of what is to be reduced."""

    name = "gloo_temporaries"
    source = (
        "ProcessGroupGloo.cpp, AsyncAllgatherWork (newLikeFlat of the outputs) and reduce_scatter (an "
        "all-reduce on a clone of the input); torch 2.13, seen by the profiler"
    )
    device_kinds = ("cpu",)

    def applies(self) -> bool:
        """Whether FSDP2 divides the model among CPUs."""
        return super().applies() and self.settings.divides_model

    def watches_op(self, func: Any) -> bool:
        """Whether an op is one of the two collectives of FSDP2."""
        return func._schema.name in (_GATHERS, _REDUCES)

    def after_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> None:
        """Add a copy of the larger of the first two arguments, (output, input, …) in both collectives."""
        self.add(max(tensor.nbytes for tensor in args[:2]), f"gloo's copy in {func._schema.name}")
