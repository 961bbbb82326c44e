"""Settings in force on a model and its optimizer, for a loop that runs the steps itself."""

from __future__ import annotations

from contextlib import ExitStack

from torch import nn
from torch.optim import Optimizer

from brimful.errors import UsageError
from brimful.execution.precision import device_of
from brimful.execution.setup import set_up_allocator
from brimful.optimizers import check_gaps, kept_implementation, set_implementation
from brimful.settings import Settings
from brimful.transforms import apply_memory_format, apply_units

_OF_THE_STEP = ("offload_optimizer", "optimizer_in_backward", "prefetch_inputs", "offload_parameters")
"""Settings that the step itself carries out, not the model or the optimizer."""


class Prepared:
    """Settings in force on a model and an optimizer until `remove`; see `brimful.prepare`.

    Args:
        settings: Of a plan.
        model: The model, before or after it is wrapped.
        optimizer: An optimizer, also in the wrapper of Accelerate or Lightning; None leaves its implementation.

    Raises:
        UsageError: The settings have what only `brimful.apply` carries out.
    """

    def __init__(self, settings: Settings, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        found = [name for name in _OF_THE_STEP if getattr(settings, name)]
        if found or settings.parallelism.is_zero:
            what = " and ".join(found) or f"parallelism {settings.parallelism.value}"
            raise UsageError(
                f"{what} is carried out by the step of `bf.apply` or by `bf.fit`, not in a loop of your own. "
                "Plan without it."
            )
        self.settings = settings
        """The settings: divide each global batch into micro-batches of `settings.micro_batch_size`."""
        set_up_allocator(settings, device_of(model))
        self._changes = put_in_force(settings, model, None if optimizer is None else unwrapped(optimizer))

    def __repr__(self) -> str:
        return f"Prepared({self.settings.describe()})"

    def remove(self) -> None:
        """Restore the model and the optimizer; calling it again does nothing."""
        self._changes.close()


def put_in_force(settings: Settings, model: nn.Module, optimizer: Optimizer | None) -> ExitStack:
    """Memory format, the optimizer's implementation and unit actions; closing the stack undoes them.

    If one fails, the others are undone.
    """
    with ExitStack() as changes:
        changes.callback(apply_memory_format(model, settings, optimizer).remove)
        if optimizer is not None:
            if settings.optimizer_implementation is not None:
                changes.callback(kept_implementation(optimizer))
                set_implementation(optimizer, settings.optimizer_implementation)
            check_gaps(optimizer)
        changes.callback(apply_units(model, settings).remove)
        return changes.pop_all()


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer in the wrappers of Accelerate and Lightning."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer
