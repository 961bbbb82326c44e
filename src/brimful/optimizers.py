"""Optimizers by name, each with its usual defaults.

| name | class in `torch.optim` | learning rate | other defaults | state, float32 parameters |
|---|---|---|---|---|
| `adamw` | `AdamW` | 1e-3 | betas (0.9, 0.999), eps 1e-8, weight decay 0.01 | 8 bytes a parameter |
| `adam` | `Adam` | 1e-3 | betas (0.9, 0.999), eps 1e-8 | 8 bytes a parameter |
| `sgd` | `SGD` | 1e-3 | momentum 0.9 | 4 bytes a parameter |
| `rmsprop` | `RMSprop` | 1e-2 | alpha 0.99, eps 1e-8 | 4 bytes a parameter |
| `adagrad` | `Adagrad` | 1e-2 | eps 1e-10 | 4 bytes a parameter |
| `adafactor` | `Adafactor` | 1e-2 | beta2 decay -0.8, d 1.0 | 4 bytes a row and a column of a matrix |
| `muon` | `Muon` | 1e-3 | momentum 0.95, weight decay 0.1; matrices only | 4 bytes a parameter |

They are torch's own defaults (checked: torch 2.13), but for SGD's momentum, which torch leaves at 0 and
nobody trains without. AdamW, Adam, RMSprop, Adagrad and Adafactor also keep a 4-byte step count per
tensor. Adafactor's vectors are not factored and take 4 bytes a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from brimful.errors import UnknownNameError, UsageError
from brimful.job import Job


def optimizer_names() -> tuple[str, ...]:
    """The names that `make_optimizer` and a job's `optimizer` take."""
    return tuple(_MAKERS)


def make_optimizer(job: Job, parameters: Iterable[nn.Parameter], name: str | None = None) -> Optimizer:
    """The job's optimizer over those of `parameters` that require a gradient.

    Args:
        job: Whose `optimizer` makes it or names it.
        parameters: Usually `model.parameters()`.
        name: A name that takes the place of the job's own optimizer.

    Returns:
        A new optimizer without state.

    Raises:
        UnknownNameError: No optimizer has the name.
        UsageError: No parameter requires a gradient, or the named optimizer cannot take the parameters.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if not trainable:
        raise UsageError(f"{job.name}: no parameter requires a gradient, so there is nothing to optimize.")
    chosen = job.optimizer if name is None else name
    if callable(chosen):
        return chosen(trainable)
    if not isinstance(chosen, str):
        raise UsageError(
            f"{job.name}: optimizer is a {type(chosen).__name__}. Give a name, or a function that makes one: "
            "Job(optimizer=lambda params: torch.optim.AdamW(params))."
        )
    if chosen not in _MAKERS:
        raise UnknownNameError(
            "optimizer", chosen, _MAKERS, hint="Any other can be given as Job(optimizer=lambda params: …)."
        )
    return _MAKERS[chosen](trainable)


def _make_sgd(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, momentum=0.9)


def _make_muon(parameters: list[nn.Parameter]) -> Optimizer:
    others = [parameter for parameter in parameters if parameter.ndim != 2]
    if others:
        raise UsageError(
            f"muon takes matrices only; {len(others)} of {len(parameters)} trainable parameters are none "
            f"(the first has shape {tuple(others[0].shape)}). Choose adamw, or freeze those parameters."
        )
    return torch.optim.Muon(parameters)


_MAKERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": _make_sgd,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adafactor": torch.optim.Adafactor,
    "muon": _make_muon,
}
