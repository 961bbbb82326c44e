"""Check that an optimizer updates the model that is trained."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

from brimful.errors import UsageError

_MOST_SHAPES_NAMED = 3


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def check_parameters(optimizer: Optimizer, parameters: Iterable[nn.Parameter], *, job: str) -> None:
    """Raise `UsageError` unless an optimizer is a torch optimizer, and updates only parameters of the model.

    It may update some of them. Parameters that require no gradient are never updated, so they do not count.
    `job` is the job's name, for the message.
    """
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"{job}: the optimizer is of type {type(optimizer).__name__}, not a torch.optim.Optimizer. Return "
            "one: Job(optimizer=lambda parameters: torch.optim.AdamW(parameters))."
        )
    own = {id(parameter) for parameter in parameters}
    updated = [parameter for parameter in parameters_of(optimizer) if parameter.requires_grad]
    others = [parameter for parameter in updated if id(parameter) not in own]
    if updated and not others:
        return
    name = type(optimizer).__name__
    if not updated:
        found = f"{name} updates nothing: none of its parameters requires a gradient"
    elif len(others) == len(updated):
        found = f"{name} updates none of the model's parameters, but {_described(others)}"
    else:
        found = f"{name} updates {_described(others)} that the model does not have"
    raise UsageError(
        f"{job}: {found}. Build it from the parameters that Job.optimizer receives: Job(optimizer=lambda "
        f"parameters: {name}(parameters)), or for groups by name from the model or its named parameters: "
        f"lambda model: {name}(…), lambda named_parameters: {name}(…). For brimful.apply, build it from "
        "model.parameters(). To train a parameter of the loss, assign it to a module of the model."
    )


def _described(parameters: list[Tensor]) -> str:
    named = ", ".join(str(tuple(parameter.shape)) for parameter in parameters[:_MOST_SHAPES_NAMED])
    shapes = f"{named}, …" if len(parameters) > _MOST_SHAPES_NAMED else named
    return f"{len(parameters)} parameter{'s' if len(parameters) > 1 else ''} of shape {shapes}"
