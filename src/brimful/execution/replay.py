"""A step run again after memory ran out in it: writes that were made already are skipped.

If the step computes something from a tensor that is ahead of it, the result is wrong and tracked: an op that
would still write it to a parameter or state is refused.

Private torch API used here: `OpOverload._schema`, `Tensor._base` (checked: torch 2.11 and 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from brimful.errors import PartialUpdateError
from brimful.execution.writes import Place, is_tensor, place_of, state_tensors
from brimful.torch_utils.dispatch_mode import EagerDispatchMode
from brimful.torch_utils.op_writes import written_tensors


def replay(
    step: Callable[[], object],
    ahead: dict[Place, int],
    optimizer: Optimizer,
    parameters: Sequence[nn.Parameter],
) -> None:
    """Run a step again for some parameters with a gradient; `step` calls the optimizer's `step`.

    `ahead` says how many writes of each parameter, gradient and state were made already. Raises
    `PartialUpdateError` if the step needs a value that was overwritten.
    """
    had_state = [bool(optimizer.state.get(parameter)) for parameter in parameters]
    with _ReplayMode(ahead) as again:
        step()
    for parameter, had in zip(parameters, had_state, strict=True):
        made = not had and ahead.get(place_of(parameter))
        if made or any(map(again.is_wrong, state_tensors(optimizer, parameter))):
            raise PartialUpdateError(
                "memory ran out in the optimizer's update, which cannot be completed: state was made from a "
                "value that was overwritten since. Resume from the last checkpoint."
            )


class _ReplayMode(EagerDispatchMode):
    """Skips writes that were made already, and refuses to compute a write from what is ahead.

    `ahead` says how many writes of each parameter, gradient and state were made already.
    """

    def __init__(self, ahead: dict[Place, int]) -> None:
        super().__init__()
        self._ahead = dict(ahead)
        self._wrong = WeakTensorKeyDictionary()
        """Temporaries whose values differ from those of the first run."""

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        written = list(written_tensors(func, args, kwargs))
        were_made = [self._times_ahead(tensor) > 0 for tensor in written]
        if any(were_made):
            return self._skip(func, args, kwargs, written, were_made)
        if not any(self.is_wrong(leaf) for leaf in tree_leaves((args, dict(kwargs))) if is_tensor(leaf)):
            return func(*args, **kwargs)
        if any(place_of(tensor) in self._ahead or tensor._is_view() for tensor in written):
            self._refuse(func)
        result = func(*args, **kwargs)
        wrong = [*written, *filter(is_tensor, tree_leaves(result))]
        if not wrong:  # a number, on which the step may decide
            self._refuse(func)
        for tensor in wrong:
            self._wrong[tensor] = True
        return result

    def _skip(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        written: list[Tensor],
        were_made: list[bool],
    ) -> Any:
        if not all(were_made):
            self._refuse(func)
        for tensor in written:
            self._ahead[self._place_counted(tensor)] -= 1
        if not func._schema.returns:
            return None
        return args[0] if args else next(iter(kwargs.values()))

    def _times_ahead(self, tensor: Tensor) -> int:
        return self._ahead.get(self._place_counted(tensor), 0)

    def _place_counted(self, tensor: Tensor) -> Place:
        """Where the changes of a tensor are counted; those of a view are counted with its base."""
        place = place_of(tensor)
        whole = tensor._base
        return place if place in self._ahead or whole is None else place_of(whole)

    def is_wrong(self, tensor: Tensor) -> bool:
        """Whether a tensor's value differs from that of the first run at this point."""
        return tensor in self._wrong or self._times_ahead(tensor) > 0

    def _refuse(self, func: torch._ops.OpOverload) -> None:
        raise PartialUpdateError(
            f"memory ran out in the optimizer's update, which cannot be completed: {func} needs a value "
            "that was overwritten since. Resume from the last checkpoint."
        )
