"""Optimizers by name, each with its usual defaults.

| name | class in `torch.optim` | learning rate | other defaults | state, float32 parameters |
|---|---|---|---|---|
| `adamw` | `AdamW` | 1e-3 | betas (0.9, 0.999), eps 1e-8, weight decay 0.01 | 8 bytes a parameter |
| `adam` | `Adam` | 1e-3 | betas (0.9, 0.999), eps 1e-8 | 8 bytes a parameter |
| `sgd` | `SGD` | 1e-3 | momentum 0.9 | 4 bytes a parameter |
| `rmsprop` | `RMSprop` | 1e-2 | alpha 0.99, eps 1e-8 | 4 bytes a parameter |
| `adagrad` | `Adagrad` | 1e-2 | eps 1e-10 | 4 bytes a parameter |
| `adafactor` | `Adafactor` | 1e-2 | beta2 decay -0.8, d 1.0 | 4 bytes a row and a column of a matrix |
| `adamw8bit` | `AdamW8bit` of bitsandbytes | 1e-3 | as `adamw` | 2.03 bytes a parameter |
| `muon` | `Muon` below | 1e-3 | momentum 0.95, weight decay 0.1; else `adamw` | 4 bytes, where AdamW 8 |

They are torch's own defaults (checked: torch 2.13), but for SGD's momentum, which torch leaves at 0 and
nobody trains without. AdamW, Adam, RMSprop, Adagrad and Adafactor also keep a 4-byte step count per
tensor. Adafactor's vectors are not factored and take 4 bytes a parameter. AdamW8bit keeps tensors of fewer
than 4096 parameters in float32, and two tables of 1 KiB (checked: bitsandbytes 0.50, which is an extra:
`brimful[bitsandbytes]`).

Muon is for hidden matrices, so `muon` is torch's Muon on those and torch's AdamW on the rest: embeddings, the
model's last linear layer, biases, norms, convolutions. Muon's learning rate is adjusted as Moonshot's ("Muon is
Scalable for LLM Training", arXiv:2502.16982), so that one serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from brimful.errors import UnknownNameError, UsageError
from brimful.job import Job
from brimful.settings import OptimizerImplementation, Settings

ZERO_OPTIMIZERS = ("adamw", "adam", "sgd", "rmsprop")
"""Those that compute each number from its own gradient and state alone, so that flat parts of all parameters
can be stepped together. Adagrad is one, but DeepSpeed 0.19 makes another of it, with one parameter group."""

_Maker = Callable[[list[nn.Parameter], nn.Module | None], Optimizer]
"""Makes an optimizer of the parameters of a model, which may not be known."""


def optimizer_names() -> tuple[str, ...]:
    """The names that `make_optimizer` and a job's `optimizer` take."""
    return tuple(_MAKERS)


class Muon(Optimizer):
    """Muon on hidden matrices and AdamW on all else, as one optimizer.

    Its groups and its state are those of torch's two; a group's "algorithm" says whose it is.

    Args:
        matrices: Updated by Muon.
        others: Updated by AdamW; may be none.
    """

    def __init__(self, matrices: list[nn.Parameter], others: list[nn.Parameter]) -> None:
        muon = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw")
        self._inner: dict[str, Optimizer] = {"muon": muon}
        if others:
            self._inner["adamw"] = torch.optim.AdamW(others)
        groups = [
            group | {"algorithm": name} for name, inner in self._inner.items() for group in inner.param_groups
        ]
        super().__init__(groups, {"lr": muon.defaults["lr"], "weight_decay": muon.defaults["weight_decay"]})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both.

        Args:
            closure: Computes the loss anew, with gradients.

        Returns:
            What it returned; None without.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for name, inner in self._inner.items():  # loading a state replaces groups and state
            inner.param_groups = [group for group in self.param_groups if group["algorithm"] == name]
            inner.state = self.state
            inner.step()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return state | {"_inner": self._inner}


@dataclass(frozen=True, slots=True)
class NamedOptimizer:
    """Makes an optimizer by name with options of one's own; see `named_optimizer`."""

    name: str
    learning_rate: float | None = None
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        if self.name not in _MAKERS:
            raise UnknownNameError("optimizer", self.name, _MAKERS)
        for what, value in (("learning_rate", self.learning_rate), ("weight_decay", self.weight_decay)):
            if value is not None and not value >= 0:
                raise UsageError(f"{what} is {value}; it must be at least 0.")

    def __call__(self, parameters: Iterable[nn.Parameter] | nn.Module) -> Optimizer:
        """The optimizer.

        Args:
            parameters: Those to update, or the model that has them, which tells `muon` what is hidden.

        Returns:
            A new one without state.
        """
        model = parameters if isinstance(parameters, nn.Module) else None
        given = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
        optimizer = _MAKERS[self.name]([p for p in given if p.requires_grad or model is None], model)
        if self.learning_rate is not None:
            _set_default(optimizer, "lr", self.learning_rate)
        if self.weight_decay is not None:
            _divide_by_decay(optimizer, self.name, self.weight_decay)
        return optimizer


def named_optimizer(
    name: str, *, learning_rate: float | None = None, weight_decay: float | None = None
) -> NamedOptimizer:
    """An optimizer by name with a learning rate and a weight decay of one's own, for `Job(optimizer=…)`.

    A weight decay that is given acts on matrices and larger parameters only: biases and the weights of norms,
    which have one dimension, are in a group without.

    Args:
        name: As in the table above.
        learning_rate: None leaves the usual one.
        weight_decay: None leaves the usual one, on all parameters.

    Returns:
        What makes the optimizer from parameters, or from a model.

    Raises:
        UnknownNameError: No optimizer has the name.
        UsageError: A number is negative, or the optimizer has no weight decay.
    """
    return NamedOptimizer(name, learning_rate, weight_decay)


def _divide_by_decay(optimizer: Optimizer, name: str, weight_decay: float) -> None:
    """Let the decay act on parameters of two dimensions or more; the others go to a group of their own."""
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
    """The job's optimizer over those of `parameters` that require a gradient.

    Args:
        job: Whose `optimizer` makes it or names it.
        parameters: Those of a model, or the model itself, which tells `muon` what is hidden.
        settings: May name one that takes the place of the job's own, and its implementation.

    Returns:
        A new optimizer without state.

    Raises:
        UnknownNameError: No optimizer has the name.
        UsageError: No parameter requires a gradient, or the optimizer cannot take the parameters or has no such
            implementation.
    """
    optimizer = _make(job, parameters, None if settings is None else settings.optimizer)
    if type(optimizer).__module__.startswith("torchao."):
        raise UsageError(
            f"{job.name}: the optimizer is torchao's {type(optimizer).__name__}, whose state is in tensors of "
            "its own class: what they take cannot be predicted, nor can they be copied and saved like "
            "others. Take 'adamw8bit' (of bitsandbytes) or 'adafactor', which take less than 'adamw', too."
        )
    if settings is not None and settings.optimizer_implementation is not None:
        set_implementation(optimizer, settings.optimizer_implementation)
    check_gaps(optimizer)
    return optimizer


def has_implementation(optimizer: Optimizer, implementation: OptimizerImplementation) -> bool:
    """Whether an optimizer leaves the choice open and can be carried out so.

    Args:
        optimizer: Any; one whose user chose an implementation keeps it.
        implementation: The one asked for.

    Returns:
        Whether `set_implementation` would be right.
    """
    has_choice = all(name in optimizer.defaults for name in _flags(implementation))
    is_open = all(not group.get(name) for group in optimizer.param_groups for name in ("foreach", "fused"))
    is_explicit = any(group.get("foreach") is False for group in optimizer.param_groups)
    is_right = implementation is not OptimizerImplementation.FUSED or not _with_gaps(optimizer)
    return has_choice and is_open and not is_explicit and is_right


def set_implementation(optimizer: Optimizer, implementation: OptimizerImplementation) -> None:
    """Let an optimizer go over its parameters in a certain way from now on.

    Args:
        optimizer: With or without state, which stays.
        implementation: Takes the place of what was chosen.

    Raises:
        UsageError: The optimizer has no such implementation, or it would be wrong about a parameter.
    """
    if implementation is OptimizerImplementation.FUSED:
        _refuse_gaps(optimizer)
    flags = _flags(implementation)
    missing = [name for name, value in flags.items() if value and name not in optimizer.defaults]
    if missing:
        raise UsageError(f"{type(optimizer).__name__} has no {implementation} implementation.")
    for group in (optimizer.defaults, *optimizer.param_groups):
        group.update({name: value for name, value in flags.items() if name in group})
    if implementation is OptimizerImplementation.FUSED:
        for parameter, state in optimizer.state.items():
            if isinstance(state.get("step"), Tensor):  # a fused kernel reads the step count on its device
                state["step"] = state["step"].to(parameter.device, torch.float32)


def has_gaps(tensor: Tensor) -> bool:
    """Whether there is memory between a tensor's numbers that is not its own, as in a slice of columns."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1 and stride != expected:
            return True
        expected *= size
    return False


def _with_gaps(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if has_gaps(p)]


def check_gaps(optimizer: Optimizer) -> None:
    """Check that no fused kernel is given a parameter with gaps.

    On a CPU it takes a parameter's memory for a row and updates what is between its numbers (torch 2.13).

    Args:
        optimizer: Any.

    Raises:
        UsageError: One is.
    """
    if any(group.get("fused") for group in optimizer.param_groups):
        _refuse_gaps(optimizer)


def _refuse_gaps(optimizer: Optimizer) -> None:
    for parameter in _with_gaps(optimizer):
        raise UsageError(
            f"a parameter of shape {tuple(parameter.shape)} is a part of a larger tensor, with gaps between "
            "its numbers: torch's fused kernels (on a CPU; on a GPU it was not tried) update others in its "
            "place. Make it of a copy, nn.Parameter(part.clone()), or take another optimizer_implementation."
        )


def _flags(implementation: OptimizerImplementation) -> dict[str, bool]:
    return {
        "foreach": implementation is OptimizerImplementation.FOREACH,
        "fused": implementation is OptimizerImplementation.FUSED,
    }


def _make(job: Job, parameters: Iterable[nn.Parameter] | nn.Module, name: str | None) -> Optimizer:
    model = parameters if isinstance(parameters, nn.Module) else None
    given = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    trainable = [parameter for parameter in given if parameter.requires_grad]
    if not trainable:
        raise UsageError(f"{job.name}: no parameter requires a gradient, so there is nothing to optimize.")
    chosen = job.optimizer if name is None else name
    if isinstance(chosen, NamedOptimizer) and model is not None:
        return chosen(model)
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
    return _MAKERS[chosen](trainable, model)


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
    """Weights through which a model takes tokens and answers: of embeddings and the last linear layer."""
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
        raise UsageError(
            f"the optimizer 'adamw8bit' is that of bitsandbytes, which cannot be imported: {error}. "
            "Install it: pip install 'brimful[bitsandbytes]'. Without it, 'adafactor' "
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
