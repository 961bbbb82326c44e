"""Update each parameter in backward, as soon as its gradient is complete, so that not all gradients are kept.

A gradient is complete when autograd has accumulated it over all uses of its parameter; backward does not read
the parameter after that. torch then calls a hook. The hook runs the optimizer's step for that parameter alone,
which equals the step for all at once if the optimizer updates each parameter independently, and frees its
gradient.

Such an update cannot be undone: after an error during it, some parameters are updated and others are not.

Source: torch.Tensor.register_post_accumulate_grad_hook (checked: torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from brimful.errors import PartialUpdateError, UsageError


def clipped_in_backward(max_gradient_norm: float) -> UsageError:
    """The error for clipped gradients with `optimizer_in_backward`."""
    return UsageError(
        f"max_gradient_norm is {max_gradient_norm}, and the norm of all gradients is known only after "
        "backward, when optimizer_in_backward has updated every parameter. Leave out one of the two."
    )


def steps_one_by_one(optimizer: Optimizer) -> bool:
    """Whether an optimizer is known to update each parameter only from its own gradient and state."""
    is_known = type(optimizer).step.__module__.startswith(("torch.optim", "brimful.optimizers"))
    return is_known and not isinstance(optimizer, torch.optim.LBFGS)


class UpdateInBackward:
    """An optimizer of `torch.optim`, or brimful's own, that steps in backward, parameter by parameter.

    Raises `UsageError` if the optimizer may use several parameters together.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if not steps_one_by_one(optimizer):
            name = type(optimizer).__name__
            raise UsageError(
                f"optimizer_in_backward updates one parameter at a time, and {name} may use all of them "
                "together. Use another of torch.optim, such as adamw, or optimizer_in_backward=False."
            )
        self._optimizer = optimizer
        self.before_first: Callable[[], None] = lambda: None
        """Called in each step before the first parameter changes."""
        self.around: Callable[[nn.Parameter], AbstractContextManager[object]] = lambda _parameter: nullcontext()
        """Makes a context for the update of a parameter."""
        self.updates = True
        """Whether to update parameters; False only frees their gradients, for a rehearsal."""

    def run(self, backward: Callable[[], Any]) -> Tensor:
        """Run backward and all updates; returns the 2-norm of all gradients, a scalar.

        Raises `PartialUpdateError` if a parameter got its gradient in parts, by several backwards in one.
        """
        norms: list[Tensor] = []
        done: set[int] = set()
        with ExitStack() as stack:
            for group in self._optimizer.param_groups:
                for parameter in group["params"]:
                    if not parameter.requires_grad:  # frozen: never updated
                        continue
                    hook = self._hook(group, norms, done)
                    stack.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
            backward()
        if not norms:
            return torch.zeros(())
        norm: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
        return norm

    def _hook(self, group: dict[str, Any], norms: list[Tensor], done: set[int]) -> Callable[[Tensor], None]:
        def update(parameter: Tensor) -> None:
            assert isinstance(parameter, nn.Parameter)
            assert parameter.grad is not None
            if id(parameter) in done:
                raise PartialUpdateError(
                    "a parameter got another part of its gradient after it was updated by the first: reentrant "
                    "checkpointing (use_reentrant=True) runs a backward of its own for each segment. Train "
                    "without optimizer_in_backward, or checkpoint with use_reentrant=False."
                )
            with torch.no_grad(), self.around(parameter):
                norms.append(torch.linalg.vector_norm(parameter.grad).float())
                if self.updates:
                    if not done:
                        self.before_first()
                    self._step(group, parameter)
                done.add(id(parameter))
                parameter.grad = None

        return update

    def _step(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        whole = self._optimizer.param_groups
        self._optimizer.param_groups = [group | {"params": [parameter]}]
        try:
            self._optimizer.step()
        finally:
            self._optimizer.param_groups = whole
