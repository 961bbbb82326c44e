"""Recompute a module's forward during backward instead of keeping what it saved.

Non-reentrant `torch.utils.checkpoint` does the work. What it leaves wrong is put right here: buffers that the
forward changes (BatchNorm's running statistics and counters, spectral norm's vectors) would change a second
time in the recomputation. The recomputation works on throwaway copies of such buffers instead, with the values
they had before the first forward. (BatchNorm counting twice is a known open bug of plain checkpointing.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint


class RecomputedForward:
    """Stands in for a module's `forward` and recomputes it in backward.

    It is set as an attribute of the instance, so the class, the parameters' names, `state_dict` and hooks stay
    as they were. Outside of gradient computation it calls the original forward straight.

    Args:
        module: The unit.
        forward: Its original forward, bound.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.forward = forward
        self._buffers = _ForwardBuffers([module])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the original forward returns."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return _recomputed(self.forward, self._buffers, *args, **kwargs)


class RecomputedRuns:
    """Stands in for the `forward` of a Sequential and recomputes some runs of its children.

    Args:
        sequential: The module whose children make up the runs.
        forward: Its original forward, bound.
        runs: Names of the first and last child of each recomputed run.
    """

    def __init__(
        self,
        sequential: nn.Sequential,
        forward: Callable[..., Any],
        runs: Sequence[tuple[str, str]],
    ) -> None:
        self.forward = forward
        self._parts: list[tuple[_Run, _ForwardBuffers | None]] = []
        names = list(sequential._modules)
        position = 0
        for first, last in sorted(runs, key=lambda run: names.index(run[0])):
            start, stop = names.index(first), names.index(last) + 1
            self._parts += [(_Run([sequential[i]]), None) for i in range(position, start)]
            children = [sequential[i] for i in range(start, stop)]
            self._parts.append((_Run(children), _ForwardBuffers(children)))
            position = stop
        self._parts += [(_Run([sequential[i]]), None) for i in range(position, len(names))]

    def __call__(self, value: Any) -> Any:
        """What the Sequential returns."""
        for run, buffers in self._parts:
            recomputes = buffers is not None and torch.is_grad_enabled()
            value = _recomputed(run, buffers, value) if recomputes else run(value)
        return value


class _Run:
    """Consecutive modules, each called with what the one before it returned."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules

    def __call__(self, value: Any) -> Any:
        for module in self._modules:
            value = module(value)
        return value


def _recomputed(
    function: Callable[..., Any], buffers: _ForwardBuffers | None, *args: Any, **kwargs: Any
) -> Any:
    assert buffers is not None
    return checkpoint(function, *args, use_reentrant=False, context_fn=buffers.contexts, **kwargs)


class _ForwardBuffers:
    """Keeps the buffers of some modules from changing twice."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._module = nn.ModuleList(modules)
        self._changing: frozenset[tuple[str, str]] | None = None
        """(module path, buffer name) of those that a forward changes; None before the first forward."""

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """The context of the forward and that of its recomputation, as `checkpoint` asks for them."""
        if next(self._module.buffers(), None) is None:
            return nullcontext(), nullcontext()
        before: dict[tuple[str, str], Tensor] = {}
        return self._watched(before), self._stood_in_for(before)

    @contextmanager
    def _watched(self, before: dict[tuple[str, str], Tensor]) -> Iterator[None]:
        """Leave in `before` what the recomputation must work on."""
        buffers = dict(_named_buffers(self._module))
        candidates = buffers.keys() if self._changing is None else self._changing & buffers.keys()
        before.update({key: buffers[key].clone() for key in candidates})
        stamps = {key: _stamp(buffer) for key, buffer in buffers.items()}
        yield
        if self._changing is None:
            after = dict(_named_buffers(self._module))
            changed = frozenset(key for key in buffers if _stamp(after.get(key)) != stamps[key])
            self._changing = changed | frozenset(_running_statistics(self._module))
        for key in before.keys() - self._changing:
            del before[key]

    @contextmanager
    def _stood_in_for(self, before: dict[tuple[str, str], Tensor]) -> Iterator[None]:
        """Let copies take the place of the changing buffers for the recomputation."""
        modules = dict(self._module.named_modules())
        real = {(path, name): modules[path]._buffers[name] for path, name in before}
        try:
            for (path, name), copy in before.items():
                modules[path]._buffers[name] = copy
            yield
        finally:
            for (path, name), buffer in real.items():
                modules[path]._buffers[name] = buffer


def _stamp(buffer: Tensor | None) -> tuple[int, int] | None:
    """What changes when a buffer is replaced or written to."""
    return None if buffer is None else (id(buffer), buffer._version)


def _named_buffers(module: nn.Module) -> Iterator[tuple[tuple[str, str], Tensor]]:
    for path, child in module.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is not None:
                yield (path, name), buffer


def _running_statistics(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Buffers of normalisation layers, which change in training mode even if the first call was in another."""
    for path, child in module.named_modules():
        if isinstance(child, _NormBase):
            for name, buffer in child._buffers.items():
                if buffer is not None:
                    yield path, name
