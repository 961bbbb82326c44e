"""Optimizers by name, or made by a job's own function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from brimful.arguments import checks_arguments
from brimful.errors import UnknownNameError, UsageError
from brimful.job import Job
from brimful.optimizers.closures import check_needs_no_closure
from brimful.optimizers.implementations import check_gaps, set_implementation
from brimful.optimizers.muon import Muon
from brimful.optimizers.ownership import check_parameters
from brimful.optimizers.predicted_8bit import AdamW8bit as PredictedAdamW8bit
from brimful.optimizers.sparse import check_dense_gradients
from brimful.settings import Settings
from brimful.torch_utils.module_names import plain_namer

ZERO_OPTIMIZERS = ("adamw", "adam", "sgd", "rmsprop")
"""Elementwise optimizers, which can step flat parts of all parameters together. Adagrad is elementwise too, but
DeepSpeed 0.19 replaces it by its own, with one parameter group."""

NOT_UNDER_FSDP2 = ("adafactor", "adamw8bit")
"""Optimizers that cannot update sharded parameters; `distributed.fsdp.check_optimizer` says why."""

_Maker = Callable[[list[nn.Parameter], nn.Module | None], Optimizer]
"""Makes an optimizer from parameters, and their model if it is known."""


def optimizer_names() -> tuple[str, ...]:
    """The names that `make_optimizer` and `Job.optimizer` accept."""
    return tuple(_MAKERS)


@dataclass(frozen=True, slots=True)
class NamedOptimizer:
    """Makes an optimizer by name with custom options; see `named_optimizer`."""

    name: str
    learning_rate: float | None = None
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        if self.name not in _MAKERS:
            raise _unknown(self.name)
        for what, value in (("learning_rate", self.learning_rate), ("weight_decay", self.weight_decay)):
            if value is not None and not value >= 0:
                raise UsageError(f"{what} is {value}; it must be at least 0.")

    def __call__(self, parameters: Iterable[nn.Parameter] | nn.Module) -> Optimizer:
        """Make the optimizer.

        Args:
            parameters: Parameters to update, or their model, in which `muon` finds the hidden matrices.

        Returns:
            A new optimizer without state.
        """
        model = parameters if isinstance(parameters, nn.Module) else None
        given = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
        optimizer = _MAKERS[self.name]([p for p in given if p.requires_grad or model is None], model)
        if self.learning_rate is not None:
            _set_default(optimizer, "lr", self.learning_rate)
        if self.weight_decay is not None:
            _divide_by_decay(optimizer, self.name, self.weight_decay)
        return optimizer


@checks_arguments
def named_optimizer(
    name: str, *, learning_rate: float | None = None, weight_decay: float | None = None
) -> NamedOptimizer:
    """An optimizer by name with a custom learning rate and weight decay, for `Job(optimizer=…)`.

    A given weight decay applies only to parameters of two or more dimensions: biases and the weights of norms,
    which have one dimension, are in a parameter group without it.

    Args:
        name: A name in the table of `brimful.optimizers`.
        learning_rate: Learning rate; None uses the default.
        weight_decay: Weight decay; None uses the default, on all parameters.

    Returns:
        A function that makes the optimizer from parameters, or from a model.

    Raises:
        UnknownNameError: No optimizer has the name.
        UsageError: A number is negative, or the optimizer has no weight decay.
    """
    return NamedOptimizer(name, learning_rate, weight_decay)


def _divide_by_decay(optimizer: Optimizer, name: str, weight_decay: float) -> None:
    """Apply the decay to parameters of two or more dimensions; move the others to a separate group."""
    if "weight_decay" not in optimizer.defaults:
        raise UsageError(
            f"the optimizer {name!r} has no weight decay. Choose adamw, or leave weight_decay out."
        )
    _set_default(optimizer, "weight_decay", weight_decay)
    for group in tuple(optimizer.param_groups):
        vectors = [parameter for parameter in group["params"] if parameter.ndim < 2]
        group["params"] = [parameter for parameter in group["params"] if parameter.ndim >= 2]
        if vectors:
            options = {key: value for key, value in group.items() if key != "params"}
            optimizer.add_param_group(options | {"params": vectors, "weight_decay": 0.0})
    optimizer.param_groups[:] = [each for each in optimizer.param_groups if each["params"]]


def _set_default(optimizer: Optimizer, option: str, value: float) -> None:
    for group in (optimizer.defaults, *optimizer.param_groups):
        group[option] = value


def make_optimizer(
    job: Job, parameters: Iterable[nn.Parameter] | nn.Module, settings: Settings | None = None
) -> Optimizer:
    """Make the job's optimizer over those of `parameters` that require a gradient.

    Args:
        job: The job, whose `optimizer` makes it or names it.
        parameters: Parameters of a model, or the model itself, in which `muon` finds the hidden matrices.
        settings: May name an optimizer that replaces the job's own, and its implementation.

    Returns:
        A new optimizer without state.

    Raises:
        UnknownNameError: No optimizer has the name.
        UsageError: No parameter requires a gradient, or the optimizer updates others, cannot take these or has
            no such implementation, needs a closure or sparse gradients.
    """
    model = parameters if isinstance(parameters, nn.Module) else None
    given = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
    optimizer = _make(job, given, model, None if settings is None else settings.optimizer)
    check_parameters(optimizer, given, job=job.name)
    check_needs_no_closure(optimizer, job=job.name)
    check_dense_gradients(optimizer, model)
    if type(optimizer).__module__.startswith("torchao."):
        raise UsageError(
            f"{job.name}: the optimizer is torchao's {type(optimizer).__name__}, whose state is in tensors of "
            "its own class: what they take cannot be predicted, nor can they be copied and saved like "
            "others. Take 'adamw8bit' (of bitsandbytes)."
        )
    if settings is not None and settings.optimizer_implementation is not None:
        set_implementation(optimizer, settings.optimizer_implementation)
    check_gaps(optimizer)
    return optimizer


def _make(job: Job, parameters: list[nn.Parameter], model: nn.Module | None, name: str | None) -> Optimizer:
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if not trainable:
        raise UsageError(f"{job.name}: no parameter requires a gradient, so there is nothing to optimize.")
    chosen = job.optimizer if name is None else name
    if isinstance(chosen, NamedOptimizer) and model is not None:
        return chosen(model)
    if callable(chosen):
        return _make_own(chosen, trainable, model)
    if chosen not in _MAKERS:
        raise _unknown(chosen)
    return _MAKERS[chosen](trainable, model)


def _unknown(name: str) -> UnknownNameError:
    hint = "Any other can be given as Job(optimizer=lambda params: …)."
    if (known := _NAMES_OF_TRAINERS.get(name)) is not None:
        hint = f"Transformers' {name} is {known} here."
    elif name.startswith(_TRAINERS_OWN):
        hint = (
            f"Transformers' {name} is read from a Trainer: brimful.integrations.transformers.plan(trainer), or "
            "brimful run --budget. Elsewhere give it as Job(optimizer=lambda params: …)."
        )
    return UnknownNameError("optimizer", name, _MAKERS, hint=hint)


_NAMES_OF_TRAINERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw with the implementation fused",
    "adamw_apex_fused": "adamw with the implementation fused",
    "adamw_bnb_8bit": "adamw8bit",
    "adamw_8bit": "adamw8bit",
}
"""Values of `TrainingArguments.optim` (transformers 5.23: training_args.py; with apex, 4.x); their names here.

Its sgd has no momentum and its adafactor is Transformers' own class; these names mean torch's here.
"""
_TRAINERS_OWN = (
    *("paged_", "lion", "ademamix", "galore", "apollo", "lomo", "adalomo", "grokadamw", "schedule_free"),
    *("adamw_torch_", "adamw_anyprecision", "rmsprop_bnb", "stable_adamw"),
)
"""Beginnings of others of them."""


def _make_own(
    make: Callable[[Any], Optimizer], parameters: list[nn.Parameter], model: nn.Module | None
) -> Optimizer:
    """Call a job's function; the name of its first argument decides what it receives."""
    wanted = _first_argument(make)
    if wanted not in ("model", "named_parameters"):
        return make(parameters)
    if model is None:
        raise UsageError(f"the function of Job(optimizer=…) takes `{wanted}`, so it needs the model.")
    if wanted == "model":
        return make(model)
    plain_name = plain_namer(model)
    return make([(plain_name(name), p) for name, p in model.named_parameters() if p.requires_grad])


def _first_argument(make: Callable[..., Any]) -> str | None:
    try:
        return next(iter(inspect.signature(make).parameters), None)
    except (TypeError, ValueError):  # raised for a function in C without a signature
        return None


def _by_class(kind: Callable[[list[nn.Parameter]], Optimizer]) -> _Maker:
    return lambda parameters, _model: kind(parameters)


def _make_sgd(parameters: list[nn.Parameter], _model: nn.Module | None) -> Optimizer:
    return torch.optim.SGD(parameters, momentum=0.9)


def _make_muon(parameters: list[nn.Parameter], model: nn.Module | None) -> Optimizer:
    outer = frozenset[int]() if model is None else frozenset(map(id, _outer_weights(model)))
    matrices = [parameter for parameter in parameters if parameter.ndim == 2 and id(parameter) not in outer]
    if not matrices:
        raise UsageError(
            f"muon updates hidden matrices, and none of the {len(parameters)} trainable parameters is one: all "
            "are of embeddings or the last linear layer, or no matrices. Choose adamw."
        )
    hidden = frozenset(map(id, matrices))
    return Muon(matrices, [parameter for parameter in parameters if id(parameter) not in hidden])


def _outer_weights(model: nn.Module) -> Iterator[Tensor]:
    """Weights of embeddings and of the last linear layer."""
    last: nn.Linear | None = None
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            yield module.weight
        last = module if isinstance(module, nn.Linear) else last
    if last is not None:
        yield last.weight


def _make_adamw8bit(parameters: list[nn.Parameter], _model: nn.Module | None) -> Optimizer:
    try:
        from bitsandbytes.optim.adamw import AdamW8bit
    except ImportError as error:
        if parameters and all(isinstance(parameter, FakeTensor) for parameter in parameters):
            return PredictedAdamW8bit(parameters)
        raise UsageError(
            f"the optimizer 'adamw8bit' is that of bitsandbytes, which cannot be imported: {error}. "
            "Install it: pip install bitsandbytes. Without it, 'adafactor' "
            "takes less than 'adamw', too."
        ) from error
    optimizer: Optimizer = AdamW8bit(parameters)
    return optimizer


_MAKERS: dict[str, _Maker] = {
    "adamw": _by_class(torch.optim.AdamW),
    "adam": _by_class(torch.optim.Adam),
    "sgd": _make_sgd,
    "rmsprop": _by_class(torch.optim.RMSprop),
    "adagrad": _by_class(torch.optim.Adagrad),
    "adafactor": _by_class(torch.optim.Adafactor),
    "adamw8bit": _make_adamw8bit,
    "muon": _make_muon,
}
