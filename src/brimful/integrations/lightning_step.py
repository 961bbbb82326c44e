"""Batches of a Lightning loader in micro-batches: the loader, its counts and what is logged stay as they are.

Private API of Lightning used here: `Closure`, whose call runs a batch, with `_backward_fn` and `_zero_grad_fn`;
`_AutomaticOptimization._make_step_fn`; `_block_parallel_sync_behavior`; `LightningModule._current_fx_name`
(checked: lightning 2.6).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.optimization.closure import OutputResult
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from torch import Tensor

from brimful.batches import BatchLayout
from brimful.errors import BatchError, UsageError
from brimful.torch_utils.replaced import replace_attribute

_HOOK = "training_step"


class DividedBatches:
    """Runs each batch of a trainer in micro-batches, whose gradients add up to those of the batch.

    The trainer is in training, its module has automatic optimization. `size` is the most samples of a
    micro-batch, `whole` the samples of a batch. `check` is called with the first batch that is divided, and
    with the next ones until it returns True.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        layout: BatchLayout,
        *,
        size: int,
        whole: int,
        check: Callable[[Any], bool] | None,
    ) -> None:
        self._trainer, self._module, self._layout = trainer, module, layout
        self._size, self._whole, self._check = size, whole, check

    def run(self, closure: Any, own: Callable[[], OutputResult], kwargs: OrderedDict[str, Any]) -> Any:
        """Run forward and backward of a batch; returns what `own` returns, Lightning's `closure.closure`.

        `kwargs` are those of the module's `training_step`. Raises `BatchError` if the batch has to be divided
        and cannot be, and `UsageError` if `training_step` takes no batch, or skips a part of one.
        """
        if self._size >= self._whole:
            return own()
        if "batch" not in kwargs:
            raise UsageError(
                "training_step takes an iterator of batches, which a plan cannot divide. Pass "
                f"micro_batch_size={self._whole} to plan()."
            )
        batch = kwargs["batch"]
        if (reason := self._layout.why_whole(batch)) is not None:
            raise BatchError(f"a batch is to be divided into micro-batches of {self._size}: {reason}")
        parts = self._layout.split(batch, self._size)
        if len(parts) == 1:
            return own()
        if self._check is not None:
            self._check = None if self._check(batch) else self._check
        with torch.enable_grad():
            return self._of_parts(closure, kwargs, parts)

    def _of_parts(self, closure: Any, kwargs: OrderedDict[str, Any], parts: list[Any]) -> Any:
        loop = self._trainer.fit_loop.epoch_loop.automatic_optimization
        samples = [self._layout.count(part) for part in parts]
        if closure._zero_grad_fn is not None:
            closure._zero_grad_fn()
        found, logged = [], _Logged(self._module)
        for number, (part, count) in enumerate(zip(parts, samples, strict=True), 1):
            is_last = number == len(parts)
            with _block_parallel_sync_behavior(self._trainer.strategy, block=not is_last), logged.by(count):
                result = loop._make_step_fn(OrderedDict(kwargs, batch=part))()
                if result.closure_loss is not None and closure._backward_fn is not None:
                    closure._backward_fn(result.closure_loss * (count / sum(samples)))
            result.closure_loss = None  # with its graph
            found.append(result)
        logged.log()
        return _joined(found, samples, self._whole)


class _Logged:
    """Keeps what a module logs in the parts of a batch, to log it once, as of the batch."""

    def __init__(self, module: LightningModule) -> None:
        self._modules = [each for each in module.modules() if isinstance(each, LightningModule)]
        self._calls: dict[tuple[int, str], list[tuple[float, Any, dict[str, Any]]]] = {}

    @contextmanager
    def by(self, samples: int) -> Iterator[None]:
        """Keep what is logged within the context, as values of a part with this number of samples."""
        with ExitStack() as changes:
            for place, module in enumerate(self._modules):
                changes.callback(replace_attribute(module, "log", partial(self._keep, place, samples)))
            yield

    def log(self) -> None:
        """Log the kept values, each once for the batch."""
        for (place, name), calls in self._calls.items():
            module, options = self._modules[place], calls[-1][2]
            if options.get("batch_size") is not None:
                options = {**options, "batch_size": sum(each["batch_size"] for _, _, each in calls)}
            before, module._current_fx_name = module._current_fx_name, _HOOK
            try:
                module.log(name, _reduced(calls, options.get("reduce_fx", "mean")), **options)
            finally:
                module._current_fx_name = before

    def _keep(self, place: int, samples: int, name: str, value: Any, *args: Any, **options: Any) -> None:
        named = dict(zip(("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx"), args, strict=False))
        options = {**named, **options}
        if isinstance(value, Tensor):
            value = value.detach()
        weight = options.get("batch_size") or samples
        self._calls.setdefault((place, name), []).append((float(weight), value, options))


def _reduced(calls: list[tuple[float, Any, dict[str, Any]]], reduce: Any) -> Any:
    """The value of a batch from those of its parts: their mean by samples, sum, or extreme; else the last."""
    values, total = [value for _, value, _ in calls], sum(weight for weight, _, _ in calls)
    if len(values) == 1 or not all(isinstance(value, int | float | Tensor) for value in values):
        return values[-1]  # a metric, which each part updated
    if reduce in ("mean", torch.mean):
        return sum(value * (weight / total) for weight, value, _ in calls)
    if reduce in ("sum", torch.sum):
        return sum(values)
    if reduce in ("min", torch.min, "max", torch.max):
        return (min if reduce in ("min", torch.min) else max)(values)
    return values[-1]


def _joined(found: list[Any], samples: list[int], whole: int) -> Any:
    """Join what `training_step` returned for the parts of a batch, as if it had run the whole batch."""
    skipped = [each.loss is None for each in found]
    if any(skipped):
        if not all(skipped):
            raise UsageError(
                "training_step returned None for a part of a batch and a loss for others, so the batch is "
                f"neither trained on nor skipped. Pass micro_batch_size={whole} to plan()."
            )
        return found[-1]
    last = found[-1]
    last.loss = sum(each.loss * (count / sum(samples)) for each, count in zip(found, samples, strict=True))
    for name, value in last.extra.items():
        values = [each.extra.get(name) for each in found]
        if all(
            isinstance(each, Tensor) and each.dim() > 0 and len(each) == count
            for each, count in zip(values, samples, strict=True)
        ):
            last.extra[name] = torch.cat(values)
        elif all(isinstance(each, Tensor) and each.dim() == 0 and each.is_floating_point() for each in values):
            last.extra[name] = _reduced(
                [(n, each, {}) for n, each in zip(samples, values, strict=True)], "mean"
            )
        else:
            last.extra[name] = value
    return last
