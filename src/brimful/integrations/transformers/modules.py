"""What a trainer trains, and a stand-in for a trainer that computes its loss and changes nothing of it.

A loss module of sentence-transformers holds the model and may have parameters of its own. So the job's model
has both, in which copies stay connected. And `compute_loss` reads the trainer's model, loss module and metrics
from the trainer itself, so a capture calls it on a copy of the trainer that has the captured ones.

Checked with transformers 5.23, trl 1.16 and sentence-transformers 6.2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import Trainer

_DATASETS = ("train_dataset", "eval_dataset")
_CONTAINERS = (dict, list, set, deque)


class ModelAndLosses(nn.Module):
    """A model and the loss modules, by name, that a trainer computes with it; they may hold the model."""

    def __init__(self, model: nn.Module, losses: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.model = model
        self.losses = nn.ModuleDict(losses)


def trained_module(trainer: Trainer, model: nn.Module | None = None) -> nn.Module:
    """The module whose parameters a trainer trains: its model, or `model` in place of that.

    It is a `ModelAndLosses` if the trainer has loss modules in `trainer.loss` that hold the model or have
    parameters.
    """
    model = trainer.model if model is None else model
    losses = _losses(trainer)
    matters = any(any(True for _ in (*each.parameters(), *each.buffers())) for each in losses.values())
    return ModelAndLosses(model, losses) if matters else model


def model_of(module: nn.Module) -> nn.Module:
    """The model in a `trained_module`."""
    return module.model if isinstance(module, ModelAndLosses) else module


class TrainerState:
    """The numbers and containers of a trainer, such as the metrics that `compute_loss` collects in it.

    Datasets are not kept.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._kept = {
            name: _copied(value, with_tensors=True)
            for name, value in vars(trainer).items()
            if name not in _DATASETS and _is_state(value)
        }

    def copies(self) -> dict[str, Any]:
        """The kept attributes by name, in containers of their own."""
        return {name: _copied(value) for name, value in self._kept.items()}

    def restore(self) -> None:
        """Set the trainer's attributes to what they were."""
        own = vars(self._trainer)
        for name, value in self._kept.items():
            now, copy = own.get(name), _copied(value, with_tensors=True)
            if isinstance(now, dict) and isinstance(copy, dict):
                now.clear()
                now.update(copy)
            else:
                own[name] = copy


class StandIns:
    """Makes stand-ins for a trainer, whose computations do not change it."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._state = TrainerState(trainer)

    def with_module(self, module: nn.Module) -> Trainer:
        """A stand-in for the trainer with another copy of the `trained_module`.

        It has metrics, counters and an accelerator of its own.
        """
        trainer = self._trainer
        own: Trainer = object.__new__(type(trainer))
        vars(own).update(vars(trainer))
        vars(own).update(self._state.copies())
        own.model = model_of(module)
        if isinstance(module, ModelAndLosses):
            losses: Any = dict(module.losses.items())
            own.loss = losses if isinstance(trainer.loss, dict) else losses["loss"]
        own.accelerator = _OfOneRank(trainer.accelerator)
        return own


class _OfOneRank:
    """An accelerator that gathers nothing: a capture has the tensors of one rank."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def gather(self, tensor: Any) -> Any:
        return tensor

    def gather_for_metrics(self, tensor: Any, *_args: Any, **_kwargs: Any) -> Any:
        return tensor

    def reduce(self, tensor: Any, *_args: Any, **_kwargs: Any) -> Any:
        return tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


def _losses(trainer: Trainer) -> dict[str, nn.Module]:
    losses = getattr(trainer, "loss", None)
    found: dict[str, Any] = losses if isinstance(losses, dict) else {"loss": losses}
    return dict(found) if all(isinstance(each, nn.Module) for each in found.values()) else {}


def _is_state(value: Any) -> bool:
    return isinstance(value, _CONTAINERS) or (isinstance(value, int | float) and not isinstance(value, bool))


def _copied(value: Any, *, with_tensors: bool = False) -> Any:
    """A copy of nested containers; what they hold stays the same, except numbers in tensors if asked for."""
    if isinstance(value, dict | list | deque):
        copy = value.copy()  # of a defaultdict, with its factory
        for key in copy if isinstance(copy, dict) else range(len(copy)):
            copy[key] = _copied(copy[key], with_tensors=with_tensors)
        return copy
    if isinstance(value, set):
        return value.copy()
    is_number = isinstance(value, Tensor) and value.dim() == 0
    return value.detach().clone() if with_tensors and is_number else value
